"""Sees a run from outside with an invite: a peer that holds nothing, votes on nothing, and is in nobody's roster.

It follows the chain of close records as a joiner does, so that what it shows was signed by a majority, and asks the
members how they are. When the one who leads it on is gone, another member of the last verified roster does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from peers.console.words import count
from peers.dashboard.overview import Overview
from peers.invites.invite import Contacts
from peers.invites.showing import show
from peers.manifest_file import manifest_sent
from peers.options.model import ANY_PORT
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.consensus.records import CloseRecord, Decision
from swarm.errors import PeerError, StateError, Unreachable
from swarm.ids import PeerId, RunId
from swarm.membership.contact import cannot_reach, find_run
from swarm.membership.observer import Observer, ObserverContext
from swarm.membership.vitals import Vitals, VitalsBoard
from swarm.network.addresses import by_peer, parse_address
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.planning.costs import model_parameter_count
from swarm.security.signing import verify
from swarm.waiting import first_done

logger = logging.getLogger(__name__)

AGAIN_S = 2.0
MAX_SOURCES = 8
FIRST_S = 3.0
"""The first look waits so long for the newest record, so that who looks once does not see an empty run."""
T = TypeVar("T")


class _Inline:
    """Nothing is computed by who holds nothing."""

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """See :class:`swarm.device.Executor`."""
        return fn(*args)


class ObserverSource:
    """A run as an endpoint of our own sees it. See :class:`peers.dashboard.sources.RunSource`; made by :meth:`open`."""

    def __init__(self, endpoint: LibP2PEndpoint, clock: Clock, manifest: Manifest, contact: PeerId) -> None:
        self._endpoint, self._clock, self._manifest, self._contact = endpoint, clock, manifest, contact
        self._board = VitalsBoard(endpoint, clock)
        self._random = random.Random(endpoint.peer)
        self._parameters = model_parameter_count(manifest.model)
        self._waits_for = _beginning(manifest)
        self._records: deque[tuple[CloseRecord, float | None]] = deque()
        self._head: CloseRecord | None = None
        self._begun = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._context = ObserverContext(
            run=manifest.run_id, endpoint=endpoint, device=_Inline(), verify=verify, observe=self._observed
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, contacts: Contacts, clock: Clock) -> AsyncIterator[ObserverSource]:
        """Find the run and follow it inside the ``async with``, entered with the newest record, or after FIRST_S
        without one. Raises RunEnded where no contact answers."""
        with tempfile.TemporaryDirectory(prefix="swarm-look-") as scratch:
            addresses = [parse_address(text, key="INVITE") for text in contacts.addresses]
            config = EndpointConfig(
                run_dir=Path(scratch),
                listen=(parse_address(ANY_PORT, key="listen", use="listen"),),
                bootstrap=addresses,
                relay="off",
            )
            identity = load_or_create(Path(scratch) / "identity.key")
            try:
                endpoint = await LibP2PEndpoint.open(config, identity, clock)
            except Unreachable as error:
                raise cannot_reach(contacts.addresses) from error
            try:
                expected = None if contacts.run is None else RunId(contacts.run)
                contact, manifest, _ = await find_run(endpoint, by_peer(addresses), expected, manifest_sent)
                show(endpoint, contacts)
                await endpoint.enter(manifest.run_id)
                self = cls(endpoint, clock, manifest, contact)
                self._following = following = asyncio.create_task(self._follow())
                try:
                    await first_done(self._begun.wait(), clock.sleep(FIRST_S))
                    yield self
                finally:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
            finally:
                await endpoint.close()

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """See :class:`peers.dashboard.sources.RunSource`. Raises what has ended the following."""
        if self._following is not None and self._following.done():
            self._following.result()
        overview.founded(self._manifest, self._parameters)
        while self._records:
            overview.record(*self._records.popleft())
        if watched and self._head is not None:
            look = await self._look(self._head)
            overview.look(look)
            if not look["vitals"]:
                overview.pulse.missed("away", "no member of the run answers: all are gone, or this machine is cut off")
        elif self._head is None:
            overview.pulse.waits_for = self._waits_for

    async def standing(self) -> tuple[Manifest, CloseRecord | None, dict[PeerId, Vitals]]:
        """Return the run, its newest record that was verified, None before there is one, and what its members say of
        themselves now. Raises what has ended the following."""
        if self._following is not None and self._following.done():
            self._following.result()
        head = self._head
        return self._manifest, head, {} if head is None else dict(await self._board.look(head.members.peers))

    async def _look(self, head: CloseRecord) -> dict[str, Any]:
        said = await self._board.look(head.members.peers)
        kinds: dict[PeerId, str] = {}
        with contextlib.suppress(PeerError):
            kinds = dict(await self._endpoint.links())
        members = [
            {**member.model_dump(), "state": "member", "link": kinds.get(PeerId(member.peer), "unknown")}
            for member in head.members.members
        ]
        return {
            "members": members,
            "vitals": {peer: vitals.model_dump() for peer, vitals in said.items()},
            "round_trips": self._board.round_trips,
            "unanswered": self._board.unanswered,
        }

    async def _observed(self, decision: Decision) -> None:
        record = decision.record
        self._records.append((record, None if self._head is None else self._clock.wall()))  # the first closed long ago
        self._head = record
        self._begun.set()
        for member in record.members.members:
            self._endpoint.learn(PeerId(member.peer), member.addresses)

    async def _follow(self) -> None:
        """Take record after record until the run is over, no matter who of those that lead on is lost."""
        while self._head is None or not self._over(self._head):
            try:
                observer = Observer(self._context, self._update_sources(), None)
                contact = self._contact if self._head is None else None
                decision = await observer.start(contact, self._head)
                if self._head is None or decision.record.step > self._head.step:
                    await self._observed(decision)
                while self._head is not None and not self._over(self._head):
                    await observer.follow()
            except (PeerError, StateError) as error:
                logger.info("nobody leads on just now: %s", error)
                await self._clock.sleep(AGAIN_S)

    def _update_sources(self) -> list[PeerId]:
        """Return who may lead on: the contact at first, then members of the newest roster, others for each of us."""
        members = [] if self._head is None else list(self._head.members.peers)
        self._random.shuffle(members)
        return members[:MAX_SOURCES] or [self._contact]

    def _over(self, record: CloseRecord) -> bool:
        return record.ended or record.step >= self._manifest.run.steps


def _beginning(manifest: Manifest) -> str:
    """Return for what the run waits before it begins."""
    when = manifest.run.start_when
    hosts, trainers = count(when.stage_hosts, "stage host"), count(when.trainers, "trainer")
    return f"for word of the newest step; a new run begins when {hosts} and {trainers} are there"
