"""A trainer's data: a built shard, plain text, or the text that comes with Python; and ``swarm data``, shards by hand.

:func:`check_data` says before anybody is called whether the data can be used at all; :func:`shard_for` makes of it,
once the run's tokenizer is known, the shard that the trainer reads.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from data_shards.build import build_shard, document_text
from data_shards.documents import rows_of
from data_shards.manifest import MANIFEST_FILE, REBUILD, ShardManifest, read_manifest
from data_shards.router import Router
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer, tokenizer_digest
from peers.console.lasting import Told, tells_nobody
from peers.console.words import another_path, command_name, count
from peers.data.blocks import blocks_of
from peers.data.building import BuildProgress, build_from_files, discard_build
from peers.data.encoder import Encoding
from peers.data.files import source_files
from peers.data.flaws import LeftOut
from peers.data.foreign_tokenizer import check_foreign_tokenizer
from peers.data.keys import KeyCount
from peers.data.records import Completion, Conversation, usable_in
from peers.data.text import built_in_corpus
from peers.data.tokenizer_files import read_template, run_encoding
from swarm.errors import ConfigError, Incompatible, StateError
from swarm.events import DataOpened

if TYPE_CHECKING:
    from data_shards.shard_source import ShardSource
    from peers.options.model import PeerOptions
    from peers.settings import Role
    from swarm.config import Manifest
    from swarm.ids import PeerId
    from swarm.security.credentials import Credential


DATA, EVAL, TEMPLATE = "--data", "--eval", "--data-template"
"""What errors call it, unless they are told otherwise."""
IDS_AT_ONCE = 1 << 24
"""Token ids of a shard that are looked at together: 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFound:
    """The data for training, in words, and a digest that distinguishes it from other data at any path."""

    words: str
    digest: str


@dataclass(frozen=True, slots=True)
class DataGiven:
    """What a trainer was told to train on: see :func:`peers.data.tokenizer_files.read_encoding` for ``field``,
    ``template`` and ``special_in_text``, :class:`peers.data.flaws.LeftOut` for ``allow_bad``."""

    path: Path
    field: str | None = None
    template: Path | None = None
    special_in_text: bool = False
    allow_bad: bool = False


@dataclass(frozen=True, slots=True)
class ShardMade:
    """The directory of the shard that a trainer reads. ``unused`` is of how much text it is, and what of that is not in
    it, in words for behind the rest."""

    path: Path
    unused: str = ""


def data_given(options: PeerOptions) -> DataGiven | None:
    """Return a peer's data; None: the text that comes with Python. Raises ConfigError for options that need data."""
    if options.data is not None:
        return DataGiven(
            options.data,
            options.data_field,
            options.data_template,
            options.data_special_tokens,
            options.data_allow_bad,
        )
    needing = {
        "--data-field": options.data_field,
        "--data-template": options.data_template,
        "--data-special-tokens": options.data_special_tokens or None,
        "--data-allow-bad": options.data_allow_bad or None,
    }
    for name, value in needing.items():
        if value is not None:
            remedy = f"Leave {name} out, or give --data PATH."
            raise ConfigError(name, str(value), "only together with --data", remedy, why="it says how to read the text")
    return None


def held_out_given(options: PeerOptions) -> DataGiven | None:
    """Return what a trainer measures the loss of, read as its data is; None where it measures none. Raises ConfigError
    for how often without what."""
    if options.eval is None:
        if options.eval_every is not None:
            raise ConfigError(
                "--eval-every", options.eval_every, "only together with --eval", "Leave it out, or add --eval."
            )
        return None
    return DataGiven(
        options.eval, options.data_field, options.data_template, options.data_special_tokens, options.data_allow_bad
    )


