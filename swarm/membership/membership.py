"""One peer's membership of one run: it is announced, gets its part at the genesis or joins later, follows the steps,
and leaves.

:meth:`Membership.run` tells the story.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools

from swarm.averaging.allreduce.service import AllReduce
from swarm.consensus.ballot import VoteFile
from swarm.consensus.history import History
from swarm.consensus.incarnation import Incarnation
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Roster, lost_parts
from swarm.errors import ConfigError, Ending, PeerError, Refused, RunEnded, StateError
from swarm.events import CutOff, PeerReady
from swarm.ids import PartName, PeerId
from swarm.membership.announcer import Announcer
from swarm.membership.copying import Copying
from swarm.membership.download import download_part
from swarm.membership.founder import Founder, InitialWeights
from swarm.membership.holding import LocalSGD, RoleManager
from swarm.membership.joining import Joining
from swarm.membership.leaving import Leaving
from swarm.membership.observer_service import ObserverService
from swarm.membership.quorum import MissingReplicas, Quorum
from swarm.membership.roles import PeerContext, build_empty, insist_on_being_reached
from swarm.membership.rounds import Rounds
from swarm.membership.rules import rules_of
from swarm.membership.settings import MemberSettings
from swarm.membership.state_keeper import StateKeeper
from swarm.membership.status import PeerStatus
from swarm.membership.step_events import StepEvents
from swarm.membership.survey import FirstContact
from swarm.membership.watching import Watching
from swarm.network.discovery.records import PeerRecord
from swarm.network.protocols import Directory, Service
from swarm.optim.part import TrainedPart
from swarm.schema import AFTER_CHARS
from swarm.security.signing import verify
from swarm.state.snapshot import Snapshot
from swarm.state.transfer import StateDonor
from swarm.step.calls import LiveCalls, StepCalls
from swarm.step.context import CloseContext, MemberContext
from swarm.step.exit_barrier import ExitBarrier
from swarm.step.leader.service import LeadService
from swarm.step.loop import StepLoop
from swarm.step.member.open_step import Attempt
from swarm.step.member.remote_leader import RemoteLeader
from swarm.step.member.service import MemberService
from swarm.waiting import AdaptiveDeadline

STEP_FLOOR_S, STEP_CEILING_S = 20.0, 120.0
WAITING_S = 1.0
"""How often a peer that waits for the genesis asks how far it is."""


class Membership:
    """Everything a peer has once it knows the manifest.

    ``contact`` is the peer through which it found the run (itself for the founder), ``founder`` the one whose genesis
    counts, ``keeper`` what keeps the run on this machine's disk.
    """

    def __init__(
        self,
        settings: MemberSettings,
        around: PeerContext,
        directory: Directory,
        *,
        contact: PeerId,
        founder: PeerId,
        keeper: StateKeeper,
    ) -> None:
        self._settings, self._around, self._directory = settings, around, directory
        self._contact = contact
        self._founds = contact == around.endpoint.peer
        self._rules = dataclasses.replace(rules_of(around.manifest), how_to_join=around.how_to_join)
        self.situation = PeerStatus(around.events)
        self._deadline = AdaptiveDeadline(STEP_FLOOR_S, STEP_CEILING_S)
        self._history = History(
            settings.history,
            around.manifest.run_id,
            trouble=functools.partial(self.situation.disk_refuses, "the run's history"),
        )
        self._allreduce = AllReduce(around.endpoint, around.clock)
        self._holding = RoleManager(settings, around)
        self._donor = StateDonor(around.clock, max_downloads=self._downloads())
        self._observers = ObserverService(founder, self._donor, self._snapshot, self.situation.awaited, around.clock)
        self._member = MemberService(self._member_context(founder))
        self._apart = LocalSGD(around, self._holding, self.situation, lambda: self._member.roster)
        self._desk = LeadService(
            self._rules,
            around.endpoint.peer,
            self._member.wait_open,
            verify,
            term_of=lambda: self._member.term,
            hosted=around.manifest.split.ends == "hosted",
        )
        self._calls = StepCalls(around.endpoint)
        live = LiveCalls(self._calls, around.watch)
        self._leader = RemoteLeader(live, self._member, around.clock, self._deadline.seconds)
        self._first = FirstContact(around.endpoint, around.clock, contact, founder)
        self._watching = Watching(
            around.watch, around.endpoint, self._member, around.events, self.name_of, self._first.gone
        )
        self._quorum = Quorum(around.watch, self._member, self.situation, around.clock, self._rules.quorum_grace_s)
        self._vacancy = MissingReplicas(around, self._member, self.situation)
        self._parting = ExitBarrier()
        self._observers.lost = lambda: lost_parts(self._member.roster, around.watch.gone)
        self._copying = Copying(around, self._observers)
        self._announcer = Announcer(settings, around.endpoint, directory, self.situation, around.clock)
        self._step_events = StepEvents(around, self.situation)
        self._leaving = Leaving(around, self._member, self._calls, self.situation, self._deadline)
        self._observers.leaving = lambda: self._leaving.asked
        self._leaving.helping = lambda: self._observers.helps_beside(self._member.roster.peers)
        self._joining = Joining(settings, around, self._member, self.situation, self._leaving, self._prepare)
        self._was_member = False
        self._unfit: asyncio.Future[ConfigError | StateError] = asyncio.get_running_loop().create_future()
        self._keeper = keeper
        self._since, self._has_been_ready = around.clock.monotonic(), False
        services: tuple[Service, ...] = (
            around.watch, self._member, self._desk, self._leader, self._allreduce, self._parting, self._donor,
            self._observers, self._copying.desk(self._member, self._history), *self._keeper.services(),
        )  # fmt: skip
        for service in services:
            around.endpoint.mount(service)

    def _downloads(self) -> int:
        """All at once at the genesis, from the founder; later a few."""
        start = self._around.manifest.run.start_when
        return start.stage_hosts + start.trainers if self._founds else 4

    def _member_context(self, founder: PeerId) -> MemberContext:
        around, waits_s = self._around, self._deadline.seconds
        rounds = Rounds(around, self._allreduce, waits_s, self._observers.averaged, self._history)
        return MemberContext(
            me=around.endpoint.peer,
            life=Incarnation(
                around.endpoint.peer,
                around.watch.incarnation,
                VoteFile(self._settings.votes),
                functools.partial(self.situation.disk_refuses, "its votes"),
            ),
            rules=self._rules,
            attempt=Attempt(
                me=around.endpoint.peer,
                device=around.device,
                settle=self._holding.settle,
                average=rounds,
                cursor=self._holding.cursor,
                left_out=lambda step, why: self._step_events.left_out(step, why),
            ),
            history=self._history,
            sign=around.identity.sign,
            verify=verify,
            install=self._install,
            decided=self._decided,
            founder=founder,
            gone=lambda: around.watch.gone,
        )

    # --- the story -----------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Announce, be founded or join, train, and leave when the last step is closed or earlier when asked. Returns
        why it is over, in words. Raises, in an ExceptionGroup, whatever ends it earlier; RunEnded when the last state
        could not be kept."""
        try:
            await self._live()
        except* RunEnded:  # it never came to be, or cannot go on: others need not wait for its record to expire
            await self._announcer.gone()
            raise
        await self._announcer.gone()
        if not self._member.departed:
            self._keeper.check_last()
        return self._leaving.outcome

    async def _live(self) -> None:
        async with self._keeper, asyncio.TaskGroup() as group:  # checkpoints may outlast the steps
            work = (
                self._announcer.run, self._holding.run, self._end_unfit, self._leaving.run, self._watching.run,
                self._quorum.run, self._vacancy.run, self._copying.run, self._apart.run,
            )  # fmt: skip
            background = [group.create_task(part()) for part in work]
            group.create_task(self._begin())
            closing = CloseContext(
                rules=self._rules,
                calls=self._calls,
                history=self._history,
                events=self._around.events,
                desk=self._desk,
                liveness=self._around.watch,
                clock=self._around.clock,
                timeout_s=self._deadline.seconds,
                verify=verify,
                waiting=self.situation.wait_for,
                copies=self._around.manifest.run.copies,
                patience_s=self._settings.patience_s,
            )
            await StepLoop(self._member, closing, self._parting, self._holding.feed(self._leader), self._rejoin).run()
            if self._keeper.keeps and self._member.over and (head := self._member.head) is not None:
                self._keeper.keep_copies(await self._copying.last(head), head)
            for task in background:
                task.cancel()

    def leave(self, reason: str, ending: Ending) -> str:
        """Leave in order: see :meth:`swarm.membership.leaving.Leaving.ask`. :meth:`run` then ends after the step's
        close."""
        return self._leaving.ask(reason, ending)

    @property
    def ending(self) -> Ending:
        """How it ended, once :meth:`run` has returned."""
        return self._leaving.ending if self._leaving.let_go else Ending.DONE

    async def _begin(self) -> None:
        """Be in the roster, in one of three ways: found the run, be in its genesis, or join it in progress."""
        if self._founds:
            await self._found()
            return
        await self._be_reached()
        while not self._member.is_member:
            standing = await self._first.standing()
            if standing.closed is not None and not self._holding.ready.is_set():
                await self._joining.run(self._contact)
                return
            if standing.closed is None and not self._member.is_member:
                self.situation.wait_for(standing.waiting_for or "the run to start")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAITING_S):
                    await self._member.wait_member()

    async def _found(self) -> None:
        beginning = self._keeper.beginning() or InitialWeights(self._around, self._settings.ends_seed)
        founder = Founder(self._around, self._directory, self._calls, self._announcer.record, self._donor, beginning)
        with founder.expecting():
            await founder.found(self._settings.patience_s, self.situation.wait_for)
            await self._member.wait_member()  # our own close may take longer than the others'
        await self._around.be_reachable(self._member.roster.peers)  # now there is somebody to ask

    async def _be_reached(self) -> None:
        """Before anybody counts on us. Whoever is in the directory may relay for us."""
        if await self._around.be_reachable((self._contact,)):
            records: dict[PeerId, PeerRecord] = {}
            with contextlib.suppress(PeerError):
                records = await self._directory.lookup(PeerRecord)
            for peer, record in records.items():
                self._around.endpoint.learn(peer, record.addresses)
            await insist_on_being_reached(self._around, tuple(records))

    async def _end_unfit(self) -> None:
        error = await asyncio.shield(self._unfit)
        raise RunEnded(str(error), error.ending) from error

    async def _rejoin(self) -> None:
        """The run went on without us: get the newest state from others, and be let in again. Raises RunEnded when
        nobody is left who could help, or when it is over."""
        around, reason = self._around, self._member.cut_off
        around.events.emit(CutOff(step=self._member.open_step, reason=reason))
        self._was_member, self._since = False, around.clock.monotonic()
        if self._member.forking.given_up is not None:
            self._holding.rewound()
            self._leader.rewound()
        known, others = self._member.forking.helpers(self._member.head)
        if not others:
            raise RunEnded(f"the run went on without this peer, and there is nobody else: {reason}", Ending.UNREACHABLE)
        self.situation.wait_for(f"a member that can help to come back: {reason}")
        invited_by = None if self._founds else self._contact
        await self._joining.again(self._holding.part, known, invited_by)

    async def _snapshot(self, name: PartName) -> Snapshot | None:
        """Our own part, or the copy of another."""
        part = self._holding.part
        if part is None or part.spec.name != name:
            return await self._copying.snapshot(name)
        return await self._around.device.run(part.snapshot)

    # --- what the member calls back ------------------------------------------------------------------------------

    async def _install(self, record: CloseRecord, donor: PeerId) -> None:
        """The genesis names our part: download it, verify it, be ready. Raises the founder's PeerError.

        What is wrong on our side ends this peer with the reason; the founder is told no.
        """
        self._leaving.admitted.set()  # from here on a record may name us
        try:
            await self._take_place(record, donor)
        except (ConfigError, StateError) as error:
            if not self._unfit.done():
                self._unfit.set_result(error)
            raise Refused(str(error)) from error

    async def _take_place(self, record: CloseRecord, donor: PeerId) -> None:
        around, roster = self._around, record.members
        self._learn(roster)
        own = roster[around.endpoint.peer].part
        part = None
        reason = "the run starts with it" if own is not None else f"a {self._settings.role} holds none"
        self.situation.assigned(None if own is None else PartName(own), reason)
        if own is not None:
            part = await build_empty(around, PartName(own))
            await download_part(around, record, part, donor)
        await self._prepare(part, record)

    async def _prepare(self, part: TrainedPart | None, record: CloseRecord) -> None:
        """Our part is here for the first time: serve it."""
        self._holding.take(part, record)
        self._member.part = part

    def _learn(self, roster: Roster) -> None:
        for member in roster.members:
            if member.peer != self._around.endpoint.peer:
                self._around.endpoint.learn(PeerId(member.peer), member.addresses)

    async def _decided(self, decision: Decision) -> None:
        """A record was decided and our part has its result: say so, serve observers, open the next step."""
        record, roster = decision.record, decision.record.members
        inside = self._member.names(record)
        seconds = self._step_events.closed(record, took_part=self._was_member, digest=decision.digest)
        if self._was_member:
            self._deadline.observe(seconds)
        await self._copying.decided(decision)
        if inside and self.situation.part != roster[self._around.endpoint.peer].part:
            await self._move(record)
        held = self._holding.part
        await self._observers.publish(decision, None if held is None else held.spec.name)
        await self._keeper.decided(decision, held, departed=self._member.departed)
        if self._rules.over(record) or self._member.departed:
            self._around.watch.follow(())
            return
        if inside:
            self._learn(roster)
            self._around.watch.follow(self._member.forking.watched(roster), roster.lives)
            self._quorum.look()
            self._vacancy.look()
        if self._around.endpoint.peer in roster and not inside:
            return  # an earlier life of this peer is in it, for which it votes at most
        digest = record.hash()
        self._desk.open_step(record.step + 1, roster, digest, record.cursors, may_end=not record.provisional)
        self._holding.open_step(record, digest[:AFTER_CHARS])
        if inside and not self._was_member:
            self._ready(record)

    async def _move(self, record: CloseRecord) -> None:
        """This record has us hold another part, of which we said that we hold a copy: all that held it are lost. Raises
        RunEnded when the copy is gone as well."""
        name = PartName(record.members[self._around.endpoint.peer].part or "")
        part = await self._copying.take(name, record.step)
        if part is None:
            raise RunEnded(f"this peer shall hold {name} from now on, and its copy of it is lost", Ending.FAILED)
        self.situation.moved(name, "all that held it are lost, and a copy was here")
        await self._prepare(part, record)

    def _ready(self, record: CloseRecord) -> None:
        """This record is the first that names us."""
        around, self._was_member = self._around, True
        if not self._leaving.asked:
            self.situation.ready()
        seconds, again = around.clock.monotonic() - self._since, self._has_been_ready
        part, reason, self._has_been_ready = self.situation.part, self.situation.reason, True
        around.events.emit(PeerReady(part=part, step=record.step, reason=reason, seconds=seconds, again=again))

    @property
    def copies(self) -> tuple[PartName, ...]:
        """The parts of which this peer keeps a copy beside its own."""
        return self._copying.parts

    # --- names ---------------------------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Who takes part in the open step; empty before the genesis."""
        return self._member.roster

    def name_of(self, peer: str) -> str:
        """The name a peer gave itself; before the roster is known "the contact", else the peer's id."""
        if peer in self.roster:
            return self.roster[peer].name
        return "the contact" if peer == self._contact and not len(self.roster) else peer

    def describe(self, error: BaseException) -> str:
        """A peer's failure, with its name."""
        if isinstance(error, PeerError) and error.peer:
            name = self.name_of(error.peer)
            who = error.peer if name == error.peer else f"{name} ({error.peer})"
            return f"{who} failed: {error.code}, {error.reason}"
        return str(error)
