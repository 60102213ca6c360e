"""Fine-tune a small model of transformers in a swarm of processes whose replicas are killed, and replay it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_shards.build import build_shard, split_documents
from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.data.text import built_in_corpus
from peers.foreign_model import find_model
from peers.frozen import with_frozen
from peers.home.run_directory import RunDirectory
from peers.local.fork_client import PRELOAD
from peers.local.launch import PeerGroup
from peers.manifest_file import write_manifest
from swarm.models.hf.hf_config import HfConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig, Packing
from swarm.state.frozen import FrozenStore
from tests.benchmarks._parity_run import (
    TRAINERS,
    Data,
    Layout,
    Scale,
    TrainedRun,
    local_run,
    make_manifest,
    read_records,
)

if TYPE_CHECKING:
    from tests.benchmarks._parity_compare import Comparison

VOCABULARY, CONTEXT, CHARACTERS = 300, 16, 20_000
LAYOUT = Layout(name="2 stages × 2, private ends", stages=2, replicas=2, ends="private")
PRELOAD_HF = ("swarm.models.hf.skeleton", "transformers.models.auto.modeling_auto", "transformers.modeling_utils")
"""What every peer would import again: seconds each."""
VICTIMS = {1: "stage-0-2", 2: "stage-1-2"}
"""Who is killed when the bootstrap has closed the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuned:
    """What became of one: who was killed, how far it is from one process, and how far the export's logits are."""

    killed: tuple[str, ...]
    compared: Comparison
    export_difference: float | None

    @property
    def equal(self) -> bool:
        """Whether all bits are those of one process, with all deaths."""
        return self.compared.exact and set(self.killed) == set(VICTIMS.values())

    def figures(self) -> dict[str, Any]:
        """For the table."""
        return self.compared.figures(self.killed) | {"export's logits differ by": self.export_difference}


def fine_tune(root: Path, name: str, *, steps: int, packing: Packing = "stream") -> FineTuned:
    """Write a model of random weights as files, train it in a swarm, replay it, export it."""
    root.mkdir()
    chosen = pretrained(root / "model", name)
    scale = Scale(
        model=chosen.config,
        batch=BatchConfig(microbatch_size=2, microbatches_per_step=8, packing=packing),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=2, clip_norm=0.5),
        steps=steps,
        characters=CHARACTERS,
    )
    trained, killed = train_and_kill(root, scale, chosen)
    from tests.benchmarks._parity_compare import compare

    return FineTuned(
        killed=killed,
        compared=compare(trained, chosen.files),
        export_difference=_exported(trained, chosen, root / "export"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model of transformers: its ``[model]``, its directory, and its tokenizer's JSON."""

    config: HfConfig
    files: Path
    tokenizer: bytes


def pretrained(directory: Path, name: str) -> Pretrained:
    """A model's directory as it comes from a hub, with random weights and a tokenizer of the built-in text."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from tests.harness.rigs.foreign import foreign_config

    config = foreign_config(name, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    make(CONFIG_MAPPING[config["model_type"]].from_dict(config)).save_pretrained(directory)
    tokenizer = train_tokenizer(_documents(), VOCABULARY)
    (directory / "tokenizer.json").write_bytes(tokenizer)
    config = find_model(str(directory)).tried(scratch=False, context=CONTEXT)
    return Pretrained(config=config, files=directory.absolute(), tokenizer=tokenizer)


def _documents() -> list[str]:
    text = "\n".join(built_in_corpus().documents)[:CHARACTERS]
    return [text[at : at + 100] for at in range(0, len(text), 100)]


def train_and_kill(root: Path, scale: Scale, chosen: Pretrained) -> tuple[TrainedRun, tuple[str, ...]]:
    """Train in a swarm of processes, and kill :data:`VICTIMS`; return the run, and who was killed."""
    group = PeerGroup(root / "launch.log", preload=(*PRELOAD, *PRELOAD_HF))
    try:
        group.open()
        return _train(group, root, scale, chosen)
    finally:
        group.stop()


def _train(group: PeerGroup, root: Path, scale: Scale, chosen: Pretrained) -> tuple[TrainedRun, tuple[str, ...]]:
    directory = RunDirectory(root / "run")
    data = Data(root=root / "data", tokenizer=tokenizer_digest(chosen.tokenizer))
    shards = RunDirectory(data.root)
    data.root.mkdir()
    shards.tokenizer.write_bytes(chosen.tokenizer)
    for trainer, texts in enumerate(split_documents(_documents(), TRAINERS, 0.0, seed=0).shards):
        build_shard(shards.shard(trainer), texts, chosen.tokenizer)
    manifest = make_manifest(LAYOUT, scale, data, reproducible=True)
    manifest = with_frozen(manifest, chosen.files, FrozenStore(directory.frozen), lambda _: None)
    data.copy_to(directory)
    write_manifest(manifest, directory.manifest)
    running = local_run(group, directory, manifest, chosen.files)
    killed: list[str] = []

    def kill() -> None:
        for step, victim in VICTIMS.items():
            if running.view.steps.last >= step and victim not in killed:
                os.kill(group.pids[victim], signal.SIGKILL)
                killed.append(victim)

    running.on_change = kill
    running.train()
    records = read_records(directory, manifest, dead=killed)
    trained = TrainedRun(manifest=manifest, directory=directory, records=records)
    return trained, tuple(killed)


def _exported(trained: TrainedRun, chosen: Pretrained, into: Path) -> float:
    """The largest difference of a logit between transformers on the export and the whole model on the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    from peers.checkpoints.choose_checkpoint import choose_step
    from peers.commands.export import export
    from swarm.models.layout import install_weights
    from swarm.models.registry import family_of
    from swarm.state.checkpoints.parts import load_weights

    step = choose_step(trained.directory)
    export(step, into, "float32", lambda line: None)
    load: Any = AutoModelForCausalLM.from_pretrained
    theirs = load(into, attn_implementation=chosen.config.attention)
    family = family_of(chosen.config)
    ours = family.build(family.whole)
    install_weights(ours, load_weights(trained.directory.checkpoints, step.step))
    tokens = torch.arange(2 * CONTEXT).view(2, CONTEXT) % VOCABULARY
    with torch.no_grad():
        return float((theirs(input_ids=tokens, use_cache=False).logits - ours.logits(ours(tokens))).abs().max())
