"""Payloads in the network in memory that stand for larger ones: what they weigh, and what nothing but links sees."""

from __future__ import annotations

import asyncio

import pytest

from swarm.ids import PeerId, RunId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Rpc
from swarm.schema import Empty
from swarm.sim.links import Links, Traffic
from swarm.sim.loop import LoopClock, run_world
from swarm.sim.network import SimNetwork
from swarm.sim.wires import PayloadWeights

RUN = RunId("a" * 64)
HEAVY, SUMS, PLAIN = (Rpc(name, Empty, Empty) for name in ("pipeline/1/forward", "averaging/1/chunk", "state/1/chunk"))
TOKENS = Rpc("pipeline/1/targets", Empty, Empty)
REAL, RATE = 1000, 1_000_000


class Echo:
    """Answers with what it got."""

    def methods(self) -> list[AnyMethod]:
        def any_size(caller: PeerId, body: Empty, size: int) -> None:
            return None

        return [rpc.handled_with_payload(self._echo, admit=any_size) for rpc in (HEAVY, SUMS, PLAIN, TOKENS)]

    async def _echo(self, caller: PeerId, body: Empty, incoming: Incoming) -> Answer[Empty]:
        return Answer(Empty(), bytes(incoming.payload))


async def echoed(rpc: Rpc[Empty, Empty]) -> tuple[float, int, int]:
    """Seconds of a call whose answer is as large as what it sent, and the bytes that its caller sent and received."""
    links = Links.parse({"default": {"mbit_per_s": RATE * 8 / 1e6}})
    network = SimNetwork(LoopClock(), traffic=Traffic(links))
    network.weights = PayloadWeights(activations=1000.0, averages={"alice": 500.0, "b*": 2000.0})
    alice, bob = network.endpoint("alice"), network.endpoint("bob")
    for one in (alice, bob):
        await one.enter(RUN)
    bob.mount(Echo())
    began = asyncio.get_running_loop().time()
    _, back = await alice.call(bob.peer, rpc, Empty(), timeout_s=100, payload=bytes(REAL), max_reply_bytes=REAL)
    assert back == bytes(REAL)  # nobody but the links sees another size
    return asyncio.get_running_loop().time() - began, *alice.statistics().total


@pytest.mark.parametrize(
    ("rpc", "sent", "received"),
    [(HEAVY, 1_000_000, 1_000_000), (SUMS, 500_000, 2_000_000), (PLAIN, REAL, REAL), (TOKENS, REAL, REAL)],
    ids=lambda value: value.name if isinstance(value, Rpc) else str(value),
)
def test_payloads_are_as_heavy_on_links_as_what_they_stand_for(
    rpc: Rpc[Empty, Empty], sent: int, received: int
) -> None:
    seconds, out, home = run_world(echoed(rpc))
    heads = 200  # of both frames
    assert sent <= out <= sent + heads
    assert received <= home <= received + heads
    assert seconds == pytest.approx((out + home) / RATE)


def test_payloads_weigh_what_they_are_unless_somebody_says_otherwise() -> None:
    assert PayloadWeights().added(HEAVY.name, "alice", REAL) == 0
    weights = PayloadWeights(averages={"alice": 2.0})
    assert weights.added(SUMS.name, "alice", REAL) == REAL
    assert weights.added(SUMS.name, "carol", REAL) == 0
    assert PayloadWeights(activations=0.5).added(HEAVY.name, "alice", REAL) == -REAL // 2
