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
    """What the user has to type for this program: ``swarm`` where the shell finds this very one, else its path, else
    the interpreter and the module. Quoted for a shell."""
    program = Path(sys.argv[0])
    if program.name != "swarm":
        # Started as a module: the command lies beside the interpreter where there is one.
        program = Path(sys.executable).with_name("swarm")
    if not program.is_file():
        return f"{_typed(Path(sys.executable))} -m peers.cli"
    found = shutil.which("swarm")
    return "swarm" if found and Path(found).resolve() == program.resolve() else _typed(program)


def _typed(program: Path) -> str:
    """The path as one would type it from here: relative where it lies below the working directory."""
    below = program.absolute().is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(program) if below else str(program.absolute()))


def next_commands(root: Path) -> list[str]:
    """What to try after a local run, ready to paste."""
    swarm = command_name()
    return [
        f'{swarm} sample {shlex.quote(str(root))} --prompt "The" --tokens 80',
        f"{swarm} quickstart --stages 4 --peers 8 --trainers 3",
        f"{swarm} quickstart --help",
    ]


def short_address(address: str) -> str:
    """A multiaddr of which a person sees enough: the peer id's middle is left out."""
    place, separator, peer = address.rpartition("/p2p/")
    return f"{place}{separator}{peer[:6]}…{peer[-6:]}" if separator and len(peer) > 16 else address


def age_of_checkpoint(step: int, closed: int | None) -> str | None:
    """What to know about weights of ``step`` when the run closed ``closed`` steps (None: unknown); None: nothing."""
    later = f"; the run closed {count(closed, 'step')}" if closed is not None and closed > step else ""
    if step == 0:
        return f"using the checkpoint of step 0, the untrained weights{later}"
    return f"using the checkpoint of step {step}{later}" if later else None


def count(number: int, noun: str) -> str:
    """``1 trainer``, ``2 trainers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """A text with nothing in it that a terminal would obey; line ends and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)


def one_line(text: str) -> str:
    """A text as one line of bounded width, printable."""
    joined = " ".join(printable(text).split())
    return joined if len(joined) <= SAMPLE_WIDTH else joined[: SAMPLE_WIDTH - 1] + "…"
