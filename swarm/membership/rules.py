"""What the manifest says about every step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from swarm.columns import becomes
from swarm.compression.registry import codec_named
from swarm.config import Manifest
from swarm.consensus.admissions import AdmissionPolicy
from swarm.consensus.records import NO_RECORD, record_room
from swarm.errors import StateError
from swarm.ids import PartName, shared_by
from swarm.models.registry import delinked_at, expert_interval, family_of, lora_of, steering
from swarm.models.spec import PartSpec, TensorSpec
from swarm.network.protocols import MAX_BODY_BYTES
from swarm.optim.adafactor import Adafactor
from swarm.optim.adamw import AdamW
from swarm.optim.local_part import LocalRules
from swarm.optim.muon import Muon
from swarm.optim.outer import LONGEST, Outer, OuterNesterov
from swarm.optim.part import Parting
from swarm.optim.schedules import OptimizerConfig
from swarm.optim.sgd import Sgd
from swarm.optim.tallies import Steering
from swarm.optim.update import Update
from swarm.planning.costs import model_parameter_count
from swarm.step.boundary_codecs import CodecRules
from swarm.step.lateness import ALL, LateRules
from swarm.step.moves import MoveRules
from swarm.step.rules import StepRules

MOST_LOSS = 16.0
"""So many times the logarithm of the vocabulary, which is an untrained model's loss, no microbatch has. A model that a
replica corrupts step after step comes to some four times as much, and may get well: its trainers are honest."""

FAR = 2.0
"""How much farther than a learning rate a step of AdamW may move an element, with its weight decay."""


def local_rules_of(manifest: Manifest) -> LocalRules:
    """Return what the manifest says about training apart."""
    batch, averaging = manifest.batch, manifest.averaging
    return LocalRules(
        batch=batch.microbatches_per_step,
        tokens=batch.microbatch_size * manifest.model.context,
        mix_after=averaging.local.steps,
        inner_steps=averaging.inner_steps,
        steps=manifest.run.steps,
        optimizer=manifest.optimizer,
        inner=optimizer_of(manifest),
        outer=_outer(manifest),
        mixing_weight=averaging.local.mixing_weight,
    )


def most_loss(manifest: Manifest) -> float:
    """Return the most nats a token that a microbatch can have."""
    return MOST_LOSS * math.log(manifest.model.vocab_size)


def reach_of(manifest: Manifest) -> float:
    """Return how far the weights of an honest replica can be from where all began, L2 norm, when it trains apart: AdamW
    moves an element by little more than the learning rate, as does Muon on the average, and one replica may take every
    microbatch of a step. With fragments, those of one fragment, which has its turn after so many steps; and what a
    replica keeps next to the anchor adds up."""
    optimizer, local = manifest.optimizer, manifest.averaging.local
    elements = _largest_share(manifest) * model_parameter_count(manifest.model)
    steps = manifest.averaging.inner_steps * manifest.run.start_when.stage_hosts * local.fragments / local.mixing_weight
    width = math.sqrt(elements)
    if optimizer.name == "sgd":  # its step is as long as the gradient, and momentum adds up many
        width = max(width, optimizer.clip_norm / (1.0 - optimizer.momentum))
    return FAR * optimizer.lr * steps * width


def update_of(manifest: Manifest) -> Update:
    """Return what a step's mean does to the weights."""
    return _outer(manifest) if manifest.averaging.mode == "local" else optimizer_of(manifest)


def optimizer_of(manifest: Manifest) -> Update:
    """The optimizer that a manifest names, and what steers experts."""
    named = _named(manifest.optimizer)
    return Steering(named, steering(manifest.model)) if expert_interval(manifest.model) else named


def _named(config: OptimizerConfig) -> Update:
    match config.name:
        case "sgd":
            return Sgd(config)
        case "muon":
            return Muon(config)
        case "adafactor":
            return Adafactor(config)
    return AdamW(config)


def _outer(manifest: Manifest) -> Outer:
    local = manifest.averaging.local
    return Outer(OuterNesterov(local.outer_lr, local.outer_momentum), local.fragments)


def _largest_share(manifest: Manifest) -> float:
    """Of a part, in what one step averages."""
    averaging = manifest.averaging
    return min(1.0, LONGEST / averaging.local.fragments) if averaging.mode == "local" else 1.0


def averaged_bytes(manifest: Manifest) -> dict[PartName, int]:
    """Bytes of each part's sum when it is averaged, about, as far as no codec makes them fewer."""
    family, item = family_of(manifest.model), 8 if manifest.run.reproducible else 4
    parts, share = [spec_of(manifest, name) for cut in manifest.cuts for name in cut], _largest_share(manifest)
    sizes = {part.name: item * family.cost(part, manifest.model.context).parameters for part in parts}
    return {part: math.ceil(size * share) for part, size in sizes.items()}


def step_bytes(part_bytes: int, microbatches: int, payload_bytes: int, replicas: int) -> int:
    """Return how many bytes one of so many replicas of a part sends in a step, and receives, about. Pure.

    Args:
        part_bytes: Of the part's sum when it is averaged.
        microbatches: Of the whole step; the replicas share them evenly.
        payload_bytes: Of an activation and a gradient, which each passes on for each of its own.
        replicas: How many there are, this one included.
    """
    return math.ceil(microbatches * payload_bytes / replicas + 2 * part_bytes * (replicas - 1) / replicas)


