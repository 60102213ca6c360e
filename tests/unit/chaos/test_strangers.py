"""Strangers that attack a play: their orders, how they are started, their bodies, and what is made of it all."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import pytest

from peers.chaos.faults import CannotInflict, Strangers
from peers.chaos.figures import StepClosing, _of_strangers
from peers.chaos.lives import Struck
from peers.chaos.strangers.attacks import DOERS, PlainBody, Stranger, methods
from peers.chaos.strangers.bodies import all_rpcs, oversized
from peers.chaos.strangers.findings import (
    ATTACKS,
    PROGRAM,
    REPORT,
    StrangerFindings,
    StrangerOrders,
    orders_from,
    read_findings,
)
from peers.chaos.verdict import _of_strangers as problems_of
from peers.chaos.world import PeerSpec
from peers.invites.invite import invite_to
from swarm.errors import ConfigError, Refused
from swarm.ids import PeerId, RunId
from swarm.network.discovery.manifest import GET, ManifestSizes
from swarm.network.protocols import MAX_BODY_BYTES, Rpc
from swarm.network.rpc.strangers import MAX_STRANGER_BODY_BYTES
from swarm.step.observe_messages import HASH, STANDING, RecordHash, RunStanding
from tests.harness.rigs.chaos import Processes, contained

PEER = "12D3KooWEn4eprskT5AQb34aKP4XR4pozkzjxYyq8CqCbWHvenTZ"
AT = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
RUN = RunId("ab" * 32)
INVITE = invite_to(RUN, "a-run", [AT])
ATTACK = Strangers(("host-0",), ("large", "methods"), 9.0, count=2, knows="address", seed=3)


def test_strangers_are_told_by_arguments_what_to_do() -> None:
    orders = StrangerOrders(at=(AT,), run=RUN, targets=("A", "B"), attacks=ATTACKS, identities=3, seconds=7.5, seed=4)
    of_world = ["--json", "--home", "/h", "--listen", "/ip4/127.0.0.1/tcp/1"]
    assert orders_from([*orders.arguments(), *of_world]) == (Path("/h"), orders)


@pytest.mark.parametrize("host", ["ip4/93.184.216.34", "dns4/example.org"])
def test_strangers_attack_nobody_outside_private_networks(host: str) -> None:
    orders = StrangerOrders(at=(f"/{host}/tcp/4001/p2p/{PEER}",), run=None, targets=("A",), attacks=("small",))
    with pytest.raises(ConfigError, match="the play's own peers only"):
        orders_from([*orders.arguments(), "--home", "/h"])


@pytest.mark.parametrize("identities", [1, 2, 6, 20])
def test_every_attack_is_done_by_somebody(identities: int) -> None:
    orders = StrangerOrders(at=(AT,), run=None, targets=("A",), attacks=ATTACKS, identities=identities)
    does = [orders.attacks_of(number) for number in range(identities)]
    assert {attack for some in does for attack in some} == set(ATTACKS) == set(DOERS)
    for attack in ATTACKS:
        assert sum(orders.share_of(attack) for some in does if attack in some) == pytest.approx(1.0)


# --- how they are started --------------------------------------------------------------------------------------------


def _host(name: str) -> PeerSpec:
    return PeerSpec(name=name, role="stage", arguments=("join", INVITE.text()))


@pytest.mark.parametrize("knows", ["address", "run"])
def test_strangers_are_started_beside_the_peers_and_know_no_more_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: str
) -> None:
    processes = Processes(tmp_path, monkeypatch)
    world = processes.world
    processes.add(_host("host-0"))
    world.peers["host-0"].identity = PEER
    with world:
        fault = Strangers(("host-0",), ("large", "methods"), 9.0, knows="run" if knows == "run" else "address")
        assert tuple(world.inflict(fault)) == ("host-0", "strangers-1")
        spec = world.peers["strangers-1"].spec
        assert spec.program == PROGRAM
        _, orders = orders_from(world.arguments(world.peers["strangers-1"]))
        assert orders.run == (RUN if knows == "run" else None)
        assert (orders.at, orders.targets, orders.attacks) == ((AT,), (PEER,), ("large", "methods"))
        assert INVITE.text() not in spec.arguments


def test_strangers_who_would_attack_nobody_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(tmp_path, monkeypatch)
    with processes.world as world:
        with pytest.raises(CannotInflict, match="nobody has an invite"):
            world.inflict(ATTACK)
        processes.add(_host("host-0"))
        processes.end("host-0")
        with pytest.raises(CannotInflict, match="host-0 does not run now"):
            world.inflict(ATTACK)


def test_container_of_strangers_runs_their_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peers.chaos import container_start

    world, engine, _ = contained(tmp_path, "host-0")
    world.specs.joiner = _host("host-0")
    world.peers["host-0"].identity = PEER
    started: list[PeerSpec] = []
    monkeypatch.setattr(world, "start", started.append)
    assert tuple(world.inflict(ATTACK)) == ("host-0", "strangers-1")
    peer = container_start.Contained(started[0], tmp_path / "homes" / "strangers-1")
    monkeypatch.setattr(world.networks, "options", lambda spec: [])
    monkeypatch.setattr(world.networks, "connect", lambda spec, name: None)
    monkeypatch.setattr(world.networks, "arrive", lambda *_: None)
    engine.answers["inspect"] = "7"
    container_start.begin(world, peer, "image")
    (created,) = (call for call in engine.calls if call[0] == "create")
    assert any(f"exec python3 -m {PROGRAM}" in word for word in created)


# --- what they send --------------------------------------------------------------------------------------------------


def test_bodies_that_are_too_long_for_strangers_are_not_for_members() -> None:
    sizes = [len(msgpack.packb(body)) for body in itertools.islice(oversized(random.Random(1)), 9)]
    assert all(MAX_STRANGER_BODY_BYTES < size <= MAX_BODY_BYTES for size in sizes)


class _Open:
    """In place of an endpoint: a run in which strangers are told of a record, of the manifest, and of nothing else."""

    def __init__(self) -> None:
        self.peer, self.asked = PeerId("me"), list[tuple[PeerId, str]]()

    async def call(self, target: PeerId, rpc: Rpc[Any, Any], body: PlainBody, **_: object) -> tuple[Any, bytes]:
        self.asked.append((target, rpc.name))
        answers: Mapping[str, Any] = {
            STANDING.name: RunStanding.model_construct(closed=5),
            HASH.name: RecordHash(digest="0" * 64),
            GET.name: ManifestSizes(manifest_bytes=1, file_bytes=(0,)),
        }
        if rpc.name not in answers:
            raise Refused("not to strangers")
        return answers[rpc.name], b""


async def test_methods_that_answer_strangers_are_told() -> None:
    endpoint, found = _Open(), StrangerFindings()
    targets = (PeerId("A"), PeerId("B"))
    stranger = Stranger(endpoint, RUN, targets, random.Random(1), {"methods": 1.0}, found)  # type: ignore[arg-type]
    await methods(stranger)
    assert set(found.answered) == {STANDING.name, HASH.name, GET.name}
    assert set(endpoint.asked) == {(target, rpc.name) for target in targets for rpc in all_rpcs()}
    assert found.outcomes["Refused"] + found.outcomes["answered"] == found.calls == len(endpoint.asked)


async def test_stranger_who_knows_no_run_calls_public_methods_only() -> None:
    endpoint = _Open()
    stranger = Stranger(endpoint, None, (PeerId("A"),), random.Random(1), {"methods": 1.0}, StrangerFindings())  # type: ignore[arg-type]
    await methods(stranger)
    assert {name for _, name in endpoint.asked} == {rpc.name for rpc in all_rpcs() if rpc.public}


# --- what is made of it ----------------------------------------------------------------------------------------------


def test_steps_that_are_kept_are_those_beside_a_sink() -> None:
    closed = [StepClosing(step, 0.5 * step, 10, 1.0) for step in range(20)]  # two a second
    closed += [StepClosing(20 + step, 10.0 + step, 10, 1.0) for step in range(11)]  # one a second
    turns = [("sink", 0.0, 9.9), ("peers", 10.0, 20.0)]
    one = {"turns": turns, "bytes": 5_000_000, "calls": 100, "answered": {"a": 1}}
    told = _of_strangers([one, {**one, "turns": [], "answered": {"a": 2, "b": 1}}], closed)
    assert told == {
        "strangers_kept": 0.5,
        "strangers_answered": 2,
        "strangers_s": 10.0,
        "strangers_mb_s": 1.0,
        "strangers_calls_s": 20.0,
    }
    assert set(_of_strangers([], closed).values()) == {None}


def test_report_is_read_by_the_play_s_clock(tmp_path: Path) -> None:
    found = StrangerFindings(turns=[("peers", 1.0, 2.0)], calls=3, problems=["small: KeyError"])
    found.write(tmp_path / "homes" / "strangers-1" / REPORT)
    (read,) = read_findings([tmp_path / "homes", tmp_path / "lost"], 100.0)
    assert (read["name"], read["calls"], read["turns"]) == ("strangers-1", 3, [("peers", 101.0, 102.0)])
    assert json.dumps(read)
    strikes = [Struck(1.0, "strangers", "", ()), Struck(2.0, "kill", "", ())]
    assert problems_of(strikes, [read]) == ["strangers-1: small: KeyError"]
    assert problems_of(strikes, []) == ["1 of 1 processes of strangers left no report: see their logs"]
