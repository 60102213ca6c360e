"""``swarm join --device A,B``: a peer for each device of this machine, started, told apart and ended together.

Each is a process of its own with a place of its own, so that the death of one leaves the others alone. They know each
other's ids from the start, and say so in the roster: one vote and one death (:mod:`swarm.consensus.machines`).
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from peers.exit_codes import EXIT_OK
from peers.home.identity import create_identity
from peers.options.model import PeerOptions
from swarm.consensus.machines import tail
from swarm.errors import ConfigError

_PORT = re.compile(r"^(.*/(?:tcp|udp)/)([1-9][0-9]*)(.*)$")
_OPTIONS = TypeAdapter(PeerOptions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """One of them: what its lines begin with, and the options of its own ``swarm join``."""

    label: str
    options: PeerOptions


def siblings_of(options: PeerOptions) -> list[Sibling]:
    """Return a peer for each device that the options name. Pure.

    Ports that are named are counted up from peer to peer, names and places get a number. Raises ConfigError for a
    trainer, whose text one peer reads, and for a GPU that is named twice.
    """
    devices = options.device.split(",")
    if options.part_taken != "stage":
        remedy = "Start a trainer with one device; stage hosts may have several."
        raise ConfigError("--device", options.device, "one device for a trainer", remedy)
    twice = {device for device in devices if device != "cpu" and devices.count(device) > 1}
    if twice:
        raise ConfigError("--device", options.device, "each GPU once", f"Name {twice.pop()} once.")
    return [_sibling(options, device, number) for number, device in enumerate(devices)]


def _sibling(options: PeerOptions, device: str, number: int) -> Sibling:
    own = dataclasses.replace(
        options,
        device=device,
        place=f"{options.place or 'device'}-{number}",
        name=None if options.name is None else f"{options.name[:38]}-{number}",
        listen=tuple(_counted_up(address, number) for address in options.listen),
        announce=tuple(_counted_up(address, number) for address in options.announce),
    )
    return Sibling(label=device if options.device.split(",").count(device) == 1 else f"{device}#{number}", options=own)


def _counted_up(address: str, number: int) -> str:
    found = _PORT.match(address)
    return address if found is None else f"{found[1]}{int(found[2]) + number}{found[3]}"


def join_each(options: PeerOptions, home: Path, *, words: bool, json_lines: bool) -> int:
    """Run them all until the last has ended; returns the largest of their exit codes. Blocking; the main thread only.

    SIGTERM, SIGHUP and Ctrl-C are handed on to each: they leave in order, and at once when it comes again. Raises ConfigError
    as :func:`siblings_of`, having started nobody.
    """
    siblings = siblings_of(options)
    peers = [create_identity(home, str(one.options.place)).peer for one in siblings]
    started: list[subprocess.Popen[str]] = []
    lock = threading.Lock()

    def hand_on(number: int, frame: object) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for own, peer in zip(siblings, peers, strict=True):
            beside = [tail(other) for other in peers if other != peer]
            started.append(_start(own.options, beside, words=words, json_lines=json_lines))
        readers = [
            threading.Thread(target=_repeat, args=(process.stdout, "" if json_lines else one.label, lock), daemon=True)
            for one, process in zip(siblings, started, strict=True)
        ]
        for reader in readers:
            reader.start()
        codes = [process.wait() for process in started]
        for reader in readers:
            reader.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in started:
            if process.poll() is None:
                process.kill()
    return max((128 - code if code < 0 else code for code in codes), default=EXIT_OK)


def _start(options: PeerOptions, beside: Sequence[str], *, words: bool, json_lines: bool) -> subprocess.Popen[str]:
    plain = _OPTIONS.dump_python(dataclasses.replace(options, origins={}), mode="json")
    order = {"options": plain, "beside": list(beside), "words": words, "json_lines": json_lines}
    process = subprocess.Popen(
        [sys.executable, "-m", "peers.local.siblings"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is ours to hand on
    )
    assert process.stdin is not None  # noqa: S101 - asked for
    process.stdin.write(json.dumps(order))
    process.stdin.close()
    return process


def _repeat(lines: IO[str] | None, label: str, lock: threading.Lock) -> None:
    for line in lines or ():
        with lock:
            print(f"{label + ' ' if label else ''}{line.rstrip()}", flush=True)  # noqa: T201 - what they say is shown


def main() -> int:
    """Run one of them, whose order is on the standard input."""
    from peers.commands.join import join
    from peers.console.words import report_error
    from peers.exit_codes import exit_code_of
    from swarm.errors import SwarmError

    order: dict[str, Any] = json.loads(sys.stdin.read())
    options = _OPTIONS.validate_python(order["options"], strict=False)
    try:
        return join(options, words=order["words"], json_lines=order["json_lines"], beside=tuple(order["beside"]))
    except SwarmError as error:
        report_error(error)
        return exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main())
