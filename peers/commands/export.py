"""``swarm export``: a checkpoint as a directory that transformers loads, and the model card in it.

One part is in memory at a time, without its optimizer state. Our own models need no transformers for it.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_shards.tokenize import Tokenizer
from peers.checkpoints.choose_checkpoint import ChosenStep, run_tokenizer
from peers.checkpoints.verify import named_files
from peers.commands.model_directory import CONFIG, ROUTING, making, tokenizer_config, write_json, write_tensors
from peers.console.interrupt import check
from peers.console.words import count
from peers.data.tokenizer_files import CONFIG_FILE, TEMPLATE_FILE, template_in
from peers.frozen import frozen_of, store_of
from peers.local.report import held_out_after
from swarm.columns import becomes
from swarm.consensus.records import CloseRecord
from swarm.disk import size_text, write_whole
from swarm.ids import PartName
from swarm.models.lora import LoraFamily, merged
from swarm.models.registry import family_of
from swarm.models.spec import DType, PartSpec
from swarm.schema import BINS, MOST_IN_BIN
from swarm.state.checkpoints.files import RECORD, step_directory
from swarm.state.checkpoints.parts import load_part_weights
from swarm.state.checkpoints.proof import proof_in

_STORED: Mapping[DType, tuple[str, torch.dtype]] = {
    "float32": ("F32", torch.float32),
    "bfloat16": ("BF16", torch.bfloat16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported model: its files' names, and the elements and bytes of its tensors."""

    files: tuple[str, ...]
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportContent:
    """What is exported: the weights of each part, and what the card says of where they come from."""

    weights: Callable[[PartSpec], Mapping[str, Tensor]]
    title: str
    origin: str
    facts: Mapping[str, str]


def export(
    chosen: ChosenStep, into: Path, dtype: DType, told: Callable[[str], None], content: ExportContent | None = None
) -> Exported:
    """Write the model of a checkpoint into a new or empty directory, whole or not at all; adapters are added to the
    weights beside them, in float32.

    Args:
        chosen: The checkpoint.
        into: The directory.
        dtype: What the weights are stored in; trained they are float32.
        told: Called with a line for each part.
        content: Weights of the same model in place of the checkpoint's.

    Raises:
        ConfigError: The family has no form outside of swarm, or the directory is in use.
        StateError: A part of the checkpoint is damaged, named with what is wrong; or the disk refuses.
    """
    family, content = family_of(chosen.manifest.model), content or _trained(chosen)
    config = family.export_config()
    kinds = config.get("architectures") or (config.get("model_type", ""),)  # some configs name none
    files = named_files(chosen.directory, chosen.manifest)
    _, tokenizer = run_tokenizer(chosen)
    end, opening = tokenizer.end_of_text, tokenizer.opening[0]
    # A model that came with special tokens of its own begins texts as it did: its template may write what begins one.
    begins = not chosen.manifest.tokenizer.tokens
    ids = {"bos_token_id": opening, "eos_token_id": end} if begins else {"eos_token_id": end}
    with making(into) as hidden:
        parameters, stored = _write_weights(chosen, content.weights, hidden, dtype, told)
        named = "dtype" if "dtype" in config else "torch_dtype"  # as versions before 4.56 call it, and all read
        write_json(hidden / CONFIG, dict(sorted((ids | config | {named: dtype}).items())))
        for name, made in _made(chosen, ids | {"pad_token_id": end}, config, tokenizer).items():
            if name not in files:
                write_json(hidden / name, made)
        architecture = f"{', '.join(kinds)}, {parameters:,} parameters in {dtype}"
        card = model_card(chosen, content, architecture, tokenizer)
        names = write_beside(hidden, files, card, chosen.manifest.tokenizer.template)
    return Exported(files=names, parameters=parameters, bytes=stored)


def export_routed(chosen: ChosenStep, into: Path, dtype: DType, told: Callable[[str], None]) -> Exported:
    """Write every model of a checkpoint with experts by text into one new or empty directory, whole or not at all, and
    beside them how text finds its own. Arguments and errors are those of :func:`export`."""
    every = dict[str, Exported]()
    with making(into) as hidden:
        for name in chosen.paths:
            told(f"{name}:")
            every[name] = export(chosen.on_path(name), hidden / name, dtype, told)
        routing = {"schema": 1, "models": list(every), "centres": chosen.manifest.split.centres}
        write_json(hidden / ROUTING, routing)
        write_whole(hidden / "README.md", [_routed_card(chosen, list(every)).encode()])
    files = [f"{name}/{file}" for name, one in every.items() for file in one.files]
    return Exported(
        files=tuple(sorted([*files, ROUTING, "README.md"])),
        parameters=sum(one.parameters for one in every.values()),
        bytes=sum(one.bytes for one in every.values()),
    )


