"""The command tree, and the border at which errors become lines and exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from peers.cli.chaos import chaos
from peers.cli.ckpt import ckpt
from peers.cli.data import data
from peers.cli.history import history
from peers.cli.join import join
from peers.cli.new import new
from peers.cli.options import LightCommand, LightGroup
from peers.cli.quickstart import quickstart
from peers.cli.running import drain, identity, invite, peers, status
from peers.cli.sample import sample
from peers.console.interrupt import received
from peers.console.words import report_error
from peers.exit_codes import EXIT_ERROR, EXIT_OK, exit_code_of
from swarm import __version__
from swarm.errors import BugError, SwarmError

# The first line of a paragraph that is not to be filled is a backspace alone: click's sign for it.
_EPILOG = """\b
Exit codes:
  0    done, or left in order
  1    error; what happened and what to do is on stderr
  2    wrong usage or setting
  3    a peer failed or cannot be reached
  4    incompatible manifest or version
  75   left in order: it was told to (SIGTERM), or its machine is taken back
  130  interrupted by Ctrl-C (143: by SIGTERM)"""

app = typer.Typer(
    name="swarm",
    cls=LightGroup,
    help="Train one model together on unreliable machines: no centre, and everybody's data stays at home.",
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
    app.command(epilog=_EPILOG)(_command)
app.command(cls=LightCommand, epilog=_EPILOG)(status)
app.command(cls=LightCommand, epilog=_EPILOG)(peers)
app.command(cls=LightCommand, epilog=_EPILOG)(drain)
app.command(cls=LightCommand, epilog=_EPILOG)(invite)
app.command("id", cls=LightCommand, epilog=_EPILOG)(identity)
app.command(epilog=_EPILOG)(history)
app.command(epilog=_EPILOG)(sample)
app.command(epilog=_EPILOG)(chaos)
app.add_typer(data, name="data", epilog=_EPILOG)
app.add_typer(ckpt, name="ckpt", epilog=_EPILOG)


def run(arguments: Sequence[str]) -> int:
    """Parse, run, and return the exit code. Errors of ours are printed as cause and remedy; Interrupted passes."""
    try:
        code = app(args=list(arguments), prog_name="swarm", standalone_mode=True)
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
    return code if isinstance(code, int) else EXIT_OK


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