def check_data(data: DataGiven, key: str = DATA, told: Told = tells_nobody) -> DataFound:
    """Check the data, which an option ``key`` named, as far as possible without the run's tokenizer, and return its
    description. ``told`` is told how many bytes are read, and of how many.

    A built shard is verified; text must be UTF-8, and each record hold a text, or a conversation with an answer: what
    does not is counted, all but what the chat template refuses. Cost: the data is read once, some ten seconds per
    gigabyte. Raises ConfigError naming the path, the cause and what to do.
    """
    path = data.path
    if is_shard(path):
        shard = open_shard(path).manifest
        return DataFound(words=f"a shard of {shard.tokens:,} tokens", digest=shard.digest)
    template = None if data.template is None else read_template(data.template, TEMPLATE).digest
    how = json.dumps([data.field, template, data.special_in_text])
    files, found = source_files(path, key), hashlib.sha256(how.encode())
    characters, left_out, keys = 0, LeftOut(key, allow_bad=data.allow_bad), KeyCount()
    left_out.pass_by(path)
    *before, total = accumulate((file.bytes for file in files), initial=0)
    placed = zip(before, files, strict=True)
    for read, block in ((read, block) for read, file in placed for block in blocks_of(file, key, data.field)):
        found.update(block.digest.encode())
        told(str(path), read + block.read, total)
        for document in usable_in(block, left_out, data.field, keys):
            if isinstance(document, (Conversation, Completion)):
                characters += document.text_bytes
            else:
                characters += len(document_text(document))
    left_out.check(path, some=bool(characters), keys=keys)
    kind = "text file" if all(file.kind == "text" for file in files) else "file"
    return DataFound(
        words=f"{count(len(files), kind)}, {characters:,} characters{left_out.words}", digest=found.hexdigest()
    )


def is_shard(path: Path) -> bool:
    """Return whether a path is a directory that holds a shard's manifest."""
    return (path / MANIFEST_FILE).is_file()


def shard_for(
    data: DataGiven | None,
    tokenizer_json: bytes,
    manifest: Manifest,
    into: Path,
    seed: str,
    *,
    given_up: Callable[[], bool] = lambda: False,
) -> ShardMade:
    """The shard that a trainer of this run reads. Blocking: call it in a thread.

    A built shard is used where it lies, after its tokenizer is compared with the run's. Text is tokenised into the new
    directory ``into``; without ``data`` that is the built-in text, its documents in an order that depends on ``seed``
    (the peer id), so that two such trainers feed different rows at any time. Cost: about half a second per megabyte of
    text, and its tokens on disk. Raises Incompatible for another tokenizer, ConfigError for data that is missing,
    unreadable or too little for one microbatch, and for a tokenizer that must not be loaded, StateError when the disk
    refuses, or when the caller has ``given_up``,
    which is asked before each document; no shard is left then.
    """
    check_foreign_tokenizer(tokenizer_json)
    check_tokenizer(manifest, tokenizer_json)
    if data is not None and is_shard(data.path):
        shard = open_shard(data.path)
        _check_same_tokenizer(data.path, shard.manifest, tokenizer_json, into.with_name("tokenizer.json"))
        _check_enough(shard, manifest, str(data.path))
        return ShardMade(data.path)
    name, unused = "Python's own documentation" if data is None else str(data.path), ""
    if data is None:
        build_shard(into, _unless(given_up, _shuffled_built_in(seed)), tokenizer_json, manifest.tokenizer.end or None)
    else:
        unused = _build_given(data, _encoding(data, tokenizer_json, manifest), into, given_up)
    try:
        _check_enough(Shard.open(into), manifest, name)
    except ConfigError:
        shutil.rmtree(into, ignore_errors=True)
        raise
    return ShardMade(into, unused)


def check_tokenizer(manifest: Manifest, tokenizer_json: bytes) -> None:
    """Check that a tokenizer is the manifest's, and that its model has a row for every token id.

    Raises Incompatible for another one, ConfigError when it has more ids than the model.
    """
    tokenizer = Tokenizer(tokenizer_json, manifest.tokenizer.end or None)
    if tokenizer.digest != manifest.tokenizer.digest:
        raise Incompatible(
            "tokenizer",
            tokenizer.digest[:16],
            f"the run's tokenizer, {manifest.tokenizer.digest[:16]}",
            "Give the tokenizer.json that the run was made with.",
        )
    beyond = set(range(manifest.model.vocab_size, tokenizer.vocab_size))
    if not beyond <= tokenizer.special_ids:  # those that no text becomes
        raise ConfigError(
            "model.vocab_size",
            manifest.model.vocab_size,
            f"at least {tokenizer.vocab_size}, the tokenizer's number of token ids",
            "Make model.vocab_size larger, or use a smaller tokenizer.",
        )


