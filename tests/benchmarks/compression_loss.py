"""What compressing boundaries and averaging costs in loss and saves in bytes: the same model, tokens and text."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from swarm.models.gpt_config import GptConfig
from swarm.optim.schedules import OptimizerConfig
from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._compression_team import Codecs

REPLICAS = 2
MODEL = {"model": GptConfig(), "optimizer": OptimizerConfig(), "replicas": REPLICAS, "held_out_rows": 64}
DEFAULT = MODEL | {"rows": 8, "steps": 40}
"""The quickstart's model, optimizer and microbatch; twice its steps, and an eighth of its tokens in each."""
FULL = MODEL | {"rows": 8, "steps": 80}
SMOKE = MODEL | {
    "model": GptConfig(vocab_size=384, dim=16, layers=2, heads=2, context=16),
    "rows": 2,
    "steps": 4,
    "held_out_rows": 8,
}
MICROBATCHES = 1
"""Of each replica, in each step."""
SEEDS_IN_FULL = 3
APART = 4
"""Steps of a replica alone in `local` mode: ten closes by default."""
LOCAL = "local"
BARS = {"boundaries int8h": 0.5, "boundaries int4h": 1.0}
"""How much higher than dense the held-out loss may be, in percent."""
KEYS = (
    "tokens", "parameters", "seeds", "dense_loss", "dense_spread_percent", "above_dense_percent", "of_dense_bytes",
    "int8h_bar_percent", "int8h_within", "int4h_bar_percent", "int4h_within", "above_local_percent",
)  # fmt: skip
COLUMNS = (
    "candidate", "loss", "above_dense_percent", "least", "most", "boundary_bytes_a_token", "averaging_bytes_a_token",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """How one run ended: held-out loss in nats a token, bytes that crossed boundaries and that averaging sent."""

    loss: float
    boundary_bytes: int
    averaging_bytes: int


def candidates() -> Mapping[str, Codecs]:
    """What is compared, by name. Dense comes twice, the second time in a model that begins a last bit away: how far
    apart two runs end that differ by nothing that matters."""
    from tests.benchmarks._compression_team import Codecs

    return {
        "dense": Codecs(),
        "dense, another last bit": Codecs(nudged=True),
        "boundaries int8": Codecs(boundaries="int8"),
        "boundaries int8h": Codecs(boundaries="int8h"),
        "boundaries int4h": Codecs(boundaries="int4h"),
        "averaging int8": Codecs(averaging="int8"),
        "averaging int4h": Codecs(averaging="int4h"),
        "averaging int4h, nothing fed back": Codecs(averaging="int4h", feedback=False),
        "boundaries int8h, averaging int4h": Codecs(boundaries="int8h", averaging="int4h"),
        LOCAL: Codecs(apart=APART),
        f"{LOCAL}, deltas int4h": Codecs(apart=APART, averaging="int4h"),
        f"{LOCAL}, deltas int4h, nothing fed back": Codecs(apart=APART, averaging="int4h", feedback=False),
    }


def run(size: Size) -> Result:
    """Held-out loss after the same tokens with each codec at boundaries and in averaging, beside dense, and bytes."""
    import torch

    from peers.data.text import built_in_corpus
    from swarm.models.registry import family_of
    from swarm.sim.loop import run_world
    from tests.benchmarks._compression_team import Team
    from tests.benchmarks._convergence_replicas import Scale, make_text

    torch.set_num_threads(1)
    scale = Scale(**{Size.SMOKE: SMOKE, Size.DEFAULT: DEFAULT, Size.FULL: FULL}[size])  # type: ignore[arg-type]
    corpus = built_in_corpus()
    runs: dict[str, list[Compressed]] = {name: [] for name in candidates()}
    for seed in range(SEEDS_IN_FULL if size is Size.FULL else 1):
        with tempfile.TemporaryDirectory(prefix="compression-") as root:
            text = make_text(Path(root), corpus, scale, seed)
            for name, codecs in candidates().items():
                team = Team(scale, text, codecs, seed)
                loss = run_world(team.train(MICROBATCHES))
                runs[name].append(
                    Compressed(loss=loss, boundary_bytes=team.boundary_bytes, averaging_bytes=team.averaging_bytes)
                )
                print(f"seed {seed}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    tokens = scale.tokens * MICROBATCHES * REPLICAS
    parameters = family_of(scale.model).cost(family_of(scale.model).whole, scale.model.context).parameters
    return Result(
        columns=COLUMNS,
        rows=[_row(name, found, runs["dense"], tokens) for name, found in runs.items()],
        summary={"tokens": tokens, "parameters": parameters, **_summary(runs)},
        notes=(
            "loss: held out, nats a token, of weights that nothing was rounded for; above_dense_percent: mean over the "
            "seeds of loss ÷ dense's of the same seed, least and most of them",
            f"{REPLICAS} replicas of each of two stages and of the ends, in one process: boundaries, rounds and "
            "optimizer are the product's own; bytes are payload, of all replicas, for each token of the run",
            f"local: replicas take {APART} steps alone, then average deltas, in float32 where nothing else is said, by "
            "the outer Nesterov's defaults; above_local_percent: beside the same in float32",
            "dense, another last bit: what two runs differ by that do the same; less than that is no difference",
        ),
    )


def _above(found: list[Compressed], dense: list[Compressed]) -> list[float]:
    return [100 * (one.loss / other.loss - 1) for one, other in zip(found, dense, strict=True)]


def _row(name: str, found: list[Compressed], dense: list[Compressed], tokens: int) -> list[Cell]:
    above = _above(found, dense)
    return [
        name,
        round(mean(one.loss for one in found), 4),
        *(round(value, 3) for value in (mean(above), min(above), max(above))),
        round(found[0].boundary_bytes / tokens, 1),
        round(found[0].averaging_bytes / tokens, 1),
    ]


def _summary(runs: Mapping[str, list[Compressed]]) -> dict[str, Any]:
    dense = runs["dense"]
    above = {name: round(mean(_above(found, dense)), 3) for name, found in runs.items() if name != "dense"}
    whole = dense[0].boundary_bytes + dense[0].averaging_bytes
    bytes_of = {name: found[0].boundary_bytes + found[0].averaging_bytes for name, found in runs.items()}
    apart = {name: _above(found, runs[LOCAL]) for name, found in runs.items() if name.startswith(f"{LOCAL},")}
    spread = above.pop("dense, another last bit")
    return {
        "seeds": len(dense),
        "dense_loss": round(mean(one.loss for one in dense), 4),
        "dense_spread_percent": spread,
        "above_dense_percent": above,
        "above_local_percent": {name: round(mean(values), 3) for name, values in apart.items()},
        "of_dense_bytes": {name: round(bytes_of[name] / whole, 3) for name in above},
        **{f"{name.split()[1]}_bar_percent": bar for name, bar in BARS.items()},
        **{f"{name.split()[1]}_within": above[name] <= bar for name, bar in BARS.items()},
    }
