"""A relay of no run between real endpoints: dialled by IPv4, by IPv6 and by name; it leaves, and it is said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from swarm.clock import SystemClock
from swarm.ids import RunId
from swarm.network.addresses import parse_address
from swarm.network.endpoint import LibP2PEndpoint
from swarm.network.reach.reachability import reachability
from swarm.network.reach.standing import StandingLimits, StandingRelay, relays_on_the_way
from tests.harness.expect import LONG_S, eventually
from tests.harness.rigs.network import UP, Note, ServiceBench
from tests.harness.supervised import HIDDEN
from tests.harness.supervised import endpoint_of as opened

pytestmark = pytest.mark.network

RUN = RunId("5e" * 32)
BOTH = [parse_address(f"/{host}/tcp/0", use="listen") for host in ("ip4/127.0.0.1", "ip6/::1")]


@asynccontextmanager
async def standing(home: Path) -> AsyncIterator[tuple[LibP2PEndpoint, StandingRelay]]:
    async with opened(home, "relay", run=None, listen=BOTH, kinds=()) as endpoint:
        yield endpoint, await endpoint.stand(StandingLimits())


def at(relay: LibP2PEndpoint, how: str) -> Multiaddr:
    """The relay's address of that family, or by the name that every machine has for itself."""
    family = "/ip6/::1" if how == "/ip6/::1" else "/ip4/127.0.0.1"
    own = next(text for text in relay.addresses if text.startswith(family))
    return parse_address(own.replace(family, how, 1))


@pytest.mark.parametrize("how", [pytest.param("/ip4/127.0.0.1", marks=pytest.mark.long), "/ip6/::1", "/dns4/localhost"])
async def test_founder_that_nobody_can_dial_is_called_through_a_relay_of_no_run(home: Path, how: str) -> None:
    async with standing(home) as (relay, serving):
        through = at(relay, how)
        async with opened(home, "founder", run=None, relays=[through], **HIDDEN) as founder:
            await founder.enter(RUN)
            founder.mount(ServiceBench())
            reach = await reachability(founder, [], SystemClock())
            assert (reach.how, founder.relays) == ("relayed", (relay.peer,)), reach
            circuit = f"{through}/p2p-circuit/p2p/{founder.peer}"
            assert circuit in founder.addresses
            invited = [Multiaddr(circuit)]
            async with opened(home, "joiner", run=None, bootstrap=invited, relays=relays_on_the_way(invited)) as joiner:
                await joiner.enter(RUN)
                reply, _ = await joiner.call(
                    founder.peer, UP, Note(number=1 << 20), timeout_s=LONG_S, payload=bytes(1 << 20)
                )
                assert reply.number == 1 << 20
                assert await joiner.link_kind(founder.peer) == "relayed"
                assert [str(each) for each in await joiner.guests(RUN)] == [circuit]
                figures = serving.figures()
                assert (figures.slots, figures.runs, figures.circuits) == (1, 1, 1)
                assert figures.relayed_bytes > 1 << 20


async def test_relay_that_leaves_is_missed_at_once_and_said(home: Path) -> None:
    async with (
        standing(home) as (relay, serving),
        opened(home, "f", run=None, relays=[at(relay, "/ip6/::1")], **HIDDEN) as founder,
    ):
        await founder.enter(RUN)
        await reachability(founder, [], SystemClock())
        changed: list[int] = []
        founder.when_relays_change(lambda: changed.append(len(founder.relays)))
        await serving.close(relay)
        await eventually(lambda: changed == [0], what="the founder to be told")
        assert not any("p2p-circuit" in text for text in founder.addresses)
