"""How long one guide is waited for, and when another should be asked (pure)."""

from __future__ import annotations

from swarm.ids import PeerId
from swarm.waiting import ExponentialBackoff

PATIENCE_S = 10.0
"""How long one question may take. A step may take longer: then it is asked again. So may the update of a large part
over a thin link: then it is given twice the time."""
LONGEST_PATIENCE_S = 64 * PATIENCE_S
"""No update is given longer: whoever needs that for one step's update will never keep up with the run."""
MOST_IDLE = 2
"""So often an update is given twice the time though it does not come at a pace that would bring it in the longest: it
may have been closed just now, or wait behind other tensors."""


class GuidePatience:
    """With the guide that is asked. What a thin link was found to need is kept from step to step, and forgotten with
    the guide: a dead one that follows must be noticed soon."""

    def __init__(self) -> None:
        self._guide: PeerId | None = None
        self._idle = 0
        self._time = ExponentialBackoff(PATIENCE_S, LONGEST_PATIENCE_S)

    @property
    def seconds(self) -> float:
        """How long the next question may take."""
        return self._time.next_s

    def begin(self, guide: PeerId) -> None:
        """Something else is asked now, of ``guide``."""
        if guide != self._guide:
            self._guide = guide
            self._time.restart()
        self._idle = 0

    def late(self, waited_s: float, brought: int, size: int) -> str:
        """The guide has the update of ``size`` bytes, and in ``waited_s`` only ``brought`` bytes of whatever came from
        it. Why another should be asked, "" when this one is given twice the time."""
        comes = brought > 0 and brought * LONGEST_PATIENCE_S >= size * waited_s
        self._idle = 0 if comes else self._idle + 1
        if self._idle > MOST_IDLE:
            return f"{brought} of {size} bytes in {waited_s:g} s"
        if self.seconds >= LONGEST_PATIENCE_S:
            return f"not in {self.seconds:g} s"
        self._time.pause_s()
        return ""
