"""The composition root: settings in, a living peer out. The second page to read, after ``swarm.step.loop``.

Every peer is a member of the run: it answers the step's leader, watches some others, and may have to lead; the rest is
its role (``swarm.membership.roles``). The command line and the local launcher call :func:`run_peer`.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import logging
import math
import os
import resource
import secrets
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from peers.checkpoints.keeper import CheckpointKeeper
from peers.checkpoints.verify import named_files
from peers.checkpoints.writer import keep_run, run_directory_of
from peers.console.narration import EventNarration
from peers.console.words import command_to_join, one_line, reason_of, report_error, with_commands
from peers.control.admitting import Admitting
from peers.control.answers import NodeCommands
from peers.control.server import ControlServer
from peers.dashboard.start import serve_own
from peers.data.trainer_data import (
    DATA,
    EVAL,
    data_given,
    data_opened,
    domain_of,
    held_out_given,
    open_source,
    shard_for,
)
from peers.exit_codes import EXIT_CODES, EXIT_DRAINED, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, exit_code_of
from peers.foreign_model import files_here
from peers.frozen import frozen_services
from peers.guards import watch_daemon, watch_last_moments, watch_pauses, watch_preemption, watch_signals
from peers.home.run_directory import RunDirectory
from peers.household import Hosts, Household
from peers.manifest_file import manifest_sent
from peers.options.reading import blamed
from peers.orders import Leave, Orders
from peers.reaching import OwnReach, Tries, contacts_of, open_endpoint
from peers.reporting.reporter import reporting_of
from peers.settings import PeerSettings, member_settings
from swarm.clock import SystemClock
from swarm.config import Manifest, load_manifest
from swarm.device import Device, DeviceThread, MeteredDevice, choose_devices
from swarm.errors import ConfigError, DeadlineMissed, Ending, PeerError, RunEnded, SwarmError, Unreachable
from swarm.events import DeviceChosen, EventSink, PeerStarted, PeerStopped, Resumed, RunFound, Waiting
from swarm.health.watch import HealthWatch
from swarm.ids import PeerId, RunId
from swarm.membership.admission import open_gate
from swarm.membership.composition import compose
from swarm.membership.contact import cannot_reach, find_run
from swarm.membership.membership import Membership
from swarm.membership.parts import check_strips
from swarm.membership.roles import PeerContext
from swarm.membership.survey import FirstContact
from swarm.membership.vitals import VitalsBoard, VitalsService
from swarm.models.registry import family_of
from swarm.monitoring.recorder import LoopLagProbe, Recorder
from swarm.network.discovery.manifest import ManifestService
from swarm.network.endpoint import LibP2PEndpoint
from swarm.network.libp2p.identity import StoredIdentity, load_or_create
from swarm.pipeline.batch import BatchSource
from swarm.pipeline.trainer.held_out import HeldOutRows
from swarm.schema import TOKENIZER_FILE
from swarm.security.credentials import credential_of
from swarm.step.calls import first_leaf

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
MAX_DESCRIPTORS = 1 << 16
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Another one each time that a machine starts; the same in all of its containers."""


def open_device(settings: PeerSettings, events: EventSink) -> Device:
    """Return the device that the settings name, and tell why it is this one; a founder, which holds no part, has the
    CPU. Raises ConfigError for one that is not there."""
    options = settings.options
    limit = None if options.max_memory is None else int(options.max_memory * 1e9)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a reproducible run needs it; before its first use
    founds = settings.role == "bootstrap"
    (first, *beside), why = choose_devices("cpu" if founds else options.device, settings.turn)
    if not founds:
        events.emit(DeviceChosen(device="+".join(map(str, (first, *beside))), why=why))
    return DeviceThread(
        first, beside=beside, threads=options.threads, max_memory=limit, host_memory=settings.host_bytes
    )


