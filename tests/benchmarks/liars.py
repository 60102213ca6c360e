"""What one member that lies does to a run, and who names it, by lie: with the product's defaults, and with all its
defences on.

Whole swarms in one process each, in virtual time (:mod:`tests.benchmarks._liars_case`), beside the honest run of the
same seed. The lies are those of :mod:`peers.chaos.liars.lies`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from peers.options.foundation import STRANGERS
from tests.benchmarks._cases import play_cases
from tests.benchmarks.runner import Result, Size, Table

BARS: dict[str, float] = {
    "f1": 0.98, "caught_p99": 919, "worst_loss_ratio": 1.05, "worst_seconds_ratio": 2.0, "worst_step_s": 15.0,
    "honest_accused": 0, "honest_loss_ratio": 1.015, "overhead": 0.06, "runs_stopped": 0, "named_wrongly": 0,
}  # fmt: skip
"""At most so much, but of ``f1`` at least. They are goals."""
BARE = ("f1", "worst_loss_ratio", "worst_seconds_ratio", "worst_step_s")
"""Also measured without defences, in a full run."""
OVERHEADS = ("overhead_cpu", "overhead_bytes")
"""The larger of them is the ``overhead``."""
KEYS = (*BARS, *(f"{name}_bar" for name in BARS), *(f"{name}_bare" for name in BARE), *OVERHEADS, "lies", "caught")
COLUMNS = (
    "lie", "liar", "rate", "seed", "defended", "fired", "loss_ratio", "seconds_ratio", "worst_s", "stopped", "caught",
    "named_by", "named_wrongly", "accused", "told",
)  # fmt: skip
OFTEN = (1.0, 0.1, 0.02)
"""Rates at which microbatches are lied about; of steps there are fewer, and fewest that one member leads."""


class Attack(NamedTuple):
    """A lie, who tells it, and at which rates. Where a trainer does there are five, and as many more microbatches: of
    fewer none is judged."""

    lie: str
    liar: str
    trainers: int = 2
    rates: tuple[float, ...] = OFTEN[:2]


ATTACKS = (
    Attack("invents", "host-0"),
    Attack("late", "host-0"),
    Attack("asks-again", "host-5", rates=OFTEN[:1]),
    Attack("slower", "host-0", rates=OFTEN),
    Attack("labels", "trainer-0", 5, OFTEN),
    Attack("loss-zero", "trainer-0", 5, OFTEN),
    Attack("tokens-few", "trainer-0", 5, OFTEN),
    Attack("sum-x-10", "trainer-0", 5),
    Attack("pulls-x-1", "trainer-0", 5, OFTEN),
    Attack("pulls-x-10", "trainer-0", 5, OFTEN),
    Attack("pulls-noise", "trainer-0", 5, OFTEN),
    Attack("output-noise", "host-0", rates=OFTEN),
    Attack("output-x1.5", "host-0", rates=OFTEN),
    Attack("output-x-1", "host-0", rates=OFTEN),
    Attack("output-zero", "host-0", rates=OFTEN),
    Attack("output-stale", "host-0", rates=OFTEN),
    Attack("gradient-x-50", "host-1", rates=OFTEN),
    Attack("sum-x-1", "host-0"),
    Attack("sum-x-10", "host-0"),
    Attack("sum-x-60", "host-0"),
    Attack("reducer-x-1", "host-0"),
)
"""Those that take longest first."""
STEPS = {Size.SMOKE: 3, Size.DEFAULT: 20, Size.FULL: 60}
SEEDS = {Size.SMOKE: (1,), Size.DEFAULT: (1,), Size.FULL: (1, 2, 3)}
OVERHEAD = {Size.SMOKE: ("", 1), Size.DEFAULT: ("tiny", 4), Size.FULL: ("small", 4)}
"""Whose model and steps it is measured with, and of how many steps."""
ALL, COSTS = "all", "what defences cost while nobody lies"
SMOKED = ("slower", "sum-x-10")
MORE = 2
"""So many times as often as in the honest run with the same defences a liar must be named by the events of a kind."""


def run(size: Size) -> Result:
    """Loss, time and blame in runs of which one member lies, beside honest ones, with and without defences."""
    runs = play_cases("liars", list_cases(size))
    (overhead,) = play_cases("overhead", [overhead_case(size)])
    return to_result(runs, overhead)


def list_cases(size: Size) -> list[dict[str, Any]]:
    """What is played; for each shape of a run the honest one as well, which alone is without defences by default."""
    attacks = [one for one in ATTACKS if size is not Size.SMOKE or (one.lie in SMOKED and one.trainers == 2)]
    attacks = [Attack("", "", trainers) for trainers in sorted({one.trainers for one in attacks})] + attacks
    rates = OFTEN if size is Size.FULL else OFTEN[:1]
    return [
        {
            **{"lie": one.lie, "liar": one.liar, "rate": rate, "seed": seed, "trainers": one.trainers},
            **{"steps": STEPS[size], "defended": defended},
        }
        for one in attacks
        for rate in (one.rates if one.lie else (1.0,))
        if rate in rates
        for seed in SEEDS[size]
        for defended in (False, True)
        if defended or not one.lie or size is not Size.DEFAULT
    ]


def overhead_case(size: Size) -> dict[str, Any]:
    """What is played to see what defences cost: all together, and of a full run each alone."""
    preset, steps = OVERHEAD[size]
    keys: dict[str, Mapping[str, Any]] = {"none": {}, ALL: STRANGERS}
    if size is Size.FULL:
        keys |= {key: {key: value} for key, value in STRANGERS.items()}
    return {"preset": preset, "steps": steps, "seed": 1, "kinds": keys}


def to_result(runs: Sequence[dict[str, Any]], overhead: Mapping[str, Mapping[str, float]]) -> Result:
    """The table, and the totals of the defended runs, some of them beside those of the others; and what defences
    cost."""
    honest = {(one["seed"], one["trainers"], one["defended"]): one for one in runs if not one["lie"]}
    runs = [one | _beside(one, honest) | _blamed(one, honest) for one in runs]
    defended, bare = [[one for one in runs if one["defended"] is so] for so in (True, False)]
    caught = sorted(one["caught"] for one in defended if one["caught"] is not None)
    summary: dict[str, Any] = {
        **_totals(defended),
        "caught_p99": caught[math.ceil(0.99 * len(caught)) - 1] if caught else None,
        "honest_accused": sum(len(one["accused"]) for one in runs if not one["lie"]),
        "honest_loss_ratio": max(one["loss_ratio"] for one in defended if not one["lie"]),
        "overhead": max(overhead[ALL][name] for name in OVERHEADS),
        **{name: overhead[ALL][name] for name in OVERHEADS},
        "runs_stopped": sum(bool(one["stopped"]) for one in runs),
        "named_wrongly": sum(one["named_wrongly"] for one in runs if one["lie"]),
        **{f"{name}_bar": bar for name, bar in BARS.items()},
        **{f"{name}_bare": found for name, found in _totals(bare).items()},
        "lies": sum(bool(one["lie"]) for one in defended),
        "caught": len(caught),
    }
    columns = ("defended by", *overhead[ALL])
    costs = Table(title=COSTS, columns=columns, rows=[[name, *found.values()] for name, found in overhead.items()])
    return Result(columns=COLUMNS, rows=[_row(one) for one in runs], summary=summary, notes=NOTES, tables=[costs])


Honest = Mapping[tuple[int, int, bool], dict[str, Any]]
"""By seed, trainers, and whether it was defended."""


def _beside(one: dict[str, Any], honest: Honest) -> dict[str, Any]:
    bare = honest[one["seed"], one["trainers"], False]
    seconds = None if one["step_s"] is None else round(one["step_s"] / bare["step_s"], 3)
    return {"loss_ratio": round(one["loss"] / bare["loss"], 4), "seconds_ratio": seconds}


def _blamed(one: dict[str, Any], honest: Honest) -> dict[str, Any]:
    """Who was named by what. A liar that is named hardly more often than it is when it does not lie is not caught."""
    named = honest[one["seed"], one["trainers"], one["defended"]]["named"].get(one["liar"], {})
    by = {kind: n for kind, n in one["named"].get(one["liar"], {}).items() if n > MORE * named.get(kind, 0)}
    return {
        "named_by": by,
        "caught": min((one["caught"][kind] for kind in by), default=None),
        "accused": {name: kinds for name, kinds in one["named"].items() if name != one["liar"]},
    }


def _totals(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not (lying := [one for one in runs if one["lie"]]):
        return dict.fromkeys(BARE)
    named, accused = sum(one["caught"] is not None for one in lying), sum(len(one["accused"]) for one in runs)
    return {
        "f1": round(2 * named / (named + len(lying) + accused), 4),
        "worst_loss_ratio": max(one["loss_ratio"] for one in lying),
        "worst_seconds_ratio": max(one["seconds_ratio"] or 0.0 for one in lying),
        "worst_step_s": max(one["worst_s"] or 0.0 for one in lying),
    }


def _row(one: dict[str, Any]) -> list[Any]:
    shown = {
        "lie": one["lie"] or "none",
        "defended": "yes" if one["defended"] else "no",
        "named_by": _counted(one["named_by"]),
        "accused": "; ".join(f"{name}: {_counted(kinds)}" for name, kinds in one["accused"].items()),
        "told": _counted(one["told"]),
    }
    return [(one | shown)[name] for name in COLUMNS]


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in kinds.items())


NOTES = (
    "simulated: virtual time, links that take none, devices that take 50 ms forward and 100 ms backward a microbatch; "
    "peers, messages and numbers are the product's own; the figures repeat themselves",
    "2 stages × 3 replicas, 2 trainers, or 5 with equal shares where the lie is a trainer's; 12 microbatches of 4 × 16 "
    "tokens a step, 15 of five trainers, of the text that comes with Python; a model of two layers",
    "ratios: to the honest run without defences of the same seed; loss: of rows that nobody learns from, by the "
    "parameters that honest members hold at the end; seconds: of the median step; worst_s: of the slowest",
    "named_by: events of honest members that name the liar, of kinds that name it more than twice as often as in the "
    "honest run; caught: so many microbatches it had worked on at the first of them; caught_p99 is of those that were "
    "caught; f1 of lies that were named, and of honest members that were named, in whatever run",
    "honest_accused: members named in runs in which nobody lies; named_wrongly: events that name another than the liar",
    "told: how often honest members told of something wrong, no matter who was named; PartsCapped names nobody",
    "defended: with all keys of the manifest that swarm new --strangers sets; who is only named goes on, who is proven "
    "wrong by audits is out, and who has QuotaTaken feeds nothing",
    "overhead: runs of the same seed and microbatches, five trainers, in one process, a step of each in turns; model, "
    "codecs and batch of the preset tiny (full: small), as many microbatches of each trainer; processor seconds and "
    "bytes of all peers together, over those without defences, less 1: medians of the steps; without daemons, which "
    "would make both runs cost more; hashes and signatures of receipts are in both",
)
