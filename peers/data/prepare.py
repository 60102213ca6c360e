"""Prepare a local run before its first peer: tokenizer, disjoint shards, held-out text, manifest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from data_shards.build import Document, DocumentSplit, build_encoded, build_shard, split_documents
from data_shards.documents import rows_of
from data_shards.draft import Documents
from data_shards.manifest import ShardManifest
from data_shards.packing import row_count
from data_shards.shard import Shard
from data_shards.tokenize import Passage, Tokenizer, tokenizer_digest, train_tokenizer
from peers.console.interrupt import check
from peers.console.words import count
from peers.data.building import encoded_documents
from peers.data.flaws import LeftOut
from peers.data.keys import KeyCount
from peers.data.source import check_ids_fit
from peers.data.text import Corpus, sample_texts
from peers.data.tokenizer_files import run_encoding
from peers.foreign_model import ADAPTER_LR, ChosenModel, check_parts
from peers.home.run_directory import RunDirectory
from peers.manifest_file import write_manifest
from swarm.averaging.config import AveragingConfig, LocalConfig
from swarm.config import Manifest, RunConfig, StartWhen, TokenizerConfig, check_manifest, new_nonce
from swarm.disk import write_whole
from swarm.errors import ConfigError, StateError
from swarm.models.gpt_config import GptConfig
from swarm.models.hf.hf_config import HfConfig
from swarm.models.lora_config import LoraConfig
from swarm.models.registry import AnyModel, family_of
from swarm.models.spec import SplitConfig
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig, Packing
from swarm.schema import TOKENIZER_FILE

TEXT = "--text"
HELD_OUT_FRACTION = 0.05
_MORE_TEXT = "Give more text, or ask for fewer --trainers."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The user's choices for a local run. ``local_steps`` is the number of optimizer steps that each replica takes on
    its own before all synchronise and a step of the run closes; 1: they average each batch's gradients. ``chosen`` is
    the model, None: our own; ``lora`` says which adapters are trained beside it, None: all of its weights."""

    steps: int
    peers: int
    stages: int
    trainers: int
    seed: int
    ends: Literal["private", "hosted"]
    reproducible: bool
    local_steps: int = 1
    chosen: ChosenModel | None = None
    packing: Packing = "stream"
    lora: LoraConfig | None = None

    @property
    def speaks(self) -> bool:
        """Whether its model has a chat template, so that it can be trained on conversations."""
        return self.chosen is not None and bool(self.chosen.spoken.get("template"))

    @property
    def model(self) -> AnyModel:
        """The run's ``[model]``."""
        model = GptConfig() if self.chosen is None else self.chosen.config
        return model if self.lora is None else model.model_copy(update={"lora": self.lora})

    @property
    def files(self) -> dict[str, bytes]:
        """The files that its model came with beside the tokenizer."""
        return {} if self.chosen is None else self.chosen.came_with.kept

    @property
    def closes(self) -> int:
        """Steps of the run."""
        return -(-self.steps // self.local_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start. ``rows`` are each trainer's, ``left_out`` is what of the text could not be used, in
    words for behind the rest."""

    manifest: Manifest
    shards: tuple[ShardManifest, ...]
    held_out: ShardManifest
    rows: tuple[int, ...]
    left_out: str


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
        batch=BatchConfig(packing=shape.packing),
        split=SplitConfig(stages=shape.stages, ends=shape.ends),
        optimizer=_optimizer(shape),
        tokenizer=TokenizerConfig(digest=tokenizer, **({} if shape.chosen is None else shape.chosen.spoken)),
        files={name: hashlib.sha256(data).hexdigest() for name, data in shape.files.items()},
        averaging=_averaging(shape),
    )
    check_manifest(manifest)
    return manifest


FOR_ADAPTERS = OptimizerConfig(lr=ADAPTER_LR, weight_decay=0.0)

FINE_TUNING = OptimizerConfig(lr=2e-5, weight_decay=0.0)
"""For weights that are trained already: small steps, and no pull to zero."""

FEW_ROUNDS = LocalConfig(outer_lr=1.0, outer_momentum=0.0)
"""Plain averaging: in the few rounds of such a run DiLoCo's momentum makes up to seven steps of one (measured: 0.5 nats
behind, benchmark `convergence` at df58d3c1)."""


def _optimizer(shape: RunShape) -> OptimizerConfig:
    if shape.lora is not None:
        return FOR_ADAPTERS
    return OptimizerConfig() if shape.chosen is None or shape.chosen.config.scratch else FINE_TUNING


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

    Of a corpus with conversations, which a model with a template can have, all is encoded first, and dealt out as
    tokens. Imports no torch. Raises ConfigError when there is too little text, StateError when the disk refuses.
    """
    if corpus.files and shape.chosen is not None:
        return _prepare_chats(shape, shape.chosen, corpus, directory)
    split = _split(corpus.documents, f"{corpus.characters} characters", corpus.name, shape)
    if shape.chosen is None:
        tokenizer_json = train_tokenizer(sample_texts(split.shards), GptConfig().vocab_size)
    else:
        tokenizer_json = shape.chosen.tokenizer
    manifest = _checked_manifest(shape, tokenizer_json, directory)
    end, keys = manifest.tokenizer.end or None, KeyCount()
    special = Tokenizer(tokenizer_json, end).special_text
    for text in corpus.documents:
        keys.look_for_special(text, special)
    check()

    def build(out: Path, documents: Sequence[str | Passage]) -> ShardManifest:
        return build_shard(out, documents, tokenizer_json, end)

    corpus = replace(corpus, left_out=corpus.left_out + keys.words())
    files = {TOKENIZER_FILE: tokenizer_json} | shape.files
    return _written(manifest, split, build, files, corpus, directory)


