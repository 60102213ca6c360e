"""Train adapters of a small model of transformers in a swarm whose replicas are killed, and look at what they are."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peers.checkpoints.choose_checkpoint import choose_step
from peers.commands.adapter import export_adapter
from peers.commands.export import export
from peers.frozen import frozen_of_all, store_of
from swarm.config import Manifest
from swarm.errors import StateError
from swarm.membership.parts import FrozenPart
from swarm.models.layout import install_weights
from swarm.models.lora import LoraFamily, install_base
from swarm.models.lora_config import BaseDType, LoraConfig
from swarm.models.registry import family_of
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig
from swarm.state.checkpoints.parts import load_weights
from tests.benchmarks._hf_run import CHARACTERS, CONTEXT, VICTIMS, VOCABULARY, pretrained, train_and_kill
from tests.benchmarks._parity_compare import Comparison, compare
from tests.benchmarks._parity_run import Scale, TrainedRun

RANK = 32
_SUMS, _MEANS = 8, 4
"""Bytes of a number: of a sum on its way to its reducer, and of what comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """What became of one run: how far it is from one process, how far its adapters have moved, and how far the exported
    ones' logits are from ours."""

    killed: tuple[str, ...]
    compared: Comparison
    moved: float
    bases_changed: int
    logits: float
    by_peft: bool
    bytes_ratio: float

    @property
    def equal(self) -> bool:
        """Whether all bits are those of one process, after real training, with all deaths."""
        return self.compared.exact and self.moved > 0.0 and set(self.killed) == set(VICTIMS.values())

    def figures(self) -> dict[str, Any]:
        """For the table."""
        return self.compared.figures(self.killed) | {
            "frozen parts changed": self.bases_changed,
            "adapters' logits differ by": self.logits,
            "bytes of averaging ÷ of adapters": round(self.bytes_ratio, 4),
        }


def adapt(root: Path, name: str, base: BaseDType, steps: int) -> Adapted:
    """Write a model of random weights as files, train adapters of it in a swarm, replay that, export them."""
    root.mkdir()
    chosen = pretrained(root / "model", name)
    lora = LoraConfig(rank=RANK, alpha=2.0 * RANK, base=base)
    chosen = replace(chosen, config=chosen.config.model_copy(update={"lora": lora}))
    scale = Scale(
        model=chosen.config,
        batch=BatchConfig(microbatch_size=2, microbatches_per_step=8),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1, weight_decay=0.0),
        steps=steps,
        characters=CHARACTERS,
    )
    trained, killed = train_and_kill(root, scale, chosen)
    stored = frozen_of_all(trained.manifest, store_of(trained.directory))
    difference, by_peft = _exported(trained, root)
    return Adapted(
        killed=killed,
        compared=compare(trained, chosen.files, stored),
        moved=max(float(t.abs().max()) for n, t in _weights(trained).items() if n.endswith("lora_b")),
        bases_changed=_changed(trained),
        logits=difference,
        by_peft=by_peft,
        bytes_ratio=_bytes_ratio(trained),
    )


def _weights(trained: TrainedRun) -> dict[str, torch.Tensor]:
    return load_weights(trained.directory.checkpoints, trained.manifest.run.steps)


def _changed(trained: TrainedRun) -> int:
    """How many parts' frozen weights are not what their digest says, after all that."""
    manifest, store, changed = trained.manifest, store_of(trained.directory), 0
    for spec in family_of(manifest.model).parts(manifest.split):
        try:
            FrozenPart(manifest, spec.name, store).load()
        except StateError:
            changed += 1
    return changed


def _bytes_ratio(trained: TrainedRun) -> float:
    """Bytes sent in the rounds of stages between two replicas over what their adapters take."""
    elements, sent, least = _elements(trained.manifest), 0, 0.0
    for path in sorted((trained.directory.root / "peers").glob("*/events.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event.get("kind") == "RoundDone" and event["part"] in elements and event["members"] == 2:
                sent += event["bytes_sent"]
                # To reduce one half of the vector, and to give the mean of the other half.
                least += elements[event["part"]] / 2 * (_SUMS + _MEANS)
    return sent / least


def _elements(manifest: Manifest) -> dict[str, int]:
    family = family_of(manifest.model)
    parts = {spec.name: family.cost(spec, CONTEXT).parameters for spec in family.parts(manifest.split)}
    return {str(name): elements for name, elements in parts.items() if elements}


def _exported(trained: TrainedRun, root: Path) -> tuple[float, bool]:
    """The largest difference of a logit between the exported adapters beside their model and ours, and whether peft
    put them there."""
    from transformers import AutoModelForCausalLM

    by_peft = importlib.util.find_spec("peft") is not None
    last, first = choose_step(trained.directory), choose_step(trained.directory, 0)
    load: Any = AutoModelForCausalLM.from_pretrained
    attention = trained.manifest.model.attention  # type: ignore[union-attr]
    export_adapter(last, root / "adapters", lambda line: None)
    export(first if by_peft else last, root / "whole", "float32", lambda line: None)
    theirs = load(root / "whole", attn_implementation=attention)
    if by_peft:
        from peft import PeftModel

        theirs = PeftModel.from_pretrained(theirs, str(root / "adapters"))
    family = family_of(trained.manifest.model)
    assert isinstance(family, LoraFamily)
    ours = family.build(family.whole)
    install_base(ours, frozen_of_all(trained.manifest, store_of(trained.directory)), torch.device("cpu"))
    install_weights(ours, _weights(trained))
    tokens = torch.arange(2 * CONTEXT).view(2, CONTEXT) % VOCABULARY
    with torch.no_grad():
        found = theirs(input_ids=tokens, use_cache=False).logits
        return float((found - ours.logits(ours(tokens))).abs().max()), by_peft
