"""Put together everything that a peer has once it knows the manifest, in the order in which one needs another.

Read it from top to bottom. Nothing here waits, and nothing is given what is not made yet.
"""

from __future__ import annotations

import functools

from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.ids import PartName, PeerId
from swarm.membership.announcer import Announcer
from swarm.membership.catching_up import ArrivalService, CatchingUp
from swarm.membership.copying import Copies, Copying
from swarm.membership.entering import Entering, Returning
from swarm.membership.following import Following
from swarm.membership.founder import Founder, InitialWeights
from swarm.membership.gate import AdmittedDirectory, given_by_role
from swarm.membership.going_back import Checkpoints
from swarm.membership.handover import ResidualHandover
from swarm.membership.holding import LocalSGD, RoleManager
from swarm.membership.joining import Joining
from swarm.membership.last_holder import LastHolder
from swarm.membership.leaving import Leaving
from swarm.membership.membership import Membership, RunChain
from swarm.membership.memory import MemoryAccount, lacking_to_move
from swarm.membership.observer_service import Observers, ObserverService
from swarm.membership.parts import blank
from swarm.membership.quorum import MissingReplicas, Quorum
from swarm.membership.roles import PeerContext
from swarm.membership.run import RunContext, open_run
from swarm.membership.settings import MemberSettings
from swarm.membership.state_keeper import StateKeeper
from swarm.membership.survey import FirstContact
from swarm.membership.watching import Watching
from swarm.network.protocols import Directory, Service
from swarm.security.signing import Signing, verify
from swarm.state.snapshot import Snapshot
from swarm.state.transfer import StateDonor
from swarm.step.calls import LiveCalls, fell_silent
from swarm.step.context import CloseContext, MemberContext
from swarm.step.leader.lead_service import LeadService
from swarm.step.loop import ExitBarrier, StepLoop
from swarm.step.member.leader_watch import LeaderWatch
from swarm.step.member.member_service import MemberService
from swarm.step.member.open_step import Attempt
from swarm.step.member.remote_leader import RemoteLeader
from swarm.step.member.rescue import RescueService
from swarm.step.rounds import Rounds

LATER_DOWNLOADS = 4
"""Downloads of states that a peer serves at a time; a founder serves all of the genesis at once."""


def compose(
    settings: MemberSettings,
    around: PeerContext,
    directory: Directory,
    *,
    contact: PeerId,
    founder: PeerId,
    keeper: StateKeeper,
) -> Membership:
    """Return the membership of a peer, whose services are mounted on its endpoint from here on.

    Args:
        settings: What the peer's owner chose.
        around: What the peer works with.
        directory: Where the peers of the run find each other.
        contact: The peer through which it found the run; itself for the founder.
        founder: The peer whose genesis counts.
        keeper: What keeps the run on this machine's disk.

    Raises:
        StateError: The history or the votes on the disk are not this run's, or cannot be read.
    """
    watch, gate = around.watch, around.gate
    seen = directory if gate is None else AdmittedDirectory(directory, gate)
    run = open_run(settings, around, seen, contact=contact, founder=founder, keeper=keeper)
    if around.admission is not None:
        around.admission.watch(watch)
    return Membership(run, _chain)


def _chain(run: RunContext) -> RunChain:
    """Return what a peer does from where its chain of records begins on, mounted from here on."""
    around, manifest, endpoint = run.around, run.around.manifest, run.around.endpoint
    watch, clock, gate = around.watch, around.clock, around.gate
    if gate is not None and not run.returns:  # else once there is a record again: till then the one before counts
        gate.follow(run.position, run.founder)

    # What it holds, its own part and copies of others, and what it serves of them.
    leader = RemoteLeader(LiveCalls(run.calls, watch), run.position, clock, run.deadline.seconds, verify)
    holding, copies = RoleManager(run, leader), Copies()
    start = manifest.run.start_when
    donor = StateDonor(clock, max_downloads=start.stage_hosts + start.trainers if run.founds else LATER_DOWNLOADS)
    snapshot = functools.partial(_snapshot, run, holding, copies)
    observers = ObserverService(run.standing, donor, snapshot, Observers(donor, clock), run.rules.frozen, run.returns)
    copying = Copying(run, copies, observers)

    # How it follows what is decided, and takes part in a step, as a member and as its leader.
    quorum, missing, lead, mixing = Quorum(run), MissingReplicas(run), _lead(run), LocalSGD(run, holding)
    handover = ResidualHandover(run, holding)
    allreduce = AllReduce(endpoint, clock, signing=Signing(around.identity.sign))
    opens = (lead, mixing, holding, handover)  # with every step, in this order
    following = Following(run, holding, opens, copying, observers)
    average = Rounds(
        me=endpoint.peer,
        averaging=manifest.averaging,
        seed=manifest.run.seed,
        reproducible=manifest.run.reproducible,
        allreduce=allreduce,
        events=around.events,
        history=run.history,
        deadline=run.round_deadline,
        averaged=observers.averaged,
    )
    member = _member(run, holding, following, average, leader, copies)
    run.situation.memory = MemoryAccount(run, holding, copies, average, observers).report
    run.situation.activity = functools.partial(holding.activity, average)

    # How it comes and goes.
    announcer = Announcer(run)
    contacts = (run.contact, *run.settings.contacts)
    first = FirstContact(endpoint, clock, contacts, returns=run.settings.returns)
    watching, found = Watching(run, member, first), None
    watch.report_to(watching)
    if run.founds:
        beginning = run.keeper.beginning() or InitialWeights(around, run.settings.ends_seed)
        found = Founder(around, run.directory, run.calls, announcer.record, donor, beginning)
    checkpoints = Checkpoints(run)
    joining = Joining(run, member, following.prepare, checkpoints.latest)
    entering = Entering(run, first, found, holding, following, joining)
    returning = Returning(run, checkpoints, following, member, joining)
    barrier, leaving = ExitBarrier(), Leaving(run, observers.observers, announcer, handover)
    last = LastHolder(run, holding, observers.observers)
    watch_leader = LeaderWatch(endpoint.peer, run.position, lead, watch, clock, run.question_s)
    steps = StepLoop(member, _closing(run, lead, checkpoints), barrier, holding.feed(), entering.again, watch_leader)

    services: tuple[Service, ...] = (
        watch, member, lead, leader, allreduce, barrier, given_by_role(donor, gate), given_by_role(observers, gate),
        handover, ArrivalService(member, around.device, holding), _rescue(run, member, holding, copies, average),
        *mixing.services, *run.keeper.services(),
    )  # fmt: skip
    for service in services:
        endpoint.mount(service)
    background = (
        announcer.run, holding.run, following.end_unfit, leaving.run, watching.run, quorum.run, missing.run,
        copying.run, mixing.run, *(() if around.admission is None else (around.admission.end_expelled,)),
        returning.begin if run.returns else entering.begin,
    )  # fmt: skip
    return RunChain(
        context=run,
        steps=steps,
        holding=holding,
        copying=copying,
        leaving=leaving,
        last=last,
        services=services,
        background=background,
    )


