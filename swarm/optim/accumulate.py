"""The gradients of a step's microbatches, each counted once; and the sums of the steps that are open at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median_low
from typing import Literal

import torch
from torch import Tensor

from swarm.errors import BugError, Violation, WrongStep
from swarm.ids import StepWork
from swarm.models.layout import FlatLayout
from swarm.models.passes import Bound, Gradients
from swarm.models.strips import Strips
from swarm.optim.clipping import LONGEST, Lengths, shrunk
from swarm.schema import FEWEST_TRAINERS, WHOLE_WORD

AccumulatorDType = Literal["float32", "float64"]

GRID = 2.0**30
"""In float64 a gradient is first rounded to multiples of 2⁻³⁰. Sums of such numbers are exact while they stay below
2²³, on one replica and in the reducer: then the order of arrival, and who computed what, cannot change a bit. Plain
float64 sums would differ now and then in the bit that survives rounding to float32. Beyond 2²³ only that is lost.
What it costs: a loss-*sum*'s gradient below 2⁻³¹ counts as zero."""


class Accumulator:
    """Sum over microbatches of a part's gradient: one flat vector (elements,), and what is in it. Of a part that is cut
    across devices each has a vector of what is made on it."""

    def __init__(
        self, layout: FlatLayout, dtype: AccumulatorDType, device: torch.device, strips: Strips | None = None
    ) -> None:
        places = [(layout, device)] if strips is None else zip(strips.layouts, strips.devices, strict=True)
        self._strips, self._device, self._dtype = strips, device, getattr(torch, dtype)
        self.sums: list[Tensor] = []
        """Of each device."""
        self._views: dict[str, Tensor] = {}
        for own, place in places:
            self.sums.append(torch.zeros(own.elements, dtype=self._dtype, device=place))
            self._views |= {name: v for name, v in own.views(self.sums[-1]).items() if name not in own.buffers}
        self._work: dict[StepWork, float] = {}
        """What is in the sum, and what each was multiplied with."""
        self._lengths: dict[StepWork, Lengths] = {}
        self._sketches: Sketches | None = None

    @property
    def work(self) -> frozenset[StepWork]:
        """Return what the gradients in the sum are of."""
        return frozenset(self._work)

    @property
    def total(self) -> Tensor:
        """The sum itself, no copy where there is one device: (elements,), gaps zero, on the first. Valid until the next
        call that changes it."""
        return self.sums[0] if self._strips is None else self._strips.joined(self.sums, self._device)

    def copied(self) -> Tensor:
        """Return a copy of the sum on the CPU."""
        cpu = torch.device("cpu")
        return self.total.to(cpu, copy=True) if self._strips is None else self._strips.joined(self.sums, cpu)

    @property
    def lengths(self) -> Lengths:
        """Return the medians of what was added with a bound, as long as it was without; 0 for none."""
        found = list(self._lengths.values())  # at once, whatever is added meanwhile
        return _middle(one for one, _ in found), _middle(one for _, one in found)

    def add(self, work: StepWork, gradients: Gradients, *, checked: bool = False, bound: Bound | None = None) -> None:
        """Add one microbatch, all of it or nothing. ``checked``: :meth:`check` has seen these gradients. Where there is
        a ``bound`` they are scaled down to it.

        Raises BugError when it is in the sum already, and else as :meth:`check`.
        """
        if work in self._work:
            raise BugError(f"{work} is already in the sum")
        if not checked:
            self.check(gradients)
        scale = 1.0
        if bound is not None:
            length = length_of(gradients)
            scale, self._lengths[work] = shrunk(length, bound.most), (length, min(bound.arrived, LONGEST))
        self._work[work] = scale
        self._change(work, gradients, +1, scale)

    def remove(self, work: StepWork, gradients: Gradients) -> None:
        """Take one microbatch out again, given the same gradients, recomputed. Exact in float64; in float32 up to the
        rounding of the additions since. Raises as :meth:`add`, BugError when it is not in the sum."""
        if work not in self._work:
            raise BugError(f"{work} is not in the sum")
        self.check(gradients)
        self._lengths.pop(work, None)
        self._change(work, gradients, -1, self._work.pop(work))

    def see_trainers(self, secret: int) -> None:
        """Compare trainers' shares of the sum from now on, by coordinates that this number draws."""
        self._sketches = Sketches(self.sums, secret)

    def words(self, trainers: Sequence[str]) -> tuple[int, ...]:
        """See :meth:`~swarm.optim.accumulate.Sketches.words`; nothing where no shares are compared."""
        return () if self._sketches is None else self._sketches.words(trainers)

    def reset(self) -> None:
        """Empty: ready for the next step."""
        for one in self.sums:
            one.zero_()
        self._work.clear()
        self._lengths.clear()
        if self._sketches is not None:
            self._sketches.draw()

    def check(self, gradients: Gradients) -> None:
        """Raise BugError when a parameter's gradient is missing, named twice or misshapen, and Violation when a value
        is not finite: the caller adds whose gradient it was. Waits for the device."""
        if sorted(name for name, _ in gradients) != sorted(self._views):
            raise BugError(f"gradients of {[name for name, _ in gradients]} for a part of {list(self._views)}")
        for name, gradient in gradients:
            if gradient.shape != self._views[name].shape:
                raise BugError(f"gradient of {name} has shape {tuple(gradient.shape)}")
        if not gradients:  # a part with nothing to train
            return
        # A sum is not finite when an element is not: one pass and no temporary, a twelfth of what looking at each
        # element costs. Only sums that overflow need that look.
        if all(map(math.isfinite, _told(gradient.sum(dtype=torch.float32) for _, gradient in gradients))):
            return
        for name, gradient in gradients:
            if not bool(gradient.isfinite().all()):
                raise Violation(f"the gradient of {name} is not finite")

    def _change(self, work: StepWork, gradients: Gradients, sign: int, scale: float) -> None:
        with nullcontext() if self._sketches is None else self._sketches.seeing(work.microbatch.trainer, self.sums):
            self._take(gradients, sign, scale)

    def _take(self, gradients: Gradients, sign: int, scale: float) -> None:
        """Add or subtract so much of them: on a GPU in a few launches, but one after the other where each is rounded
        first."""
        if self._dtype == torch.float64:
            for name, gradient in gradients:
                exact = gradient.double() if scale == 1.0 else gradient.double().mul_(scale)
                self._views[name].add_(exact.mul_(GRID).round_().div_(GRID), alpha=sign)
        elif gradients:
            views, found = [self._views[name] for name, _ in gradients], [gradient for _, gradient in gradients]
            torch._foreach_add_(views, found, alpha=sign * scale)


