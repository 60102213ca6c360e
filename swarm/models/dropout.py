"""Dropout whose randomness is a function of what is computed, not of when or where.

A replica that recomputes a forward must drop exactly what the first one dropped, on any device and at any batch of
work in between. Generators of CPU and CUDA differ, so the mask is a hash of (seed, layer, place, element) made of
integer operations that are exact everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.ids import MicrobatchId

_MASK = 0xFFFFFFFF
_MAX_ELEMENTS = 1 << 32
_seed: ContextVar[int | None] = ContextVar("seed", default=None)


@contextlib.contextmanager
def dropping(seed: int | None) -> Iterator[None]:
    """Have what this thread computes drop by this seed, in modules that are not handed one; None: drop nothing."""
    before = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(before)


def seed_of_drops() -> int | None:
    """Return the seed that :func:`dropping` set for this thread; None where nothing is dropped."""
    return _seed.get()


def dropout_seed(seed: int, microbatch: MicrobatchId) -> int:
    """The seed (63 bits) of all randomness of one microbatch in a run with that seed.

    Layers are told apart further down, so the same numbers fall for every cut of the model into stages.
    """
    text = "\0".join((str(seed), *map(str, microbatch)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def dropout(x: Tensor, probability: float, *, seed: int | None, layer: int | str, place: int = 0) -> Tensor:
    """``x`` with each element zeroed with ``probability`` and the rest scaled up; ``x`` itself without a seed.

    ``layer`` is a number, or the path of a module in the whole model. ``place`` tells several drops of one layer apart.
    Costs about ten integer passes over ``x``.
    """
    if seed is None or probability == 0.0:
        return x
    keep = keep_mask(x.shape, probability, key=_key(seed, layer, place), device=x.device)
    return x * keep.to(x.dtype) * (1.0 / (1.0 - probability))


def keep_mask(shape: torch.Size, probability: float, *, key: int, device: torch.device) -> Tensor:
    """Boolean mask that is False with ``probability``; equal bits for equal arguments on every device."""
    elements = shape.numel()
    if elements > _MAX_ELEMENTS:
        raise BugError(f"a dropout mask of {elements} elements: the hash tells only {_MAX_ELEMENTS} apart")
    return (hashed(elements, key, device) >= int(probability * (_MASK + 1))).view(shape)


def hashed(elements: int, key: int, device: torch.device) -> Tensor:
    """Return a number below 2³² for each of so many elements, at most 2³², by a key of 64 bits: int64 (elements,), the
    same on every device."""
    index = torch.arange(elements, dtype=torch.int64, device=device)
    return _hash32(_hash32(index ^ (key & _MASK)) ^ (key >> 32))


def _key(seed: int, layer: int | str, place: int) -> int:
    digest = hashlib.sha256(f"{seed}/{layer}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _hash32(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers with low bias (C. Wellons, hash-prospector), held in int64.

    Both factors are below 2^31, so that no product leaves int64.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
