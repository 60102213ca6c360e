"""Whether an engine is one that a play can rest on, known before anybody is started. What it lacks would show as faults
that did not happen, peers that cannot write, or containers that never end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from peers.chaos.engine import Engine, EngineError, Unfit, Watcher
from peers.chaos.nemesis import PLACE, Nemesis

TOLD_S = 15.0
"""How long a busy engine may take to tell what has happened."""
INSTEAD = "swarm chaos --on processes needs no engine"
_TOKEN = ".seen"
_UNFIT: Mapping[str, str] = {
    "rootless": "runs without root, and nobody in it may enter the networks of others",
    "userns": "maps users (userns-remap), and peers could not write what this user reads",
}


def check_kind(engine: Engine) -> None:
    """Raises Unfit for an engine that gives nobody the means for faults, or does not say what it is. Blocks."""
    try:
        options = json.loads(engine.call("info", "--format", "{{json .SecurityOptions}}")) or ()
    except (EngineError, ValueError) as error:
        raise Unfit(f"docker info does not say what this engine is, as Docker's does: {error}; {INSTEAD}") from error
    for option in options:
        if why := _UNFIT.get(str(option).partition(",")[0].removeprefix("name=")):
            raise Unfit(f"this engine {why}: docker context ls shows others, or {INSTEAD}")


def check_files(nemesis: Nemesis, root: Path) -> None:
    """Raises Unfit where containers do not see the files of this machine: what is written below ``root`` is to be read
    in one. Blocks."""
    token, place = secrets.token_hex(8), root / _TOKEN
    place.write_text(token, encoding="ascii")
    try:
        seen = nemesis.run([f"(cat {PLACE}/{_TOKEN} || true)"])
    finally:
        place.unlink()
    if seen != token:
        raise Unfit(
            f"this engine does not see {root} of this machine ({seen or 'nothing is there'}): docker context ls says "
            f"where it runs; {INSTEAD}"
        )


def check_events(watcher: Watcher, nemesis: Nemesis) -> None:
    """Raises Unfit where the engine does not tell of a container that was just started, or not in Docker's words.
    Blocks for at most :data:`TOLD_S`."""
    if not watcher.has_started(nemesis.name, TOLD_S):
        raise Unfit(
            f"the events of this engine are not understood: docker events told nothing of the start of {nemesis.name} "
            f"within {TOLD_S:g} s; {INSTEAD}"
        )
