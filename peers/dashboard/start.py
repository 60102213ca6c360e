"""Starts a dashboard: where it listens, who may read it, and from where it sees the run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.commands.preflight import port_holder
from peers.console.interrupt import SIGNALS, Interrupted
from peers.console.words import CommandError
from peers.control.status import SwarmLook
from peers.dashboard.access import MAX_TOKEN_CHARS, MIN_TOKEN_CHARS, Access, is_loopback, new_token
from peers.dashboard.find_run import choose_run
from peers.dashboard.overview import Overview
from peers.dashboard.place import PLACE_WORDS, PORT, TOKEN_VARIABLE, listening_place
from peers.dashboard.sources import EVENTS, FilesSource, PlaceSource, RunSource, directory_source
from peers.home.places import home_directory
from peers.home.sessions import HISTORY
from swarm.clock import SystemClock
from swarm.errors import ConfigError, install_command
from swarm.events import DashboardServed, EventSink

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from peers.settings import PeerSettings

TOKEN_FILE = "dashboard-token"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """``listen`` see :func:`~peers.dashboard.place.listening_place`; ``names`` are host names under
    which browsers may ask for it."""

    listen: str
    names: tuple[str, ...] = ()
    show_addresses: bool = False
    home: str | None = None


def open_listener(option: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError naming who has the port, where that can be seen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        holder = port_holder(port)
        why = f"{error.strerror or error}{f': taken{holder}' if holder else ''}"
        remedy = f"Choose another port, or 0 for any that is free: {option} 0"
        raise ConfigError(option, f"{host}:{port}", "an address of this machine and a free port", remedy,
                          why=why) from None  # fmt: skip
    listener.setblocking(False)
    return listener


def token_for(host: str, home: Path) -> str | None:
    """Return the token without which nobody may read; None where only this machine can ask. It is that of the
    environment, else the one of the home, made there at first. Raises ConfigError."""
    if is_loopback(host):
        return None
    if given := os.environ.get(TOKEN_VARIABLE):
        if MIN_TOKEN_CHARS <= len(given) <= MAX_TOKEN_CHARS and given.isascii():
            return given
        raise ConfigError(TOKEN_VARIABLE, f"{len(given)} characters",
                          f"a token of {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} characters of ASCII",
                          "For example that of: openssl rand -hex 16. Without the variable one is made.")  # fmt: skip
    path = home / TOKEN_FILE
    try:
        home.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "x", opener=_private) as file:
            file.write(new_token() + "\n")
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError("--home", str(path), "a file that this user may write", f"Set {TOKEN_VARIABLE} instead.",
                          why=str(error.strerror)) from error  # fmt: skip
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            "token", str(path), f"a token of {MIN_TOKEN_CHARS} characters at least", "Remove the file: another is made."
        )
    return token


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def check_extra() -> None:
    """Raises CommandError where what serves the page is not installed."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CommandError(f"the dashboard needs the package {error.name}, which is not installed",
                           check="it is in the extra observe", next_=install_command("observe")) from error  # fmt: skip


class DashboardPlace:
    """An open dashboard, before it is served: its socket, who may read it, and its address for people."""

    def __init__(self, option: str, options: DashboardOptions) -> None:
        """Raises ConfigError, with nothing left open."""
        try:
            host, port = listening_place(options.listen)
        except ValueError:
            remedy = f"For example {option} {PORT} for this machine alone, or {option} 0.0.0.0:{PORT}."
            raise ConfigError(option, options.listen, PLACE_WORDS, remedy) from None
        token = token_for(host, home_directory(options.home))
        self.listener = open_listener(option, host, port)
        self.access = Access(host=host, token=token, names=options.names)
        port = self.listener.getsockname()[1]
        shown = own_address(host) if ipaddress.ip_address(_numeric(host)).is_unspecified else host
        self.address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
        self.url = f"{self.address}#token={token}" if token else self.address

    async def serve(self, source: RunSource, overview: Overview) -> None:
        """Serve until cancelled."""
        from peers.dashboard.feed import StateFeed
        from peers.dashboard.server import serve

        await serve(StateFeed(source, overview, SystemClock()), self.access, self.listener)


def own_address(unspecified: str) -> str:
    """Return the address at which others reach this machine, as far as its routes tell: a name of it might not be
    known to them, and is no proof to us that a browser means us. Nothing is sent. Else the loopback address."""
    family, far, near = (
        (socket.AF_INET6, "2001:db8::1", "::1") if ":" in unspecified else (socket.AF_INET, "198.51.100.1", "127.0.0.1")
    )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return near


