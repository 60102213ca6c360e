"""The Docker engine as its command-line client shows it: one call, one subprocess; and who ended, as it happens.

Everything that a play makes carries two labels: the play's id and who owns it. What an owner that is dead has left, the
next play removes. Where tests play, a third one says which (see ``tests/harness/in_engine.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import EXIT_UNREACHABLE, SwarmError

PLAY, OWNER, TEST = "swarm.play", "swarm.owner", "swarm.test"
CALL_S = 60.0
"""An engine on a busy machine takes seconds for a container; one that takes this long hangs."""
_TRIES = 3


class EngineError(SwarmError):
    """The engine does not answer, or has refused; with its own words."""

    exit_code = EXIT_UNREACHABLE


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
        """What the client prints. Raises EngineError. Blocks."""
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
        return done.stdout.strip()

    def inspect(self, name: str, what: str) -> str:
        """A field of a container, as a template names it."""
        return self.call("inspect", "--format", what, name)

    def open(self, *arguments: str) -> subprocess.Popen[str]:
        """A call that stays, with pipes to its input and output; whoever opens it ends it."""
        return subprocess.Popen(
            [self._client, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            process_group=0,
        )

    def remove_all(self) -> None:
        """Containers, networks and volumes of this play, in whatever state they are. Idempotent."""
        remove(self, {self.play})

    def sweep(self) -> None:
        """Remove what plays have left whose owner is dead."""
        listed = _labelled(self)
        remove(self, {play for play, who in listed if is_dead(who)})


class Watcher:
    """Who has ended, by name, as the engine tells; a thread of its own between :meth:`start` and :meth:`close`. It is
    ``deaf`` when the engine stopped telling before that: nobody ends any more, as far as it knows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.deaf, self._closing = False, False
        self._died: dict[str, Died] = {}
        self._news = threading.Condition()
        self._stream: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read, name="engine", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._stream = self._engine.open(
            "events", "--filter", f"label={PLAY}={self._engine.play}", "--filter", "type=container", "--format",
            "{{json .}}",
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
        """How a container ended; None while it runs."""
        with self._news:
            return self._died.get(name)

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
        self.deaf = not self._closing

    def _take(self, action: str, about: Mapping[str, Any]) -> None:
        name = str(about.get("name", ""))
        with self._news:
            if action == "die":
                self._died[name] = Died(int(about.get("exitCode", -1)))
            self._news.notify_all()


def owner() -> str:
    """This process, so that no other is ever taken for it: where its number counts, its number, when it began."""
    return f"{_where()}-{os.getpid()}-{_began(os.getpid())}"


def is_dead(who: str) -> bool:
    """Whether the process that :func:`owner` named so is known to be gone. One of another machine, container or boot
    of this engine is not ours to judge."""
    where, _, process = who.partition("-")
    number, _, began = process.partition("-")
    return where == _where() and number.isdigit() and began != _began(int(number))


def _where() -> str:
    """This boot, and the namespace that numbers our processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks since boot, which no clock step moves; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


_KINDS = (
    (("ps", "--all", "--quiet"), ("rm", "--force", "--volumes")),
    (("network", "ls", "--quiet"), ("network", "rm")),
    (("volume", "ls", "--quiet"), ("volume", "rm", "--force")),
)


def remove(engine: Engine, plays: Iterable[str]) -> None:
    """Everything with the labels of these plays. Somebody else may be removing the same: what counts is that nothing
    stays, and EngineError says what does."""
    said: list[str] = []
    for play in plays:
        by = ("--filter", f"label={PLAY}={play}")
        for _ in range(_TRIES):
            said = [word for listing, removal in _KINDS for word in _removed(engine, (*listing, *by), removal)]
            if not said:
                break
        else:
            raise EngineError(f"some of play {play} could not be removed: {'; '.join(said)}")


def _removed(engine: Engine, listing: tuple[str, ...], removal: tuple[str, ...]) -> list[str]:
    """What the engine said against it."""
    try:
        if names := engine.call(*listing).split():
            engine.call(*removal, *names, timeout_s=2 * CALL_S)
    except EngineError as error:
        return [str(error)]
    return []


def _labelled(engine: Engine) -> Iterator[tuple[str, str]]:
    by = ("--filter", f"label={PLAY}", "--format", f'{{{{.Label "{PLAY}"}}}} {{{{.Label "{OWNER}"}}}}')
    for command in (("ps", "--all"), ("network", "ls"), ("volume", "ls")):
        for line in engine.call(*command, *by).splitlines():
            play, _, who = line.partition(" ")
            yield play, who
