"""Nemesis, the one container per play that may enter the network of any other; and what an engine must be like for it.

It does the faults of networks, so that no peer gets a privilege for it. Commands go through one shell that stays open:
a fault takes tens of milliseconds. An engine is checked before anybody is started: what it lacks would show as faults
that did not happen, peers that cannot write, or containers that never end.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from peers.chaos.engine import Engine, EngineError, Unfit, Watcher, bind

IMAGE = "swarm-nemesis:local"
PLACE = "/play"
"""Where it sees the directory of the play."""
FAKETIME = "/usr/lib/libfaketime.so"
_DONE = "=done="
RUN_S = 30.0
"""A command takes tens of milliseconds; one that takes this long hangs, and with it the one who waits for the world."""
TOLD_S = 15.0
"""How long a busy engine may take to tell what has happened."""
INSTEAD = "swarm chaos --on processes needs no engine"
_TOKEN = ".seen"
_UNFIT: Mapping[str, str] = {
    "rootless": "runs without root, and nobody in it may enter the networks of others",
    "userns": "maps users (userns-remap), and peers could not write what this user reads",
}
BOUNDED = ("--read-only", "--tmpfs", "/run:size=1m", "--memory", "256m", "--memory-swap", "256m", "--pids-limit", "256")
"""What a helper's container may take of the machine; iptables keeps its lock in /run."""
_MAY = ("NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE", "KILL")


class Nemesis:
    """Between :meth:`start` and :meth:`close`; the engine's labels have its container removed."""

    def __init__(self, engine: Engine, image: str = IMAGE) -> None:
        self._engine, self.image = engine, image
        self.name = f"swarm-{engine.play}-nemesis"
        self._shell: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self, place: Path) -> None:
        """Make the container, which sees the play's directory. Raises EngineError, with the command that helps, where
        its image is not there, Unfit where the engine will not have it. Blocks for about a second."""
        try:
            self._engine.call("image", "inspect", "--format", "{{.Id}}", self.image)
        except EngineError as error:
            raise EngineError(f"{self.image} is not here: docker/base-image.sh --nemesis makes it") from error
        may = [word for capability in _MAY for word in ("--cap-add", capability)]
        try:
            self._engine.call(
                "run", "--detach", "--init", "--name", self.name, *self._engine.labels, *BOUNDED, *may, "--pid", "host",
                "--security-opt", "apparmor=unconfined", "--network", "none", "--stop-signal", "KILL",
                *bind(place, PLACE, "readonly"), self.image, "sleep", "infinity",
            )  # fmt: skip
        except EngineError as error:
            raise Unfit(f"this engine does not start what does the faults of networks: {error}") from error
        self._shell = self._engine.open("exec", "--interactive", self.name, "sh")

    def close(self) -> None:
        """End the shell. Idempotent."""
        if self._shell is not None:
            self._shell.kill()
            for pipe in (self._shell.stdin, self._shell.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._shell.wait()
            self._shell = None

    def run(self, commands: Iterable[str]) -> str:
        """Run shell commands, all of them, and return what they say. Raises EngineError at the first that fails."""
        with self._lock:
            if self._shell is None:
                raise EngineError("nobody is there to do faults of the network: the play is over")
            hangs = threading.Timer(RUN_S, self._shell.kill)
            hangs.start()
            try:
                return _run(self._shell, " && ".join(commands))
            finally:
                hangs.cancel()

    def within(self, pid: int, commands: Iterable[str]) -> str:
        """The same in the network of a process of the engine's machine."""
        return self.run([f"nsenter -t {pid} -n sh -c {shlex.quote(' && '.join(commands) or ':')}"])

    def has_delay(self) -> bool:
        """Return whether this kernel can make links late (netem)."""
        try:
            self.run(["tc qdisc replace dev lo root netem delay 1ms", "tc qdisc del dev lo root"])
        except EngineError:
            return False
        return True


def _run(shell: subprocess.Popen[str], script: str) -> str:
    assert shell.stdin is not None  # noqa: S101 - it was opened with pipes
    assert shell.stdout is not None  # noqa: S101
    said: list[str] = []
    with contextlib.suppress(BrokenPipeError):
        shell.stdin.write(f"{{ {script or ':'}; }} </dev/null 2>&1; echo {_DONE} $?\n")
        shell.stdin.flush()
        for line in shell.stdout:
            before, done, code = line.partition(f"{_DONE} ")
            said.append(before)
            if done:
                if int(code):
                    raise EngineError(f"{script}: {''.join(said).strip()}")
                return "".join(said).strip()
    raise EngineError(f"the shell that does faults of the network is gone, or {script} took {RUN_S:g} s")


def check_kind(engine: Engine) -> None:
    """Raises Unfit for an engine that gives nobody the means for faults, or does not say what it is. Blocks."""
    try:
        options = json.loads(engine.call("info", "--format", "{{json .SecurityOptions}}")) or ()
    except (EngineError, ValueError) as error:
        raise Unfit(f"docker info does not say what this engine is, as Docker's does: {error}; {INSTEAD}") from error
    for option in options:
        if why := _UNFIT.get(str(option).partition(",")[0].removeprefix("name=")):
            raise Unfit(f"this engine {why}: docker context ls shows others, or {INSTEAD}")


def check_files(nemesis: Nemesis, root: Path) -> None:
    """Raises Unfit where containers do not see the files of this machine: what is written below ``root`` is to be read
    in one. Blocks."""
    token, place = secrets.token_hex(8), root / _TOKEN
    place.write_text(token, encoding="ascii")
    try:
        seen = nemesis.run([f"(cat {PLACE}/{_TOKEN} || true)"])
    finally:
        place.unlink()
    if seen != token:
        raise Unfit(
            f"this engine does not see {root} of this machine ({seen or 'nothing is there'}): docker context ls says "
            f"where it runs; {INSTEAD}"
        )


def check_events(watcher: Watcher, nemesis: Nemesis) -> None:
    """Raises Unfit where the engine does not tell of a container that was just started, or not in Docker's words.
    Blocks for at most :data:`TOLD_S`."""
    if not watcher.has_started(nemesis.name, TOLD_S):
        raise Unfit(
            f"the events of this engine are not understood: docker events told nothing of the start of {nemesis.name} "
            f"within {TOLD_S:g} s; {INSTEAD}"
        )
