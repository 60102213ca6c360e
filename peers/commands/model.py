"""``swarm model check``: what a model is made of, how it may be cut, what a peer needs for a part, and whether its
stages can be several experts, or share their layers.

A model of transformers is tried; of the built-in one a RUN.toml or a preset says all there is to know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_shards.tokenize import Tokenizer
from peers.commands.plan import manifest_named
from peers.console.words import count, listed
from peers.foreign_model import ForeignModel, find_model
from peers.kinds import widths_of
from peers.presets import preset_names
from swarm.columns import MAX_VARIANTS, host_parts
from swarm.config import Manifest, parse_manifest
from swarm.disk import size_text
from swarm.errors import ConfigError, StateError
from swarm.ids import PartName, variant_of
from swarm.models.hf.hf_config import BALANCED, HfConfig
from swarm.models.registry import delinked_at, expert_interval, family_of, shares
from swarm.models.spec import ModelConfig, SplitConfig
from swarm.planning.costs import bytes_by_kind, copy_bytes, founding_bytes, graph_bytes

if TYPE_CHECKING:
    from swarm.models.family import ModelFamily

SCHEMA = 1
WIDTHS = re.compile(r"[1-9][0-9]?(,[1-9][0-9]?)*")


def examine(given: str, *, stages: int | None, context: int | None, variants: str | None = None) -> dict[str, Any]:
    """Return the facts of a model, for ``--json``: of a directory, or of what a RUN.toml or a preset says. Builds it
    without weights, tries a small one of its kind.

    Raises ConfigError where it cannot be trained here; the error says why.
    """
    if variants is not None and not WIDTHS.fullmatch(variants):
        raise ConfigError("--variants", variants, "whole numbers with commas, such as 1,4", "Correct it.")
    if given in preset_names() or Path(given).is_file():
        return _of_run(given, stages, context, variants)
    found = find_model(given, "DIR")
    model = found.model(context=context)
    split = _split(model, stages or min(2, model.layers), variants)
    from swarm.device import free_memory
    from swarm.models.hf.hf_family import HfFamily, anatomy_of
    from swarm.models.hf.selftest import self_test

    anatomy, tried = anatomy_of(model), self_test(model, free=free_memory())
    return {
        **_costs(model, split),
        "architecture": model.architecture,
        "attention": model.attention,
        "layers": {"path": anatomy.path, "count": anatomy.count, "given": list(anatomy.given)},
        "before": list(anatomy.before),
        "after": list(anatomy.after),
        "ends": _ends(HfFamily(model)),
        "share": {"why_not": "those of the built-in GPT alone can", "stages": [], "until": None},
        "packing": tried.packs,
        "self_test": {"difference": tried.plain, "leak": tried.leaks, "future": tried.future},
        "tokenizer": None if found.tokenizer is None else found.tokenizer.name,
        **_spoken(found),
        "files": _files(found),
        "trainable": tried.equal and tried.causal,
    }


def _split(model: ModelConfig, stages: int, variants: str | None) -> SplitConfig:
    """Return the cut that is asked about. Raises ConfigError for one that there is not."""
    if stages > model.layers:
        raise ConfigError("--stages", stages, f"at most {model.layers}, the model's layers", "Ask for fewer stages.")
    widths = () if variants is None else tuple(widths_of(variants, stages))
    if widths and (len(widths) != stages or max(widths) > MAX_VARIANTS):
        allowed = f"{stages} numbers up to {MAX_VARIANTS}, one a stage, or one for all but the first"
        raise ConfigError("--variants", variants, allowed, "Correct it, or --stages.")
    return SplitConfig(stages=stages, ends="private", variants=widths)


def _costs(model: ModelConfig, split: SplitConfig) -> dict[str, Any]:
    """Return what is known of any model: its parts, what each takes, and what cutting its layers and experts do."""
    family, each, parts = family_of(model), bytes_by_kind(model), []
    for spec in family.parts(split):
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
    held = sum(family.cost(spec, model.context).parameters for spec in family.parts(split))
    one_each = split.model_copy(update={"variants": ()})
    plain = sum(family.cost(spec, model.context).parameters for spec in family.parts(one_each))
    several = {
        "why_not": "",
        "widths": list(split.variants),
        "hosts": len(host_parts(split.parts)),
        "parameters": held,
        "over_plain": held / plain,
        "founding_bytes": founding_bytes(model, split),
    }
    return {
        "schema": SCHEMA,
        "model": family.described,
        "stages": [1, model.layers],
        "tensors": _tensors(family),
        "experts": _computed_by(model),
        "expert_shards": _shards(model),
        "balance": _balance(model) if isinstance(model, HfConfig) else family.mixing or None,
        "variants": several,
        "parts": parts,
        "boundary_bytes_a_row": family.boundary(1, model.context).elements * (4 if model.compute == "float32" else 2),
    }


def _of_run(given: str, stages: int | None, context: int | None, variants: str | None) -> dict[str, Any]:
    """Return the facts of a run's model, and why its stages cannot be several experts, or share their layers, as the
    rules of a manifest have it."""
    if context is not None:
        raise ConfigError("--context", context, "none with a RUN.toml or preset", "Leave it out: model.context is it.")
    manifest = manifest_named(given)
    model, said = manifest.model, ",".join(map(str, manifest.split.variants)) or None
    split = _split(model, stages or manifest.split.stages, variants or said)
    facts, widths = _costs(model, split), split.variants or (*(1,) * (split.stages - 1), 2)
    kinds = {"route_by": "domain", "domains": tuple(f"kind-{number}" for number in range(max(widths))), "own": {}}
    alone = {"share": "none", "delink_at": 0} if shares(model) else {}
    several = {"variants": widths, "centres": (), **kinds}
    facts["variants"]["why_not"] = _refusal(manifest, split.stages, sum(widths), alone, several)
    one: dict[str, Any] = {"variants": (), "route_by": None, "domains": (), "centres": (), "own": {}}
    shared = _refusal(manifest, split.stages, split.stages, {"share": "stages"}, one)
    each = max(1, expert_interval(model))
    alike = [count for count in range(2, model.layers + 1) if model.layers % (count * each) == 0]
    share = {"why_not": shared, "stages": alike, "until": delinked_at(model) if shares(model) else None}
    return {**facts, "ends": ["private", "hosted"], "share": share, "trainable": True}


def _refusal(manifest: Manifest, stages: int, hosts: int, model: Mapping[str, Any], split: Mapping[str, Any]) -> str:
    """Return what is wrong with a manifest that is cut so, with these changes of its sections; "" for nothing."""
    document = manifest.model_dump(mode="json")
    document["model"] |= model
    document["split"] |= {"stages": stages, "layers_per_stage": None, **split}
    document["run"]["start_when"] |= {"stage_hosts": max(hosts, manifest.run.start_when.stage_hosts)}
    try:
        parse_manifest(document, "the run")
    except ConfigError as error:
        return str(error)
    return ""


def lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the facts as (label, text), for people."""
    low, high = facts["stages"]
    yield "model", facts["model"]
    if foreign := "layers" in facts:
        layers, given = facts["layers"], ", ".join(facts["layers"]["given"])
        yield "layers", f"{layers['count']} in {layers['path']}, each given {given or 'nothing else'}"
        yield "ends", f"before them {', '.join(facts['before'])}; after them {', '.join(facts['after'])}"
    yield "cut", f"into {low} to {high} stages, ends {' or '.join(facts['ends'])}"
    yield "tensors", _tensors_said(facts["tensors"])
    if facts["experts"]:
        yield "experts", f"computed by {facts['experts']}; {_shards_said(facts['expert_shards'])}"
    if facts["balance"]:
        yield "balance", facts["balance"]
    yield from _foreign_lines(facts) if foreign else ()
    yield "variants", _variants_said(facts["variants"])
    yield "sharing", _sharing_said(facts["share"])
    for part in facts["parts"]:
        (variant, others), (first, last) = variant_of(PartName(part["part"])), part["layers"]
        if variant:  # it takes what the first one does
            continue
        more = {1: "", 2: ", as does the other"}.get(others, f", as does each of {others - 1} others")
        of = f"layers {first} to {last - 1}" if last > first else "embedding and head"
        yield (
            part["part"],
            (
                f"{of}: {part['parameters']:,} parameters; training takes {size_text(part['training_bytes'])} and "
                f"activations, joining downloads {size_text(part['download_bytes'])}{more}"
            ),
        )
        kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in part["memory"].items())
        graph, copy = part["graph_bytes_a_row"], part["copy_bytes"]
        beside = f"a graph {size_text(graph)} a row, a copy kept for others {size_text(copy)}"
        yield "", f"in memory: {kinds}; {beside}"
    yield "between", f"{size_text(facts['boundary_bytes_a_row'])} a row cross each boundary, each way"


