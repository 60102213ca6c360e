"""Everything a local run needs before its first peer: tokenizer, disjoint shards, held-out text, manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data_shards.build import build_shard
from data_shards.manifest import ShardManifest
from data_shards.packing import row_count
from data_shards.split import split_documents
from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.interrupt import check
from peers.manifest_file import write_manifest
from peers.run_directory import RunDirectory
from peers.text import Corpus
from swarm.config import Manifest, RunConfig, TokenizerConfig, check_manifest
from swarm.errors import ConfigError, StateError
from swarm.models.spec import ModelConfig, SplitConfig

HELD_OUT_FRACTION = 0.05
SAMPLE_CHARACTERS = 8_000_000
"""Text the tokenizer is trained on: frequent words of a few megabytes are those of the whole, and training it cannot
be interrupted, so it must stay short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What the user chose about a local run."""

    steps: int
    peers: int
    stages: int
    trainers: int
    seed: int
    ends: Literal["private", "hosted"]
    reproducible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is ready to start."""

    manifest: Manifest
    shards: tuple[ShardManifest, ...]
    held_out: ShardManifest


def make_manifest(shape: RunShape, tokenizer: str) -> Manifest:
    """The run manifest of a shape: the project's defaults for the rest. Raises ConfigError for what cannot run."""
    manifest = Manifest(
        run=RunConfig(
            seed=shape.seed,
            steps=shape.steps,
            reproducible=shape.reproducible,
            stage_hosts=shape.peers,
            trainers=shape.trainers,
        ),
        split=SplitConfig(stages=shape.stages, ends=shape.ends),
        tokenizer=TokenizerConfig(digest=tokenizer),
    )
    check_manifest(manifest)
    return manifest


def check_shape(shape: RunShape) -> None:
    """Refuse an impossible run before anything is made. Raises ConfigError naming the flag."""
    limits = {"steps": 10**9 - 1, "stages": 512, "peers": 64, "trainers": 64}
    for key, most in limits.items():
        value = getattr(shape, key)
        if not 1 <= value <= most:
            raise ConfigError(f"--{key}", value, f"from 1 to {most}", "Choose a number in that range.")
    if not 0 <= shape.seed < 2**31:
        raise ConfigError("--seed", shape.seed, "from 0 to 2147483647", "Choose a number in that range.")
    if shape.peers < shape.stages:
        raise ConfigError(
            "--peers",
            shape.peers,
            f"at least --stages = {shape.stages}",
            "Every stage needs a replica: ask for more peers or fewer stages.",
        )
    layers = ModelConfig().layers
    if shape.stages > layers:
        raise ConfigError("--stages", shape.stages, f"at most {layers}, the model's layers", "Ask for fewer stages.")


def prepare_run(shape: RunShape, corpus: Corpus, directory: RunDirectory) -> Prepared:
    """Write tokenizer, one disjoint shard per trainer, the held-out shard and ``run.toml``; about 2 s for 2 MB.

    Imports no torch. Raises ConfigError when there is too little text, StateError when the disk refuses.
    """
    split = split_documents(corpus.documents, shape.trainers, HELD_OUT_FRACTION, shape.seed)
    tokenizer_json = train_tokenizer(_sample(split.shards), ModelConfig().vocab_size)
    manifest = make_manifest(shape, tokenizer_digest(tokenizer_json))
    check()
    shards = []
    for trainer, documents in enumerate(split.shards):
        shards.append(build_shard(directory.shard(trainer), documents, tokenizer_json))
        check()
    held_out = build_shard(directory.held_out, split.held_out, tokenizer_json)
    _check_sizes(manifest, shards, held_out)
    try:
        directory.tokenizer.write_bytes(tokenizer_json)
        write_manifest(manifest, directory.manifest)
    except OSError as error:
        raise StateError(f"{directory.root}: {error.strerror}. Check space and permissions.") from error
    return Prepared(manifest=manifest, shards=tuple(shards), held_out=held_out)


def _sample(shards: Sequence[Sequence[str]]) -> list[str]:
    """The first documents of every shard, up to :data:`SAMPLE_CHARACTERS` in all."""
    texts: list[str] = []
    for documents in shards:
        room = SAMPLE_CHARACTERS // len(shards)
        for document in documents:
            if room <= 0:
                break
            texts.append(document[:room])
            room -= len(document)
    return texts


def _check_sizes(manifest: Manifest, shards: Sequence[ShardManifest], held_out: ShardManifest) -> None:
    context, microbatch = manifest.model.context, manifest.batch.microbatch_size
    remedy = "Give more text, or ask for fewer trainers."
    smallest = min(shard.tokens for shard in shards)
    if row_count(smallest, context) < microbatch:
        allowed = f"text of at least {microbatch * context + 1} tokens per trainer"
        raise ConfigError("--text", f"{smallest} tokens for one of them", allowed, remedy)
    if row_count(held_out.tokens, context) < 1:
        raise ConfigError("--text", f"{held_out.tokens} held-out tokens", f"at least {context + 1}", remedy)
