"""One averaging round of 25 million floats: ours beside hivemind's, with and without the forming of its group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Result

if TYPE_CHECKING:
    from tests.benchmarks._exchange_case import Found

PEERS, PEERS_FULL = (4,), (2, 4, 8)
ROUNDS = 5
CODECS = ("float32", "int8")
TARGETS = {
    "speedup_exchange_target": 1.5,
    "speedup_round_target": 3.0,
    "bytes_ratio_target": 1.02,
    "extra_memory_ratio_target": 0.3,
}
_HEADLINE = "4 x float32"
_COLUMNS = (
    "case",
    "candidate",
    "exchange_s",
    "round_s",
    "bytes_ratio",
    "extra_memory",
    "extra_daemon",
    "cpu_s",
    "identical",
    "error",
    "rounds",
    "failed",
)


async def run(full: bool) -> Result:
    """Seconds, bytes, memory and CPU of a round of 25 M floats, ours beside hivemind's averager."""
    from tests.benchmarks._exchange_case import measure
    from tests.benchmarks._exchange_load import Case

    found: list[Found] = []
    before = os.getloadavg()[0]
    for peers in PEERS_FULL if full else PEERS:
        for codec in CODECS:
            found += await measure(Case(peers=peers, codec=codec), ROUNDS)
    return to_result(found, before)


def to_result(found: Sequence[Found], load_before: float) -> Result:
    """The table, and the figures of four peers in float32 before those of the other cases."""
    cases = {each.case.name: _figures([one for one in found if one.case == each.case]) for each in found}
    summary = {**cases.pop(_HEADLINE), **TARGETS, "cases": cases, "load_before": round(load_before, 2)}
    return Result(columns=_COLUMNS, rows=[_row(each) for each in found], summary=summary, notes=_NOTES)


def _figures(both: Sequence[Found]) -> dict[str, Any]:
    by_name = {one.candidate: one for one in both}
    ours, theirs = by_name["ours"], by_name["hivemind"]
    return {
        "ours_s": round(ours.figures["exchange_s"], 3),
        "hivemind_s": round(theirs.figures["exchange_s"], 3),
        "speedup_exchange": round(theirs.figures["exchange_s"] / ours.figures["exchange_s"], 2),
        "speedup_round": round(theirs.figures["round_s"] / ours.figures["round_s"], 2),
        "bytes_ratio": round(ours.bytes_ratio, 4),
        "extra_memory_ratio": round(ours.figures["extra_memory"], 3),
        "bit_identical": ours.identical,
    }


def _row(one: Found) -> list[Any]:
    figures = one.figures
    return [
        one.case.name,
        one.candidate,
        figures["exchange_s"],
        figures["round_s"],
        round(one.bytes_ratio, 4),
        round(figures["extra_memory"], 3),
        round(figures["extra_daemon"], 3),
        figures["cpu_s"],
        str(one.identical),
        one.error,
        one.rounds,
        one.failed,
    ]


_NOTES = (
    "own processes and daemons on loopback; candidates in turns, medians; seconds, bytes and memory of the slowest or "
    "largest member, CPU of all members with their daemons",
    "round_s: ours from the roster (plan, enter, trade, sign-off); hivemind's from `step`, matchmaking included, its "
    "group complete as soon as all members have asked, else default settings",
    "exchange_s: hivemind's AllReduceRunner once the group is known; ours without the plan only, entering and "
    "sign-off included",
    "bytes_ratio: half of what a member's daemon wrote (it sends to others what it hands over to its peer), headers "
    "and encryption included, over 2(K-1)/K of the vector at 4 bytes or 1",
    "extra_memory: largest resident set in a round (VmHWM, reset before each) less that before the first round with "
    "inputs in place, less one output vector, over the vector; extra_daemon: the daemon's",
    "int8: ours blockwise with a scale for 256 elements, hivemind's Uniform8BitQuantization; error: largest distance "
    "to the exact mean over that mean's largest element",
)
