"""Options of commands: those that are made from a model (:mod:`peers.options.model`), those that several commands
share, and parsing them without pydantic.

Newer versions of typer load pydantic to turn text into text and an absent flag into False, which takes longer than all
else that ``swarm status`` does together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from peers.exit_codes import EXIT_USAGE
from peers.options.fields import Setting, settings_of
from peers.options.model import PeerOptions

_WHOLE = 1000


class LightCommand(TyperCommand):
    """A command whose options, but for its flags, hand on the text that was typed: declare them as ``str | None``."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, made light."""
        return _lightened(super().get_params(ctx))


class WholeGroup(TyperGroup):
    """A group whose help says the whole first sentence of each command, over several lines where it is long: typer cuts
    it off where the line ends. Without a command it prints its help, as an error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left for a command."""
        if not args and self.no_args_is_help:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(EXIT_USAGE)
        return super().parse_args(ctx, args)

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


# --- options that are made from a model ------------------------------------------------------------------------------


def offer(command: str, *models: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that models have of it, in their order: it is called with each by its key, as it was
    typed, None where it was not. For a :class:`LightCommand`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        offered = {
            key: setting
            for model in models
            for key, setting in settings_of(model).items()
            if command in setting.option.of
        }
        parameters = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotated(setting))
            for key, setting in offered.items()
        ]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {one.name: one.annotation for one in parameters}
        return function

    return decorate


def _annotated(setting: Setting) -> Any:
    """An option, or an argument, of typer's: text as it is typed, or a list of it, or a flag."""
    kind: Any = bool | None if setting.flag else list[str] | None if setting.many else str | None
    if setting.is_argument:
        return Annotated[kind, typer.Argument(metavar=setting.names[0], show_default=False, help=setting.option.help)]
    default = f"  [default: {setting.said_default}]" if setting.said_default else ""
    metavar = None if setting.flag else setting.metavar
    return Annotated[kind, typer.Option(*setting.names, metavar=metavar, help=f"{setting.option.help}{default}")]


# --- options that the commands for this machine's peers share --------------------------------------------------------


Home = _annotated(settings_of(PeerOptions)["home"])
Peer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        metavar="PEER",
        help="Name, place, or at least the first 10 characters of the id of a peer.  [default: the only peer]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON, and nothing else.")]