def data_opened(manifest: Manifest, microbatches: int, unused: str = "", *, held_out: bool = False) -> DataOpened:
    """Say how much a trainer's text of so many microbatches is in a run that keeps the trainers it starts with, if they
    feed alike; ``unused`` as in :class:`ShardMade`; ``held_out`` for text of which the loss is measured. Pure."""
    fed = manifest.run.steps * manifest.step_microbatches / max(1, manifest.run.start_when.trainers)
    return DataOpened(
        tokens=microbatches * manifest.batch.microbatch_size * manifest.model.context,
        microbatches=microbatches,
        times=fed / microbatches,
        unused=unused,
        held_out=held_out,
    )


def open_shard(path: Path, key: str = DATA, *, anew: bool = False) -> Shard:
    """The verified shard, see :meth:`Shard.open`. Raises ConfigError where it is missing or broken:
    what to give is the user's choice."""
    try:
        return Shard.open(path, anew=anew)
    except StateError as error:
        cause = str(error).removesuffix(REBUILD).rstrip(". ")
        remedy = f"Build it again: {command_name()} data build TEXT --tokenizer FILE --out {shlex.quote(str(path))}"
        raise ConfigError(key, str(path), f"a whole shard; {cause}", remedy) from None


def open_source(manifest: Manifest, path: Path, trainer: PeerId, choice: int | None = None) -> ShardSource:
    """Open a trainer's private data, whose microbatches have this ``choice`` of variants where the run does not find it
    by text. Raises ConfigError or StateError naming the path and the remedy."""
    from data_shards.shard_source import BatchShape, ShardSource  # torch: not for those who only look at data

    return ShardSource(
        path,
        trainer=trainer,
        shape=BatchShape(manifest.batch.microbatch_size, manifest.model.context, manifest.batch.packing),
        tokenizer=manifest.tokenizer.digest,
        by=Router(manifest.split.centres) if manifest.split.route_by == "text" else choice or 0,
    )


def domain_of(manifest: Manifest, name: str | None, role: Role, credential: Credential | None = None) -> int | None:
    """Return the number of the run's domain that a trainer said its text is of, or a stage host what it wants to hold
    is for; None where none is said and none need be. Raises ConfigError for one that the run does not have, where a
    trainer says none, and for one whose expert an organisation keeps to itself that is not that of the ``credential``,
    where there is one."""
    split = manifest.split
    if name is None and (role != "trainer" or split.route_by != "domain"):
        return None
    join = f"{command_name()} join INVITE --role {role}"
    if split.route_by != "domain":
        why, more = "each stage of the run has one expert, for all text", ""
        if split.route_by == "text":
            why = "the run finds the expert of each row by its text"
            more = "" if role == "trainer" else ", or with --stage N for an expert of that stage"
        raise ConfigError("--domain", name, "none in this run", f"Leave it out: {join}{more}", why=why)
    if name not in split.domains:
        close = difflib.get_close_matches(name or "", split.domains, n=1)
        why = "the run has no such domain" if name else "a microbatch finds its experts by the domain of its trainer"
        named = f"{f'Did you mean {close[0]}? ' if close else ''}Name one: {join} --domain"
        raise ConfigError("--domain", name, f"one of {', '.join(split.domains)}",
                          f"{named} {(*close, *split.domains)[0]}", why=why)  # fmt: skip
    owner = split.own.get(name)
    if owner and credential is not None and credential.grant.organisation != owner:
        raise ConfigError("--domain", name, f"a domain that {owner} does not keep to itself",
                          f"Ask an issuer for an invite that names {owner}.",
                          why="the invite of this peer names another organisation, or none")  # fmt: skip
    return split.domains.index(name)


def _shuffled_built_in(seed: str) -> list[str]:
    key = hashlib.blake2b(seed.encode(), digest_size=32).digest()

    def rank(document: str) -> bytes:
        return hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=16, key=key).digest()

    return sorted(built_in_corpus().documents, key=rank)


def _encoding(data: DataGiven, tokenizer_json: bytes, manifest: Manifest) -> Encoding:
    """Return how the text becomes tokens: with the run's end token, and with the template that is given, else the
    run's."""
    return run_encoding(
        tokenizer_json,
        manifest.tokenizer,
        key=DATA,
        field=data.field,
        template=None if data.template is None else read_template(data.template, TEMPLATE),
        special_in_text=data.special_in_text,
    )


