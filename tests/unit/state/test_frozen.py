"""Frozen weights on the disk, and handed to those of the same run who lack them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from swarm.clock import SystemClock
from swarm.errors import Refused, StateError, WrongStep
from swarm.ids import PartName, PeerId, RunId
from swarm.models.lora import BaseLayout
from swarm.sim.network import SimNetwork
from swarm.state.checkpoints.fetch import BegunFile, fetch_part
from swarm.state.frozen import FrozenService, FrozenStore, frozen_donor, wanted_frozen
from swarm.state.snapshot import CHUNK_BYTES

PART, RUN = PartName("stage-0"), RunId("5a" * 32)
LAYOUT = BaseLayout.of([("a", "nf4", (2048, 1024)), ("b", "bfloat16", (3, 5)), ("c", "float32", (7,))])


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=drawn) for slot in LAYOUT.slots}


@pytest.fixture
def store(tmp_path: Path) -> FrozenStore:
    return FrozenStore(tmp_path / "there")


def kept(store: FrozenStore, seed: int = 0) -> str:
    return store.keep(PART, LAYOUT, LAYOUT.pack(weights(seed)))


def test_what_is_kept_is_read_again_as_it_was(store: FrozenStore) -> None:
    found = kept(store)
    wanted = wanted_frozen(PART, LAYOUT, found)
    assert store.holds(wanted)
    assert LAYOUT.bytes > CHUNK_BYTES
    again = LAYOUT.views(store.load(wanted))
    assert torch.equal(again["c"], weights()["c"])  # type: ignore[arg-type]
    assert torch.equal(again["b"], weights()["b"].bfloat16())  # type: ignore[arg-type]
    before = store.place(found).stat().st_mtime_ns
    assert kept(store) == found
    assert store.place(found).stat().st_mtime_ns == before


def test_damaged_ones_are_refused_and_not_used(store: FrozenStore) -> None:
    wanted = wanted_frozen(PART, LAYOUT, kept(store))
    (file,) = store.place(wanted.digest).rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert store.holds(wanted)  # by its header
    with pytest.raises(StateError, match=r"does not match the digest.*made anew"):
        store.load(wanted)
    assert not store.holds(wanted)
    assert kept(store) == wanted.digest  # made anew
    assert store.holds(wanted)
    file.write_bytes(data[:1000])
    assert not store.holds(wanted)


def test_list_says_what_is_whole_and_what_is_begun(store: FrozenStore) -> None:
    assert store.listing() == []
    whole = kept(store)
    begun = wanted_frozen(PART, LAYOUT, "ab" * 32)
    BegunFile(store.place(begun.digest), begun, RUN).begin(bytes(32 * begun.cut.chunks))
    (store.root / "something else").mkdir()
    found = {one.digest: one for one in store.listing()}
    assert {digest: (one.part, one.whole) for digest, one in found.items()} == {
        whole: (PART, True),
        begun.digest: (PART, False),
    }
    store.remove(whole)
    assert [one.digest for one in store.listing()] == [begun.digest]
    with pytest.raises(StateError, match="no digest"):
        store.remove("../there")


async def test_peer_fetches_them_and_goes_on_where_it_was_killed(store: FrozenStore, tmp_path: Path) -> None:
    found = kept(store)
    wanted, here = wanted_frozen(PART, LAYOUT, found), FrozenStore(tmp_path / "here")
    network = SimNetwork(SystemClock())
    donor, reader = network.endpoint("donor"), network.endpoint("reader")
    donor.mount(FrozenService(store, {PART: found}))
    for endpoint in (donor, reader):
        await endpoint.enter(RUN)
    source = frozen_donor(reader, donor.peer)
    first = BegunFile(here.place(found), wanted, RUN)
    first.begin(await source.hashes(wanted))
    first.place(0, await source.chunk(wanted, 0, 5.0))  # and then it was killed
    asked = store.given[reader.peer]
    await fetch_part(BegunFile(here.place(found), wanted, RUN), [source], progress=lambda part, done, total: None)
    assert store.given[reader.peer] - asked == LAYOUT.bytes - CHUNK_BYTES
    assert torch.equal(here.load(wanted).view(torch.uint8), store.load(wanted).view(torch.uint8))
    assert [path.name for path in here.place(found).rglob("*") if path.is_file()] == [f"{PART}.safetensors"]


async def test_no_other_runs_weights_are_handed_out(store: FrozenStore) -> None:
    ours, others = kept(store, 0), kept(store, 1)
    network = SimNetwork(SystemClock())
    donor, reader = network.endpoint("donor"), network.endpoint("reader")
    donor.mount(FrozenService(store, {PART: ours}))
    for endpoint in (donor, reader):
        await endpoint.enter(RUN)
    source = frozen_donor(reader, PeerId(donor.peer))
    for wanted in (wanted_frozen(PART, LAYOUT, others), wanted_frozen(PartName("ends"), LAYOUT, ours)):
        with pytest.raises(Refused, match="no such frozen weights"):
            await source.hashes(wanted)
        with pytest.raises(Refused, match="no such frozen weights"):
            await source.chunk(wanted, 0, 5.0)
    shutil.rmtree(store.place(ours))
    with pytest.raises(WrongStep, match="not here"):
        await source.hashes(wanted_frozen(PART, LAYOUT, ours))
