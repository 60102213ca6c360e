"""A few coordinates of each trainer's share of a part's sum, and how far it points where the others' shares do.

A share is seen by what it changes in the sum, so whatever is added, scaled or taken out again is seen as it counts. The
coordinates are drawn anew for each step, and no trainer knows which they are: it could else turn the others alone
around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from swarm.consensus.trials import FEWEST_TRAINERS, WHOLE_WORD

COORDINATES = 1 << 14
"""Of so many the cosine of two vectors is known to 0.008."""
MOST_TRAINERS = 256
"""Of so many trainers shares are seen in one step: 16 MiB."""


class Sketches:
    """The shares of one open step's sum. Memory: 64 KiB a trainer. Cost of a microbatch: two looks at COORDINATES of
    the sum."""

    def __init__(self, elements: int, device: torch.device, seed: int) -> None:
        """``seed`` is this peer's secret."""
        self._drawing, self._elements, self._device = torch.Generator().manual_seed(seed), elements, device
        self.draw()

    def draw(self) -> None:
        """Forget all shares, and look elsewhere from now on."""
        if self._elements <= COORDINATES:
            drawn = torch.arange(self._elements)
        else:
            drawn = torch.randint(self._elements, (COORDINATES,), generator=self._drawing)
        self._at, self._shares = drawn.to(self._device), dict[str, Tensor]()

    @contextmanager
    def seeing(self, trainer: str, total: Tensor) -> Iterator[None]:
        """Count what is done to the sum meanwhile as this trainer's."""
        before = total[self._at]
        yield
        if trainer in self._shares or len(self._shares) < MOST_TRAINERS:
            change = (total[self._at] - before).float()
            known = self._shares.get(trainer)
            self._shares[trainer] = change if known is None else known.add_(change)

    def words(self, trainers: Sequence[str]) -> tuple[int, ...]:
        """Return of each of these trainers how far its share points where the others' do, see :func:`pulls`, in
        1 / WHOLE_WORD; 0 of one whose share is nothing. Nothing where fewer than FEWEST_TRAINERS have one. Waits for
        the device."""
        found = {one: share for one in trainers if (share := self._shares.get(one)) is not None and bool(share.any())}
        if len(found) < FEWEST_TRAINERS:
            return ()
        cosines = dict(zip(found, pulls(torch.stack([*found.values()])), strict=True))
        return tuple(round(WHOLE_WORD * cosines.get(one, 0.0)) for one in trainers)


def pulls(shares: Tensor) -> list[float]:
    """Return of each row the mean of its cosines with the others without the lowest; 0 of one that is not finite. Any
    single other row, made of this one as well, can so raise what is said of it, and not lower it below the mean of its
    cosines with the rest. ``shares``: (trainers, coordinates), three and more of them, none zero."""
    within = (shares / shares.abs().amax(dim=1, keepdim=True)).nan_to_num()  # whose squares are numbers
    units = (within / torch.linalg.vector_norm(within, dim=1, keepdim=True)).nan_to_num()
    cosines = (units @ units.T).fill_diagonal_(torch.inf)
    counted = cosines.sort(dim=1).values[:, 1:-1]
    return [float(one) for one in counted.mean(dim=1).clamp(-1.0, 1.0).cpu()]