def _build_given(data: DataGiven, encoding: Encoding, into: Path, given_up: Callable[[], bool]) -> str:
    """Build the shard; return of how much text it is, and what of that is not in it, in words."""

    def told(progress: BuildProgress) -> None:
        if given_up():
            raise StateError("making the shard was given up")

    try:
        report = build_from_files([data.path], into, encoding, allow_bad=data.allow_bad, told=told)
    except BaseException:
        discard_build(into)
        raise
    of = f"of {report.shard.tokens:,} tokens in {count(report.shard.documents, 'document')}"
    lines = [of, *report.left_out.lines(), *report.keys.lines("--data-special-tokens")]
    return "".join(f"; {line}" for line in lines)


def _unless(given_up: Callable[[], bool], documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        if given_up():
            raise StateError("making the shard was given up")
        yield document


def _check_same_tokenizer(data: Path, shard: ShardManifest, tokenizer_json: bytes, keep: Path) -> None:
    wanted = tokenizer_digest(tokenizer_json)
    if shard.tokenizer == wanted:
        return
    keep.write_bytes(tokenizer_json)
    rebuild = f"{command_name()} data build TEXT --tokenizer {shlex.quote(str(keep))} --out NEW"
    raise Incompatible(
        DATA,
        str(data),
        f"a shard made with the run's tokenizer {wanted[:16]}; this one was made with {shard.tokenizer[:16]}",
        f"Give the text itself with --data, or build the shard again: {rebuild}",
    )


def _check_enough(shard: Shard, manifest: Manifest, name: str) -> None:
    check_ids_fit(shard, manifest, DATA, name)
    context, rows = manifest.model.context, manifest.batch.microbatch_size
    found = rows_of(shard, context, manifest.batch.packing).count
    if found < rows:
        needed = f"text of at least {rows * context + 1} tokens, one microbatch of {rows} rows of {context}"
        raise ConfigError(
            DATA,
            name,
            f"{needed}; this has {shard.manifest.tokens}, {count(found, 'row')} with targets",
            "Give more text: a directory, or several files joined into one.",
        )


def check_ids_fit(shard: Shard, manifest: Manifest, key: str, name: str) -> None:
    """Raise ConfigError where a shard has a token that the model has no row for: a chat template writes special tokens
    that no text becomes. ``key`` is the option that named the text, ``name`` its value. Reads the tokens only where
    there can be one."""
    rows = manifest.model.vocab_size
    if shard.manifest.vocab_size <= rows or not shard.manifest.tokens:
        return
    pieces = (shard.tokens[at : at + IDS_AT_ONCE] for at in range(0, shard.manifest.tokens, IDS_AT_ONCE))
    largest = max(int(piece.max()) for piece in pieces)
    if largest >= rows:
        remedy = "Resize the model's embeddings for its tokenizer, or take another chat template."
        raise ConfigError(key, name, f"token ids below {rows}, the model's rows; this has {largest}", remedy)


# --- shards made, checked and listed by hand: ``swarm data`` ---------------------------------------------------------


SCHEMA = 1
DEEPEST = 6
"""Levels of directories that a listing goes down."""


def check_made_with(shard: ShardManifest, tokenizer: str, path: Path) -> None:
    """Raise Incompatible when a shard was made with another tokenizer than the one of this digest."""
    if shard.tokenizer != tokenizer:
        raise Incompatible(
            "--tokenizer",
            tokenizer[:16],
            f"the tokenizer that {path} was made with, {shard.tokenizer[:16]}",
            "Give the tokenizer.json that it was built with.",
        )


def describe(path: Path, manifest: ShardManifest) -> dict[str, object]:
    """A shard as plain data: what ``--json`` prints."""
    return {
        "path": str(path),
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "tokenizer": manifest.tokenizer,
        "digest": manifest.digest,
    }


def shards_below(root: Path) -> list[dict[str, object]]:
    """Every shard in ``root`` and below it, :data:`DEEPEST` levels deep, links not followed; a broken one with its
    ``error``. Raises ConfigError when there is no such directory."""
    if not root.is_dir():
        raise ConfigError("DIR", str(root), "a directory", another_path(root), why="there is none of that name")
    found: list[dict[str, object]] = []
    for directory, inner, files in os.walk(root):
        path = Path(directory)
        if MANIFEST_FILE in files:
            inner.clear()
            try:
                found.append(describe(path, read_manifest(path)))
            except StateError as error:
                found.append({"path": str(path), "error": str(error)})
        elif len(path.relative_to(root).parts) >= DEEPEST:
            inner.clear()
    return sorted(found, key=lambda facts: str(facts["path"]))
