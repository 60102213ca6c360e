"""A part too large for a machine is refused before anything is downloaded; a stage with too large graphs recomputes."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.errors import ConfigError, StateError
from swarm.ids import PartName
from swarm.membership import memory as accounts
from swarm.membership import part_memory, rules
from swarm.membership.parts import build_empty, check_strips
from swarm.models.registry import family_of
from swarm.optim.swapped_part import Home
from swarm.planning.costs import GRAPH_SHARE, ROUND_BYTES, apart_bytes, graph_bytes, training_bytes
from swarm.sim import device as sim_device
from swarm.sim.device import InlineDevice
from swarm.state.snapshot import initial_snapshot
from tests.harness.rigs.membership import manifest as manifest_of


def around_of(manifest: Any) -> Any:
    device = InlineDevice(torch.device("cpu"))
    return SimpleNamespace(manifest=manifest, device=device, home=None)


def test_part_that_does_not_fit_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of()
    around = around_of(manifest)
    name = PartName("stage-0")
    needed = training_bytes(manifest.model, rules.spec_of(manifest, name), exact=manifest.run.reproducible)
    monkeypatch.setattr(sim_device, "free_memory", lambda device: needed - 1)
    with pytest.raises(StateError, match=r"training stage-0 takes .*B of memory are free here"):
        part_memory.check_memory(around, name)
    monkeypatch.setattr(sim_device, "free_memory", lambda device: needed)
    part_memory.check_memory(around, name)


def test_part_whose_state_is_on_a_disk_has_to_fit_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = around_of(manifest_of())
    around.home = Home(directory=tmp_path)
    assert part_memory.lacking_memory(around, PartName("stage-0")) == ""
    monkeypatch.setattr(part_memory, "free_bytes", lambda directory: 1)
    found = part_memory.lacking_memory(around, PartName("stage-0"))
    assert found.endswith(f"and 1 B of the disk of {tmp_path} are free here")


class Accelerator(InlineDevice):
    """A device apart, with so much memory; nothing is computed on it."""

    def __init__(self, name: str, host: int, own: int) -> None:
        super().__init__(torch.device(name))
        self.host, self.own = host, own

    def free_memory(self) -> int:
        return self.own

    def free_host_memory(self) -> int:
        return self.host


def test_part_has_to_fit_into_a_gpu_and_what_lies_beside_it_into_the_machine() -> None:
    manifest = manifest_of()
    name, spec = PartName("stage-0"), rules.spec_of(manifest, PartName("stage-0"))
    own = apart_bytes(manifest.model, spec, exact=manifest.run.reproducible)
    both = sum(part_memory.part_bytes(manifest, spec, apart=True).values())
    assert 0 < own < both

    def lacking(kind: str, host: int, own: int) -> str:
        around = SimpleNamespace(manifest=manifest, device=Accelerator(kind, host, own), home=None)
        return part_memory.lacking_memory(cast(Any, around), name)

    assert lacking("cuda:1", both - own, own) == ""
    assert "B of memory are free here" in lacking("cuda:1", both - own - 1, own)
    assert "B of memory of cuda:1 are free here" in lacking("cuda:1", both - own, own - 1)
    two = apart_bytes(manifest.model, spec, exact=manifest.run.reproducible, devices=2)
    assert own / 2 < two < own, "norms are on the first device alone"
    assert lacking("mps", both, own) == ""
    assert "B of memory are free here" in lacking("mps", both - 1, both), "its memory is the machine's"


def test_what_a_part_and_a_copy_take_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of()
    asked: list[object] = []

    def counted(usual: Any) -> Any:
        return lambda manifest, spec, **more: asked.append(spec.name) or usual(manifest, spec, **more)

    monkeypatch.setattr(accounts, "part_bytes", counted(accounts.part_bytes))
    monkeypatch.setattr(accounts, "copy_bytes", counted(accounts.copy_bytes))
    monkeypatch.setattr(accounts, "copies_of", lambda *_: (PartName("stage-1"),))
    endpoint = SimpleNamespace(peer="me")
    around = SimpleNamespace(manifest=manifest, device=InlineDevice(torch.device("cpu")), endpoint=endpoint, home=None)
    run: Any = SimpleNamespace(around=around, position=SimpleNamespace(roster=("me",)))
    specs = [rules.spec_of(manifest, PartName(name)) for name in ("stage-0", "stage-0", "ends", "stage-0")]
    held = [SimpleNamespace(spec=spec, tensors=dict) for spec in specs]
    holding: Any = SimpleNamespace(role=None, part=None)
    other: Any = SimpleNamespace(tensors=list, means=list, held_bytes=0)
    account = accounts.MemoryAccount(run, holding, other, other, other)
    found = []
    for holding.part in held:
        found.append(account.report().predicted)
    assert sorted(map(str, asked)) == ["ends", "stage-0", "stage-1"]
    assert found[0] == found[1] == found[3] != found[2]
    assert all(one["copies"] for one in found)


async def test_host_moves_where_what_it_lets_go_makes_room_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two equal stages the state of one is here as a copy, and the other's sum is let go: what a round takes is not
    there yet."""
    manifest = manifest_of()
    around, to = around_of(manifest), PartName("stage-1")
    held = await build_empty(around, PartName("stage-0"))
    weights = family_of(manifest.model).initial_weights(manifest.run.seed, held.spec)
    held.install(initial_snapshot(held.spec.name, held.layout, weights))
    needed = ROUND_BYTES * held.layout.elements
    monkeypatch.setattr(sim_device, "free_memory", lambda device: needed)
    assert accounts.lacking_to_move(around, held, to, 0) == ""
    monkeypatch.setattr(sim_device, "free_memory", lambda device: needed - needed // 8)
    assert re.search("training stage-1 takes .*B more, and", accounts.lacking_to_move(around, held, to, 0))
    assert accounts.lacking_to_move(around, held, to, needed // 8) == "", "what the step's round holds goes with it"


@pytest.mark.parametrize(
    ("devices", "tensor", "reproducible", "said"),
    [
        ("mps", 1, True, "float64"),
        ("mps", 1, False, ""),
        ("cpu+cpu", 1, True, "strips of layers add up to other bits"),
        ("cpu+cpu", 1, False, ""),
        ("cpu+cpu+cpu", 4, True, "so many devices: 1, 2, 4"),
        ("cpu+cpu+cpu", 4, False, "every peer of this run computes 4 strips"),
        ("cpu+cpu", 4, True, ""),
        ("cpu", 4, True, ""),
    ],
)
def test_devices_that_cannot_compute_as_the_run_does_are_refused(
    devices: str, tensor: int, reproducible: bool, said: str
) -> None:
    manifest = manifest_of(run={"reproducible": reproducible})
    manifest = manifest.model_copy(update={"split": manifest.split.model_copy(update={"tensor": tensor})})
    named = [torch.device(name) for name in devices.split("+")]
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_strips(manifest, named)


@pytest.mark.parametrize("layers", [1, 0])
async def test_devices_among_which_nothing_can_be_shared_are_refused(layers: int) -> None:
    """What is not a number of heads, or has no layers."""
    manifest, three = manifest_of(), Several(3)
    with pytest.raises(ConfigError, match="attention heads" if layers else "nothing of ends can be cut") as refused:
        await build_empty(cast(Any, SimpleNamespace(manifest=manifest, device=three, home=None)),
                          PartName("stage-0" if layers else "ends"))  # fmt: skip
    assert refused.value.key == "device"


class Several(InlineDevice):
    """So many CPUs that share what is computed."""

    def __init__(self, number: int) -> None:
        super().__init__(torch.device("cpu"))
        self.number = number

    @property
    def torch_devices(self) -> tuple[torch.device, ...]:
        return (self.torch_device,) * self.number


class Part:
    """A stage that says whether it was told to checkpoint activations."""

    def __init__(self, spec: Any, elements: int) -> None:
        self.spec, self.layout = spec, SimpleNamespace(elements=elements)
        self.told: list[bool] = []

    def checkpoint_activations(self, on: bool) -> None:
        self.told.append(on)


def roster(replicas: int, trainers: int = 1) -> Any:
    return SimpleNamespace(trainers=("t",) * trainers, replicas=lambda part: ("h",) * replicas)


def test_last_stage_with_head_has_one_graph_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(ends="hosted")
    around = around_of(manifest)
    told = {}
    for name in ("stage-0", "stage-1"):
        spec = rules.spec_of(manifest, PartName(name))
        graph = graph_bytes(manifest.model, spec, manifest.batch.microbatch_size)
        needed = training_bytes(manifest.model, spec, exact=manifest.run.reproducible)
        monkeypatch.setattr(sim_device, "free_memory", lambda device, left=needed + int(graph / GRAPH_SHARE): left)
        part = Part(spec, 0)
        part_memory.GraphMemory(around, cast(Any, part), "auto", journeys=32).follow(roster(1))
        told[name] = part.told
    assert told == {"stage-0": [True], "stage-1": [False]}
