"""One averaging round of 25 million floats: ours beside hivemind's, with and without the forming of its group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._exchange_case import Found

PEERS = {Size.SMOKE: (2,), Size.DEFAULT: (4,), Size.FULL: (2, 4, 8)}
CODECS = ("float32", "int8")
TARGETS = {
    "speedup_exchange_target": 1.5,
    "speedup_round_target": 3.0,
    "bytes_ratio_target": 1.02,
    "extra_memory_ratio_target": 0.3,
}
KEYS = (
    "ours_s", "hivemind_s", "speedup_exchange", "speedup_round", "speedup_round_told_the_size", "bytes_ratio",
    "extra_memory_ratio", "bit_identical", *TARGETS, "cases", "load_before",
)  # fmt: skip
_HEADLINE = "4 x float32"
_FIGURES = ("exchange_s", "round_s", "wire_bytes", "extra_memory", "extra_daemon", "cpu_s")
_COLUMNS = (
    "case",
    "candidate",
    *(name.replace("wire_bytes", "bytes_ratio") for name in _FIGURES),
    "identical",
    "error",
    "rounds",
    "failed",
)


async def run(size: Size) -> Result:
    """Seconds, bytes, memory and CPU of a round of 25 M floats, ours beside hivemind's averager."""
    from tests.benchmarks._exchange_case import measure
    from tests.benchmarks._exchange_load import Case

    found: list[Found] = []
    before = os.getloadavg()[0]
    smoke = size is Size.SMOKE
    for peers in PEERS[size]:
        for codec in CODECS[:1] if smoke else CODECS:
            if smoke:
                found += await measure(Case(peers=peers, codec=codec, elements=1 << 20), rounds=1, warm_up=0)
            else:
                found += await measure(Case(peers=peers, codec=codec))
    return to_result(found, before)


def to_result(found: Sequence[Found], load_before: float) -> Result:
    """The table, and the figures of four peers in float32, else of the first case, before those of the others."""
    cases = {each.case.name: _figures([one for one in found if one.case == each.case]) for each in found}
    summary = {
        **cases.pop(_HEADLINE if _HEADLINE in cases else next(iter(cases))),
        **TARGETS,
        "cases": cases,
        "load_before": round(load_before, 2),
    }
    return Result(columns=_COLUMNS, rows=[_row(each) for each in found], summary=summary, notes=_NOTES)


def _figures(all_of_case: Sequence[Found]) -> dict[str, Any]:
    from tests.benchmarks._exchange_case import HIVEMIND, HIVEMIND_TOLD, OURS

    by_name = {one.candidate: one for one in all_of_case}
    ours, theirs, told = by_name[OURS], by_name[HIVEMIND], by_name[HIVEMIND_TOLD]
    figures = {
        "ours_s": ours.per("exchange_s"),
        "hivemind_s": theirs.per("exchange_s"),
        "speedup_exchange": theirs.per("exchange_s", ours.per("exchange_s")),
        "speedup_round": theirs.per("round_s", ours.per("round_s")),
        "speedup_round_told_the_size": told.per("round_s", ours.per("round_s")),
        "bytes_ratio": ours.per("wire_bytes", ours.case.least_bytes),
        "extra_memory_ratio": ours.per("extra_memory"),
    }
    return {name: _rounded(value) for name, value in figures.items()} | {"bit_identical": ours.identical}


def _row(one: Found) -> list[Cell]:
    figures = [one.per(name, one.case.least_bytes if name == "wire_bytes" else 1.0) for name in _FIGURES]
    judged = [str(one.identical), one.error, one.rounds, one.failed]
    return [one.case.name, one.candidate, *map(_rounded, figures), *judged]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


_NOTES = (
    "own processes and daemons on loopback; candidates in turns, medians; seconds, bytes and memory of the slowest or "
    "largest member, CPU of all members with their daemons",
    "round_s: ours from the roster (plan, enter, trade, sign-off); hivemind's all of `step` with default settings, "
    "whose leader waits five seconds for who may come; told the size: it begins as soon as all are there",
    "exchange_s: hivemind's AllReduceRunner once the group is known; ours without the plan only, entering and "
    "sign-off included",
    "bytes_ratio: half of what a member's daemon wrote (it sends to others what it hands over to its peer), headers "
    "and encryption included, over 2(K-1)/K of the vector at 4 bytes or 1",
    "extra_memory: largest resident set in a round (VmHWM, reset before each) less that before the first round with "
    "inputs in place, less one output vector, over the vector; extra_daemon: the daemon's",
    "int8: ours blockwise with a scale for 256 elements, hivemind's Uniform8BitQuantization; error: largest distance "
    "to the exact mean over that mean's largest element",
)
