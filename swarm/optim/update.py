"""Turn the mean that a step's replicas agree on into the next state of a part, in place, and know its digest before.

An optimizer (:class:`Update`) says what is done to each element, once what needs more than one element is computed: a
:class:`StepPlan`. So a step can be taken a piece at a time: :func:`hashes_after` makes a chunk of the next state,
hashes it and forgets it, :func:`take_step` makes it again where it belongs. No second state is ever held.

Every replica computes that itself, and all must get the same bits. So an optimizer is made of separately rounded
float32 +, −, ×, ÷ and √, which IEEE 754 rounds in one way; no fused kernels, which contract a × b + c where the
instruction set can; scalars are computed in Python's float64 by the same five operations and rounded once. No division
is by a scalar: CUDA would multiply by the reciprocal.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.models.layout import FlatLayout
from swarm.state import snapshot
from swarm.state.snapshot import HASH_BYTES, hash_of, hashes_of

CHUNK_ELEMENTS = 1 << 18
"""The most that is stepped at once. 1 MiB: the temporaries stay in a CPU's second-level cache."""

Vectors = tuple[Tensor, ...]
"""The state of a part: flat float32 vectors (elements,), the parameters first, then what the optimizer keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """A close record's numbers for a step: its number (1-based), the learning rate, and the clip factor."""

    step: int
    lr: float
    clip: float


ElementStep = Callable[[Vectors, Vectors, Vectors], None]
"""``step(old, sources, new)``: same elements of the state before, of :attr:`StepPlan.sources`, and of the state after,
which may be the state before. Each element depends on the same one of the others only."""


class Pieces(Protocol):
    """What a step reads beside the state: a vector, or what makes a piece of one."""

    def __getitem__(self, piece: slice, /) -> Tensor:
        """These elements."""


