"""The command ``swarm``. Nothing slow is imported here: a Ctrl-C must end in order from the first moment."""

from __future__ import annotations

import contextlib
import io
import sys

from peers.console.interrupt import Interrupted, install, silence


def main() -> None:
    """Run the command line and exit: see ``swarm --help`` for the exit codes."""
    install()
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


def _say(line: str) -> None:
    # A terminal that closed takes no more lines.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
