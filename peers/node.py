"""The composition root: settings in, a living peer out. The second page to read, after ``swarm.optimization.loop``.

Every peer is a member of the run: it answers the step's leader, watches some others, and may have to lead. What else
it does is its role (``peers.roles``). :func:`run_peer` is what the CLI and the local launcher call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal

import uvloop

from peers.membership import Membership
from peers.narrator import Narrator
from peers.roles import Surroundings
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.config import Manifest, load_manifest, parse_manifest
from swarm.device import DeviceThread, resolve_device
from swarm.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNREACHABLE, PeerError, RunEnded, SwarmError
from swarm.events import DaemonLost, EventSink, PeerLost, PeerStarted, PeerStopped
from swarm.ids import PeerId, RunId
from swarm.monitoring.lag import LoopLagProbe
from swarm.monitoring.recorder import Recorder
from swarm.network.addresses import parse_address, split_peer
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.identity import StoredIdentity, load_or_create
from swarm.network.manifest import ManifestService, fetch_manifest
from swarm.optimization.calls import first_leaf
from swarm.pipeline.health import Watch

logger = logging.getLogger(__name__)

VERDICT_PATIENCE_S = 8.0
"""How long a failed call waits for the health watch to say who is really gone, before it is reported as it is."""
EXIT_TERMINATED = 143


def run_peer(settings: PeerSettings) -> int:
    """Run one peer until its run is over; returns the exit code. Blocking; owns the process's event loop and SIGTERM.

    Whatever happens, the last event of ``home/events.jsonl`` says why it ended.
    """
    return uvloop.run(_run_peer(settings))


async def _run_peer(settings: PeerSettings) -> int:
    clock = SystemClock()
    identity = load_or_create(settings.home / "identity.key")
    recorder = Recorder(settings.home / "events.jsonl", identity.peer, clock)
    events = Narrator(settings.name, recorder) if settings.verbose else recorder
    node = Node(settings, identity, events, clock)
    reason, exit_code = f"{settings.name} was interrupted", EXIT_INTERRUPTED
    try:
        await node.run()
        reason, exit_code = "every step of the run is closed", EXIT_OK
    except* SwarmError as errors:
        verdict = _verdict(errors)
        reason, exit_code = str(verdict), verdict.exit_code
    except* Exception as errors:  # the border of the process: an unknown failure must end up in the events
        failure = first_leaf(errors)
        logger.exception("the peer failed", exc_info=errors)
        reason, exit_code = f"{type(failure).__name__}: {failure}", EXIT_ERROR
    finally:
        recorder.emit(PeerStopped(reason=reason, exit_code=exit_code))
        recorder.close()
    if settings.verbose or exit_code:
        print(f"{settings.name}: {reason}", flush=True)  # noqa: T201 - what a person sees of a foreground peer
    return exit_code


def _verdict(errors: BaseExceptionGroup[SwarmError]) -> SwarmError:
    """The error to report: a RunEnded explains the others."""
    ended, _ = errors.split(RunEnded)
    leaf = first_leaf(ended if ended is not None else errors)
    assert isinstance(leaf, SwarmError)  # noqa: S101 - the group holds nothing else
    return leaf


class Node:
    """One peer, from opening its endpoint to closing it."""

    def __init__(self, settings: PeerSettings, identity: StoredIdentity, events: EventSink, clock: SystemClock) -> None:
        self._settings, self._identity, self._events, self._clock = settings, identity, events, clock
        self._born = clock.monotonic()
        self._terminated = asyncio.Event()
        self._membership: Membership | None = None

    async def run(self) -> None:
        """Live. Raises, in an ExceptionGroup, RunEnded or another SwarmError when the run does not reach its end."""
        settings = self._settings
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated.set)
        device = DeviceThread(resolve_device(settings.device), threads=settings.threads)
        try:
            endpoint = await self._open_endpoint()
            try:
                await self._until_over(endpoint, device)
            finally:
                await endpoint.close()
        except SwarmError as error:
            raise ExceptionGroup("the peer could not start", [error]) from error
        finally:
            await device.close()

    async def _open_endpoint(self) -> LibP2PEndpoint:
        settings = self._settings
        config = EndpointConfig(
            run_dir=settings.home,
            listen=(parse_address(settings.listen, key="listen", peer=False, any_port=True),),
            bootstrap=tuple(parse_address(text, key="bootstrap") for text in settings.bootstrap),
        )
        return await LibP2PEndpoint.open(config, self._identity, self._clock)

    async def _until_over(self, endpoint: LibP2PEndpoint, device: DeviceThread) -> None:
        """Everything that runs beside each other; the first to fail ends the rest."""
        watch = Watch(endpoint, self._clock)
        async with asyncio.TaskGroup() as group:
            guards = [
                group.create_task(self._watch_daemon(endpoint)),
                group.create_task(self._watch_signals(watch)),
                group.create_task(self._watch_peers(watch)),
                group.create_task(LoopLagProbe(self._events, self._clock).run()),
            ]
            try:
                await self._take_part(endpoint, device, watch)
            finally:
                for guard in guards:
                    guard.cancel()

    # --- guards --------------------------------------------------------------------------------------------------

    async def _watch_daemon(self, endpoint: LibP2PEndpoint) -> None:
        code = await endpoint.wait_daemon()
        self._events.emit(DaemonLost(exit_code=code))
        raise RunEnded(f"the libp2p daemon of {self._settings.name} died (exit code {code})", EXIT_UNREACHABLE)

    async def _watch_signals(self, watch: Watch) -> None:
        await self._terminated.wait()
        await watch.tell_all(self._identity.peer, "it was stopped by SIGTERM")
        raise RunEnded(f"{self._settings.name} was stopped by SIGTERM", EXIT_TERMINATED)

    async def _watch_peers(self, watch: Watch) -> None:
        peer, reason = await watch.run()
        name = self._name_of(peer)
        self._events.emit(PeerLost(peer=peer, name=name, reason=reason))
        raise RunEnded(f"{name} ({peer}) is gone: {reason}", EXIT_UNREACHABLE)

    # --- taking part ---------------------------------------------------------------------------------------------

    async def _take_part(self, endpoint: LibP2PEndpoint, device: DeviceThread, watch: Watch) -> None:
        """Learn what the run is, become a member, and stay one until its last step is closed.

        When a call fails nobody knows yet who is really gone, so the health watch gets some time for its verdict.
        """
        manifest, served = await self._manifest(endpoint)
        if served is not None:
            endpoint.mount(served)
        await endpoint.enter(manifest.run_id)
        self._emit_started(endpoint)
        around = Surroundings(
            manifest=manifest,
            identity=self._identity.private,
            endpoint=endpoint,
            device=device,
            events=self._events,
            clock=self._clock,
            watch=watch,
        )
        founder = self._identity.peer if self._settings.role == "bootstrap" else self._bootstrap_peer()
        self._membership = Membership(self._settings, around, endpoint.directory, founder)
        watch.follow((founder,))
        try:
            await self._membership.run()
        except* PeerError as errors:
            error = first_leaf(errors)
            watch.suspect_all(str(error))
            await self._clock.sleep(VERDICT_PATIENCE_S)
            raise RunEnded(f"{self._membership.describe(error)}", EXIT_UNREACHABLE) from error

    async def _manifest(self, endpoint: LibP2PEndpoint) -> tuple[Manifest, ManifestService | None]:
        """The run's manifest: the founder reads it from its files and serves it, everybody else asks the founder."""
        settings = self._settings
        if settings.manifest is not None and settings.tokenizer is not None:
            manifest = await asyncio.to_thread(load_manifest, settings.manifest)
            tokenizer = await asyncio.to_thread(settings.tokenizer.read_bytes)
            return manifest, ManifestService(manifest.canonical(), tokenizer)
        expected = RunId(settings.run) if settings.run is not None else None
        document, _ = await fetch_manifest(endpoint, self._bootstrap_peer(), expected)
        return parse_manifest(json.loads(document), "the bootstrap's manifest"), None

    def _bootstrap_peer(self) -> PeerId:
        return split_peer(parse_address(self._settings.bootstrap[0], key="bootstrap"))[1]

    def _name_of(self, peer: PeerId) -> str:
        """What to call a peer: its name in the roster, else what is known of it."""
        known = None if self._membership is None else self._membership.name_of(peer)
        if known is not None and known != peer:
            return known
        return "the bootstrap" if self._settings.bootstrap and peer == self._bootstrap_peer() else "a peer"

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
