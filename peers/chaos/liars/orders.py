"""What a liar's program is told, and what it writes down when it ends: how often it lied."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from peers.chaos.world import PeerSpec
from swarm.disk import write_whole
from swarm.errors import ConfigError
from swarm.parsing import parse_json

PROGRAM = "peers.chaos.liars"
REPORT = "lies.json"
KINDS = (
    "output-noise", "output-x1.5", "output-x-1", "output-zero", "output-stale", "gradient-x-50", "sum-x-1", "sum-x-10",
    "sum-x-60", "reducer-x-1", "pulls-x-1", "pulls-x-10", "pulls-noise", "labels", "loss-zero", "tokens-few", "slower",
    "late", "asks-again", "invents",
)  # fmt: skip
LIE = rf"^({'|'.join(map(re.escape, KINDS))})(:(0?\.[0-9]*[1-9][0-9]*|1))?$"
"""A lie, and at which rate it is told: ``KIND:RATE``, 1 without one."""


def parse_lie(text: str) -> tuple[str, float]:
    """Return the kind and the rate. Raises ConfigError."""
    found = re.match(LIE, text)
    if found is None:
        allowed = f"KIND:RATE, with a kind of {', '.join(KINDS)}, and a rate up to 1"
        raise ConfigError("--lie", text, allowed, "Correct it.")
    return found[1], float(found[3] or 1)


def as_liar(spec: PeerSpec, lie: str) -> PeerSpec:
    """Return the peer as one that lies from its next start on."""
    return replace(spec, program=PROGRAM, arguments=(*spec.arguments, "--lie", lie))


def write_lies(home: Path, kind: str, fired: int) -> None:
    """Write down about how much it lied. Raises OSError."""
    write_whole(home / REPORT, [json.dumps({"kind": kind, "fired": fired}).encode()])


def read_lies(homes: Iterable[Path]) -> dict[str, int]:
    """Return about how much the liars of a play lied, by the names of their homes."""
    found = sorted(path for home in homes for path in home.glob(f"*/{REPORT}"))
    return {path.parent.name: int(parse_json(path.read_text(encoding="utf-8"))["fired"]) for path in found}
