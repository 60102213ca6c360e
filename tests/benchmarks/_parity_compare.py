"""Swarm against loop, after the last step and step by step: how far apart, and where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from swarm.models.lora import Stored
from swarm.models.registry import family_of
from swarm.state.checkpoints.parts import load_weights
from tests.benchmarks._parity_replay import ExactLoop, PlainLoop, Replay, replay
from tests.benchmarks._parity_run import Incoherent, TrainedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far two models are apart. ``rel`` is the worst tensor's ‖Δw‖/‖w‖, ``tensor`` its name, ``abs`` max |Δw|
    over all; 0 means the same bits, but for the sign of a zero."""

    rel: float
    abs: float
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One run alongside its replay.

    ``distance`` is after the last step, ``loss_rel`` the worst relative difference of a step's loss. ``clipped`` counts
    the steps whose gradient was too long, ``epochs`` the passes over a shard that were begun, and ``moved`` is how far
    training has carried the worst tensor from its start: without movement agreement means nothing.

    Beside a float32 run, what rounding alone does in one process on the same microbatches: ``order_rel`` is the plain
    loop against itself with each step's microbatches backwards, ``adamw_rel`` against the loop with the project's sums
    and AdamW. Of an exact replay: how many microbatches have another loss, and how many parts and steps another digest.
    """

    layout: str
    reproducible: bool
    steps: int
    microbatches: int
    clipped: int
    epochs: int
    distance: Distance
    loss_rel: float
    moved: float
    first_loss: float
    last_loss: float
    order_rel: float | None = None
    adamw_rel: float | None = None
    losses_differing: int | None = None
    digests_differing: int | None = None
    run_s: float
    replay_s: float


def compare_plain(run: TrainedRun) -> Comparison:
    """A run with float32 sums against plain PyTorch. Replays three times, to tell what rounding alone does."""
    began = monotonic()
    replayed = replay(run, PlainLoop(run.manifest))
    seconds = monotonic() - began
    backwards = replay(run, PlainLoop(run.manifest), backwards=True)
    exact = replay(run, ExactLoop(run.manifest))
    return replace(
        _comparison(run, replayed, seconds),
        order_rel=distance(backwards.weights, replayed.weights).rel,
        adamw_rel=distance(exact.weights, replayed.weights).rel,
    )


def compare_exact(run: TrainedRun, files: Path | None = None, base: Mapping[str, Stored] | None = None) -> Comparison:
    """A reproducible run, which began with the weights of ``files`` or random ones, against the loop that does its
    arithmetic; ``base`` are the frozen weights of one that trains adapters."""
    began = monotonic()
    replayed = replay(run, ExactLoop(run.manifest, files, base))
    seconds = monotonic() - began
    losses = digests = 0
    for record, step in zip(run.records[1:], replayed.steps, strict=True):
        told = [contribution.loss_sum for contribution in record.committed]
        losses += sum(ours != theirs for ours, theirs in zip(step.loss_sums, told, strict=True))
        digests += sum(record.digests[part] != ours for part, ours in step.digests.items())
        if record.digests.keys() != step.digests.keys():
            raise Incoherent(f"digests of {sorted(record.digests)} where {sorted(step.digests)} are the parts")
    return replace(_comparison(run, replayed, seconds, files), losses_differing=losses, digests_differing=digests)


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Distance:
    """How far ``found`` is from ``expected``, norms in float64. Raises Incoherent for other names or shapes, and for
    values that are not finite, which no comparison would notice."""
    if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in expected.items()}:
        raise Incoherent(f"tensors {sorted(found)} where {sorted(expected)} are expected")
    rel, worst, tensor = -1.0, 0.0, ""
    for name, reference in expected.items():
        difference = found[name].double() - reference.double()
        if not bool(difference.isfinite().all()):
            raise Incoherent(f"{name} is not finite")
        share = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(reference.double()))
        worst = max(worst, float(difference.abs().max()))
        if share > rel:
            rel, tensor = share, name
    return Distance(rel=rel, abs=worst, tensor=tensor)


def _comparison(run: TrainedRun, replayed: Replay, seconds: float, files: Path | None = None) -> Comparison:
    manifest, records = run.manifest, run.records[1:]
    trained = load_weights(run.directory.checkpoints, manifest.run.steps)
    start = family_of(manifest.model).initial_weights(manifest.run.seed, files=files)
    relative = [abs(step.loss / record.loss - 1.0) for step, record in zip(replayed.steps, records, strict=True)]
    if not all(map(math.isfinite, relative)):
        raise Incoherent("a loss is not finite")
    return Comparison(
        layout=run.layout.name,
        reproducible=manifest.run.reproducible,
        steps=len(records),
        microbatches=sum(len(record.committed) for record in records),
        clipped=sum(record.clip < 1.0 for record in records),
        epochs=1 + max(c.microbatch.epoch for record in records for c in record.committed),
        distance=distance(trained, replayed.weights),
        loss_rel=max(relative),
        moved=distance(trained, start).rel,
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        run_s=run.seconds,
        replay_s=seconds,
    )
