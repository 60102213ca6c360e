"""Whom a place knew in a run: the others in the newest record of its sessions, to ask when an invite's contacts are
gone."""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from pathlib import Path

from peers.history_source import HISTORY
from swarm.errors import StateError
from swarm.optimization.history_file import HistoryReader
from swarm.optimization.roster import Roster


def sessions_of(place: Path, run: str) -> list[Path]:
    """What a place keeps of a run, the newest session first."""
    return sorted((place / "sessions").glob(f"*-{run[:8]}*"), reverse=True)


def acquaintances(place: Path, run: str, own: str) -> tuple[str, ...]:
    """Addresses of the others, one of each before the second of anybody; empty for a place that never took part.

    Cost: one pass over one history file. What cannot be read is passed over.
    """
    for session in sessions_of(place, run):
        newest = Roster(())
        with contextlib.suppress(OSError, StateError):
            for line in HistoryReader(session / HISTORY):
                newest = line.record.members
        lists = [member.addresses for member in newest.members if member.peer != own]
        if found := [address for turn in zip_longest(*lists) for address in turn if address is not None]:
            return tuple(found)
    return ()
