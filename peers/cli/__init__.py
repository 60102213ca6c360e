"""The command ``swarm``. Nothing slow is imported here: a Ctrl-C must end in order from the first moment."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from peers.console.interrupt import Interrupted, install, silence


def main() -> None:
    """Run the command line and exit: see ``swarm --help`` for the exit codes."""
    install()
    _open_missing()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot print a character, of an arrow or of a text made up, gets a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        from peers.cli.app import run

        code = run(sys.argv[1:])
    except Interrupted as interrupt:
        code = interrupt.exit_code
        _say(f"interrupted by {interrupt.said}")
    silence()
    sys.exit(code)


def _open_missing() -> None:
    """Have a standard stream where there is none (``>&-``): else the next file that is opened would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - for good
            setattr(sys, name, stream)


def _say(line: str) -> None:
    # A terminal that closed takes no more lines.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
