"""What a donor hands out, to whom, for how long and how fast."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm.errors import Busy, Refused, Violation, WrongStep
from swarm.ids import PeerId, stage_part
from swarm.network.protocols import Answer, Rpc
from swarm.sim.network import SimEndpoint
from swarm.state import snapshot as chunks
from swarm.state.sharing import MAX_WINDOW
from swarm.state.snapshot import CHUNK_BYTES, Snapshot, digest, root_of
from swarm.state.transfer import BURST_BYTES, CHUNK, DESCRIBE, ChunkRequest, DescribeRequest, Donation, StateDonor
from tests.harness.rigs.state import (
    LAYOUT,
    NOTHING_BESIDE,
    RUN,
    Donors,
    FakeClock,
    big_state,
    in_time,
    inline,
    snapshot,
    turns,
)

ME, OTHER = PeerId("me"), PeerId("other")
SIZE = 12 * LAYOUT.elements


def donor_of(*snapshots: Snapshot, **settings: Any) -> tuple[StateDonor, FakeClock]:
    clock = FakeClock()
    donor = StateDonor(clock, run=inline, **settings)
    for offered in snapshots:
        donor.offer(offered, digest(offered))
    return donor, clock


async def ask(donor: StateDonor, rpc: Rpc[Any, Any], body: Any, me: PeerId = ME) -> Answer[Any]:
    served = {method.rpc: method for method in donor.methods()}[rpc]
    return await served.handle(me, rpc.request.model_validate(body.to_wire()), NOTHING_BESIDE)


def called(state: Snapshot, *, step: int | None = None) -> dict[str, Any]:
    """What a request for this state says, or for the same bits after another step."""
    return {"part": state.part, "step": state.step if step is None else step, "digest": digest(state)}


async def describe(donor: StateDonor, step: int = 0, me: PeerId = ME, seed: int = 0) -> bytes:
    return bytes((await ask(donor, DESCRIBE, DescribeRequest(**called(snapshot(step=step, seed=seed))), me)).payload)


async def fetch(donor: StateDonor, step: int, chunk: int, me: PeerId = ME, seed: int = 0) -> bytes:
    request = ChunkRequest(**called(snapshot(step=step, seed=seed)), chunk=chunk)
    return bytes((await ask(donor, CHUNK, request, me)).payload)


async def test_donor_hands_out_the_state_chunk_by_chunk_with_hashes_that_give_the_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 50)
    state = snapshot(step=3)
    donor, _ = donor_of(state)
    hashes = await describe(donor, 3)
    assert len(hashes) == 32 * 3 * 3, "128 bytes a vector are three chunks of it"
    assert root_of(state.part, LAYOUT, hashes) == digest(state)
    found = b"".join([await fetch(donor, 3, chunk) for chunk in range(9)])
    assert found == b"".join(map(bytes, state.buffers()))
    assert donor.downloads == 0


async def test_donor_that_has_another_step_digest_or_part_says_so() -> None:
    donor, _ = donor_of(snapshot(step=3))
    with pytest.raises(WrongStep, match="step 3"):
        await describe(donor, 2)
    with pytest.raises(WrongStep, match="with digest"):
        await describe(donor, 3, seed=1)
    with pytest.raises(Refused, match="not held"):
        await ask(donor, DESCRIBE, DescribeRequest(part=stage_part(9), step=3, digest="0" * 64))
    await describe(donor, 3)
    with pytest.raises(WrongStep, match="describe it first"):
        await fetch(donor, 3, 0, seed=1)


async def test_donor_keeps_a_described_state_while_it_moves_on() -> None:
    old = snapshot(step=1)
    donor, clock = donor_of(old, lease_s=10.0)
    await describe(donor, 1)
    donor.offer(snapshot(step=2, seed=2), digest(snapshot(seed=2)))
    for _ in range(3):
        clock.now += 9.0
        assert await fetch(donor, 1, 1) == bytes(old.buffers()[1])
    clock.now += 10.0
    with pytest.raises(WrongStep, match="describe it first"):
        await fetch(donor, 1, 1)
    with pytest.raises(WrongStep, match="step 2"):
        await describe(donor, 1)
    await describe(donor, 2, seed=2)


async def test_donor_makes_hashes_once_though_nobody_waits_for_them_and_again_when_that_failed() -> None:
    made, go_on = 0, asyncio.Event()

    async def slow(work: Any, *args: Any) -> Any:
        nonlocal made
        made += 1
        await go_on.wait()
        if made == 1:
            raise MemoryError
        return work(*args)

    donor = StateDonor(FakeClock(), run=slow)
    donor.offer(snapshot(step=4), digest(snapshot(step=4)))
    for caller in (ME, OTHER, ME):
        impatient = asyncio.create_task(describe(donor, 4, caller))
        await turns()
        impatient.cancel()
        await turns()
    assert made == 1
    go_on.set()
    await turns()
    assert await describe(donor, 4) == await describe(donor, 4) != b""
    assert made == 2


@pytest.mark.parametrize("fetching", [False, True])
async def test_donor_whose_leases_are_hogged_has_one_for_who_downloads(fetching: bool) -> None:
    """Five identities describe a state again and again, and fetch nothing, or now and then a chunk; one joiner after
    the other wants it."""
    donor, clock = donor_of(snapshot(), max_downloads=5, lease_s=10.0)
    hogs, refused, got = [PeerId(f"hog{number}") for number in range(5)], 0, 0
    for second in range(60):
        for hog in hogs:
            try:
                await describe(donor, 0, hog)
                if fetching and second % 25 == 9:
                    await fetch(donor, 0, 0, hog)
            except Busy:
                refused += 1
        joiner = PeerId(f"joiner{got // 3}")
        try:
            await describe(donor, 0, joiner)
            await fetch(donor, 0, got % 3, joiner)
            got += 1
        except Busy:
            refused += 1
        clock.now += 1.0
    assert refused >= 5, "nobody was kept out: there was no attack"
    assert got >= 3 * 4


async def test_donor_takes_no_lease_from_who_downloads_nor_from_who_is_slow_while_nobody_waits() -> None:
    donor, clock = donor_of(snapshot(), max_downloads=1, lease_s=20.0)
    donor.offer(big := big_state(1 << 22), digest(big))
    state = called(big)
    for body in (DescribeRequest(**state), *(ChunkRequest(**state, chunk=n) for n in range(45))):
        await ask(donor, DESCRIBE if not isinstance(body, ChunkRequest) else CHUNK, body)
        clock.now += 4.0  # a chunk each four seconds is as slow as may be
    with pytest.raises(Busy):
        await ask(donor, DESCRIBE, DescribeRequest(**state), OTHER)
    clock.now += 15.0
    assert donor.serves(ME, big.part)
    await ask(donor, CHUNK, ChunkRequest(**state, chunk=45))
    clock.now += 15.0
    await ask(donor, DESCRIBE, DescribeRequest(**state), OTHER)
    assert not donor.serves(ME, big.part)


async def test_donor_says_who_downloads_as_fast_as_it_must_and_who_only_holds_leases() -> None:
    donor, clock = donor_of(big := big_state(1 << 22), lease_s=10.0)
    state = called(big)
    for caller in (ME, OTHER):
        await ask(donor, DESCRIBE, DescribeRequest(**state), caller)
    for chunk in range(20):
        await ask(donor, CHUNK, ChunkRequest(**state, chunk=chunk))
    assert donor.keeps_up(OTHER, 0.0)
    clock.now = 9.0
    assert donor.keeps_up(ME, 0.0)
    clock.now = 12.0
    await ask(donor, DESCRIBE, DescribeRequest(**state), OTHER)
    assert not donor.keeps_up(OTHER, 0.0), "a lease anew bought time"
    assert not donor.keeps_up(PeerId("nobody"), 12.0)


@pytest.mark.parametrize("chunk", [3, 4, 2**52])
async def test_donor_asked_for_a_chunk_that_is_not_says_violation(chunk: int) -> None:
    donor, _ = donor_of(snapshot())
    await describe(donor, 0)
    with pytest.raises(Violation, match="of 3"):
        await fetch(donor, 0, chunk)


async def test_donor_whose_caller_hangs_up_while_it_waits_has_given_nothing() -> None:
    donor, clock = donor_of(snapshot(), donation=Donation(most=SIZE))
    donor.step_closed()
    donor._donation.give(BURST_BYTES, 0.0)
    waiting = asyncio.Event()

    async def never(seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    await describe(donor, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "sleep", never, raising=False)
        asking = asyncio.create_task(fetch(donor, 0, 0))
        await waiting.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await fetch(donor, 0, 0)
    assert clock.now == pytest.approx(1 / 3)


async def test_donor_has_who_asks_for_too_much_of_a_part_at_once_wait_and_serves_others() -> None:
    donors = Donors(snapshot(step=0), "a")
    await donors.open(donation=Donation(most=SIZE))
    (name,) = donors.names
    greedy, modest = (donors.network.endpoint(one) for one in ("greedy", "modest"))
    for endpoint in (greedy, modest):
        await endpoint.enter(RUN)
        describing = DescribeRequest(**called(snapshot()))
        await endpoint.call(name, DESCRIBE, describing, timeout_s=10.0, max_reply_bytes=1024)
    donors.donors[name].step_closed()
    donors.donors[name]._donation.give(BURST_BYTES, 0.0)  # from here on chunks wait for their turn

    def asking(endpoint: SimEndpoint) -> asyncio.Task[Any]:
        body = ChunkRequest(**called(snapshot()), chunk=0)
        call = endpoint.call(name, CHUNK, body, timeout_s=1000.0, max_reply_bytes=CHUNK_BYTES)
        return asyncio.create_task(call)

    many = [asking(greedy) for _ in range(2 * MAX_WINDOW)]
    await turns()
    with pytest.raises(Busy, match="on their way"):
        await asking(greedy)
    await in_time(donors.clock, asking(modest))
    assert all(call.done() for call in many), "it waited for its turn behind so many, and no more"
    await in_time(donors.clock, asking(greedy))
