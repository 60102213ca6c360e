"""What a command cannot do, said so that the reader knows what to look at and what to type next."""

from __future__ import annotations

from peers.exit_codes import EXIT_ERROR
from swarm.errors import SwarmError


class Complaint(SwarmError):
    """An error as a person reads it: its cause, what to ``check``, the ``next`` command, and the exit code.

    For troubles of one machine that are no wrong setting (that is ConfigError) and no other peer's doing.
    """

    def __init__(self, cause: str, *, check: str = "", next_: str = "", exit_code: int = EXIT_ERROR) -> None:
        super().__init__(cause)
        self.cause, self.check, self.next, self.exit_code = cause, check, next_, exit_code
