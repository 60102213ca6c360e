"""Where a peer gets the frozen weights of its part: its disk, the model's files, or others."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from peers.frozen import with_frozen
from swarm.config import Manifest, RunConfig, TokenizerConfig
from swarm.disk import reserved_bytes
from swarm.errors import ConfigError, Incompatible, StateError
from swarm.events import FrozenFetching, FrozenReady
from swarm.ids import PartName
from swarm.membership import parts
from swarm.membership.parts import FrozenPart, Sparing, ensure_frozen
from swarm.membership.roles import PeerContext
from swarm.models.lora_config import BaseDType, LoraConfig
from swarm.models.registry import family_of, lora_of
from swarm.models.spec import SplitConfig
from swarm.planning.costs import founding_bytes, storing_bytes
from swarm.sim.network import SimNetwork
from swarm.state.frozen import FrozenService, FrozenStore, ModelFiles
from swarm.waiting import TokenBucket
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.common import EventList
from tests.harness.rigs.foreign import foreign_model
from tests.harness.rigs.models import MODEL

STAGE = PartName("stage-0")


def manifest_of(lora: LoraConfig | None = None, seed: int = 0) -> Manifest:
    model = MODEL.model_copy(update={"lora": lora or LoraConfig(rank=4, base="bfloat16")})
    return Manifest(model=model, run=RunConfig(seed=seed), tokenizer=TokenizerConfig(digest="0" * 64))


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, FrozenStore]:
    """What a founder names and keeps, for others to read."""
    store = FrozenStore(tmp_path_factory.mktemp("founder"))
    return with_frozen(manifest_of(), None, store, lambda _: None), store


async def around(manifest: Manifest, files: ModelFiles, donors: dict[str, Any]) -> Any:
    network = SimNetwork(LoopClock())
    endpoint = network.endpoint("me")
    for name, service in donors.items():
        other = network.endpoint(name)
        other.mount(service)
        await other.enter(manifest.run_id)
    await endpoint.enter(manifest.run_id)
    found = SimpleNamespace(manifest=manifest, files=files, endpoint=endpoint, clock=LoopClock(), events=EventList())
    return cast(PeerContext, found)


def digests(manifest: Manifest) -> dict[PartName, str]:
    lora = lora_of(manifest.model)
    assert lora is not None
    return {PartName(part): found for part, found in lora.digests.items()}


def test_founder_keeps_all_parts_and_names_them(tmp_path: Path) -> None:
    store, told, so_far = FrozenStore(tmp_path), list[str](), list[tuple[str, float, float]]()
    manifest = with_frozen(manifest_of(), None, store, told.append, lambda *told: so_far.append(told))
    assert set(digests(manifest)) == {"stage-0", "stage-1", "ends"}
    assert {one.digest for one in store.listing()} == set(digests(manifest).values())
    assert len(told) == 3
    ((_, first, total), *_, (_, last, _)) = so_far
    assert (len(so_far), first, 0 < last < total) == (3, 0, True)
    assert with_frozen(manifest, None, store, told.append) == manifest
    assert len(told) == 3  # nothing was made again


@pytest.mark.parametrize(("base", "stages"), [("nf4", 1), ("float32", 2)])
def test_founder_needs_no_more_memory_for_them_than_is_predicted(base: BaseDType, stages: int, tmp_path: Path) -> None:
    model = foreign_model("llama", hidden_size=64, intermediate_size=192, vocab_size=2048, num_hidden_layers=2)
    model = model.model_copy(update={"lora": LoraConfig(rank=2, base=base)})
    manifest = manifest_of().model_copy(update={"model": model})
    family, split = family_of(model), SplitConfig(stages=stages, ends="hosted")
    manifest = manifest.model_copy(update={"split": split})
    family.warm_up()
    with torch.profiler.profile(profile_memory=True) as seen:
        with_frozen(manifest, None, FrozenStore(tmp_path / base), lambda _: None)
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    peak = max(itertools.accumulate(event.nbytes() for event in changes))
    predicted = max(storing_bytes(model, spec) for spec in family.parts(split))
    assert peak <= 1.001 * predicted, "and some tables of angles"
    assert predicted <= 1.5 * peak
    assert founding_bytes(model, split) == 12 * family.cost(family.whole, model.context).parameters + predicted


def test_run_that_names_other_weights_than_are_here_is_refused(
    founded: tuple[Manifest, FrozenStore], tmp_path: Path
) -> None:
    manifest, _ = founded
    other = manifest.model_copy(update={"run": RunConfig(seed=1)})
    with pytest.raises(Incompatible, match="whose digest begins"):
        with_frozen(other, None, FrozenStore(tmp_path / "other"), lambda _: None)


def test_targets_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    manifest = manifest_of(LoraConfig(targets=("q_proj",)))  # ours is called otherwise
    with pytest.raises(ConfigError, match="targets"):
        with_frozen(manifest, None, FrozenStore(tmp_path), lambda _: None)


async def test_they_come_from_peers_once(founded: tuple[Manifest, FrozenStore], tmp_path: Path) -> None:
    manifest, store = founded
    here = FrozenStore(tmp_path / "here")
    donors = {"empty": FrozenService(FrozenStore(tmp_path / "empty"), digests(manifest)),
              "founder": FrozenService(store, digests(manifest))}  # fmt: skip
    me = await around(manifest, ModelFiles(frozen=here), donors)
    for _ in range(2):
        part = await ensure_frozen(me, STAGE, tuple(donors))
        assert part is not None
        assert part.here
    assert [one.part for one in me.events.of(FrozenFetching)] == [STAGE]
    assert [one.source for one in me.events.of(FrozenReady)] == ["peers"]
    assert part.load().keys() == FrozenPart(manifest, STAGE, store).load().keys()


async def test_files_of_the_model_are_read_where_they_give_the_same(
    founded: tuple[Manifest, FrozenStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, store = founded
    me = await around(manifest, ModelFiles(tmp_path, FrozenStore(tmp_path / "here")), {})
    await ensure_frozen(me, STAGE, ())
    assert [one.source for one in me.events.of(FrozenReady)] == ["files"]
    other = manifest.model_copy(update={"run": RunConfig(seed=1)})  # as if they were another model's
    service = {"founder": FrozenService(store, digests(manifest))}
    late = await around(other, ModelFiles(tmp_path, FrozenStore(tmp_path / "late")), service)
    with caplog.at_level(logging.WARNING):
        await ensure_frozen(late, STAGE, tuple(service))
    assert "have others" in caplog.text
    assert [one.source for one in late.events.of(FrozenReady)] == ["peers"]


async def test_disk_without_room_says_how_much_is_to_come(
    founded: tuple[Manifest, FrozenStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = founded
    me = await around(manifest, ModelFiles(frozen=FrozenStore(tmp_path / "here")), {})
    monkeypatch.setattr(parts, "free_bytes", lambda path: 1000)
    with pytest.raises(StateError, match="B are free in"):
        await ensure_frozen(me, STAGE, ())
    assert me.events.of(FrozenFetching)[0].bytes_free == 1000


class Pace(TokenBucket):
    def __init__(self) -> None:
        super().__init__(1e12, 1e12)
        self.taken = 0.0

    def take(self, size: float, now: float) -> None:
        self.taken += size


async def test_those_of_a_copy_come_at_its_pace_and_leave_some_of_the_disk_free(
    founded: tuple[Manifest, FrozenStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, store = founded
    service = {"founder": FrozenService(store, digests(manifest))}
    me = await around(manifest, ModelFiles(frozen=FrozenStore(tmp_path / "here")), service)
    part = FrozenPart(manifest, STAGE, FrozenStore(tmp_path / "here"))
    enough = part.begun().lacking_bytes + 1000
    refused: list[str] = []
    sparing = Sparing(pace=Pace(), refuses=refused.append)
    monkeypatch.setattr(parts, "reserved_bytes", lambda path: 1000)
    monkeypatch.setattr(parts, "free_bytes", lambda path: enough - 1)
    with pytest.raises(StateError, match="B of them stay free"):
        await ensure_frozen(me, STAGE, tuple(service), sparing)
    assert [str(tmp_path / "here") in reason for reason in refused] == [True]
    assert me.events.events == []
    monkeypatch.setattr(parts, "free_bytes", lambda path: enough)
    await ensure_frozen(me, STAGE, tuple(service), sparing)
    assert part.here
    assert sparing.pace.taken == part.layout.bytes  # type: ignore[attr-defined]
    assert len(refused) == 1


@pytest.mark.parametrize(("total", "reserved"), [(4 << 30, 1 << 30), (100 << 30, 5 << 30)])
def test_reserve_of_a_disk_is_a_twentieth_and_not_too_little(
    total: int, reserved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(total=total))
    assert reserved_bytes(tmp_path / "not" / "there") == reserved
    assert asked == [tmp_path]


async def test_those_of_its_own_part_may_fill_the_disk(
    founded: tuple[Manifest, FrozenStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, store = founded
    service = {"founder": FrozenService(store, digests(manifest))}
    me = await around(manifest, ModelFiles(frozen=FrozenStore(tmp_path / "here")), service)
    part = FrozenPart(manifest, STAGE, FrozenStore(tmp_path / "here"))
    monkeypatch.setattr(parts, "free_bytes", lambda path: part.begun().lacking_bytes)
    await ensure_frozen(me, STAGE, tuple(service))
    assert part.here


async def test_nobody_has_them(founded: tuple[Manifest, FrozenStore], tmp_path: Path) -> None:
    manifest, _ = founded
    donors = {"empty": FrozenService(FrozenStore(tmp_path / "empty"), digests(manifest))}
    me = await around(manifest, ModelFiles(frozen=FrozenStore(tmp_path / "here")), donors)
    with pytest.raises(StateError, match="nobody"):
        await ensure_frozen(me, STAGE, ())
    nowhere = await around(manifest, ModelFiles(), donors)
    with pytest.raises(StateError, match="nowhere to keep"):
        await ensure_frozen(nowhere, STAGE, ())


def test_run_that_names_no_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="found it anew"):
        FrozenPart(manifest_of(), STAGE, FrozenStore(tmp_path))
