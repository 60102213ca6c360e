"""A peer that tells what it compares by numbers when it judges hops: ``python -m tests.harness.comparing_peer join
INVITE … --json`` is ``swarm join INVITE …``, but for one more line of its output, of the kind ``Compared``, each time.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from peers.cli import main as swarm
from swarm.pipeline.stage import auditing

PROGRAM = "tests.harness.comparing_peer"


def main() -> None:
    """Do what the arguments say, and exit as ``swarm`` does."""
    honest = auditing.compared

    def compared(*payloads: Any, **more: Any) -> auditing.Found:
        found = honest(*payloads, **more)
        print(json.dumps({"kind": "Compared", "verdict": found.verdict, "reason": found.reason}), flush=True)
        return found

    with mock.patch.object(auditing, "compared", compared):
        swarm()


if __name__ == "__main__":
    main()