def _numeric(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def check_dashboard(listen: str, home: str | None) -> None:
    """Refuse what no peer could serve a dashboard at, before anything slow. Raises ConfigError or CommandError."""
    check_extra()
    DashboardPlace("--dashboard", DashboardOptions(listen=listen, home=home)).listener.close()


async def serve_own(settings: PeerSettings, look: Callable[[], Awaitable[SwarmLook]], events: EventSink) -> None:
    """Serve the dashboard of the peer with these settings, where they ask for one, until cancelled. ``look`` asks the
    others how they are. Raises ConfigError where it cannot begin; what fails later costs the dashboard alone."""
    options = settings.options
    if options.dashboard is None:
        return
    home = None if options.home is None else str(options.home)
    place = DashboardPlace("--dashboard", DashboardOptions(listen=options.dashboard, home=home))
    keeps = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else str(home_directory(home).absolute() / TOKEN_FILE)
    events.emit(DashboardServed(address=place.address, token="" if place.access.token is None else keeps))

    async def plain() -> Mapping[str, Any]:
        found = await look()
        members = [dataclasses.asdict(member) for member in found.members]
        seen = dataclasses.asdict(found.seen)  # not of it all: what the members said is plain, and large
        said = {"vitals": found.vitals, "round_trips": found.round_trips, "unanswered": found.unanswered}
        return {"seen": seen, "members": members, **said}

    directory = settings.home
    source = FilesSource({settings.name: directory / EVENTS}, directory / HISTORY, plain)
    try:
        await place.serve(source, Overview({"kind": "peer", "label": f"what {settings.name} sees"}))
    except Exception:  # the border of the dashboard: a peer's work is worth more
        logger.exception("the dashboard has ended; the peer goes on without it")


def run_dashboard(run: str | None, peer: str | None, options: DashboardOptions, say: Callable[[str], None]) -> None:
    """Serve the page of a run until interrupted: of what ``run`` means (:mod:`peers.dashboard.find_run`), else of a
    peer. Blocking. Raises Interrupted, CommandError, ConfigError, or RunEnded for a run that cannot be reached."""
    check_extra()
    if run is not None and peer is not None:
        raise ConfigError("--peer", peer, "a peer of this machine, and another run is named already",
                          "Leave one of them out.")  # fmt: skip
    asyncio.run(_until_signal(seen_from(run, peer, options.home, command="dashboard"), options, say))


@dataclass(frozen=True, slots=True)
class RunSight:
    """Where a run is seen from, of which kind that is (``peer``, ``files`` or ``observer``), and what it is called."""

    source: contextlib.AbstractAsyncContextManager[RunSource]
    kind: str
    name: str

    @property
    def label(self) -> str:
        """Return what is shown, in words."""
        words = {"peer": "what {} sees", "files": "the files in {}", "observer": "{}, as an observer"}
        return words[self.kind].format(self.name)


def seen_from(run: str | None, peer: str | None, home: str | None, *, command: str) -> RunSight:
    """Return where the run that a person means is seen from, for ``swarm dashboard`` and ``swarm top``. Raises
    ConfigError and CommandError."""
    from peers.invites.invite import contacts_from, typed_invite

    chosen = choose_run(
        run if run is None else typed_invite(run, f"{command} -"), peer, home_directory(home), command=command
    )
    if (place := chosen.place) is not None:
        return RunSight(contextlib.nullcontext(PlaceSource(place)), "peer", place.described)
    if chosen.directory is not None:
        files, name = directory_source(chosen.directory)
        return RunSight(contextlib.nullcontext(files), "files", f"{name}, {chosen.among}" if chosen.among else name)
    from peers.dashboard.observer import ObserverSource  # torch and hivemind: some seconds

    contacts = contacts_from((chosen.invite,))
    return RunSight(ObserverSource.open(contacts, SystemClock()), "observer", contacts.run_name or "the run")


async def _until_signal(view: RunSight, options: DashboardOptions, say: Callable[[str], None]) -> None:
    loop, received = asyncio.get_running_loop(), list[int]()
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - we are one

    def stop(number: int) -> None:
        if not received:
            received.append(number)
            task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    place = DashboardPlace("--listen", options)
    try:
        async with view.source as source:
            say(f"dashboard     {place.url}")
            say(f"              shows {view.label}; Ctrl-C ends it, and nothing else")
            overview = Overview({"kind": view.kind, "label": view.label}, addresses=options.show_addresses)
            await place.serve(source, overview)
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        place.listener.close()
