"""Start a program that must not outlive its starter."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

CANNOT_RUN = 126
"""The exit code of a command that cannot be run; it has printed a zero byte and then why."""
# PR_SET_PDEATHSIG survives exec. It is set by a small program rather than between fork and exec of a process with
# threads; a parent that died before the call is noticed by its changed pid.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stdout.write("\\0" + error.strerror)
    sys.exit(126)
"""


def launched(command: Sequence[str]) -> list[str]:
    """The same command, killed when the *thread* that starts it ends, however that ends. Costs an interpreter's start,
    about 20 ms."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
