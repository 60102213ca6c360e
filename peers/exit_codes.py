"""The table of exit codes."""

from __future__ import annotations

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
EXIT_INTERRUPTED = 130

EXIT_CODES: Mapping[Ending, int] = {
    Ending.DONE: EXIT_OK,
    Ending.FAILED: EXIT_ERROR,
    Ending.MISUSED: EXIT_USAGE,
    Ending.UNREACHABLE: EXIT_UNREACHABLE,
    Ending.INCOMPATIBLE: EXIT_INCOMPATIBLE,
    Ending.DRAINED: EXIT_DRAINED,
}


@runtime_checkable
class _Coded(Protocol):
    """An error of one machine that knows its exit code."""

    exit_code: int


def exit_code_of(error: SwarmError) -> int:
    """Return the exit code of a process that ends with this error."""
    return error.exit_code if isinstance(error, _Coded) else EXIT_CODES[error.ending]
