"""Declare one setting once: its type and limits, default, help and names.

A model is a frozen dataclass whose fields are ``Annotated[type, Option(…)]``. Everything that knows a setting by name
follows from that: options of commands (:mod:`peers.cli.options`), environment variables, keys of a TOML file and what
is said of a wrong value (:mod:`peers.options.reading`), and the table on the page of ``peers/``.

pydantic checks the values, and is loaded only when there are any: help is printed, and commands that need no settings
run, in less time than its import takes. Hence dataclasses, and limits that pydantic asks for its schema.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

PREFIX = "SWARM_"
MODEL_CONFIG: Mapping[str, str] = {"extra": "forbid", "revalidate_instances": "always"}
"""For ``__pydantic_config__`` of each model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The names, help and default of one field, for people.

    Attributes:
        help: What it does, for the help and the page.
        metavar: What stands for the value in the help; "" where its choices do, or for a flag.
        default: The default in words, where the value itself does not say it.
        names: What it is called in a command, where that is not ``--`` and the field's name. Without ``--``: it is no
            option but an argument, and this is its metavar.
        of: The commands that offer it.
        secret: No message shows its value.
        manifest: The manifest's key that it sets, for options that make a manifest.
    """

    help: str
    metavar: str = ""
    default: str = ""
    names: tuple[str, ...] = ()
    of: tuple[str, ...] = ("join", "new")
    secret: bool = False
    manifest: str = ""


# --- limits: pydantic asks them, people read them --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allowed:
    """The limits of a value beside its type.

    Attributes:
        words: What is allowed, for people.
        refuse: Returns what is wrong with a value, in words that follow "expected"; "" for a good one.
        before: Ask of the value as it was given, before it becomes one of its type.
    """

    words: str
    refuse: Callable[[Any], str]
    before: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return what pydantic checks a field with that has this limit."""
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: Any) -> Any:
            if refused := self.refuse(value):
                raise PydanticCustomError(REFUSED, "{expected}", {"expected": refused})
            return value

        if self.before:
            return core_schema.no_info_before_validator_function(check, handler(source))
        return core_schema.no_info_after_validator_function(check, handler(source))


REFUSED = "refused"
"""pydantic's type of the errors whose message is what was expected."""


@dataclass(frozen=True, slots=True)
class Split:
    """Splits a text where these characters are, which is how a variable, or a file's text, holds several values."""

    at: str = ", "

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return what pydantic splits with."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.split, handler(source))

    def split(self, value: Any) -> Any:
        """Return the parts of a text; anything else as it is."""
        if not isinstance(value, str):
            return value
        return tuple(filter(None, map(str.strip, re.split(f"[{re.escape(self.at)}]", value))))


def between(low: float, high: float | None = None) -> Allowed:
    """Return the limits of a finite number, both allowed; a whole one where ``low`` is."""
    kind = "a whole number" if isinstance(low, int) else "a number"
    most = math.inf if high is None else high
    words = f"{kind}, {low:g} or more" if high is None else f"{kind} from {low:g} to {high:g}"
    return Allowed(words, lambda value: "" if low <= value <= most and value < math.inf else words)


def matching(pattern: str, words: str) -> Allowed:
    """Return the limit of a text that a regular expression describes, all of it."""
    return Allowed(words, lambda value: "" if re.fullmatch(pattern, value) else words)


def lengths(low: int, high: int, words: str, unit: str = "characters") -> Allowed:
    """Return the limits of how long a text or a list may be."""
    return Allowed(words, lambda value: "" if low <= len(value) <= high else f"{words}, {low} to {high} {unit}")


def understood(read: Callable[[str], object], words: str) -> Allowed:
    """Return the limit of a text that ``read`` can make something of; its ValueError says what is allowed."""

    def refuse(value: str) -> str:
        try:
            read(value)
        except ValueError as error:
            return str(error)
        return ""

    return Allowed(words, refuse)


FilePath = Annotated[Path, Allowed("a path", lambda value: "a path" if value == "" else "", before=True)]
"""An empty text is none: it would be the working directory, that nobody named."""


# --- a model's fields ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a model, with everything that is said of it.

    Attributes:
        key: The field's name, and its key in a TOML file.
        option: What its author says of it.
        default: Its value where nobody gives one.
        allowed: What its values may be, in words.
        choices: All its values, where there are few.
        flag: It is on or off.
        many: It is a list.
    """

    key: str
    option: Option
    default: Any
    allowed: str
    choices: tuple[str, ...]
    flag: bool
    many: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in a command."""
        return self.option.names or (f"--{self.key.replace('_', '-')}",)

    @property
    def is_argument(self) -> bool:
        """It is given by its place, not by a name."""
        return not self.names[0].startswith("-")

    @property
    def variable(self) -> str:
        """The environment variable that holds it."""
        return f"{PREFIX}{self.key.upper()}"

    @property
    def metavar(self) -> str:
        """The placeholder of its value in the help."""
        return f"<{'|'.join(self.choices)}>" if self.choices else self.option.metavar

    @property
    def said_default(self) -> str:
        """Its default in words; "" where there is nothing to say."""
        if self.option.default or self.default is None or self.flag:
            return self.option.default
        if self.many:
            return " ".join(self.default)
        return f"{self.default:g}" if isinstance(self.default, int | float) else str(self.default)


def settings_of(model: type) -> Mapping[str, Setting]:
    """Return the settings of a model by key, in the order in which it has them; fields without an Option are none."""
    return _settings_of(model)


@functools.cache
def _settings_of(model: type) -> Mapping[str, Setting]:
    hints = typing.get_type_hints(model, include_extras=True)
    found = {}
    for field in dataclasses.fields(model):
        annotation = hints[field.name]
        option = next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Option)), None)
        if option is not None:
            kind = _stripped(annotation)
            found[field.name] = Setting(
                key=field.name,
                option=option,
                default=field.default,
                allowed=_in_words(annotation),
                choices=get_args(kind) if get_origin(kind) is Literal else (),
                flag=kind is bool,
                many=get_origin(kind) is tuple,
            )
    return found


def _stripped(annotation: Any) -> Any:
    """A type without its limits, and without None."""
    if get_origin(annotation) is Annotated:
        return _stripped(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _stripped(next(one for one in get_args(annotation) if one is not type(None)))
    return annotation


def _in_words(annotation: Any) -> str:
    """Describe the values of an annotated type."""
    if get_origin(annotation) is Annotated:
        kind, *limits = get_args(annotation)
        return next((one.words for one in limits if isinstance(one, Allowed)), None) or _in_words(kind)
    if get_origin(annotation) in (Union, types.UnionType):
        return _in_words(next(one for one in get_args(annotation) if one is not type(None)))
    if get_origin(annotation) is Literal:
        *first, last = get_args(annotation)
        return f"{', '.join(first)} or {last}"
    if get_origin(annotation) is tuple:
        return f"a list, each {_in_words(get_args(annotation)[0])}"
    return _PLAIN[annotation]


_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
