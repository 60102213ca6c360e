"""What averaging a fragment of the weights at each close, instead of all of them, costs in loss and saves in bytes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from tests.benchmarks.convergence import SMALL
from tests.benchmarks.runner import Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._convergence_mixing import Local
    from tests.benchmarks._convergence_replicas import Scale, Text

REPLICAS, FRAGMENTS, EVERY = 8, 4, 4
SEEDS = {Size.SMOKE: 1, Size.DEFAULT: 2, Size.FULL: 3}
STEPS = {Size.SMOKE: 17, Size.DEFAULT: 128, Size.FULL: 512}
KEYS = (
    "tokens", "parameters", "seeds", "bytes_of_whole", "largest_share", "fragments_above_whole",
    "fragments_above_as_few_bytes", "half_mixed_above_whole",
)  # fmt: skip
WHOLE, SELDOM = f"whole, every {EVERY}", f"whole, every {EVERY * FRAGMENTS}"
IN_TURN, HALF = f"{FRAGMENTS} fragments, every {EVERY}", f"{FRAGMENTS} fragments, every {EVERY}, mixed by half"


@dataclass(frozen=True, slots=True)
class Streamed:
    """How one run ended: held-out loss of the anchor, and of the mean of all replicas, in nats per token; bytes that a
    replica sent at the largest close, and in all."""

    loss: float
    loss_of_mean: float
    largest: float
    total: float


def run(size: Size) -> Result:
    """Held-out loss of the anchor after the same tokens, and bytes, with whole closes and with fragments."""
    import torch

    from peers.data.text import built_in_corpus
    from tests.benchmarks._convergence_replicas import Scale, make_text

    torch.set_num_threads(1)
    scale, corpus = Scale(replicas=REPLICAS, **{**SMALL, "steps": STEPS[size]}), built_in_corpus()
    runs: dict[str, list[Streamed]] = {name: [] for name in _candidates(scale)}
    for seed in range(SEEDS[size]):
        with tempfile.TemporaryDirectory(prefix="fragments-") as root:
            text = make_text(Path(root), corpus, scale, seed)
            for name, make in _candidates(scale).items():
                runs[name].append(_train(scale, text, make(), seed))
                print(f"seed {seed}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)

    def above(name: str, other: str) -> list[float]:
        return [round(one.loss - two.loss, 4) for one, two in zip(runs[name], runs[other], strict=True)]

    whole = runs[WHOLE][0].largest
    return Result(
        columns=("candidate", "loss", "loss_of_mean", "bytes_largest_close", "bytes_per_token"),
        rows=[
            [
                name,
                round(mean(one.loss for one in ended), 4),
                round(mean(one.loss_of_mean for one in ended), 4),
                round(ended[0].largest),
                round(ended[0].total / scale.tokens, 1),
            ]
            for name, ended in runs.items()
        ],
        summary={
            "tokens": scale.tokens * scale.replicas,
            "parameters": _elements(scale),
            "seeds": SEEDS[size],
            "bytes_of_whole": round(whole),
            "largest_share": round(runs[IN_TURN][0].largest / whole, 3) if whole else 0.0,
            "fragments_above_whole": above(IN_TURN, WHOLE),
            "fragments_above_as_few_bytes": above(IN_TURN, SELDOM),
            "half_mixed_above_whole": above(HALF, WHOLE),
        },
        notes=(
            f"{REPLICAS} replicas in one process; loss: held out, of the anchor, which is what a run stores",
            "loss_of_mean: of the mean of all replicas' own weights, of which a run never sees more than a fragment",
            "bytes: what a replica sends at a close, by formula, float32 payload; per token that it trains on itself",
            "plain averaging (outer rate 1, no momentum): so few rounds are too few for momentum",
            f"whole, every {EVERY * FRAGMENTS}: as many bytes a token as the fragments, all of them in one burst",
        ),
    )


def _candidates(scale: Scale) -> Mapping[str, Callable[[], Local]]:
    from swarm.models.registry import family_of
    from swarm.optim.outer import OuterNesterov
    from tests.benchmarks._convergence_mixing import Local

    family, plain = family_of(scale.model), OuterNesterov(lr=1.0, momentum=0.0)
    layout = family.layout(family.build(family.whole))
    return {
        WHOLE: lambda: Local(EVERY, plain),
        IN_TURN: lambda: Local(EVERY, plain, layout, FRAGMENTS),
        HALF: lambda: Local(EVERY, plain, layout, FRAGMENTS, weight=0.5),
        SELDOM: lambda: Local(EVERY * FRAGMENTS, plain),
    }


def _train(scale: Scale, text: Text, local: Local, seed: int) -> Streamed:
    import torch

    from tests.benchmarks._convergence_replicas import Replicas

    replicas, sent = Replicas(scale, text, seed), list[float]()
    local.start(replicas.params[0])
    for step in range(1, scale.steps + 1):
        replicas.step(local.gradients(replicas.gradients()), step)
        replicas.params = local.parameters(replicas.params, step, scale.steps)
        sent.append(4 * replicas.elements * local.vectors(scale.replicas, step, scale.steps))
    anchor, middle = replicas.held_out_losses(torch.stack([local.anchor, replicas.params.mean(0)]))
    return Streamed(anchor, middle, max(sent), sum(sent))


def _elements(scale: Scale) -> int:
    from swarm.models.registry import family_of

    family = family_of(scale.model)
    return family.layout(family.build(family.whole)).elements
