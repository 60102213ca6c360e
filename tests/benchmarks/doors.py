"""What attackers get who come through the doors of a run: as strangers, as guests, as replicas, as leaders.

Each attack is played against a whole swarm of the product: floods and frames over libp2p in real time, leaders,
replicas and guests in virtual time. What an attack replaces in the peers that make it is in
:mod:`tests.harness.bad_leaders`; everybody else is honest and unchanged.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._doors_flood import Floods
    from tests.benchmarks._doors_frames import Frames

BARS: dict[str, float] = {
    "slowest_frame_ms": 20.0,
    "slowest_question_ms": 20.0,
    "questions_loop_share": 0.1,
    "flood_steps_kept": 0.9,
    "stalled_leader_replaced_s": 60.0,
    "tie_closed_s": 60.0,
    "sybil_votes": 0,
    "evictions_accepted": 0,
    "forged_rows_accepted": 0,
    "poisoned_sum_loss_ratio": 1.05,
}
"""At most so much, but of the steps kept at least."""
KEYS = ("frames_tried", *BARS, *(f"{name}_bar" for name in BARS), "flood_peers_lost", "flood_mb_s")
STALLS = ("never_closes", "stops_in_the_middle", "leases_nothing")
VICTIMS = ("stage", "trainer", "successor")
ENDS = ("private", "hosted")

FigureT = TypeVar("FigureT", int, float)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is played: frames of each method and size, floods and their seconds, of each list of
    attacks; hosts and steps of the runs with a spoilt sum; records of strangers in a directory."""

    frames: int
    rounds: int
    flood_s: float
    attacks: int = 3
    hosts: int = 6
    steps: int = 10
    records: int = 2560


SCALES = {
    Size.SMOKE: Scale(frames=1, rounds=1, flood_s=1.5, attacks=1, hosts=4, steps=3, records=100),
    Size.DEFAULT: Scale(frames=12, rounds=7, flood_s=6.0),
    Size.FULL: Scale(frames=150, rounds=5, flood_s=60.0),
}


def run(size: Size) -> Result:
    """What attacks on a swarm come to: floods, spoilt frames, bad leaders, ties, sybils, evictions, forged rows."""
    import torch

    torch.set_num_threads(1)  # several peers compute in one process
    scale, rows, summary = SCALES[size], list[list[Cell]](), dict[str, Any]()
    floods, tried = _in_scratch(lambda root: _over_libp2p(root, scale))
    summary |= (
        _of_questions(scale, rows)
        | _of_frames(tried, rows)
        | _of_floods(floods, rows)
        | _of_stories(scale, rows)
        | _of_sums(scale, rows)
    )
    summary |= {f"{name}_bar": bar for name, bar in BARS.items()}
    return Result(columns=("attack", "how", "figure", "value"), rows=rows, summary=summary, notes=_notes(scale, tried))


def _over_libp2p(root: Path, scale: Scale) -> tuple[Floods, Frames]:
    import uvloop

    from tests.benchmarks._doors_flood import measure

    return uvloop.run(measure(root, rounds=scale.rounds, seconds=scale.flood_s, each=scale.frames))


def _of_frames(tried: Frames, rows: list[list[Cell]]) -> dict[str, Any]:
    for ms, method, size in tried.worst:
        rows.append(["frame", f"{method}, {size} bytes", "ms of the loop's thread", round(ms, 2)])
    return {"frames_tried": tried.tried, "slowest_frame_ms": round(tried.worst[0][0], 3)}


def _of_questions(scale: Scale, rows: list[list[Cell]]) -> dict[str, Any]:
    import asyncio

    from tests.benchmarks._doors_questions import SECONDS, ask

    asked = asyncio.run(ask(scale.records, SECONDS))
    for figure, value in asked._asdict().items():
        rows.append(["directory", f"{scale.records} records of strangers, asked for again and again", figure, value])
    return {
        "slowest_question_ms": round(asked.slowest_ms, 3),
        "questions_loop_share": round(asked.loop_share, 4),
    }


