"""Prepare a local run before its first peer: tokenizer, disjoint shards, held-out text, manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data_shards.build import DocumentSplit, build_shard, split_documents
from data_shards.manifest import ShardManifest
from data_shards.packing import row_count
from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.console.interrupt import check
from peers.console.words import count
from peers.data.text import Corpus, sample_texts
from peers.foreign_model import ChosenModel, check_parts
from peers.home.run_directory import RunDirectory
from peers.manifest_file import write_manifest
from swarm.averaging.config import AveragingConfig, LocalConfig
from swarm.config import Manifest, RunConfig, StartWhen, TokenizerConfig, check_manifest, new_nonce
from swarm.disk import write_whole
from swarm.errors import ConfigError, StateError
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import AnyModel, family_of
from swarm.models.spec import SplitConfig
from swarm.optim.schedules import OptimizerConfig

HELD_OUT_FRACTION = 0.05
_MORE_TEXT = "Give more text, or ask for fewer --trainers."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The user's choices for a local run. ``local_steps`` is the number of optimizer steps that each replica takes on
    its own before all synchronise and a step of the run closes; 1: they average each batch's gradients. ``chosen`` is
    the model, None: our own."""

    steps: int
    peers: int
    stages: int
    trainers: int
    seed: int
    ends: Literal["private", "hosted"]
    reproducible: bool
    local_steps: int = 1
    chosen: ChosenModel | None = None

    @property
    def model(self) -> AnyModel:
        """The run's ``[model]``."""
        return GptConfig() if self.chosen is None else self.chosen.config

    @property
    def closes(self) -> int:
        """Steps of the run."""
        return -(-self.steps // self.local_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start."""

    manifest: Manifest
    shards: tuple[ShardManifest, ...]
    held_out: ShardManifest


def make_manifest(shape: RunShape, tokenizer: str, nonce: str = "") -> Manifest:
    """The run manifest of a shape: the project's defaults for the rest. Raises ConfigError for what cannot run."""
    manifest = Manifest(
        run=RunConfig(
            nonce=nonce,
            seed=shape.seed,
            steps=shape.closes,
            reproducible=shape.reproducible,
            start_when=StartWhen(stage_hosts=shape.peers, trainers=shape.trainers),
        ),
        model=shape.model,
        split=SplitConfig(stages=shape.stages, ends=shape.ends),
        optimizer=OptimizerConfig() if shape.chosen is None or shape.chosen.config.scratch else FINE_TUNING,
        tokenizer=TokenizerConfig(digest=tokenizer, **({} if shape.chosen is None else shape.chosen.spoken)),
        averaging=_averaging(shape),
    )
    check_manifest(manifest)
    return manifest


FINE_TUNING = OptimizerConfig(lr=2e-5, weight_decay=0.0)
"""For weights that are trained already: small steps, and no pull to zero."""

FEW_ROUNDS = LocalConfig(outer_lr=1.0, outer_momentum=0.0)
"""Plain averaging: in the few rounds of such a run DiLoCo's momentum makes up to seven steps of one (measured: 0.5 nats
behind, `python -m tests.benchmarks convergence`)."""


def _averaging(shape: RunShape) -> AveragingConfig:
    if shape.local_steps == 1:
        return AveragingConfig()
    return AveragingConfig(mode="local", local=FEW_ROUNDS.model_copy(update={"steps": shape.local_steps}))


def check_shape(shape: RunShape) -> None:
    """Refuse an impossible run before anything is made. Raises ConfigError naming the flag."""
    limits = {"steps": 10**9 - 1, "stages": 512, "peers": 64, "trainers": 64, "local_steps": 1000}
    for key, most in limits.items():
        value = getattr(shape, key)
        if not 1 <= value <= most:
            raise ConfigError(
                f"--{key.replace('_', '-')}", value, f"from 1 to {most}", "Choose a number in that range."
            )
    if not 0 <= shape.seed < 2**31:
        raise ConfigError("--seed", shape.seed, "from 0 to 2147483647", "Choose a number in that range.")
    if shape.peers < shape.stages:
        raise ConfigError(
            "--peers",
            shape.peers,
            f"at least --stages = {shape.stages}",
            f"Ask for more peers (--peers {shape.stages}) or fewer stages (--stages {shape.peers}).",
            why="every stage needs a replica",
        )
    if shape.reproducible and shape.local_steps > 1:
        raise ConfigError(
            "--reproducible",
            f"with --local-steps {shape.local_steps}",
            "one of the two",
            "Leave one of them out.",
            why="the weights of replicas that train apart depend on which of them computed what",
        )
    layers = family_of(shape.model).layers
    if shape.stages > layers:
        raise ConfigError("--stages", shape.stages, f"at most {layers}, the model's layers", "Ask for fewer stages.")


def prepare_run(shape: RunShape, corpus: Corpus, directory: RunDirectory) -> PreparedRun:
    """Write tokenizer, one disjoint shard per trainer, the held-out shard and ``run.toml``; about 2 s for 2 MB.

    Imports no torch. Raises ConfigError when there is too little text, StateError when the disk refuses.
    """
    split = _split(corpus, shape)
    if shape.chosen is None:
        tokenizer_json = train_tokenizer(sample_texts(split.shards), GptConfig().vocab_size)
    else:
        tokenizer_json = shape.chosen.tokenizer
    manifest = make_manifest(shape, tokenizer_digest(tokenizer_json), new_nonce())
    end = manifest.tokenizer.end or None
    if shape.chosen is not None:
        check_parts(shape.chosen.config, manifest.split)
    check()
    shards = []
    for trainer, documents in enumerate(split.shards):
        shards.append(build_shard(directory.shard(trainer), documents, tokenizer_json, end))
        check()
    held_out = build_shard(directory.held_out, split.held_out, tokenizer_json, end)
    _check_sizes(manifest, corpus.name, shards, held_out)
    try:
        write_whole(directory.tokenizer, [tokenizer_json])
        write_manifest(manifest, directory.manifest)
    except OSError as error:
        raise StateError(f"{directory.root}: {error.strerror}. Check space and permissions.") from error
    return PreparedRun(manifest=manifest, shards=tuple(shards), held_out=held_out)


def _split(corpus: Corpus, shape: RunShape) -> DocumentSplit:
    try:
        return split_documents(corpus.documents, shape.trainers, HELD_OUT_FRACTION, shape.seed)
    except ConfigError as error:
        has = f"{count(len(set(corpus.documents)), 'different document')} of {corpus.characters} characters together"
        raise ConfigError("--text", corpus.name, f"{error.allowed} (documents); this is {has}", _MORE_TEXT) from None


def _check_sizes(manifest: Manifest, name: str, shards: Sequence[ShardManifest], held_out: ShardManifest) -> None:
    """Raises ConfigError when a trainer could not fill a microbatch, or nobody could be judged."""
    context, microbatch = manifest.model.context, manifest.batch.microbatch_size
    enough = all(row_count(shard.tokens, context) >= microbatch for shard in shards)
    if enough and row_count(held_out.tokens, context) >= 1:
        return
    each, least_held_out = microbatch * context + 1, context + 1
    needed = max(each * len(shards) / (1 - HELD_OUT_FRACTION), least_held_out / HELD_OUT_FRACTION)
    there = held_out.tokens + sum(shard.tokens for shard in shards)
    allowed = (
        f"text of about {math.ceil(needed)} tokens or more ({each} for each of {count(len(shards), 'trainer')}, "
        f"{least_held_out} held out); this has {there}"
    )
    raise ConfigError("--text", name, allowed, _MORE_TEXT)
