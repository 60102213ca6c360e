"""The documents in a block: texts and conversations of records; of a file of text, which is one document, a part."""

from __future__ import annotations

import json
from codecs import BOM_UTF8 as BYTE_ORDER_MARK
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_shards.messages import BESIDE, MARKS, Chat, UnusableRecord, chat_of, check_marks
from data_shards.privacy import Private
from data_shards.tokenize import Passage
from peers.console.words import command_name
from peers.data.blocks import SURROGATE, TextBlock
from peers.data.flaws import NO_UTF8, Flaw, FlawCount, LeftOut
from peers.data.keys import ALPACA, CHAT_FIELDS, MEDIA, PAIR, PREFERENCES, TEXT_FIELD, KeyCount, is_empty
from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True, repr=False)
class Conversation(Private):
    """A document of messages, of which a chat template may write a text. ``text_bytes`` are those of the record."""

    line: int
    chat: Chat
    text_bytes: int

    def private_size(self) -> str:
        """See :class:`Private`."""
        return self.chat.private_size()


@dataclass(frozen=True, slots=True, repr=False)
class Completion(Private):
    """A document of which the first part, the prompt, is not learnt."""

    line: int
    prompt: str
    completion: str
    text_bytes: int
    """Of its record."""

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.prompt)} and {len(self.completion)} characters"


Document = str | Passage | Conversation | Completion


def documents_in(block: TextBlock, field: str | None = None, keys: KeyCount | None = None) -> Iterator[Document | Flaw]:
    """The documents of a block, of text the part that it is, and in their place what cannot be used.

    Args:
        block: The block.
        field: As for :func:`peers.data.blocks.blocks_of`.
        keys: Counts what of the records is in no document.
    """
    keys = KeyCount() if keys is None else keys
    for column in block.unread:
        keys.note(column, len(block.lines))
    yield from block.flaws
    if block.kind == "text":
        yield from _text(block)
        return
    lines = block.body.split(b"\n")
    for place, record in enumerate(lines):
        number = block.lines[place] if block.lines else block.line + place
        if block.line + place == 1:
            record = record.removeprefix(BYTE_ORDER_MARK)
        if record and not record.isspace():
            try:
                yield _document(number, record, field, keys)
            except UnusableRecord as unusable:
                keys.refuse(unusable)
                if unusable.meant:
                    continue
                size = len(record) + (not block.lines and place + 1 < len(lines))
                yield Flaw(number, str(unusable), size, records=0 if unusable.empty else 1)


def usable_in(
    block: TextBlock, left_out: LeftOut, field: str | None = None, keys: KeyCount | None = None
) -> Iterator[Document]:
    """The documents of a block as :func:`documents_in` has them; what cannot be used is counted in ``left_out``."""
    flaws = FlawCount(block.records, block.size)
    for found in documents_in(block, field, keys):
        if isinstance(found, Flaw):
            flaws.note(found)
        else:
            yield found
    left_out.add(block.file, flaws, text=block.kind == "text")


def _text(block: TextBlock) -> Iterator[Passage]:
    body = block.body.removeprefix(BYTE_ORDER_MARK) if has_mark(block) else block.body
    before, own, after = (part.decode() for part in (block.before, body, block.after))
    text = before + own + after
    if before or after or text.strip():
        yield Passage(text, len(before), len(before) + len(own))


def has_mark(block: TextBlock) -> bool:
    """Return whether a block is the beginning of a text, and begins with a byte order mark, which is left out."""
    return block.kind == "text" and not block.before and block.body.startswith(BYTE_ORDER_MARK)


def chat_without_template(key: str, place: str, *, pair: bool = False) -> ConfigError:
    """The error for conversations where nothing says how they are written as text, and for a ``pair`` of prompt and
    completion where they are not read either."""
    option = {"TEXT": "--template", "--data": "--data-template"}.get(key)
    return ConfigError(
        key,
        place,
        f"a chat template with {'pairs' if pair else 'conversations'}",
        f"Give the one of the model with {option} PATH: a file in Jinja, or the model's directory."
        if option
        else f"This command reads none without the template of a model (--model DIR, which has one of at most 64 KiB). "
        f"To train with them: {command_name()} join INVITE --data PATH",
        why="it is a prompt, of which the completion alone is learnt"
        if pair
        else "it is a conversation, and nothing says how to write it as text",
    )


# --- records ---------------------------------------------------------------------------------------------------------


