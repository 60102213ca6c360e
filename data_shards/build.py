"""Documents to a shard on disk: whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from data_shards.manifest import MANIFEST_FILE, TOKENS_FILE, ShardManifest, TokenFile, file_digest, token_type
from data_shards.tokenize import Tokenizer
from swarm.errors import ConfigError, StateError


def build_shard(out_dir: Path, documents: Iterable[str], tokenizer_json: bytes) -> ShardManifest:
    """Tokenise ``documents`` into a new shard at ``out_dir`` and return its manifest.

    Atomic: written beside ``out_dir``, synced, then renamed, so ``out_dir`` is either absent or complete; what an
    error or an interrupt leaves is removed, what a kill leaves by the next build of the same shard. Files are readable
    by their owner only. The same documents and tokenizer give the same digest. Documents are streamed: memory is a few
    of them at a time. Raises ConfigError when ``out_dir`` exists or there is no document, StateError when the disk
    refuses.
    """
    if out_dir.exists():
        raise ConfigError("out_dir", str(out_dir), "a path that does not exist yet", "Remove it or choose another.")
    tokenizer = Tokenizer(tokenizer_json)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out_dir)
        draft = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
        try:
            with _held(draft):
                manifest = _write(draft, documents, tokenizer)
                os.rename(draft, out_dir)
            _sync(out_dir.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise StateError(
            f"shard {out_dir}: {error.strerror}. Check space and permissions, then build it again."
        ) from None
    return manifest


@contextlib.contextmanager
def _held(draft: Path) -> Iterator[None]:
    """While it is held nobody takes it for one whose process was killed. Raises BlockingIOError."""
    descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sweep(out_dir: Path) -> None:
    """Remove the drafts of this shard that killed processes left: private tokens, as large as the shard."""
    for path in out_dir.parent.glob(f".{glob.escape(out_dir.name)}-????????"):
        with contextlib.suppress(OSError), _held(path):
            if {one.name for one in path.iterdir()} <= {TOKENS_FILE, MANIFEST_FILE}:
                shutil.rmtree(path)


def _write(draft: Path, documents: Iterable[str], tokenizer: Tokenizer) -> ShardManifest:
    dtype = token_type(tokenizer.vocab_size)
    tokens = count = 0
    path = draft / TOKENS_FILE
    with path.open("xb") as file:
        for array in tokenizer.encode_documents(documents):
            file.write(array.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            tokens += len(array)
            count += 1
        file.flush()
        os.fsync(file.fileno())
    if not count:
        raise ConfigError("documents", 0, "at least one document", "Give more text, or ask for fewer shards.")
    size, digest = file_digest(path)
    manifest = ShardManifest(
        file=TokenFile(bytes=size, sha256=digest),
        dtype=dtype,
        tokens=tokens,
        documents=count,
        tokenizer=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
    )
    with (draft / MANIFEST_FILE).open("x", encoding="utf-8") as text:
        text.write(manifest.render())
        text.flush()
        os.fsync(text.fileno())
    path.chmod(0o600)
    (draft / MANIFEST_FILE).chmod(0o600)
    _sync(draft)
    return manifest


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
