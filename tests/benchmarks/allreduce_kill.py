"""One of four members is killed in the middle of an all-reduce: what the survivors hold then, ours and hivemind's.

Both average the same vectors, in turns, with the same kills. The victim kills itself with SIGKILL at a counted event,
so that every kill falls where it is meant to; it is replaced by a fresh process before the next round.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._allreduce_candidates import Candidate, Outcome
    from tests.benchmarks._allreduce_load import Kill

KILLS = {Size.SMOKE: (1, 0), Size.DEFAULT: (12, 3), Size.FULL: (60, 12)}
"""Those that both suffer, and those in what only ours has."""
EXTENTS = {Size.SMOKE: (3, 3 << 18), Size.DEFAULT: (4, 1 << 22), Size.FULL: (4, 1 << 22)}
"""Members and elements."""

TARGET_SHARE = 0.0
_CANDIDATES = ("ours", "hivemind")
_FIGURES = ("kills", "fired", "worst_differing_share", "differing_share_without_failed", "false_success_share")
KEYS = (
    *(f"{name}_differing_share" for name in _CANDIDATES),
    *(f"{name}_{figure}" for name in _CANDIDATES for figure in _FIGURES),
    "ours_differing_share_target", "rounds", "ours_void_rounds", "ours_split_rounds", "ours_completed_rounds",
    "ours_inputs_kept", "ours_known_s", "ours_settled_s",
)  # fmt: skip
_COLUMNS = (
    "killed_when",
    "candidate",
    "rounds",
    "differing_share",
    "false_successes",
    "void_for_all",
    "split",
    "attempts",
    "known_s",
    "settled_s",
)


async def run(size: Size) -> Result:
    """Share of coordinates in which survivors differ after a kill in mid-round, ours beside hivemind's all-reduce."""
    return to_result(await measure(KILLS[size], EXTENTS[size]))


async def measure(kills: tuple[int, int], extent: tuple[int, int]) -> list[Outcome]:
    """All rounds: two without a kill, then the kills that both suffer, then those in what only ours has."""
    from tests.benchmarks._allreduce_candidates import opened_hivemind, opened_ours
    from tests.benchmarks._allreduce_load import shared_kills, signed_kills

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="ak-") as scratch:
        async with opened_ours(Path(scratch), *extent) as ours, opened_hivemind(Path(scratch), *extent) as theirs:
            both: Sequence[Candidate] = (ours, theirs)
            rounds: list[tuple[Sequence[Candidate], Kill | None, str]] = [(both, None, "whole"), (both, None, "normal")]
            rounds += [(both, kill, "whole") for kill in shared_kills(kills[0], extent[0])]
            rounds += [((ours,), kill, "whole") for kill in signed_kills(kills[1], extent[0])]
            for number, (candidates, kill, kind) in enumerate(rounds, start=1):
                await asyncio.gather(*(candidate.team.fill() for candidate in both))
                for candidate in candidates:
                    outcomes.append(await candidate.round(number, kill, kind))
                    print(f"round {number}: {_short(outcomes[-1])}", file=sys.stderr, flush=True)
    return outcomes


def to_result(outcomes: Sequence[Outcome]) -> Result:
    """Table by event and candidate, and the figures that count, over all kills of a candidate that fired."""
    from tests.benchmarks._allreduce_load import SHARED_EVENTS, SIGNED

    played = [outcome for outcome in outcomes if outcome.played.fired or not outcome.played.kill]
    killed = {name: [each for each in played if each.played.fired and each.candidate == name] for name in _CANDIDATES}
    summary: dict[str, Any] = {f"{name}_differing_share": _share(found) for name, found in killed.items()}
    summary |= {"ours_differing_share_target": TARGET_SHARE, "rounds": len(outcomes)}
    for name, found in killed.items():
        meant = [outcome for outcome in outcomes if outcome.played.kill and outcome.candidate == name]
        summary |= {f"{name}_{key}": value for key, value in _figures(len(meant), found).items()}
    summary |= _ours_only(killed["ours"])
    order = ("none, whole", "none, normal", *SHARED_EVENTS, SIGNED)
    keys = {(outcome.event, outcome.candidate) for outcome in played}
    rows = [
        _row(key, [each for each in played if (each.event, each.candidate) == key])
        for key in sorted(keys, key=lambda key: (order.index(key[0]), key[1]))
    ]
    return Result(columns=_COLUMNS, rows=rows, summary=summary, notes=_NOTES)


