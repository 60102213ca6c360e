"""Joining a run in progress: choose a place, hold its state, keep up, be let in. The run never waits for us."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from peers.leaving import Leaving
from peers.roles import Surroundings, build_empty, download_part
from peers.settings import PeerSettings
from peers.situation import Situation
from swarm.errors import (
    EXIT_ERROR,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    Busy,
    OutOfSync,
    PeerError,
    Refused,
    RunEnded,
    StateError,
    WrongStep,
)
from swarm.ids import PartName, PeerId
from swarm.optimization.calls import StepCalls
from swarm.optimization.changes import Admission, admission_bytes
from swarm.optimization.member import Member
from swarm.optimization.observer import Observer, ObserverContext
from swarm.optimization.part import TrainedPart
from swarm.optimization.records import CloseRecord, Decision
from swarm.optimization.roster import Member as Listed
from swarm.optimization.roster import choose_place
from swarm.pipeline.patience import Patience
from swarm.schema import Empty
from swarm.security.signing import verify

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 30.0
MAX_FAILURES = 8
"""How many donors may fail before this peer gives up, saying what went wrong. Busy ones do not count."""
FIRST_PAUSE_S = 0.2

Prepare = Callable[[TrainedPart | None, CloseRecord], Awaitable[None]]
"""Our part has the state of this record for the first time: be ready to take work with it."""


async def insist_on_being_reached(around: Surroundings, through: Sequence[PeerId]) -> None:
    """Who is named in a roster must be there for everybody in it. Raises RunEnded when nobody can call this peer."""
    problem = await around.be_reachable(through)
    if problem:
        raise RunEnded(
            f"others cannot call this peer: {problem}",
            EXIT_UNREACHABLE,
            check="can they reach a port of this machine? (swarm join --port N, opened in the firewall)",
            remedy="Open a port, or let a peer relay for this one (--relay auto, here and there).",
        )


class Joining:
    """One peer's way into a running run. ``prepare`` is called once, before anybody can send us work."""

    def __init__(
        self,
        settings: PeerSettings,
        around: Surroundings,
        member: Member,
        situation: Situation,
        leaving: Leaving,
        prepare: Prepare,
    ) -> None:
        self._settings, self._around, self._member = settings, around, member
        self._situation, self._leaving, self._prepare = situation, leaving, prepare
        self._calls = StepCalls(around.endpoint)
        self._context = ObserverContext(
            run=around.manifest.run_id,
            endpoint=around.endpoint,
            device=around.device,
            verify=verify,
            observe=member.observe,
        )
        self._known: CloseRecord | None = None
        self._part: TrainedPart | None = None
        self._prepared = False

    async def run(self, contact: PeerId) -> None:
        """Return when a record names us. Raises RunEnded when there is no place for us, or when those who could help
        failed too often."""
        failures, patience = 0, Patience(FIRST_PAUSE_S)
        while True:
            head = await self._newest(contact)
            self._around.watch.follow(())  # from here on the contact is one of many, and may leave
            self._check_place(head)
            self._learn(head)
            await insist_on_being_reached(self._around, head.members.peers)
            name = self._choose(head)
            for donor in self._donors(head, name, contact):
                try:
                    return await self._join(Observer(self._context, donor, name), contact, head)
                except (Busy, WrongStep) as later:
                    self._situation.wait_for(f"a member that can help: {later.reason}")
                except (PeerError, StateError, OutOfSync) as error:
                    failures += 1
                    logger.warning("joining with the help of %s failed: %s", donor, error)
                    if failures >= MAX_FAILURES:
                        reason = f"nobody could help this peer to join; the last that tried: {error}"
                        raise RunEnded(reason, EXIT_UNREACHABLE) from error
            await self._around.clock.sleep(patience.pause_s())

    async def _newest(self, contact: PeerId) -> CloseRecord:
        """The newest record, as the contact has it, or when it has gone any member that more than half of the roster we
        know vouch for. Raises the contact's PeerError when nobody does."""
        try:
            return (await Observer(self._context, contact, None).start(contact)).record
        except PeerError as gone:
            known = self._known
            for peer in () if known is None else known.members.peers:
                try:
                    return (await Observer(self._context, peer, None).start(contact, known)).record
                except PeerError as error:
                    logger.info("%s cannot stand in for the contact: %s", peer, error)
            raise RunEnded(f"the contact is gone, and nobody stands in for it: {gone}", EXIT_UNREACHABLE) from gone

    def _check_place(self, head: CloseRecord) -> None:
        """Raises RunEnded when it is too late to be let in, or when the record names us though we never asked."""
        last = self._around.manifest.run.steps
        if self._around.endpoint.peer not in head.members:
            if head.step + 1 >= last:
                raise RunEnded(f"the run is over but for its last step, {last}: nobody joins with that one", EXIT_ERROR)
        elif not self._leaving.admitted.is_set():
            raise RunEnded(
                "this peer's identity takes part in the run already",
                EXIT_ERROR,
                check="does another process use the same identity, or was this peer killed a moment ago?",
                remedy="Join from another place, or when the run has noticed that it is gone.",
            )

    def _learn(self, head: CloseRecord) -> None:
        self._known = head
        for member in head.roster:
            self._around.endpoint.learn(PeerId(member.peer), member.addresses)

    def _choose(self, head: CloseRecord) -> PartName | None:
        """Once: a peer that has to start over keeps its place."""
        manifest = self._around.manifest
        if self._prepared:
            return self._situation.part
        try:
            part, reason = choose_place(
                head.members,
                self._around.endpoint.peer,
                self._settings.role,
                self._settings.stage,
                stages=manifest.split.stages,
                private_ends=manifest.split.ends == "private",
            )
        except Refused as refused:
            raise RunEnded(refused.reason, EXIT_USAGE) from refused
        if (part, reason) != (self._situation.part, self._situation.reason):
            self._situation.assigned(part, reason)
        return part

    def _donors(self, head: CloseRecord, name: PartName | None, contact: PeerId) -> Sequence[PeerId]:
        """Who can help: any member with decisions, a replica with a part; in an order of our own, so that those who
        join together spread."""
        me = self._around.endpoint.peer
        donors = list(head.members.peers if name is None else head.members.replicas(name))
        random.Random(me).shuffle(donors)
        if name is None:
            donors.sort(key=lambda peer: peer != contact)  # it is known to answer
        return [peer for peer in donors if peer != me]  # a record that names us names us as a replica too

    async def _join(self, observer: Observer, contact: PeerId, known: CloseRecord) -> None:
        decision = await observer.start(contact, known)
        record, ours = decision.record, self._member.head
        if ours is not None and record.step < ours.step:
            raise WrongStep(f"it is at step {record.step}, this peer at {ours.step}", peer=observer.donor)
        if ours is not None and record.hash() == ours.hash():
            observer.resume(self._part)  # only the donor is another
        else:
            await self._install(observer, decision)
        while not self._member.is_member:
            await self._ask(observer.head)
            self._learn(await observer.follow())

    async def _install(self, observer: Observer, decision: Decision) -> None:
        name = self._situation.part
        if name is not None:
            if self._part is None or self._part.spec.name != name:
                self._part = await build_empty(self._around, name)
            await download_part(self._around, decision.record, self._part, observer.donor)
        if not self._prepared:
            await self._prepare(self._part, decision.record)
            self._prepared = True
        await observer.begin(decision, self._part)

    async def _ask(self, head: CloseRecord) -> None:
        """Ask the leader of the open step to be in its record's roster. A no is for this step only."""
        around, step = self._around, head.step + 1
        self._check_place(head)
        me = around.endpoint.peer
        if self._leaving.asked:  # what was asked before has been decided: no record names us
            raise RunEnded("it left before it took part", self._leaving.exit_code)
        member = Listed(
            peer=me,
            role=self._settings.role,
            name=self._settings.name,
            part=self._situation.part,
            addresses=around.endpoint.addresses[:8],
        )
        signature = around.identity.sign(admission_bytes(around.manifest.run_id, step, head.hash(), member))
        body = Admission(step=step, member=member, signature=signature)
        self._leaving.admitted.set()
        self._situation.wait_for(f"step {step} to close, to be let in")
        leader = head.members.leader(step)
        try:
            await self._calls.ask(leader, "lead/1/join", body, Empty, timeout_s=ASK_TIMEOUT_S)
        except PeerError as error:
            logger.info("not in step %d: %s", step, error)
            if isinstance(error, Refused):
                self._situation.wait_for(f"step {step} to close, to ask again: {error.reason}")
