"""How commands speak: errors as cause, check and next command; what to type next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

SAMPLE_WIDTH = 300


def print_error(cause: str, *, check: str = "", next_: str = "", label: str = "error") -> None:
    """The cause on stderr and, where there are any, what to look at and what to do; no traceback, no colour."""
    lines = [f"{label}: {cause}"]
    if check:
        lines.append(f"  check: {check}")
    if next_:
        lines.append(f"  next:  {next_}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def command_name() -> str:
    """What the user has to type for this program: ``swarm`` where the shell finds it, else its path."""
    program = Path(sys.argv[0])
    found = shutil.which("swarm")
    if program.name != "swarm" or (found and Path(found).resolve() == program.resolve()):
        return "swarm"
    inside = program.resolve().is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(program) if inside else str(program))


def next_commands(root: Path) -> list[str]:
    """What to try after a local run, ready to paste."""
    swarm = command_name()
    return [
        f'{swarm} sample {shlex.quote(str(root))} --prompt "The" --tokens 80',
        f"{swarm} quickstart --stages 4 --peers 8 --trainers 3",
        f"{swarm} quickstart --text YOUR_FILE.txt",
    ]


def count(number: int, noun: str) -> str:
    """``1 trainer``, ``2 trainers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_line(text: str) -> str:
    """A text as one line of bounded width, with nothing in it that a terminal would obey."""
    joined = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return joined if len(joined) <= SAMPLE_WIDTH else joined[: SAMPLE_WIDTH - 1] + "…"
