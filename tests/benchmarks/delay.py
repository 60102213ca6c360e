"""What a share of each step's gradient that is one step old costs in loss, and whether `overlap` is worth that.

The same model, text and steps, with the product's parts and optimizers in one process (:mod:`_delay_run`): no network.
So what is compared at equal time takes the seconds of a step from the benchmark ``wan``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from swarm.models.gpt_config import GptConfig
from swarm.optim.schedules import OptimizerConfig
from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._convergence_replicas import Scale, Text

ROWS = 35
"""Microbatches of a step, of one row each."""
SHARES = {"6": 2, "20": 7, "40": 14}
"""Early microbatches of a step, by percent."""
SYNC, JUDGED = "sync", "20"
"""Candidates are named by their share; that judged is the smallest which is not below what `wan` has:
:data:`EARLY_IN_WAN`."""
OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=1e-2, warmup_steps=40),
    "muon": OptimizerConfig(name="muon", lr=2e-2, warmup_steps=40),
}
"""With the learning rate that serves `sync` best of those a factor of two apart; AdamW is worse with the quickstart's
ten steps of warm-up."""
SMALL = {"model": GptConfig(vocab_size=384, dim=48, layers=2, heads=4, context=32), "steps": 384, "held_out_rows": 256}
"""The quickstart's model made narrow."""
SMOKE = {"model": GptConfig(vocab_size=384, dim=16, layers=1, heads=2, context=16), "steps": 6, "held_out_rows": 16}
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 1, Size.FULL: 3}

SYNC_STEP_S, OVERLAP_STEP_S = 23.56, 18.55
"""Seconds of a step in the cell 80_80 of `wan`: `sync`, whose utilisation is .7716, as measured (LOG.md, 2026-11-27
08:51); `overlap` as its design estimates it, at .98 of that cell's bound, which is 1."""
EARLY_IN_WAN = 0.15
"""Share of a step of `sync` there in which a step closes and nothing else can be done: drain .061, reconcile .002,
round .053, norm .005, close .006 and half the fill, .016. An estimate of the early share until `wan` counts it."""
WORSE_TARGET = 0.01

AHEAD, HALF = "_ahead", "_half"
"""In a candidate's name: early microbatches look ahead; the learning rate is half of sync's, for a delay makes large
ones worse."""
CASES = (
    *(f"{share}{more}" for share in SHARES for more in ("", AHEAD)),
    *(f"{JUDGED}{HALF}{more}" for more in ("", AHEAD)),
)
KEYS = (
    "steps", "steps_in_equal_time", "tokens", "parameters", "seeds", "unigram_loss", "speedup", "judged_share",
    "worse_target", "equal_time_target",
    *(f"sync_loss_{name}" for name in OPTIMIZERS),
    *(f"sync_loss_in_equal_time_{name}" for name in OPTIMIZERS),
    *(f"{figure}_{name}_{case}" for figure in ("worse", "equal_time") for name in OPTIMIZERS for case in CASES),
    *(f"met_{name}_{case}" for name in OPTIMIZERS for case in CASES if case.startswith(JUDGED)),
)  # fmt: skip
COLUMNS = (
    "optimizer", "case", "early_share", "steps", "loss", "worse", "worse_least", "worse_most", "equal_time",
    "equal_time_least", "equal_time_most", "step_worth",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one optimizer, a loss a seed: `sync` after as many steps as `overlap` and after those that it takes in the
    same time; `overlap` by its case."""

    sync: list[float]
    sync_in_time: list[float]
    overlap: dict[str, list[float]]


def run(size: Size) -> Result:
    """Held-out loss when 6 to 40 % of each step's gradient are a step old, with look-ahead and without, beside sync."""
    import torch

    from peers.data.text import built_in_corpus
    from tests.benchmarks._convergence_replicas import Scale, make_text
    from tests.benchmarks._delay_run import unigram_loss

    torch.set_num_threads(1)
    chosen: dict[str, Any] = SMOKE if size is Size.SMOKE else SMALL
    scale = Scale(optimizer=OPTIMIZERS["adamw"], replicas=1, rows=ROWS, **chosen)
    corpus, unigram = built_in_corpus(), []
    losses = {name: Losses([], [], {case: [] for case in CASES}) for name in OPTIMIZERS}
    for seed in range(SEEDS[size]):
        with tempfile.TemporaryDirectory(prefix="delay-") as root:
            text = make_text(Path(root), corpus, scale, seed)
            unigram.append(unigram_loss(text, scale.model.vocab_size))
            for name, found in losses.items():
                _train_all(scale, OPTIMIZERS[name], found, text, seed)
    return to_result(scale, losses, mean(unigram))


def steps_in_equal_time(steps: int) -> int:
    """Return the steps that `sync` takes while `overlap` takes ``steps``."""
    return max(1, round(steps * OVERLAP_STEP_S / SYNC_STEP_S))


def _train_all(scale: Scale, optimizer: OptimizerConfig, found: Losses, text: Text, seed: int) -> None:
    from tests.benchmarks._delay_run import Delay, DelayedRun

    def train(case: str, steps: int) -> float:
        delay = Delay(early=_early(case), ahead=AHEAD in case)
        rate = optimizer.lr / 2 if HALF in case else optimizer.lr
        config = optimizer.model_copy(update={"lr": rate})
        loss = DelayedRun(replace(scale, steps=steps), config, delay, text, seed).train()
        print(f"seed {seed}, {optimizer.name} {case}, {steps} steps: {loss:.4f}", file=sys.stderr, flush=True)
        return loss

    found.sync.append(train(SYNC, scale.steps))
    found.sync_in_time.append(train(SYNC, steps_in_equal_time(scale.steps)))
    for case, seen in found.overlap.items():
        seen.append(train(case, scale.steps))


def _early(case: str) -> int:
    """Return how many of a step's microbatches are early."""
    return SHARES.get(case.partition("_")[0], 0)


def to_result(scale: Scale, losses: Mapping[str, Losses], unigram: float) -> Result:
    """Return the table, a row for each candidate, and differences within each seed as shares of the loss of sync."""
    rows: list[list[Cell]] = []
    summary: dict[str, Any] = {
        "steps": scale.steps,
        "steps_in_equal_time": steps_in_equal_time(scale.steps),
        "tokens": scale.tokens,
        "parameters": _parameters(scale.model),
        "seeds": len(losses["adamw"].sync),
        "unigram_loss": round(unigram, 4),
        "speedup": round(SYNC_STEP_S / OVERLAP_STEP_S, 4),
        "judged_share": int(JUDGED),
        "worse_target": WORSE_TARGET,
        "equal_time_target": 0.0,
    }
    for name, found in losses.items():
        summary[f"sync_loss_{name}"] = round(mean(found.sync), 4)
        summary[f"sync_loss_in_equal_time_{name}"] = round(mean(found.sync_in_time), 4)
        rows.append(_row(name, SYNC, scale.steps, found.sync, found))
        rows.append(_row(name, SYNC, steps_in_equal_time(scale.steps), found.sync_in_time, found))
        for case, seen in found.overlap.items():
            rows.append(_row(name, case, scale.steps, seen, found))
            worse, in_time = mean(_above(seen, found.sync)), mean(_above(seen, found.sync_in_time))
            summary |= {f"worse_{name}_{case}": round(worse, 4), f"equal_time_{name}_{case}": round(in_time, 4)}
            if case.startswith(JUDGED):
                summary[f"met_{name}_{case}"] = worse <= WORSE_TARGET and in_time < 0.0
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=NOTES)


