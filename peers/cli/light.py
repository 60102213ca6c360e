"""Commands that start quickly: a table of them, each imported when it is typed, and parsing without pydantic.

Newer versions of typer load pydantic to turn text into text and an absent flag into False, which takes longer than all
else that ``swarm status`` does together; and the options of all commands take longer to make than those of the one that
is typed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from peers.exit_codes import EXIT_USAGE

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


# --- a table of commands ---------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A command, or a group of them, that is not imported yet.

    Attributes:
        module: Where it is.
        attribute: Its function, or its group, there.
        said: The first sentence of its help, which a list of commands says.
        more: What its function is registered with.
    """

    module: str
    attribute: str
    said: str
    more: Mapping[str, Any] = {}


class CommandTable(LightGroup):
    """A group whose commands are those of ``entries``. A subclass has them, and the ``epilog`` of each."""

    entries: Mapping[str, Entry] = {}
    epilog_of_each = ""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Imported(self.entries, self.epilog_of_each)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, none of which is imported for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.said) for name, entry in self.entries.items()])


class _Imported(Mapping[str, Any]):
    """Commands by name, each made when it is asked for."""

    def __init__(self, entries: Mapping[str, Entry], epilog: str) -> None:
        self._entries, self._epilog, self._made = entries, epilog, dict[str, Any]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name, self._entries[name])
        return self._made[name]

    def _make(self, name: str, entry: Entry) -> Any:
        found = getattr(import_module(entry.module), entry.attribute)
        one = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        if isinstance(found, typer.Typer):
            one.add_typer(found, name=name, epilog=self._epilog)
        else:
            one.command(name, epilog=self._epilog, **entry.more)(found)
        return typer.main.get_group(one).commands[name]
