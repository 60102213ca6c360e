"""Fetching checkpoints from peers that die, lie and stall, over the network in memory."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from swarm.clock import SystemClock
from swarm.errors import Busy, PeerError, Refused, StateError, Unreachable, Violation, WrongStep
from swarm.ids import PartName, PeerId, RunId, stage_part
from swarm.models.layout import FlatLayout
from swarm.sim.network import SimEndpoint, SimNetwork
from swarm.state.checkpoints import fetch as checkpoint_fetch
from swarm.state.checkpoints import shelf as checkpoint_shelf
from swarm.state.checkpoints.donors import DirectoryDonor, Donor, Offer, PeerDonor, WantedFile, lacking, plans
from swarm.state.checkpoints.fetch import begun_file, fetch_part
from swarm.state.checkpoints.files import decode_manifest
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
from swarm.state.checkpoints.shelf import READ, RECORD_OF, CheckpointShelf, ReadRequest, RecordRequest
from swarm.state.snapshot import digest
from tests.unit.state.states import snapshot

RUN = RunId("ab" * 32)
BIG = FlatLayout.from_shapes([("a", (40, 33))])  # 16 kB: several pieces of the size below
PIECE = 1024
S0, S1 = stage_part(0), stage_part(1)
MOST = 1 << 20


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_fetch, "PIECE_BYTES", PIECE)


def keep(root: Path, step: int, parts: Iterable[PartName] = (S0, S1), seed: int = 0) -> CheckpointManifest:
    """A step of which only some parts lie there."""
    states = [snapshot(step=step, part=part, layout=BIG, seed=seed) for part in (S0, S1)]
    record = CheckpointManifest(run=RUN, step=step, parts={str(one.part): digest(one) for one in states})
    write_manifest(root, record)
    for one in states:
        if one.part in parts:
            write_part(root, one, {"run": RUN})
    return record


def wanted(record: CheckpointManifest, part: PartName = S0) -> WantedFile:
    return WantedFile(step=record.step, part=part, digest=record.parts[part])


def size_of(root: Path, record: CheckpointManifest, part: PartName = S0) -> int:
    return part_path(root, record.step, part).stat().st_size


def silent(part: PartName, done: int, total: int) -> None:
    """Progress that nobody looks at."""


class Twisted:
    """A donor between which and the reader something happens: ``twist`` may raise, or change the bytes."""

    def __init__(self, inner: Donor, name: str, twist: Callable[[int, bytes], bytes]) -> None:
        self._inner, self._twist = inner, twist
        self.name = name
        self.offsets: list[int] = []

    async def offers(self) -> list[Offer[Donor]]:
        return await self._inner.offers()

    async def record(self, step: int) -> bytes:
        return await self._inner.record(step)

    async def read(self, file: WantedFile, offset: int, length: int) -> bytes:
        self.offsets.append(offset)
        return self._twist(offset, bytes(await self._inner.read(file, offset, length)))


def as_it_is(offset: int, data: bytes) -> bytes:
    return data


def lies(offset: int, data: bytes) -> bytes:
    return bytes(len(data)) if offset == 3 * PIECE else data


def dies(offset: int, data: bytes) -> bytes:
    if offset >= 3 * PIECE:
        raise Unreachable("it died")
    return data


async def served(root: Path) -> tuple[SimEndpoint, PeerDonor]:
    """(donor's endpoint, the donor as a reader sees it)."""
    network = SimNetwork(SystemClock())
    donor, reader = network.endpoint("donor"), network.endpoint("reader")
    donor.mount(CheckpointShelf(root))
    for endpoint in (donor, reader):
        await endpoint.enter(RUN)
    return reader, PeerDonor(reader, donor.peer, timeout_s=5)


# --- the shelf -------------------------------------------------------------------------------------------------------


async def test_shelf_offers_lists_records_and_files(tmp_path: Path) -> None:
    record = keep(tmp_path, 10, [S1])
    keep(tmp_path, 20, [])
    _, donor = await served(tmp_path)
    (offer,) = await donor.offers()
    assert (offer.step, offer.digests, offer.there) == (10, record.parts, {S1: size_of(tmp_path, record, S1)})
    assert decode_manifest(await donor.record(10), "it") == record
    whole = part_path(tmp_path, 10, S1).read_bytes()
    assert bytes(await donor.read(wanted(record, S1), 5, 100)) == whole[5:105]


@pytest.mark.parametrize(
    ("step", "part", "offset", "error"),
    [(11, "stage-1", 0, WrongStep), (10, "stage-0", 0, WrongStep), (10, "stage-1", 10**12, Refused)],
)
async def test_shelf_refuses_what_is_not_there(
    tmp_path: Path, step: int, part: str, offset: int, error: type[PeerError]
) -> None:
    record = keep(tmp_path, 10, [S1])
    _, donor = await served(tmp_path)
    file = WantedFile(step=step, part=PartName(part), digest=record.parts["stage-1"])
    with pytest.raises(error):
        await donor.read(file, offset, 10)


async def test_shelf_does_not_hand_out_another_history_s_file(tmp_path: Path) -> None:
    _, donor = await served(tmp_path)
    old = keep(tmp_path, 10, seed=1)
    keep(tmp_path, 10, seed=2)
    with pytest.raises(WrongStep):
        await donor.read(wanted(old), 0, 10)


async def test_shelf_reads_so_much_at_once_and_has_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = keep(tmp_path, 10)
    monkeypatch.setattr(checkpoint_shelf, "MAX_READS", 2)
    _, donor = await served(tmp_path)
    both, reading, most = threading.Barrier(2, timeout=5), Counter[str](), [0]
    usual = CheckpointShelf._piece

    def counted(shelf: CheckpointShelf, body: ReadRequest) -> bytes:
        reading["now"] += 1
        most.append(reading["now"])
        both.wait()  # nobody reads on before there are two
        reading["now"] -= 1
        both.wait()
        return usual(shelf, body)

    monkeypatch.setattr(CheckpointShelf, "_piece", counted)
    await asyncio.gather(*(donor.read(wanted(record), 0, 10) for _ in range(6)))
    assert max(most) == 2


async def test_shelf_has_who_does_not_take_its_answers_wait_and_serves_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = keep(tmp_path, 10)
    monkeypatch.setattr(checkpoint_shelf, "MAX_PIECES", 2)
    network = SimNetwork(SystemClock())
    ends = {name: network.endpoint(name) for name in ("donor", "greedy", "modest")}
    ends["donor"].mount(CheckpointShelf(tmp_path))
    for endpoint in ends.values():
        await endpoint.enter(RUN)
    greedy, modest = (PeerDonor(ends[name], PeerId("donor"), timeout_s=5) for name in ("greedy", "modest"))
    unread = asyncio.Event()
    carry = network.carry

    async def not_to_the_greedy(source: PeerId, target: PeerId, size: int) -> None:
        if target == "greedy":
            await unread.wait()
        await carry(source, target, size)

    monkeypatch.setattr(network, "carry", not_to_the_greedy)
    asked = [asyncio.create_task(greedy.read(wanted(record), 0, 10)) for _ in range(3)]
    await modest.read(wanted(record), 0, 10)
    unread.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in results] == [memoryview, memoryview, Busy]
    await greedy.read(wanted(record), 0, 10)


