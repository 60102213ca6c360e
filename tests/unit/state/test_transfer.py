from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, StateError, Violation, WrongStep
from swarm.ids import PeerId, stage_part
from swarm.models.layout import FlatLayout
from swarm.network.protocols import Answer, Request
from swarm.schema import Empty
from swarm.state import transfer
from swarm.state.snapshot import Snapshot, digest
from swarm.state.transfer import (
    CHUNK,
    DESCRIBE,
    ChunkRequest,
    DescribeRequest,
    Description,
    StateDonor,
    Wanted,
    download,
)
from tests.unit.state.states import LAYOUT, snapshot

DONOR, ME = PeerId("donor"), PeerId("me")
BIG = FlatLayout.from_shapes([("a", (40, 33))])


class StillClock:
    """Time that moves when told."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Line:
    """The caller's side of an endpoint, wired straight to a donor. ``twist`` may change or replace an answer."""

    def __init__(self, donor: StateDonor, me: PeerId = ME) -> None:
        self._methods = {method.name: method for method in donor.methods()}
        self._me = me
        self.twist: Callable[[str, Answer], Awaitable[Answer]] | None = None
        self.lengths: list[int] = []
        self.open = 0

    async def call(self, target, method, body, reply, *, timeout_s, payload=b"", max_reply_bytes=0):
        assert target == DONOR
        assert not payload
        served = self._methods[method]
        decoded = served.request.model_validate(body.to_wire())
        self.open += 1
        try:
            answer = await served.handle(Request(self._me, decoded, memoryview(b""), timeout_s))
            if self.twist is not None:
                answer = await self.twist(method, answer)
            await asyncio.sleep(0)
        finally:
            self.open -= 1
        self.lengths.append(len(answer.payload))
        return reply.model_validate(answer.body.to_wire()), memoryview(bytearray(answer.payload))


def donor_of(*snapshots: Snapshot, **settings) -> tuple[StateDonor, StillClock]:
    clock = StillClock()
    donor = StateDonor(clock, **settings)
    for offered in snapshots:
        donor.offer(offered, digest(offered))
    return donor, clock


def wanted(state: Snapshot, **changes) -> Wanted:
    fields = {"part": state.part, "step": state.step, "digest": digest(state), "layout": state.layout}
    return Wanted(**(fields | changes))


async def test_download_gives_the_donors_state_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)
    state = snapshot(step=3, layout=BIG)
    donor, _ = donor_of(state)
    line = Line(donor)
    found = await download(line, DONOR, wanted(state), chunk_timeout_s=1.0)
    assert digest(found) == digest(state)
    assert max(line.lengths) == 1000
    assert sum(line.lengths) == 12 * BIG.elements
    assert donor.downloads == 0


async def test_download_of_another_step_or_part_is_refused_by_the_donor() -> None:
    state = snapshot(step=3)
    line = Line(donor_of(state)[0])
    with pytest.raises(WrongStep, match="step 3"):
        await download(line, DONOR, wanted(state, step=2), chunk_timeout_s=1.0)
    with pytest.raises(Refused, match="not held"):
        await download(line, DONOR, wanted(state, part=stage_part(9)), chunk_timeout_s=1.0)


@pytest.mark.parametrize("change", [{"digest": "00" * 32}, {"layout": BIG}])
async def test_download_from_a_donor_that_has_something_else_ends_before_the_first_chunk(change: dict) -> None:
    state = snapshot()
    line = Line(donor_of(state)[0])
    with pytest.raises(Violation, match="another digest or size"):
        await download(line, DONOR, wanted(state, **change), chunk_timeout_s=1.0)
    assert line.lengths == [0]


async def test_download_of_altered_bytes_installs_nothing() -> None:
    state = snapshot()
    line = Line(donor_of(state)[0])

    async def flip(method: str, answer: Answer) -> Answer:
        altered = bytearray(answer.payload)
        if altered:
            altered[0] ^= 1
        return Answer(answer.body, altered)

    line.twist = flip
    with pytest.raises(StateError, match="Try another donor"):
        await download(line, DONOR, wanted(state), chunk_timeout_s=1.0)


@pytest.mark.parametrize("failure", ["short", "lost"])
async def test_download_that_fails_raises_one_error_and_leaves_no_call(failure: str, monkeypatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 500)
    state = snapshot(layout=BIG)
    line = Line(donor_of(state)[0])

    async def fail(method: str, answer: Answer) -> Answer:
        if method == CHUNK and len(line.lengths) > 5:
            if failure == "lost":
                raise DeadlineMissed("no answer", peer=DONOR)
            return Answer(answer.body, answer.payload[:-1])
        return answer

    line.twist = fail
    expected: type[PeerError] = Violation if failure == "short" else DeadlineMissed
    with pytest.raises(expected):
        await download(line, DONOR, wanted(state), chunk_timeout_s=1.0)
    assert line.open == 0


