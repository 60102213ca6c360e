"""What averaging less exactly, or less often, costs in loss and saves in bytes: the same model, tokens and text."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from swarm.averaging.gossip.pushing import PushSum
from swarm.averaging.strategies import STRATEGIES
from swarm.averaging.strategies.swapping import ButterflyGroups
from swarm.models.gpt_config import GptConfig
from swarm.optim.schedules import OptimizerConfig
from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._convergence_mixing import Mixing
    from tests.benchmarks._convergence_replicas import Scale, Text

REPLICAS, SYNC, SEEDS, SEEDS_IN_SMOKE = 16, 16, 3, 2
SMALL = {
    "model": GptConfig(vocab_size=384, dim=48, layers=2, heads=4, context=64),
    "optimizer": OptimizerConfig(lr=5e-3),
    "rows": 2,
    "steps": 128,
    "held_out_rows": 64,
}
"""The quickstart's model made narrow, on 262,144 tokens; some 20 s of one core a run. Of 1.5e-3, 5e-3 and 1.5e-2 the
learning rate is the best for `everyone`, and for parameters averaged by all."""
FULL = {"model": GptConfig(), "optimizer": OptimizerConfig(), "rows": 1, "steps": 64, "held_out_rows": 32}
"""The quickstart's model and optimizer, and about as many steps as it takes, on 131,072 tokens; a minute of one core a
run."""
SMOKE = SMALL | {"model": GptConfig(vocab_size=384, dim=16, layers=1, heads=2, context=16), "steps": 17}
"""One step more than it takes all to meet."""
KEYS = (
    "tokens", "parameters", "seeds", "swapping_beats_fixed", "swapping_beats_fixed_with_sync", "fixed_above_grid",
    "fixed_above_grid_with_sync", "everyone, parameters_above_everyone", "grid+sync_above_everyone",
    "butterfly-groups+sync_above_everyone", "push-sum+sync_above_everyone", "fixed+sync_above_everyone",
    "grid_above_everyone", "fixed_above_everyone", "local 8_above_everyone", "local 32_above_everyone",
)  # fmt: skip
COLUMNS = ("candidate", "loss", "sd", "loss_of_one", "sd_of_one", "apart", "vectors_per_step", "bytes_per_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How one run ended: held-out loss of the replicas' mean, mean of the replicas' own, in nats per token; their
    distance from that mean as a share of its length; vectors that one replica sent; bytes of a vector."""

    loss: float
    loss_of_one: float
    apart: float
    vectors: float
    vector_bytes: int


def run(size: Size) -> Result:
    """Held-out loss after the same tokens under every averaging strategy, 16 replicas, and what each of them sent."""
    import torch

    from peers.data.text import built_in_corpus
    from tests.benchmarks._convergence_replicas import Scale, make_text

    torch.set_num_threads(1)
    scale = Scale(replicas=REPLICAS, **{Size.SMOKE: SMOKE, Size.DEFAULT: SMALL, Size.FULL: FULL}[size])
    corpus = built_in_corpus()
    runs: dict[str, list[Trained]] = {name: [] for name in candidates(scale)}
    for seed in range(SEEDS_IN_SMOKE if size is Size.SMOKE else SEEDS):
        with tempfile.TemporaryDirectory(prefix="convergence-") as root:
            text = make_text(Path(root), corpus, scale, seed)
            for name, make in candidates(scale).items():
                runs[name].append(train(scale, text, make(), seed))
                print(f"seed {seed}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    return Result(
        columns=COLUMNS,
        rows=[_row(name, trained, scale) for name, trained in runs.items()],
        summary=_summary(runs, scale),
        notes=(
            "loss: held out, nats per token, of the mean of all replicas' parameters; loss_of_one: each replica's own",
            "sd: over the seeds, which draw weights and text anew: compare within a seed, as the summary does",
            "everyone averages gradients; all others parameters, after AdamW on gradients of their own",
            "apart: distance of the replicas from their mean, root mean square, as a share of its length",
            "bytes_per_token: what a replica sends, by formula, float32 payload, for each token it trains on itself",
            f"groups of 4, but pairs for butterfly-groups, which are the grid's own with 4 of {REPLICAS}",
            f"+sync: all average every {SYNC} steps, but not after the last; AdamW's moments are never averaged",
            "same learning rate and schedule for all; each replica clips by the norm that it sees itself",
        ),
    )


