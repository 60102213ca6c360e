"""Swarm against loop, after the last step and step by step: how far apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swarm.models.lora import Stored
from swarm.models.registry import family_of
from swarm.state.checkpoints.parts import load_weights
from tests.benchmarks._parity_replay import ExactLoop, replay
from tests.benchmarks._parity_run import Incoherent, TrainedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A reproducible run beside its replay.

    ``weights`` is the largest difference of a weight after the last step, ``losses`` how many microbatches have another
    loss, ``digests`` how many parts and steps another digest, and ``moved`` how far training has carried a weight from
    its start: without movement agreement means nothing.
    """

    weights: float
    losses: int
    digests: int
    moved: float
    first_loss: float
    last_loss: float

    @property
    def exact(self) -> bool:
        """Whether all bits are those of one process, after real training."""
        return (self.weights, self.losses, self.digests) == (0.0, 0, 0) and self.moved > 0.0

    def figures(self, killed: Sequence[str]) -> dict[str, Any]:
        """For the table, with who was killed."""
        return {
            "killed": ", ".join(killed),
            "max_abs_diff": self.weights,
            "losses and digests differing": self.losses + self.digests,
            "loss": f"{self.first_loss:.4f} to {self.last_loss:.4f}",
        }


def compare(run: TrainedRun, files: Path, base: Mapping[str, Stored] | None = None) -> Comparison:
    """A run that began with the weights of ``files``, against the loop that does its arithmetic; ``base`` are the
    frozen weights of one that trains adapters."""
    manifest, records = run.manifest, run.records[1:]
    replayed = replay(run, ExactLoop(manifest, files, base))
    losses = digests = 0
    for record, step in zip(records, replayed.steps, strict=True):
        told = [contribution.loss_sum for contribution in record.committed]
        losses += sum(ours != theirs for ours, theirs in zip(step.loss_sums, told, strict=True))
        digests += sum(record.digests[part] != ours for part, ours in step.digests.items())
        if record.digests.keys() != step.digests.keys():
            raise Incoherent(f"digests of {sorted(record.digests)} where {sorted(step.digests)} are the parts")
        if not math.isfinite(step.loss) or not math.isfinite(record.loss):
            raise Incoherent("a loss is not finite")
    trained = load_weights(run.directory.checkpoints, manifest.run.steps)
    start = family_of(manifest.model).initial_weights(manifest.run.seed, files=files)
    return Comparison(
        weights=distance(trained, replayed.weights),
        losses=losses,
        digests=digests,
        moved=distance(trained, start),
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
    )


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of a number. Raises Incoherent for other names or shapes, and for values that are not
    finite, which no comparison would notice."""
    if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in expected.items()}:
        raise Incoherent(f"tensors {sorted(found)} where {sorted(expected)} are expected")
    worst = 0.0
    for name, reference in expected.items():
        difference = found[name].double() - reference.double()
        if not bool(difference.isfinite().all()):
            raise Incoherent(f"{name} is not finite")
        worst = max(worst, float(difference.abs().max()))
    return worst