def _row(name: str, case: str, steps: int, seen: list[float], found: Losses) -> list[Cell]:
    worse, in_time = _above(seen, found.sync), _above(seen, found.sync_in_time)
    ranges = [round(pick(values), 4) for values in (worse, in_time) for pick in (mean, min, max)]
    share, loss = _early(case) / ROWS, mean(seen)
    return [name, case, round(share, 3), steps, round(loss, 4), *ranges, _step_worth(loss, found)]


def _above(seen: list[float], other: list[float]) -> list[float]:
    """By what share of the other's, seed by seed."""
    return [one / two - 1.0 for one, two in zip(seen, other, strict=True)]


def _step_worth(loss: float, found: Losses) -> float | None:
    """How many steps of sync one step of overlap is worth, on the line through sync's two lengths; None where sync has
    learnt nothing between them."""
    long, short = mean(found.sync), mean(found.sync_in_time)
    shorter = OVERLAP_STEP_S / SYNC_STEP_S
    return round(1.0 - (1.0 - shorter) * (loss - long) / (short - long), 3) if short > long else None


def _parameters(model: GptConfig) -> int:
    from swarm.planning.costs import model_parameter_count

    return model_parameter_count(model)


NOTES = (
    "loss: held out, nats a token; worse: above sync after as many steps, equal_time: above sync after those that it "
    "takes in the same time, with a schedule of that length; both as shares, means within each seed, least, most",
    f"equal time: a step of sync takes {SYNC_STEP_S} s, one of overlap {OVERLAP_STEP_S} s: cell 80_80 of wan, where "
    "sync was measured at .7716 of device time, and overlap's design estimates .98 of the bound, 1",
    f"judged at the smallest share not below the {EARLY_IN_WAN} that wan's account of sync there leaves to overlap: "
    f"worse at most {WORSE_TARGET}, better at equal time; else overlap stays opt-in",
    "step_worth: steps of sync that one of overlap is worth, by linear interpolation; overlap wins where it times "
    "speedup is above 1",
    "early microbatches of step c + 1 are computed with the state after step c - 1; look-ahead moves that state once "
    "more along its moments; the first step has none",
    "one learning rate for all candidates of an optimizer, sync's best; half: half of it, against sync with the whole",
    "a step is 35 rows of 32 tokens; noise, by hand: runs of sync with AdamW whose first weights differ by .001 "
    "to .01 ended up to .012 of the loss apart, so one seed cannot tell 1 % from nothing: use --full",
)
