"""Count the product files that are entered while one thing happens and nothing fails: what a reader opens to follow it.

``python -m tests.harness.trace microbatch|close|join|status [--files]``

A file of ``swarm/``, ``peers/`` or ``data_shards/`` is *entered* when the body of at least one of its functions runs
within the window, be it a method, a lambda, a coroutine or a generator; one that goes on after a wait has entered
again. Bodies of modules and classes, comprehensions and generator expressions do not enter, nor does what dataclasses
generate. A *switch* is an entry into another file than that of the entry before it in the same thread. The
interpreter's profile hook sees each of them, in all threads. The package of the pretend network and loop is left out:
no peer of a real swarm enters it.

Each figure is that of the peer which does the thing, and of all peers together where they are in this process:

* ``microbatch``: a trainer's third microbatch of step 2, from its start to its completion.
* ``close``: from the completion of the last microbatch of step 2 until a stage host that does not lead the step has
  closed it; for all peers, until the last of them has.
* ``join``: from the start of a stage host beside a running swarm until it is ready. What all peers enter meanwhile is
  their own work, so only the newcomer is counted.
* ``status``: the command ``swarm status``, from its entry point to its exit, of a peer that another process plays.

The first three are cut from a :class:`~peers.simulate.sim_swarm.SimSwarm` whose links and devices take no time: no
timer becomes due within a window, and with one microbatch on its way at a time nothing else is under way. In a process
of their own the figures repeat themselves exactly.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import gc
import importlib
import inspect
import io
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.harness.sources import PACKAGES, ROOT, Source, our_sources
from tests.harness.standing_peer import running

if TYPE_CHECKING:
    from peers.simulate.sim_swarm import SimSwarm

# What the product calls its things. Modules are found by these names, so that they may move.
STARTED, COMPLETED, CLOSED, READY = "JourneyStarted", "JourneyCompleted", "StepClosed", "PeerReady"
"""Classes of events."""
RUN_WORLD = "run_world"
"""The function that runs a pretend world; its package is the one that is left out."""
PEER = "PEER"
"""The context variable that says whose code is running in such a world."""
COMMAND = "swarm"
"""The command in ``[project.scripts]``."""

# What the harness calls its things.
FOUNDER, HOST, TRAINER, NEWCOMER = "bootstrap", "host-0", "trainer-0", "late"

STEP, MICROBATCH = 2, 3
"""The step, and the microbatch of it, that is looked at: by then everything was done once."""
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


@dataclass(slots=True)
class Entries:
    """Entries into each file, and switches between files."""

    files: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    last: dict[int, str] = field(default_factory=dict)
    """Newest file by thread."""

    def add(self, file: str) -> None:
        """Count one entry."""
        thread = threading.get_ident()
        self.switches += self.last.get(thread, file) != file
        self.last[thread] = file
        self.files[file] += 1


class Recording:
    """Entries between :meth:`start` and :meth:`stop`, of all peers and of one peer.

    Args:
        whose: Returns the name of the peer whose code is running.
        subject: The one peer. Its own count may end earlier, by :meth:`stop_own`.
    """

    def __init__(self, whose: Callable[[], str], subject: str) -> None:
        self.own, self.everybody = Entries(), Entries()
        self.complete = False
        self._whose, self._subject, self._own_over = whose, subject, False
        self._known: dict[CodeType, str] = {}
        self._tops = tuple(f"{ROOT / package}/" for package in PACKAGES)
        self._pretend = f"{(ROOT / _home_of(RUN_WORLD).path).parent}/"
        assert self._pretend not in self._tops, "the pretend world lies in a package of its own"

    def start(self) -> None:
        """Begin to count, from zero."""
        self.own, self.everybody, self._own_over, self.complete = Entries(), Entries(), False, False
        gc.disable()  # finalizers would run whenever it is the collector's turn
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def stop_own(self) -> None:
        """Count nothing more for the one peer."""
        self._own_over = True

    def stop(self) -> None:
        """End the window."""
        self.close()
        self.complete = True

    def close(self) -> None:
        """Take the hook away, wherever things stand. Idempotent."""
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()

    def _see(self, frame: FrameType, what: str, argument: object) -> None:
        if what != "call":
            return
        code = frame.f_code
        file = self._known.get(code)
        if file is None:
            file = self._known[code] = self._file(code)
        if not file:
            return
        self.everybody.add(file)
        if not self._own_over and self._whose() == self._subject:
            self.own.add(file)

    def _file(self, code: CodeType) -> str:
        """Return the product file that a function's code lies in, nothing for other code."""
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in COMPREHENSIONS
        path = code.co_filename
        if not is_function or not path.startswith(self._tops) or path.startswith(self._pretend):
            return ""
        return str(Path(path).relative_to(ROOT))


