"""The documents in a block: texts and conversations of records; of a file of text, which is one document, a part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_shards.privacy import Private
from data_shards.tokenize import Passage
from peers.console.words import another_path, command_name, count
from peers.data.blocks import CHAT_FIELDS, TEXT_FIELD, Flaw, TextBlock
from swarm.errors import ConfigError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, repr=False)
class Conversation(Private):
    """A document of messages, as its record has them."""

    line: int
    messages: list[Any]
    text_bytes: int
    """Of its record."""

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.messages)} messages"


class FlawCount:
    """How many records cannot be used, and the first of them, as ``FILE:LINE: why``."""

    def __init__(self) -> None:
        self.number, self.first = 0, ""

    def add(self, block: TextBlock, flaw: Flaw, number: int = 1) -> None:
        """Count one, or so many of which it is the first."""
        self.number += number
        self.first = self.first or f"{block.file}:{flaw[0]}: {flaw[1]}"

    @property
    def words(self) -> str:
        """For behind what is said of the rest; "" where there is none."""
        if not self.number:
            return ""
        return f"; {count(self.number, 'record')} {'is' if self.number == 1 else 'are'} left out: {self.first}"


def documents_in(block: TextBlock, key: str, field: str | None = None) -> Iterator[str | Passage | Conversation | Flaw]:
    """The documents of a block, of text the part that it is, and in their place what cannot be used.

    Args:
        block: The block.
        key: What errors call the option that named its file.
        field: As for :func:`peers.data.blocks.blocks_of`.

    Raises:
        ConfigError: It is the first of a file of text that is none.
    """
    yield from block.flaws
    if block.kind == "text":
        yield from _text(block, key)
        return
    lines = block.body.split(b"\n")
    for place, record in enumerate(lines):
        number = block.lines[place] if block.lines else block.line + place
        if block.line + place == 1:
            record = record.removeprefix(BYTE_ORDER_MARK)
        if record and not record.isspace():
            yield _record(number, record, field)


def _text(block: TextBlock, key: str) -> Iterator[Passage | Flaw]:
    why = remedy = ""
    path, allowed, parts = Path(block.file), "plain text", ["", "", ""]
    try:
        around = [block.before.decode("utf-8", "replace"), block.after.decode("utf-8", "replace")]
        parts = [around[0], block.body[len(BYTE_ORDER_MARK) * has_mark(block) :].decode(), around[1]]
        if "\x00" in parts[1]:
            why, remedy = "it holds NUL bytes, so it is binary", another_path(path)
    except UnicodeDecodeError:
        why, allowed = "it is binary or in another encoding", "UTF-8 text"
        remedy = "If it is text, convert it: iconv -f ENCODING -t UTF-8 FILE > NEW; else choose another file."
    if not why:
        text = "".join(parts)
        if block.before or block.after or text.strip():
            yield Passage(text, len(parts[0]), len(parts[0]) + len(parts[1]))
    elif not block.before:
        raise ConfigError(key, block.file, allowed, remedy, why=why)
    else:
        yield block.line, f"{len(block.body)} bytes from here are no text: {why}"


def has_mark(block: TextBlock) -> bool:
    """Return whether a block is the beginning of a text, and begins with a byte order mark, which is left out."""
    return block.kind == "text" and not block.before and block.body.startswith(BYTE_ORDER_MARK)


def chat_without_template(key: str, place: str) -> ConfigError:
    """The error for conversations where nothing says how they are written as text."""
    option = {"TEXT": "--template", "--data": "--data-template"}.get(key)
    return ConfigError(
        key,
        place,
        "a chat template with conversations",
        f"Give the one of the model with {option} PATH: a file in Jinja, or the model's directory."
        if option
        else f"This command reads none without the template of a model (--model DIR, which has one of at most 64 KiB). "
        f"To train with them: {command_name()} join INVITE --data PATH",
        why="it is a conversation, and nothing says how to write it as text",
    )


# --- records ---------------------------------------------------------------------------------------------------------


def _record(line: int, record: bytes, field: str | None) -> str | Conversation | Flaw:
    try:
        value = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError:
        return line, "it is no UTF-8"
    except ValueError as error:
        return line, f"it is no JSON: {getattr(error, 'msg', 'a number is too long')}"
    except RecursionError:
        return line, "it is no JSON: it is nested too deeply"
    if not isinstance(value, dict):
        return line, "it is no object, {…}, but " + _called(value)
    found, name = _found(value, field)
    if found is None:
        return line, _without(value, name, field)
    if isinstance(found, list):
        return Conversation(line, found, len(record))
    if not isinstance(found, str):
        return line, f"its {name} is no text but {_called(found)}"
    if not found.strip():
        return line, f"its {name} is empty"
    if _SURROGATE.search(found):
        return line, f"its {name} is no UTF-8"
    return found


def _without(value: dict[str, Any], name: str, field: str | None) -> str:
    for chat in CHAT_FIELDS if field is None else ():
        if chat in value:
            return f"its {chat} are no list but {_called(value[chat])}"
    keys = ", ".join(str(key)[:40] for key in list(value)[:8])
    return f"it has no {name}; it has {keys or 'nothing'}"


def _found(value: dict[str, Any], field: str | None) -> tuple[Any, str]:
    if field is None:
        for name in CHAT_FIELDS:
            if isinstance(value.get(name), list):
                return value[name], name
        return value.get(TEXT_FIELD), TEXT_FIELD
    if field in value:
        return value[field], field
    inner: Any = value
    for part in field.split("."):
        inner = inner.get(part) if isinstance(inner, dict) else None
    return inner, field


def _called(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
