"""What share of the throughput of perfectly placed peers is left on spot machines, by the rule that moves peers; and
how soon real processes have recovered when a stage of theirs starves, beside the same where nobody moves."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import ROOT, Result, Size, Table
from tests.benchmarks.scenarios import play

if TYPE_CHECKING:
    from swarm.sim.flow import FlowResult

PLACES, STAGES, STEP_S = 400, 32, 30.0
HOURS = {Size.SMOKE: 0.25, Size.DEFAULT: 32.0, Size.FULL: 32.0}
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 1, Size.FULL: 5}
PERIODS = (60, 300, 600)

CASES: Mapping[str, Mapping[str, Any]] = {
    "none": {"arrivals": False},
    "none_counted": {},
    **{f"swarm_T{period}": {"rule": "swarm", "every_s": float(period), "arrivals": False} for period in PERIODS},
    **{f"ours_T{period}": {"rule": "ours", "every_s": float(period)} for period in PERIODS},
    "ours": {"rule": "ours"},
    "ours_notice": {"rule": "ours", "notices": True},
}
SHORT = ("none", "none_counted", "ours")
"""Cases that ``--full`` plays with lives of 100 minutes, too."""


STARVED = ROOT / "docker" / "scenarios" / "rebalance.toml"
"""Real processes: four of the five hosts of one of two stages are killed."""
FEWER = {
    "replicas = 5": "replicas = 3", "layers = 16": "layers = 4", "copies = 4": "copies = 2",
    "microbatches_per_step = 40": "microbatches_per_step = 12", "steps = 12": "steps = 6", "step = 5": "step = 3",
    '"host-*"\ncpus = 0.1': '"host-*"\ncpus = 0.2',
    '"host-1-1", "host-1-2", "host-1-3", "host-1-4"': '"host-1-1", "host-1-2"',
}  # fmt: skip
"""What a smoke has of it."""
MODES = {Size.SMOKE: ("auto",), Size.DEFAULT: ("auto", "off"), Size.FULL: ("auto", "off")}
FIGURES = (
    "steps", "moves", "recovered_s", "recovered_steps", "max_gap_s", "baseline_tokens_per_s", "tokens_per_s",
    "throughput_retained_raw", "lost", "duplicated", "digest_mismatches",
)  # fmt: skip


def _key(name: str, life: str) -> str:
    """Put the life behind the rule: ours_T60 is ours_4h_T60."""
    for mark in ("_T", "_notice"):
        if mark in name:
            rule, _, rest = name.partition(mark)
            return f"{rule}_{life}{mark}{rest}"
    return f"{name}_{life}"


KEYS = (
    *(_key(name, "4h") for name in CASES), *(_key(name, "100min") for name in SHORT),
    "ours_4h_target", "ours_4h_notice_target", "newcomers_ratio_4h", "newcomers_ratio_4h_target",
    "newcomers_ratio_4h_today", "moves_h", "joins_h", "seeds", "recovered_steps", "recovered_steps_target",
    "recovered_s", "baseline_step_s", "moves", "lost", "mismatches", "retained", "retained_still",
)  # fmt: skip


async def run(size: Size) -> Result:
    """Throughput of 400 peers on spot machines over that of the same placed perfectly; recovery of real processes."""
    starved = await _starve(size)
    hours, found = HOURS[size], dict[str, list["FlowResult"]]()
    for life, minutes in {"4h": 240, "100min": 100}.items():
        if life == "4h" or size is Size.FULL:
            for name in CASES if life == "4h" else SHORT:
                key, seeds = _key(name, life), range(1, SEEDS[size] + 1)
                found[key] = [_play(name, minutes, seed, hours) for seed in seeds]
                print(key, found[key], file=sys.stderr, flush=True)
    ratios = {key: round(mean(one.ratio for one in results), 4) for key, results in found.items()}
    return Result(
        columns=("rule", "ratio", "worst", "moves_h", "joins_h", "given_up"),
        rows=[
            (
                key,
                ratios[key],
                round(min(one.ratio for one in results), 4),
                round(mean(one.moves for one in results) / hours, 1),
                round(mean(one.joins for one in results) / hours, 1),
                sum(one.given_up for one in results),
            )
            for key, results in found.items()
        ],
        summary={
            **{key: ratios.get(key) for key in KEYS if key.split("_")[0] in ("none", "swarm", "ours")},
            "ours_4h_target": 0.975,
            "ours_4h_notice_target": 0.985,
            "newcomers_ratio_4h": ratios["none_counted_4h"],
            "newcomers_ratio_4h_target": 0.92,
            "newcomers_ratio_4h_today": ratios["none_4h"],
            "moves_h": round(mean(one.moves for one in found["ours_4h"]) / hours, 1),
            "joins_h": round(mean(one.joins for one in found["ours_4h"]) / hours, 1),
            "seeds": SEEDS[size],
            **_recovered(starved),
        },
        notes=(
            f"{PLACES} places, {STAGES} stages, {hours:g} h of spot trace, steps of {STEP_S:g} s; all peers equally"
            " fast; a download takes 60 s, a new copy 120 s, a mover with a copy stands still for 3 s",
            "ratio: peers of the smallest stage at every moment, over ready peers divided by stages, rounded down",
            "none: joiners count the roster alone, as before; none_counted and ours: those on their way, too; swarm:"
            " SWARM's published rule every T seconds, with queues that are modelled; its joiners count just the roster",
            "notice: half of the removals are announced, and such a machine stays to the end of the step",
            "copies are where the product's hashing puts them; averaging and wiring are not in it",
            "starved: docker/scenarios/rebalance.toml among processes, rebalance.mode auto and off; recovered: from the"
            " kill to the first microbatch of the host that moved; retained: committed tokens a second since the kill ÷"
            " before, of 12 steps; _still: where nobody moves",
        ),
        tables=(Table(title="a stage is starved", columns=("mode", *FIGURES), rows=_rows(starved)),),
    )


async def _starve(size: Size) -> dict[str, dict[str, Any]]:
    """By mode the report of the play in which a stage is starved; where nobody moves, no move is expected."""
    told, reports = STARVED.read_text(encoding="utf-8"), {}
    with tempfile.TemporaryDirectory(prefix="rebalance-") as scratch:
        for mode in MODES[size]:
            path = Path(scratch) / f"{mode}.toml"
            asked = told if mode == "auto" else told.partition("[expect]")[0]
            if size is Size.SMOKE:
                for of_all, of_few in FEWER.items():
                    asked = asked.replace(of_all, of_few)
            path.write_text(asked.replace('mode = "auto"', f'mode = "{mode}"'), encoding="utf-8")
            reports[mode] = await play(path, Path(scratch) / mode, "--on", "processes")
            print(f"starved, {mode}: {reports[mode]['verdict']} {reports[mode]['problems']}", file=sys.stderr)
    return reports


def _rows(starved: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    return [[mode, *(report[name] for name in FIGURES)] for mode, report in starved.items()]


def _recovered(starved: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    moved, still = starved["auto"], starved.get("off", {})
    return {
        "recovered_steps": moved["recovered_steps"],
        "recovered_steps_target": 2,
        "recovered_s": moved["recovered_s"],
        "baseline_step_s": moved["baseline_step_s"],
        "moves": moved["moves"],
        "lost": sum(report["lost"] for report in starved.values()),
        "mismatches": sum(report["digest_mismatches"] for report in starved.values()),
        "retained": moved["throughput_retained_raw"],
        "retained_still": still.get("throughput_retained_raw"),
    }


def _play(name: str, life_min: float, seed: int, hours: float) -> FlowResult:
    from peers.chaos.schedule import spot_trace
    from swarm.sim.flow import Flow
    from swarm.sim.turnover import FlowCase

    until_s = hours * 3600
    churn = STEP_S / (life_min * 60)
    trace = spot_trace(places=PLACES, churn=churn, step_s=STEP_S, until_s=until_s, seed=seed)
    return Flow(FlowCase(places=PLACES, stages=STAGES, until_s=until_s, seed=seed, **CASES[name]), trace).run()
