"""Where a process's CPU goes, for the benchmark ``pipeline``: a sampling profiler of our own, and its table.

A thread looks at all others now and then: how much CPU each used within a tenth of a millisecond, and in what it was
before and after. That says how a thread's time divides among kinds of work; how much there was in all is read from its
clock. So what a thread does in bursts between two looks is not put down to what it waits in, and everything adds up to
the process's own CPU time. What no Python thread used (torch's or the loop's helpers), and the daemons, come on top.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import CodeType, FrameType
from typing import Any

from tests.benchmarks.runner import Cell, Table

MODULE, SUM, CODEC = "forward and backward", "accumulation of gradients", "codecs and serialisation"
CHECKS, SIGNING, RULES, CALLS = "checks of tensors", "hashing and signing", "the pipeline's rules", "asyncio and RPC"
DAEMON, OTHER = "libp2p daemon", "other"
KINDS = (MODULE, SUM, CODEC, CHECKS, SIGNING, RULES, CALLS, DAEMON, OTHER)

BY_FUNCTION = {("swarm/models/passes.py", "summed"): SUM}
BY_FILE = (
    ("swarm/optim/accumulate.py", SUM),
    ("swarm/optim/part.py", MODULE),
    ("swarm/models/", MODULE),
    ("swarm/compression/", CODEC),
    ("swarm/network/rpc/bodies.py", CODEC),
    ("swarm/network/rpc/framing.py", CODEC),
    ("swarm/schema.py", CODEC),
    ("swarm/monitoring/recorder.py", CODEC),
    ("/pydantic/", CODEC),
    ("/google/protobuf/", CODEC),
    ("/json/", CODEC),
    ("swarm/security/", SIGNING),
    ("/cryptography/", SIGNING),
    ("/hashlib.py", SIGNING),
    ("swarm/network/", CALLS),
    ("swarm/device.py", CALLS),
    ("/hivemind/", CALLS),
    ("/asyncio/", CALLS),
    ("/uvloop/", CALLS),
    ("/concurrent/futures/", CALLS),
    ("/threading.py", CALLS),
    ("swarm/pipeline/compute.py", CHECKS),
    ("swarm/", RULES),
)
"""A frame's kind by what its file's path has in it, the first that fits; of a stack the innermost frame that has one.
So torch counts for who calls it."""

NOTES = (
    "where our CPU goes: a round of its own for each model, after the others; percent of the CPU time of four hosts, "
    "the trainer and their daemons; stacks are looked at a hundred times a second, torch counts for who calls it",
    "checks of tensors: finite and norms, moving payloads to and from codecs; other: what no Python thread used, and "
    "what is in no file of a kind",
)

EVERY_S, LOOK_S = 0.010, 0.0001


def kind_of_code(file: str, function: str) -> str | None:
    """Return the kind of work that a function of a file does, None where that depends on its caller. Pure."""
    for (path, name), kind in BY_FUNCTION.items():
        if function == name and file.endswith(path):
            return kind
    return next((kind for piece, kind in BY_FILE if piece in file), None)


class Kinds:
    """The kind of work of a stack; remembers that of each function."""

    def __init__(self) -> None:
        self._known: dict[CodeType, str | None] = {}

    def of(self, frame: FrameType | None) -> str:
        """The innermost frame's that has one."""
        while frame is not None:
            code = frame.f_code
            if code not in self._known:
                self._known[code] = kind_of_code(code.co_filename, code.co_name)
            kind = self._known[code]
            if kind is not None:
                return kind
            frame = frame.f_back
        return OTHER


@dataclass(slots=True)
class ThreadCpu:
    """One thread's CPU seconds from ``first`` to ``last``, and in looks at it how they divided among kinds."""

    first: float
    last: float
    looks: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def by_kind(self) -> dict[str, float]:
        """All of it, divided as it was in the looks. One that was never seen at work did other things."""
        total, seen = self.last - self.first, sum(self.looks.values())
        if not seen:
            return {OTHER: total}
        return {kind: total * seconds / seen for kind, seconds in self.looks.items()}


class CpuProfile(threading.Thread):
    """Runs from ``start()`` to :meth:`finish`. What it costs itself is not counted."""

    def __init__(self) -> None:
        super().__init__(name="profile", daemon=True)
        self._kinds, self._threads = Kinds(), dict[int, ThreadCpu]()
        self._over = threading.Event()
        self._began, self._own = time.process_time(), 0.0
        self._note({ident: _cpu(ident) for ident in sys._current_frames()})

    def run(self) -> None:
        """Look until it is over; irregularly, so that nothing regular is always seen, or never."""
        draw = Random(0)
        while not self._over.wait(draw.uniform(0.5, 1.5) * EVERY_S):
            before = self._look()
            self._over.wait(LOOK_S)
            after = self._look()
            self._note({ident: cpu for ident, (cpu, _) in after.items()})
            for ident in before.keys() & after.keys():
                used = after[ident][0] - before[ident][0]
                for kind in (before[ident][1], after[ident][1]):
                    self._threads[ident].looks[kind] += used / 2
        self._own = time.thread_time()

    def finish(self) -> dict[str, float]:
        """CPU seconds of this process by kind since it was made."""
        self._over.set()
        self.join()
        self._note({ident: _cpu(ident) for ident in sys._current_frames()})
        total = time.process_time() - self._began - self._own
        return divided(list(self._threads.values()), total)

    def _look(self) -> dict[int, tuple[float, str]]:
        mine = threading.get_ident()
        frames = sys._current_frames().items()
        return {ident: (_cpu(ident), self._kinds.of(frame)) for ident, frame in frames if ident != mine}

    def _note(self, clocks: Mapping[int, float]) -> None:
        for ident, cpu in clocks.items():
            known = self._threads.setdefault(ident, ThreadCpu(cpu, cpu))
            known.last = max(known.last, cpu)


def _cpu(ident: int) -> float:
    """CPU seconds of a thread that is alive: it cannot end while this one has the interpreter."""
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def divided(threads: Sequence[ThreadCpu], total: float) -> dict[str, float]:
    """A process's ``total`` CPU seconds by kind; what its Python threads did not use is another's. Pure."""
    found = dict.fromkeys(KINDS, 0.0)
    for thread in threads:
        for kind, seconds in thread.by_kind().items():
            found[kind] += seconds
    found[OTHER] += max(0.0, total - sum(found.values()))
    return found


# --- the table -------------------------------------------------------------------------------------------------------


def shares(hosts: Sequence[Mapping[str, float]], trainer: Mapping[str, float], report: Mapping[str, Any]) -> Table:
    """Return where the CPU of one round went: seconds by kind of each host and of the trainer, and in ``report`` those
    of their daemons, and how many microbatches there were."""
    ours = [{kind: sum(host[kind] for host in hosts) for kind in KINDS}, {kind: trainer[kind] for kind in KINDS}]
    for found, role in zip(ours, ("hosts' p2pd", "trainer's p2pd"), strict=True):
        found[DAEMON] += report[f"cpu {role}"]
    total = sum(sum(found.values()) for found in ours)
    rows: list[tuple[Cell, ...]] = []
    for kind in KINDS:
        each = [found[kind] for found in ours]
        percent = [round(100 * seconds / max(total, 1e-9), 1) for seconds in (*each, sum(each))]
        rows.append((kind, *percent, round(1000 * sum(each) / max(report["microbatches"], 1), 3)))
    return Table(
        title="",
        columns=("kind", "hosts_percent", "trainer_percent", "percent", "cpu_ms_per_microbatch"),
        rows=rows,
    )
