"""What one more peer costs: from a cold start to taking work, and the memory beside its model's own bytes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.runner import Result, Size

READY_TARGET_S = 5.0
OVERHEAD_TARGET_MB = 300.0
MEGABYTE = 1e6
STEPS_BEFORE_MEMORY = {Size.SMOKE: 1, Size.DEFAULT: 5, Size.FULL: 5}
_RUNS = {
    "nano": ("dim 32, two blocks, context 32", {"vocab_size": 512, "dim": 32, "layers": 2, "heads": 2, "context": 32}),
    "tiny": ("the preset", None),
}
"""What is measured in turns: a model that weighs nothing, so that all that is left is the peer, and one that people
start with, whose microbatches under way weigh more than the peer does."""

KEYS = (
    "ready_s", "overhead_mb", "ready_s_target", "overhead_mb_target", "ready_s_worst", "overhead_mb_worst",
    "overhead_mb_with_activations_tiny", "rounds",
)  # fmt: skip
_STEPS = 1000
_ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 3, Size.FULL: 7}
_QUIET_CORES = 0.1
_QUIET_S = 0.5
_DEADLINE_S = 120.0
_LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in bytes: proportional set size, resident set size, what is its alone."""

    pss: int
    rss: int
    private: int


def run(size: Size) -> Result:
    """Seconds from start to READY of a cold stage host, and its memory beside the model."""
    found: dict[str, list[Figures]] = {name: [] for name in _RUNS}
    for number in range(_ROUNDS[size]):
        for name, rounds in found.items():
            rounds.append(_round(name, size))
            print(f"round {number}: {name}: {rounds[-1]}", file=sys.stderr, flush=True)
    return to_result(found, STEPS_BEFORE_MEMORY[size])


def to_result(found: Mapping[str, Sequence[Figures]], steps: int) -> Result:
    """Medians; ``overhead_mb`` is that of the model that weighs nothing, ``ready_s`` that of the preset."""
    middle = {name: {key: median(one[key] for one in rounds) for key in rounds[0]} for name, rounds in found.items()}
    summary: dict[str, Any] = {
        "ready_s": round(middle["tiny"]["ready_s"], 3),
        "overhead_mb": round(middle["nano"]["overhead_mb"], 1),
        "ready_s_target": READY_TARGET_S,
        "overhead_mb_target": OVERHEAD_TARGET_MB,
        "ready_s_worst": round(max(figures["ready_s"] for figures in found["tiny"]), 3),
        "overhead_mb_worst": round(max(figures["overhead_mb"] for figures in found["nano"]), 1),
        "overhead_mb_with_activations_tiny": round(middle["tiny"]["overhead_mb"], 1),
        "rounds": len(found["tiny"]),
    }
    return Result(
        columns=("run", "round", *middle["tiny"]),
        rows=[
            (name, label, *figures.values())
            for name, rounds in found.items()
            for label, figures in [*((str(n), one) for n, one in enumerate(rounds)), ("median", middle[name])]
        ],
        summary=summary,
        notes=(
            "founder, one stage host and a trainer wait, doing nothing, until the second stage host is there; that one "
            "is measured, started as a person starts it (python -m peers.cli join), and the run begins with it",
            "runs: " + "; ".join(f"{name}, {what}" for name, (what, _) in _RUNS.items()) + ". overhead_mb is nano's",
            "ready_s: from before its process is made until its PeerReady event: interpreter and imports, daemon, "
            "manifest, directory, being given a stage by the founder, the initial weights' making, their download",
            f"memory when it has closed step {steps}; MB are 1e6 bytes; PSS shares libraries with the "
            "other three peers of this machine, private_mb is what is mapped by nobody else, rss_mb counts it all",
            "model_mb: parameters, both moments, accumulator and shadow: 28 bytes for each parameter; activations "
            "of microbatches under way count as overhead, which is why tiny's is larger than nano's",
        ),
    )


def model_bytes(elements: int) -> int:
    """What a part's state takes: parameters and two moments, the same again as shadow, and a float32 accumulator."""
    return elements * (12 + 12 + 4)


