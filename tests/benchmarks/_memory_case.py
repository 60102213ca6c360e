"""One optimizer or model of the benchmark ``memory``: how many bytes it takes, and what a run with it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
DENSE = GptConfig(vocab_size=300, dim=64, layers=4, heads=2, context=64)
MODELS: dict[str, dict[str, Any]] = {
    "sparse": {"sparsity": 0.75},
    "narrower": {"dim": 36, "ffn_dim": 124},
}
"""Of no fewer bytes than the sparse one, those of both ends among them: what sets each apart from the dense model."""


def play(root: Path, *, name: str, seed: int, steps: int, rate: float = 3e-3) -> dict[str, Any]:
    """Count and train.

    Args:
        root: An empty directory.
        name: Of the optimizer or model.
        seed: Of text and run.
        steps: Of the run.
        rate: The highest learning rate.

    Returns:
        Name, seed and rate, ``bytes`` a parameter of state and gradients, and ``loss`` in nats a token on text that the
        run has not seen.
    """
    texts, held_out = texts_of(seed, TRAINERS)
    if name in MODELS:
        sections = {"optimizer": {"lr": rate}, "model": MODELS[name]}
        (held, _), (_, of) = (_bytes(DENSE.model_copy(update=each), "adamw", 2) for each in (MODELS[name], {}))
    else:
        sections = {"optimizer": {"name": name, "lr": rate}}
        held, of = _bytes(WIDE, name, 1)
    run = trained(root / "run", texts, seed, steps, **sections)
    loss = loss_of(run, steps, held_out, root / "test")
    return {"name": name, "seed": seed, "rate": rate, "bytes": held / of, "loss": loss}


def _bytes(model: GptConfig, optimizer: str, parts: int) -> tuple[int, int]:
    """Of so many parts, the ends last, of which nothing is under way; and their elements."""
    held = elements = 0
    for spec in family_of(model).parts(SplitConfig(stages=1, ends="private"))[:parts]:
        part = TrainedPart(spec, model, UPDATES[optimizer](OptimizerConfig()))
        part.install(Snapshot.blank(spec.name, 0, part.layout))
        if not spec.embedding:
            part.forward(torch.zeros(1, 8, model.dim), seed=None, graph=False)  # what it makes once is there then
        found = storage_bytes(part.tensors())
        held += found["weights"] + found["optimizer"] + found["gradients"]
        elements += part.layout.elements
    return held, elements
