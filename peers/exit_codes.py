"""The table of exit codes."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from swarm.errors import Ending, SwarmError

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INCOMPATIBLE = 4
EXIT_DOCTOR = 5
"""A check of this machine failed: it cannot join as it is."""
EXIT_DRAINED = 75
"""A peer left in order because it was told to stop (EX_TEMPFAIL): its supervisor may start it again, elsewhere."""
EXIT_PAUSED = 76
"""A peer left in order because of ``--pause-when``: whoever keeps it starts it again when that is over. No command ends
with it."""
EXIT_INTERRUPTED = 130

EXIT_CODES: Mapping[Ending, int] = {
    Ending.DONE: EXIT_OK,
    Ending.FAILED: EXIT_ERROR,
    Ending.MISUSED: EXIT_USAGE,
    Ending.UNREACHABLE: EXIT_UNREACHABLE,
    Ending.INCOMPATIBLE: EXIT_INCOMPATIBLE,
    Ending.DRAINED: EXIT_DRAINED,
    Ending.PAUSED: EXIT_PAUSED,
}

FINAL = frozenset({EXIT_OK, EXIT_USAGE, EXIT_INCOMPATIBLE})
"""After these another start with the same words would end alike: it is done, or what was given cannot be used here."""
TRANSIENT = frozenset({EXIT_ERROR, EXIT_UNREACHABLE, EXIT_DOCTOR})
"""After these it may go well the next time: the network was away, nobody answered, the run went on without this peer,
another program had the memory, the disk or the port."""
CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals by which a peer dies that nobody told to end; SIGKILL is how a system short of memory ends one."""


def worth_a_retry(exit_code: int) -> bool:
    """Return whether a peer that ended so, without having been told to, is to be started again. Pure."""
    return exit_code in TRANSIENT or exit_code - 128 in CRASHES


@runtime_checkable
class _Coded(Protocol):
    """An error of one machine that knows its exit code."""

    exit_code: int


def exit_code_of(error: SwarmError) -> int:
    """Return the exit code of a process that ends with this error."""
    return error.exit_code if isinstance(error, _Coded) else EXIT_CODES[error.ending]
