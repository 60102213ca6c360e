"""One optimizer of the benchmark ``memory``: how much a parameter takes, and what a run with it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarm.membership.memory import storage_bytes
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.adafactor import Adafactor
from swarm.optim.adamw import AdamW
from swarm.optim.muon import Muon
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.sgd import Sgd
from swarm.state.snapshot import Snapshot
from tests.benchmarks._delink_case import TRAINERS, loss_of, texts_of, trained

UPDATES = {"adamw": AdamW, "adafactor": Adafactor, "sgd": Sgd, "muon": Muon}
WIDE = GptConfig(vocab_size=300, dim=512, layers=2, heads=4, context=64)
"""Of which bytes are counted: rows and columns as long as those of models that people train."""


def play(root: Path, *, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Count and train.

    Args:
        root: An empty directory.
        name: Of the optimizer.
        seed: Of text and run.
        steps: Of the run.

    Returns:
        ``bytes`` a parameter of state and gradients, and ``loss`` in nats a token on text that the run has not seen.
    """
    texts, held_out = texts_of(seed, TRAINERS)
    run = trained(root / "run", texts, seed, steps, optimizer={"name": name})
    loss = loss_of(run, steps, held_out, root / "test")
    return {"name": name, "seed": seed, "bytes": _bytes_a_parameter(name), "loss": loss}


def _bytes_a_parameter(name: str) -> float:
    """Of a stage of which nothing is under way."""
    (spec, _) = family_of(WIDE).parts(SplitConfig(stages=1, ends="private"))
    part = TrainedPart(spec, WIDE, UPDATES[name](OptimizerConfig()))
    part.install(Snapshot.blank(spec.name, 0, part.layout))
    found = storage_bytes(part.tensors())
    return (found["weights"] + found["optimizer"] + found["gradients"]) / part.layout.elements
