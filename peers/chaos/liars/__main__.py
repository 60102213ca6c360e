"""A peer that lies: ``python -m peers.chaos.liars join INVITE … --lie KIND:RATE`` is ``swarm join INVITE …``, but for
the lie. When it ends it says about how many microbatches, or steps, it lied, also in ``lies.json`` in its home.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from peers.chaos.liars.lies import Liar, lying
from peers.chaos.liars.orders import PROGRAM, parse_lie, write_lies
from peers.cli import main as swarm


def main() -> None:
    """Do what the arguments say, and exit as ``swarm`` does."""
    parser = argparse.ArgumentParser(PROGRAM, allow_abbrev=False, add_help=False)
    parser.add_argument("--lie", required=True)
    own, sys.argv[1:] = parser.parse_known_args()
    liar = Liar(*parse_lie(own.lie))
    try:
        with lying(liar):
            swarm()
    finally:
        sys.stderr.write(f"{liar.kind}: lied about {liar.fired}\n")
        if "--home" in sys.argv:
            write_lies(Path(sys.argv[sys.argv.index("--home") + 1]), liar.kind, liar.fired)


if __name__ == "__main__":
    main()
