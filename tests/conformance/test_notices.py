"""Notices, calls that nobody answers, in both worlds."""

from __future__ import annotations

import pytest

from swarm.errors import PEER_ERRORS, Unreachable
from swarm.ids import PeerId
from tests.harness.expect import eventually
from tests.harness.rigs.network import ECHO, FULL, HANG, NOTHING, RAISE, Anything, Note, Peer

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def still_talking(alice: Peer, bob: Peer) -> None:
    await alice.endpoint.call(bob.endpoint.peer, ECHO, Note(), timeout_s=30)


async def test_notice_reaches_its_handler(alice: Peer, bob: Peer) -> None:
    await alice.endpoint.notify(bob.endpoint.peer, ECHO, Note(text="hello"), timeout_s=30)
    await eventually(lambda: bob.bench.handled == 1)


async def test_notices_arrive_in_order_among_calls(alice: Peer, bob: Peer) -> None:
    for _ in range(5):
        await alice.endpoint.notify(bob.endpoint.peer, ECHO, Note(), timeout_s=30)
    await still_talking(alice, bob)
    assert bob.bench.handled == 6


@pytest.mark.parametrize("code", sorted(set(PEER_ERRORS) - {"violation"}))
async def test_notice_that_is_refused_tells_nobody(code: str, alice: Peer, bob: Peer) -> None:
    await alice.endpoint.notify(bob.endpoint.peer, RAISE, Note(text=code), timeout_s=30)
    await alice.endpoint.notify(bob.endpoint.peer, FULL, Note(), timeout_s=30)
    await alice.endpoint.notify(bob.endpoint.peer, NOTHING, Note(), timeout_s=30)
    await still_talking(alice, bob)
    assert bob.bench.handled == 1


async def test_notice_of_another_shape_is_not_handled_and_a_new_stream_serves_the_next_call(
    alice: Peer, bob: Peer
) -> None:
    await alice.endpoint.notify(bob.endpoint.peer, ECHO, Anything(content=1), timeout_s=30)

    async def served() -> bool:
        try:
            await still_talking(alice, bob)
        except Unreachable:  # it went out on the stream that was just closed
            return False
        return True

    assert await served() or await served()
    assert bob.bench.handled == 1


async def test_notice_whose_handler_outlives_its_time_is_cancelled(alice: Peer, bob: Peer) -> None:
    await alice.endpoint.notify(bob.endpoint.peer, HANG, Note(), timeout_s=0.2)
    await eventually(bob.bench.cancelled.is_set)
    await still_talking(alice, bob)


async def test_notice_to_nobody_is_unreachable(alice: Peer) -> None:
    nobody = PeerId("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")
    with pytest.raises(Unreachable):
        await alice.endpoint.notify(nobody, ECHO, Note(), timeout_s=30)