def _foreign_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is tried of a model of transformers, and what came with it."""
    files, tried = facts["files"], facts["self_test"]
    same = "the bits of the whole" if facts["trainable"] else f"NOT the bits of the whole: {tried['difference']:g}"
    yield "self-test", f"cut, logits and gradients are {same}; no token sees a later one ({tried['future']:g})"
    kept = "kept apart" if facts["packing"] else 'NOT kept apart: only packing = "stream"'
    yield "packing", f"documents in a row are {kept} ({tried['leak']:.2g})"
    yield "tokenizer", facts["tokenizer"] or "none: give one with --tokenizer"
    if facts["tokenizer"]:
        yield "text", f"ends with {facts['end']}" if facts["end"] else f"NOTHING ENDS IT: {facts['flaw']}"
        none = "none: conversations need one (swarm join --data-template)"
        yield "template", "written with the model's own" if facts["template"] else none
    size = f"{count(files['count'], 'file')}, {size_text(files['bytes'])}"
    yield "weights", f"only with --from-scratch: {files['error']}" if files["error"] else size


def _variants_said(experts: Mapping[str, Any]) -> str:
    """Say whether stages can be several experts, and what that takes."""
    if experts["why_not"]:
        return f"stages cannot be several: {experts['why_not']}"
    if not experts["widths"]:
        return "each stage can be several: --variants 4 says what that takes, swarm new --variants 4 founds such a run"
    return (
        f"{', '.join(map(str, experts['widths']))} a stage: {experts['hosts']} stage hosts at least, one for each; "
        f"{experts['parameters']:,} parameters, {experts['over_plain']:.3g} times as many as with one; a host and a "
        f"boundary take as much as with one; its founder's memory holds {size_text(experts['founding_bytes'])}"
    )


def _sharing_said(share: Mapping[str, Any]) -> str:
    """Say whether stages can share their layers, and what that takes."""
    if share["why_not"]:
        return f"stages cannot share their layers: {share['why_not']}"
    until = {None: 'with [model] share = "stages"', 0: "as this run's do, to the end"}
    when = until.get(share["until"], f"as this run's do, to the end of step {share['until']}")
    numbers = listed([*map(str, share["stages"])], "or")
    return f"{numbers} stages can share their layers, {when}; a host takes as much as without"


def _tensors(family: ModelFamily) -> dict[str, Any]:
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


def _computed_by(model: ModelConfig) -> str | None:
    """Return what computes the experts that tokens find; None of a model without experts."""
    if isinstance(model, HfConfig):
        from swarm.models.hf.skeleton import skeleton

        return skeleton(model).config._experts_implementation if model.has_experts else None
    return "the built-in GPT" if expert_interval(model) else None


def _shards(model: ModelConfig) -> dict[str, Any]:
    """Return in how many shards experts can be held, or why not in several; and by how much a logit or a gradient of a
    small model of transformers differs then."""
    foreign = isinstance(model, HfConfig)
    if isinstance(model, HfConfig) and model.has_experts:
        model = model.model_copy(update={"experts_implementation": "eager"})
    family, difference = family_of(model), None
    if foreign and not family.uncut_experts:
        from swarm.models.hf.selftest import experts_difference

        difference = experts_difference(model, 2)  # type: ignore[arg-type]
    numbers = [] if family.uncut_experts else [n for n in range(2, family.experts + 1) if family.experts % n == 0]
    return {"why_not": family.uncut_experts, "numbers": numbers, "difference": difference}


def _shards_said(shards: Mapping[str, Any]) -> str:
    """Say who can hold the experts of a stage's layers."""
    if shards["why_not"]:
        return f"a stage holds all experts of its layers: {shards['why_not']}"
    numbers, differs = listed([*map(str, shards["numbers"])], "or"), shards["difference"]
    how = 'with [model] experts_implementation = "eager"; logits and gradients then differ by at most'
    beside = "" if differs is None else f", {how} {differs:.2g} of the largest"
    return f"a stage holds all experts of its layers, or {numbers} shards do{beside}"


def _balance(model: HfConfig) -> str | None:
    """Return what trains a mixture to use its experts evenly; None of a model without experts."""
    if model.balanced:
        return "each layer's loss, as output_router_logits asks for"
    if not model.has_experts:
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