def _document(line: int, record: bytes, field: str | None, keys: KeyCount) -> Document:
    """Return what a record is made into. Raises UnusableRecord."""
    value = _object(record)
    row, name, beside = _found(value, field)
    if row.get(name) is None:
        _refuse(row, MEDIA + PREFERENCES)
        raise _without(value, name if field is None else field, field)
    document: Document
    if isinstance(row[name], list) or (field is None and name in (PAIR[0], ALPACA[0])):
        _refuse(row, MEDIA if field is not None else MEDIA + PREFERENCES)
    if field is None and name == PAIR[0]:
        document, used = _pair(line, row, len(record))
    elif field is None and name == ALPACA[0]:
        document, used = Conversation(line, chat_of(_asked(row), row), len(record)), {*ALPACA, *BESIDE}
    elif isinstance(row[name], list):
        document, used = Conversation(line, chat_of(row[name], row), len(record)), {name, *BESIDE}
    else:
        document, used = _text_of(row[name], name), {name}
    within = "" if field is None or field == name else field.removesuffix(name)
    for key in [*beside, *(within + key for key in row if key not in used and not is_empty(row[key]))]:
        keys.note(key)
    return document


def _object(record: bytes) -> dict[str, Any]:
    try:
        value = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError:
        raise UnusableRecord(NO_UTF8) from None
    except ValueError as error:
        raise UnusableRecord(f"it is no JSON: {getattr(error, 'msg', 'a number is too long')}") from None
    except RecursionError:
        raise UnusableRecord("it is no JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise UnusableRecord("it is no object, {…}, but " + _called(value))
    return value


def _found(value: dict[str, Any], field: str | None) -> tuple[dict[str, Any], str, list[str]]:
    """The object that has the text or the conversation, the key there, and the names of what lies next to the way."""
    if field is None:
        return value, _customary(value), []
    if field in value:
        return value, field, []
    *way, last = field.split(".")
    beside: list[str] = []
    inner: Any = value
    for place, part in enumerate(way):
        before = "".join(f"{one}." for one in way[:place])
        beside += [before + key for key, other in inner.items() if key != part and not is_empty(other)]
        inner = inner.get(part)
        if not isinstance(inner, dict):
            return {}, last, []
    return inner, last, beside


def _customary(row: Mapping[str, Any]) -> str:
    for name in CHAT_FIELDS:
        if isinstance(row.get(name), list):
            return name
    if is_empty(row.get(TEXT_FIELD)):
        for asked, answered in (PAIR, ALPACA[:2]):
            if row.get(asked) is not None and row.get(answered) is not None:
                return asked
    return TEXT_FIELD


def _without(value: dict[str, Any], name: str, field: str | None) -> UnusableRecord:
    for chat in CHAT_FIELDS if field is None else ():
        if value.get(chat) is not None:
            return UnusableRecord(f"its {chat} are no list but {_called(value[chat])}")
    if _is_there(value, name):
        return UnusableRecord(f"its {name} is null", empty=True)
    keys = ", ".join(str(key)[:40] for key in list(value)[:8])
    return UnusableRecord(f"it has no {name}; it has {keys or 'nothing'}")


def _is_there(value: dict[str, Any], name: str) -> bool:
    *outer, last = (name,) if name in value else name.split(".")
    inner: Any = value
    for part in outer:
        inner = inner.get(part) if isinstance(inner, dict) else None
    return isinstance(inner, dict) and last in inner


def _text_of(found: Any, name: str) -> str:
    if not isinstance(found, str):
        raise UnusableRecord(f"its {name} is no text but {_called(found)}")
    if not found.strip():
        raise UnusableRecord(f"its {name} is empty", empty=True)
    if SURROGATE.search(found):
        raise UnusableRecord(f"its {name} is no UTF-8")
    return found


def _called(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# --- records of more than a text -------------------------------------------------------------------------------------


def _pair(line: int, row: Mapping[str, Any], size: int) -> tuple[Conversation | Completion, set[str]]:
    """A prompt with its completion, and the keys that it is made of."""
    prompt, completion = (row[key] for key in PAIR)
    if isinstance(row.get("label"), bool):
        _refuse(row, ("label",))
    if isinstance(prompt, list) and isinstance(completion, list):
        return Conversation(line, chat_of([*prompt, *completion], row, len(prompt)), size), {*PAIR, *BESIDE}
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise UnusableRecord("its prompt and completion are neither two texts nor two lists of messages")
    check_marks(row)
    _text_of(completion, PAIR[1])
    _text_of(prompt + completion, "prompt with its completion")
    return Completion(line, prompt, completion, size), {*PAIR, *(key for key in MARKS if row.get(key) in (0, 1))}


def _asked(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a record of Alpaca's."""
    instruction, output, given, history = (row.get(key) for key in ALPACA)
    turns = history or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise UnusableRecord("its history is no list of pairs")
    asked = "\n".join(_text_of(one, ALPACA[0]) for one in (instruction, given) if not is_empty(one))
    said = [*(one for turn in turns for one in turn), asked, _text_of(output, ALPACA[1])]
    return [{"role": "assistant" if place % 2 else "user", "content": one} for place, one in enumerate(said)]


def _refuse(row: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if not is_empty(row.get(key)):
            kind = "images, sound and video are" if key in MEDIA else "preferences are"
            raise UnusableRecord(f"it has {key}, and {kind} not trained on", refused=key)