def _figures(meant: int, found: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "kills": meant,
        "fired": len(found),
        "worst_differing_share": round(max(outcome.differing for outcome in found), 6) if found else None,
        "differing_share_without_failed": _mean(outcome.differing_successes for outcome in found),
        "false_success_share": _mean(outcome.false_successes > 0 for outcome in found),
    }


def _ours_only(found: Sequence[Outcome]) -> dict[str, Any]:
    """What hivemind has no counterpart of: void rounds, split sign-offs, inputs kept."""
    return {
        "ours_void_rounds": sum(outcome.void for outcome in found),
        "ours_split_rounds": sum(outcome.split for outcome in found),
        "ours_completed_rounds": sum(not outcome.failed for outcome in found),
        "ours_inputs_kept": all(outcome.inputs_kept for outcome in found),
        "ours_known_s": _median(outcome.answered_s for outcome in found),
        "ours_settled_s": _median(outcome.settled_s for outcome in found),
    }


def _row(key: tuple[str, str], found: Sequence[Outcome]) -> list[Cell]:
    return [
        *key,
        len(found),
        _share(found),
        sum(outcome.false_successes > 0 for outcome in found),
        sum(outcome.void for outcome in found),
        sum(outcome.split for outcome in found),
        max(outcome.attempts for outcome in found),
        _median(outcome.answered_s for outcome in found),
        _median(outcome.settled_s for outcome in found),
    ]


def _share(found: Sequence[Outcome]) -> float | None:
    return _mean(outcome.differing for outcome in found)


def _mean(values: Iterable[float]) -> float | None:
    """None of nothing: a share that was not measured is not 0."""
    listed = [float(value) for value in values]
    return round(mean(listed), 6) if listed else None


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return round(median(listed), 3) if listed else None


def _short(outcome: Outcome) -> str:
    fired = "{fired} {count} of {of}".format(**outcome.played.fired) if outcome.played.fired else "no kill"
    return (
        f"{outcome.candidate}, {fired}: {outcome.differing:.4f} differ, {outcome.failed} of {outcome.survivors} failed "
        f"at first, {outcome.attempts} attempts, {outcome.false_successes} false successes, {outcome.settled_s:.2f} s"
    )


_NOTES = (
    "4 members on loopback, a process and a daemon each, 4 Mi elements; whole: multiples of 12, whose means and "
    "differences are exact in float32, so that survivors differ by the kill and not by rounding; normal: as they come",
    "the victim kills itself with SIGKILL at the counted event: its sums leave (sent), a piece of its part is put "
    "together (reduced), a result leaves (answered), another member has its signature (signed; hivemind has no "
    "sign-off)",
    "differing_share: coordinates in which not all survivors hold the same bits, of what they applied; mean over "
    "the kills that fired (kills, fired: a victim whose round failed before its event lives on; that is left out)",
    "false_successes: rounds in which a survivor reports success with numbers that are not the mean "
    "of the members it lists",
    "ours applies a result when all live members report the same digest, else repeats the round without the dead; "
    "here the benchmark's parent applies that rule, in a run it is the close record's; split: after the first "
    "attempt some survivors held a result and some did not, which no sign-off can rule out",
    "hivemind's code runs from the known group on (DecentralizedAverager._aggregate_with_group, default settings, "
    "chunk time-outs 3 s and 6 s, 8 s in all); its matchmaking is left out, and the retry of a caller that got an "
    "error; without_failed leaves out the numbers of survivors that got one, though they were updated in place",
)
