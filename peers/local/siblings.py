"""``swarm join --device A,B``: a peer for each device of this machine, started, told apart and ended together.

Each is a process of its own with a place of its own, so that the death of one leaves the others alone; ours ends all.
They know each other's ids from the start, and say so in the roster: one vote and one death
(:mod:`swarm.consensus.roster`). And each is told its share of the machine's memory, for all look at it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import IO

from peers.commands.preflight import check_listen
from peers.console.interrupt import SIGNALS
from peers.exit_codes import EXIT_OK
from peers.home.identity import create_identity
from peers.home.places import look_at_place
from peers.local.launcher import launched
from peers.local.peer_order import PEER_COMMAND, Company, PeerOrder, order_for
from peers.options.model import PeerOptions
from peers.sharing.limit_options import MIN_RATE, Return, read_rate
from swarm.consensus.roster import tail
from swarm.device import free_memory
from swarm.disk import alone
from swarm.errors import ConfigError
from swarm.ids import MAX_NAME

_PORT = re.compile(r"^(.*/(?:tcp|udp)/)([1-9][0-9]*)(.*)$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """One of them: what its lines begin with, and the options of its own ``swarm join``."""

    label: str
    options: PeerOptions


def siblings_of(options: PeerOptions) -> list[Sibling]:
    """Return a peer for each device that the options name. Pure.

    Ports that are named are counted up from peer to peer, names and places get a number, and limits on what is sent
    and received are shared out. Raises ConfigError for a GPU that is named twice, for ``auto``, which is one device,
    and for a limit too low to be shared.
    """
    devices = ["cuda:0" if device == "cuda" else device for device in options.device.split(",")]
    each = [name for device in devices for name in device.split("+")]
    twice = {device for device in each if device != "cpu" and each.count(device) > 1}
    if twice:
        raise ConfigError("--device", options.device, "each GPU once", f"Name {min(twice)} once.")
    if "auto" in devices:
        remedy = "Name them all, as cuda:0,cuda:1; or auto alone for one peer."
        raise ConfigError("--device", options.device, "devices by name where there are several", remedy)
    options = dataclasses.replace(
        options,
        max_upload=_share(options.max_upload, len(devices), "--max-upload"),
        max_download=_share(options.max_download, len(devices), "--max-download"),
    )
    return [_sibling(options, device, number) for number, device in enumerate(devices)]


def _share(rate: str | None, of: int, option: str) -> str | None:
    """Return what each of so many has of a rate of the whole machine. Raises ConfigError for less than any may have."""
    if rate is None or of < 2:
        return rate
    share = int(read_rate(rate) * 8) // of
    if share < MIN_RATE * 8:
        least = f"{of * MIN_RATE * 8 // 10**6}mbit"
        raise ConfigError(option, rate, f"{least} at least for {of} devices, each of which gets its share",
                          f"Give {least} or more, or join with fewer devices.")  # fmt: skip
    return f"{share // 1000 / 1000:.3f}mbit"


def _sibling(options: PeerOptions, device: str, number: int) -> Sibling:
    own = dataclasses.replace(
        options,
        device=device,
        place=f"{options.place or 'device'}-{number}",
        name=None if options.name is None else f"{options.name[: MAX_NAME - 3]}-{number}",
        listen=tuple(counted_up(address, number) for address in options.listen),
        announce=tuple(counted_up(address, number) for address in options.announce),
        dashboard=None if number else options.dashboard,  # one page is about the whole run
        eval=None if number else options.eval,
        eval_every=None if number else options.eval_every,
        report_to=None if number else options.report_to,  # they are in one run: one tells of it
        report_dir=None if number else options.report_dir,
    )
    return Sibling(label=f"cpu#{number}" if device.startswith("cpu") else device, options=own)


def counted_up(address: str, number: int) -> str:
    """Return an address with a port that is so much higher, where it names one. Pure."""
    found = _PORT.match(address)
    return address if found is None else f"{found[1]}{int(found[2]) + number}{found[3]}"


def join_each(options: PeerOptions, home: Path, *, words: bool, json_lines: bool, back: Return | None = None) -> int:
    """Run them all until the last has ended; returns the largest of their exit codes. Blocking; the main thread only.

    SIGTERM and Ctrl-C are handed on to each: they leave in order, and at once when it comes again. Raises ConfigError
    as :func:`siblings_of`, and for a port that is taken, having started nobody.
    """
    siblings = siblings_of(options)
    for one in siblings:
        check_listen(one.options.listen)
    if options.place is not None:
        return _run_each(siblings, home, back, words=words, json_lines=json_lines)
    with _in_free_places(siblings, home) as placed:
        return _run_each(placed, home, back, words=words, json_lines=json_lines)


@contextmanager
def _in_free_places(siblings: Sequence[Sibling], home: Path) -> Iterator[list[Sibling]]:
    """Give each the first place ``device-N`` that nobody uses. They are ours while this is open, though their peers
    take them a while later: who starts now as well gets others."""
    with ExitStack() as claims:
        free = (name for name in map("device-{}".format, count()) if _claimed(home / name, claims))
        yield [dataclasses.replace(one, options=dataclasses.replace(one.options, place=next(free))) for one in siblings]


def _claimed(place: Path, claims: ExitStack) -> bool:
    try:
        ours = claims.enter_context(alone(place / "company", wait=False))
    except OSError:
        return True  # who takes the place says what is wrong with it
    return ours and not look_at_place(place).live


def _run_each(siblings: Sequence[Sibling], home: Path, back: Return | None, *, words: bool, json_lines: bool) -> int:
    peers = [create_identity(home, str(one.options.place)).peer for one in siblings]
    share = free_memory() // len(siblings)
    started: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    lock = threading.Lock()
    with _handed_on(started) as all_started:
        try:
            for one, peer in zip(siblings, peers, strict=True):
                company = Company(beside=tuple(tail(other) for other in peers if other != peer), host_bytes=share)
                order = PeerOrder(options=one.options, company=company, back=back, words=words, json_lines=json_lines)
                process = _start(order)
                started.append(process)
                for source, sink, label in (
                    (process.stdout, sys.stdout, "" if json_lines else one.label),
                    (process.stderr, sys.stderr, one.label),
                ):
                    readers.append(threading.Thread(target=_repeat, args=(source, sink, label, lock), daemon=True))
                    readers[-1].start()
            all_started()
            codes = [process.wait() for process in started]
            for reader in readers:
                reader.join()
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return max((128 - code if code < 0 else code for code in codes), default=EXIT_OK)


@contextmanager
def _handed_on(started: Sequence[subprocess.Popen[str]]) -> Iterator[Callable[[], None]]:
    """Hand every signal that is to end us on to who runs. Call what comes of it once all are ``started``: until then
    signals are kept, since who is started after one would not have it."""
    early: list[int] = []
    complete = False

    def send(number: int) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    def on_signal(number: int, frame: object) -> None:
        if complete:
            send(number)
        else:
            early.append(number)

    def all_started() -> None:
        nonlocal complete
        complete = True
        for number in early:
            send(number)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield all_started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(order: PeerOrder) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        launched(PEER_COMMAND),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is ours to hand on
    )
    assert process.stdin is not None  # noqa: S101 - asked for
    with contextlib.suppress(BrokenPipeError), process.stdin as orders:  # who is dead already says so by its code
        orders.write(order_for(order))
    return process


def _repeat(source: IO[str], sink: IO[str], label: str, lock: threading.Lock) -> None:
    """Read to the end, also when nobody reads us any more: who cannot write would wait."""
    with source:
        for line in source:
            with lock, contextlib.suppress(OSError, ValueError):
                print(f"{label + ' ' if label else ''}{line.rstrip()}", file=sink, flush=True)