@dataclass(frozen=True, slots=True, eq=False)
class ElementRun:
    """The elements from ``start`` to ``stop``, to all of which the same is done. ``sources`` are what the step
    reads of these elements in place of the plan's; none: the plan's."""

    start: int
    stop: int
    step: ElementStep
    sources: tuple[Pieces, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step that can be taken piece by piece: ``runs`` cover all elements in order. ``sources`` are vectors of those
    from the one numbered ``first`` on; what ends before, or begins behind them, is none of a run's that reads them.
    ``settled`` are vectors of the state after, by number, that are known already; runs make the others."""

    sources: tuple[Pieces, ...]
    runs: tuple[ElementRun, ...]
    first: int = 0
    settled: Mapping[int, Tensor] = field(default_factory=dict)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[slice, ElementStep, Vectors]]:
        """Return what is done from ``start`` to ``stop``, in order, a chunk at most at once, and with what sources."""
        for run in self.runs:
            sources, origin = (run.sources, run.start) if run.sources else (self.sources, self.first)
            first, last = max(start, run.start), min(stop, run.stop)
            for begin in range(first, last, CHUNK_ELEMENTS):
                end = min(begin + CHUNK_ELEMENTS, last)
                place = slice(max(0, begin - origin), max(0, end - origin))
                yield slice(begin, end), run.step, tuple(one[place] for one in sources)

    def made(self, state: Vectors) -> Vectors:
        """Return the vectors of a state that the runs make."""
        return tuple(vector for number, vector in enumerate(state) if number not in self.settled)

    def tensors(self) -> list[Tensor]:
        """Return what is held for it."""
        sources = (*self.sources, *(one for run in self.runs for one in run.sources))
        return [*(one for one in sources if isinstance(one, Tensor)), *self.settled.values()]


class Update(Protocol):
    """An optimizer: the same bits on every replica, whatever machine computes it."""

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the vectors of its state; the first is ``params``."""

    def averaged(self, layout: FlatLayout, step: int) -> slice:
        """Return the elements whose mean closes a step; it leaves the others as they are."""

    def plan(
        self, state: Vectors, mean: Tensor, layout: FlatLayout, numbers: StepNumbers, device: torch.device
    ) -> StepPlan:
        """Return the step with this mean, float32, of what :meth:`averaged` says, which must stay as it is meanwhile.

        What needs more than one element is computed here, on ``device`` where it is much. Raises BugError for a mean of
        another shape or dtype, and for numbers that are no float32.
        """


def check_mean(mean: Tensor, state: Vectors, what: str = "gradient or delta") -> None:
    """Raise BugError for a mean, or ``what`` else it is, that is none of this state."""
    if mean.shape != state[0].shape or mean.dtype != torch.float32:
        raise BugError(f"the {what} is {mean.dtype} {tuple(mean.shape)}, expected float32 {tuple(state[0].shape)}")


# --- taking a step ---------------------------------------------------------------------------------------------------


def stepped(plan: StepPlan, state: Vectors) -> Vectors:
    """Return the state after a step, in new vectors; ``state`` stays as it is."""
    after = tuple(torch.empty_like(vector) for vector in state)
    take_step(plan, state, after)
    return after


def take_step(plan: StepPlan, state: Vectors, after: Vectors) -> None:
    """Write the state after a step into ``after``, whose vectors may be those of ``state``: these change in place.
    Memory: nothing that counts beside both."""
    old, new = plan.made(state), plan.made(after)

    def make(first: int, last: int) -> None:
        for piece, step, sources in plan.pieces(first * CHUNK_ELEMENTS, last * CHUNK_ELEMENTS):
            step(_cut(old, piece), sources, _cut(new, piece))

    _share(-(-len(state[0]) // CHUNK_ELEMENTS), make)
    for number, vector in plan.settled.items():
        after[number].copy_(vector)


def stay(old: Vectors, sources: Vectors, new: Vectors) -> None:
    """Leave the state as it is: an :data:`ElementStep`."""
    for before, after in zip(old, new, strict=True):
        after.copy_(before)


def hashes_after(plan: StepPlan, state: Vectors) -> bytes:
    """Return the hashes of all chunks of the state after a step (:func:`swarm.state.snapshot.hashes_of`) on CPU, of
    which one chunk a thread exists at a time; ``state`` stays as it is."""
    old, size = plan.made(state), snapshot.CHUNK_BYTES // 4
    elements = len(old[0])
    chunks = -(-elements // size)
    hashes = [bytearray(HASH_BYTES * chunks) for _ in old]

    def make(first: int, last: int) -> None:
        scratch = torch.empty(len(old), min(size, elements), dtype=torch.float32)
        for chunk in range(first, last):
            start = chunk * size
            stop = min(start + size, elements)
            for piece, step, sources in plan.pieces(start, stop):
                new = scratch[:, piece.start - start : piece.stop - start]
                step(_cut(old, piece), sources, tuple(new))
            place = slice(HASH_BYTES * chunk, HASH_BYTES * (chunk + 1))
            for vector, own in zip(scratch[:, : stop - start], hashes, strict=True):
                own[place] = hash_of(vector.view(torch.uint8).numpy().data)

    _share(chunks, make)
    made = iter(hashes)
    return b"".join(
        hashes_of([plan.settled[number].view(torch.uint8).numpy().data]) if number in plan.settled else next(made)
        for number in range(len(state))
    )


def _cut(vectors: Vectors, piece: slice) -> Vectors:
    return tuple(vector[piece] for vector in vectors)


def _share(chunks: int, make: Callable[[int, int], None]) -> None:
    """Do some chunks on each of this thread's cores: ``make(first, last)``. Hashes and kernels let go of the
    interpreter's lock."""
    threads = min(torch.get_num_threads(), chunks)
    if threads <= 1:
        make(0, chunks)
        return
    bounds = [chunks * number // threads for number in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(make, bounds[:-1], bounds[1:]))


def root(values: Tensor) -> Tensor:
    """Square roots in place, correctly rounded. On the CPU torch gives this to a vector library whose last bit depends
    on the processor (measured: 0.6 % of the values); numpy uses the processor's own instruction, which is exact."""
    if values.device.type == "cpu":
        array = values.numpy()
        np.sqrt(array, out=array)
    else:
        torch.sqrt(values, out=values)
    return values


# --- scalars ---------------------------------------------------------------------------------------------------------


def single(value: float) -> float:
    """A scalar rounded to float32, once. Raises BugError where that is not finite."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.inf
    if not math.isfinite(rounded):
        raise BugError(f"a scalar of the optimizer step is {value}")
    return rounded


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by multiplications: the C library's ``pow`` is not rounded alike everywhere. Raises BugError
    for an exponent below 1: optimizer steps count from 1."""
    if exponent < 1:
        raise BugError(f"optimizer steps count from 1, not {exponent}")
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
