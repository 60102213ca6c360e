"""Rows that hold several documents: where each begins, as a part's computation and the wire know it.

Attention stays inside a document, and positions restart at each. Both follow from the positions alone, so nothing else
has to reach a part: :func:`packed` sets them around whatever is computed there, and the few layers that look across a
row ask :func:`packed_positions`. On the wire they are a bit a token. Who hosts a stage learns how long documents are.

Shapes: B microbatch, T sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class _Rows:
    positions: Tensor | None = None
    mask: Tensor | None = None


_now: ContextVar[_Rows] = ContextVar("rows", default=_Rows())  # noqa: B039 - rows without positions get no mask


@contextlib.contextmanager
def packed(positions: Tensor | None) -> Iterator[None]:
    """Have what this thread computes be of rows packed like this.

    Args:
        positions: int64 (B, T), each token's place in its document, 0 at its beginning; None for rows that are one
            text each.
    """
    before = _now.set(_Rows(positions))
    try:
        yield
    finally:
        _now.reset(before)


def packed_positions() -> Tensor | None:
    """Return the positions (B, T) of the rows that this thread computes, None where each is one text."""
    return _now.get().positions


def packed_mask() -> Tensor | None:
    """Return, of packed rows, which token may look at which: bool (B, 1, T, T), itself and earlier ones of its
    document. Made once for all layers of a part."""
    rows = _now.get()
    if rows.positions is not None and rows.mask is None:
        documents = document_numbers(rows.positions)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        rows.mask = same.tril()
    return rows.mask


def document_numbers(positions: Tensor) -> Tensor:
    """Return for each token the number of its document in its row: int64 (B, T)."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


# --- on the wire -----------------------------------------------------------------------------------------------------


def starts_bytes(rows: int, sequence: int) -> int:
    """Return how many bytes say where documents begin in so many rows."""
    return -(-rows * sequence // 8)


def encode_starts(positions: Tensor | None) -> bytes:
    """Return a bit for each token, row by row: whether a document begins there. Nothing for rows of one text each."""
    if positions is None:
        return b""
    return np.packbits((positions == 0).cpu().numpy().reshape(-1)).tobytes()


def decode_starts(data: bytes | memoryview, rows: int, sequence: int) -> Tensor:
    """Return the positions (B, T) that :func:`encode_starts` was given; each row begins with a document. Any bytes of
    :func:`starts_bytes` give some."""
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=rows * sequence).reshape(rows, sequence)
    bits[:, 0] = 1
    place = np.arange(sequence, dtype=np.int64)
    begin = np.maximum.accumulate(np.where(bits == 1, place, 0), axis=1)
    return torch.from_numpy(place - begin)