async def test_download_cancelled_leaves_no_call() -> None:
    state = snapshot()
    line = Line(donor_of(state)[0])
    stuck = asyncio.Event()

    async def hang(method: str, answer: Answer) -> Answer:
        if method == CHUNK:
            stuck.set()
            await asyncio.Event().wait()
        return answer

    line.twist = hang
    task = asyncio.create_task(download(line, DONOR, wanted(state), chunk_timeout_s=1.0))
    await stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert line.open == 0


async def test_donor_keeps_a_described_state_while_it_moves_on() -> None:
    old = snapshot(step=1)
    donor, clock = donor_of(old, lease_s=10.0)
    line = Line(donor)
    ask = DescribeRequest(part=old.part, step=None)
    described, _ = await line.call(DONOR, DESCRIBE, ask, Description, timeout_s=1.0)
    donor.offer(snapshot(step=2, seed=2), "ff" * 32)
    assert described.step == 1
    chunk = ChunkRequest(part=old.part, step=1, offset=4 * LAYOUT.elements, length=64)
    for _ in range(3):
        clock.now += 9.0
        _, payload = await line.call(DONOR, CHUNK, chunk, Empty, timeout_s=1.0, max_reply_bytes=64)
        assert bytes(payload) == bytes(old.buffers()[1][:64])
    clock.now += 10.0
    with pytest.raises(WrongStep, match="describe it first"):
        await line.call(DONOR, CHUNK, chunk, Empty, timeout_s=1.0)
    described, _ = await line.call(DONOR, DESCRIBE, ask, Description, timeout_s=1.0)
    assert described.step == 2


async def test_donor_with_enough_downloads_is_busy_until_one_ends() -> None:
    state = snapshot()
    donor, clock = donor_of(state, max_downloads=2, lease_s=10.0)
    lines = [Line(donor, PeerId(name)) for name in "abc"]
    ask = DescribeRequest(part=state.part, step=0)
    for line in lines[:2]:
        await line.call(DONOR, DESCRIBE, ask, Description, timeout_s=1.0)
    with pytest.raises(Busy):
        await lines[2].call(DONOR, DESCRIBE, ask, Description, timeout_s=1.0)
    await download(lines[0], DONOR, wanted(state), chunk_timeout_s=1.0)
    await lines[2].call(DONOR, DESCRIBE, ask, Description, timeout_s=1.0)
    assert donor.downloads == 2
    clock.now += 11.0
    assert donor.downloads == 0
    donor.withdraw(state.part)
    with pytest.raises(Refused):
        await lines[0].call(DONOR, DESCRIBE, ask, Description, timeout_s=1.0)


async def test_donor_withdrawn_part_is_kept_for_unfinished_downloads_only() -> None:
    state = snapshot()
    donor, clock = donor_of(state)
    done, half = Line(donor), Line(donor, PeerId("peer-2"))
    await download(done, DONOR, wanted(state), chunk_timeout_s=1.0)
    await half.call(DONOR, DESCRIBE, DescribeRequest(part=state.part, step=0), Description, timeout_s=1.0)
    donor.withdraw(state.part)
    ask = ChunkRequest(part=state.part, step=0, offset=0, length=4)
    await half.call(DONOR, CHUNK, ask, Empty, timeout_s=1.0, max_reply_bytes=4)
    with pytest.raises(WrongStep):
        await done.call(DONOR, CHUNK, ask, Empty, timeout_s=1.0, max_reply_bytes=4)


@pytest.mark.parametrize(("offset", "length"), [(4 * 32 - 4, 8), (12 * 32, 4), (12 * 32 - 4, 8), (2**52, 4)])
async def test_donor_chunk_outside_a_vector_is_a_violation(offset: int, length: int) -> None:
    assert LAYOUT.elements == 32
    state = snapshot()
    line = Line(donor_of(state)[0])
    await line.call(DONOR, DESCRIBE, DescribeRequest(part=state.part, step=0), Description, timeout_s=1.0)
    with pytest.raises(Violation):
        await line.call(
            DONOR,
            CHUNK,
            ChunkRequest(part=state.part, step=0, offset=offset, length=length),
            Empty,
            timeout_s=1.0,
        )