def memory_of(pid: int) -> Memory:
    """From the kernel's ``smaps_rollup``. Raises OSError for a process that is gone."""
    kib = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, value = line.partition(":")
        kib[name] = int(value.split()[0])
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return Memory(pss=kib["Pss"] << 10, rss=kib["Rss"] << 10, private=private << 10)


def figures_of(ready_s: float, python: Memory, daemon: Memory, model: int) -> Figures:
    """One round's figures."""
    return {
        "ready_s": ready_s,
        "overhead_mb": (python.pss + daemon.pss - model) / MEGABYTE,
        "python_pss_mb": python.pss / MEGABYTE,
        "p2pd_pss_mb": daemon.pss / MEGABYTE,
        "model_mb": model / MEGABYTE,
        "private_mb": (python.private + daemon.private) / MEGABYTE,
        "rss_mb": (python.rss + daemon.rss) / MEGABYTE,
    }


def _round(name: str, size: Size) -> Figures:
    """One whole run: found it, let the others wait, start the one that is measured, stop everything."""
    import psutil

    from tests.harness.by_hand import by_hand

    with tempfile.TemporaryDirectory(prefix="fp-") as scratch, by_hand(Path(scratch)) as hand, _one_thread():
        manifest = _manifest(name, size)
        file = Path(scratch) / "footprint.toml"
        file.write_text(render_sections(manifest), encoding="utf-8")
        founder = hand.start("new", str(file), *_LOCAL)
        invite = founder.wait_event("Invited", deadline_s=_DEADLINE_S)["invite"]
        for role in ("stage", "trainer"):
            hand.start("join", invite, "--role", role, *_LOCAL).wait_event("PeerStarted", deadline_s=_DEADLINE_S)
        _wait_quiet([psutil.Process(one.process.pid) for one in hand.started])
        began = time.monotonic()
        peer = hand.start("join", invite, "--role", "stage", *_LOCAL)
        ready = peer.wait_event("PeerReady", deadline_s=_DEADLINE_S)
        peer.wait_step(STEPS_BEFORE_MEMORY[size], deadline_s=_DEADLINE_S)
        pid = peer.process.pid
        daemons = [child.pid for child in psutil.Process(pid).children(recursive=True) if child.name() == "p2pd"]
        model = model_bytes(_elements(manifest, ready["part"]))
        # Both processes read the same clock: the event's own time has nothing of our polling in it.
        return figures_of(ready["m"] - began, memory_of(pid), memory_of(daemons[0]), model)


def _manifest(name: str, size: Size) -> dict[str, Any]:
    """The run's TOML as data: the preset, for the smallest run with another model; few microbatches for a smoke."""
    from peers.presets import load_preset

    document = load_preset("tiny")
    document["run"]["steps"] = _STEPS
    if size is Size.SMOKE:
        document["batch"] = {**document.get("batch", {}), "microbatches_per_step": 4}
    model = _RUNS[name][1]
    return document if model is None else document | {"model": model}


def render_sections(document: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML of sections of numbers, strings and inline tables."""
    lines = []
    for section, values in document.items():
        lines += [f"[{section}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def _elements(document: Mapping[str, Any], part: str) -> int:
    from swarm.models.gpt_config import GptConfig
    from swarm.models.registry import family_of
    from swarm.models.spec import SplitConfig

    model = GptConfig(**document["model"])
    spec = next(spec for spec in family_of(model).parts(SplitConfig(**document.get("split", {}))) if spec.name == part)
    return family_of(model).layout(family_of(model).build(spec)).elements


def _wait_quiet(processes: Sequence[Any]) -> None:
    """Until the waiting peers really wait. Raises TimeoutError when they go on computing."""
    family = [*processes, *(child for process in processes for child in process.children(recursive=True))]
    _until(lambda: _cores(family) < _QUIET_CORES, "the waiting peers to be idle")


def _cores(family: Sequence[Any]) -> float:
    from threading import Event

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    before = used()
    Event().wait(_QUIET_S)
    return (used() - before) / _QUIET_S


def _until(condition: Callable[[], bool], awaited: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_DEADLINE_S:g} s for {awaited}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """What several peers on one machine are started with."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
