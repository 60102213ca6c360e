"""Which files a path to text stands for, and what is in them, by their endings."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_shards.manifest import MANIFEST_FILE
from peers.console.words import another_path, command_name
from swarm.errors import ConfigError

Kind = Literal["text", "jsonl", "csv", "tsv", "parquet", "arrow"]
Packed = Literal["", "gzip", "zstd"]

PROSE = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex"})
CODE = frozenset({
    ".bash", ".c", ".cc", ".clj", ".cpp", ".cs", ".css", ".dart", ".erl", ".ex", ".f90", ".go", ".h", ".hpp", ".hs",
    ".java", ".jl", ".js", ".jsx", ".kt", ".lua", ".ml", ".php", ".pl", ".py", ".pyi", ".r", ".rb", ".rs", ".scala",
    ".sh", ".sql", ".swift", ".ts", ".tsx", ".zig",
})  # fmt: skip
KINDS: dict[str, Kind] = {
    **dict.fromkeys(PROSE | CODE, "text"),
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
PACKED: dict[str, Packed] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
MAX_FILES = 100_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file with documents: what is in it, what it is compressed with, and its size on disk."""

    path: Path
    kind: Kind
    packed: Packed
    bytes: int


def source_files(path: Path, key: str) -> list[SourceFile]:
    """The files that a path stands for: itself; all below a directory whose ending is known, sorted, hidden ones left
    out; or those that match it where it is a pattern (``texts/**/*.jsonl.gz``).

    In a directory, links to files are followed, links to directories are not. ``key`` is what errors name. Raises
    ConfigError when there is none, or more than :data:`MAX_FILES`.
    """
    if path.is_dir():
        return _in_directory(path, key)
    if path.exists():
        return [_file(path, key)]
    pattern = str(path)
    if glob.has_magic(pattern):
        matching = sorted(Path(name) for name in glob.iglob(pattern, recursive=True))
        found = [_file(one, key) for one in matching if one.is_file()]
        if found:
            return _bounded(found, path, key)
        raise ConfigError(key, pattern, "a pattern that some file matches", another_path(path), why="none does")
    allowed = f"{_or_shard(key)}UTF-8 text"
    raise ConfigError(key, pattern, allowed, another_path(path), why="there is no such path: no such file")


def kind_of(path: Path) -> tuple[Kind | None, Packed]:
    """Return what a file holds and is compressed with, by its name. None: it has no ending that says it."""
    packed = PACKED.get(path.suffix.lower(), "")
    inner = path.with_suffix("") if packed else path
    return KINDS.get(inner.suffix.lower()), packed


def _file(path: Path, key: str) -> SourceFile:
    kind, packed = kind_of(path)
    if kind in ("parquet", "arrow") and packed:
        remedy = f"Unpack it first: {'gunzip' if packed == 'gzip' else 'unzstd'} {path}"
        raise ConfigError(key, str(path), f"a {kind} file as it is", remedy, why=f"it is compressed with {packed}")
    if kind is None and not packed and path.suffix.lower() == ".json":
        kind = "jsonl"
    try:
        found = path.stat()
    except OSError as error:
        cause = (error.strerror or "unreadable").lower()
        raise ConfigError(key, str(path), "a readable text file", another_path(path), why=cause) from None
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise ConfigError(
            key, str(path), "a file or a pipe", another_path(path), why="it is a device, and may never end"
        )
    return SourceFile(path, kind or "text", packed, found.st_size)


def _in_directory(path: Path, key: str) -> list[SourceFile]:
    found = _bounded([_file(file, key) for file in _below(path, key)], path, key)
    if not found and (path / MANIFEST_FILE).is_file():
        remedy = f"Give the text that it was built from. A trainer reads a shard: {command_name()} join … --data {path}"
        raise ConfigError(key, str(path), "text", remedy, why="it is a built shard")
    if not found:
        empty = (
            "it is empty"
            if not any(path.iterdir())
            else "none of its files has such an ending; a single file may have any name"
        )
        endings = ", ".join(sorted(KINDS.keys() - CODE))
        kinds = f"{endings}, source code; also with {', '.join(PACKED)}"
        allowed = f"{_or_shard(key)}a directory with files of text ({kinds})"
        raise ConfigError(key, str(path), allowed, another_path(path), why=empty)
    return sorted(found, key=lambda file: file.path)


def _or_shard(key: str) -> str:
    """Return what else a trainer's data may be, for errors."""
    return "a built shard or " if key == "--data" else ""


def _bounded(found: list[SourceFile], path: Path, key: str) -> list[SourceFile]:
    if len(found) > MAX_FILES:
        remedy = "Give a part of them; swarm data build makes a shard of each."
        raise ConfigError(key, str(path), f"at most {MAX_FILES:,} files", remedy)
    return found


def other_files(path: Path) -> Counter[str]:
    """Return how many files below a directory are not read, by ending: none says how. Hidden ones are not counted."""
    found: Counter[str] = Counter()
    for _, inner, files in os.walk(path):
        inner[:] = [name for name in inner if not name.startswith(".")]
        others = (name for name in files if not name.startswith(".") and kind_of(Path(name))[0] is None)
        found.update(Path(name).suffix.lower() or "no ending" for name in others)
    return found


def _below(root: Path, key: str) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        where, why = Path(error.filename), (error.strerror or "unreadable").lower()
        raise ConfigError(key, str(where), "a readable directory", another_path(where), why=why)

    for directory, inner, files in os.walk(root, onerror=unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in files:
            file = Path(directory, name)
            if not name.startswith(".") and kind_of(file)[0] is not None and file.is_file():
                yield file