def run_peer(settings: PeerSettings, hosts: Hosts | None = None) -> int:
    """Run one peer until its run is over or it has left.

    Blocking; owns the process's event loop, and its signals for good: see :meth:`peers.orders.Orders.listen`. Whatever
    happens, the last event of ``home/events.jsonl`` says why it ended.

    Args:
        settings: All about this peer.
        hosts: Who hosts a stage beside it in this process; None: it is alone there.

    Returns:
        The exit code of the process.
    """
    # A quarter of a million objects of torch and hivemind, looked at again in each full collection of garbage: 0.2 s of
    # the event loop, and seconds of it with a small share of a processor.
    gc.freeze()
    allow_descriptors()
    return uvloop.run(_run_peers(settings, hosts))


def allow_descriptors() -> None:
    """Allow as many open files as this user may have, MAX_DESCRIPTORS at most: the usual 1,024 spare programs that use
    ``select()``, and a founder of some 220 peers has so many streams. The daemon inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run_peers(settings: PeerSettings, hosts: Hosts | None) -> int:
    orders = Orders(settings.options.grace)
    orders.listen()
    household = Household(orders, hosts)
    try:
        code = await household.live(settings, functools.partial(_run_peer, household=household))
        return max(code, *await household.ended(), EXIT_OK)
    finally:
        await household.close()


async def _run_peer(settings: PeerSettings, household: Household) -> int:
    clock = SystemClock()
    identity = load_or_create(settings.identity)
    recorder = Recorder(settings.home / "events.jsonl", identity.peer, clock)
    reporting = reporting_of(settings, recorder, clock)
    events = EventNarration(settings, reporting, clock, peer=identity.peer)
    node = Node(settings, identity, events, clock, household)
    if settings.back is not None and settings.back.reason:
        events.emit(Resumed(reason=settings.back.reason, seconds=settings.back.seconds))
    reason, exit_code = f"{settings.name} was interrupted", EXIT_INTERRUPTED
    verdict: SwarmError | None = None
    try:
        reason, exit_code = await node.run()
    except* SwarmError as errors:
        verdict = _verdict(errors)
        if isinstance(verdict, ConfigError):
            verdict = blamed(verdict, settings.options)
        reason, exit_code = reason_of(verdict), exit_code_of(verdict)
    except* Exception as errors:  # the border of the process: an unknown failure must end up in the events
        failure = first_leaf(errors)
        logger.exception("the peer failed", exc_info=errors)
        reason, exit_code = f"{type(failure).__name__}: {failure}", EXIT_ERROR
    finally:
        events.emit(PeerStopped(reason=reason, exit_code=exit_code))
        recorder.close()
        reporting.close()
    if settings.verbose or settings.json_lines:
        if verdict is not None and EXIT_OK < exit_code < EXIT_DRAINED:
            report_error(verdict)
    elif exit_code:
        print(f"{settings.name}: {one_line(reason)}", flush=True)  # noqa: T201 - the last line of a peer's log
    return exit_code


def _verdict(errors: BaseExceptionGroup[SwarmError]) -> SwarmError:
    """The error to report: a RunEnded explains the others."""
    ended, _ = errors.split(RunEnded)
    leaf = first_leaf(ended if ended is not None else errors)
    assert isinstance(leaf, SwarmError)  # noqa: S101 - the group holds nothing else
    return leaf


def machine_mark(run: RunId) -> str:
    """Return what peers that run on this machine have in common in a run, containers too; "" where it is not known.
    Nobody learns from it that two peers of different runs are on one machine."""
    try:
        boot = BOOT.read_text().strip()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}|{run}".encode()).hexdigest()[:16]


def _check_stage(wish: int | None, manifest: Manifest) -> None:
    """Raises ConfigError for a stage that the run does not have."""
    stages = manifest.split.stages
    if wish is not None and wish >= stages:
        remedy = "Choose one of these, or leave it out to hold the one that is needed most."
        raise ConfigError("--stage", wish, f"one of the run's stages, 0 to {stages - 1}", remedy)


class Node:
    """One peer, from opening its endpoint to closing it."""

    def __init__(
        self,
        settings: PeerSettings,
        identity: StoredIdentity,
        events: EventSink,
        clock: SystemClock,
        household: Household,
    ) -> None:
        self._settings, self._identity, self._events, self._clock = settings, identity, events, clock
        self._household = household
        self._born = clock.monotonic()
        self._orders = household.orders
        self._commands = NodeCommands(settings, identity.peer, clock.wall(), self._orders.by_command)
        self._membership: Membership | None = None
        self._leaving: Leave | None = None
        self._contacts: tuple[PeerId, ...] = ()
        self._choice: int | None = None  # of variants, as its domain says
        self._retiring: asyncio.Future[None] | None = None
        self._first = {identity.peer}

    async def run(self) -> tuple[str, int]:
        """Live; returns why it is over and the exit code. Raises, in an ExceptionGroup, RunEnded or another SwarmError
        when it does not end in order."""
        settings = self._settings
        shared = self._household.device(settings, functools.partial(open_device, settings, self._events))
        device = MeteredDevice(shared, self._clock)
        control = None if settings.control is None else ControlServer(settings.control, self._commands.table())
        try:
            if control is not None:
                await control.start()
            endpoint = await self._orders.unless_forced(
                settings.name, open_endpoint(settings, self._identity, self._clock, self._events)
            )
            try:
                self._household.enter(endpoint)
                return await self._until_over(endpoint, device)
            finally:
                self._household.leave(endpoint)
                await endpoint.close()
        except SwarmError as error:
            raise ExceptionGroup("the peer could not start", [error]) from error
        finally:
            if self._leaving is not None:
                self._orders.release(self._leaving)
            if control is not None:
                await control.close()

    async def _until_over(self, endpoint: LibP2PEndpoint, device: MeteredDevice) -> tuple[str, int]:
        """Run all concurrent tasks; the first to fail ends the rest."""
        endpoint.allow_relay(self._is_known)  # before anybody is let in: from its first frame on a stranger is one
        endpoint.allow_questions(self._may_ask)
        watch = HealthWatch(endpoint, self._clock, incarnation=secrets.randbits(62))
        async with asyncio.TaskGroup() as group:
            guards = [
                group.create_task(watch_daemon(endpoint, self._settings.name)),
                group.create_task(watch_signals(self._orders, watch, self._identity.peer, self._settings.name)),
                group.create_task(watch_last_moments(self._orders, self._secure)),
                group.create_task(LoopLagProbe(self._events, self._clock).run()),
                group.create_task(serve_own(self._settings, self._commands.look, self._events)),
                group.create_task(watch_preemption(self._settings, self._clock, self._events, self._orders)),
                group.create_task(watch_pauses(self._settings, self._clock, self._events, self._orders)),
            ]
            try:
                return await self._take_part(endpoint, device, watch)
            finally:
                for guard in guards:
                    guard.cancel()

    # --- taking part ---------------------------------------------------------------------------------------------

    async def _take_part(self, endpoint: LibP2PEndpoint, device: MeteredDevice, watch: HealthWatch) -> tuple[str, int]:
        """Learn what the run is, become a member, and stay one until its last step is closed or it has left."""
        manifest, named = await self._find_run(endpoint)
        _check_stage(self._settings.options.stage, manifest)
        self._household.check(manifest)
        check_strips(manifest, device.torch_devices)
        shown = None if self._settings.credential is None else credential_of(self._settings.credential)
        self._choice = domain_of(manifest, self._settings.options.domain, self._settings.role, shown)
        admission = open_gate(manifest, endpoint, shown)
        files = await asyncio.to_thread(files_here, manifest.model, self._settings)
        await asyncio.to_thread(family_of(manifest.model).warm_up)
        begin = None
        if (kept := self._settings.run_directory) is not None:
            begin = functools.partial(keep_run, run_directory_of(kept, manifest), manifest, named, files.frozen)
            if self._settings.role != "bootstrap":  # that one may never write a checkpoint
                await asyncio.to_thread(begin)
                begin = None
        reach = OwnReach(endpoint, self._clock, self._contacts[0] if self._contacts else None)
        around = PeerContext(
            manifest=manifest,
            identity=self._identity.private,
            endpoint=endpoint,
            device=device,
            events=self._events,
            clock=self._clock,
            watch=watch,
            be_reachable=reach.be_reachable,
            source=await self._open_data(manifest, named[TOKENIZER_FILE]),
            held_out=await self._open_held_out(manifest, named[TOKENIZER_FILE]),
            how_to_join=functools.partial(command_to_join, admission=manifest.admission.mode),
            activation_checkpointing=self._settings.options.activation_checkpointing,
            deferred_weights=self._settings.options.deferred_weights == "on",
            files=files,
            admission=admission,
            siblings=self._household.siblings,
            home=self._household.home if self._settings.role == "stage" else None,
        )
        manifests = ManifestService(manifest.canonical(), named, named=manifest.admission.closed)
        for service in [*frozen_services(manifest.model, files, around.gate), manifests]:
            endpoint.mount(service)
        await self._reaching(endpoint.enter(manifest.run_id))
        if admission is not None:
            endpoint.directory.admit(admission.gate.attests)
        # First, so that the addresses told to others hold the relays through which they must come.
        await reach.find()
        self._household.begin(self._identity.peer, manifest, functools.partial(_run_peer, household=self._household))
        keeper = CheckpointKeeper(self._settings, around, begin)
        membership = await self._become_member(around, endpoint, device, keeper)
        self._emit_started(endpoint)
        reach.tell(membership.situation)
        try:
            return with_commands(await membership.run()), EXIT_CODES[membership.ending]
        except* PeerError as errors:
            error = first_leaf(errors)
            raise RunEnded(membership.describe(error), Ending.UNREACHABLE) from error

    def _leave(self, endpoint: LibP2PEndpoint, membership: Membership, reason: str, ending: Ending) -> str:
        """In order; a peer that is reached through us shall be reached through others before we go."""
        if self._retiring is None:
            self._retiring = asyncio.ensure_future(endpoint.retire_relay())
        return membership.leave(reason, ending, self._orders.left_s, self._orders.bound)

    async def _secure(self, within_s: float) -> str:
        return "" if self._membership is None else await self._membership.secure(within_s)

    async def _find_run(self, endpoint: LibP2PEndpoint) -> tuple[Manifest, dict[str, bytes]]:
        """The run's manifest and the files that it names: the founder reads them, everybody else asks a contact."""
        settings = self._settings
        if settings.manifest is not None:
            manifest = await asyncio.to_thread(load_manifest, settings.manifest)
            self._emit_found(manifest, self._identity.peer)
            there = RunDirectory(settings.manifest.parent)
            return manifest, await asyncio.to_thread(named_files, there, manifest)
        expected = RunId(settings.run) if settings.run is not None else None
        left = Tries(settings, self._clock, self._events)
        while True:
            contacts = await contacts_of(settings, endpoint, expected)
            self._first |= contacts.keys()
            try:
                found, manifest, files = await find_run(endpoint, contacts, expected, manifest_sent)
            except RunEnded as ended:
                if ended.ending is not Ending.UNREACHABLE or not (settings.returns and await left.again()):
                    raise
                continue
            self._contacts = tuple(dict.fromkeys((found, *contacts)))
            self._emit_found(manifest, found)
            return manifest, files

    async def _reaching(self, asking: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return a contact's answer. Raises RunEnded, exit code 3, when it is gone."""
        try:
            return await asking
        except (Unreachable, DeadlineMissed) as error:
            raise cannot_reach(self._settings.bootstrap) from error

    async def _open_data(self, manifest: Manifest, tokenizer: bytes) -> BatchSource | None:
        """A trainer's shard, made from its text where it has none. Before the run is entered: bad data is this peer's
        affair alone."""
        settings = self._settings
        if settings.role != "trainer":
            return None
        into, seed, given_up = settings.home / "shard", self._identity.peer, threading.Event()
        try:
            made = await asyncio.to_thread(
                shard_for, data_given(settings.options), tokenizer, manifest, into, seed, given_up=given_up.is_set
            )
            source = await asyncio.to_thread(open_source, manifest, made.path, self._identity.peer, self._choice)
        finally:
            given_up.set()  # cancelling does not stop a thread, and the process would wait for it
        self._events.emit(data_opened(manifest, source.microbatches_per_epoch, made.unused))
        return source

    async def _open_held_out(self, manifest: Manifest, tokenizer: bytes) -> HeldOutRows | None:
        """Return what a trainer measures the loss of while it trains. Raises ConfigError as :func:`shard_for`."""
        settings, options = self._settings, self._settings.options
        given = held_out_given(options) if settings.role == "trainer" else None
        if given is None:
            return None
        into, given_up = settings.home / "held-out", threading.Event()
        try:
            made = await asyncio.to_thread(shard_for, given, tokenizer, manifest, into, "", given_up=given_up.is_set)
            source = await asyncio.to_thread(open_source, manifest, made.path, self._identity.peer, self._choice)
        except ConfigError as error:
            key = EVAL if error.key == DATA else error.key
            raise ConfigError(key, error.value, error.allowed, error.remedy, why=error.why) from None
        finally:
            given_up.set()
        self._events.emit(data_opened(manifest, source.microbatches_per_epoch, made.unused, held_out=True))
        return HeldOutRows(source=source, every=options.eval_every or math.ceil(manifest.run.steps / 10))

    async def _become_member(
        self, around: PeerContext, endpoint: LibP2PEndpoint, device: MeteredDevice, keeper: CheckpointKeeper
    ) -> Membership:
        contact = founder = self._identity.peer
        if self._contacts:
            first = FirstContact(endpoint, self._clock, self._contacts, returns=self._settings.returns)
            standing = await first.standing(lambda what: self._events.emit(Waiting(what=what)))
            contact, founder = first.peer, PeerId(standing.founder)
            around.watch.follow((contact,))
        membership = compose(
            replace(
                member_settings(self._settings, machine_mark(around.manifest.run_id), self._choice),
                contacts=self._contacts,
                beside=self._household.beside(self._identity.peer) or self._settings.beside,
            ),
            around,
            endpoint.directory,
            contact=contact,
            founder=founder,
            keeper=keeper,
        )
        self._membership = membership
        vitals = VitalsService(membership.situation, device, endpoint, self._clock, endpoint.links)
        endpoint.mount(vitals)
        board = VitalsBoard(endpoint, self._clock, vitals)
        admitting = Admitting.of(self._settings, self._identity.private, around, membership)
        self._commands.held_out = around.held_out
        self._commands.adopt(around.manifest, endpoint, membership, around.watch, board, admitting)
        self._leaving = functools.partial(self._leave, endpoint, membership)
        self._orders.adopt(self._leaving)
        self._first |= {contact, founder}  # the genesis comes from its founder before there is a roster
        return membership

    def _is_known(self, peer: PeerId) -> bool:
        """Return whether a peer is a member of the run; before there is a roster, whom we have to do with first."""
        roster = () if self._membership is None else self._membership.roster
        return peer in (roster if len(roster) else self._first)

    def _may_ask(self, peer: PeerId) -> bool:
        """Return whether a peer asks our directory without limits: everybody while all wait for the run's start."""
        roster = () if self._membership is None else self._membership.roster
        return not len(roster) or peer in roster

    def _emit_found(self, manifest: Manifest, source: PeerId) -> None:
        self._events.emit(
            RunFound(
                run=manifest.run_id,
                name=manifest.run.name,
                stages=manifest.split.stages,
                steps=manifest.run.steps,
                wire=manifest.run.wire,
                source=source,
                admission=manifest.admission.mode,
            )
        )

    def _emit_started(self, endpoint: LibP2PEndpoint) -> None:
        self._events.emit(
            PeerStarted(
                role=self._settings.role,
                name=self._settings.name,
                pid=os.getpid(),
                addresses=endpoint.addresses,
                seconds=self._clock.monotonic() - self._born,
            )
        )