def _made(
    chosen: ChosenStep, ids: Mapping[str, int], config: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, Mapping[str, Any]]:
    """Return what is said beside the weights and a tokenizer that came with nothing of its own, by name of the file."""
    # As the model's own config has them:
    said = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    made: dict[str, Mapping[str, Any]] = {"generation_config.json": {**ids, **said}}
    if CONFIG_FILE in chosen.manifest.files:
        return made
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    names[tokenizer.end_of_text] = tokenizer.end_token
    begins = names.get(tokenizer.opening[0])
    own = {"bos_token": begins} if begins else {}
    tokens = {"eos_token": tokenizer.end_token} | dict(chosen.manifest.tokenizer.tokens or own)
    most = config.get("max_position_embeddings") or family_of(chosen.manifest.model).context
    return made | {CONFIG_FILE: tokenizer_config(most) | tokens, "special_tokens_map.json": tokens}


def write_beside(into: Path, files: Mapping[str, bytes], card: str, template: str = "") -> tuple[str, ...]:
    """Write what lies next to the weights; return the names of all that is there then. Raises OSError.

    Args:
        into: The directory.
        files: Those that travel with the run, as they are.
        card: The card of what is exported; ``SWARM.md`` where the model came with a README.md of its own.
        template: The run's chat template, written where those files say another.
    """
    for name, data in files.items():
        write_whole(into / name, [data])
    if template and template != template_in(into):
        write_whole(into / TEMPLATE_FILE, [template.encode()])
    write_whole(into / ("SWARM.md" if "README.md" in files else "README.md"), [card.encode()])
    return tuple(sorted(path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()))


def trained_weights(chosen: ChosenStep, spec: PartSpec) -> dict[str, Tensor]:
    """Return what was trained of a part's weights, by name, verified; of a stage that shares its layers with others,
    these. Raises StateError where it is damaged."""
    family, root = family_of(chosen.manifest.model), chosen.directory.checkpoints
    held = next(part for part in map(PartName, chosen.record.parts) if spec.name in (part, *becomes(part)))
    weights = load_part_weights(root, chosen.record, held)
    names = weights.keys() if held == spec.name else family.layout(family.build(spec)).names
    return dict(zip(names, weights.values(), strict=True))


def part_weights(chosen: ChosenStep, spec: PartSpec) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's part by name, adapters added to those beside them. Raises StateError where
    the part is damaged, or what is frozen of it is not here."""
    family = family_of(chosen.manifest.model)
    weights = trained_weights(chosen, spec)
    if isinstance(family, LoraFamily):
        weights = merged(family, spec, weights, frozen_of(chosen.manifest, spec.name, store_of(chosen.directory)))
    return weights


def _write_weights(
    chosen: ChosenStep,
    weights_of: Callable[[PartSpec], Mapping[str, Tensor]],
    into: Path,
    dtype: DType,
    told: Callable[[str], None],
) -> tuple[int, int]:
    """Write a file for each part, and where there are several the index of all; return (elements, bytes) of them."""
    family = family_of(chosen.manifest.model)
    specs = chosen.specs
    names = [f"model-{number:05d}-of-{len(specs):05d}.safetensors" for number in range(1, len(specs) + 1)]
    names = names if len(specs) > 1 else ["model.safetensors"]
    where: dict[str, str] = {}
    elements = stored = 0

    def write(spec: PartSpec, name: str) -> None:
        """Apart from the loop, so that nothing of a part is held when the next is read."""
        nonlocal elements, stored
        word, kind = _STORED[dtype]
        tensors = {
            key: tensor.detach().to(kind).contiguous()
            for key, tensor in family.export_weights(spec, weights_of(spec)).items()
            if key not in where  # a weight that is tied between parts is in one file
        }
        size = write_tensors(into / name, {key: (word, one.shape, bytes_of(one)) for key, one in tensors.items()})
        where.update(dict.fromkeys(tensors, name))
        elements += sum(one.numel() for one in tensors.values())
        stored += size
        told(f"{spec.name}: {count(len(tensors), 'tensor')}, {size_text(size)} in {name}")

    for spec, name in zip(specs, names, strict=True):
        check()
        write(spec, name)
    if len(specs) > 1:
        index = {"metadata": {"total_parameters": elements, "total_size": stored}, "weight_map": where}
        write_json(into / "model.safetensors.index.json", index)
    return elements, stored


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# --- the model card --------------------------------------------------------------------------------------------------


def model_card(chosen: ChosenStep, content: ExportContent, architecture: str, tokenizer: Tokenizer) -> str:
    """Return the ``README.md`` of an exported model: what is known of where it comes from, and how to load it."""
    family = family_of(chosen.manifest.model)
    of_model = {
        "model": family.described,
        "architecture": architecture,
        "vocabulary": f"{family.vocab_size:,} tokens",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in {**content.facts, **of_model}.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [swarm, decentralized-training]
---

# {content.title}

{content.origin} The text is the trainers' own, and
nothing here describes it.

| fact | value |
|---|---|
{rows}

## Load it

In this directory:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
{_prompt(chosen, tokenizer)}
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=80)[0]))
```

{_follows(chosen, tokenizer)}It was trained on rows of {family.context} tokens.
The optimizer's state is not here: the run goes on from its own checkpoints.
"""