def codec_rules(manifest: Manifest) -> CodecRules:
    """Return what the manifest says of boundaries."""
    model, rows = manifest.model, manifest.batch.microbatch_size
    return CodecRules(
        activation=family_of(model).boundary(rows, model.context),
        stages=manifest.split.stages,
        hosted=manifest.split.ends == "hosted",
        forward=manifest.codecs.activations,
        backward=manifest.codecs.gradients,
    )


def move_rules(manifest: Manifest) -> MoveRules:
    """Return what the manifest says of moving between stages. Where hops are audited two replicas stay: what one alone
    does nobody else of its stage could compute again."""
    return MoveRules(
        on=manifest.rebalance.moves,
        copies=manifest.run.copies,
        steps=manifest.run.steps,
        codecs=codec_rules(manifest),
        kept=2 if manifest.verify.audit else 1,
    )


def admission_policy(manifest: Manifest) -> AdmissionPolicy:
    """Return what the manifest says of who may take part, and hold what."""
    split = manifest.split
    return AdmissionPolicy(manifest.run_id, manifest.admission, split.own_routes, split.owners)


def late_rules(manifest: Manifest) -> LateRules:
    """Return what the manifest says of replicas that are late for a close."""
    averaging, local = manifest.averaging, manifest.averaging.local
    if averaging.mode != "local":
        return ALL
    return LateRules(
        quorum=local.quorum,
        grace=local.grace,
        may_miss=local.may_miss,
        last=manifest.run.steps,
        weighed=local.fragments == 1,
        encoded=_encoded(averaging.codec),
    )


def _encoded(codec: str) -> float:
    """Bytes that carry one of a float32 sum, with this codec of averaging."""
    many = TensorSpec((1 << 16,), "float32")
    return codec_named(codec).wire_bytes(many) / (4 * many.elements)


def _begins_after(manifest: Manifest) -> tuple[int, str] | None:
    """Return what the first record of a run says that goes on with another's checkpoint: a genesis has none before
    it."""
    parent = manifest.run.parent
    return None if parent is None else (parent.step, parent.record if parent.step else NO_RECORD)


def _frozen(manifest: Manifest) -> Mapping[PartName, int]:
    """The parts of which nothing is trained, as those without adapters where only these are. Builds each, without its
    weights."""
    if lora_of(manifest.model) is None:
        return {}
    family = family_of(manifest.model)
    layouts = {spec.name: family.layout(family.build(spec)) for spec in family.parts(manifest.split)}
    return {name: layout.elements for name, layout in layouts.items() if not layout.slots}


def rules_of(manifest: Manifest) -> StepRules:
    """Return what the manifest says about every step."""
    batch, stages, target = manifest.batch, manifest.split.stages, manifest.step_microbatches
    return StepRules(
        run=manifest.run_id,
        steps=manifest.run.steps,
        target=target,
        max_share=batch.max_share,
        max_tokens=batch.microbatch_size * manifest.model.context,
        max_members=record_room(target, stages, MAX_BODY_BYTES, closed=manifest.admission.closed),
        reproducible=manifest.run.reproducible,
        choices=manifest.split.choices,
        optimizer=manifest.optimizer,
        quorum_grace_s=manifest.run.quorum_grace_s,
        wait_for_lost_s=manifest.run.wait_for_lost_s,
        rewind=manifest.run.rewind,
        inner_steps=manifest.averaging.inner_steps,
        clip_norm=reach_of(manifest) if manifest.averaging.mode == "local" else manifest.optimizer.clip_norm,
        part_bytes=averaged_bytes(manifest),
        one_reduces=manifest.averaging.closing_strategy in ("server", "hierarchy"),
        served=manifest.averaging.closing_strategy == "server",
        codecs=codec_rules(manifest),
        moves=move_rules(manifest),
        lateness=late_rules(manifest),
        frozen=_frozen(manifest),
        begins_after=_begins_after(manifest),
        max_loss=most_loss(manifest),
        guards=manifest.averaging.guard != "none",
        influence=manifest.optimizer.influence,
        tries_trainers=manifest.optimizer.trainer_test,
        admission=admission_policy(manifest),
        delink_at=delinked_at(manifest.model),
        early=math.floor(manifest.speed.early_share * target) if manifest.speed.overlaps else 0,
    )


def parting_of(manifest: Manifest, name: PartName) -> Parting | None:
    """Return what becomes of a part of the run that stages share; None for any other, and where they share it to the
    end. Builds them without weights."""
    if not shared_by(name) or not (step := delinked_at(manifest.model)):
        return None
    family, vectors = family_of(manifest.model), update_of(manifest).vectors
    specs = [spec_of(manifest, part) for part in becomes(name)]
    return Parting(step, {spec.name: family.layout(family.build(spec)).kept_by(vectors) for spec in specs})


def spec_of(manifest: Manifest, name: PartName) -> PartSpec:
    """Return what a part of the run's model is made of. Raises StateError for one that the model does not have."""
    spec = family_of(manifest.model).part(manifest.split, name)
    if spec is None:
        raise StateError(f"{name} is not a part of this run's model")
    return spec
