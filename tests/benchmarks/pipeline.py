"""Tokens per second of four pipelined stages on loopback, beside bare torch and stock hivemind.

All candidates compute the same four blocks, forward and backward, without ends, on the same cores in turns. Processes
of a candidate that is not being measured wait on their standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from tests.benchmarks.runner import Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._pipeline_load import Order
    from tests.benchmarks._stage import Size as Shape
    from tests.benchmarks._worker import Worker

TARGETS = {
    "ours_over_bare_small": 0.80, "ours_over_bare_medium": 0.85, "ours_over_hivemind_small": 2.0,
    "ours_over_as_many_small": 0.90, "ours_over_as_many_medium": 0.95,
}  # fmt: skip
BARE = {"bare 2 threads": (1, 2), "bare 2 processes": (2, 1), "bare 4 processes": (4, 1)}
"""Processes and threads of each. As many processes as there are stages show what sharing the cores costs by itself."""
CANDIDATES = {"small": (*BARE, "ours", "hivemind"), "medium": (*BARE, "ours")}
KEYS = (
    *TARGETS,
    *(f"{name}_target" for name in TARGETS),
    *(f"tokens_per_s {model} {name}" for model, names in CANDIDATES.items() for name in names),
    "rounds", "cores",
)  # fmt: skip
BARE_WARMUP_S = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """One window, for blocks of a ``shape``. Warming up takes so long, and until all is home that was under way then: a
    pipeline that still fills brings home less than it computes."""

    warmup_s: float
    seconds: float
    shape: str


ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 3, Size.FULL: 9}
SPANS = {
    Size.SMOKE: {"small": Span(0.5, 1.0, "tiny")},
    Size.DEFAULT: {"small": Span(3.0, 5.0, "small"), "medium": Span(4.0, 8.0, "medium")},
    Size.FULL: {"small": Span(3.0, 14.0, "small"), "medium": Span(6.0, 20.0, "medium")},
}
"""By model. A smoke has a smaller one, and leaves the medium one out, which differs in its numbers alone."""

_STARTS, _STARTED_S = 5, 45.0
_MODULE = "tests.benchmarks._pipeline_"

Figures = dict[str, float]


async def run(size: Size) -> Result:
    """Tokens per second of four stages on loopback, beside bare torch and stock hivemind (small size only)."""
    return to_result(await measure(size), ROUNDS[size])


async def measure(size: Size) -> dict[str, list[Figures]]:
    """``size candidate`` → its rounds."""
    found: dict[str, list[Figures]] = defaultdict(list)
    for name in SPANS[size]:
        async with opened(name, SPANS[size][name].shape) as candidates:
            for number in range(ROUNDS[size]):
                for candidate in candidates:
                    figures = await candidate.round(SPANS[size][name])
                    found[f"{name} {candidate.name}"].append(figures)
                    print(f"{name} round {number}: {candidate.name}: {_short(figures)}", file=sys.stderr, flush=True)
    return found


class Candidate(Protocol):
    """What is measured in turns."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    async def round(self, span: Span) -> Figures:
        """One window: tokens per second, microbatches, CPU in cores by role and in all."""


@contextlib.asynccontextmanager
async def opened(model: str, shape: str) -> AsyncIterator[list[Candidate]]:
    """The candidates of one model, in the order of a round; every process ends with the block."""
    from tests.benchmarks._pipeline_load import SIZES

    makers: dict[str, Callable[[str, Shape], contextlib.AbstractAsyncContextManager[Candidate]]]
    makers = dict.fromkeys(BARE, _bare) | {"ours": _ours, "hivemind": _hivemind}
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(makers[name](name, SIZES[shape])) for name in CANDIDATES[model]]


def figures_of(reports: Sequence[Mapping[str, Any]], tokens: int) -> Figures:
    """One round's figures from reports of processes that worked side by side: rates are summed."""
    rate = sum(report["microbatches"] / report["seconds"] for report in reports)
    figures = {"tokens_per_s": rate * tokens, "microbatches": sum(report["microbatches"] for report in reports)}
    cores: Figures = defaultdict(float)
    for report in reports:
        for name, value in report.items():
            if name.startswith("cpu "):
                cores[name] += value / report["seconds"]
    cores["cpu all"] = sum(cores.values())
    per_microbatch = {f"core-ms {name[4:]}": 1000 * value / max(rate, 1e-9) for name, value in cores.items()}
    extra = {"journey_s": reports[0]["journey_s"]} if "journey_s" in reports[0] else {}
    return figures | cores | per_microbatch | extra


# --- candidates ------------------------------------------------------------------------------------------------------


def _order(span: Span, pids: Mapping[str, Sequence[int]]) -> Order:
    from tests.benchmarks._pipeline_load import Order

    return Order(warmup_s=span.warmup_s, seconds=span.seconds, pids=pids)


