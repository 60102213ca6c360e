"""Commands that start fast: their options are parsed without pydantic.

Newer versions of typer load it to turn text into text and an absent flag into False, which takes longer than all else
that ``swarm status`` does together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup


class LightCommand(TyperCommand):
    """A command whose options, but for its flags, hand on the text that was typed: declare them as ``str | None``."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, made light."""
        return _lightened(super().get_params(ctx))


class LightGroup(TyperGroup):
    """A group that has flags only."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, made light."""
        return _lightened(super().get_params(ctx))


def _lightened(parameters: Iterable[Any]) -> list[Any]:
    found = list(parameters)
    for parameter in found:
        if "process_value" not in vars(parameter):
            parameter.process_value = _as_given(parameter) if getattr(parameter, "is_flag", False) else _as_typed
    return found


def _as_given(flag: Any) -> Any:
    """For a flag that was not given there is nothing to check, and nothing to call back."""
    check = flag.process_value
    return lambda context, value: None if value is None else check(context, value)


def _as_typed(context: object, value: object) -> object:
    return value