async def _snapshot(run: RunContext, holding: RoleManager, copies: Copies, name: PartName) -> Snapshot | None:
    """Return the state of a part that is held here, our own, the copy of another, or one that is frozen; None for any
    other."""
    part = holding.part
    if part is not None and part.spec.name == name:
        return await run.around.device.run(part.snapshot)
    if name in run.rules.frozen and (head := run.position.head) is not None:
        return blank(run.around.manifest, name, head.step)
    return await copies.snapshot(name)


def _lead(run: RunContext) -> LeadService:
    """Return what trainers and members ask of this peer while it leads a step."""
    return LeadService(
        run.rules,
        run.around.endpoint.peer,
        run.position.wait_open,
        verify,
        term_of=lambda: run.position.term,
        hosted=run.around.manifest.split.ends == "hosted",
    )


def _member(
    run: RunContext, holding: RoleManager, following: Following, average: Rounds, leader: RemoteLeader, copies: Copies
) -> MemberService:
    """Return what the leader of a step asks of this peer."""
    around, me = run.around, run.around.endpoint.peer
    attempt = Attempt(
        me=me,
        device=around.device,
        settle=holding.settle,
        average=average,
        cursor=holding.cursor,
        left_out=following.events.left_out,
        attest=lambda step, rows, absent: leader.attest(step, rows, absent, around.identity.sign),
        owed=lambda: run.history.head.late,
        pace_us=holding.pace_us if run.rules.codecs.recorded or run.rules.moves.on else lambda: 0,
    )
    return MemberService(
        MemberContext(
            me=me,
            position=run.position,
            holder=following,
            attempt=attempt,
            sign=around.identity.sign,
            verify=verify,
            clock=around.clock,
            gone=lambda: around.watch.gone,
            fell_silent=lambda peer: fell_silent(around.watch, peer),
            doubted=lambda: around.watch.doubted,
            suspect=around.watch.suspect,
            check=around.watch.check,
            taking_part=around.watch.taking_part,
            catch_up=CatchingUp(run, holding).prepare,
            knows=Checkpoints(run).knows,
            leaving=lambda: run.exit.asked,
            copied=lambda step: [part for part in copies.parts if copies.held(part, step) is not None],
            events=around.events,
        )
    )


def _closing(run: RunContext, lead: LeadService, checkpoints: Checkpoints) -> CloseContext:
    """Return what this peer closes a step with when it leads it."""
    return CloseContext(
        rules=run.rules,
        calls=run.calls,
        history=run.history,
        events=run.around.events,
        lead=lead,
        liveness=run.around.watch,
        clock=run.around.clock,
        timeout_s=run.deadline.seconds,
        averaging_s=run.averaging_s,
        verify=verify,
        waiting=run.situation.wait_for,
        copies=run.around.manifest.run.copies,
        refused=lambda record: record in run.position.open.conduct.refused,
        opened_at=lambda: run.position.open.conduct.began,
        orders=lambda: () if run.around.gate is None else run.around.gate.orders,
        checkpoint=checkpoints.newest,
    )


def _rescue(
    run: RunContext, member: MemberService, holding: RoleManager, copies: Copies, average: Rounds
) -> RescueService:
    """Return what answers when all replicas of a part are lost of which a copy may be here, or this peer is to move."""

    async def stays(part: PartName) -> str:
        if run.exit.asked:
            return "this peer is about to leave"
        held, role = holding.part, holding.role
        if held is None:
            return ""
        of_the_step = average.held_bytes + (0 if role is None else role.service.held().payload_bytes)
        return await run.around.device.run(lacking_to_move, run.around, held, part, of_the_step)

    return RescueService(
        run=run.rules.run,
        me=run.around.endpoint.peer,
        member=member,
        history=run.history,
        sign=run.around.identity.sign,
        holds=lambda part, step: part in run.rules.frozen or copies.held(part, step) is not None,
        takes=copies.takes,
        gone=run.lost,
        stays=stays,
        knows=Checkpoints(run).knows,
        agreed=lambda: run.situation.may_go_back,
    )