def _prepare_chats(shape: RunShape, chosen: ChosenModel, corpus: Corpus, directory: RunDirectory) -> PreparedRun:
    manifest = _checked_manifest(shape, chosen.tokenizer, directory)
    encoding = run_encoding(chosen.tokenizer, manifest.tokenizer, key=TEXT)
    tokenizer, keys = encoding.make_tokenizer(), KeyCount()
    left_out = LeftOut(TEXT, allow_bad=corpus.allow_bad)
    template = None if encoding.template is None else encoding.template.digest
    found = encoded_documents(corpus.files, encoding, left_out, keys)
    documents = [document for some in found for document in some.documents.apart()]
    left_out.check(corpus.files[0], some=True)
    tokens = sum(len(Documents.of(document).tokens) for document in documents)
    split = _split(documents, f"{tokens} tokens", corpus.name, shape)

    def build(out: Path, documents: Sequence[bytes]) -> ShardManifest:
        return build_encoded(out, map(Documents.of, documents), tokenizer, template)

    corpus = replace(corpus, left_out=left_out.words + keys.words())
    return _written(manifest, split, build, {TOKENIZER_FILE: chosen.tokenizer} | shape.files, corpus, directory)


def _checked_manifest(shape: RunShape, tokenizer_json: bytes, directory: RunDirectory) -> Manifest:
    manifest = make_manifest(shape, tokenizer_digest(tokenizer_json), new_nonce())
    if isinstance(manifest.model, HfConfig):
        check_parts(manifest.model, manifest.split)
    if shape.lora is None:
        return manifest
    from peers.frozen import with_frozen  # torch
    from swarm.state.frozen import FrozenStore

    files = None if shape.chosen is None else shape.chosen.files
    return with_frozen(manifest, files, FrozenStore(directory.frozen), lambda _: None)


def _written(
    manifest: Manifest,
    split: DocumentSplit[Document],
    build: Callable[[Path, Sequence[Document]], ShardManifest],
    files: Mapping[str, bytes],
    corpus: Corpus,
    directory: RunDirectory,
) -> PreparedRun:
    shards: list[ShardManifest] = []
    rows: list[int] = []
    for trainer, documents in enumerate(split.shards):
        shards.append(build(directory.shard(trainer), documents))
        rows.append(_rows(manifest, directory.shard(trainer), shards[-1], corpus.name))
        check()
    held_out = build(directory.held_out, split.held_out)
    there = _rows(manifest, directory.held_out, held_out, corpus.name)
    _check_sizes(manifest, corpus.name, shards, held_out, (*rows, there))
    try:
        for name, data in files.items():
            write_whole(directory.file(name), [data])
        write_manifest(manifest, directory.manifest)
    except OSError as error:
        raise StateError(f"{directory.root}: {error.strerror}. Check space and permissions.") from error
    return PreparedRun(
        manifest=manifest, shards=tuple(shards), held_out=held_out, rows=tuple(rows), left_out=corpus.left_out
    )


def _split(documents: Sequence[Document], size: str, name: str, shape: RunShape) -> DocumentSplit[Document]:
    try:
        return split_documents(documents, shape.trainers, HELD_OUT_FRACTION, shape.seed)
    except ConfigError as error:
        has = f"{count(len(set(documents)), 'different document')} of {size} together"
        raise ConfigError(TEXT, name, f"{error.allowed} (documents); this is {has}", _MORE_TEXT) from None


def _rows(manifest: Manifest, path: Path, shard: ShardManifest, name: str) -> int:
    """Rows of a shard that was just built, with something to learn in each. Raises ConfigError, naming the text, for
    tokens that the model has no row for."""
    model, packing = manifest.model, manifest.batch.packing
    if shard.counted is None and packing == "stream" and shard.vocab_size <= model.vocab_size:
        return row_count(shard.tokens, model.context)  # nothing has to be read
    built = Shard.open(path)
    check_ids_fit(built, manifest, TEXT, name)
    return rows_of(built, model.context, packing).count


def _check_sizes(
    manifest: Manifest, name: str, shards: Sequence[ShardManifest], held_out: ShardManifest, rows: Sequence[int]
) -> None:
    """Raises ConfigError when a trainer could not fill a microbatch, or nobody could be judged. ``rows`` are those of
    each shard, held-out text last."""
    context, microbatch = manifest.model.context, manifest.batch.microbatch_size
    if min(rows[:-1]) >= microbatch and rows[-1] >= 1:
        return
    if any(shard.counted is not None for shard in (*shards, held_out)) or manifest.batch.packing == "documents":
        allowed = (
            f"text for at least {count(microbatch, 'row')} of {context} tokens with something to learn for each of "
            f"{count(len(shards), 'trainer')}, and 1 held out; this has {min(rows[:-1])}, and {rows[-1]} held out"
        )
        raise ConfigError(TEXT, name, allowed, _MORE_TEXT)
    each, least_held_out = microbatch * context + 1, context + 1
    needed = max(each * len(shards) / (1 - HELD_OUT_FRACTION), least_held_out / HELD_OUT_FRACTION)
    there = held_out.tokens + sum(shard.tokens for shard in shards)
    allowed = (
        f"text of about {math.ceil(needed)} tokens or more ({each} for each of {count(len(shards), 'trainer')}, "
        f"{least_held_out} held out); this has {there}"
    )
    raise ConfigError(TEXT, name, allowed, _MORE_TEXT)