@dataclass(frozen=True, slots=True)
class Bare:
    """Torch alone, each process with all four blocks."""

    name: str
    size: Shape
    workers: Sequence[Worker]

    async def round(self, span: Span) -> Figures:
        """See :class:`Candidate`."""
        short = replace(span, warmup_s=min(BARE_WARMUP_S, span.warmup_s))
        orders = [asdict(_order(short, {"bare": [worker.pid]})) for worker in self.workers]
        pairs = zip(self.workers, orders, strict=True)
        reports = await asyncio.gather(*(worker.ask(order) for worker, order in pairs))
        return figures_of(reports, self.size.tokens)


@contextlib.asynccontextmanager
async def _bare(name: str, size: Shape) -> AsyncIterator[Bare]:
    processes, threads = BARE[name]
    async with _workers() as start:
        starting = (start("bare", size.name, str(threads)) for _ in range(processes))
        yield Bare(name, size, await asyncio.gather(*starting))


@dataclass(slots=True)
class Ours:
    """Four stage hosts and a trainer, a daemon each."""

    name: str
    size: Shape
    hosts: Sequence[Worker]
    trainer: Worker
    step: int = 0

    def pids(self) -> dict[str, list[int]]:
        """Python and daemon of hosts and of the trainer."""
        return {
            "hosts": [host.pid for host in self.hosts],
            "hosts' p2pd": [host.hello["daemon"] for host in self.hosts],
            "trainer": [self.trainer.pid],
            "trainer's p2pd": [self.trainer.hello["daemon"]],
        }

    async def meet(self) -> None:
        """Tell everybody who takes part."""
        everybody = [*self.hosts, self.trainer]
        message = {
            "trainer": self.trainer.hello["peer"],
            "route": [host.hello["peer"] for host in self.hosts],
            "addresses": {worker.hello["peer"]: worker.hello["addresses"] for worker in everybody},
        }
        for worker in everybody:
            await worker.ask(message)

    async def round(self, span: Span) -> Figures:
        """See :class:`Candidate`; one step is open all the time. Raises RuntimeError when a host's step has not all
        that came home."""
        self.step += 1
        for host in self.hosts:
            await host.ask({"begin": self.step})
        report = await self.trainer.ask({"step": self.step, "order": asdict(_order(span, self.pids()))})
        counts = [(await host.ask({"end": self.step}))["microbatches"] for host in self.hosts]
        if counts != [report["whole_step"]] * len(counts):
            raise RuntimeError(f"{report['whole_step']} microbatches came home, the stages' sums have {counts}")
        return figures_of([report], self.size.tokens)


@contextlib.asynccontextmanager
async def _ours(name: str, size: Shape) -> AsyncIterator[Ours]:
    with tempfile.TemporaryDirectory(prefix="pl-") as scratch:
        async with _workers() as start:
            roles = [*map(str, range(size.blocks)), "trainer"]
            peers = await asyncio.gather(*(start("peer", size.name, _home(scratch, role), role) for role in roles))
            ours = Ours(name, size, peers[:-1], peers[-1])
            await ours.meet()
            yield ours


def _home(scratch: str, role: str) -> str:
    home = Path(scratch) / role
    home.mkdir(mode=0o700)
    return str(home)


@dataclass(frozen=True, slots=True)
class Hivemind:
    """Four servers and a client. They poll while idle, so they are stopped by signal between their windows."""

    name: str
    size: Shape
    servers: Sequence[Worker]
    client: Worker
    families: Mapping[str, Sequence[int]]

    def signal(self, number: signal.Signals) -> None:
        """To every process of every family."""
        for family in self.families.values():
            for pid in family:
                os.kill(pid, number)

    async def round(self, span: Span) -> Figures:
        """See :class:`Candidate`."""
        self.signal(signal.SIGCONT)
        try:
            report = await self.client.ask(asdict(_order(span, self.families)))
        finally:
            self.signal(signal.SIGSTOP)
        return figures_of([report], self.size.tokens)


@contextlib.asynccontextmanager
async def _hivemind(name: str, size: Shape) -> AsyncIterator[Hivemind]:
    with tempfile.TemporaryDirectory(prefix="pl-") as scratch:
        async with _workers() as start:
            client = await start("hivemind", size.name, _home(scratch, "client"), "client")
            known = client.hello["addresses"]
            stages = map(str, range(size.blocks))
            starting = (start("hivemind", size.name, _home(scratch, stage), stage, *known) for stage in stages)
            servers = await asyncio.gather(*starting)
            await client.ask({"find": True})
            families = {
                "servers": [pid for server in servers for pid in _family(server, daemon=False)],
                "servers' p2pd": [pid for server in servers for pid in _family(server, daemon=True)],
                "client": _family(client, daemon=False),
                "client's p2pd": _family(client, daemon=True),
            }
            hivemind = Hivemind(name, size, servers, client, families)
            hivemind.signal(signal.SIGSTOP)
            try:
                yield hivemind
            finally:
                hivemind.signal(signal.SIGCONT)