def microbatch(root: Path) -> Recording:
    """Trace one microbatch on its way through a swarm in ``root``."""
    started = 0

    def listen(recording: Recording, name: str, event: Any) -> None:
        nonlocal started
        if _is(event, STARTED) and event.step == STEP:
            started += 1
            if started == MICROBATCH:
                recording.start()
        elif _is(event, COMPLETED) and started == MICROBATCH and not recording.complete:
            recording.stop()

    return _recorded(_small_swarm(root), TRAINER, listen)


def close(root: Path) -> Recording:
    """Trace the closing of one step of a swarm in ``root``."""
    swarm = _small_swarm(root)
    closed: set[str] = set()

    def listen(recording: Recording, name: str, event: Any) -> None:
        if _is(event, COMPLETED) and event.step == STEP:
            recording.start()  # the last one's start is the one that counts
        elif _is(event, CLOSED) and event.step == STEP:
            closed.add(name)
            if name == HOST:
                recording.stop_own()
            if closed == set(swarm.peers):
                recording.stop()

    return _recorded(swarm, HOST, listen)


def join(root: Path) -> Recording:
    """Trace a peer that joins a swarm in ``root`` after its first step."""
    swarm = _small_swarm(root, run={"steps": 6})
    joining: list[asyncio.Task[Any]] = []

    def listen(recording: Recording, name: str, event: Any) -> None:
        if _is(event, CLOSED) and name == FOUNDER and not joining:
            recording.start()
            joining.append(asyncio.get_running_loop().create_task(swarm.join(NEWCOMER, "stage", 300)))
        elif _is(event, READY) and name == NEWCOMER:
            recording.stop()

    recording = _recorded(swarm, NEWCOMER, listen)
    recording.everybody = recording.own
    return recording


def status(root: Path) -> Recording:
    """Trace the command that asks how a peer with its home in ``root`` stands. For a process that ends after it: the
    command takes over the handling of signals. Raises RuntimeError when it does not exit with 0."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts[COMMAND].partition(":")
    main = getattr(importlib.import_module(module), function)
    recording = Recording(lambda: "", "")
    arguments = [COMMAND, "status", "--home", str(root)]
    root.chmod(0o700)
    with running(root), mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(io.StringIO()):
        recording.start()
        try:
            main()
        except SystemExit as ended:
            recording.stop()
            if ended.code:
                raise RuntimeError(f"{' '.join(arguments)} exited with {ended.code}") from ended
        finally:
            recording.close()
    return recording


def _is(event: Any, kind: str) -> bool:
    return type(event).__name__ == kind


def _small_swarm(root: Path, **sections: Any) -> SimSwarm:
    from peers.simulate.sim_swarm import SimSwarm  # not for the command, which is light

    return SimSwarm(root, hosts=2, trainers=1, max_in_flight=1, **sections)


def _recorded(swarm: SimSwarm, subject: str, listen: Callable[[Recording, str, Any], None]) -> Recording:
    """Run a swarm to its end; ``listen`` hears everybody's events and cuts the window. Raises RuntimeError when there
    was none."""
    recording = Recording(_named(PEER).get, subject)

    def added(name: str) -> None:
        swarm.peers[name].events.listeners.append(lambda event: listen(recording, name, event))

    swarm.on_added.append(added)
    try:
        _named(RUN_WORLD)(swarm.run())
    finally:
        recording.close()
    if not recording.complete:
        raise RuntimeError("the run ended before what was looked for")
    return recording


def _named(name: str) -> Any:
    """Return what a module of ours defines under a name."""
    return getattr(importlib.import_module(_home_of(name).name), name)


def _home_of(name: str) -> Source:
    """Return the module that defines a name at its top. Raises LookupError for none and for several."""
    homes = [source for source in our_sources() if name in _definitions(source.tree)]
    if len(homes) != 1:
        raise LookupError(f"{name} is defined in {len(homes)} modules: see the names at the top of {__file__}")
    return homes[0]


def _definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign):
            yield from map(ast.unparse, node.targets)


SUBJECTS = {"microbatch": microbatch, "close": close, "join": join, "status": status}


def main(arguments: Sequence[str]) -> None:
    """Print the figures of one subject: one line, with ``--files`` followed by entries by file, most first."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.trace", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--files", action="store_true", help="name the files that the peer itself entered")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="t-") as root:
        recording = SUBJECTS[chosen.subject](Path(root))
    own, everybody = recording.own, recording.everybody
    line = f"{chosen.subject}: {len(own.files)} files, {own.switches} switches"
    if everybody != own:
        line += f"; of all peers {len(everybody.files)} files, {everybody.switches} switches"
    print(line)
    if chosen.files:
        for file, entries in sorted(own.files.items(), key=lambda item: (-item[1], item[0])):
            print(f"{entries:6}  {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
