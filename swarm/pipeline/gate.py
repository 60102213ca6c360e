"""Refuses a boundary gradient far above what this replica has seen: one of the bounds within which a peer can lie."""

from __future__ import annotations

from collections import deque
from statistics import median

from swarm.ids import PeerId


class NormGate:
    """Compares a gradient's L2 norm with the running median of accepted ones.

    ``factor`` is wide on purpose: honest norms of one microbatch vary by less than an order of magnitude around the
    median, while a single poisoned microbatch only hurts when it is larger by several. Nothing is refused before
    ``warmup`` norms were seen.
    """

    def __init__(self, factor: float = 1000.0, window: int = 256, warmup: int = 16) -> None:
        self._factor, self._warmup = factor, warmup
        self._norms: deque[float] = deque(maxlen=window)

    def check(self, sender: PeerId, norm: float) -> str | None:
        """None when the norm is accepted (and remembered), else the reason for refusing it."""
        if len(self._norms) >= self._warmup:
            limit = self._factor * max(median(self._norms), 1e-12)
            if norm > limit:
                return f"gradient norm {norm:.3g} from {sender} exceeds {limit:.3g}, {self._factor:g} times the median"
        self._norms.append(norm)
        return None
