"""What a manifest asks of its peers in one step, as :mod:`swarm.planning` counts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarm.columns import columns, takes
from swarm.compression.names import AUTO
from swarm.config import Manifest
from swarm.membership.part_memory import part_bytes
from swarm.membership.rules import update_of
from swarm.models.family import ModelFamily
from swarm.models.layout import full_vectors
from swarm.models.loss import LOGITS_AT_ONCE
from swarm.models.registry import delinked_at, expert_interval, family_of, shares
from swarm.models.spec import PartSpec, SplitConfig
from swarm.pipeline.retention import RETENTION_BYTES
from swarm.planning.costs import apart_bytes, graph_bytes, palm_flops_per_token, training_flops_per_token
from swarm.planning.workload import PartNeeds, Workload

LOGITS_BYTES = 12
"""Of each, float32: it, its softmax, and its gradient."""


def workload_of(manifest: Manifest, kinds: Sequence[float] = ()) -> Workload:
    """Return what one step of a run asks for, whatever its manifest's cut. Where stages have variants, there is as much
    text of each kind or domain as ``kinds`` say, in proportion, by default of each alike. Cost: some parts are built
    without weights; milliseconds for our own models, a second for large foreign ones."""
    model, family = manifest.model, family_of(manifest.model)
    context, hosted = model.context, manifest.split.ends == "hosted"
    body, ends = family.parts(SplitConfig(stages=1, ends="private", tensor=manifest.split.tensor))
    layer = _largest([_needs(manifest, family, replace(body, first_layer=at, last_layer=at + 1))
                      for at in sorted({0, family.layers // 2, family.layers - 1})])  # fmt: skip
    layer = replace(layer, flops=family.cost(body, context).forward_flops / family.layers)
    first = replace(body, last_layer=1)
    if hosted:
        bare = _needs(manifest, family, first)
        embedding = _less(_needs(manifest, family, replace(first, embedding=True)), bare)
        last = replace(body, first_layer=family.layers - 1)
        head = _less(_needs(manifest, family, replace(last, head=True)), _needs(manifest, family, last))
    else:
        embedding, head = _needs(manifest, family, ends), PartNeeds()
    forward, backward = _on_the_wire(manifest, family)
    rows = manifest.batch.microbatch_size * manifest.step_microbatches
    logits = LOGITS_BYTES * context * model.vocab_size
    return Workload(
        layers=family.layers, layer=layer, embedding=embedding, head=head, hosted=hosted, context=context, rows=rows,
        rows_asked=manifest.batch.microbatch_size, activation_bytes=forward, gradient_bytes=backward,
        logits_bytes=logits, most_logits_bytes=LOGITS_BYTES * max(LOGITS_AT_ONCE, model.vocab_size),
        averaged_bytes=averaged_bytes(manifest), copies=manifest.run.copies,
        copy_bytes=4.0 * full_vectors(update_of(manifest).vectors), retention_bytes=RETENTION_BYTES,
        palm_flops=palm_flops_per_token(model, context),
        causal_flops=training_flops_per_token(model, family.whole, context),
        loads=_loads(manifest.split, kinds or (1.0,) * manifest.split.choices),
        alike=max(1, expert_interval(model)) if shares(model) else 0,
        shared=shares(model) and not delinked_at(model),
    )  # fmt: skip


def _loads(split: SplitConfig, kinds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """See :attr:`~swarm.planning.workload.Workload.loads`."""
    if not split.variants:
        return ()
    return tuple(
        tuple(sum(kind for choice, kind in enumerate(kinds) if takes(part, choice)) / sum(kinds) for part in there)
        for there in columns(split.parts)
    )


def _needs(manifest: Manifest, family: ModelFamily, spec: PartSpec) -> PartNeeds:
    model, cost = manifest.model, family.cost(spec, manifest.model.context)
    overlap, exact = manifest.speed.overlaps, manifest.run.reproducible
    return PartNeeds(
        flops=cost.forward_flops,
        parameters=cost.parameters,
        held=sum(part_bytes(manifest, spec).values()),
        apart=apart_bytes(model, spec, exact=exact, overlap=overlap),
        graph=graph_bytes(model, spec, 1),
        thrifty=graph_bytes(model, spec, 1, checkpointing=True),
    )


def _largest(each: list[PartNeeds]) -> PartNeeds:
    keys = PartNeeds.__dataclass_fields__
    return PartNeeds(*(max(getattr(one, key) for one in each) for key in keys))


def _less(whole: PartNeeds, without: PartNeeds) -> PartNeeds:
    return whole + without.times(-1)


def _on_the_wire(manifest: Manifest, family: ModelFamily) -> tuple[int, int]:
    """Bytes of a row's activation, and of its gradient; as they are where records choose, which is the most."""
    from swarm.compression.registry import codec_named  # torch: after a file is known to be right

    crossing, codecs = family.boundary(1, manifest.model.context), manifest.codecs
    exact = "float32" if crossing.dtype == "float32" else "bfloat16"
    forward, backward = (exact if name == AUTO else name for name in (codecs.activations, codecs.gradients))
    return codec_named(forward).wire_bytes(crossing), codec_named(backward).wire_bytes(crossing)


def averaged_bytes(manifest: Manifest) -> float:
    """Of a parameter, one way, in the mean of a step's rounds: exact sums take one and a half times the bytes, mixings
    between two closes send float32, and a close of fragments one of them."""
    from swarm.compression.registry import codec_named
    from swarm.models.spec import TensorSpec

    many = TensorSpec((1 << 16,), "float32")
    plain = codec_named(manifest.averaging.codec).wire_bytes(many) / many.elements
    if manifest.run.reproducible:
        return plain * 1.5
    if manifest.averaging.mode == "sync":
        return plain
    local = manifest.averaging.local
    return (plain / local.fragments + 4.0 * (local.sync_every - 1)) / local.sync_every
