"""Runs a command and fails when anything that it started outlives it: ``python -m tests.harness.contained CMD …``, or
``--grace SECONDS CMD …`` to wait for that less long.

The runner declares itself the reaper of its descendants (``PR_SET_CHILD_SUBREAPER``, Linux ≥ 3.4), so a process that
lost its parent, in whatever session and under whatever name, becomes its child instead of PID 1's. Survivors are
named, then killed. Exits with the command's own code, or 97 when the command succeeded and left something.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from tests.harness.expect import NotInTime, wait_until
from tests.harness.processes import Process, children_of

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
EXIT_LEFTOVERS = 97
GRACE_S = 60.0

_libc = ctypes.CDLL(None, use_errno=True)


def run_contained(command: list[str], *, grace_s: float) -> tuple[int, list[Process]]:
    """(exit code, what outlived the command by ``grace_s``); a signal's exit code is 128 + its number.

    SIGINT and SIGTERM are passed on to the command. Changes this process for good (it stays a reaper), so it is meant
    for a process of its own. Raises OSError when the command cannot be started.
    """
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    # Safe because this process has no threads.
    child = subprocess.Popen(command, preexec_fn=_die_with_parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    code = _reap_until(child.pid)
    child.returncode = code  # reaped by us, so that Popen does not look for it
    return code, _survivors(grace_s)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap_until(pid: int) -> int:
    """Waits for the command, burying adopted orphans meanwhile."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _survivors(grace_s: float) -> list[Process]:
    def gone() -> bool:
        alive = children_of(os.getpid())
        _bury()
        return not alive

    try:
        wait_until(gone, deadline_s=grace_s)
    except NotInTime:
        return children_of(os.getpid())
    return []


def _bury() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _end(survivors: list[Process]) -> None:
    for process in survivors:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _survivors(GRACE_S)


def main(arguments: list[str]) -> int:
    """Runs the command, reports on stderr, gives the exit code."""
    grace_s = GRACE_S
    if arguments[:1] == ["--grace"]:
        grace_s, arguments = float(arguments[1]), arguments[2:]
    if not arguments:
        print("usage: python -m tests.harness.contained [--grace SECONDS] COMMAND …", file=sys.stderr)
        return 2
    started = time.monotonic()
    code, survivors = run_contained(arguments, grace_s=grace_s)
    for process in survivors:
        print(f"left behind: {process}", file=sys.stderr)
    _end(survivors)
    print(f"contained: exit {code} after {time.monotonic() - started:.1f} s, {len(survivors)} left", file=sys.stderr)
    return EXIT_LEFTOVERS if survivors and code == 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
