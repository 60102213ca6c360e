"""How a peer may end that was struck: by which faults, and with which codes. Any other end is a crash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peers.chaos import faults
from peers.chaos.faults import Fault
from swarm.errors import EXIT_DRAINED

KILLED = (-9, 137)
"""How a process ends, or a container, that the kernel has killed."""
LEFT = (EXIT_DRAINED, -15, 143)
"""How one does that was told to leave: once it took part, or before it was asked who it is."""
CODES: Mapping[type[Fault], tuple[int, ...]] = {
    faults.Kill: KILLED,
    faults.BulkKill: KILLED,
    faults.Restart: KILLED,
    faults.LimitMemory: KILLED,
    faults.Stop: (*LEFT, *KILLED),
    faults.Upgrade: (*LEFT, *KILLED),  # the world says what is wrong with the others
}
"""After these faults; those of many peers are inflicted by way of these."""


@dataclass(frozen=True, slots=True)
class End:
    """A peer's process or container ended: when, how (None: by the start that followed), and whether a strike is to
    blame; ``forced``: it was told to leave, and killed when its time was up."""

    wall: float
    name: str
    code: int | None
    struck: bool
    forced: bool = False
