"""``swarm export`` of a run with LoRA: the adapters of a checkpoint as a directory that peft loads beside the model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from peers.checkpoints.choose_checkpoint import ChosenStep
from peers.checkpoints.verify import named_files
from peers.commands.export import Exported, bytes_of, write_beside
from peers.commands.model_directory import making, write_json, write_tensors
from peers.console.interrupt import check
from peers.console.words import count
from swarm.disk import size_text
from swarm.errors import ConfigError
from swarm.models.hf.hf_config import HfConfig
from swarm.models.lora import LoraFamily
from swarm.models.peft_form import CONFIG, WEIGHTS, adapter_config, adapter_tensors
from swarm.models.registry import family_of
from swarm.state.checkpoints.parts import load_part_weights


def trains_adapters(chosen: ChosenStep, *, merge: bool) -> bool:
    """Return whether the run trains adapters, which are exported alone or merged. Raises ConfigError for ``merge`` of a
    run that trains all its weights."""
    has = isinstance(family_of(chosen.manifest.model), LoraFamily)
    if merge and not has:
        raise ConfigError(
            "--merge", True, "a run that trains adapters", "Leave --merge out.", why="this one trains all"
        )
    return has


def export_adapter(chosen: ChosenStep, into: Path, told: Callable[[str], None]) -> Exported:
    """Write the adapters into a new or empty directory, whole or not at all. Needs no frozen weights.

    Args:
        chosen: The checkpoint of a run that trains adapters.
        into: The directory.
        told: Called with a line for each part.

    Raises:
        ConfigError: The directory is in use, or the family has no form outside of swarm.
        StateError: A part of the checkpoint is damaged, named with what is wrong; or the disk refuses.
    """
    family = family_of(chosen.manifest.model)
    assert isinstance(family, LoraFamily)  # noqa: S101 - checked by :func:`trains_adapters`
    parts, tensors = chosen.specs, dict[str, Tensor]()
    for spec in parts:
        check()
        weights = load_part_weights(chosen.directory.checkpoints, chosen.record, spec.name)
        found = adapter_tensors(family, spec, weights)
        told(f"{spec.name}: {count(len(found) // 2, 'adapter')}")
        tensors |= found
    (base, _), (_, revision) = _loadable_base(chosen), _named_base(chosen)
    files = named_files(chosen.directory, chosen.manifest)
    with making(into) as hidden:
        size = write_tensors(hidden / WEIGHTS, {k: ("F32", one.shape, bytes_of(one)) for k, one in tensors.items()})
        write_json(hidden / CONFIG, adapter_config(family, parts, base=base, revision=revision))
        names = write_beside(hidden, files, _card(chosen, family, size))
    return Exported(files=names, parameters=sum(one.numel() for one in tensors.values()), bytes=size)


def load_adapter(into: Path, chosen: ChosenStep) -> str:
    """Return a line that loads the adapters beside their model, ready to paste."""
    base, known = _loadable_base(chosen)
    program = (
        "from transformers import AutoModelForCausalLM as M; from peft import PeftModel; "
        f"print(PeftModel.from_pretrained(M.from_pretrained({json.dumps(base)}), {json.dumps(str(into))}))"
    )
    note = "" if known else f" (with the directory of the model in the place of {base}, here and in {CONFIG})"
    return f"python -c {shlex.quote(program)}{note}"


def _named_base(chosen: ChosenStep) -> tuple[str, str]:
    """Return what the frozen model of the adapters is called, and its revision; "" where it has no name. Step 0 of the
    run, merged, is that model as it was stored."""
    model = chosen.manifest.model
    return (model.source, model.revision) if isinstance(model, HfConfig) and not model.scratch else ("", "")


def _loadable_base(chosen: ChosenStep) -> tuple[str, bool]:
    """Return what transformers loads the model by, and whether that is known: a hub's name is, while of a directory a
    run keeps the name alone, since its path is its founder's. Then it is a placeholder to replace."""
    name, revision = _named_base(chosen)
    return (name, True) if revision else (f"PATH-OF-{name or 'BASE'}", False)


def _card(chosen: ChosenStep, family: LoraFamily, size: int) -> str:
    run, lora, (base, _) = chosen.manifest.run, family.lora, _named_base(chosen)
    loaded, known = _loadable_base(chosen)
    note = "" if known else "  # a placeholder: the directory of that model on this machine"
    return f"""---
library_name: peft
base_model: {base or "unknown"}
tags: [swarm, decentralized-training, lora]
---

# Adapters of {run.name}, step {chosen.step}

Low-rank adapters that peers trained together with swarm, without a centre, for a model whose weights stayed as they
were, kept in {lora.base}: rank {lora.rank}, alpha {lora.alpha:g}, {size_text(size)}.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({json.dumps(loaded)}){note}
model = PeftModel.from_pretrained(model, ".")
```

They were trained with the weights that `swarm export --merge --step 0` writes.
"""
