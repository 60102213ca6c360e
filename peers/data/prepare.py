"""Prepare a local run before its first peer: tokenizer, disjoint shards, held-out text, manifest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_shards.build import DocumentSplit, build_encoded, split_documents
from data_shards.documents import rows_of
from data_shards.draft import Documents
from data_shards.manifest import ShardManifest
from data_shards.packing import row_count
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer
from peers.console.interrupt import check
from peers.console.words import count
from peers.data.building import encoded_documents
from peers.data.encoder import Encoding
from peers.data.files import source_files
from peers.data.flaws import LeftOut
from peers.data.keys import KeyCount
from peers.data.text import BUILT_IN_CHARACTERS, built_in_corpus, read_corpus
from peers.data.tokenizer_files import run_encoding
from peers.data.trainer_data import check_ids_fit
from peers.founding_files import Founded, given_tokenizer, make_run, tokenizer_for
from peers.home.run_directory import RunDirectory
from peers.manifest_file import write_manifest
from peers.options.foundation import Foundation
from swarm.config import Manifest
from swarm.disk import write_whole
from swarm.errors import ConfigError, StateError
from swarm.schema import TOKENIZER_FILE

TEXT = "--text"
HELD_OUT_FRACTION = 0.05
BYTES_PER_TOKEN = 3
"""Of English, with the few thousand tokens of a small run; of others it is more."""
_MORE_TEXT = "Give more text, or ask for fewer --trainers."


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalText:
    """The text of a local run: files and directories, none for what comes with Python; whether the text of special
    tokens in it is taken for these, and whether it is read without what cannot be used, however much that is."""

    paths: tuple[Path, ...] = ()
    special_tokens: bool = False
    allow_bad: bool = False

    @property
    def tokens(self) -> int:
        """About how many tokens it has."""
        files = [file for path in self.paths for file in source_files(path, TEXT)]
        return (sum(file.bytes for file in files) or BUILT_IN_CHARACTERS) // BYTES_PER_TOKEN

    @property
    def name(self) -> str:
        """Return what it is called, for people."""
        return ", ".join(path.name for path in self.paths) or "Python's own documentation"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start. ``rows`` are each trainer's, ``left_out`` is what of the text could not be used, in
    words for behind the rest."""

    founded: Founded
    shards: tuple[ShardManifest, ...]
    held_out: ShardManifest
    rows: tuple[int, ...]
    left_out: str

    @property
    def manifest(self) -> Manifest:
        """The run's."""
        return self.founded.manifest


def prepare_run(
    foundation: Foundation, document: dict[str, Any], text: LocalText, directory: RunDirectory
) -> PreparedRun:
    """Write tokenizer, one disjoint shard per trainer, the held-out shard and ``run.toml``; about 2 s for 2 MB.

    Text is read as ``swarm data build`` and trainers read it, encoded first, and dealt out as tokens. A tokenizer that
    is made for the run is trained on all of it.

    Args:
        foundation: What the run is founded with.
        document: Its manifest, as :func:`peers.founding_files.load_foundation` gives it.
        text: What its trainers learn.
        directory: Where everything goes.

    Raises:
        ConfigError: There is too little text, or it cannot be used.
        StateError: The disk refuses.
    """
    made, built_in = None, None if text.paths else built_in_corpus()
    if given_tokenizer(foundation, document) is None:
        corpus = built_in or read_corpus(text.paths, allow_bad=text.allow_bad)
        made = tokenizer_for(foundation, document, corpus)
        check()
    founded = make_run(foundation, document, made)
    from peers.frozen import with_frozen  # torch: not before what was typed is known to be right
    from swarm.state.frozen import FrozenStore

    store = FrozenStore(directory.frozen)
    founded = dataclasses.replace(
        founded, manifest=with_frozen(founded.manifest, founded.model_files, store, lambda _: None)
    )
    manifest = founded.manifest
    encoding = run_encoding(
        founded.files[TOKENIZER_FILE], manifest.tokenizer, key=TEXT, special_in_text=text.special_tokens
    )
    left_out, keys = LeftOut(TEXT, allow_bad=text.allow_bad), KeyCount()
    if built_in is None:
        found = encoded_documents(text.paths, encoding, left_out, keys)
        documents = [document for some in found for document in some.documents.apart()]
        left_out.check(text.paths[0], some=True)
    else:
        encoded = encoding.make_tokenizer().encode_documents(built_in.documents)
        documents = [document for tokens, _ in encoded for document in Documents(tokens).apart()]
        check()
    split = _split(documents, text.name, manifest)
    return _written(founded, encoding, split, text.name, directory, left_out.words + keys.words("--special-tokens"))


def _written(
    founded: Founded,
    encoding: Encoding,
    split: DocumentSplit[bytes],
    name: str,
    directory: RunDirectory,
    left_out: str,
) -> PreparedRun:
    manifest, tokenizer = founded.manifest, encoding.make_tokenizer()
    shards: list[ShardManifest] = []
    rows: list[int] = []
    for trainer, documents in enumerate(split.shards):
        shards.append(_build(directory.shard(trainer), documents, tokenizer, encoding))
        rows.append(_rows(manifest, directory.shard(trainer), shards[-1], name))
        check()
    held_out = _build(directory.held_out, split.held_out, tokenizer, encoding)
    there = _rows(manifest, directory.held_out, held_out, name)
    _check_sizes(manifest, name, shards, held_out, (*rows, there))
    try:
        for file, data in founded.files.items():
            write_whole(directory.file(file), [data])
        write_manifest(manifest, directory.manifest)
    except OSError as error:
        raise StateError(f"{directory.root}: {error.strerror}. Check space and permissions.") from error
    return PreparedRun(founded=founded, shards=tuple(shards), held_out=held_out, rows=tuple(rows), left_out=left_out)


def _build(out: Path, documents: Iterable[bytes], tokenizer: Tokenizer, encoding: Encoding) -> ShardManifest:
    template = None if encoding.template is None else encoding.template.digest
    return build_encoded(out, map(Documents.of, documents), tokenizer, template)


def _split(documents: Sequence[bytes], name: str, manifest: Manifest) -> DocumentSplit[bytes]:
    try:
        return split_documents(documents, manifest.run.start_when.trainers, HELD_OUT_FRACTION, manifest.run.seed)
    except ConfigError as error:
        tokens = sum(len(Documents.of(document).tokens) for document in documents)
        has = f"{count(len(set(documents)), 'different document')} of {count(tokens, 'token')} together"
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
