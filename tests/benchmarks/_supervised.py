"""The benchmark in a process of its own, so that Ctrl-C ends it with one line, and nothing that it started lives on.

The process has a session of its own: a terminal's Ctrl-C reaches only us, and we pass it on to the one process that
knows how to end in order. What it and its children say on stderr goes through us, and nobody hears it after an
interruption. We are the reaper of all of them, so that we find, and kill, all that are left in any session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.harness.contained import EXIT_LEFTOVERS, PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
from tests.harness.expect import NotInTime, wait_until
from tests.harness.processes import Process, children_of

GRACE_S = 10.0
"""How long an interrupted benchmark may take to end in order, and what any has started to follow it."""

_libc = ctypes.CDLL(None, use_errno=True)


def supervised(name: str, work: Callable[[], int], grace_s: float = GRACE_S) -> int:
    """Return the exit code of ``work`` done in a child: 130 after Ctrl-C, 143 after SIGTERM, 97 where it would be 0 but
    something outlives it by ``grace_s``, which is named and killed. A second Ctrl-C waits for nothing.

    Only for a process without threads that ends afterwards: it stays a reaper, and its handlers stay.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    heard, told = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _work(work, heard, told)
    os.close(told)
    received: list[int] = []
    handle = os.pidfd_open(child)

    def tell(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended; only what it left is waited for
            signal.pidfd_send_signal(handle, number)

    def stop(number: int, _frame: Any) -> None:
        again, received[:] = bool(received), [number]
        signal.setitimer(signal.ITIMER_REAL, 0.001 if again else grace_s)
        tell(signal.SIGINT)

    signal.signal(signal.SIGALRM, lambda *_: tell(signal.SIGKILL))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    pump = threading.Thread(target=_pass_on, args=(heard, received), daemon=True)
    pump.start()
    try:
        code = _wait_for(child)
        signal.setitimer(signal.ITIMER_REAL, 0)
        left = _survivors(grace_s, received)
    finally:
        end_all()
    pump.join(1.0)
    if received:
        print(f"{name} was interrupted", file=sys.stderr, flush=True)
        return 128 + received[0]
    for process in left:
        print(f"left behind: {process}", file=sys.stderr)
    return EXIT_LEFTOVERS if left and not code else code


def _work(work: Callable[[], int], heard: int, told: int) -> None:
    """In the child; does not return."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    os.close(heard)
    os.dup2(told, 2)
    os.close(told)
    code = 1
    try:
        code = work()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter would: told, and exit code 1
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pass_on(heard: int, received: list[int]) -> None:
    """What is said on stderr, up to the interruption."""
    while said := os.read(heard, 1 << 16):
        if not received:
            sys.stderr.write(said.decode(errors="replace"))
            sys.stderr.flush()


def _wait_for(child: int) -> int:
    """Its exit code; buries adopted orphans meanwhile."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _survivors(grace_s: float, received: list[int]) -> list[Process]:
    """Who is still there after the grace; an interruption ends it, and nobody asks then."""

    def gone() -> bool:
        return bool(received) or not children_of(os.getpid())

    try:
        wait_until(gone, deadline_s=grace_s)
    except NotInTime:
        return children_of(os.getpid())
    return []


def end_all() -> None:
    """Kill those who still descend from us, and bury them."""
    while survivors := children_of(os.getpid()):
        for process in survivors:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        unlink_shared(process.pid for process in survivors)
        _bury(0)
    while _bury(os.WNOHANG):
        pass


def unlink_shared(pids: Iterable[int]) -> None:
    """Remove the shared memory of torch that these processes have made, and did not when they ended: hivemind's."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _bury(options: int) -> bool:
    """Whether one that ended was buried."""
    try:
        return os.waitpid(-1, options)[0] > 0
    except ChildProcessError:
        return False
