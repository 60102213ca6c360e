"""Call the Docker engine through its command-line client, one subprocess a call, and hear who ended as it happens.

Everything that a play makes carries two labels, the play's id and who owns it (:func:`owner`), by which
:mod:`peers.chaos.leftovers` finds it; where tests play, a third one says which (see ``tests/harness/in_engine.py``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.exit_codes import EXIT_UNREACHABLE
from peers.local.launcher import launched
from swarm.clock import SystemClock
from swarm.errors import SwarmError

PLAY, OWNER, TEST = "swarm.play", "swarm.owner", "swarm.test"
CALL_S = 60.0
"""An engine on a busy machine takes seconds for a container; one that takes this long hangs."""
_BEFORE_S = 60.0
"""The engine's clock may be so far behind ours. Nobody but this play has its label: all that is told is its own."""
_LIMITS = ("--cpu-period", "--cpu-quota", "--memory", "--memory-swap")
_MACHINE, _BOOT = Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")
_UNHEEDED = re.compile(r"\b(discarded|ignored)\b", re.IGNORECASE)


class EngineError(SwarmError):
    """The engine does not answer, or has refused; with its own words."""

    exit_code = EXIT_UNREACHABLE


class Unfit(EngineError):
    """The engine answers, and no play can rest on it; says why, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Died:
    """A container ended: with which code, 137 when it was killed."""

    code: int


class Engine:
    """Calls for one play. ``client`` is the program."""

    def __init__(self, play: str, client: str = "docker") -> None:
        self.play, self._client = play, client
        self.labels: tuple[str, ...] = ("--label", f"{PLAY}={play}", "--label", f"{OWNER}={owner()}")
        if test := os.environ.get("SWARM_TEST_ID"):
            self.labels = (*self.labels, "--label", f"{TEST}={test.partition('/')[0]}")

    def call(self, *arguments: str, timeout_s: float = CALL_S) -> str:
        """Return the client's output. Raises EngineError, also where a limit was not set: engines do without the limits
        that they have no means for, and warn. One without the means to limit swap limits memory alone. Blocks."""
        try:
            done = subprocess.run(
                [self._client, *arguments],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the play, not for what it calls to end in order
            )
        except FileNotFoundError as error:
            raise EngineError(f"{self._client} is not installed: swarm chaos --on processes does without") from error
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"the engine did not do this within {timeout_s:g} s: {' '.join(arguments)}") from error
        if done.returncode:
            raise EngineError(f"{self._client} {' '.join(arguments[:2])}: {done.stderr.strip() or done.returncode}")
        if unheeded := unheeded_limits(arguments, done.stdout + done.stderr):
            raise EngineError(unheeded)
        return done.stdout.strip()

    def inspect(self, name: str, what: str) -> str:
        """A field of a container, as a template names it."""
        return self.call("inspect", "--format", what, name)

    def open(self, *arguments: str) -> subprocess.Popen[str]:
        """A call that stays, with pipes to its input and output; the one who opens it ends it. It ends with the calling
        thread, however that ends: an engine that has nothing to tell would keep it for ever."""
        return subprocess.Popen(
            launched([self._client, *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            process_group=0,
        )


class Watcher:
    """Follows the engine's events about started and ended containers, by name, in its own thread between :meth:`start`
    and :meth:`close`. It is ``deaf`` when the engine stopped telling before that: then it sees no more ends.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.deaf, self._closing = False, False
        self._died: dict[str, Died] = {}
        self._started: set[str] = set()
        self._news = threading.Condition()
        self._stream: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read, name="engine", daemon=True)

    def start(self) -> None:
        """Listen from now on: what happens before the client has reached the engine is told too."""
        since = f"{SystemClock().wall() - _BEFORE_S:.0f}"
        self._stream = self._engine.open(
            "events", "--since", since, "--filter", f"label={PLAY}={self._engine.play}", "--filter", "type=container",
            "--format", "{{json .}}",
        )  # fmt: skip
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._closing = True
        if self._stream is not None:
            self._stream.kill()
            self._thread.join()
            for pipe in (self._stream.stdin, self._stream.stdout):
                if pipe is not None:
                    pipe.close()
            self._stream.wait()
            self._stream = None

    def died(self, name: str) -> Died | None:
        """Return a container's end; None while it runs."""
        with self._news:
            return self._died.get(name)

    def has_started(self, name: str, seconds: float) -> bool:
        """Return whether the engine tells within so many seconds that a container was started. Blocks."""
        with self._news:
            self._news.wait_for(lambda: name in self._started or self.deaf, seconds)
            return name in self._started

    def wait(self, names: Iterable[str], seconds: float) -> set[str]:
        """Those of them that have not ended after at most so many seconds."""
        wanted = set(names)
        with self._news:
            self._news.wait_for(lambda: wanted <= self._died.keys(), seconds)
            return wanted - self._died.keys()

    def _read(self) -> None:
        for line in (self._stream.stdout if self._stream is not None else None) or ():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            self._take(str(event.get("Action", "")), event.get("Actor", {}).get("Attributes", {}))
        with self._news:
            self.deaf = not self._closing
            self._news.notify_all()

    def _take(self, action: str, about: Mapping[str, Any]) -> None:
        name = str(about.get("name", ""))
        with self._news:
            if action == "start":
                self._started.add(name)
            if action == "die":
                self._died[name] = Died(int(about.get("exitCode", -1)))
            self._news.notify_all()


def bind(source: Path, target: str, *options: str) -> tuple[str, str]:
    """Return the option that shows a container a file or directory of this machine, which must be there, whatever is in
    its name. Pure."""
    quoted = f"source={source}".replace('"', '""')
    return "--mount", ",".join(("type=bind", f'"{quoted}"', f"target={target}", *options))


def unheeded_limits(arguments: Sequence[str], said: str) -> str:
    """Return the limits in a call that the engine has not set, by its output, with a remedy; "" when it has. Pure."""
    limits = [f"{name} {value}" for name, value in zip(arguments, arguments[1:], strict=False) if name in _LIMITS]
    warned = [line.strip() for line in said.splitlines() if _UNHEEDED.search(line)]
    if not limits or not warned:
        return ""
    return (
        f"this engine does without a limit ({', '.join(limits)}): {' '.join(warned)}. docker info says which it has no "
        "means for; swarm chaos --on processes plays without an engine"
    )


def owner() -> str:
    """This process, so that no other is ever taken for it: where its number counts (machine, boot, namespace), its
    number, when it began."""
    return f"{_where()}-{os.getpid()}-{_began(os.getpid())}"


def is_dead(who: str) -> bool:
    """Return whether the process that :func:`owner` named so is known to be gone. One of another machine, boot or
    container is not known."""
    where, _, process = who.partition("-")
    number, _, began = process.partition("-")
    return where == _where() and number.isdigit() and began != _began(int(number))


def is_of_another_boot(who: str) -> bool:
    """Return whether that process was started on this machine at another boot, as far as one can tell: machines that
    were copied have the same number."""
    machine, _, rest = _where().partition(".")
    its, _, its_rest = who.partition("-")[0].partition(".")
    same = bool(machine) and its == machine and its_rest.count(".") == rest.count(".")
    return same and its_rest.partition(".")[0] != rest.partition(".")[0]


def _where() -> str:
    """This machine, this boot, and the namespace that numbers our processes."""
    try:
        machine = _MACHINE.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = ""
    boot = _BOOT.read_text(encoding="ascii").strip().replace("-", "")
    return f"{machine if machine.isalnum() else ''}.{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> str:
    """Return the start of a process, in the kernel's ticks since boot, which no clock step moves; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
