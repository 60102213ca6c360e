"""Conversations to tokens, with a mask: only what the assistant says is learnt.

Where an answer begins and ends in the text follows from prefixes: the template writes the conversation before the
answer, and with it, and what the text grows by is the answer. That works with any template that leaves earlier turns as
they are; one that rewrites them is refused.

What people say may hold the text of special tokens, to forge a turn or an answer. Each such place gets a mark, a
character that nobody used, before the template sees it; what is marked in the template's text is encoded as ordinary
text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from data_shards.template import ANOTHER, LONGEST_RENDERED, ChatTemplate, RenderingFailed
from data_shards.tokenize import Tokenizer
from swarm.errors import ConfigError

MAX_MESSAGES = 512
LONGEST_CHAT = LONGEST_RENDERED // 4
MAX_DEPTH = 32
ASSISTANT = "assistant"

_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT}
"""What ShareGPT and others call them."""
_ROLE = re.compile(r"[A-Za-z_-]{1,32}")
_MARKS = range(0xE000, 0xF8FF)
"""Characters for private use."""
_SURROGATE = re.compile("[\ud800-\udfff]")

Message = dict[str, Any]
Span = tuple[int, int]


class UnusableChat(Exception):
    """A conversation that cannot be used; the text says why, and shows nothing of it."""


class ChatEncoder:
    """Encodes conversations with a tokenizer and a template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def encode(self, given: Sequence[Any]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """The tokens of a conversation, an end token last, and which of them are learnt.

        Args:
            given: Its messages, ``{"role": …, "content": …}`` or ``{"from": …, "value": …}``.

        Raises:
            UnusableChat: It is no conversation, has no answer, or the template refuses it.
            ConfigError: The template rewrites earlier turns, or writes too much.
        """
        messages = [_message(one) for one in given[: MAX_MESSAGES + 1]]
        if len(messages) > MAX_MESSAGES:
            raise UnusableChat(f"it has more than {MAX_MESSAGES} messages")
        if sum(len(message["content"]) for message in messages) > LONGEST_CHAT:
            raise UnusableChat(f"it is longer than {LONGEST_CHAT:,} characters")
        if not any(message["role"] == ASSISTANT for message in messages):
            raise UnusableChat("it has no answer of the assistant to learn from")
        mark = _unused(messages, self._template.source.text)
        marked = [_marked(message, self._special, mark) for message in messages]
        try:
            whole, spans, open_end = self._answers(marked)
        except RenderingFailed as error:
            raise UnusableChat(str(error)) from None
        ids, offsets = self._encoded(whole, mark)
        plain = [(_without(whole, mark, begin), _without(whole, mark, end)) for begin, end in spans]
        counted = _within(offsets, plain)
        tokens = np.array(ids, dtype=np.uint32)
        if not len(tokens) or tokens[-1] != self._tokenizer.end_of_text:
            tokens = np.append(tokens, np.uint32(self._tokenizer.end_of_text))
            counted = np.append(counted, open_end)
        if not counted.any():
            raise UnusableChat("its answers are empty")
        return tokens, counted

    def _answers(self, messages: list[Message]) -> tuple[str, list[Span], bool]:
        """The text, where each answer is in it, and whether the last goes to its end with no token that ends it."""
        whole = self._template.render(messages, ask=False)
        spans: list[Span] = []
        open_end = False
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            begin = self._begin(messages[:place], messages[: place + 1], whole)
            after = self._template.render(messages[: place + 1], ask=False)
            if not whole.startswith(after):
                after = after.rstrip()  # what comes behind every text
            if not whole.startswith(after):
                raise self._rewrites()
            end, closed = self._end(after, begin)
            if message["content"].strip() and not self._special.sub("", after[begin:end]).strip():
                raise UnusableChat("the chat template does not write its answers")
            spans.append((begin, end))
            open_end = not closed and not whole[len(after) :].strip()
        return whole, spans, open_end

    def _begin(self, before: list[Message], after: list[Message], whole: str) -> int:
        """Where an answer begins: behind what asks for it, as far as the text has that."""
        asked = self._template.render(before, ask=True)
        if whole.startswith(asked):
            return len(asked)
        said = self._template.render(before, ask=False)
        if not whole.startswith(said.rstrip()):
            raise self._rewrites()
        return len(os.path.commonprefix([asked, self._template.render(after, ask=False), whole]))

    def _end(self, after: str, begin: int) -> tuple[int, bool]:
        """Where an answer ends: behind the last special token, where nothing but space follows it."""
        ends = [found.end() for found in self._special.finditer(after, begin)]
        if ends and not after[ends[-1] :].strip():
            return ends[-1], True
        return len(after), False

    def _rewrites(self) -> ConfigError:
        return ConfigError(
            "the chat template",
            self._template.source.digest[:16],
            "one that leaves earlier turns as they are when a conversation goes on",
            ANOTHER,
            why="it rewrites earlier turns, so that the text of an answer is not the one that the model would write",
        )

    def _encoded(self, whole: str, mark: str) -> tuple[list[int], list[Span]]:
        """Token ids, and where each is in the text without marks."""
        if mark not in whole:
            ids, offsets = self._tokenizer.encode_with_special(whole)
            expected = sum(1 for _ in self._special.finditer(whole))
            if sum(token in self._tokenizer.special_ids for token in ids) == expected:
                return ids, offsets
        ids, offsets = [], []
        begin = at = 0
        for found in (*self._special.finditer(whole), None):
            end = len(whole) if found is None else found.start()
            text = whole[begin:end].replace(mark, "")
            if text:
                more, where = self._tokenizer.encode_ordinary(text)
                ids += more
                offsets += [(a + at, b + at) for a, b in where]
                at += len(text)
            if found is not None:
                ids.append(self._tokenizer.special_tokens[found.group()])
                offsets.append((at, at := at + len(found.group())))
                begin = found.end()
        return ids, offsets


def _within(offsets: list[Span], spans: list[Span]) -> npt.NDArray[np.bool_]:
    """Which tokens, of these places in a text, end within one of the spans, both ascending. What asks for an answer may
    end with a space that the answer's first token has."""
    inside = np.zeros(len(offsets), dtype=np.bool_)
    span = 0
    for place, (begin, end) in enumerate(offsets):
        while span < len(spans) and spans[span][1] <= begin:
            span += 1
        if span < len(spans) and begin < end:
            inside[place] = spans[span][0] < end <= spans[span][1]
    return inside


def _without(text: str, mark: str, position: int) -> int:
    return position - text.count(mark, 0, position)


# --- messages --------------------------------------------------------------------------------------------------------


def _message(given: Any) -> Message:
    if not isinstance(given, dict):
        raise UnusableChat("a message is no object, {…}")
    role = given.get("role", given.get("from"))
    content = given.get("content", given.get("value"))
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise UnusableChat("a message has no role (user, assistant, …)")
    if isinstance(content, list):
        content = _joined(content)
    if content is None and "tool_calls" in given:
        content = ""
    if not isinstance(content, str):
        raise UnusableChat("a message has no content that is text")
    rest = {key: value for key, value in given.items() if key not in ("role", "from", "content", "value")}
    return {**rest, "role": _ROLES.get(role, role), "content": content}


def _joined(parts: list[Any]) -> str:
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UnusableChat("a message has a part that is no text")
    return "".join(map(str, texts))


def _unused(messages: Sequence[Mapping[str, Any]], template: str) -> str:
    used = set(template)
    for message in messages:
        _collect(message, used, 0)
    if any(_SURROGATE.match(character) for character in used):
        raise UnusableChat("a message is no UTF-8")
    mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
    if mark is None:
        raise UnusableChat("its messages use every character for private use")
    return mark


def _collect(value: Any, into: set[str], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise UnusableChat("a message is nested too deeply")
    if isinstance(value, str):
        into.update(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            into.update(key)
            _collect(inner, into, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, into, depth + 1)


def _marked(value: Any, special: re.Pattern[str], mark: str) -> Any:
    """The same with each text of a special token broken by a mark behind its first character."""
    if isinstance(value, str):
        return special.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)
    if isinstance(value, dict):
        return {_marked(key, special, mark): _marked(inner, special, mark) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, special, mark) for inner in value]
    return value
