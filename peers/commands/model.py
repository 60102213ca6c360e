"""``swarm model check``: what a model of transformers is made of, how it may be cut, what a peer needs for a part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data_shards.tokenize import Tokenizer
from peers.console.words import count, listed
from peers.foreign_model import ForeignModel, find_model
from swarm.disk import size_text
from swarm.errors import ConfigError, StateError
from swarm.models.hf.hf_config import BALANCED, EXPERT_KEYS, HfConfig, numbers_of
from swarm.models.spec import SplitConfig
from swarm.planning.costs import bytes_by_kind, copy_bytes, graph_bytes

if TYPE_CHECKING:
    from swarm.models.hf.hf_family import HfFamily

SCHEMA = 1


def examine(given: str, *, stages: int | None, context: int | None) -> dict[str, Any]:
    """Return the facts of a model, for ``--json``. Builds it without weights, tries a small one of its kind.

    Raises ConfigError where it cannot be trained here; the error says why.
    """
    found = find_model(given, "DIR")
    model = found.model(context=context)
    stages = stages or min(2, model.layers)
    if stages > model.layers:
        raise ConfigError("--stages", stages, f"at most {model.layers}, the model's layers", "Ask for fewer stages.")
    from swarm.device import free_memory
    from swarm.models.hf.hf_family import HfFamily, anatomy_of
    from swarm.models.hf.selftest import self_test

    family, anatomy = HfFamily(model), anatomy_of(model)
    tried = self_test(model, free=free_memory())
    each, parts = bytes_by_kind(model), []
    for spec in family.parts(SplitConfig(stages=stages, ends="private")):
        cost = family.cost(spec, model.context)
        parts.append({
            "part": spec.name,
            "layers": [spec.first_layer, spec.last_layer],
            "parameters": cost.parameters,
            "training_bytes": sum(each.values()) * cost.parameters,
            "memory": {kind: size * cost.parameters for kind, size in each.items()},
            "graph_bytes_a_row": graph_bytes(model, spec, 1),
            "copy_bytes": copy_bytes(model, spec),
            "download_bytes": 12 * cost.parameters,
            "gflops_a_row": round(3 * cost.forward_flops * model.context / 1e9, 3),
        })  # fmt: skip
    return {
        "schema": SCHEMA,
        "model": family.described,
        "architecture": model.architecture,
        "attention": model.attention,
        "layers": {"path": anatomy.path, "count": anatomy.count, "given": list(anatomy.given)},
        "before": list(anatomy.before),
        "after": list(anatomy.after),
        "stages": [1, model.layers],
        "ends": _ends(family),
        "packing": tried.packs,
        "tensors": _tensors(family),
        "balance": _balance(model),
        "self_test": {"difference": tried.plain, "leak": tried.leaks, "future": tried.future},
        "tokenizer": None if found.tokenizer is None else found.tokenizer.name,
        **_spoken(found),
        "files": _files(found),
        "parts": parts,
        "trainable": tried.equal and tried.causal,
        "boundary_bytes_a_row": family.boundary(1, model.context).elements * (4 if model.compute == "float32" else 2),
    }


def lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the facts as (label, text), for people."""
    low, high = facts["stages"]
    layers, files, tried = facts["layers"], facts["files"], facts["self_test"]
    yield "model", facts["model"]
    yield "layers", f"{layers['count']} in {layers['path']}, each given {', '.join(layers['given']) or 'nothing else'}"
    yield "ends", f"before them {', '.join(facts['before'])}; after them {', '.join(facts['after'])}"
    yield "cut", f"into {low} to {high} stages, ends {' or '.join(facts['ends'])}"
    same = "the bits of the whole" if facts["trainable"] else f"NOT the bits of the whole: {tried['difference']:g}"
    yield "self-test", f"cut, logits and gradients are {same}; no token sees a later one ({tried['future']:g})"
    kept = "kept apart" if facts["packing"] else 'NOT kept apart: only packing = "stream"'
    yield "packing", f"documents in a row are {kept} ({tried['leak']:.2g})"
    yield "tensors", _tensors_said(facts["tensors"])
    if facts["balance"]:
        yield "balance", facts["balance"]
    yield "tokenizer", facts["tokenizer"] or "none: give one with --tokenizer"
    if facts["tokenizer"]:
        yield "text", f"ends with {facts['end']}" if facts["end"] else f"NOTHING ENDS IT: {facts['flaw']}"
        none = "none: conversations need one (swarm join --data-template)"
        yield "template", "written with the model's own" if facts["template"] else none
    size = f"{count(files['count'], 'file')}, {size_text(files['bytes'])}"
    yield "weights", f"only with --from-scratch: {files['error']}" if files["error"] else size
    for part in facts["parts"]:
        first, last = part["layers"]
        of = f"layers {first} to {last - 1}" if last > first else "embedding and head"
        yield (
            part["part"],
            (
                f"{of}: {part['parameters']:,} parameters; training takes {size_text(part['training_bytes'])} and "
                f"activations, joining downloads {size_text(part['download_bytes'])}"
            ),
        )
        kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in part["memory"].items())
        graph, copy = part["graph_bytes_a_row"], part["copy_bytes"]
        more = f"a graph {size_text(graph)} a row, a copy kept for others {size_text(copy)}"
        yield "", f"in memory: {kinds}; {more}"
    yield "between", f"{size_text(facts['boundary_bytes_a_row'])} a row cross each boundary, each way"


