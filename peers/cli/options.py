"""Options of commands that start fast: parsed without pydantic, and those that several commands share.

Newer versions of typer load pydantic to turn text into text and an absent flag into False, which takes longer than all
else that ``swarm status`` does together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

_WHOLE = 1000


class LightCommand(TyperCommand):
    """A command whose options, but for its flags, hand on the text that was typed: declare them as ``str | None``."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, made light."""
        return _lightened(super().get_params(ctx))


class WholeGroup(TyperGroup):
    """A group whose help says the whole first sentence of each command, over several lines where it is long: typer cuts
    it off where the line ends."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands."""
        known = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, one.get_short_help_str(_WHOLE)) for name, one in known if one is not None and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class LightGroup(WholeGroup):
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


# --- options that the commands for this machine's peers share --------------------------------------------------------


Home = Annotated[
    str | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Where this machine's peers live.  "
        "[default: $SWARM_HOME, else $XDG_DATA_HOME/swarm, else ~/.local/share/swarm]",
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        metavar="PEER",
        help="Its name, its place, or at least 10 characters with which its peer id begins.  [default: the only one]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON, nothing else.")]
