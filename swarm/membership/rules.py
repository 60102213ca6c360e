"""What the manifest says about every step."""

from __future__ import annotations

import math

from swarm.config import Manifest
from swarm.consensus.records import record_room
from swarm.models.registry import family_of
from swarm.network.protocols import MAX_BODY_BYTES
from swarm.optim.local_part import LocalRules
from swarm.optim.update import AdamW, Outer, OuterNesterov, Update
from swarm.planning.costs import model_parameter_count
from swarm.step.rules import StepRules

FAR = 2.0
"""How much farther than a learning rate a step of AdamW may move an element, with its weight decay."""


def local_rules_of(manifest: Manifest) -> LocalRules:
    """What the manifest says about training apart."""
    batch, averaging = manifest.batch, manifest.averaging
    return LocalRules(
        batch=batch.microbatches_per_step,
        tokens=batch.microbatch_size * manifest.model.context,
        mix_after=averaging.local.steps,
        inner_steps=averaging.inner_steps,
        steps=manifest.run.steps,
        optimizer=manifest.optimizer,
        outer=_outer(manifest),
    )


def reach_of(manifest: Manifest) -> float:
    """How far the weights of an honest replica can be from where all began, L2 norm, when it trains apart: AdamW moves
    an element by little more than the learning rate, and one replica may take every microbatch of a step."""
    elements = model_parameter_count(manifest.model)
    steps = manifest.averaging.inner_steps * manifest.run.start_when.stage_hosts
    return FAR * manifest.optimizer.lr * steps * math.sqrt(elements)


def update_of(manifest: Manifest) -> Update:
    """What a step's mean does to the weights."""
    return Outer(_outer(manifest)) if manifest.averaging.mode == "local" else AdamW(manifest.optimizer)


def _outer(manifest: Manifest) -> OuterNesterov:
    local = manifest.averaging.local
    return OuterNesterov(local.outer_lr, local.outer_momentum)


def rules_of(manifest: Manifest) -> StepRules:
    """What the manifest says about every step."""
    batch, stages, target = manifest.batch, manifest.split.stages, manifest.step_microbatches
    return StepRules(
        run=manifest.run_id,
        steps=manifest.run.steps,
        target=target,
        max_share=batch.max_share,
        max_tokens=batch.microbatch_size * manifest.model.context,
        stages=stages,
        parts=tuple(spec.name for spec in family_of(manifest.model).parts(manifest.split)),
        max_members=record_room(target, stages, MAX_BODY_BYTES),
        reproducible=manifest.run.reproducible,
        optimizer=manifest.optimizer,
        quorum_grace_s=manifest.run.quorum_grace_s,
        inner_steps=manifest.averaging.inner_steps,
        clip_norm=reach_of(manifest) if manifest.averaging.mode == "local" else manifest.optimizer.clip_norm,
        served=manifest.averaging.closing_strategy == "server",
    )