def _of_floods(floods: Floods, rows: list[list[Cell]]) -> dict[str, Any]:
    for number, (host, sink) in enumerate(zip(floods.host, floods.sink, strict=True)):
        rows.append(["flood", f"round {number}, host", "steps a second", round(host, 3)])
        rows.append(["flood", f"round {number}, sink", "steps a second", round(sink, 3)])
    rows += [["flood", f"calls to the host: {name}", "count", count] for name, count in floods.outcomes.items()]
    return {
        "flood_steps_kept": round(floods.kept, 4),
        "flood_peers_lost": floods.lost,
        "flood_mb_s": round(floods.bytes / floods.seconds / 1e6, 3),
    }


def _of_stories(scale: Scale, rows: list[list[Cell]]) -> dict[str, Any]:
    from tests.benchmarks import _doors_stories as stories
    from tests.harness import bad_leaders

    def play(attack: str, how: str, figure: str, story: Callable[[Path], FigureT]) -> FigureT:
        value = _in_scratch(story)
        rows.append([attack, how, figure, value])
        print(f"doors: {attack}, {how}: {figure} {value}", file=sys.stderr, flush=True)
        return value

    many = scale.attacks
    slow, tied = "s of the longest step", "differs from the only other, always"
    stalls = [(how, partial(stories.stalled_leader, stall=getattr(bad_leaders, how))) for how in STALLS[:many]]
    stalled = [play("leader", how, slow, story) for how, story in stalls]
    tie_s = play("replica", tied, slow, stories.tie)
    votes = play("guests", f"{stories.SYBILS} join and do nothing", "votes", stories.sybil_votes)
    evicted = [
        play("leader", f"evicts: {who}", "records", partial(stories.evictions, who=who)) for who in VICTIMS[:many]
    ]
    forged = [
        play("leader", f"forges rows, {ends} ends", "rows", partial(stories.forged_rows, ends=ends))
        for ends in ENDS[:many]
    ]
    return {
        "stalled_leader_replaced_s": round(max(stalled), 3),
        "tie_closed_s": round(tie_s, 3),
        "sybil_votes": votes,
        "evictions_accepted": sum(evicted),
        "forged_rows_accepted": sum(forged),
    }


def _of_sums(scale: Scale, rows: list[list[Cell]]) -> dict[str, Any]:
    from tests.benchmarks._doors_stories import loss_ratio, poisoned_sum

    clean, spoilt = _in_scratch(lambda root: poisoned_sum(root, scale.hosts, scale.steps))
    for name, losses in (("clean", clean), ("with it", spoilt)):
        rows.append(["sum of 1e30", f"{name}, first step", "loss", round(losses[0], 4)])
        rows.append(["sum of 1e30", f"{name}, last step", "loss", round(losses[-1], 4)])
    return {"poisoned_sum_loss_ratio": round(loss_ratio(clean, spoilt), 4)}


def _in_scratch(story: Callable[[Path], T]) -> T:
    """What it returns, given an empty directory."""
    with tempfile.TemporaryDirectory(prefix="doors-") as root:
        return story(Path(root))


def _notes(scale: Scale, tried: Frames) -> tuple[str, ...]:
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(tried.outcomes.items()))
    return (
        "bars are upper bounds, but of flood_steps_kept, of which it is a lower one",
        "frames: fuzzed bodies of every method, half of at most 64 KiB and half of at most 256 KiB, as if a member had "
        "sent them, given to the dispatchers of a swarm that trains; thread CPU time of the loop's thread for "
        f"admitting, answering and releasing each; bodies above 64 KiB are decoded in another; they ended: {outcomes}",
        "flood: a stranger in a process of its own offers 1 MB/s of fuzzed requests of 8 to 64 KiB over libp2p to one "
        f"of two hosts for {scale.flood_s:g} s, and as long to a sink outside the run, {scale.rounds} times in turns; "
        "it comes back as often as it is cut off; flood_mb_s is what it sent; flood_steps_kept: median over rounds of "
        "steps a second, host ÷ sink; the swarm is one process, whose loop and processors all of its peers share",
        f"directory: {scale.records} records of identities that nobody has; strangers ask one peer for all of them, by "
        "virtual time twice as often as their budget lets each; CPU time of the loop's thread, refusals included",
        "leaders, replicas and guests: virtual time, which a busy machine does not change",
        f"sum: one of {scale.hosts // 2} replicas of a stage hands in 1e30 for every element in every step; mean loss "
        f"of the last 3 of {scale.steps} steps, beside the same run without it",
    )
