"""The table of exit codes."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from swarm.errors import Ending, SwarmError

EXIT_OK = 0
"""Done, or left in order."""
EXIT_ERROR = 1
"""An error: stderr names the cause, the check and the next command. Also when the run is over, and this disk did not
take the last step's checkpoint."""
EXIT_USAGE = 2
"""Wrong usage or setting: nothing was made."""
EXIT_UNREACHABLE = 3
"""A peer failed or cannot be reached; a peer waited for a lost part, or for all others, as long as
``run.wait_for_lost_s`` says; or ``swarm status`` found no peer that runs."""
EXIT_INCOMPATIBLE = 4
"""Incompatible manifest, tokenizer or version."""
EXIT_DOCTOR = 5
"""A check of this machine failed: it cannot join as it is. ``swarm join`` and ``swarm new`` begin with the quick ones
of ``swarm doctor``."""
EXIT_DRAINED = 75
"""A peer left in order because it was told to stop (EX_TEMPFAIL), by SIGTERM, a closed terminal, or because its machine
is taken back: its supervisor may start it again, elsewhere."""
EXIT_PAUSED = 76
"""A peer left in order because of ``--pause-when``, and comes back when that is over. No command ends with it: events
and ``swarm status`` show it."""
EXIT_INTERRUPTED = 130
"""Interrupted by Ctrl-C (143: by SIGTERM; 129: by a closed terminal): everything is stopped, and files made so far are
kept and named. A peer leaves in order first: it ends so after a second Ctrl-C, or, of the other two, when leaving
took longer than ``--grace``."""

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