async def test_shelf_s_messages_cannot_name_a_path(tmp_path: Path) -> None:
    reader, _ = await served(tmp_path)
    body = ReadRequest.model_construct(step=1, part="../../etc/passwd", digest="0" * 64, offset=0, length=10)
    with pytest.raises(Violation):
        await reader.call(PeerId("donor"), READ, body, timeout_s=5)
    with pytest.raises(Violation):
        await reader.call(PeerId("donor"), RECORD_OF, RecordRequest.model_construct(step=-1), timeout_s=5)


# --- one file --------------------------------------------------------------------------------------------------------


async def test_fetch_part_is_the_donor_s_file(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    _, donor = await served(there)
    told: list[tuple[PartName, int, int]] = []
    size = size_of(there, record)
    path = await fetch_part(
        here, wanted(record), [(donor, size)], max_bytes=MOST, progress=lambda *one: told.append(one)
    )
    assert path.read_bytes() == part_path(there, 10, S0).read_bytes()
    assert digest(load_part(here, 10, S0)) == record.parts["stage-0"]
    assert told[0] == (S0, 0, size)
    assert told[-1] == (S0, size, size)
    assert [entry.name for entry in step_directory(here, 10).iterdir()] == ["stage-0.safetensors"]


async def test_fetch_part_goes_on_with_another_when_a_donor_dies(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    first = Twisted(DirectoryDonor(there), "first", dies)
    second = Twisted(DirectoryDonor(there), "second", as_it_is)
    size = size_of(there, record)
    await fetch_part(here, wanted(record), [(first, size), (second, size)], max_bytes=MOST, progress=silent)
    assert first.offsets[:3] == [0, PIECE, 2 * PIECE]
    assert min(second.offsets) == 3 * PIECE, "what the first sent is not fetched again"


async def test_fetch_part_continues_what_an_earlier_call_began(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    size = size_of(there, record)
    with pytest.raises(StateError, match="nobody has a good stage-0 of step 10: first: it died"):
        await fetch_part(
            here, wanted(record), [(Twisted(DirectoryDonor(there), "first", dies), size)],
            max_bytes=MOST, progress=silent,
        )  # fmt: skip
    again = Twisted(DirectoryDonor(there), "again", as_it_is)
    await fetch_part(here, wanted(record), [(again, size)], max_bytes=MOST, progress=silent)
    assert min(again.offsets) == 3 * PIECE


async def test_fetch_part_keeps_what_came_whatever_size_another_claims(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    size = size_of(there, record)
    first, tiny, honest = (
        Twisted(DirectoryDonor(there), name, twist)
        for name, twist in (("first", dies), ("tiny", lies), ("honest", as_it_is))
    )
    with pytest.raises(StateError, match="it died"):
        await fetch_part(here, wanted(record), [(first, size)], max_bytes=MOST, progress=silent)
    await fetch_part(here, wanted(record), [(tiny, 8), (honest, size)], max_bytes=MOST, progress=silent)
    assert tiny.offsets == [0]
    assert min(honest.offsets) == 3 * PIECE, "what the first sent is kept"
    assert [entry.name for entry in step_directory(here, 10).iterdir()] == ["stage-0.safetensors"]


async def test_fetch_part_waits_for_a_donor_that_is_busy_as_long_as_something_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    monkeypatch.setattr(checkpoint_fetch, "BUSY_PAUSE_S", 0.0)
    monkeypatch.setattr(checkpoint_fetch, "MAX_WAITS", 2)
    refused: Counter[int] = Counter()

    def busy_once(offset: int, data: bytes) -> bytes:
        refused[offset] += 1
        if refused[offset] == 1:
            raise Busy("full")
        return data

    size = size_of(there, record)
    often = Twisted(DirectoryDonor(there), "often", busy_once)
    await fetch_part(here, wanted(record), [(often, size)], max_bytes=MOST, progress=silent)
    assert len(refused) > 2 * checkpoint_fetch.MAX_TRIES

    def never(offset: int, data: bytes) -> bytes:
        raise Busy("full")

    donor = Twisted(DirectoryDonor(there), "never", never)
    with pytest.raises(StateError, match="nobody has a good stage-1 of step 10: never: full"):
        await fetch_part(here, wanted(record, S1), [(donor, size)], max_bytes=MOST, progress=silent)
    assert donor.offsets.count(0) == 2


async def test_fetch_part_keeps_two_begun_files_at_most_whatever_sizes_are_claimed(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    size = size_of(there, record)
    claims: list[tuple[Donor, int]] = [
        (Twisted(DirectoryDonor(there), f"donor {more}", dies), size + more) for more in range(5)
    ]
    with pytest.raises(StateError, match="it died"):
        await fetch_part(here, wanted(record), claims, max_bytes=MOST, progress=silent)
    left = [entry.stat().st_size for entry in step_directory(here, 10).iterdir()]
    assert len(left) == 2
    assert max(left) == 3 * PIECE


async def test_fetch_part_whose_disk_cannot_be_read_keeps_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    donor, size = Twisted(DirectoryDonor(there), "honest", as_it_is), size_of(there, record)

    def broken(path: Path) -> None:
        raise StateError("cannot be read") from OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_fetch, "load_file", broken)
        with pytest.raises(StateError, match="Input/output error"):
            await fetch_part(here, wanted(record), [(donor, size)], max_bytes=MOST, progress=silent)
    donor.offsets.clear()
    await fetch_part(here, wanted(record), [(donor, size)], max_bytes=MOST, progress=silent)
    assert donor.offsets == []


async def test_fetch_part_throws_away_what_a_liar_sent_and_asks_another(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    size = size_of(there, record)
    liar = Twisted(DirectoryDonor(there), "liar", lies)
    honest = Twisted(DirectoryDonor(there), "honest", as_it_is)
    await fetch_part(here, wanted(record), [(liar, size), (honest, size)], max_bytes=MOST, progress=silent)
    assert 0 in honest.offsets
    assert liar.offsets.count(0) == 1
    assert digest(load_part(here, 10, S0)) == record.parts["stage-0"]


def crafted(header: str) -> bytes:
    """A file that has this for its header, and zeros."""
    return len(header).to_bytes(8, "little") + header.encode() + bytes(64)


ROTTEN = {
    "no header": b"rotten" * 100,
    "an end beyond numbers": crafted('{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 1e999]}}'),
    "one place for two": crafted(
        '{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},'
        ' "b": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}'
    ),
    "a state of any size": crafted(
        '{"__metadata__": {"format": "swarm-part/2", "state": "[\\"stage-0\\", 10, [[\\"a\\", [1000000000000]]]]"},'
        ' "a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}'
    ),
}


@pytest.mark.parametrize("rotten", ROTTEN.values(), ids=ROTTEN)
def test_file_that_no_peer_writes_is_an_error_and_takes_no_memory(tmp_path: Path, rotten: bytes) -> None:
    (tmp_path / "file").write_bytes(rotten)
    with pytest.raises(StateError, match="file"):
        load_file(tmp_path / "file")


@pytest.mark.parametrize("rotten", ROTTEN.values(), ids=ROTTEN)
async def test_fetch_part_that_is_rotten_by_an_earlier_call_is_fetched_anew_from_the_same_donor(
    tmp_path: Path, rotten: bytes
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    size = size_of(there, record)
    begun = step_directory(here, 10)
    begun.mkdir(parents=True)
    begun_file(begun / "stage-0.safetensors", record.parts["stage-0"], size).write_bytes(rotten)
    donor = Twisted(DirectoryDonor(there), "honest", as_it_is)
    await fetch_part(here, wanted(record), [(donor, size)], max_bytes=MOST, progress=silent)
    assert 0 in donor.offsets


async def test_fetch_part_only_liars_leaves_nothing_and_names_them(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    size = size_of(there, record)
    liars = [(Twisted(DirectoryDonor(there), name, lies), size) for name in ("one", "two")]
    with pytest.raises(StateError, match=r"one: what came fails verification.*two: what came"):
        await fetch_part(here, wanted(record), liars, max_bytes=MOST, progress=silent)
    assert list(step_directory(here, 10).iterdir()) == []


async def test_fetch_part_larger_than_the_model_is_not_begun(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    donor = Twisted(DirectoryDonor(there), "donor", as_it_is)
    with pytest.raises(StateError, match="all are larger than the model"):
        await fetch_part(here, wanted(record), [(donor, MOST + 1)], max_bytes=MOST, progress=silent)
    assert donor.offsets == []


async def test_fetch_part_cancelled_leaves_no_task_and_what_came(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    record = keep(there, 10)
    stuck = asyncio.Event()

    class Stuck(Twisted):
        async def read(self, file: WantedFile, offset: int, length: int) -> bytes:
            if offset >= 2 * PIECE:
                stuck.set()
                await asyncio.Event().wait()
            return await super().read(file, offset, length)

    donor = Stuck(DirectoryDonor(there), "stuck", as_it_is)
    before = asyncio.all_tasks()
    task = asyncio.create_task(
        fetch_part(here, wanted(record), [(donor, size_of(there, record))], max_bytes=MOST, progress=silent)
    )
    await stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert not part_path(here, 10, S0).exists()


# --- what to fetch ---------------------------------------------------------------------------------------------------


def offer(donor: str, step: int, parts: Iterable[PartName], account: str = "a") -> Offer[str]:
    return Offer(donor, step, {S0: account * 64, S1: account * 64}, dict.fromkeys(parts, 100))


def test_plans_take_the_newest_step_that_is_whole_between_all() -> None:
    offers = [
        offer("A", 10, [S0]),
        offer("B", 10, [S1]),
        offer("A", 20, [S0]),
        offer("B", 20, []),
        offer("C", 10, [S0]),
    ]
    (plan,) = plans(offers, [], [S0, S1])
    assert (plan.step, plan.here) == (10, ())
    assert plan.donors == {S0: (("A", 100), ("C", 100)), S1: (("B", 100),)}
    assert lacking(offers, [], [S0, S1]) == [(20, (S1,)), (10, ())]


def test_plans_never_mix_two_accounts_of_a_step_and_take_the_one_that_most_give() -> None:
    offers = [offer("A", 10, [S0], "a"), offer("B", 10, [S1], "b")]
    assert plans(offers, [], [S0, S1]) == []
    offers = [offer("L", 10, [S0, S1], "b"), offer("A", 10, [S0]), offer("B", 10, [S1])]
    first, second = plans(offers, [], [S0, S1])
    assert first.vouched == ("A", "B")
    assert second.vouched == ("L",)


def test_plans_believe_no_single_donor_more_than_all_others() -> None:
    honest = [offer(f"h{number}", 40, [S0, S1]) for number in range(3)]
    liar = [offer("L", 90, [S0, S1], "b"), offer("L", 90, [S0, S1], "b"), offer("L", 41, [S0, S1], "c")]
    assert [(plan.step, plan.believed) for plan in plans(liar + honest, [], [S0, S1])] == [
        (40, True),
        (90, False),
        (41, False),
    ]
    assert [plan.step for plan in plans(liar + honest, [], [S0, S1], last_step=50)] == [40, 41]
    newest = offer("C", 41, [S0, S1])
    best, *_ = plans([*liar, *honest, newest], [], [S0, S1], believed=["C"])
    assert (best.step, best.vouched) == (41, ("C",))


def test_plans_use_what_is_here_and_nothing_older_than_what_is_whole_here(tmp_path: Path) -> None:
    record = keep(tmp_path, 10, [S0])
    here = [held(tmp_path, 10)]
    account = {PartName(part): value for part, value in record.parts.items()}
    (plan,) = plans([Offer("A", 10, account, {S0: 9, S1: 9})], here, [S0, S1])
    assert (plan.here, plan.donors) == ((S0,), {S1: (("A", 9),)})
    assert plans([offer("A", 10, [S1])], here, [S0, S1]) == [], "another history's part beside ours"
    keep(tmp_path, 20)
    assert plans([offer("A", 10, [S0, S1]), offer("A", 20, [S0, S1])], [held(tmp_path, 20)], [S0, S1]) == []


def test_plans_of_another_model_s_parts_are_none() -> None:
    strange = Offer("A", 10, {S0: "a" * 64}, {S0: 1})
    assert plans([strange], [], [S0, S1]) == []
    assert lacking([], [], [S0]) == []
