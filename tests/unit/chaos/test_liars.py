"""Members that lie: their orders, how they are started, and that each lie is about methods that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from peers.chaos.faults import Restart
from peers.chaos.liars.lies import LIES, Liar, lying
from peers.chaos.liars.orders import KINDS, PROGRAM, parse_lie, read_lies, write_lies
from swarm.errors import ConfigError
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.optim.part import TrainedPart
from swarm.pipeline.compute import BackwardResult, Material, StageCompute
from tests.harness.rigs.chaos import Processes


@pytest.mark.parametrize(
    ("text", "lie"),
    [("late", ("late", 1.0)), ("labels:0.02", ("labels", 0.02)), ("output-x1.5:1", ("output-x1.5", 1.0))],
)
def test_lie_has_a_kind_and_a_rate(text: str, lie: tuple[str, float]) -> None:
    assert parse_lie(text) == lie


@pytest.mark.parametrize("text", ["", "lat", "late:", "late:0", "late:0.0", "late:2", "outputx-1"])
def test_lie_that_nobody_knows_or_that_is_never_told_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="KIND:RATE"):
        parse_lie(text)


def test_kinds_are_those_that_can_be_told() -> None:
    assert set(KINDS) == set(LIES)


@pytest.mark.parametrize("kind", KINDS)
def test_lie_replaces_methods_of_the_product_while_it_is_told(kind: str) -> None:
    honest = [getattr(seam.owner, seam.method) for seam in LIES[kind]]
    with lying(Liar(kind, mine=lambda: False)):
        assert all(getattr(seam.owner, seam.method) is not one for seam, one in zip(LIES[kind], honest, strict=True))
    assert [getattr(seam.owner, seam.method) for seam in LIES[kind]] == honest


def test_lie_is_told_at_its_rate_and_the_same_each_time() -> None:
    liar = Liar("labels", rate=0.1, seed=3)
    told = [about for about in range(1000) if liar.lies(about)]
    assert 70 < len(told) == liar.fired < 130
    assert [about for about in range(1000) if liar.lies(about)] == told
    assert liar.fired == len(told)
    assert liar.random(7).initial_seed() == liar.random(7).initial_seed() != liar.random(8).initial_seed()


def test_gradient_that_is_handed_back_is_another_and_what_is_added_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    honest = BackwardResult(torch.full((2, 3), 0.5), "rest", 1.0, 6)
    monkeypatch.setattr(StageCompute, "_backward", lambda compute, material, *more: honest)
    compute = cast(Any, StageCompute.__new__(StageCompute))
    work = StepWork(1, MicrobatchId(PeerId("t"), "00" * 8, 0, 0))
    with lying(Liar("gradient-x-50")) as liar:
        told = compute._backward(Material(work=work, seed=0, first=False, input=b""), None)
    assert torch.equal(told.grad_input, honest.grad_input * -50)
    assert told[1:] == honest[1:]
    assert liar.fired == 1


def test_only_the_liar_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Part:
        step = 4

    monkeypatch.setattr(TrainedPart, "contribution", lambda part: torch.ones(2))
    me = "liar"
    with lying(Liar("sum-x-10", mine=lambda: me == "liar")) as liar:
        lie = TrainedPart.contribution(Part())  # type: ignore[call-arg, arg-type]
        me = "another"
        truth = TrainedPart.contribution(Part())  # type: ignore[call-arg, arg-type]
    assert (lie.tolist(), truth.tolist(), liar.fired) == ([-10.0, -10.0], [1.0, 1.0], 1)  # type: ignore[union-attr]


def test_peer_that_is_to_lie_is_started_again_as_the_program_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(tmp_path, monkeypatch, "host-0")
    with processes.world as world:
        fault = Restart("host-0", lie="late:0.5")
        assert (tuple(world.inflict(fault)), fault.name) == (("host-0",), "lie")
        peer = world.peers["host-0"]
        assert (len(peer.starts), peer.spec.program) == (2, PROGRAM)
        assert world.arguments(peer)[:3] == ["join", "--lie", "late:0.5"]


def test_liars_write_down_how_often_they_lied(tmp_path: Path) -> None:
    for name, fired in (("host-0", 3), ("trainer-1", 0)):
        (tmp_path / "homes" / name).mkdir(parents=True)
        write_lies(tmp_path / "homes" / name, "late", fired)
    assert read_lies([tmp_path / "homes"]) == {"host-0": 3, "trainer-1": 0}
