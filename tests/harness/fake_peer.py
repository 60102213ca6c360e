"""Stand-ins for ``peers.node.run_peer`` that need no network: each does one thing a peer may do."""

from __future__ import annotations

import os
import signal
import threading

from peers.settings import PeerSettings

STUBBORN_S = 600.0
"""Longer than a test may take: who waits for such a peer to end by itself fails."""


def run(settings: PeerSettings) -> int:
    """Behave as the peer's name says: ``exit-7``, ``crash``, ``obey``, ``stubborn``, ``raise``."""
    behaviour, _, argument = settings.name.partition("-")
    print(f"{settings.name} starts", flush=True)
    (settings.home / "pid").write_text(str(os.getpid()))
    match behaviour:
        case "exit":
            return int(argument)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise ValueError("a bug in the peer")
        case "obey":
            stop = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            _ready(settings)
            stop.wait(STUBBORN_S)
            return 0
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _ready(settings)
            threading.Event().wait(STUBBORN_S)
    return 1


def _ready(settings: PeerSettings) -> None:
    (settings.home / "ready").touch()
