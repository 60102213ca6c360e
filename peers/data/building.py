"""Build a shard from files, in parallel, so that a build that was killed goes on where it was; or files as tokens."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_shards.draft import Documents, ShardDraft, sync
from data_shards.journal import JOURNAL_FILE, Journal
from data_shards.manifest import TOKENS_FILE, ShardManifest
from peers.console.interrupt import check
from peers.data.blocks import TextBlock, blocks_of
from peers.data.encoder import Encoded, Encoding, encoded_in_order
from peers.data.files import SourceFile, source_files
from peers.data.flaws import FlawCount, LeftOut
from peers.data.keys import KeyCount
from peers.data.records import has_mark
from swarm.errors import ConfigError, StateError


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is: bytes on disk of its sources, those read, tokens so far, and whether these are kept ones."""

    total: int
    read: int
    tokens: int
    kept: bool


@dataclass(slots=True)
class BuildReport:
    """A shard that was built, and what was left out.

    ``altered`` is how many documents are another text when their tokens are decoded, ``marks`` how many files began
    with a byte order mark. ``kept_tokens`` are those that a build before this one made. ``keys`` counts what of the
    records is in no document.
    """

    left_out: LeftOut
    altered: int = 0
    marks: int = 0
    text_bytes: int = 0
    kept_tokens: int = 0
    keys: KeyCount = field(default_factory=KeyCount)
    manifest: ShardManifest | None = None

    @property
    def shard(self) -> ShardManifest:
        """The manifest of what was built."""
        assert self.manifest is not None  # noqa: S101
        return self.manifest


def build_from_files(
    paths: Sequence[Path],
    out: Path,
    encoding: Encoding,
    *,
    allow_bad: bool = False,
    processes: int | None = None,
    told: Callable[[BuildProgress], None] = lambda progress: None,
) -> BuildReport:
    """Build a new shard at ``out`` from files, directories or patterns.

    What is done is kept in a directory beside ``out``, whatever ends the build; the same command goes on with it, and
    the shard is the same as that of an undisturbed build. Memory does not depend on the size of the
    sources.

    Args:
        paths: See :func:`peers.data.files.source_files`.
        out: A directory that does not exist yet.
        encoding: The tokenizer, and what to call the option of ``paths``.
        allow_bad: Go on without what cannot be used, however much it is.
        processes: At most so many encode; None: one a core.
        told: Called after each block.

    Raises:
        ConfigError: A path or file cannot be used, too much of them is bad, there is no document, or ``out`` exists.
        StateError: The disk refuses, or another process builds the same shard.
    """
    if out.exists():
        raise ConfigError(
            "--out", str(out), "a directory that does not exist yet", "Name another; what is there stays."
        )
    tokenizer = encoding.make_tokenizer()
    files = [file for path in paths for file in source_files(path, encoding.key)]
    directory = _directory(out)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _held(directory), contextlib.ExitStack() as closing:
            draft = ShardDraft(
                directory,
                tokenizer=tokenizer.digest,
                vocab_size=tokenizer.vocab_size,
                template=None if encoding.template is None else encoding.template.digest,
                frame=tokenizer.frame,
            )
            closing.callback(draft.close)
            made_with = json.dumps([2, tokenizer.digest, encoding.shown()])  # what is told of a piece has changed once
            journal = Journal(directory, hashlib.sha256(made_with.encode()).hexdigest(), draft.stored.itemsize)
            closing.callback(journal.close)
            build = _Build(draft, journal, files, encoding, LeftOut(encoding.key, allow_bad=allow_bad))
            build.run(processes, told)
            report = build.report
            for path in paths:
                report.left_out.pass_by(path)
            report.left_out.check(paths[0], some=bool(draft.documents), keys=report.keys)
            report.manifest = draft.finish(report.text_bytes, report.altered)
            (directory / JOURNAL_FILE).unlink()
            os.rename(directory, out)
        sync(out.parent)
    except ConfigError:
        if not is_begun(out):
            discard_build(out)
        raise
    except OSError as error:
        raise StateError(
            f"shard {out}: {error.strerror}. Check space and permissions, then type the same command again to go on."
        ) from None
    return report


