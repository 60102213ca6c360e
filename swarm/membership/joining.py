"""Joining a run in progress: choose a place, hold its state, keep up, be let in. The run never waits for us."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from swarm.consensus.changes import Admission, admission_bytes
from swarm.consensus.copies import copy_holders
from swarm.consensus.faults import barred_words
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import ROUTES, TRAINERS
from swarm.consensus.roster import Member as Listed
from swarm.consensus.slowness import rests_until
from swarm.errors import (
    Advice,
    Busy,
    DeadlineMissed,
    Ending,
    OutOfSync,
    PeerError,
    Refused,
    RunEnded,
    StateError,
    Superseded,
    Unadmitted,
    Unreachable,
    WrongStep,
)
from swarm.ids import ENDS, PartName, PeerId
from swarm.membership.announcer import only_calls
from swarm.membership.contact import GOES_ON, LONGEST_PAUSE_S, not_admitted
from swarm.membership.download import StateFetch
from swarm.membership.going_back import went_back
from swarm.membership.leaving import ended_in_order
from swarm.membership.observer import Observer, ObserverContext
from swarm.membership.roles import insist_on_being_reached
from swarm.membership.run import RunContext
from swarm.membership.survey import Survey
from swarm.optim.part import TrainedPart
from swarm.security.signing import verify
from swarm.state.snapshot import Snapshot
from swarm.step.blocked import ONCE_WANTED
from swarm.step.member.member_service import MemberService
from swarm.step.messages import JOIN
from swarm.waiting import ExponentialBackoff, first_done

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 30.0
ASK_AGAIN_S = 3.0
"""How often a step's leader is asked while the step is open."""
LOOK_S, MAX_LOOKED = 0.5, 4
"""How often others are asked whether the run went back to a checkpoint, and how many at a time: they begin at once, and
count on this peer."""
FIRST_PAUSE_S = 0.2
UNADMITTED = 2
"""So many peers, where there are as many, must say that our invite does not count, before we believe it."""
PARTED = "the stages share their layers no more"
MAX_LEADERS = 4
"""How many of a step's succession are asked who leads it; all of it where the step waits for just that."""
LISTEN_EVERY_S = 30.0
"""How often a peer that was started anew listens whether another process takes part in its name."""

Prepare = Callable[[TrainedPart | None, CloseRecord], Awaitable[None]]
"""Our part has the state of this record for the first time: be ready to take work with it."""
Latest = Callable[[PartName, int], Snapshot | None]
"""The newest state of a part on this machine's disk, of a step up to this one; None for none. Blocking."""