def _routed_card(chosen: ChosenStep, names: Sequence[str]) -> str:
    """Return the ``README.md`` of a directory that routes."""
    content = _trained(chosen)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [swarm, decentralized-training]
---

# {content.title}

{content.origin} It is {count(len(names), "model")}, each in a directory of its own with a model card:
{", ".join(names)}.
They share some of their layers, and each has learnt from one kind of text. `{ROUTING}` says which model a text is of:
how often its tokens are in it, in {BINS} bins, is compared with the middle of each kind.

## Use it

`swarm sample --model DIR` and `swarm eval --model DIR` of this directory ask of each text the model of its kind. In
Python, in this directory:

```python
import json

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

with open("{ROUTING}") as file:
    routing = json.load(file)


def model_for(ids):
    bins = (np.array(ids, np.uint64) * np.uint64(0x9E3779B1) >> np.uint64(24)).astype(np.uint8)
    counts = np.bincount(bins, minlength={BINS})
    found = np.sqrt(counts * {MOST_IN_BIN}**2 // max(1, counts.sum())).astype(int)
    return routing["models"][((np.array(routing["centres"]) - found) ** 2).sum(axis=1).argmin()]


tokenizer = AutoTokenizer.from_pretrained("{names[0]}")
prompt = tokenizer("The", return_tensors="pt", return_token_type_ids=False)
model = AutoModelForCausalLM.from_pretrained(model_for(prompt["input_ids"][0].tolist()))
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=80)[0]))
```

Each model's own card says how its prompts begin.
"""


def _prompt(chosen: ChosenStep, tokenizer: Tokenizer) -> str:
    """The line of Python that makes a prompt: a conversation, where the model has a template for it."""
    if chosen.manifest.tokenizer.template:
        return """chat = [{"role": "user", "content": "Hello"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)"""
    begin = "" if chosen.manifest.tokenizer.tokens or tokenizer.begins else "tokenizer.bos_token + "
    return f'prompt = tokenizer({begin}"The", return_tensors="pt", return_token_type_ids=False)'


def _follows(chosen: ChosenStep, tokenizer: Tokenizer) -> str:
    if chosen.manifest.tokenizer.tokens or tokenizer.begins or chosen.manifest.batch.packing == "documents":
        return ""
    return f"In training every document follows `{tokenizer.end_token}`, so prompts should, too. "


def _trained(chosen: ChosenStep) -> ExportContent:
    """The checkpoint as it is."""
    return ExportContent(
        weights=functools.partial(part_weights, chosen),
        title=f"{chosen.manifest.run.name}, step {chosen.step}",
        origin="A language model that peers trained together with swarm, without a centre.",
        facts=_facts(chosen),
    )


def _facts(chosen: ChosenStep) -> dict[str, str]:
    manifest, step = chosen.manifest, chosen.step
    family = family_of(manifest.model)
    saved = (step_directory(chosen.directory.checkpoints, step) / RECORD).stat().st_mtime
    tokens = step * manifest.step_microbatches * manifest.batch.microbatch_size * family.context
    facts = {
        "run": f"`{manifest.run.name}`, id `{manifest.run_id}`",
        "checkpoint": f"after step {step} of {manifest.run.steps}, saved {datetime.fromtimestamp(saved, UTC):%Y-%m-%d}",
        "trained on": f"{'at most' if manifest.batch.packing == 'documents' else 'about'} {tokens:,} tokens",
        "optimizer": f"{manifest.optimizer.described}, learning rate up to {manifest.optimizer.lr:g}",
    }
    record = _record(chosen)
    if record is not None and record.tokens:
        facts["training loss"] = f"{record.loss_sum / record.tokens:.4f} nats a token, mean of step {step}"
    held_out = held_out_after(chosen.directory.report, step)
    if held_out is not None:
        facts["held-out loss"] = f"{held_out:.4f} nats a token"
    if record is not None:
        trainers = len(record.members.trainers)
        hosts = sum(member.role == "stage" and member.part is not None for member in record.roster)
        facts["peers at that step"] = f"{count(hosts, 'stage host')} and {count(trainers, 'trainer')}"
    return facts


def _record(chosen: ChosenStep) -> CloseRecord | None:
    """The close record of the step; None where none was kept. Raises StateError for one of another step or run."""
    return proof_in(chosen.record, chosen.manifest.run_id).record if chosen.record.detail else None


def load_command(into: Path, *, chat: bool) -> str:
    """Return a line that loads the model and prints what it says, ready to paste; of one that has a ``chat`` template,
    its answer."""
    where = json.dumps(str(into))
    prompt = '[{"role": "user", "content": "Hello"}]' if chat else '"The"'
    program = f'from transformers import pipeline; print(pipeline("text-generation", {where})({prompt}))'
    return f"python -c {shlex.quote(program)}"
