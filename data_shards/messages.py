"""Conversations of many formats as a chat template takes them: roles, tools, and marks of what is learnt.

Names are those of OpenAI, ShareGPT, TRL, axolotl, LLaMA-Factory and ms-swift. What is not used here is left to the
template, and what that does not write is found in :mod:`data_shards.chat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_shards.privacy import Private

MAX_MESSAGES = 512
ASSISTANT, SYSTEM = "assistant", "system"
MARKS = ("weight", "train", "training", "loss")
"""Of a message or a record: is it learnt? 0 or 1."""
DETAILS = ("train_detail", "training_detail")
"""Of a message: which of its characters are, as axolotl marks them."""
TOOLS = ("tools", "functions")
KWARGS = "chat_template_kwargs"
BESIDE = (SYSTEM, *TOOLS, KWARGS, *MARKS)
"""What of a record, beside its messages, a conversation is made of."""

_ROLES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model", "function_call", "tool_call"), ASSISTANT),
    **dict.fromkeys(("observation", "tool_response", "function_response"), "tool"),
}
_CALLS = ("function_call", "tool_call")
"""Roles whose content is the JSON of a call."""
_ROLE = re.compile(r"[A-Za-z_-]{1,32}")
_NOT_MEANT = "nothing in it is marked to be learnt"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")

Message = dict[str, Any]
Span = tuple[int, int]


class UnusableRecord(Exception):
    """A record, such as a conversation, that nothing is made of; the text says why, and shows nothing of it.

    ``refused`` is the key or the kind of part that is the reason, if it is that. ``meant``: the record says itself that
    it is not to be learnt, so that nothing is wrong with it. ``empty``: there is no text in it that could be lost.
    """

    def __init__(self, why: str, refused: str = "", *, meant: bool = False, empty: bool = False) -> None:
        super().__init__(why)
        self.refused, self.meant, self.empty = refused, meant, empty


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Chat(Private):
    """A conversation as templates take it.

    ``learnt`` says of each message whether it is learnt, or which characters of its content are; ``variables`` is what
    the template gets beside the messages; ``unused`` are marks and keys that nothing was made of.
    """

    messages: list[Message]
    learnt: list[bool | tuple[Span, ...]]
    variables: dict[str, Any]
    unused: set[str]

    def private_size(self) -> str:
        """See :class:`Private`."""
        return f"{len(self.messages)} messages"


def chat_of(given: Sequence[Any], beside: Mapping[str, Any], prompt: int = 0) -> Chat:
    """Read a conversation.

    Args:
        given: Its messages, ``{"role": …, "content": …}`` or ``{"from": …, "value": …}``.
        beside: Its record, of which the names in :data:`BESIDE` are read.
        prompt: So many of the first are not learnt, no matter who says them.

    Raises:
        UnusableRecord: It is none, or nothing in it is to be learnt.
    """
    if len(given) > MAX_MESSAGES:
        raise UnusableRecord(f"it has more than {MAX_MESSAGES} messages")
    unused: set[str] = set()
    messages: list[Message] = []
    learnt: list[bool | tuple[Span, ...]] = []
    for place, one in enumerate(given):
        message, mark = _message(one, unused)
        messages.append(message)
        learnt.append(message["role"] == ASSISTANT and place >= prompt and mark)
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UnusableRecord("it has no answer of the assistant to learn from")
    if not any(message["role"] == ASSISTANT for message in messages[prompt:]):
        raise UnusableRecord("its completion has no answer of the assistant to learn from")
    if (system := beside.get(SYSTEM)) not in (None, "", []):
        first = {"role": SYSTEM, "content": _content(system, "its system")}
        if not any(message["role"] == SYSTEM for message in messages):
            messages.insert(0, first)
            learnt.insert(0, False)
        elif first["content"] not in (message["content"] for message in messages):
            unused.add(SYSTEM)
    unused |= {name for name in MARKS if beside.get(name) not in (None, 0, 1)}
    check_marks(beside)
    if not any(learnt):
        marks = (name for one in given for name in (*MARKS, *DETAILS) if one.get(name) is not None)
        raise UnusableRecord(_NOT_MEANT, next(marks), meant=True)
    return Chat(messages, learnt, _variables(beside, unused), unused)


def _message(given: Any, unused: set[str]) -> tuple[Message, bool | tuple[Span, ...]]:
    """A message, and what is learnt of it if an assistant says it."""
    if not isinstance(given, dict):
        raise UnusableRecord("a message is no object, {…}")
    rest = {key: value for key, value in given.items() if value is not None}
    called = rest.pop("role" if "role" in rest else "from", None)
    content = rest.pop("content" if "content" in rest else "value", None)
    if not isinstance(called, str) or not _ROLE.fullmatch(called):
        raise UnusableRecord("a message has no role (user, assistant, …)")
    role = _ROLES.get(called, called)
    if called in _CALLS:
        rest["tool_calls"], content = _calls(content), ""
    elif "tool_calls" in rest:
        rest["tool_calls"] = _objects(rest["tool_calls"], "tool_calls")
    elif "function_call" in rest:
        rest["tool_calls"] = _calls(rest.pop("function_call"))
    if content is None and "tool_calls" in rest:
        content = ""
    text = _content(content, "a message")
    mark, details = _mark(rest), next((rest[name] for name in DETAILS if name in rest), None)
    if role != ASSISTANT:
        unused |= {f"{name} of {role}" for name in (*MARKS, *DETAILS) if rest.get(name)}
    learnt = mark is not False if details is None or mark is False else _details(details, len(text))
    for name in (*MARKS, *DETAILS):
        rest.pop(name, None)
    return {**rest, "role": role, "content": text}, learnt


def _content(value: Any, what: str) -> str:
    if isinstance(value, list):
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                named = f"{kind} part"[:40] if isinstance(kind, str) else "part without a type"
                raise UnusableRecord(f"{what} has a part that is no text: {named}", refused=named)
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UnusableRecord(f"{what} has no content that is text")
    return value


# --- what is learnt --------------------------------------------------------------------------------------------------


def check_marks(record: Mapping[str, Any]) -> None:
    """Raise UnusableRecord where a record's marks say that it is not to be learnt. Other values are no marks."""
    marks = {name: record[name] for name in MARKS if record.get(name) in (0, 1)}
    if _mark(marks) is False:
        raise UnusableRecord(_NOT_MEANT, next(iter(marks)), meant=True)


