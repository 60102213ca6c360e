"""Which files a path to text stands for, and the documents in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from peers.text import read_documents
from peers.words import another_path
from swarm.errors import ConfigError

TEXT_ENDINGS = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex"})
MOST_FILES = 100_000
MOST_BYTES = 8 << 30


def text_files(path: Path, key: str) -> list[Path]:
    """The text files that a path stands for: itself, or all below a directory, sorted, hidden ones left out.

    A file is text by its ending, see :data:`TEXT_ENDINGS`. Links are followed only to files inside the directory.
    ``key`` is what errors name. Raises ConfigError when there is none, or more than :data:`MOST_FILES` or
    :data:`MOST_BYTES`.
    """
    if not path.exists():
        allowed = "a built shard or UTF-8 text"
        raise ConfigError(key, str(path), allowed, another_path(path), why="there is no such path")
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    size = 0
    for file in _below(path, key):
        found.append(file)
        size += file.stat().st_size
        if len(found) > MOST_FILES or size > MOST_BYTES:
            most = f"at most {MOST_FILES:,} text files of {MOST_BYTES >> 30} GiB together"
            raise ConfigError(key, str(path), most, "Give a part of them; swarm data build makes a shard of each.")
    if not found:
        empty = "it is empty" if not any(path.iterdir()) else "it holds none; a single file may have any name"
        allowed = f"a built shard, or a directory with text files ({', '.join(sorted(TEXT_ENDINGS))})"
        raise ConfigError(key, str(path), allowed, another_path(path), why=empty)
    return sorted(found)


def documents_of(path: Path, key: str) -> Iterator[str]:
    """The documents of all these files, see :func:`peers.text.read_corpus`, streamed: memory is one file at a time.

    Empty files are passed over in a directory that has others. Raises ConfigError as :func:`text_files`, and for a
    file that is no UTF-8 text.
    """
    files = text_files(path, key)
    nothing = True
    for file in files:
        if len(files) > 1 and not file.stat().st_size:
            continue
        nothing = False
        yield from read_documents(file, key)
    if nothing:
        raise ConfigError(
            key, str(path), "files with text in them", another_path(path), why="every one of them is empty"
        )


def _below(root: Path, key: str) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        where, why = Path(error.filename), (error.strerror or "unreadable").lower()
        raise ConfigError(key, str(where), "a readable directory", another_path(where), why=why)

    inside = root.resolve()
    for directory, inner, files in os.walk(root, onerror=unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in files:
            file = Path(directory, name)
            if name.startswith(".") or file.suffix.lower() not in TEXT_ENDINGS or not file.is_file():
                continue
            if not file.is_symlink() or file.resolve().is_relative_to(inside):
                yield file
