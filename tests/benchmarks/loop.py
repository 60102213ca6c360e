"""How late a busy peer's event loop is while tensors stream through it: the price of one process per peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.runner import ROOT, Result, Size

LAG_P99_TARGET_MS = 10.0
WARMUP_S = 0.7
QUIET_CORES = 0.2
"""A round is quiet when everybody else on the machine used less than this. On a machine with no core to spare, a thread
waits for its turn for milliseconds, whatever it runs."""

KEYS = (
    "lag_p50_ms", "lag_p99_ms", "lag_max_ms", "in_mib_s", "out_mib_s", "jobs_s", "loop_cpu", "other_threads_cpu",
    "daemon_cpu", "partner_cpu", "partner_daemon_cpu", "machine_cpu", "strangers_cpu", "preempted_s",
    "lag_p99_target_ms", "lag_p99_met", "lag_p99_quiet_ms", "lag_p99_no_lock_ms", "lag_p99_idle_ms", "jobs_kept",
    "cores", "rounds", "rounds_quiet",
)  # fmt: skip

_CALM_POLL_S = 0.5
_START_S = 60.0
_SLACK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One candidate: what the measured peer does. Its partner streams when it does, and never computes.

    ``device`` is what the device thread does without pause: a ``stage``'s work, one ``kernel`` after the other, or
    nothing.
    """

    name: str
    device: str
    stream: bool
    seconds: float

    def order(self, *, measured: bool) -> dict[str, Any]:
        """What to ask of a peer."""
        device = self.device if measured else ""
        return {"device": device, "stream": self.stream, "warmup_s": WARMUP_S, "seconds": self.seconds}


def situations(size: Size) -> tuple[Situation, ...]:
    """What is compared. ``both`` is the claim. ``no lock`` keeps the device thread as busy, in the same process, but in
    kernels that never ask for the interpreter lock: what ``both`` has beyond it is the price of sharing an interpreter,
    the rest is the kernel's choice among more threads than cores. The others say what each half costs, and ``idle``
    what the machine does.
    """
    long, short = {Size.SMOKE: (0.4, 0.4), Size.DEFAULT: (4.5, 2.0), Size.FULL: (8.0, 4.0)}[size]
    return (
        Situation(name="both", device="stage", stream=True, seconds=long),
        Situation(name="no lock", device="kernel", stream=True, seconds=long),
        Situation(name="device only", device="stage", stream=False, seconds=short),
        Situation(name="stream only", device="", stream=True, seconds=short),
        Situation(name="idle", device="", stream=False, seconds=short),
    )


async def run(size: Size) -> Result:
    """Event-loop lag of a peer whose device thread computes without pause while tensors stream both ways."""
    rounds, patience_s = {Size.SMOKE: (1, 0.0), Size.DEFAULT: (5, 60.0), Size.FULL: (8, 600.0)}[size]
    with tempfile.TemporaryDirectory(prefix="loop-") as scratch:
        async with _peer(Path(scratch) / "busy") as busy, _peer(Path(scratch) / "partner") as partner:
            await busy.ask({"peer": partner.me, "addresses": partner.addresses})
            await partner.ask({"peer": busy.me, "addresses": busy.addresses})
            found: dict[str, list[dict[str, float]]] = {situation.name: [] for situation in situations(size)}
            patience = _Patience(patience_s)
            for number in range(rounds):
                for situation in situations(size):
                    await patience.wait_for_calm()
                    figures = await _round(situation, busy, partner)
                    found[situation.name].append(figures)
                    print(f"round {number}: {situation.name}: {figures}", file=sys.stderr)
    return _result(found)


def figures_of(busy: Mapping[str, float], partner: Mapping[str, float]) -> dict[str, float]:
    """One round's figures from both peers' reports: rates per second, CPU in cores."""
    seconds = busy["seconds"]
    ours = [busy["cpu_s"], busy["daemon_cpu_s"], partner["cpu_s"], partner["daemon_cpu_s"]]
    return {
        "lag_p50_ms": busy["p50_ms"],
        "lag_p99_ms": busy["p99_ms"],
        "lag_max_ms": busy["max_ms"],
        "in_mib_s": busy["received_bytes"] / seconds / 2**20,
        "out_mib_s": busy["sent_bytes"] / seconds / 2**20,
        "jobs_s": busy["jobs"] / seconds,
        "loop_cpu": busy["loop_cpu_s"] / seconds,
        "other_threads_cpu": (busy["cpu_s"] - busy["loop_cpu_s"]) / seconds,
        "daemon_cpu": busy["daemon_cpu_s"] / seconds,
        "partner_cpu": partner["cpu_s"] / partner["seconds"],
        "partner_daemon_cpu": partner["daemon_cpu_s"] / partner["seconds"],
        "machine_cpu": busy["machine_cpu_s"] / seconds,
        "strangers_cpu": max(0.0, busy["machine_cpu_s"] - sum(ours)) / seconds,
        "preempted_s": busy["loop_preempted"] / seconds,
    }


