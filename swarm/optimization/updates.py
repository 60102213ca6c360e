"""The updates that are kept for those who follow a part, and how far each of them has come (pure)."""

from __future__ import annotations

from collections import deque

import torch

from swarm.ids import PartName

KEPT_UPDATES = 8
"""Steps that an observer may fall behind before it has to download a newer state. Each keeps 4 bytes a parameter of
the part in memory, and only while somebody needs it."""


class Updates:
    """By part: the newest step whose update came, and the mean gradients of the last few that are still needed."""

    def __init__(self) -> None:
        self._kept: dict[PartName, deque[tuple[int, torch.Tensor]]] = {}
        self._reached: dict[PartName, int] = {}

    def reached(self, part: PartName) -> int | None:
        """The newest step of a part, None for one that is not held here."""
        return self._reached.get(part)

    def add(self, part: PartName, step: int, mean: torch.Tensor | None) -> None:
        """The part is at this step; ``mean``, float32 on CPU, led there, or is not needed or not known."""
        self._reached[part] = step
        if mean is not None:
            self._kept.setdefault(part, deque(maxlen=KEPT_UPDATES)).append((step, mean))

    def at(self, part: PartName, step: int) -> torch.Tensor | None:
        """The update of a step; None when it is not kept."""
        return next((mean for kept, mean in self._kept.get(part, ()) if kept == step), None)

    def steps(self, part: PartName) -> list[int]:
        """Steps whose update is kept."""
        return [step for step, _ in self._kept.get(part, ())]

    def trim(self, part: PartName, had: int | None) -> None:
        """All who follow the part have had the updates to step ``had``; None: nobody follows it."""
        kept = self._kept.get(part)
        while kept and (had is None or kept[0][0] <= had):
            kept.popleft()

    def clear(self) -> None:
        """Keep none of any part; how far each has come stays known."""
        self._kept.clear()

    def forget(self, part: PartName) -> None:
        """It is not held here any more."""
        self._reached.pop(part, None)
        self._kept.pop(part, None)
