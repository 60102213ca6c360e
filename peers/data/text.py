"""Text to train on: Python's own documentation, or the user's files; and the sample that a tokenizer is trained on."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_shards.privacy import Private
from data_shards.tokenize import Passage
from peers.data.blocks import TextBlock, blocks_of
from peers.data.files import source_files
from peers.data.flaws import LeftOut
from peers.data.keys import KeyCount
from peers.data.records import Completion, Conversation, chat_without_template, usable_in
from swarm.errors import ConfigError

BUILT_IN_CHARACTERS = 1_800_000
SHORTEST_DOCSTRING = 60
LARGEST_CORPUS_BYTES = 1 << 30

_TRIPLE_QUOTED = re.compile(rb'"""(.*?)"""', re.DOTALL)
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}
)

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, repr=False)
class Corpus(Private):
    """Documents, and where they come from in words."""

    name: str
    documents: tuple[str, ...]

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.documents)} documents, {sum(map(len, self.documents))} characters"


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


def read_corpus(paths: Sequence[Path], key: str = "--text", *, allow_bad: bool = False) -> Corpus:
    """The documents of the user's files and directories, in memory, to train a tokenizer on: each file of text, and the
    texts of the records of tables and JSONL.

    Raises ConfigError naming file, cause and remedy for what is missing, empty, too large together, or no UTF-8 text,
    for more that cannot be used than may be, unless ``allow_bad``, and for conversations: a tokenizer that is trained
    on them knows no template.
    """
    documents: list[str] = []
    size = 0
    left_out, keys = LeftOut(key, allow_bad=allow_bad), KeyCount()
    for path in paths:
        before = len(documents)
        parts: list[str] = []
        left_out.pass_by(path)
        for block in (block for file in source_files(path, key) for block in blocks_of(file, key)):
            size += len(block.body)
            if size > LARGEST_CORPUS_BYTES:
                remedy = f"Give a part of it: head -c 1G {path} > PART"
                raise ConfigError(key, str(path), "at most 1 GiB of text together", remedy)
            for document in _documents(block, left_out, parts, keys):
                if isinstance(document, (Conversation, Completion)):
                    pair = isinstance(document, Completion)
                    raise chat_without_template(key, f"{block.file}:{document.line}", pair=pair)
                documents.append(document)
        if len(documents) == before:
            left_out.check(path, some=False, keys=keys)
    left_out.check(paths[-1], some=True)
    return Corpus(", ".join(path.name for path in paths), tuple(documents))


def _documents(
    block: TextBlock, left_out: LeftOut, parts: list[str], keys: KeyCount
) -> Iterator[str | Conversation | Completion]:
    """What is in a block, of text all that it ends; ``parts`` are those of a text that goes on."""
    for document in usable_in(block, left_out, keys=keys):
        if isinstance(document, Passage):
            parts.append(document.text[document.begin : document.end])
        else:
            yield document
    if parts and not block.after:
        yield "".join(parts)
        parts.clear()


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


# --- the part of the text that a run's tokenizer is trained on -------------------------------------------------------


SAMPLE_CHARACTERS = 8_000_000
"""Text the tokenizer is trained on: frequent words of a few megabytes are those of the whole, and training it cannot
be interrupted, so it must stay short."""


def sample_texts(documents: Sequence[str]) -> list[str]:
    """The first documents, up to :data:`SAMPLE_CHARACTERS` in all."""
    texts: list[str] = []
    room = SAMPLE_CHARACTERS
    for document in documents:
        if room <= 0:
            break
        texts.append(document[:room])
        room -= len(texts[-1])
    return texts
