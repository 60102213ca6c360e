"""Documents laid end to end and cut into rows of ``context`` + 1 tokens.

Rows start every ``context`` tokens: the last token of one row is the first of the next, so that every token but the
very first is a target exactly once per epoch. What this costs: rows cross document borders, so a model sees the tail
of one document as context of the next (the end-of-text token tells it), a row's first tokens are predicted with
little context, and fewer than ``context`` tokens at the end of the shard are never read. No token is padding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def row_count(tokens: int, context: int) -> int:
    """Rows of ``context`` inputs and as many targets that ``tokens`` tokens hold."""
    return max(0, (tokens - 1) // context)


def unread_tokens(tokens: int, context: int) -> int:
    """Tokens at the end that are in no row."""
    rows = row_count(tokens, context)
    return tokens - (rows * context + 1) if rows else tokens


def read_rows(tokens: npt.NDArray[np.unsignedinteger], rows: list[int], context: int) -> npt.NDArray[np.int64]:
    """The rows as an int64 array of shape (len(rows), context + 1). ``tokens`` may be a memory map: only these rows
    are read."""
    out = np.empty((len(rows), context + 1), dtype=np.int64)
    for place, row in enumerate(rows):
        out[place] = tokens[row * context : row * context + context + 1]
    return out