def _family(worker: Worker, *, daemon: bool) -> list[int]:
    import psutil

    pids = [worker.pid, *worker.descendants()]
    return [pid for pid in pids if (psutil.Process(pid).name() == "p2pd") == daemon]


async def _started(module: str, arguments: Sequence[str]) -> Worker:
    """A worker that is ready. A server of hivemind now and then hangs where it forks its runtime (threads of torch hold
    a lock then): it is started anew, which costs it nothing in the windows, and said."""
    from tests.benchmarks._worker import Worker

    for attempt in range(_STARTS):
        try:
            return await Worker.start(module, *arguments, within_s=_STARTED_S)
        except TimeoutError:
            print(f"{module} {' '.join(arguments[:2])}: hung at start {attempt + 1}", file=sys.stderr, flush=True)
    raise TimeoutError(f"{module} did not start in {_STARTS} times {_STARTED_S:g} s")


@contextlib.asynccontextmanager
async def _workers() -> AsyncIterator[Any]:
    """A function that starts a worker; all are stopped in the end, at once when it came by an error or Ctrl-C."""
    workers: list[Worker] = []
    at_once = False

    async def start(kind: str, *arguments: str) -> Worker:
        workers.append(await _started(_MODULE + kind, arguments))
        return workers[-1]

    try:
        yield start
    except BaseException:
        at_once = True
        raise
    finally:
        await asyncio.gather(*(worker.stop(at_once=at_once) for worker in workers))


# --- the table -------------------------------------------------------------------------------------------------------


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of every figure."""
    return {name: median(figures[name] for figures in rounds) for name in rounds[0]}


def to_result(found: Mapping[str, Sequence[Figures]], rounds: int) -> Result:
    """Table and summary. Bare torch is the best of its forms."""
    all_of = {name: medians(figures) for name, figures in found.items()}
    rates = {name: figures["tokens_per_s"] for name, figures in all_of.items()}
    bare = {model: max(rates.get(f"{model} {form}", 0.0) for form in BARE) for model in CANDIDATES}
    summary: dict[str, Any] = {
        "ours_over_bare_small": _ratio(rates.get("small ours"), bare["small"]),
        "ours_over_bare_medium": _ratio(rates.get("medium ours"), bare["medium"]),
        "ours_over_hivemind_small": _ratio(rates.get("small ours"), rates.get("small hivemind")),
    } | {
        f"ours_over_as_many_{model}": _ratio(rates.get(f"{model} ours"), rates.get(f"{model} bare 4 processes"))
        for model in CANDIDATES
    }
    summary |= {f"{name}_target": target for name, target in TARGETS.items()}
    names = [f"{model} {name}" for model, names in CANDIDATES.items() for name in names]
    summary |= {f"tokens_per_s {name}": round(rates[name], 1) if name in rates else None for name in names}
    summary |= {"rounds": rounds, "cores": len(os.sched_getaffinity(0))}
    return Result(
        columns=("candidate", "tokens_per_s", "microbatches", "role", "processors_busy", "cpu_ms_per_microbatch"),
        rows=[row for name, figures in all_of.items() for row in _rows(name, figures)],
        summary=summary,
        notes=(
            "four blocks, one per stage; small d 256, 4 heads, sequence 128, microbatch 8; medium d 512, 8 heads, "
            "sequence 256, microbatch 4; ours bfloat16 on the wire, hivemind float16",
            "ends excluded: ready-made activation and loss gradient everywhere; only microbatches that ended inside "
            "the window count; medians of each figure over the rounds, so rows of one candidate need not add up",
            "ours runs endpoints, admission, finite and norm checks, receipts, event log, lag probe and health watch; "
            "no optimizer step falls into a window, nor does asking the step's leader",
            "hivemind computes each forward again in its backward, has no optimizer, and 8 threads each with one "
            "microbatch in flight; while others are measured its processes are stopped",
        ),
    )


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    """None where either was not measured, or so shortly that nothing came of it."""
    return round(ours / theirs, 3) if ours is not None and theirs else None


def _rows(name: str, figures: Figures) -> list[tuple[Any, ...]]:
    roles = [role[4:] for role in figures if role.startswith("cpu ") and role != "cpu all"]
    head = (name, figures["tokens_per_s"], figures["microbatches"], "all", figures["cpu all"], figures["core-ms all"])
    rest = [(name, None, None, role, figures[f"cpu {role}"], figures[f"core-ms {role}"]) for role in roles]
    return [head, *(rest if len(rest) > 1 else [])]


def _short(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if not name.startswith("cpu "))