def _mark(marked: Mapping[str, Any]) -> bool | None:
    """Return what its marks say; None: nothing."""
    said = {name: marked[name] for name in MARKS if marked.get(name) is not None}
    for name, value in said.items():
        if value not in (0, 1):
            raise UnusableRecord(f"its {name} is neither 0 nor 1")
    values = set(map(bool, said.values()))
    if len(values) > 1:
        raise UnusableRecord(f"its marks of what is learnt contradict each other: {', '.join(said)}")
    return values.pop() if values else None


def _details(given: Any, length: int) -> tuple[Span, ...]:
    """The characters that are learnt, of ``[{"begin_offset": 0, "end_offset": 8, "train": true}, …]``. The one at the
    end offset is in the part; what is in no part is not learnt."""
    spans: list[Span] = []
    at = 0
    parts = given if isinstance(given, list) else [None]
    try:
        for part in sorted(parts, key=lambda part: part["begin_offset"]):
            begin, end = part["begin_offset"], part["end_offset"] + 1
            if not at <= begin <= end <= length or part["train"] not in (0, 1):
                raise ValueError
            at = end
            if part["train"]:
                spans.append((begin, end))
    except (KeyError, TypeError, ValueError):
        raise UnusableRecord("its train_detail is no list of parts of its text") from None
    return tuple(spans)


# --- what the template gets beside the messages ----------------------------------------------------------------------


def _variables(beside: Mapping[str, Any], unused: set[str]) -> dict[str, Any]:
    given = _parsed(beside.get(KWARGS) or {}, KWARGS)
    if not isinstance(given, dict):
        raise UnusableRecord(f"its {KWARGS} is no object, {{…}}")
    variables = {name: value for name, value in given.items() if name not in _RESERVED}
    unused |= {f"{KWARGS}.{name}" for name in given if name in _RESERVED}
    for name in TOOLS:
        tools = _objects(beside.get(name) or [], name)
        if tools and "tools" in variables:
            unused.add(name)
        elif tools:
            bare = [tool if "function" in tool or "name" not in tool else _function(tool) for tool in tools]
            variables["tools"] = bare
    return variables


def _calls(given: Any) -> list[dict[str, Any]]:
    calls = _objects(given, "call of a function")
    if not all(isinstance(call.get("name"), str) for call in calls):
        raise UnusableRecord("its call of a function has no name")
    return [_function(call) for call in calls]


def _function(one: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": one}


def _objects(given: Any, what: str) -> list[dict[str, Any]]:
    """The objects in a list of them, one that stands alone, or the JSON of either."""
    value = _parsed(given, what)
    found = [_parsed(one, what) for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(one, dict) for one in found):
        raise UnusableRecord(f"its {what} is no list of objects, [{{…}}, …]")
    return found


def _parsed(given: Any, what: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise UnusableRecord(f"its {what} is no JSON") from None
