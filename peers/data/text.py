"""Text to train on: Python's own documentation, or the user's files; and the sample that a tokenizer is trained on."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_shards.privacy import Private
from peers.console.words import another_path
from swarm.errors import ConfigError

BUILT_IN_CHARACTERS = 1_800_000
SHORTEST_DOCSTRING = 60
PARAGRAPH_CHARACTERS = 400
LONGEST_PARAGRAPH = 16_384
"""A longer piece without an empty line is cut at line ends. Tokenising takes 150 bytes of memory a character."""
LARGEST_FILE_BYTES = 1 << 30

_TRIPLE_QUOTED = re.compile(rb'"""(.*?)"""', re.DOTALL)
_BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}
)

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, repr=False)
class Corpus(Private):
    """Documents, and where they come from in words."""

    name: str
    documents: tuple[str, ...]

    @property
    def characters(self) -> int:
        """Characters in all documents."""
        return sum(map(len, self.documents))

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.documents)} documents, {self.characters} characters"


def built_in_corpus(characters: int = BUILT_IN_CHARACTERS) -> Corpus:
    """The language reference's help topics, and docstrings of the standard library: English prose on any machine.

    One document per topic and one per module, in a fixed order for one Python version; no module is imported but the
    table of topics. The sources richest in docstrings are parsed first, until about ``characters`` are collected
    (less where the library's sources are not installed). Cost: some 1 s.
    """
    documents = list(_topics())
    size = sum(map(len, documents))
    seen: set[str] = set()
    for path in _richest_sources(Path(sysconfig.get_path("stdlib"))):
        if size >= characters:
            break
        document = "\n\n".join(_new_docstrings(path, seen))
        if document:
            documents.append(document)
            size += len(document)
    return Corpus("Python's own documentation", tuple(documents))


def read_corpus(files: Sequence[Path]) -> Corpus:
    """The user's files as documents of whole paragraphs, each at least a few hundred characters.

    Raises ConfigError naming file, cause and remedy for a file that is missing, empty, too large or not UTF-8 text.
    """
    documents = [document for path in files for document in read_documents(path)]
    return Corpus(", ".join(path.name for path in files), tuple(documents))


def read_documents(path: Path, key: str = "--text") -> Iterator[str]:
    """One file's documents, see :func:`read_corpus`; ``key`` is what its errors name."""
    return _paragraphs(read_text(path, key))


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].strip()


def _richest_sources(library: Path) -> list[Path]:
    ranked = []
    for path in _sources(library):
        text = path.read_bytes()
        quoted = sum(map(len, _TRIPLE_QUOTED.findall(text)))
        ranked.append((-quoted / (len(text) + 1000), path.relative_to(library).as_posix(), path))
    return [path for _, _, path in sorted(ranked)]


def _sources(library: Path) -> Iterator[Path]:
    for directory, inner, files in os.walk(library):
        inner[:] = [name for name in inner if name not in _SKIPPED]
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def _new_docstrings(path: Path, seen: set[str]) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in _documented(tree):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
        if len(text) >= SHORTEST_DOCSTRING and text not in seen:
            seen.add(text)
            yield text


def _documented(tree: ast.Module) -> Iterator[_Documented]:
    """The module, its classes and functions, in the order of the file. Only statements are visited, never
    expressions: half the time of ``ast.walk``."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Documented):
            yield node
        for block in ("finalbody", "orelse", "handlers", "body"):
            inner = getattr(node, block, None)
            if isinstance(inner, list):
                waiting.extend(reversed(inner))


def read_text(path: Path, key: str) -> str:
    """One file's text; ``key`` is what its errors name. Raises ConfigError as :func:`read_corpus`."""
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE_BYTES:
            raise ConfigError(key, str(path), "a file of at most 1 GiB", f"Give a part of it: head -c 1G {path} > PART")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        cause = (error.strerror or "unreadable").lower()
        raise ConfigError(key, str(path), "a readable text file", another_path(path), why=cause) from None
    except UnicodeDecodeError:
        remedy = "If it is text, convert it: iconv -f ENCODING -t UTF-8 FILE > NEW; else choose another file."
        why = "it is binary or in another encoding"
        raise ConfigError(key, str(path), "UTF-8 text", remedy, why=why) from None
    if "\x00" in text:
        why = "it holds NUL bytes, so it is binary"
        raise ConfigError(key, str(path), "plain text", another_path(path), why=why)
    if not text.strip():
        raise ConfigError(key, str(path), "a file with text in it", another_path(path), why="it is empty")
    return text


