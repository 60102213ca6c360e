"""Options of commands: those that are made from a model (:mod:`peers.options.model`), and those that several share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from peers.options.fields import Setting, settings_of

# --- options that are made from a model ------------------------------------------------------------------------------


def offer(command: str, *models: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that models have of it, in their order: it is called with each by its key, as it was
    typed, None where it was not. For a :class:`~peers.cli.light.LightCommand`."""

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


# As the model has it: not made from it, for a command that only looks starts without the model.
Home = Annotated[
    str | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Directory of this machine's places and runs.  "
        "[default: $SWARM_HOME, else $XDG_DATA_HOME/swarm, else ~/.local/share/swarm]",
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        metavar="PEER",
        help="Name, place, or at least the first 10 characters of the id of a peer.  [default: the only peer]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON, and nothing else.")]
