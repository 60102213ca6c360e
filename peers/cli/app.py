"""The command tree, and the border at which errors become lines and exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from peers.cli.light import CommandTable, Entry, LightCommand
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

_LIGHT = {"cls": LightCommand}


class Commands(CommandTable):
    """What follows ``swarm``."""

    epilog_of_each = _EPILOG
    entries = {
        "quickstart": Entry("peers.cli.quickstart", "quickstart",
                            "Train a small model with a whole swarm on this machine.",
                            {**_LIGHT, "short_help": "Train a small model with a whole swarm on this machine."}),
        "new": Entry("peers.cli.start", "new",
                     "Start a run that others join, and serve it in the foreground until it is over.", _LIGHT),
        "join": Entry("peers.cli.start", "join", "Join a run, in the foreground, until it is over.", _LIGHT),
        "relay": Entry("peers.cli.start", "relay",
                       "Relay for peers behind routers, on a machine that everybody can reach.",
                       _LIGHT),
        "doctor": Entry("peers.cli.doctor", "doctor",
                        "Check whether this machine can join a run, and say why not.", _LIGHT),
        "status": Entry("peers.cli.running", "status", "Show the peers of this machine.", _LIGHT),
        "peers": Entry("peers.cli.running", "peers",
                       "Show the whole swarm by part, as a peer of this machine sees it.", _LIGHT),
        "plan": Entry("peers.cli.plan", "plan",
                      "Plan a run: who does what, how long a step takes, and what limits it.", _LIGHT),
        "simulate": Entry("peers.cli.simulate", "simulate",
                          "Simulate a swarm of many peers, with machines that come and go.", _LIGHT),
        "dashboard": Entry("peers.cli.dashboard", "dashboard",
                           "Show a run live in a browser.", _LIGHT),
        "top": Entry("peers.cli.top", "top", "Watch a run in the terminal.", _LIGHT),
        "service": Entry("peers.cli.service", "service",
                         "Run a peer as a systemd service of this user, for weeks."),
        "logs": Entry("peers.cli.running", "logs", "Show the log of this machine's peers.", _LIGHT),
        "drain": Entry("peers.cli.running", "drain", "Have a peer leave its run in order.", _LIGHT),
        "rewind": Entry("peers.cli.running", "rewind", "Allow a run to go back to a checkpoint.", _LIGHT),
        "invite": Entry("peers.cli.running", "invite", "Print an invite to the run of a peer on this machine.", _LIGHT),
        "revoke": Entry("peers.cli.running", "revoke", "Revoke an invite, used or not.", _LIGHT),
        "issuers": Entry("peers.cli.running", "issuers", "Show who may invite to a run, or change that.", _LIGHT),
        "id": Entry("peers.cli.running", "identity", "Show the id of a peer of this machine.", _LIGHT),
        "history": Entry("peers.cli.history", "history", "Show the decision about each step of a run."),
        "export": Entry("peers.cli.model", "export", "Write a trained model as a directory that transformers loads, "
                        "with its tokenizer and a model card."),
        "merge": Entry("peers.cli.model", "merge", "Merge models that sites trained apart from one checkpoint into one "
                       "that transformers loads."),
        "eval": Entry("peers.cli.model", "evaluate",
                      "Measure how well a trained model predicts text: loss, perplexity, and bits a byte."),
        "sample": Entry("peers.cli.model", "sample", "Have a trained model continue a prompt, or chat with it."),
        "chaos": Entry("peers.cli.chaos", "chaos",
                       "Inject faults into a swarm, and check that every invariant holds."),
        "data": Entry("peers.cli.data", "data", "Build, check and list shards: private text as tokens for training."),
        "ckpt": Entry("peers.cli.ckpt", "ckpt",
                      "List, check and fetch the checkpoints from which a run can be resumed."),
        "model": Entry("peers.cli.model", "look", "Check whether a model can be trained here."),
    }  # fmt: skip


app = typer.Typer(
    name="swarm",
    cls=Commands,
    help="Train one model together on unreliable machines, without a centre; all data stays at home.",
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


_OF_JOINERS = ("--pause-when", "--resume-after")
"""What a founder cannot have: until its run has begun the others have nobody else to come to. Where a person types it
all the same, it is said what does."""

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
        if typed == "swarm new" and option in _OF_JOINERS:
            return CommandError(f"{option} is for peers that join: a founder stays until its run has begun",
                                check=f"start this one without {option}; the peer that does the work is another",
                                next_=f"with the invite that it prints: {command_name()} join INVITE {option} …; once "
                                f"the run has begun the founder may go: {command_name()} drain")  # fmt: skip
        close = listed(list(error.possibilities or ())).replace(" and ", " or ")
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
        from peers.version import commit

        made_from = commit()
        typer.echo(f"swarm {__version__}{f' (commit {made_from})' if made_from else ''}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