def _tensors(family: HfFamily) -> dict[str, Any]:
    """Return which modules of the layers can be cut across a peer's devices, and why others stay whole."""
    from swarm.models.strips import find_cut, kind_of

    cut = find_cut(family.build(family.parts(SplitConfig(stages=1))[0]), family.tensor_plan())
    kinds = dict.fromkeys(_within(kind_of(path)) for path in cut.units)
    whole = {_within(kind): why for kind, why in cut.whole.items()}
    return {"cut": list(kinds), "share": round(cut.share, 3), "whole": whole}


def _within(kind: str) -> str:
    return kind.rpartition("*")[2].removeprefix(".") or "the layer itself"


def _tensors_said(facts: dict[str, Any]) -> str:
    whole = [f"{kind} stays whole: {why}" for kind, why in facts["whole"].items()]
    cut = f"{listed(facts['cut'])} can be cut across a peer's devices: {facts['share']:.0%} of the layers"
    return "; ".join([cut if facts["cut"] else "nothing can be cut across a peer's devices", *whole])


def _balance(model: HfConfig) -> str | None:
    """Return what trains a mixture to use its experts evenly; None of a model without experts."""
    if model.balanced:
        return "each layer's loss, as output_router_logits asks for"
    if not any(number > 1 for number in numbers_of(json.loads(model.config), EXPERT_KEYS)):
        return None
    known = model.architecture in BALANCED
    return (
        "no loss: say output_router_logits in config.json to have one"
        if known
        else "no loss: none is known of its kind"
    )


def _ends(family: Any) -> list[str]:
    hosted = family.parts(SplitConfig(stages=min(2, family.layers), ends="hosted"))
    try:
        for spec in hosted:
            family.build(spec)
    except ConfigError:
        return ["private"]
    return ["private", "hosted"]


def _spoken(found: ForeignModel) -> dict[str, Any]:
    """Return what ends a text, None where nothing does, and whether there is a chat template that fits into a
    manifest."""
    said = found.spoken()
    if found.tokenizer is None:
        return {"end": None, "flaw": "", "template": False}
    try:
        end, flaw = Tokenizer(found.tokenizer.read_bytes(), said["end"] or None).end_token, ""
    except ConfigError as error:
        end, flaw = None, str(error)
    return {"end": end, "flaw": flaw, "template": "template" in said}


def _files(found: ForeignModel) -> dict[str, Any]:
    from swarm.models.hf.files import check_weights

    try:
        files = check_weights(found.directory)
    except StateError as error:
        return {"count": 0, "bytes": 0, "error": str(error)}
    return {"count": len(files), "bytes": sum(path.stat().st_size for path in files), "error": ""}
