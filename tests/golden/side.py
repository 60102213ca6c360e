"""One side of the comparison: live through stories with the checkout that is the working directory, and write down what
came of them: ``python -m tests.golden.side OUT sync:0 sync:1 kill-host:0``.

OUT has a JSON object a line, one for each story and seed; none is begun after ``GOLDEN_UNTIL`` (monotonic seconds).
Where the directory of the run, the run's id and the hashes of records would stand, names of them do: the run's id
depends on the version of the wire.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import swarm
from tests.golden.names import vectors_of
from tests.swarms.playing import Play
from tests.swarms.stories import STORIES

HASH = re.compile(r"[0-9a-f]{64}")


def recording(play: Play) -> dict[str, Any]:
    """What is to be compared of a story that is over."""
    peers = sorted(play.swarm.peers.items())
    found = {
        "digests": {name: _digest(peer) for name, peer in peers},
        "events": {name: _events(peer) for name, peer in peers},
        "faults": play.fired(),
        "missing": play.missing(),
        "counts": dict(sorted(play.kinds.items())),
        "error": play.error,
    }
    found["events"]["(records)"] = _records(play)
    return json.loads(_named(json.dumps(found), play))


def _events(peer: Any) -> list[dict[str, Any]]:
    """As they are in the peer's file, and at last how it ended."""
    lines = (peer.settings.home / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        event.pop("peer")  # who wrote it; an event's own field of that name is stored as another
    return [*events, {"kind": "(outcome)", "what": _outcome(peer.outcome)}]


def _records(play: Play) -> list[dict[str, Any]]:
    """Every close record that any peer has, once."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(play.swarm.peers):
        with contextlib.suppress(FileNotFoundError):
            for record in play.swarm.history(name):
                found.setdefault(json.dumps(record, sort_keys=True), record)
    return sorted(({"kind": "(record)", **one} for one in found.values()), key=lambda one: one["step"])


def _named(text: str, play: Play) -> str:
    """Paths, ids and hashes by name, numbered as they come."""
    text = text.replace(str(play.root), "ROOT").replace(play.swarm.manifest.run_id, "RUN")
    known: dict[str, str] = {}
    for found in re.findall(r'"(?:record|previous)": "([0-9a-f]{64})"', text):
        known.setdefault(found, f"record {len(known)}")
    return HASH.sub(lambda one: known.get(one[0], one[0]), text)


def _digest(peer: Any) -> list[Any] | None:
    found = vectors_of(peer)
    if found is None:
        return None
    part, step, vectors = found
    return [part, step, hashlib.sha256(b"".join(vectors)).hexdigest()]


def _outcome(outcome: str | BaseException | None) -> Any:
    """In words; of a group of errors those in it."""
    if isinstance(outcome, BaseExceptionGroup):
        return [_outcome(one) for one in outcome.exceptions]
    return f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else outcome


def note_begun(run: str) -> None:
    """For whoever may have to end this, as the tests do it."""
    if outcomes := os.environ.get("SWARM_TEST_OUTCOMES"):
        with open(outcomes, "a") as file:
            file.write(json.dumps({"began": run, "at": time.monotonic()}) + "\n")


def prepare() -> None:
    """One thread, and no time for disks that nobody will read, nor for rubbish before a story is over."""
    os.umask(0o077)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.fsync = lambda file: None
    gc.disable()


def main(path: str, *runs: str) -> None:
    """See the module."""
    here = Path(swarm.__file__).resolve().parents[1]
    if here != Path.cwd().resolve():
        raise SystemExit(f"this is {Path.cwd()}, but its modules come from {here}: set PYTHONPATH to it")
    prepare()
    until = float(os.environ.get("GOLDEN_UNTIL", "inf"))
    with open(path, "w") as out, tempfile.TemporaryDirectory() as temporary:
        for run in runs:
            if time.monotonic() > until:
                break
            note_begun(run)
            story, _, seed = run.partition(":")
            play = Play(Path(temporary) / f"{story}-{seed}", STORIES[story], int(seed)).live()
            out.write(json.dumps({"story": story, "seed": int(seed), **recording(play)}) + "\n")
            out.flush()
            del play
            gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
