"""``swarm relay``: a machine that everybody can call passes on connections for peers that nobody can.

It belongs to no run and holds nothing of one: neither weights, nor text, nor votes. What passes through it is encrypted
between the two ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.commands.preflight import check_announce, check_listen
from peers.console.event_words import labelled
from peers.console.interrupt import defer
from peers.console.words import command_name, count, report_error
from peers.exit_codes import EXIT_CODES, exit_code_of
from peers.options.relay import RelayOptions
from peers.session import Who, echo, load_identity, open_session, silent
from swarm import __version__
from swarm.errors import ConfigError, Ending, RunEnded, SwarmError
from swarm.ids import RunId
from swarm.waiting import ended

if TYPE_CHECKING:
    from peers.console.voice import Speaker
    from peers.control.status import StatusReport
    from peers.orders import Orders
    from swarm.clock import SystemClock
    from swarm.events import EventSink, RelayServing
    from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
    from swarm.network.libp2p.identity import StoredIdentity
    from swarm.network.reach.standing import StandingLimits, StandingRelay

MEGABYTE = 1e6
REPORT_EVERY_S = 60.0
"""How often it says what it does, where that has changed."""

_GRACE_S = 10.0
_RUN = re.compile(r"[0-9a-f]{64}")
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = re.compile(rf"(?=.{{1,253}}\.?$)({_LABEL}\.)*{_LABEL}\.?")


def relay(options: RelayOptions) -> int:
    """Relay in the foreground until told to stop; returns the exit code. Blocking. Raises ConfigError, having left
    nothing, for what cannot be used."""
    from peers.home.places import Tenant, home_directory, take_place
    from swarm.clock import SystemClock

    say = silent if options.quiet or options.json else echo
    runs = frozenset(map(run_named, options.run))
    served = "for any run" if not runs else f"for {count(len(runs), 'run')}: {', '.join(run[:12] for run in runs)}"
    say(f"swarm {__version__}", f"relays {served}")
    listen = options.listen or everywhere(options.port, with_ip6=_has_ip6())
    check_listen(listen)
    announce = tuple(announced(text, options.port) for text in options.announce)
    check_announce(announce)
    clock = SystemClock()
    with take_place(home_directory(options.home), options.place, clock=clock, tenant=Tenant(role="relay")) as place:
        who = load_identity(place, options.name)
        say("identity", who.described())
        session = open_session(place, who, role="relay")
        defer()  # an exception inside the loop would be lost: a signal is an order from here on
        standing = _Standing(options, who, session, place.control, clock)
        reason, code = asyncio.run(standing.live(listen, announce, runs))
        with contextlib.suppress(OSError):  # a full disk: the exit code still says how it ended
            place.ended(reason, code)
        return code


# --- what was typed --------------------------------------------------------------------------------------------------


def announced(text: str, port: int) -> str:
    """The multiaddr for a domain name, an IP address or a multiaddr. Raises ConfigError for what is none."""
    if text.startswith("/"):
        return text
    bare = text.strip("[]")
    with contextlib.suppress(ValueError):
        return f"/ip{ip_address(bare).version}/{bare}/tcp/{port}"
    if _DOMAIN.fullmatch(text) is None:
        allowed = "a domain name, an IP address, or a multiaddr such as /dns4/relay.example.org/tcp/4001"
        raise ConfigError("--announce", text, allowed, f"For example: {command_name()} relay --announce 203.0.113.7")
    return f"/dns4/{text}/tcp/{port}"


def run_named(text: str) -> RunId:
    """The run that an invite or an id names. Raises ConfigError or Incompatible."""
    from peers.invites.invite import parse_invite, typed_invite

    return RunId(text) if _RUN.fullmatch(text) else parse_invite(typed_invite(text, "relay --run -")).run


def everywhere(port: int, *, with_ip6: bool) -> tuple[str, ...]:
    """All interfaces."""
    return (f"/ip4/0.0.0.0/tcp/{port}", *((f"/ip6/::/tcp/{port}",) if with_ip6 else ()))


def _has_ip6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def limits_of(options: RelayOptions, runs: frozenset[RunId]) -> StandingLimits:
    """Return what the relay grants."""
    from swarm.network.reach.relay_slots import RelayLimits
    from swarm.network.reach.standing import StandingLimits

    def rate(megabytes: float | None) -> float | None:
        return None if megabytes is None else megabytes * MEGABYTE

    slots = RelayLimits(
        reservations=options.slots,
        stranger_reservations=options.slots,  # anyone who asks has none yet
        handshakes=max(options.circuits // 2, 32),
        stranger_handshakes=max(options.circuits // 2, 32),
        circuits=options.circuits,
        circuits_per_peer=options.circuits_per_peer,
        stranger_circuits=options.stranger_circuits,
        circuits_per_stranger=options.circuits_per_peer,
        stranger_bytes_per_s=options.stranger_rate * MEGABYTE,
        bytes_per_s=rate(options.rate),
        bytes_per_s_of_peer=rate(options.rate_per_peer),
    )
    return StandingLimits(slots=slots, slots_per_host=options.slots_per_host, runs=runs)


# --- the relay that runs ---------------------------------------------------------------------------------------------


class _Standing:
    """One life of a relay, from opening its endpoint to closing it."""

    def __init__(self, options: RelayOptions, who: Who, session: Path, control: Path, clock: SystemClock) -> None:
        self._options, self._who, self._session, self._control, self._clock = options, who, session, control, clock
        self._started = clock.wall()
        self._endpoint: LibP2PEndpoint | None = None
        self._relay: StandingRelay | None = None
        self._voice: Speaker | None = None

    async def live(self, listen: Sequence[str], announce: Sequence[str], runs: frozenset[RunId]) -> tuple[str, int]:
        """Return why it is over, and the exit code."""
        from peers.console.narration import EventLines
        from peers.console.narrator import EventPrinter
        from peers.console.voice import ConsolePrinter
        from peers.orders import Orders
        from swarm.events import PeerStopped
        from swarm.monitoring.recorder import Recorder
        from swarm.network.libp2p.identity import load_or_create

        orders = Orders(_GRACE_S)
        orders.listen()
        identity = load_or_create(self._who.key)
        recorder = Recorder(self._session / "events.jsonl", identity.peer, self._clock)
        events: EventSink = recorder
        if self._options.json:
            events = EventLines(recorder, ConsolePrinter(), self._clock, peer=identity.peer)
        elif not self._options.quiet:
            self._voice = ConsolePrinter()
            events = EventPrinter(recorder, self._voice, self._clock)
        error: SwarmError | None = None
        try:
            limits = limits_of(self._options, runs)
            config = self._config(listen, announce, limits)
            reason, ending = await self._serve(config, limits, identity, events, orders)
            code = EXIT_CODES[ending]
        except SwarmError as failure:
            error, reason, code = failure, str(failure), exit_code_of(failure)
        events.emit(PeerStopped(reason=reason, exit_code=code))
        recorder.close()
        if error is not None:
            report_error(error)
        return reason, code

    def _config(self, listen: Sequence[str], announce: Sequence[str], limits: StandingLimits) -> EndpointConfig:
        from swarm.network.addresses import parse_address
        from swarm.network.endpoint import EndpointConfig

        return EndpointConfig(
            run_dir=self._session,
            listen=tuple(parse_address(text, key="--listen", use="listen") for text in listen),
            announce=tuple(parse_address(text, key="--announce", use="announce") for text in announce),
            slots=limits.slots,
            kinds=(),
        )

    async def _serve(
        self,
        config: EndpointConfig,
        limits: StandingLimits,
        identity: StoredIdentity,
        events: EventSink,
        orders: Orders,
    ) -> tuple[str, Ending]:
        """Until it is told to leave, or cannot go on. Raises a SwarmError for the latter."""
        from peers.control.server import ControlServer
        from swarm.events import PeerStarted
        from swarm.network.endpoint import LibP2PEndpoint

        told: asyncio.Future[tuple[str, Ending]] = asyncio.get_running_loop().create_future()
        control = ControlServer(self._control, {"status": self._status, "drain": self._drain(orders)})
        endpoint = await orders.unless_forced(
            self._who.name, LibP2PEndpoint.open(config, identity, self._clock, events)
        )
        try:
            relay = await endpoint.stand(limits)
            self._endpoint, self._relay = endpoint, relay
            await control.start()

            def leave(reason: str, ending: Ending) -> str:
                if not told.done():
                    told.set_result((reason, ending))
                return "leaving: it gives no more slots, and tells those who have one to take another"

            orders.adopt(leave)
            shown = shown_addresses(endpoint.addresses)
            seconds = self._clock.wall() - self._started
            events.emit(PeerStarted(
                role="relay", name=self._who.name, pid=os.getpid(), addresses=shown, seconds=seconds
            ))  # fmt: skip
            if (voice := self._voice) is not None:
                for label, text in how_to_use(shown):
                    voice.say(labelled(label, text))
            reason, ending = await self._until(told, endpoint, relay, events)
            events.emit(_serving(relay))
            await relay.close(endpoint)
            return f"left in order: {reason}", ending
        finally:
            await control.close()
            await endpoint.close()

    async def _until(
        self,
        told: asyncio.Future[tuple[str, Ending]],
        endpoint: LibP2PEndpoint,
        relay: StandingRelay,
        events: EventSink,
    ) -> tuple[str, Ending]:
        """Report until it is told to leave. Raises RunEnded when its daemon is gone for good."""
        from peers.guards import watch_daemon

        async def report() -> None:
            last = None
            while True:
                figures = relay.figures()
                if figures != last and last is not None:
                    events.emit(_serving(relay))
                last = figures
                await self._clock.sleep(REPORT_EVERY_S)

        reporting = asyncio.ensure_future(report())
        watching = asyncio.ensure_future(watch_daemon(endpoint, self._who.name))
        try:
            awaited: set[asyncio.Future[Any]] = {told, watching, reporting}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                await (watching if watching.done() else reporting)
                raise RunEnded("the libp2p daemon of this relay ended", Ending.UNREACHABLE)
            return told.result()
        finally:
            await ended((reporting, watching))

    async def _status(self, request: Mapping[str, Any]) -> StatusReport:
        from peers.control.status import StatusReport

        relay, endpoint = self._relay, self._endpoint
        assert relay is not None  # noqa: S101 - it serves from then on
        assert endpoint is not None  # noqa: S101
        return StatusReport(
            name=self._who.name,
            peer=self._who.peer,
            pid=os.getpid(),
            role="relay",
            phase="ready",
            waiting_for="",
            run="",
            run_name="",
            part=None,
            reason="",
            step=0,
            steps=0,
            loss=None,
            tokens_per_s=None,
            members=0,
            addresses=endpoint.addresses,
            reachability="direct",
            started=self._started,
            relaying=dataclasses.asdict(relay.figures()),
        )

    def _drain(self, orders: Orders) -> Any:
        async def drain(request: Mapping[str, Any]) -> str:
            return orders.by_command("swarm drain")

        return drain


def _serving(relay: StandingRelay) -> RelayServing:
    from swarm.events import RelayServing

    return RelayServing(**dataclasses.asdict(relay.figures()))


# --- what it says ----------------------------------------------------------------------------------------------------


def shown_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those that are of use on other machines; all, where none is."""
    from multiaddr import Multiaddr

    from swarm.network.addresses import is_loopback

    return tuple(text for text in addresses if not is_loopback(Multiaddr(text))) or tuple(addresses)


def how_to_use(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Return what others type, as (label, text)."""
    from multiaddr import Multiaddr

    from swarm.network.addresses import ip_of

    if not addresses:
        return [("nobody", "can be told an address: name one with --announce")]
    swarm, at = command_name(), addresses[0]
    lines = [
        ("found a run", f"{swarm} new --preset tiny --through {at}"),
        ("join through", f"{swarm} join INVITE --through {at}  (not needed where the invite leads through it)"),
    ]
    if not any((host := ip_of(Multiaddr(text))) is None or host.is_global for text in addresses):
        lines.append(("private", "none of these is a public address: peers outside of this network cannot call it, "
                      "unless a name or an address of its router is told them (--announce)"))  # fmt: skip
    return lines
