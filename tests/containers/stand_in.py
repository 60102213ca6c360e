"""What the containers of the faults' tests run in place of a peer: standard library only, inside an image that has no
more. It serves its port, beats into its output, and holds the memory it is told to."""

import json
import os
import signal
import socket
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path


def now():
    """The wall clock that this process sees."""
    return datetime.now(UTC).timestamp()


def event(kind, **fields):
    """One line as peers write them."""
    print(json.dumps({"t": now(), "m": 0.0, "peer": os.environ["HOSTNAME"], "kind": kind, **fields}), flush=True)


def main(arguments):
    """Until SIGTERM, then 75 like a peer; ``--deaf`` does not listen to that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--deaf" in arguments else lambda *_: os._exit(75))
    home = arguments[arguments.index("--home") + 1]
    listener = socket.create_server(("0.0.0.0", 4001))
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    key = Path(home, "identity.key")
    if not key.exists():
        key.write_text(str(now()))
    event("Began", arguments=arguments, key=key.read_text())
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    beat, never = 0, threading.Event()
    while not never.wait(0.1):
        beat += 1
        try:
            with Path(home, "kept").open("a") as kept:
                kept.write("x" * 1024)
            full = False
        except OSError:
            full = True
        event("Beat", number=beat, wall=now(), full=full)


def serve(listener):
    """A megabyte for everybody who calls."""
    while True:
        link, _ = listener.accept()
        threading.Thread(target=answer, args=(link,), daemon=True).start()


def answer(link):
    """To one caller."""
    with link:
        try:
            link.sendall(b"x" * (1 << 20))
        except OSError:
            return


main(sys.argv[1:])
