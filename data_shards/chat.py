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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from data_shards.messages import Chat, Message, Span, UnusableRecord
from data_shards.template import ANOTHER, LONGEST_RENDERED, ChatTemplate, RenderingFailed
from data_shards.tokenize import Tokenizer
from swarm.errors import ConfigError

LONGEST_CHAT = LONGEST_RENDERED // 4
MAX_DEPTH = 32
MAX_KEYS = 32

_MARKS = range(0xE000, 0xF8FF)
"""Characters for private use."""
_SURROGATE = re.compile("[\ud800-\udfff]")

_Render = Callable[[Sequence[Message], bool], str]
"""Of messages, and whether what asks for an answer comes behind them."""


class ChatEncoder:
    """Encodes conversations with a tokenizer and a template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special = tokenizer.special_text

    def encode(self, chat: Chat) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], frozenset[str]]:
        """The tokens of a conversation, an end token last, which of them are learnt, and what of it is in none of them:
        keys of messages and of what is next to them, and roles. Raises UnusableRecord where the template refuses it, or
        writes no answer of it, ConfigError where that rewrites earlier turns, or writes too much."""
        mark = _unused([*chat.messages, chat.variables], self._template.source.text)
        messages = [_marked(message, self._special, mark) for message in chat.messages]
        variables = _marked(chat.variables, self._special, mark)

        def render(some: Sequence[Message], ask: bool) -> str:
            return self._template.render(some, ask=ask, variables=variables)

        try:
            whole, answers, open_end = self._answers(messages, chat, render)
            unwritten = self._unwritten(messages, variables, whole)
        except RenderingFailed as error:
            raise UnusableRecord(str(error)) from None
        ids, offsets = self._encoded(whole, mark)
        spans: list[Span] = []
        for place, begin, end in answers:
            learnt, plain = chat.learnt[place], (_without(whole, mark, begin), _without(whole, mark, end))
            text = whole[begin:end].replace(mark, "")
            spans += (plain,) if learnt is True else _parts(learnt, chat.messages[place]["content"], text, plain)
        counted = _within(offsets, spans)
        tokens = np.array(ids, dtype=np.uint32)
        if not len(tokens) or tokens[-1] != self._tokenizer.end_of_text:
            tokens = np.append(tokens, np.uint32(self._tokenizer.end_of_text))
            counted = np.append(counted, open_end)
        if not counted.any():
            raise UnusableRecord("its answers are empty")
        return tokens, counted, frozenset(chat.unused | {name.replace(mark, "") for name in unwritten})

    def question(self, messages: Sequence[Message]) -> npt.NDArray[np.uint32]:
        """Return the tokens of a conversation so far, with what introduces an answer behind it.

        Raises RenderingFailed where the template refuses it, ConfigError as :meth:`encode`.
        """
        mark = _unused(list(messages), self._template.source.text)
        said = [_marked(message, self._special, mark) for message in messages]
        ids, _ = self._encoded(self._template.render(said, ask=True), mark)
        return np.array(ids, dtype=np.uint32)

    def _answers(
        self, messages: list[Message], chat: Chat, render: _Render
    ) -> tuple[str, list[tuple[int, int, int]], bool]:
        """The text, which message is an answer to learn from and where it is in it, and whether the last goes to its
        end with no token that ends it."""
        whole = render(messages, False)
        answers: list[tuple[int, int, int]] = []
        open_end = False
        for place, message in enumerate(messages):
            if not chat.learnt[place]:
                continue
            begin = self._begin(messages[:place], messages[: place + 1], whole, render)
            after = render(messages[: place + 1], False)
            if not whole.startswith(after):
                after = after.rstrip()  # what comes behind every text
            if not whole.startswith(after):
                raise self._rewrites()
            end, closed = self._end(after, begin)
            says = message["content"].strip() or message.get("tool_calls")
            if says and not self._special.sub("", after[begin:end]).strip():
                raise UnusableRecord("the chat template does not write its answers")
            answers.append((place, begin, end))
            open_end = not closed and not whole[len(after) :].strip()
        return whole, answers, open_end

    def _begin(self, before: list[Message], after: list[Message], whole: str, render: _Render) -> int:
        """Return where an answer begins: behind what asks for it, as far as the text has that."""
        asked = render(before, True)
        if whole.startswith(asked):
            return len(asked)
        said = render(before, False)
        if not whole.startswith(said.rstrip()):
            raise self._rewrites()
        shared = len(os.path.commonprefix([asked, render(after, False), whole]))
        # What asks may go on as the answer begins: as much of it as the answer has is the answer's.
        answer, least = after[-1]["content"].strip(), len(said.rstrip())
        if whole.startswith(answer, shared):
            return shared
        own = range(1, min(shared - least, len(answer) - 1) + 1)
        return shared - next((size for size in own if whole.startswith(answer, shared - size)), 0)

    def _unwritten(self, messages: list[Message], variables: dict[str, Any], whole: str) -> set[str]:
        """The keys and roles without which the template writes the same."""
        keys = {key for message in messages for key in message} - {"role", "content"}
        lost = {message["role"] for message in messages if message["content"].strip() not in whole}
        names = [(kind, name) for kind, some in (("key", keys), ("role", lost), ("variable", variables))
                 for name in sorted(some)]  # fmt: skip
        if len(names) > MAX_KEYS:
            raise UnusableRecord(f"its messages have more than {MAX_KEYS} different keys")

        def written(without: Sequence[tuple[str, str]]) -> tuple[str, ...]:
            some = [
                {key: "" if key == "content" and ("role", message["role"]) in without else value
                 for key, value in message.items() if ("key", key) not in without}
                for message in messages
            ]  # fmt: skip
            rest = {name: value for name, value in variables.items() if ("variable", name) not in without}
            try:
                found = self._template.render(some, ask=False, variables=rest)
                if found != whole:
                    return (found,)
                return found, self._template.render(some, ask=True, variables=rest)
            except RenderingFailed as error:
                return (str(error),)

        if not names:
            return set()
        with_all = written(())
        if written(names) == with_all:
            unused = names
        else:
            unused = []
            for one in names:
                if written([*unused, one]) == with_all:
                    unused.append(one)
        return {f"role {name}" if kind == "role" else name for kind, name in unused}

    def _end(self, after: str, begin: int) -> tuple[int, bool]:
        """Return where an answer ends: behind the last special token, where nothing but space follows it."""
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


def encode_completion(
    tokenizer: Tokenizer, prompt: str, completion: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], bool]:
    """The tokens of a text that begins with a prompt, with what is put around a text; which are learnt: those that end
    behind the prompt; and whether decoding gives the text back. Raises UnusableRecord where it is too long."""
    text = prompt + completion
    if len(text) > LONGEST_CHAT:
        raise UnusableRecord(f"it is longer than {LONGEST_CHAT:,} characters")
    ids, offsets = tokenizer.encode_with_places(text)
    begins, ends = tokenizer.around(ids)
    learnt = _within(offsets, [(len(prompt), len(text))])
    counted = np.concatenate([np.zeros(len(begins), np.bool_), learnt, np.ones(len(ends), np.bool_)])
    return np.array([*begins, *ids, *ends], dtype=np.uint32), counted, tokenizer.gives_back(ids, text)


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


def _parts(learnt: bool | tuple[Span, ...], content: str, text: str, place: Span) -> list[Span]:
    """Return where the parts of an answer that are learnt are, and what the template writes behind it. ``text`` is the
    answer as it is written, ``place`` where that is."""
    written = content.strip()
    at = text.find(written)
    if isinstance(learnt, bool) or text.count(written) != 1:
        raise UnusableRecord("its train_detail counts characters, and the chat template writes other ones")
    origin, begin, end = place[0] + at - content.find(written), place[0] + at, place[0] + at + len(written)
    inside = [(max(begin, origin + first), min(end, origin + last)) for first, last in learnt]
    return [*inside, (end, place[1])]


def _unused(given: Sequence[Mapping[str, Any]], template: str) -> str:
    used = set(template)
    if sum(_collect(one, used, 0) for one in given) > LONGEST_CHAT:
        raise UnusableRecord(f"it is longer than {LONGEST_CHAT:,} characters")
    if any(_SURROGATE.match(character) for character in used):
        raise UnusableRecord("a message is no UTF-8")
    mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
    if mark is None:
        raise UnusableRecord("its messages use every character for private use")
    return mark


def _collect(value: Any, into: set[str], depth: int) -> int:
    """Note the characters in it; return how many there are."""
    if depth > MAX_DEPTH:
        raise UnusableRecord("a message is nested too deeply")
    if isinstance(value, str):
        into.update(value)
        return len(value)
    if isinstance(value, dict):
        return sum(_collect(key, into, depth + 1) + _collect(inner, into, depth + 1) for key, inner in value.items())
    if isinstance(value, list):
        return sum(_collect(inner, into, depth + 1) for inner in value)
    return 0


def _marked(value: Any, special: re.Pattern[str], mark: str) -> Any:
    """The same with each text of a special token broken by a mark behind its first character."""
    if isinstance(value, str):
        return special.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)
    if isinstance(value, dict):
        return {_marked(key, special, mark): _marked(inner, special, mark) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, special, mark) for inner in value]
    return value