class Joining:
    """One peer's way into a running run. ``prepare`` is called once, before anybody can send us work; ``latest`` gives
    what this disk has of a part that nobody else may have."""

    def __init__(self, run: RunContext, member: MemberService, prepare: Prepare, latest: Latest) -> None:
        self._run, self._around, self._at = run, run.around, run.position
        self._member, self._prepare, self._latest = member, prepare, latest
        self._survey = Survey(run)
        self._context = ObserverContext(
            run=run.rules.run,
            endpoint=run.around.endpoint,
            device=run.around.device,
            verify=verify,
            observe=member.observe,
        )
        self._known: CloseRecord | None = None
        self._invited_by: PeerId | None = None
        self._state = StateFetch(run.around)
        self._prepared, self._attempts, self._asking = False, 0, -1
        self._listen_at, self._looked = 0.0, 0
        self._alone = False
        """No host is there of our part, which our organisation keeps to itself: nobody else has its state."""

    async def run(self, contact: PeerId | None) -> None:
        """Return when a record names us. Raises RunEnded when there is no place for us, or when nobody could help with
        one more verified byte for as long as the manifest says. Busy ones can, later."""
        now, began = self._around.clock.monotonic, self._around.clock.monotonic()
        patience, pauses = ExponentialBackoff(FIRST_PAUSE_S), ExponentialBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            before = self._here
            try:
                if await self._try(contact, patience):
                    return
                continue
            except (Busy, WrongStep) as later:
                if isinstance(later, WrongStep) and self._at.head is not None and await self._went_back(self._at.head):
                    return
                began = now()
                self._run.situation.wait_for(f"a member that can help: {later.reason}")
                pause_s = patience.pause_s()
            except (PeerError, StateError, OutOfSync) as error:
                logger.info("joining failed: %s", error)
                if self._known is not None and await self._went_back(self._known):
                    return
                if self._here != before:
                    began = now()
                    pauses.restart()
                elif now() - began >= self._run.rules.wait_for_lost_s:
                    reason = f"nobody could help this peer to join for {now() - began:.0f} s; the last that tried"
                    raise RunEnded(f"{reason}: {error}", Ending.UNREACHABLE, remedy=Advice.JOIN_ANEW) from error
                self._run.situation.wait_for(f"a member that can help it to join ({error}); {GOES_ON}")
                pause_s = pauses.pause_s()
            await self._around.clock.sleep(pause_s)

    async def _try(self, contact: PeerId | None, patience: ExponentialBackoff) -> bool:
        """Return whether a record names us now; False after a wait for others to notice something. Raises RunEnded, and
        what those who were to help failed with."""
        self._check_ended(self._known, self._at.head)  # nobody else may be there to say so
        newest = await self._newest(contact)
        head = newest.record
        self._around.watch.follow(())  # from here on the contact is one of many, and may leave
        self._check_place(head)
        self._learn(head)
        lost = await self._survey.lost(head.members, contact)
        if self._is_double(head):
            await self._member.stand_in(newest)  # also where we are needed: without our vote there may be no majority
            if not self._is_needed(head, lost):
                await self._wait_for_notice(head, patience)
                return False
        await insist_on_being_reached(self._around, head.members.peers)
        # Once it holds a state it keeps its place, also when it has to start over.
        self._check_parted(head)
        name = self._run.situation.part if self._placed(head) else await self._survey.choose(head, lost)
        kept = name in head.members.owners
        self._alone = kept and (name in lost or not head.members.replicas(PartName(name or "")))
        donors = self._donors(head, name, contact, self._attempts + (name in lost))
        self._attempts += 1
        try:
            await self._join(donors, contact, head)
        except (PeerError, StateError, OutOfSync) as error:
            if name not in lost or isinstance(error, (Busy, WrongStep)):
                raise
            await self._wait_for_return(head, str(error))  # nobody has its state: the run may go back
            return self._at.back is not None
        return True

    @property
    def _here(self) -> tuple[int, int]:
        """Return what has been reached: (step observed, bytes verified of the state that is being downloaded)."""
        head = self._at.head
        return (-1 if head is None else head.step), self._state.verified_bytes

    async def again(self, part: TrainedPart | None, known: CloseRecord | None, contact: PeerId | None = None) -> None:
        """Come back into a run that went on without us, with the part that we hold. Which record is the newest, more
        than half of those in the roster of ``known`` have to say; when they have gone, ``contact``, by default the peer
        whose invite was followed; nobody where this peer founded the run. Raises as :meth:`run`."""
        self._state.part, self._known = part, known
        self._prepared = part is not None or self._run.situation.part is None
        self._invited_by = contact or (None if self._run.founds else self._run.contact)
        if known is None or not await self._went_back(known):
            await self.run(None)

    async def _newest(self, contact: PeerId | None) -> Decision:
        """The newest decision, as the contact has it or another that was given beside it, or without one or when they
        have gone, any member that more than half of the roster we know attest. Raises Unreachable when nobody does,
        RunEnded where nobody is known who could."""
        known, trusted = self._known, [] if contact is None else [contact, *self._run.settings.contacts]
        ways: list[tuple[PeerId, PeerId | None, CloseRecord | None]] = [(peer, peer, None) for peer in trusted]
        ways += [(peer, contact, known) for peer in self._witnesses(known)]
        ways += [(peer, peer, None) for peer in (self._invited_by,) if peer is not None]
        failures: list[PeerError] = []
        for peer, believed, attesting in ways:
            try:
                return await Observer(self._context, [peer], None).start(believed, attesting)
            except PeerError as error:
                logger.info("%s does not show what the newest record is: %s", peer, error)
                failures.append(error)
        if not failures:
            raise RunEnded("this peer knows no member that could show the newest record", Ending.UNREACHABLE)
        raise Unreachable(f"no member shows the newest record: {failures[0]}")

    def _witnesses(self, known: CloseRecord | None) -> list[PeerId]:
        """The others of the roster that we know, in an order of our own, those that are believed gone last."""
        me, gone = self._around.endpoint.peer, self._around.watch.gone
        others = [] if known is None else [peer for peer in known.members.peers if peer != me]
        random.Random(me).shuffle(others)
        return sorted(others, key=lambda peer: peer in gone)

    def _check_ended(self, *records: CloseRecord | None) -> None:
        """Raises RunEnded, in order, for a record that ended the run without us."""
        for record in records:
            if record is not None and record.ended and not self._at.names(record):
                raise RunEnded(ended_in_order(record.step), self._run.exit.ending)

    def _check_place(self, head: CloseRecord) -> None:
        """Raises RunEnded when it is too late to be let in, or will be when we are not barred any more: in order, when
        there is nothing more to take part in."""
        me, last = self._around.endpoint.peer, self._around.manifest.run.steps
        self._check_ended(head)
        if head.step >= last and not self._at.names(head):
            raise RunEnded(f"the run is over: its last step, {last}, is closed", Ending.DONE)
        if me in head.members:
            return
        if (barred := rests_until(head.barred, me)) > head.step + 1 and barred >= last:
            raise RunEnded(f"this peer takes no part: {barred_words(barred, last)}", Ending.FAILED)
        if head.step + 1 >= last:
            raise RunEnded(f"only the last step, {last}, of the run is left: no peer can join with it", Ending.FAILED)

    def _check_parted(self, head: CloseRecord) -> None:
        """Begin with nothing where there is no such part any more as was held, or fetched, for stages have parted; with
        the one that a record gives us, where it does."""
        me, held = self._around.endpoint.peer, self._run.situation.part
        if held is None or held in head.digests:
            return
        self._state, self._prepared = StateFetch(self._run.around), False
        if self._at.names(head) and (part := head.members[me].part) is not None:
            self._run.assigned(PartName(part), PARTED, head)

    def _placed(self, head: CloseRecord) -> bool:
        """Return whether this peer keeps its place: it has to start over, or was moved there and has nothing of it
        yet."""
        me = self._around.endpoint.peer
        return self._prepared or (self._at.names(head) and head.members[me].part == self._run.situation.part)

    def _is_double(self, head: CloseRecord) -> bool:
        """Return whether the record names another life of this peer: one before this process, or beside it."""
        return self._around.endpoint.peer in head.members and not self._at.names(head)

    async def _wait_for_notice(self, head: CloseRecord, patience: ExponentialBackoff) -> None:
        """Wait a little for the run to notice that who was there under our name is gone. Raises RunEnded when that one
        is heard, now or later: what is sent to it must not come here. Who is not heard is gone, however long the run
        takes to notice: it may be waiting for just this peer's vote."""
        clock = self._around.clock
        self._run.situation.wait_for("the run to notice that this peer was started anew")
        if clock.monotonic() >= self._listen_at:
            if await self._around.watch.twin(head.members.peers):
                raise RunEnded(
                    "a peer with this identity is in the run already",
                    Ending.FAILED,
                    check="does another process use the same identity, here or on another machine?",
                    remedy="Join from another place.",
                )
            self._listen_at = clock.monotonic() + LISTEN_EVERY_S
        await clock.sleep(patience.pause_s())

    async def _wait_for_return(self, head: CloseRecord, why: str) -> None:
        """Ask to hold a part whose state nobody gives: the run may go back to a checkpoint with this peer. Returns when
        it does, or after a moment, for the part may be held again."""
        part = self._run.situation.part
        asks = f"; {ONCE_WANTED}" if self._run.rules.rewind == "ask" else ""
        self._run.situation.wait_for(f"{part}, or for the run to go back to a checkpoint with this peer: {why}{asks}")
        await first_done(self._keep_asking(head, lost=True), self._see_return(head))

    async def _see_return(self, head: CloseRecord) -> None:
        until = self._around.clock.monotonic() + ASK_TIMEOUT_S
        while not await self._went_back(head) and self._around.clock.monotonic() < until:
            await self._around.clock.sleep(LOOK_S)

    async def _went_back(self, known: CloseRecord) -> bool:
        """Return whether the run went back to a checkpoint after this record, as its members prove."""
        witnesses = self._witnesses(known)
        first = self._looked % max(1, len(witnesses))
        self._looked = first + MAX_LOOKED  # others each time: those of one look may all be gone
        decision = await went_back(self._run, known, (witnesses[first:] + witnesses[:first])[:MAX_LOOKED])
        if decision is not None:
            self._at.go_back(decision)
            await self._at.news.tell()
        return decision is not None

    def _learn(self, head: CloseRecord) -> None:
        self._known = head
        self._run.learn(head.members)
        if self._around.gate is not None:
            self._around.gate.observed(head)

    def _is_needed(self, head: CloseRecord, lost: Collection[str]) -> bool:
        """Return whether the run waits for somebody to take over what an earlier life of this peer was the last to do,
        or what else this one could do: it will not close a step without us. The latter only once nobody was heard in
        our name: that life may be there still."""
        before = head.members[self._around.endpoint.peer]
        if ROUTES in lost or before.part in lost or (before.role == "trainer" and TRAINERS in lost):
            return True
        ends = {ENDS, TRAINERS}
        mine = {"stage": set(lost) - ends, "trainer": ends.intersection(lost)}.get(self._run.settings.role)
        return bool(self._listen_at and mine)

    def _donors(
        self, head: CloseRecord, name: PartName | None, contact: PeerId | None, attempt: int
    ) -> Sequence[PeerId]:
        """Return who can help: any member with decisions, a replica with a part; in an order of our own, so that those
        who join together spread, and another one each time. When replicas have failed, those come after them that keep
        a copy of the part: its replicas may all be gone. Who lied is not asked again."""
        any_member = name is None or self._alone
        members = head.members.peers if name is None or any_member else head.members.replicas(name)
        donors = self._willing(members)
        random.Random(self._around.endpoint.peer).shuffle(donors)
        if any_member:
            donors.sort(key=lambda peer: peer != contact)  # it is known to answer
        first = attempt % max(1, len(donors))
        donors = donors[first:] + donors[:first]
        if name in self._run.rules.frozen:
            donors += self._willing([peer for peer in head.members.peers if peer not in donors])
        elif name is not None and not any_member and (attempt > 0 or not donors):
            donors += self._willing(copy_holders(head.members, name, self._around.manifest.run.copies))
        return donors

    def _willing(self, peers: Sequence[PeerId]) -> list[PeerId]:
        me = self._around.endpoint.peer  # a record that names us names us as a replica too
        return [peer for peer in peers if peer not in self._state.liars and peer != me]

    async def _join(self, donors: Sequence[PeerId], contact: PeerId | None, known: CloseRecord) -> None:
        name = self._run.situation.part
        follows = None if self._alone else name  # what nobody holds stays as it is until we do
        observer = await self._went_on(donors, follows) or await self._begun(donors, contact, known, follows)
        while not self._at.is_member:
            head = observer.head
            if self._alone and name not in head.members.paused and head.hash() != known.hash():
                raise WrongStep(f"others hold {name} by now")
            self._learn(await self._next(observer))
        await observer.close()

    async def _next(self, observer: Observer) -> CloseRecord:
        """The next step's record, in which we ask to be named: again and again, for the step's leader may change,
        and a step that is given up takes in whom it refused before."""
        await self._ask(observer.head, lost=self._alone)
        asking = asyncio.create_task(self._keep_asking(observer.head))
        try:
            return await observer.follow()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _keep_asking(self, head: CloseRecord, *, lost: bool = False) -> None:
        if lost:
            await self._ask(head, lost=True)
        while True:
            await self._around.clock.sleep(ASK_AGAIN_S)
            await self._ask(head, lost=lost or self._alone)

    async def _went_on(self, donors: Sequence[PeerId], follows: PartName | None) -> Observer | None:
        """One more step from the state that we hold already, when somebody still keeps what comes after it for us."""
        ours, part = self._at.head, self._state.part
        if ours is None or not self._holds(ours):
            return None
        observer = Observer(self._context, donors, follows)
        observer.go_on(ours, part)
        try:
            self._learn(await self._next(observer))
        except (PeerError, StateError, OutOfSync) as error:
            logger.info("nobody leads on from step %d: %s", ours.step, error)
            return None
        return observer

    def _holds(self, record: CloseRecord) -> bool:
        """Return whether our part is just as this record says; without one, whether there is nothing to hold."""
        part = self._state.part
        return self._prepared and (self._run.situation.part is None if part is None else part.step == record.step)

    async def _begun(
        self, donors: Sequence[PeerId], contact: PeerId | None, known: CloseRecord, follows: PartName | None
    ) -> Observer:
        """Have some of the donors keep updates from one state on, and our part at that state: as it is, or fetched."""
        name = self._run.situation.part
        observer = Observer(self._context, donors, follows)
        decision = await self._start(observer, contact, known)
        record, ours = decision.record, self._at.head
        if ours is not None and record.age < ours.age:
            raise WrongStep(f"it is at step {record.step}, this peer at {ours.step}", peer=observer.donors[0])
        if ours is not None and record.hash() == ours.hash() and self._holds(record):
            observer.resume(self._state.part)  # only the donors are others
            return observer
        if name is not None and follows is None:
            await self._state.revive(name, record, partial(self._latest, name, record.step))
        elif name is not None:
            await self._state.run(name, observer.donors, record)
        if not self._prepared:
            await self._prepare(self._state.part, record)
            self._prepared = True
        await observer.begin(decision, self._state.part)
        return observer

    async def _start(self, observer: Observer, contact: PeerId | None, known: CloseRecord) -> Decision:
        """From the state that is here in part, as long as somebody keeps it; else from the newest."""
        if (begun := self._state.begun) is not None and not self._alone:
            try:
                return await observer.start(contact, known, begun)
            except (PeerError, StateError) as error:
                logger.info("nobody gives more of step %d: %s", begun.step, error)
        return await observer.start(contact, known)

    async def _ask(self, head: CloseRecord, *, lost: bool = False) -> None:
        """Ask the leader of the open step to be in its record's roster. A no is for this step only. Where a part is
        ``lost`` the step stays open: all of the succession are asked then, for many may be gone, until one takes it;
        also after an answer of who was itself started anew, and knows of no open step."""
        around, step = self._around, head.step + 1
        self._check_place(head)
        me, settings = around.endpoint.peer, self._run.settings
        if self._run.exit.asked:  # what was asked before has been decided: no record names us
            raise RunEnded("this peer left before it took part", self._run.exit.ending)
        member = Listed(
            peer=me,
            role=settings.role,
            name=settings.name,
            part=self._run.situation.part,
            addresses=around.endpoint.addresses[:8],
            incarnation=around.watch.incarnation,
            region=settings.region,
            outgoing=only_calls(settings, around.endpoint.addresses),
            beside=settings.beside,
            machine=settings.machine,
            choice=(settings.wish.choice or 0) if settings.role == "trainer" else 0,
        )
        state = await self._state.digest() if self._alone else None
        signed = admission_bytes(around.manifest.run_id, step, head.hash(), member, state)
        signature = around.identity.sign(signed)
        body = Admission(step=step, member=member, signature=signature, credential=around.credential, state=state)
        self._run.exit.admitted.set()
        if step != self._asking and (self._prepared or self._run.situation.part is None):
            # Why it was refused stays said while it asks again, and what is lost while it waits for that.
            self._run.situation.wait_for("a step to close, to be let in with it")
        self._asking = step
        others = [peer for peer in head.members.succession(step) if peer != me]  # an earlier life of ours may be in it
        refusals = list[Unadmitted]()
        for leader in others if lost else others[:MAX_LEADERS]:
            try:
                await self._run.calls.ask(leader, JOIN, body, timeout_s=ASK_TIMEOUT_S)
                return
            except Unadmitted as error:  # one alone may lag behind, or lie
                refusals.append(error)
                if len(refusals) == min(UNADMITTED, len(others)):
                    raise not_admitted(error) from error
                self._run.situation.wait_for(f"step {step} to close, to ask again: {error.reason}")
            except PeerError as error:
                logger.info("not in step %d: %s", step, error)
                if isinstance(error, Refused):
                    self._run.situation.wait_for(f"step {step} to close, to ask again: {error.reason}")
                    return
                if not lost and not isinstance(error, (Superseded, Unreachable, DeadlineMissed)):
                    return
