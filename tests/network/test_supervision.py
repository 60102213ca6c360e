"""A libp2p daemon that dies under a living peer is replaced, and nobody needs to know; one of a killed peer ends."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from swarm.clock import SystemClock
from swarm.errors import Unreachable
from swarm.events import DaemonLost, DaemonRestarted
from swarm.network.addresses import parse_address, tcp_port_of
from swarm.network.libp2p.supervisor import RestartLimits
from swarm.network.reach.reachability import reachability
from tests.harness.cycles import cycle_daemon, cycle_peer
from tests.harness.expect import LONG_S, eventually
from tests.harness.mortal_peer import RUN, nursery
from tests.harness.processes import assert_nothing_left, take_snapshot
from tests.harness.rigs.network import HANG, Note
from tests.harness.supervised import HIDDEN, introduce, opened

pytestmark = pytest.mark.network
FEW = 20


async def test_daemon_killed_ends_calls_in_flight_at_once_on_both_sides(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        introduce(alice, bob)
        calls = [
            asyncio.ensure_future(one.endpoint.call(other.endpoint.peer, HANG, Note(), timeout_s=LONG_S))
            for one, other in ((alice, bob), (bob, alice))
        ]
        for peer in (alice, bob):
            await asyncio.wait_for(peer.bench.started.wait(), LONG_S)
        alice.kill_daemon()
        failures = await asyncio.gather(*calls, return_exceptions=True)
        await alice.bench.cancelled.wait()
        await bob.bench.cancelled.wait()
        assert [type(failure) for failure in failures] == [Unreachable, Unreachable]


async def test_daemon_killed_is_replaced_and_all_goes_on(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        introduce(alice, bob)
        await alice.announce()
        await bob.announce()
        first, addresses = alice.endpoint.daemon_pid, alice.endpoint.addresses
        before = {peer: await alice.ask(other) for peer, other in (("b", bob), ("self", alice))}
        await bob.ask(alice)
        alice.kill_daemon()
        await eventually(lambda: alice.sink.count(DaemonLost))
        # What is asked meanwhile waits for the next daemon, and fails nobody.
        assert {"b": await alice.ask(bob), "self": await alice.ask(alice)} == before
        assert alice.sink.events[0] == DaemonLost(exit_code=-signal.SIGKILL)
        assert isinstance(alice.sink.events[1], DaemonRestarted)
        assert alice.sink.events[1].pid == alice.endpoint.daemon_pid != first
        assert alice.sink.events[1].attempts == 1
        assert alice.endpoint.addresses == addresses
        await bob.ask_until_answered(alice)
        both = {alice.endpoint.peer, bob.endpoint.peer}
        assert set(await alice.found()) == both
        assert set(await bob.found()) == both
        # Nor does a newcomer that knows nobody else notice.
        async with opened(home, "c", alice) as carol:
            introduce(alice, carol)
            assert await carol.ask(alice) == await alice.ask(carol) == 7
            assert set(await carol.found()) == both
            await carol.announce()
            assert set(await alice.found()) == {*both, carol.endpoint.peer}


@pytest.mark.parametrize("known_by", ["address", "record"])
async def test_peer_that_dialled_while_nobody_listened_is_connected_anew(home: Path, known_by: str) -> None:
    """libp2p would keep it from dialling again for 5 s, in which it would be refused some hundred times."""
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        if known_by == "address":
            introduce(alice, bob)
        else:
            await bob.announce()
        await bob.ask(alice)
        alice.kill_daemon()
        await bob.ask_until_refused(alice)
        await alice.restarted()
        assert await bob.ask_until_answered(alice) < FEW


async def test_directory_operations_during_a_restart_wait_and_keep_records(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        await alice.announce()
        bob.kill_daemon()
        await eventually(lambda: bob.sink.count(DaemonLost))
        await asyncio.gather(bob.announce(), bob.found())
        assert bob.sink.count(DaemonRestarted) == 1
        assert set(await alice.found()) == {alice.endpoint.peer, bob.endpoint.peer}


@pytest.mark.long
async def test_record_is_announced_again_with_the_addresses_of_now(home: Path) -> None:
    """Somebody takes the port meanwhile: the next daemon listens elsewhere, and the directory says where."""
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        introduce(alice, bob)
        await bob.announce()
        old = bob.endpoint.addresses
        port = tcp_port_of(parse_address(old[0]))
        thieves: list[socket.socket] = []
        bob.sink.at[DaemonLost] = lambda: thieves.append(socket.create_server(("127.0.0.1", port)))
        bob.kill_daemon()
        try:
            await bob.restarted()
            restarted = bob.sink.events[-1]
            assert isinstance(restarted, DaemonRestarted)
            assert restarted.attempts == 3, "the port was not taken"
            await eventually(lambda: bob.endpoint.addresses != old)
            await alice.finds(lambda found: found[bob.endpoint.peer].addresses == bob.endpoint.addresses)
            await alice.ask_until_answered(bob)
        finally:
            thieves[0].close()


async def test_daemon_is_replaced_though_the_bootstrap_peers_are_gone(home: Path) -> None:
    async with opened(home, "b0") as early, opened(home, "a", early) as alice, opened(home, "b", early) as bob:
        introduce(alice, bob)
        await alice.announce()
        await bob.announce()
        await early.endpoint.close()
        bob.kill_daemon()
        await bob.restarted()
        await alice.ask_until_answered(bob)
        await bob.finds(lambda found: set(found) == {alice.endpoint.peer, bob.endpoint.peer})


@pytest.mark.long
async def test_daemon_that_dies_again_while_peers_are_greeted_is_replaced_again(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        introduce(alice, bob)
        await bob.announce()
        again = iter(range(2))
        bob.sink.at[DaemonRestarted] = lambda: next(again, None) is not None and bob.kill_daemon()
        bob.kill_daemon()
        await bob.restarted(3)
        await alice.ask_until_answered(bob)
        assert await bob.ask(alice) == 7
        assert set(await alice.found()) == {bob.endpoint.peer}
        assert bob.sink.count(DaemonLost) == 3


async def test_daemon_that_dies_too_often_ends_it_with_its_last_words(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice, restarts=RestartLimits(deaths=3)) as bob:
        introduce(alice, bob)
        bob.sink.at[DaemonRestarted] = bob.kill_daemon
        bob.kill_daemon()
        async with asyncio.timeout(LONG_S):
            reason = await bob.endpoint.wait_daemon()
        assert reason.startswith("our libp2p daemon died 3 times within 60 s, the last time: killed by SIGKILL")
        assert bob.sink.count(DaemonLost) == 3
        with pytest.raises(Unreachable, match="died 3 times"):
            await bob.ask(alice)
        assert await bob.ask(bob) == 7


async def test_endpoint_whose_daemon_dies_before_it_enters_enters(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice, run=None) as bob:
        bob.kill_daemon()
        await bob.endpoint.enter(RUN)
        assert bob.sink.count(DaemonRestarted) == 1
        assert await bob.ask(alice) == 7


async def test_endpoint_closed_during_a_restart_leaves_nothing(home: Path) -> None:
    for moment in (DaemonLost, DaemonRestarted):
        async with opened(home, "a") as alice:
            before = take_snapshot()
            closing: list[asyncio.Task[None]] = []
            watching = asyncio.ensure_future(alice.endpoint.wait_daemon())
            alice.sink.at[moment] = lambda: closing.append(asyncio.ensure_future(alice.endpoint.close()))  # noqa: B023
            asking = asyncio.ensure_future(alice.ask(alice))
            alice.kill_daemon()
            await eventually(lambda: closing)  # noqa: B023
            async with asyncio.timeout(LONG_S):
                await closing[0]
                assert await watching == ""
                await asyncio.gather(asking, return_exceptions=True)
            await asyncio.to_thread(assert_nothing_left, before)
            assert list((home / "a").iterdir()) == []


@pytest.mark.long
async def test_peer_behind_a_relay_is_reached_again_whichever_daemon_dies(home: Path) -> None:
    async with (
        opened(home, "a") as relay,
        opened(home, "c", relay, **HIDDEN) as carol,
        opened(home, "d", relay, **HIDDEN) as dave,
    ):
        reach = await reachability(dave.endpoint, [relay.endpoint.peer], SystemClock())
        assert (reach.how, dave.endpoint.relays) == ("relayed", (relay.endpoint.peer,))
        introduce(carol, dave)
        assert await carol.ask(dave) == 7
        for dying in (dave, carol, relay):
            dying.kill_daemon()
            await dying.restarted()
            await carol.ask_until_answered(dave)
            await eventually(lambda: dave.endpoint.relays == (relay.endpoint.peer,))
            assert dave.endpoint.addresses[0] == reach.addresses[0]
            assert await carol.endpoint.link_kind(dave.endpoint.peer) == "relayed"


async def test_relay_killed_with_its_circuits_leaves_nothing(home: Path) -> None:
    with nursery(home) as born:
        mortal = await asyncio.to_thread(born.start, "relay")
        async with (
            opened(home, "c", mortal.addresses[0], **HIDDEN) as carol,
            opened(home, "d", mortal.addresses[0], **HIDDEN) as dave,
        ):
            await reachability(dave.endpoint, [mortal.peer], SystemClock())
            introduce(carol, dave)
            assert await carol.ask(dave) == 7
            assert await carol.endpoint.link_kind(dave.endpoint.peer) == "relayed"
            mortal.kill()
            await carol.ask_until_refused(dave)
            await eventually(lambda: not Path(f"/proc/{mortal.daemon}").exists(), what="the relay's daemon ending")
            again = await asyncio.to_thread(born.start, "relay")
            assert again.peer == mortal.peer
            for peer in (carol, dave):
                peer.endpoint.learn(again.peer, again.addresses)
            await dave.endpoint.take_relay([again.peer])
            introduce(carol, dave)
            await carol.ask_until_answered(dave)
            assert {each.name for each in (home / "relay").iterdir()} == {"endpoint.lock", "p2pd.sock", "client.sock"}
            again.kill()


@pytest.mark.long
async def test_daemon_killed_again_and_again_leaves_nothing_behind(home: Path) -> None:
    await cycle_daemon(home, cycles=8)


@pytest.mark.long
async def test_peer_killed_again_and_again_leaves_nothing_behind(home: Path) -> None:
    await cycle_peer(home, cycles=8)
