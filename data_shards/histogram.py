"""What a data owner hands to the founder of a run with experts, who then learns kinds of text from it, too: how often
tokens are in groups of its documents, and no text.

A group is a sum over so many documents at least, each of which adds a few pieces and all pieces alike, so that no
document stands out. What it tells all the same: which kinds of text there are, as languages, code or tables, and how
much of each; and in which of 256 bins the tokens of a kind are, a bin being shared by all tokens that are hashed into
it. Who has a guess at *all* of a small group's documents can check it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from data_shards.manifest import Sha256
from data_shards.router import Points, Router, Whole, described, learn
from data_shards.shard import Shard
from swarm.errors import ConfigError
from swarm.schema import BINS, MOST_IN_BIN, HistogramField, Section

FEWEST_DOCUMENTS, MOST_GROUPS = 32, 16
MOST_BYTES = 1 << 16
"""Of a file: each of its numbers takes at most six characters."""
_MOST_DOCUMENTS, _PIECES = 1 << 14, 4


class DocumentGroup(Section):
    """Documents that are alike: how many, of how many pieces, and the mean of what describes these (see
    :mod:`data_shards.router`)."""

    documents: Annotated[int, Field(ge=FEWEST_DOCUMENTS, le=_MOST_DOCUMENTS)]
    pieces: Annotated[int, Field(ge=1, le=_MOST_DOCUMENTS * _PIECES)]
    shares: HistogramField

    @model_validator(mode="after")
    def _can_be(self) -> DocumentGroup:
        """Each document adds one piece to a few; and the shares of which these are the roots add up to one: of means of
        roots the squares to no more, and the roots, of each bin three rounded off at most, to no less."""
        if not self.documents <= self.pieces <= self.documents * _PIECES:
            raise ValueError(f"{self.pieces} pieces of {self.documents} documents, each of which has 1 to {_PIECES}")
        if sum(root * root for root in self.shares) > MOST_IN_BIN**2 or sum(self.shares) < MOST_IN_BIN - 3 * BINS:
            raise ValueError("shares that do not add up to one")
        return self


class TokenHistogram(Section):
    """The contents of a file of ``swarm data histogram``. The shard was made with this ``tokenizer``."""

    format: Literal[1] = 1
    tokenizer: Sha256
    groups: Annotated[tuple[DocumentGroup, ...], Field(min_length=1, max_length=MOST_GROUPS)]

    @model_validator(mode="after")
    def _of_one_shard(self) -> TokenHistogram:
        if sum(one.pieces for one in self.groups) > _MOST_DOCUMENTS * _PIECES:
            raise ValueError(f"more than {_MOST_DOCUMENTS * _PIECES} pieces, which no shard adds")
        return self

    def points(self) -> Points:
        """Return what kinds can be learnt from."""
        return Points(np.array([one.shares for one in self.groups]), np.array([one.pieces for one in self.groups]))


def histogram_of(shard: Shard, context: int) -> TokenHistogram:
    """Group a shard's documents, of more than 16,384 some from all over, by pieces of this length. Raises ConfigError
    where there are too few of them."""
    manifest = shard.manifest
    if manifest.documents < FEWEST_DOCUMENTS:
        raise ConfigError("SHARD", str(shard.path), f"a shard of at least {FEWEST_DOCUMENTS} documents",
                          "Build one of more, or hand in nothing.",
                          why=f"this has {manifest.documents}, and a histogram of so few would tell too much of each",
                          )  # fmt: skip
    chosen = np.linspace(0, manifest.documents - 1, min(manifest.documents, _MOST_DOCUMENTS)).astype(np.int64)
    ends = np.append(np.asarray(shard.starts[1:]), manifest.tokens).astype(np.int64)
    documents = (np.asarray(shard.tokens[int(shard.starts[one]) : int(ends[one])]) for one in chosen)
    pieces, owners = pieces_of(documents, context, most=_PIECES)
    centres = _centres(pieces, min(MOST_GROUPS, len(chosen) // FEWEST_DOCUMENTS))
    while True:
        groups = Router(centres).choices(pieces)
        sizes = [len(np.unique(owners[groups == one])) for one in range(len(centres))]
        if min(sizes) >= FEWEST_DOCUMENTS or len(centres) == 1:
            break
        centres.pop(sizes.index(min(sizes)))  # its pieces go to the nearest others
    found = []
    for one, size in enumerate(sizes):
        of = pieces[groups == one]
        found.append(DocumentGroup(documents=size, pieces=len(of), shares=tuple(of.mean(axis=0).astype(int).tolist())))
    return TokenHistogram(tokenizer=manifest.tokenizer, groups=tuple(found))


def pieces_of(
    documents: Iterable[npt.NDArray[np.integer[Any]]], context: int, *, most: int | None = None
) -> tuple[Whole, Whole]:
    """Describe pieces of so many tokens of some documents, of each document at most so many from all over, and return
    of which document each is. Rests of documents are left out, but where a document is no longer."""
    found, owners = [], list[int]()
    for number, tokens in enumerate(documents):
        each = min(context, len(tokens))
        whole = tokens[: len(tokens) // each * each].reshape(-1, each)
        if most is not None and len(whole) > most:
            whole = whole[np.linspace(0, len(whole) - 1, most).astype(np.int64)]
        found.append(described(whole))
        owners += [number] * len(whole)
    return np.concatenate(found), np.array(owners, np.int64)


def read_histogram(data: bytes, name: str) -> TokenHistogram:
    """Read what a stranger may have written, at most MOST_BYTES. Raises ConfigError."""
    try:
        return TokenHistogram.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ConfigError("--histogram", name, "a file of swarm data histogram", "Ask its owner for another.",
                          why=f"{where}: {first['msg'].lower()}") from None  # fmt: skip


def _centres(pieces: Whole, count: int) -> list[Sequence[int]]:
    """Return centres of so many kinds, or of fewer where there are not so many."""
    while True:
        try:
            return list(learn(Points(pieces, np.ones(len(pieces), np.int64)), count, seed=0))
        except ConfigError:
            count -= 1
