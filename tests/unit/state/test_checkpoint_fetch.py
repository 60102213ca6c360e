"""Fetching checkpoints from donors that die, lie and stall, over the network in memory and from directories."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.clock import SystemClock
from swarm.errors import Busy, PeerError, Refused, StateError, Unreachable, Violation, WrongStep
from swarm.ids import PartName, PeerId, stage_part
from swarm.models.layout import FlatLayout
from swarm.sim.network import SimEndpoint, SimNetwork
from swarm.state import snapshot as chunks
from swarm.state.checkpoints import fetch as checkpoint_fetch
from swarm.state.checkpoints import format as checkpoint_format
from swarm.state.checkpoints.checkpoint_service import (
    CHUNK_OF_FILE,
    DESCRIBE_FILE,
    RECORD_OF,
    CheckpointService,
    RecordRequest,
)
from swarm.state.checkpoints.donors import DirectoryDonor, Donor, Offer, PeerDonor, lacking, plans
from swarm.state.checkpoints.fetch import BegunFile, Progress, fetch_part
from swarm.state.checkpoints.files import FORMAT, decode_manifest
from swarm.state.checkpoints.format import PartFile
from swarm.state.checkpoints.parts import (
    CheckpointManifest,
    held,
    load_file,
    load_part,
    part_path,
    step_directory,
    write_manifest,
    write_part,
)
from swarm.state.download import Data, Wanted
from swarm.state.sharing import MAX_WINDOW
from swarm.state.snapshot import digest, hashes_of
from swarm.state.transfer import ChunkRequest, DescribeRequest
from tests.harness.rigs.state import RUN, snapshot

BIG = FlatLayout.from_shapes([("a", (40, 33)), ("b", (7,)), ("c", ()), ("d", (0, 3)), ("e", (9, 9))])
"""23 chunks a vector of the size below, gaps between the parameters, and one parameter without any element."""
CHUNK = 256
CHUNKS = 69
S0, S1 = stage_part(0), stage_part(1)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(checkpoint_fetch, "PAUSE_S", 0.0)


def keep(root: Path, step: int, parts: Iterable[PartName] = (S0, S1), seed: int = 0) -> CheckpointManifest:
    """A step of which only some parts lie there."""
    states = [snapshot(step=step, part=part, layout=BIG, seed=seed) for part in (S0, S1)]
    record = CheckpointManifest(run=RUN, step=step, parts={str(one.part): digest(one) for one in states})
    write_manifest(root, record)
    for one in states:
        if one.part in parts:
            write_part(root, one, {"run": RUN})
    return record


def wanted(record: CheckpointManifest, part: PartName = S0) -> Wanted:
    return Wanted(part=part, step=record.step, digest=record.parts[part], layout=BIG)


def silent(part: PartName, done: int, total: int) -> None:
    """Progress that nobody looks at."""


async def fetch(
    here: Path, record: CheckpointManifest, donors: Sequence[Donor], part: PartName = S0, progress: Progress = silent
) -> Path:
    return await fetch_part(BegunFile(here, wanted(record, part), RUN), donors, progress=progress)


Twist = Callable[[int, Data], Data]


class Twisted:
    """A donor between which and the reader something happens: ``twist`` of a chunk's number and bytes may raise, or
    change the bytes."""

    def __init__(self, inner: Donor, name: str, twist: Twist) -> None:
        self._inner, self._name, self._twist = inner, name, twist
        self.asked: list[int] = []

    def __str__(self) -> str:
        return self._name

    async def offers(self) -> list[Offer[Donor]]:
        return await self._inner.offers()

    async def record(self, step: int) -> bytes:
        return await self._inner.record(step)

    async def hashes(self, state: Wanted) -> Data:
        return await self._inner.hashes(state)

    async def chunk(self, state: Wanted, number: int, timeout_s: float) -> Data:
        self.asked.append(number)
        return self._twist(number, await self._inner.chunk(state, number, timeout_s))


def as_it_is(number: int, data: Data) -> Data:
    return data


def lies(number: int, data: Data) -> Data:
    return bytes(len(data)) if number == 3 else data


def dies(number: int, data: Data) -> Data:
    if number >= 3:
        raise Unreachable("it died")
    return data


async def served(root: Path) -> tuple[SimEndpoint, PeerDonor]:
    """(reader's endpoint, the donor as a reader sees it)."""
    network = SimNetwork(SystemClock())
    donor, reader = network.endpoint("donor"), network.endpoint("reader")
    donor.mount(CheckpointService(root))
    for endpoint in (donor, reader):
        await endpoint.enter(RUN)
    return reader, PeerDonor(reader, donor.peer, timeout_s=60)


def right(here: Path, record: CheckpointManifest, seed: int = 0) -> set[int]:
    """The chunks of a begun file that are there."""
    return set(BegunFile(here, wanted(record), RUN).begin(hashes_of(snapshot(layout=BIG, seed=seed).buffers())))


async def piece(donor: Donor, state: Wanted, number: int = 0) -> bytes:
    return bytes(await donor.chunk(state, number, 5.0))


# --- the service ------------------------------------------------------------------------------------------------------


async def test_service_offers_lists_records_and_the_chunks_of_the_state_itself(tmp_path: Path) -> None:
    record = keep(tmp_path, 10, [S1])
    keep(tmp_path, 20, [])
    _, donor = await served(tmp_path)
    (offer,) = await donor.offers()
    assert (offer.step, offer.digests, tuple(offer.there)) == (10, record.parts, (S1,))
    assert decode_manifest(await donor.record(10), "it") == record
    buffers = snapshot(step=10, part=S1, layout=BIG).buffers()
    assert await donor.hashes(wanted(record, S1)) == hashes_of(buffers)
    found = b"".join([await piece(donor, wanted(record, S1), number) for number in range(CHUNKS)])
    assert found == b"".join(buffers)


@pytest.mark.parametrize(
    ("step", "part", "number", "error"),
    [(11, "stage-1", 0, WrongStep), (10, "stage-0", 0, WrongStep), (10, "stage-1", CHUNKS, Violation)],
)
async def test_service_refuses_what_is_not_there(
    tmp_path: Path, step: int, part: str, number: int, error: type[PeerError]
) -> None:
    record = keep(tmp_path, 10, [S1])
    reader, _ = await served(tmp_path)
    asked = ChunkRequest(step=step, part=part, digest=record.parts["stage-1"], chunk=number)
    with pytest.raises(error):
        await reader.call(PeerId("donor"), CHUNK_OF_FILE, asked, timeout_s=60, max_reply_bytes=CHUNK)


async def test_service_refuses_a_file_that_is_not_what_its_header_says_without_naming_its_path(tmp_path: Path) -> None:
    record = keep(tmp_path, 10)
    path = part_path(tmp_path, 10, S0)
    whole = path.read_bytes()
    other = hashes_of(snapshot(step=10, layout=BIG, seed=5).buffers()).hex().encode()
    right = hashes_of(snapshot(step=10, layout=BIG).buffers()).hex().encode()
    _, donor = await served(tmp_path)
    for bad in (whole[:-1], whole.replace(right, other), whole.replace(b"swarm-part/3", b"swarm-part/2")):
        assert bad != whole
        path.write_bytes(bad)
        for asking in (donor.hashes(wanted(record)), piece(donor, wanted(record))):
            with pytest.raises(Refused) as refused:
                await asking
            assert str(tmp_path) not in str(refused.value)


async def test_service_does_not_hand_out_another_history_s_file(tmp_path: Path) -> None:
    _, donor = await served(tmp_path)
    old = keep(tmp_path, 10, seed=1)
    keep(tmp_path, 10, seed=2)
    with pytest.raises(WrongStep):
        await donor.hashes(wanted(old))
    with pytest.raises(WrongStep):
        await piece(donor, wanted(old))


async def test_service_s_messages_cannot_name_a_path(tmp_path: Path) -> None:
    reader, _ = await served(tmp_path)
    named: dict[str, Any] = {"step": 1, "part": "../../etc/passwd", "digest": "0" * 64}
    with pytest.raises(Violation):
        await reader.call(PeerId("donor"), DESCRIBE_FILE, DescribeRequest.model_construct(**named), timeout_s=60)
    with pytest.raises(Violation):
        await reader.call(PeerId("donor"), CHUNK_OF_FILE, ChunkRequest.model_construct(**named, chunk=0), timeout_s=60)
    with pytest.raises(Violation):
        await reader.call(PeerId("donor"), RECORD_OF, RecordRequest.model_construct(step=-1), timeout_s=60)


# --- one file --------------------------------------------------------------------------------------------------------


async def test_fetch_part_shares_the_chunks_among_two_directories_and_a_peer(tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    record = [keep(place, 10) for place in places][0]
    _, peer = await served(places[2])
    inner: list[Donor] = [DirectoryDonor(places[0]), DirectoryDonor(places[1]), peer]
    donors = [Twisted(one, str(one), as_it_is) for one in inner]
    path = await fetch(tmp_path / "here", record, donors)
    assert path.read_bytes() == part_path(places[0], 10, S0).read_bytes()
    assert set().union(*(set(donor.asked) for donor in donors)) == set(range(CHUNKS))
    assert all(donor.asked for donor in donors), "one of them gave nothing"


async def test_fetch_part_finds_a_liar_at_its_first_wrong_chunk_and_takes_the_rest_from_others(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    lied: list[int] = []

    def false(number: int, data: Data) -> Data:
        lied.append(number)
        return bytes(len(data))

    liar = Twisted(DirectoryDonor(there), "liar", false)
    honest = [Twisted(DirectoryDonor(there), name, as_it_is) for name in "ab"]
    path = await fetch(here, record, [liar, *honest])
    assert lied == liar.asked[:1] == [0], "it was asked for more, or for nothing"
    assert len(liar.asked) == 1
    assert set(honest[0].asked) | set(honest[1].asked) == set(range(CHUNKS))
    assert path.read_bytes() == part_path(there, 10, S0).read_bytes()


async def test_fetch_part_goes_on_with_another_when_a_donor_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    monkeypatch.setattr(checkpoint_fetch, "MAX_TRIES", 1)
    dead = asyncio.Event()

    def dies_at(number: int, data: Data) -> Data:
        if number >= 3:
            dead.set()
            raise Unreachable("it died")
        return data

    class Late(Twisted):
        async def hashes(self, state: Wanted) -> Data:
            await dead.wait()
            return await super().hashes(state)

    first = Twisted(DirectoryDonor(there), "first", dies_at)
    second = Late(DirectoryDonor(there), "second", as_it_is)
    await fetch(here, record, [first, second])
    assert first.asked[0] == 0
    assert set(range(3, CHUNKS)) <= set(second.asked) <= set(range(1, CHUNKS)), (
        "what the first sent is not fetched again"
    )
    assert len(second.asked) == len(set(second.asked))


KILLED = """
import os, sys, asyncio
from pathlib import Path
from swarm.state import snapshot
snapshot.CHUNK_BYTES = 256
from swarm.state.checkpoints.donors import DirectoryDonor
from swarm.state.checkpoints.fetch import BegunFile
from swarm.state.checkpoints.files import read_manifest
from tests.unit.state import test_checkpoint_fetch as these

class Killed(BegunFile):
    def place(self, number, data):
        if number == 20:
            os._exit(9)
        super().place(number, data)

there, here = map(Path, sys.argv[1:])
file = Killed(here, these.wanted(read_manifest(there, 10)), these.RUN)
asyncio.run(these.fetch_part(file, [DirectoryDonor(there)], progress=these.silent))
"""


async def test_fetch_part_that_was_killed_does_not_fetch_again_what_was_verified(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    command = [sys.executable, "-c", KILLED, str(there), str(here)]
    ended = await asyncio.to_thread(subprocess.run, command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == 9
    assert not part_path(here, 10, S0).exists()
    came = right(here, record)
    assert len(came) >= 12, "at most eight were under way"
    assert 20 not in came
    again = Twisted(DirectoryDonor(there), "again", as_it_is)
    path = await fetch(here, record, [again])
    assert sorted(again.asked) == sorted(set(range(CHUNKS)) - came)
    assert path.read_bytes() == part_path(there, 10, S0).read_bytes()


async def test_fetch_part_waits_for_a_donor_that_is_busy_as_long_as_something_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    monkeypatch.setattr(checkpoint_fetch, "MAX_WAITS", 2)
    since, refused = [0], [0]

    def busy_often(number: int, data: Data) -> Data:
        since[0] += 1
        if since[0] > MAX_WINDOW + 1:  # so that one at least is not called off
            since[0] = 0
            refused[0] += 1
            raise Busy("full")
        return data

    often = Twisted(DirectoryDonor(there), "often", busy_often)
    await fetch(here, record, [often])
    assert refused[0] > checkpoint_fetch.MAX_TRIES > checkpoint_fetch.MAX_WAITS

    def never(number: int, data: Data) -> Data:
        raise Busy("full")

    donor = Twisted(DirectoryDonor(there), "never", never)
    with pytest.raises(StateError, match="nobody has a good stage-1 of step 10: never: full"):
        await fetch(here, record, [donor], S1)
    assert donor.asked == [0, 0]
    assert [entry.name for entry in step_directory(here, 10).iterdir()] == ["stage-0.safetensors"], "an empty file"


@pytest.mark.parametrize("twist", ["as_it_is", "dies"])
async def test_fetch_part_of_two_processes_waits_and_asks_for_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twist: str
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    began, waits, usual = asyncio.Event(), asyncio.Event(), checkpoint_fetch.alone

    @contextlib.contextmanager
    def alone(path: Path, *, wait: bool) -> Iterator[bool]:
        with usual(path, wait=wait) as ours:
            if not ours:
                waits.set()
            yield ours

    class First(Twisted):
        async def hashes(self, state: Wanted) -> Data:
            began.set()
            await waits.wait()
            return await super().hashes(state)

    monkeypatch.setattr(checkpoint_fetch, "alone", alone)
    monkeypatch.setattr(checkpoint_fetch, "OTHERS_LOOK_S", 0.0)
    first = First(DirectoryDonor(there), "first", {"as_it_is": as_it_is, "dies": dies}[twist])
    second = Twisted(DirectoryDonor(there), "second", as_it_is)
    one = asyncio.create_task(fetch(here, record, [first]))
    await began.wait()
    assert await fetch(here, record, [second]) == part_path(here, 10, S0)
    if twist == "dies":
        with pytest.raises(StateError, match="it died"):
            await one
        assert 0 < len(second.asked) < CHUNKS
    else:
        assert await one == part_path(here, 10, S0)
        assert second.asked == []
    assert [entry.name for entry in step_directory(here, 10).iterdir()] == ["stage-0.safetensors"]


async def test_fetch_part_keeps_two_begun_files_at_most_and_none_that_nobody_proved(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for seed in range(5):
        record = keep(there, 10, seed=seed)
        with pytest.raises(StateError, match="it died"):
            await fetch(here, record, [Twisted(DirectoryDonor(there), "donor", dies)])
    left = {entry.name for entry in step_directory(here, 10).iterdir()}
    assert len(left) == 2
    assert BegunFile(here, wanted(record), RUN).begun.name in left
    claimed = record.model_copy(update={"parts": record.parts | {"stage-0": "0" * 64}})

    class Claims(Twisted):
        async def hashes(self, state: Wanted) -> Data:
            return bytes(32 * CHUNKS)

    with pytest.raises(StateError, match="do not give the digest"):
        await fetch(here, claimed, [Claims(DirectoryDonor(there), "claims", as_it_is)])
    assert {entry.name for entry in step_directory(here, 10).iterdir()} == left


@pytest.mark.parametrize("call", ["pread", "pwrite", "fsync", "posix_fallocate"])
async def test_fetch_part_whose_disk_fails_says_so_and_keeps_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What lies here is read when it is gone on with, so the first call is one that breaks off."""
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    _, peer = await served(there)
    with pytest.raises(StateError, match="it died"):
        await fetch(here, record, [Twisted(peer, "first", dies)])
    came = right(here, record)
    begun = BegunFile(here, wanted(record), RUN).begun
    usual, broken = getattr(os, call), list[str]()

    def breaks(descriptor: int, *more: object) -> object:
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(begun):
            return usual(descriptor, *more)
        broken.append(call)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, breaks)
        with pytest.raises(StateError, match=r"stage-0\.safetensors: Input/output error"):
            await fetch(here, record, [peer])
    assert broken
    again = Twisted(peer, "again", as_it_is)
    await fetch(here, record, [again])
    assert sorted(again.asked) == ([] if call == "fsync" else sorted(set(range(CHUNKS)) - came))


def test_begun_file_for_which_there_is_no_room_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = keep(tmp_path / "there", 10)
    file = BegunFile(tmp_path / "here", wanted(record), RUN)
    assert file.lacking_bytes == file.size
    hashes = hashes_of(snapshot(step=10, layout=BIG).buffers())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_fetch, "reserve", full)
        with pytest.raises(OSError, match="No space left"):
            file.begin(hashes)
    assert not file.begun.exists()
    file.begin(hashes)
    assert file.lacking_bytes == 0, "the disk has given it"


def full(descriptor: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_fetch_part_keeps_what_a_liar_sent_rightly_and_asks_another_for_the_rest(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    liar = Twisted(DirectoryDonor(there), "liar", lies)
    with pytest.raises(StateError, match="liar: chunk 3 of 69 is not what its hash says"):
        await fetch(here, record, [liar])
    assert liar.asked.count(3) == 1
    honest = Twisted(DirectoryDonor(there), "honest", as_it_is)
    await fetch(here, record, [honest])
    assert 3 in honest.asked
    assert 0 not in honest.asked
    assert digest(load_part(here, 10, S0)) == record.parts["stage-0"]


def crafted(header: str) -> bytes:
    """A file that has this for its header, and zeros."""
    return len(header).to_bytes(8, "little") + header.encode() + bytes(64)


def described(shapes: list[object], **entries: object) -> bytes:
    """A file whose metadata names such a state."""
    state = json.dumps(["stage-0", 10, shapes])
    return crafted(
        json.dumps({"__metadata__": {"format": FORMAT, "state": state, "digest": "", "hashes": ""}, **entries})
    )


ROTTEN = {
    "no header": b"rotten" * 100,
    "an end beyond numbers": crafted('{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 1e999]}}'),
    "one place for two": crafted(
        '{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},'
        ' "b": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}'
    ),
    "a state of any size": described(
        [["a", [1_000_000_000_000]]], a={"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
    ),
    "a state of no size": described([["a", [-1]]]),
    "a parameter twice": described([["a", [1]], ["a", [1]]]),
    "a state beyond numbers": described([["a", [float("inf")]]]),
    "no state": described(["a"]),
}


@pytest.mark.parametrize("rotten", ROTTEN.values(), ids=ROTTEN)
def test_file_that_no_peer_writes_is_an_error_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotten: bytes
) -> None:
    (tmp_path / "file").write_bytes(rotten)
    monkeypatch.setattr("torch.zeros", lambda *_, **__: pytest.fail("it took memory"))
    with pytest.raises(StateError, match="file"):
        load_file(tmp_path / "file")


@pytest.mark.parametrize("rotten", ROTTEN.values(), ids=ROTTEN)
async def test_fetch_part_that_is_rotten_by_an_earlier_call_is_fetched_anew_from_the_same_donor(
    tmp_path: Path, rotten: bytes
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    step_directory(here, 10).mkdir(parents=True)
    for longer in (0, 1 << 20):
        BegunFile(here, wanted(record), RUN).begun.write_bytes(rotten + b"r" * longer)
        donor = Twisted(DirectoryDonor(there), "honest", as_it_is)
        path = await fetch(here, record, [donor])
        assert 0 in donor.asked
        assert path.read_bytes() == part_path(there, 10, S0).read_bytes()


async def test_fetch_part_only_liars_leaves_nothing_and_names_them(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    liars = [Twisted(DirectoryDonor(there), name, lambda number, data: bytes(len(data))) for name in ("one", "two")]
    with pytest.raises(StateError, match="nobody has a good stage-0 of step 10: ") as failed:
        await fetch(here, record, liars)
    for liar in liars:
        assert f"{liar}: chunk " in str(failed.value)
        assert len(liar.asked) == 1
    assert list(step_directory(here, 10).iterdir()) == []


async def test_fetch_part_of_which_nobody_answers_keeps_what_came_earlier(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    with pytest.raises(StateError, match="it died"):
        await fetch(here, record, [Twisted(DirectoryDonor(there), "first", dies)])
    with pytest.raises(StateError, match="nobody has a good stage-0"):
        await fetch(here, record, [DirectoryDonor(tmp_path / "nowhere")])
    again = Twisted(DirectoryDonor(there), "again", as_it_is)
    await fetch(here, record, [again])
    assert set(range(3, CHUNKS)) <= set(again.asked) <= set(range(1, CHUNKS))


async def test_fetch_part_of_another_model_is_not_begun(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    other = Wanted(part=S0, step=10, digest=record.parts["stage-0"], layout=FlatLayout.from_shapes([("a", (4000, 33))]))
    donor = Twisted(DirectoryDonor(there), "donor", as_it_is)
    with pytest.raises(StateError, match="do not give the digest"):
        await fetch_part(BegunFile(here, other, RUN), [donor], progress=silent)
    assert donor.asked == []
    assert not here.exists()


def test_every_chunk_has_one_place_in_the_file_and_all_of_them_are_the_tensors(tmp_path: Path) -> None:
    """Written in any order, also in chunks that are no longer than a gap."""
    state = snapshot(step=3, layout=BIG)
    for size in (4, 16, 64, 100, 252, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "CHUNK_BYTES", size)
            file = PartFile.read(write_part(tmp_path, state, {"run": RUN}))
            begun = os.open(tmp_path / "begun", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            source = os.open(part_path(tmp_path, 3, S0), os.O_RDONLY)
            for number in reversed(range(file.state.cut.chunks)):
                file.write_chunk(begun, number, file.read_chunk(source, number))
            checkpoint_format.write_at(begun, file.header, 0)
            os.close(begun)
            os.close(source)
            assert (tmp_path / "begun").read_bytes() == part_path(tmp_path, 3, S0).read_bytes()
            assert digest(load_file(tmp_path / "begun")[0]) == digest(state)


# --- what to fetch ---------------------------------------------------------------------------------------------------


def offer(donor: str, step: int, parts: Iterable[PartName], account: str = "a") -> Offer[str]:
    return Offer(donor, step, {S0: account * 64, S1: account * 64}, tuple(parts))


def test_plans_take_the_newest_step_that_is_whole_between_all() -> None:
    offers = [
        offer("A", 10, [S0]),
        offer("B", 10, [S1]),
        offer("A", 20, [S0]),
        offer("B", 20, []),
        offer("C", 10, [S0]),
    ]
    (plan,) = plans(offers, [], [(S0, S1)])
    assert (plan.step, plan.here) == (10, ())
    assert plan.donors == {S0: ("A", "C"), S1: ("B",)}
    assert lacking(offers, [], [(S0, S1)]) == [(20, (S1,)), (10, ())]


def test_plans_never_mix_two_accounts_of_a_step_and_take_the_one_that_most_give() -> None:
    offers = [offer("A", 10, [S0], "a"), offer("B", 10, [S1], "b")]
    assert plans(offers, [], [(S0, S1)]) == []
    offers = [offer("L", 10, [S0, S1], "b"), offer("A", 10, [S0]), offer("B", 10, [S1])]
    first, second = plans(offers, [], [(S0, S1)])
    assert first.attested == ("A", "B")
    assert second.attested == ("L",)


def test_plans_believe_no_single_donor_more_than_all_others() -> None:
    honest = [offer(f"h{number}", 40, [S0, S1]) for number in range(3)]
    liar = [offer("L", 90, [S0, S1], "b"), offer("L", 90, [S0, S1], "b"), offer("L", 41, [S0, S1], "c")]
    assert [(plan.step, plan.believed) for plan in plans(liar + honest, [], [(S0, S1)])] == [
        (40, True),
        (90, False),
        (41, False),
    ]
    assert [plan.step for plan in plans(liar + honest, [], [(S0, S1)], last_step=50)] == [40, 41]
    newest = offer("C", 41, [S0, S1])
    best, *_ = plans([*liar, *honest, newest], [], [(S0, S1)], believed=["C"])
    assert (best.step, best.attested) == (41, ("C",))


def test_step_is_whole_without_what_will_not_be_given() -> None:
    offers = [offer("A", 10, [S0]), offer("B", 10, [S0])]
    assert plans(offers, [], [(S0, S1)]) == []
    (plan,) = plans(offers, [], [(S0, S1)], without=(S1,))
    assert (plan.step, set(plan.donors)) == (10, {S0})
    assert lacking(offers, [], [(S0, S1)], (S1,)) == [(10, ())]


def test_plans_use_what_is_here_and_nothing_older_than_what_is_whole_here(tmp_path: Path) -> None:
    record = keep(tmp_path, 10, [S0])
    here = [held(tmp_path, 10)]
    account = {PartName(part): value for part, value in record.parts.items()}
    (plan,) = plans([Offer("A", 10, account, (S0, S1))], here, [(S0, S1)])
    assert (plan.here, plan.donors) == ((S0,), {S1: ("A",)})
    assert plans([offer("A", 10, [S1])], here, [(S0, S1)]) == [], "another history's part besides ours"
    keep(tmp_path, 20)
    assert plans([offer("A", 10, [S0, S1]), offer("A", 20, [S0, S1])], [held(tmp_path, 20)], [(S0, S1)]) == []