def candidates(scale: Scale) -> Mapping[str, Callable[[], Mixing]]:
    """What is compared, by name."""
    from swarm.optim.outer import OuterNesterov
    from tests.benchmarks._convergence_mixing import Exact, Grouped, Local, Pushing

    grid, peers = STRATEGIES["grid"], scale.peers
    return {
        "everyone": Exact,
        "everyone, parameters": lambda: Grouped(STRATEGIES["everyone"], peers),
        "grid+sync": lambda: Grouped(grid, peers, SYNC),
        "butterfly-groups+sync": lambda: Grouped(ButterflyGroups(2), peers, SYNC),
        "push-sum+sync": lambda: Pushing(PushSum(), peers, SYNC),
        "fixed+sync": lambda: Grouped(grid, peers, SYNC, swap=False),
        "grid": lambda: Grouped(grid, peers),
        "fixed": lambda: Grouped(grid, peers, swap=False),
        "local 8": lambda: Local(8, OuterNesterov()),
        "local 32": lambda: Local(32, OuterNesterov()),
    }


def train(scale: Scale, text: Text, mixing: Mixing, seed: int) -> Trained:
    """One run from its first weights to its last step."""
    import torch

    from tests.benchmarks._convergence_mixing import Local
    from tests.benchmarks._convergence_replicas import Replicas

    replicas = Replicas(scale, text, seed)
    if isinstance(mixing, Local):
        mixing.start(replicas.params[0])
    vectors = 0.0
    for step in range(1, scale.steps + 1):
        replicas.step(mixing.gradients(replicas.gradients()), step)
        replicas.params = mixing.parameters(replicas.params, step, scale.steps)
        vectors += mixing.vectors(scale.replicas, step, scale.steps)
    middle = replicas.params.mean(0, keepdim=True)
    distances = torch.linalg.vector_norm(replicas.params - middle, dim=1)
    return Trained(
        loss=replicas.held_out_losses(middle)[0],
        loss_of_one=mean(replicas.held_out_losses(replicas.params)),
        apart=float(distances.square().mean().sqrt() / torch.linalg.vector_norm(middle)),
        vectors=vectors,
        vector_bytes=4 * replicas.elements,
    )


def _row(name: str, runs: list[Trained], scale: Scale) -> list[Cell]:
    losses, of_one = [run.loss for run in runs], [run.loss_of_one for run in runs]
    vectors = runs[0].vectors
    return [
        name,
        round(mean(losses), 4),
        round(stdev(losses), 4),
        round(mean(of_one), 4),
        round(stdev(of_one), 4),
        round(mean(run.apart for run in runs), 5),
        round(vectors / scale.steps, 3),
        round(vectors * runs[0].vector_bytes / scale.tokens, 1),
    ]


def _summary(runs: Mapping[str, list[Trained]], scale: Scale) -> dict[str, Any]:
    """Differences within each seed: above ``everyone``, and of fixed groups above those that swap."""

    def above(name: str, other: str) -> list[float]:
        return [round(one.loss - two.loss, 4) for one, two in zip(runs[name], runs[other], strict=True)]

    over, over_with_sync = above("fixed", "grid"), above("fixed+sync", "grid+sync")
    return {
        "tokens": scale.tokens * scale.replicas,
        "parameters": runs["everyone"][0].vector_bytes // 4,
        "seeds": len(runs["everyone"]),
        "swapping_beats_fixed": all(gap > 0 for gap in over),
        "swapping_beats_fixed_with_sync": all(gap > 0 for gap in over_with_sync),
        "fixed_above_grid": over,
        "fixed_above_grid_with_sync": over_with_sync,
        **{f"{name}_above_everyone": above(name, "everyone") for name in runs if name != "everyone"},
    }