def combine(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over the rounds, except the largest lag, which is the largest of all."""
    return {
        name: max(found[name] for found in rounds) if name == "lag_max_ms" else median(found[name] for found in rounds)
        for name in rounds[0]
    }


class _Patience:
    """Waits, while its seconds last, until the machine is left to us."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    async def wait_for_calm(self) -> None:
        """Returns at once when there is no patience left."""
        import psutil  # here, so that other benchmarks are found where it is missing

        psutil.cpu_percent()
        while self._left_s > 0:
            await asyncio.sleep(_CALM_POLL_S)
            if psutil.cpu_percent() / 100 * psutil.cpu_count() < QUIET_CORES:
                return
            self._left_s -= _CALM_POLL_S


class _Peer:
    """A peer process, asked over its standard streams."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.me = ""
        self.addresses: list[str] = []

    async def hear(self, deadline_s: float) -> dict[str, Any]:
        """Its next answer. Raises RuntimeError when it died, which its own stderr explains."""
        assert self._process.stdout is not None
        async with asyncio.timeout(deadline_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a peer of the benchmark ended before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Give an order and wait for its report."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.hear(order.get("seconds", 0.0) + _SLACK_S)


@contextlib.asynccontextmanager
async def _peer(home: Path) -> AsyncIterator[_Peer]:
    """A peer that has said who it is; it ends, its daemon with it, when its input does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks._loop_peer", str(home)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,  # a scheduling group of its own, as its daemon has: else peers would share one's share
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        peer = _Peer(process)
        hello = await peer.hear(_START_S)
        peer.me, peer.addresses = hello["peer"], hello["addresses"]
        yield peer
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_SLACK_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _round(situation: Situation, busy: _Peer, partner: _Peer) -> dict[str, float]:
    reports = await asyncio.gather(
        busy.ask(situation.order(measured=True)), partner.ask(situation.order(measured=False))
    )
    return figures_of(*reports)


def _result(found: Mapping[str, Sequence[Mapping[str, float]]]) -> Result:
    all_of = {name: combine(rounds) for name, rounds in found.items()}
    quiet_of = {name: [one for one in rounds if one["strangers_cpu"] < QUIET_CORES] for name, rounds in found.items()}
    quiet_lag = {name: combine(rounds)["lag_p99_ms"] if rounds else None for name, rounds in quiet_of.items()}
    both, columns = all_of["both"], tuple(all_of["both"])
    alone_s = all_of["device only"]["jobs_s"]
    summary: dict[str, Any] = {name: round(value, 3) for name, value in both.items()}
    summary |= {
        "lag_p99_target_ms": LAG_P99_TARGET_MS,
        "lag_p99_met": both["lag_p99_ms"] <= LAG_P99_TARGET_MS,
        "lag_p99_quiet_ms": quiet_lag["both"],
        "lag_p99_no_lock_ms": round(all_of["no lock"]["lag_p99_ms"], 3),
        "lag_p99_idle_ms": round(all_of["idle"]["lag_p99_ms"], 3),
        "jobs_kept": round(both["jobs_s"] / alone_s, 3) if alone_s else None,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": len(found["both"]),
        "rounds_quiet": len(quiet_of["both"]),
    }
    return Result(
        columns=("situation", *columns, "quiet_rounds", "quiet_lag_p99_ms"),
        rows=[
            (name, *(figures[column] for column in columns), len(quiet_of[name]), quiet_lag[name])
            for name, figures in all_of.items()
        ],
        summary=summary,
        notes=(
            "2 MiB payloads, four calls in flight each way on loopback; dim 512, seq 256, microbatch 4, two blocks",
            "*_cpu in cores; both peers and both daemons share this machine; strangers_cpu is everybody else on it, "
            f"and a round is quiet when that is below {QUIET_CORES:g}",
            "lag: how much later than 5 ms a 5 ms sleep ends; preempted_s: how often a second the kernel took the loop "
            "thread off its core",
            "no lock: the device thread is as busy, but keeps off the interpreter lock; what both has beyond it is "
            "that lock's; with machine_cpu near the number of cores the rest is threads waiting for a core",
            "jobs_kept: device jobs with streaming as a fraction of those without",
        ),
    )
