from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from peers.console.interrupt import SIGNALS, Interrupted, allow, check, defer, install, received
from peers.exit_codes import exit_code_of


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hook = sys.unraisablehook
    install()
    yield
    install()
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupt_is_raised_once_and_remembered(number: signal.Signals, code: int) -> None:
    with pytest.raises(Interrupted) as caught:
        os.kill(os.getpid(), number)
    assert exit_code_of(caught.value) == code
    os.kill(os.getpid(), signal.SIGINT)
    lost = received()
    assert lost is not None
    assert lost.number == number
    with pytest.raises(Interrupted):
        check()


def test_interrupt_deferred_waits_until_it_is_allowed() -> None:
    defer()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted, match="SIGTERM"):
        allow()


def test_interrupt_deferred_and_none_came_goes_on_as_before() -> None:
    defer()
    allow()
    check()
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_in_a_destructor_is_remembered_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Slow:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    slow = Slow()
    del slow
    assert capsys.readouterr().err == ""
    with pytest.raises(Interrupted):
        check()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_command_under_nohup_outlives_its_terminal_and_nothing_else(number: signal.Signals) -> None:
    program = (
        "import os; from peers.console.interrupt import Interrupted, install; install()\n"
        f"try: os.kill(os.getpid(), {int(number)})\n"
        "except Interrupted: print('ends')\n"
        "else: print('goes on')\n"
    )
    command = ["nohup", sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout == ("goes on\n" if number == signal.SIGHUP else "ends\n")