def encoded_documents(
    paths: Sequence[Path], encoding: Encoding, left_out: LeftOut, keys: KeyCount
) -> Iterator[Encoded]:
    """Yield whole documents of files, some at a time, as tokens: made as those of shards are, by the same bounded
    processes. What cannot be used is counted in ``left_out``, for the caller to check, and what of the rest is in no
    document in ``keys``.

    Raises ConfigError where a file or the chat template cannot be used, or nothing in them can.
    """
    files = [file for path in paths for file in source_files(path, encoding.key)]
    blocks = (block for file in files for block in blocks_of(file, encoding.key, encoding.field))
    some, parts = False, list[Encoded]()
    for path in paths:
        left_out.pass_by(path)
    with contextlib.closing(encoded_in_order(blocks, encoding)) as found:
        for block, encoded in found:
            check()
            left_out.add(block.file, encoded.flaws, text=block.kind == "text")
            keys.add(encoded.keys)
            some = some or bool(len(encoded.documents.tokens))
            if not (block.before or block.after):
                yield encoded
                continue
            parts.append(encoded)  # of one document
            if not block.after:
                whole = Documents(np.concatenate([part.documents.tokens for part in parts]))
                yield replace(encoded, documents=whole, text_bytes=sum(part.text_bytes for part in parts))
                parts.clear()
    if not some:
        left_out.check(paths[0], some=False, keys=keys)


def is_begun(out: Path) -> bool:
    """Return whether a build of this shard has kept what it did."""
    try:
        return (_directory(out) / TOKENS_FILE).stat().st_size > 0
    except OSError:
        return False


def discard_build(out: Path) -> None:
    """Remove what a build of this shard has kept."""
    shutil.rmtree(_directory(out), ignore_errors=True)


def _directory(out: Path) -> Path:
    return out.with_name(f".{out.name}.building")


class _Build:
    def __init__(
        self,
        draft: ShardDraft,
        journal: Journal,
        files: Sequence[SourceFile],
        encoding: Encoding,
        left_out: LeftOut,
    ) -> None:
        self._draft, self._journal = draft, journal
        self._files, self._encoding = files, encoding
        self._total = sum(file.bytes for file in files)
        self._before: dict[str, int] = {}
        self._altered = False  # the document that goes on
        self.report = BuildReport(left_out)

    def run(self, processes: int | None, told: Callable[[BuildProgress], None]) -> None:
        """Take what is done, and do the rest."""
        blocks = self._blocks()
        kept, next_block = 0, next(blocks, None)
        done = self._journal.done
        while next_block is not None and kept < len(done) and done[kept].source == next_block.digest:
            self._note(next_block, done[kept].told)
            kept += 1
            told(BuildProgress(self._total, self._before[next_block.file] + next_block.read, 0, kept=True))
            next_block = next(blocks, None)
        tokens, documents, chats = self._journal.keep(kept)
        self._draft.restart(tokens=tokens, documents=documents, chats=chats)
        self.report.kept_tokens = tokens
        rest = itertools.chain(() if next_block is None else (next_block,), blocks)
        with contextlib.closing(encoded_in_order(rest, self._encoding, processes=processes)) as found:
            for block, encoded in found:
                self._add(block, encoded)
                read = self._before[block.file] + block.read
                told(BuildProgress(self._total, read, self._draft.tokens, kept=False))

    def _blocks(self) -> Iterator[TextBlock]:
        before = 0
        for file in self._files:
            self._before.setdefault(str(file.path), before)
            before += file.bytes
            yield from blocks_of(file, self._encoding.key, self._encoding.field)

    def _add(self, block: TextBlock, encoded: Encoded) -> None:
        said = {
            "text_bytes": encoded.text_bytes,
            "altered": encoded.altered,
            "flaws": encoded.flaws.shown(),
            "keys": asdict(encoded.keys),
        }
        self._draft.add(encoded.documents)
        self._draft.flush()
        self._journal.add(block.digest, encoded.documents, self._draft.stored, said)
        self._note(block, said)

    def _note(self, block: TextBlock, said: dict[str, Any]) -> None:
        report = self.report
        report.text_bytes += said["text_bytes"]
        report.marks += has_mark(block)
        if not block.before:
            self._altered = False
        report.altered += said["altered"] - (self._altered and said["altered"] > 0)
        self._altered = self._altered or said["altered"] > 0
        report.left_out.add(block.file, FlawCount.of(said["flaws"]), text=block.kind == "text")
        report.keys.add(KeyCount(**said["keys"]))


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = shlex.quote(str(directory))
            raise StateError(f"another process builds this shard, in {where}. Wait, or name another --out.") from None
        yield
    finally:
        os.close(descriptor)
