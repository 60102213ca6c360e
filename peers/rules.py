"""What the manifest says about every step."""

from __future__ import annotations

from swarm.config import Manifest
from swarm.models.split import split_model
from swarm.network.protocols import MAX_BODY_BYTES
from swarm.optimization.records import record_room
from swarm.optimization.rules import StepRules


def rules_of(manifest: Manifest) -> StepRules:
    """What the manifest says about every step."""
    batch, stages = manifest.batch, manifest.split.stages
    return StepRules(
        run=manifest.run_id,
        steps=manifest.run.steps,
        target=batch.microbatches_per_step,
        max_share=batch.max_share,
        max_tokens=batch.microbatch_size * manifest.model.context,
        stages=stages,
        parts=tuple(spec.name for spec in split_model(manifest.model, manifest.split)),
        max_members=record_room(batch.microbatches_per_step, stages, MAX_BODY_BYTES),
        reproducible=manifest.run.reproducible,
        optimizer=manifest.optimizer,
        quorum_grace_s=manifest.run.quorum_grace_s,
        served=manifest.averaging.strategy == "server",
    )
