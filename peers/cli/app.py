"""The command tree, and the border at which errors become lines and exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from peers.cli.chaos import chaos
from peers.cli.ckpt import ckpt
from peers.cli.dashboard import dashboard
from peers.cli.data import data
from peers.cli.doctor import doctor
from peers.cli.history import history
from peers.cli.model import evaluate, export, look, sample
from peers.cli.options import LightCommand, LightGroup
from peers.cli.quickstart import quickstart
from peers.cli.running import drain, identity, invite, peers, status
from peers.cli.start import join, new
from peers.cli.top import top
from peers.console.interrupt import received
from peers.console.words import CommandError, command_name, listed, report_error
from peers.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE, exit_code_of
from swarm import __version__
from swarm.errors import BugError, ConfigError, SwarmError

# The first line of a paragraph that is not to be filled is a backspace alone: click's sign for it.
_EPILOG = """\b
Exit codes:
  0    done, or left in order
  1    error; stderr says what happened and what to do
  2    wrong usage or setting
  3    a peer failed or cannot be reached
  4    incompatible manifest or version
  5    a check of this machine failed (swarm doctor)
  75   left in order after SIGTERM, or because the machine is taken back
  130  interrupted by Ctrl-C (143: by SIGTERM)"""

app = typer.Typer(
    name="swarm",
    cls=LightGroup,
    help="Train one model together on unreliable machines, without a centre; all data stays at home.",
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    epilog=_EPILOG,
    short_help="Train a small model with a whole swarm on this machine.",
    # The command itself says what is wrong with words that belong to no option.
    context_settings={"allow_extra_args": True},
)(quickstart)
for _command in (new, join):
    app.command(cls=LightCommand, epilog=_EPILOG)(_command)
app.command(cls=LightCommand, epilog=_EPILOG)(doctor)
app.command(cls=LightCommand, epilog=_EPILOG)(status)
app.command(cls=LightCommand, epilog=_EPILOG)(peers)
app.command(cls=LightCommand, epilog=_EPILOG)(dashboard)
app.command(cls=LightCommand, epilog=_EPILOG)(top)
app.command(cls=LightCommand, epilog=_EPILOG)(drain)
app.command(cls=LightCommand, epilog=_EPILOG)(invite)
app.command("id", cls=LightCommand, epilog=_EPILOG)(identity)
app.command(epilog=_EPILOG)(history)
app.command(epilog=_EPILOG)(export)
app.command("eval", epilog=_EPILOG)(evaluate)
app.command(epilog=_EPILOG)(sample)
app.command(epilog=_EPILOG)(chaos)
app.add_typer(data, name="data", epilog=_EPILOG)
app.add_typer(ckpt, name="ckpt", epilog=_EPILOG)
app.add_typer(look, name="model", epilog=_EPILOG)


def run(arguments: Sequence[str]) -> int:
    """Parse, run, and return the exit code. Errors, the parser's too, are printed as cause, check and next command;
    Interrupted passes."""
    try:
        code = app(args=list(arguments), prog_name="swarm", standalone_mode=False)
        sys.stdout.flush()
    except _USAGE_ERROR as error:
        report_error(_explained(error, arguments))
        return EXIT_USAGE
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else EXIT_OK if exit_.code is None else EXIT_ERROR
    except BugError:
        raise
    except SwarmError as error:
        lost = received()
        if lost is not None:
            raise lost from None
        report_error(error)
        return exit_code_of(error)
    except BrokenPipeError:
        # The reader of our output (head, less) has seen enough.
        return EXIT_ERROR
    except OSError as error:
        refused = _of_this_machine(error)
        if refused is None:
            raise
        report_error(refused)
        return EXIT_ERROR
    return code if isinstance(code, int) else EXIT_OK


def _of_this_machine(error: OSError) -> CommandError | None:
    """An error of what every command uses, as one of ours; None for any other."""
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return CommandError("there is no directory for temporary files in which this user can write",
                            check=f"these were tried: {str(error).partition('found in ')[2] or error}",
                            next_="name one: TMPDIR=DIR, then the same command")  # fmt: skip
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return None
    try:
        os.write(sys.stdout.fileno(), b"\n")
        return None  # it takes a line: it is another disk that is full
    except OSError:
        pass
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # or what waits to be written would fail once more at the exit
    os.close(nowhere)
    return CommandError(f"what it prints cannot be written: {error.strerror}",
                        check="is the disk full on which stdout is a file? df -h",
                        next_="the same command, with stdout elsewhere")  # fmt: skip


# --- what the parser refuses -----------------------------------------------------------------------------------------


_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The parser's own errors. Which module has them depends on typer's version."""


def _explained(error: Any, arguments: Sequence[str]) -> SwarmError:
    """Turn an error of the parser into one of ours."""
    typed = _command_typed(arguments)
    help_ = f"{command_name()}{typed.removeprefix('swarm')} --help"
    parameter = getattr(error, "param", None)
    # Where an option lacks its value the parser does not say of which command.
    usage = "what follows it" if error.ctx is None else " ".join(error.ctx.get_usage().split()).replace("U", "u", 1)
    if (option := getattr(error, "option_name", "")) and hasattr(error, "possibilities"):
        close = listed(sorted(error.possibilities or ())).replace(" and ", " or ")
        check = f"did you mean {close}?" if close else usage
        return CommandError(f"{typed} has no option {option}", check=check, next_=f"{help_} lists those there are")
    if parameter is None:
        cause, _, meant = error.format_message().removesuffix(".").partition(". ")
        return CommandError(f"{cause[0].lower()}{cause[1:]}", check=meant or usage, next_=help_)
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name
    refused = getattr(error.__cause__, "errors", None)
    if refused is None:
        return ConfigError(name, None, f"a value: {parameter.help.removesuffix('.')}", help_)
    from swarm.schema import in_words

    first = refused(include_url=False)[0]
    expected = in_words(first, {}).removesuffix(".").partition(", unable to ")[0]
    _, choices, those = expected.rpartition(" is not one of ")
    return ConfigError(name, first["input"], f"one of {those}" if choices else expected, help_)


def _command_typed(arguments: Sequence[str]) -> str:
    """The command that words begin with, without its arguments: the parser's errors do not always say it."""
    names, here = ["swarm"], typer.main.get_command(app)
    for word in arguments:
        below = getattr(here, "commands", {}).get(word)
        if below is None:
            break
        names.append(word)
        here = below
    return " ".join(names)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"swarm {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
