"""An invite in a file: how peers that are started together, by a supervisor or in containers, find the founder's
run."""

from __future__ import annotations

import io
import shlex
import stat
import threading
from pathlib import Path

from peers.console.words import another_path
from peers.invites.invite import Invite, parse_invite
from swarm.disk import read_named, write_named
from swarm.errors import ConfigError

LOOK_EVERY_S = 0.2


def write_invite(path: Path, invite: str, *, option: str = "--invite-file") -> Path | None:
    """Have the file hold this invite, readable by this user alone: anyone who has it can join. Returns the directory
    that was made for it, None for none. Raises ConfigError, which names the ``option``, when it cannot be."""
    made = None if path.parent.is_dir() else path.parent
    try:
        write_named(path, [f"{invite}\n".encode()], mode=0o600)
        return made
    except OSError as error:
        raise ConfigError(option, str(path), "a file that can be written", another_path(path),
                          why=str(error.strerror)) from error  # fmt: skip


def qr_code(invite: str, columns: int) -> str:
    """Return an invite as a QR code for a terminal of so many columns, two dots of the code in one character. Raises
    ConfigError where it is wider."""
    import segno

    code = segno.make_qr(invite, error="l")
    if (needed := code.symbol_size(border=2)[0]) > columns:
        raise ConfigError("--qr", columns, f"a terminal of {needed} columns at least",
                          "Make its letters smaller, and repeat the command.", why=f"it has {columns}")  # fmt: skip
    drawn = io.StringIO()
    code.terminal(drawn, border=2, compact=True)
    return drawn.getvalue()


def read_invite(path: Path) -> Invite | None:
    """The invite in the file; None while there is none. Raises ConfigError for what is none, and for a file that cannot
    be read."""
    try:
        text = read_named(path).strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--invite-file", str(path), "a file with an invite", another_path(path),
                          why=str(error)) from error  # fmt: skip
    return parse_invite(text) if text else None


def check_secret(path: Path, invite: Invite) -> str:
    """Return a warning, "" for none, where others than this user may read the file of an invite. Raises ConfigError
    where it holds a grant: anyone who reads that can join in its place."""
    try:
        found = path.stat()
    except OSError:
        return ""
    if not stat.S_ISREG(found.st_mode) or not stat.S_IMODE(found.st_mode) & 0o077:
        return ""
    if invite.granted is not None and invite.granted.seed is not None:
        raise ConfigError("--invite-file", str(path), "a file that this user alone may access",
                          f"Run: chmod 600 {shlex.quote(str(path))}; ask for a new invite if others may have read it.",
                          why="it holds a key that admits anyone who reads it")  # fmt: skip
    return f"others may access {path}, and anyone who reads it can join; chmod 600 {shlex.quote(str(path))}"


def await_invite(path: Path) -> Invite:
    """The invite in the file, as soon as there is one: the founder may start later. Blocks for as long as it takes;
    Ctrl-C ends it. Raises as :func:`read_invite`."""
    pause = threading.Event()
    while (found := read_invite(path)) is None:
        pause.wait(LOOK_EVERY_S)
    return found
