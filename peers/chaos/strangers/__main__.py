"""Attack the peers of a play and a sink in turns, and write down what came of it.

``python -m peers.chaos.strangers --home DIR --at ADDRESS… --targets PEER… [--run ID] [--attacks …] [--seconds S]``; the
report is ``strangers.json`` in DIR. The sink is a peer in a process of its own that has no part in the run and refuses
strangers as the run's peers do: what attackers themselves take of a machine that all share is the same in both turns.
Whatever happens, all that it started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import multiprocessing
import random
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from peers.chaos.strangers.attacks import DOERS, MOST_ANSWERED, Stranger
from peers.chaos.strangers.bodies import all_rpcs
from peers.chaos.strangers.findings import (
    REPORT,
    Side,
    StrangerFindings,
    StrangerOrders,
    check_private,
    orders_from,
)
from swarm.clock import SystemClock
from swarm.errors import Refused
from swarm.ids import PeerId, RunId
from swarm.network.addresses import parse_address, split_peer
from swarm.network.discovery.manifest import GET, GetManifest
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create

FIND_S, END_S = 20.0, 1.0
TURN_S, LEAST_TURN_S = 10.0, 2.0

logger = logging.getLogger(__name__)


async def attack(home: Path, orders: StrangerOrders, sink: StrangerSink) -> None:
    """Open the identities, have each do its attacks for the seconds of the orders, and write the report before they
    leave. Raises PeerError when nobody answers at first; what goes wrong with an attack is among the findings'
    problems."""
    clock, found, rehearsed = SystemClock(), StrangerFindings(), StrangerFindings()
    async with contextlib.AsyncExitStack() as stack:
        opening = (_open(home, orders, number, found, stack) for number in range(orders.identities))
        strangers = await asyncio.gather(*opening)
        targets, run = strangers[0].targets, strangers[0].run
        nobody, addresses = await sink.open(run)
        for stranger in strangers:
            stranger.endpoint.learn(nobody, addresses)
            await stranger.endpoint._outgoing.connect_any({nobody})
        ends = clock.monotonic() + orders.seconds
        sides: list[Side] = ["sink", "peers"]
        while (left := ends - clock.monotonic()) >= LEAST_TURN_S:
            for side in sides:
                for stranger in strangers:
                    stranger.turn_to(*((targets, found) if side == "peers" else ((nobody,), rehearsed)))
                began = clock.monotonic()
                await _turn(strangers, min(TURN_S, left / 2))
                found.turns.append((side, began, clock.monotonic()))
            sides.reverse()
        found.problems += rehearsed.problems
        found.write(home / REPORT)


async def _turn(strangers: Sequence[Stranger], seconds: float) -> None:
    tasks: list[asyncio.Task[None]] = [
        asyncio.create_task(DOERS[name](stranger), name=name) for stranger in strangers for name in stranger.shares
    ]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    over, _ = await asyncio.wait(tasks, timeout=END_S)
    for task in over:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s broke", task.get_name(), exc_info=error)
            strangers[0].findings.problems.append(f"{task.get_name()}: {type(error).__name__}: {error}"[:300])


async def _open(
    home: Path, orders: StrangerOrders, number: int, found: StrangerFindings, stack: contextlib.AsyncExitStack
) -> Stranger:
    """One identity, which has entered the run if it knows or was told which."""
    contacts = tuple(map(parse_address, orders.at))
    endpoint = await _endpoint(home / str(number), stack, orders.at)
    contact = split_peer(contacts[0])[1]
    run = RunId(orders.run) if orders.run is not None else await _run_of(endpoint, contact, found)
    targets: tuple[PeerId, ...] = (contact,)
    if run is not None:
        targets = tuple(map(PeerId, orders.targets))
        await endpoint.enter(run)
        records = await endpoint.directory.lookup(PeerRecord)
        found.answered["directory"] += bool(records)
        for peer in targets:
            if peer in records:
                check_private(records[peer].addresses)
                endpoint.learn(peer, records[peer].addresses)
    rng = random.Random(f"{orders.seed} {number}")
    shares = {name: orders.share_of(name) for name in orders.attacks_of(number)}
    return Stranger(endpoint, run, targets, rng, shares, found)


async def _endpoint(home: Path, stack: contextlib.AsyncExitStack, at: Sequence[str] = ()) -> LibP2PEndpoint:
    config = EndpointConfig(run_dir=home / "run", bootstrap=tuple(map(parse_address, at)))
    endpoint = await LibP2PEndpoint.open(config, load_or_create(home / "identity.key"), SystemClock())
    stack.push_async_callback(endpoint.close)
    return endpoint


async def _run_of(endpoint: LibP2PEndpoint, contact: PeerId, found: StrangerFindings) -> RunId | None:
    """Return the id of the run that the peer at an address is in; None where it is told to nobody who does not name
    it."""
    try:
        sizes, payload = await endpoint.call(
            contact, GET, GetManifest(), timeout_s=FIND_S, max_reply_bytes=MOST_ANSWERED
        )
    except Refused as error:
        found.outcomes[type(error).__name__] += 1
        return None
    found.answered[GET.name] += 1
    return RunId(hashlib.sha256(bytes(payload[: sizes.manifest_bytes])).hexdigest())


class StrangerSink:
    """A peer in a process that is forked now, before there is a loop, from one that has imported everything."""

    def __init__(self, home: Path) -> None:
        self._asked, asked = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=_be_sink, args=(home, asked, self._asked), name="sink", daemon=True)
        self._process.start()
        asked.close()

    async def open(self, run: RunId | None) -> tuple[PeerId, tuple[str, ...]]:
        """Have it take what strangers of this run send; its id and addresses. Raises EOFError when it has ended."""
        self._asked.send(run)
        peer, *addresses = await asyncio.to_thread(self._asked.recv)
        return PeerId(peer), tuple(addresses)

    def close(self) -> None:
        """It ends, with its daemon."""
        self._asked.close()
        self._process.join()


def _be_sink(home: Path, asked: Connection, other: Connection) -> None:
    """Refuse what strangers send as a peer of the run does, until nobody asks any more."""
    other.close()  # or we would wait for ourselves

    async def refuse(run: RunId | None) -> None:
        async with contextlib.AsyncExitStack() as stack:
            endpoint = await _endpoint(home, stack)
            if run is not None:
                await endpoint.enter(run)
            endpoint.allow_relay(lambda peer: False)
            asked.send([endpoint.peer, *endpoint.addresses])
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(asked.recv)

    with contextlib.suppress(EOFError):
        uvloop.run(refuse(asked.recv()))


def main() -> None:
    """Do what the arguments say."""
    home, orders = orders_from(sys.argv[1:])
    logging.basicConfig(level=logging.WARNING)
    all_rpcs()  # takes seconds
    sink = StrangerSink(home / "sink")
    try:
        uvloop.run(attack(home, orders, sink))
    finally:
        sink.close()


if __name__ == "__main__":
    main()
