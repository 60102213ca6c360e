"""What the membership of a run needs to know about its own peer, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swarm.consensus.placement import Wish
from swarm.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """The settings of one member.

    Attributes:
        role: What it does beside being a member.
        name: What people call it.
        wish: What a host wants to hold, and what passes it; of a trainer which microbatches it brings.
        region: Where it is; "" for nowhere in particular.
        dial_out_only: Others shall not have to call it for averaging, where the run leaves them the choice.
        beside: The peers with which it was started on this machine, by the ends of their ids.
        machine: What peers of this machine have in common in the run; "" where that is not known.
        max_in_flight: Bounds a trainer's journeys; None lets it choose from what it measures.
        limit_bytes_s: How many bytes a second it may send or receive, whichever is less; None: any number.
        ends_seed: Seed of the private ends' initial weights, for a founder; None: a secret one, kept nowhere.
        patience_s: How long a founder waits for the peers that the run needs; None: for ever.
        contacts: The peers of which any may tell where the run stands, the best first.
        returns: It was in the run before, and comes back to it.
        history: The file with the chain of close records.
        votes: The file with this peer's votes, which belongs to its identity and outlives one start.
    """

    role: Literal["bootstrap", "stage", "trainer"]
    name: str
    wish: Wish = Wish()
    region: str = ""
    dial_out_only: bool = False
    beside: tuple[str, ...] = ()
    machine: str = ""
    max_in_flight: int | None = None
    limit_bytes_s: float | None = None
    ends_seed: int | None = field(default=None, repr=False)
    patience_s: float | None = None
    contacts: tuple[PeerId, ...] = ()
    returns: bool = False
    history: Path
    votes: Path
