"""What a swarm on spot machines gets done, beside what those of its replicas that are there could have done.

Whole swarms in one process each, in virtual time (:mod:`tests.benchmarks._goodput_case`): real peers, real bytes,
devices that take a stated time. So a run repeats itself, and a busy machine changes nothing but how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Result, Size

TARGETS = {0.01: 0.90, 0.05: 0.80}
"""By churn, the expected share of replicas that are preempted per step."""
OVERLAP_TARGET = 0.95
"""Of ``overlap``, in peace."""
STEPS = {Size.SMOKE: 3, Size.DEFAULT: 60, Size.FULL: 200}
STEPS_IN_PEACE = {Size.SMOKE: 2, Size.DEFAULT: 5, Size.FULL: 5}
SEEDS = {Size.SMOKE: (1,), Size.DEFAULT: (1,), Size.FULL: (1, 2, 3)}
SLOWER = {Size.SMOKE: {"slower": 30.0}, Size.DEFAULT: {}, Size.FULL: {}}
KEYS = (
    *(figure.format(f"{churn * 100:g}pct")
      for churn in TARGETS
      for figure in ("goodput_{}", "goodput_{}_target", "goodput_joining_too_{}", "preempted_{}")),
    "goodput_0pct", "goodput_overlap_0pct", "goodput_overlap_0pct_target", "steps", "committed", "lost", "duplicated",
    "digest_mismatches", "participation", "other_failures", "peers_failed",
)  # fmt: skip
COLUMNS = (
    "mode", "churn", "seed", "steps", "goodput", "joining_too", "preempted", "killed", "noticed", "cut_short", "spared",
    "replaced", "churn_per_step", "replicas", "hops_moved", "attempts_failed", "terms_begun", "join_s", "step_s",
    "seconds", "cpu_s",
)  # fmt: skip


def run(size: Size) -> Result:
    """Committed samples beside what the replicas that were there could have done, replayed from a spot trace."""
    return to_result(play_cases("goodput", list_cases(size)))


def list_cases(size: Size) -> list[dict[str, Any]]:
    """What is played: the longest first, they decide how long all take."""
    more = SLOWER[size]
    cases = [{"churn": churn, "seed": seed, "steps": STEPS[size], **more} for seed in SEEDS[size] for churn in TARGETS]
    peace = {"churn": 0.0, "seed": 1, "steps": STEPS_IN_PEACE[size], **more}
    return [*cases, *(peace | {"mode": mode} for mode in ("sync", "overlap"))]


def to_result(runs: Sequence[dict[str, Any]]) -> Result:
    """The table and the figures asked for. Where a churn was played with several seeds, all their committed samples are
    set beside all that could have been."""
    summary: dict[str, Any] = {}
    for churn, target in TARGETS.items():
        played = [run for run in runs if run["churn"] == churn]
        name = f"{churn * 100:g}pct"
        summary |= {
            f"goodput_{name}": _share(played, "could"),
            f"goodput_{name}_target": target,
            f"goodput_joining_too_{name}": _share(played, "could_joining_too"),
            f"preempted_{name}": sum(run["preempted"] for run in played),
        }
    peace = [run for run in runs if not run["churn"]]
    for mode, name in (("sync", "goodput_0pct"), ("overlap", "goodput_overlap_0pct")):
        summary[name] = _share([run for run in peace if run["mode"] == mode], "could")
    summary["goodput_overlap_0pct_target"] = OVERLAP_TARGET
    summary |= {key: sum(run[key] for run in runs) for key in ("steps", "committed", "lost", "duplicated")}
    summary |= {"digest_mismatches": sum(run["digest_mismatches"] for run in runs)}
    summary["participation"] = round(min(run["participation"] for run in runs), 4)
    summary["other_failures"] = sorted({broken for run in runs for broken in run["broken"]})[:5]
    summary["peers_failed"] = sorted({failed for run in runs for failed in run["peers_failed"]})[:5]
    rows = [[run["goodput_joining_too" if name == "joining_too" else name] for name in COLUMNS] for run in runs]
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=NOTES)


def _share(runs: Sequence[dict[str, Any]], could: str) -> float:
    return round(sum(run["committed"] for run in runs) / sum(run[could] for run in runs), 4)


NOTES = (
    "simulated: virtual time, devices that take 30 ms forward and 60 ms backward a microbatch, links of 5 ms and "
    "1 Gbit/s; peers, messages, averaging, joining and downloads are the product's own; the figures repeat themselves",
    "3 stages × 4 replicas, 2 trainers; a step is 222 microbatches, 5 s of the whole swarm's work; in a smoke "
    "devices are thirty times as slow and steps a thirtieth of that",
    "what could have been: the integral of the smallest stage's replicas over time, a replica counting from when it is "
    "ready until it is killed or has left; joining_too: from when its process started",
    "trace: memoryless removals of geometric size (mean 2.1, at most 6, as in Bamboo's p3 trace); rate per machine "
    "and 5 s, so that long steps see more of it (churn_per_step); each comes back as a new peer after a tenth of a "
    "mean life, on average",
    "half of the removals are announced 30 s before, the others are kill -9: an assumption, no trace says how many are",
    "only stage hosts are preempted; the last replica of a stage is never (spared): what becomes of a stage that is "
    "lost is another test's",
    "overlap is played without churn only: two more runs of so many steps would take as long again; "
    "its first step is fed by nobody ahead, and is counted",
    "the run at 0 % is the bound of the synchronous pipeline itself: filling, emptying and closing each step",
)
