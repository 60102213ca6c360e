"""How much of a trainer's text the one who hosts a stage can read out of what is sent to it, with private ends."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.models.gpt_config import GptConfig
from swarm.optim.schedules import OptimizerConfig
from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._leak_views import Attacks

BAR = 2.0
"""With its seed secret the initial embedding may tell no more than twice what guessing by frequency does."""
SCALES: dict[Size, dict[str, Any]] = {
    Size.SMOKE: {"model": GptConfig(vocab_size=384, dim=16, layers=2, heads=2, context=16), "steps": 3, "rows": 2},
    Size.DEFAULT: {"model": GptConfig(), "steps": 100, "rows": 16},
    Size.FULL: {"model": GptConfig(), "steps": 400, "rows": 16},
}
"""The quickstart's model and optimizer, but for the smoke."""
ROWS = {Size.SMOKE: (48, 64), Size.DEFAULT: (64, 256), Size.FULL: (256, 1024)}
"""Rows of the trainer's text that are read, and of the attacker's own."""
KNOWN_ROWS = 16
VIEWS = {
    "seed_attack": ("first", "nearest row of the embedding that run.seed makes; the ends' seed is secret"),
    "seed_attack_if_not_secret": ("first", "the same, were the ends made from run.seed"),
    "known_rows": ("first", f"nearest in {KNOWN_ROWS} rows of the trainer's text that are known"),
    "known_ends": ("first", "nearest row of the embedding, which is known"),
    "linear_decoder": ("second", "linear decoder, trained on text of one's own; ends known"),
    "targets_from_last_gradient": ("last", "target whose gradient this is; head known"),
    "targets_by_seed": ("last", "the same with the head that run.seed makes; the ends' seed is secret"),
    "targets_by_seed_if_not_secret": ("last", "the same, were the ends made from run.seed"),
}
"""Where each attack looks, a cut between trainer and stages, and how it reads."""
KEYS = (
    "frequency_baseline", "seed_attack_over_baseline", "seed_attack_over_baseline_bar", "steps",
    *VIEWS, *(f"{name}_trained" for name in VIEWS),
)  # fmt: skip


def run(size: Size) -> Result:
    """Share of a trainer's tokens and targets that hosts of the first and the last stage read, by what they know."""
    import torch

    from peers.data.text import built_in_corpus
    from tests.benchmarks._leak_views import Attacks, Run, Scale, make_shards, read_rows

    torch.manual_seed(0)
    wanted = SCALES[size]
    scale = Scale(optimizer=OptimizerConfig(), **wanted)
    read, own = ROWS[size]
    with tempfile.TemporaryDirectory(prefix="leak-") as root:
        corpus = built_in_corpus(100_000) if size is Size.SMOKE else built_in_corpus()
        victim, attacker = make_shards(Path(root), corpus, scale.model.vocab_size)
        trained = Run(scale, victim)
        attacks = Attacks(trained, read_rows(victim, read, scale), read_rows(attacker, own, scale), KNOWN_ROWS)
        start = measure(attacks, "start")
        for step in range(1, scale.steps + 1):
            loss = trained.step(step)
            if step % 20 == 0:
                print(f"step {step}: loss {loss:.3f}", file=sys.stderr, flush=True)
        return result(attacks.by_frequency(), start, measure(attacks, "trained"), scale)


def measure(attacks: Attacks, when: str) -> dict[str, float]:
    """Share that each attack reads now."""
    found = {}
    for name in VIEWS:
        found[name] = round(getattr(attacks, name)(), 4)
        print(f"{when}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def result(baseline: float, start: dict[str, float], trained: dict[str, float], scale: Any) -> Result:
    """Percent of the tokens, at the start and after training."""
    rows: list[list[Cell]] = [["-", "guessing the most frequent token", round(100 * baseline, 1), "-"]]
    for name, (cut, how) in VIEWS.items():
        rows.append([cut, how, round(100 * start[name], 1), round(100 * trained[name], 1)])
    summary = {
        "frequency_baseline": round(baseline, 4),
        "seed_attack_over_baseline": round(start["seed_attack"] / baseline, 3),
        "seed_attack_over_baseline_bar": BAR,
        "steps": scale.steps,
        **start,
        **{f"{name}_trained": share for name, share in trained.items()},
    }
    return Result(
        columns=("cut", "how it is read", "percent at the start", "percent after training"),
        rows=rows,
        summary=summary,
        notes=(
            f"one process, one seed, {scale.steps} steps of {scale.rows} rows of {scale.model.context} tokens, of the "
            "documentation that comes with Python",
            "the same cuts as in a swarm: embedding | half of the blocks | the other half | head; float32, no dropout",
            "lower bounds: a cleverer attacker reads more. The first cut shows which positions hold the same token, "
            "whatever is secret: it is a substitution cipher",
            "every trainer knows the ends, and so does anyone who joins as one",
        ),
    )
