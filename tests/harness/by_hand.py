"""Peers started as people start them: the real command line, each its own process, one SWARM_HOME."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.chaos.forks import Forked, Forks
from tests.harness.expect import LONG_S, wait_until

ENDED_S = 60.0
"""How long a peer that was told to stop twice may take, before it is killed."""
LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")
SWARM = "peers.cli"


@dataclass(slots=True)
class Written:
    """The events in a file that grows. Each line is read once: who waits looks often, and runs close steps as fast as
    they can."""

    path: Path
    _read: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What is written so far; lines that are no events, and a torn last one, are left out."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(end)
            self._events += [json.loads(line) for line in whole.decode(errors="replace").split("\n") if line[:1] == "{"]
        return [event for event in self._events if not kind or event.get("kind") == kind]


@dataclass(slots=True)
class Started:
    """One process, its output, and the events it writes (``--json``)."""

    process: subprocess.Popen[bytes] | Forked
    output: Path
    _written: Written = field(init=False)

    def __post_init__(self) -> None:
        self._written = Written(self.output)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What it has written so far."""
        return self._written.events(kind)

    def wait_event(self, kind: str, *, deadline_s: float = LONG_S, **fields: Any) -> dict[str, Any]:
        """The first such event. Fails when the process ends without it."""

        def look() -> dict[str, Any] | None:
            ended = self.process.poll() is not None
            for event in self.events(kind):
                if all(event.get(name) == value for name, value in fields.items()):
                    return event
            if ended:
                raise AssertionError(f"it ended with {self.process.returncode}:\n{self.output.read_text()[-3000:]}")
            return None

        found = wait_until(look, deadline_s=deadline_s, what=f"{kind} {fields}")
        assert found is not None
        return found

    def wait_step(self, step: int, *, deadline_s: float = LONG_S) -> None:
        """Until it has closed a step."""
        self.wait_event("StepClosed", step=step, deadline_s=deadline_s)

    def end(self, *, deadline_s: float = LONG_S) -> tuple[int, str]:
        """(exit code, why) when it has ended by itself."""
        code = self.process.wait(deadline_s)
        stopped = self.events("PeerStopped")
        return code, str(stopped[-1]["reason"]) if stopped else self.output.read_text()[-2000:]


@dataclass(slots=True)
class ByHand:
    """A home and everything that was started in it. ``prefix`` goes before each command (``ip netns exec …``); another
    ``program`` takes the arguments of ``swarm``.

    With ``forks`` peers come from one process that has imported everything: the same commands, six seconds sooner."""

    home: Path
    forks: Forks | None = None
    started: list[Started] = field(default_factory=list)

    def start(
        self, *arguments: str, prefix: Sequence[str] = (), home: Path | None = None, program: str = SWARM
    ) -> Started:
        """Start ``swarm ARGUMENTS --json`` in the background."""
        output = self.home.parent / f"out-{len(self.started)}.log"
        words = [*arguments, "--json", "--home", str(home or self.home)]
        one = Started(self._begin(words, output, prefix, program), output)
        self.started.append(one)
        return one

    def _begin(
        self, words: Sequence[str], output: Path, prefix: Sequence[str], program: str
    ) -> subprocess.Popen[bytes] | Forked:
        if self.forks is not None and not prefix and program == SWARM:
            return self.forks.begin(words, output)
        command = [*prefix, sys.executable, "-m", program, *words]
        with output.open("wb") as file:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def run(self, *arguments: str, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        environment = os.environ | {"SWARM_HOME": str(self.home)}
        command = [sys.executable, "-m", SWARM, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)


@contextmanager
def by_hand(root: Path, *, forked: bool = True) -> Iterator[ByHand]:
    """A home under ``root``; what still runs at the end is stopped, by pid."""
    hand = ByHand(root / "h", Forks(root / "forks.log") if forked else None)
    try:
        yield hand
    finally:
        for _ in range(2):  # the second one forces who cannot be spared; sent at once, both might arrive as one
            running = [one for one in hand.started if one.process.poll() is None]
            for one in running:
                one.process.send_signal(signal.SIGTERM)
            for one in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(0.5)
        for one in hand.started:
            try:
                one.process.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                one.process.send_signal(signal.SIGKILL)
                one.process.wait()
        if hand.forks is not None:
            hand.forks.close()


RUN = """
[run]
name = "hand"
steps = {steps}
start_when = {{ stage_hosts = 2, trainers = 1 }}
copies = 0
[model]
vocab_size = 512
dim = 32
layers = 2
heads = 2
context = 32
[split]
stages = 2
[batch]
microbatch_size = 4
microbatches_per_step = 4
"""


def found(
    hand: ByHand,
    *,
    steps: int,
    listen: str = "/ip4/127.0.0.1/tcp/0",
    prefix: Sequence[str] = (),
    through: Sequence[str] = (),
) -> tuple[Started, str]:
    """A small run, founded, ``through`` relays where some are named: (the bootstrap, the invite)."""
    manifest = hand.home.parent / "run.toml"
    manifest.write_text(RUN.format(steps=steps))
    relays = [word for at in through for word in ("--through", at)]
    bootstrap = hand.start("new", str(manifest), "--listen", listen, *relays, prefix=prefix)
    return bootstrap, str(bootstrap.wait_event("Invited")["invite"])


def some_text(root: Path) -> Path:
    """A text of a trainer's own."""
    path = root / "text.txt"
    path.write_text(
        "\n\n".join(f"Paragraph {n} of a text that nobody else has, number {n * 7}." * 6 for n in range(80))
    )
    return path


def digests_differ(peers: Sequence[Started]) -> list[int]:
    """Steps of which two peers saw different weights."""
    seen: dict[int, set[str]] = {}
    for peer in peers:
        for event in peer.events("StepClosed"):
            seen.setdefault(event["step"], set()).add(json.dumps(event["digests"], sort_keys=True))
    return [step for step, digests in seen.items() if len(digests) > 1]