def _paragraphs(text: str) -> Iterator[str]:
    document: list[str] = []
    size = 0
    for paragraph in _BLANK_LINES.split(text):
        if len(paragraph) > LONGEST_PARAGRAPH:  # a document a line, as JSONL has them, or no lines at all
            if document:
                yield "\n\n".join(document)
                document, size = [], 0
            yield from _lines(paragraph)
            continue
        if paragraph.strip():
            document.append(paragraph.strip("\r\n"))
            size += len(paragraph)
        if size >= PARAGRAPH_CHARACTERS:
            yield "\n\n".join(document)
            document, size = [], 0
    if document:
        yield "\n\n".join(document)


def _lines(paragraph: str) -> Iterator[str]:
    """Documents of whole lines, each at least a few hundred characters; longer lines are cut."""
    document: list[str] = []
    size = 0
    for line in paragraph.splitlines():
        for start in range(0, len(line), LONGEST_PARAGRAPH):
            document.append(line[start : start + LONGEST_PARAGRAPH])
            size += len(document[-1])
            if size >= PARAGRAPH_CHARACTERS:
                yield "\n".join(document)
                document, size = [], 0
    if document:
        yield "\n".join(document)


# --- which files a path to text stands for, and the documents in them ------------------------------------------------


TEXT_ENDINGS = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex"})
MAX_FILES = 100_000
MAX_BYTES = 8 << 30


def text_files(path: Path, key: str) -> list[Path]:
    """The text files that a path stands for: itself, or all below a directory, sorted, hidden ones left out.

    A file is text by its ending, see :data:`TEXT_ENDINGS`. Links are followed only to files inside the directory.
    ``key`` is what errors name. Raises ConfigError when there is none, or more than :data:`MAX_FILES` or
    :data:`MAX_BYTES`.
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
        if len(found) > MAX_FILES or size > MAX_BYTES:
            most = f"at most {MAX_FILES:,} text files of {MAX_BYTES >> 30} GiB together"
            raise ConfigError(key, str(path), most, "Give a part of them; swarm data build makes a shard of each.")
    if not found:
        empty = "it is empty" if not any(path.iterdir()) else "it holds none; a single file may have any name"
        allowed = f"a built shard, or a directory with text files ({', '.join(sorted(TEXT_ENDINGS))})"
        if any(file.is_symlink() and file.is_file() for file in path.rglob("*")):
            copy = f"Give the directory that they lead to, or copy the files: cp -rL {shlex.quote(str(path))} NEW"
            raise ConfigError(key, str(path), allowed, copy, why="it holds links to files outside it alone")
        raise ConfigError(key, str(path), allowed, another_path(path), why=empty)
    return sorted(found)


def documents_of(path: Path, key: str) -> Iterator[str]:
    """The documents of all these files, see :func:`peers.data.text.read_corpus`, streamed: memory is one file at a
    time.

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


# --- the part of the text that a run's tokenizer is trained on -------------------------------------------------------


SAMPLE_CHARACTERS = 8_000_000
"""Text the tokenizer is trained on: frequent words of a few megabytes are those of the whole, and training it cannot
be interrupted, so it must stay short."""


def sample_texts(shards: Sequence[Sequence[str]]) -> list[str]:
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