def length_of(gradients: Gradients) -> float:
    """Return the L2 norm of all together. Waits for the device. Cost: a pass over them."""
    if not gradients:
        return 0.0
    norms = _told(torch.linalg.vector_norm(gradient, dtype=torch.float32) for _, gradient in gradients)
    return min(LONGEST, math.sqrt(math.fsum(norm * norm for norm in norms)))


def _told(numbers: Iterable[Tensor]) -> list[float]:
    """Return numbers that lie on any devices, in any order. Waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        by_device.setdefault(number.device, []).append(number)
    return [told for there in by_device.values() for told in torch.stack(there).tolist()]


def _middle(lengths: Iterable[float]) -> float:
    return median_low([length for length in lengths if length] or [0.0])


class OpenSums:
    """The sums of the open steps: of the one after a closed step, and of those that may be fed ahead of it, ``window``
    in all. Memory: that many accumulators, from the beginning."""

    def __init__(self, make: Callable[[], Accumulator], window: int) -> None:
        self.made = [make() for _ in range(window)]
        """All, open or not."""
        self._open: dict[int, Accumulator] = {}

    def __getitem__(self, step: int) -> Accumulator:
        """Return a step's. Raises WrongStep for one that is not open."""
        if (found := self._open.get(step)) is None:
            raise WrongStep(f"step {step} is not open any more, step {min(self._open, default=0)} is")
        return found

    def __contains__(self, step: int) -> bool:
        return step in self._open

    @property
    def any(self) -> Accumulator:
        """Return one, for what all are asked alike."""
        return self.made[0]

    def see_trainers(self, secret: int) -> None:
        """See :meth:`Accumulator.see_trainers`."""
        for one in self.made:
            one.see_trainers(secret)

    @property
    def totals(self) -> list[Tensor]:
        """Return all sums, for who counts their memory."""
        return [each for one in self.made for each in one.sums]

    def open(self, first: int) -> None:
        """These are open from now on: step ``first``, and those that may be fed ahead. What was added to those of them
        that were open stays."""
        steps = range(first, first + len(self.made))
        kept = {step: one for step, one in self._open.items() if step in steps}
        free = [one for one in self.made if all(one is not other for other in kept.values())]
        for step in steps:
            if step not in kept:
                kept[step] = free.pop()
                kept[step].reset()
        self._open = kept

    def close(self) -> None:
        """Nothing is open, and nothing of it counts."""
        self._open = {}


COORDINATES = 1 << 14
"""Of so many the cosine of two vectors is known to 0.008."""
MOST_TRAINERS = 256
"""Of so many trainers shares are seen in one step: 16 MiB."""


class Sketches:
    """A few coordinates of each trainer's share of one open step's sum: how far it points where the others' shares do.

    A share is seen by what it changes in the sum, so whatever is added, scaled or taken out again is seen as it counts.
    The coordinates are drawn anew for each step, and no trainer knows which they are: it could else turn the others
    alone around. Memory: 64 KiB a trainer. Cost of a microbatch: two looks at COORDINATES of the sum.
    """

    def __init__(self, sums: Sequence[Tensor], seed: int) -> None:
        """``seed`` is this peer's secret; ``sums`` are like those that are seen."""
        self._drawing = torch.Generator().manual_seed(seed)
        self._places = [(one.numel(), one.device) for one in sums]
        self.draw()

    def draw(self) -> None:
        """Forget all shares, and look elsewhere from now on."""
        elements, first = sum(size for size, _ in self._places), 0
        if elements <= COORDINATES:
            drawn = torch.arange(elements)
        else:
            drawn = torch.randint(elements, (COORDINATES,), generator=self._drawing)
        self._at, self._shares = list[Tensor](), dict[str, Tensor]()
        for size, device in self._places:
            self._at.append((drawn[(drawn >= first) & (drawn < first + size)] - first).to(device))
            first += size

    @contextmanager
    def seeing(self, trainer: str, sums: Sequence[Tensor]) -> Iterator[None]:
        """Count what is done to the sums meanwhile as this trainer's."""
        before = self._seen(sums)
        yield
        if trainer in self._shares or len(self._shares) < MOST_TRAINERS:
            change = (self._seen(sums) - before).float()
            known = self._shares.get(trainer)
            self._shares[trainer] = change if known is None else known.add_(change)

    def _seen(self, sums: Sequence[Tensor]) -> Tensor:
        return torch.cat([one[at].to(sums[0].device) for one, at in zip(sums, self._at, strict=True)])

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
