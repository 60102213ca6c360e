"""Which members the microbatches of one trainer may pass: anybody, or those of its own organisation alone. Pure.

Where a run keeps to own routes (``split.routes``), each of its close records says so, and names the organisation of
every holder of a grant (:class:`~swarm.consensus.admissions.Admissions`). So all members draw the same borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm.errors import Refused


@dataclass(frozen=True, slots=True)
class Borders:
    """``homes`` has the organisation of each peer; None: microbatches pass anybody."""

    homes: Mapping[str, str] | None = None

    @property
    def drawn(self) -> bool:
        """Return whether there are any."""
        return self.homes is not None

    def home(self, peer: str) -> str:
        """Return the organisation of a peer, "" where none is known."""
        return "" if self.homes is None else self.homes.get(peer, "")

    def near(self, one: str, other: str) -> bool:
        """Return whether these two may be on one route. Who is of no organisation is near nobody."""
        return self.homes is None or (self.home(one) == self.home(other) != "")

    def check(self, peer: str, others: Iterable[str]) -> None:
        """Raises Refused where one of the others is not of the organisation of ``peer``."""
        if self.homes is None:
            return
        if (abroad := next((other for other in others if not self.near(peer, other)), None)) is not None:
            raise Refused(f"{abroad} is not of the organisation of {peer}, which microbatches do not leave")


OPEN = Borders()
