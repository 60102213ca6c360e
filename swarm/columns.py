"""The columns of a run: what must hold each committed microbatch once. Pure.

A microbatch's route names one peer for each column, in the order in which it passes them. A column is a stage, and who
holds that part of the model may stand in it. Variants of a stage are several parts in one column: there who holds the
one stands that the microbatch's choice leads to. Private ends are no column: each trainer holds what it fed, and a
route says nothing of it. Whoever asks who held, or may hold, what of a microbatch asks here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from swarm.ids import MicrobatchId, PartName, PeerId, stage_of, stage_part, variant_of

MAX_VARIANTS = 64
"""Of a stage; and so many choices there are."""


class Routed(Protocol):
    """A microbatch that has gone its way: see :class:`swarm.consensus.records.Contribution`."""

    @property
    def microbatch(self) -> MicrobatchId:
        """Return which one."""

    @property
    def route(self) -> tuple[str, ...]:
        """Return who holds its gradient in each column."""

    @property
    def choice(self) -> int:
        """Return which variants it passes: see :func:`takes`."""


RowT = TypeVar("RowT", bound=Routed)


def stage_parts(stages: int, variants: Sequence[int] = ()) -> tuple[PartName, ...]:
    """Return the parts of so many stages, in the order of columns: of each so many variants, or one."""
    widths = variants or (1,) * stages
    return tuple(stage_part(stage, each, width) for stage, width in enumerate(widths) for each in range(width))


def takes(part: PartName, choice: int) -> bool:
    """Return whether microbatches of a choice pass this variant of its stage: choice c passes number c modulo V of V.
    So one choice leads through stages with any number of variants, and two that differ share what they can."""
    variant, of = variant_of(part)
    return choice % of == variant


def columns(parts: Iterable[PartName]) -> tuple[tuple[PartName, ...], ...]:
    """Return of each column the parts whose holders may stand in it, of these parts."""
    found = defaultdict[int, list[PartName]](list)
    for part in sorted(parts, key=lambda part: (variant_of(part), part)):
        if (column := stage_of(part)) is not None:
            found[column].append(part)
    return tuple(tuple(found[column]) for column in range(max(found, default=-1) + 1))


def host_parts(parts: Iterable[PartName], of: Collection[int] | None = None) -> tuple[PartName, ...]:
    """Return those of these parts that stage hosts hold, in the order of columns: ``of`` these columns, else of all."""
    return tuple(part for column, each in enumerate(columns(parts)) for part in each if of is None or column in of)


def held_columns(parts: Iterable[PartName]) -> tuple[int, ...]:
    """Return the columns in which the holders of these parts may stand: the inverse of :func:`host_parts`."""
    return tuple(column for column, each in enumerate(columns(parts)) if each)


def held(committed: Iterable[RowT], part: PartName) -> Iterator[tuple[RowT, PeerId]]:
    """Yield each microbatch that passes a part with who holds its gradient of it: who stands in the part's column, or
    its trainer."""
    column, (variant, of) = stage_of(part), variant_of(part)
    for one in committed:
        if one.choice % of == variant:
            yield one, PeerId(one.microbatch.trainer if column is None else one.route[column])


def stranger(route: Sequence[str], there: Sequence[Container[str]]) -> tuple[int, str] | None:
    """Return the first column, and who is named there, in which a route names a peer that may not stand in it."""
    ways = enumerate(zip(route, there, strict=True))
    return next(((column, peer) for column, (peer, may) in ways if peer not in may), None)


def standing_at(route: Sequence[str], column: int, trainer: str) -> PeerId:
    """Return who stands there on a microbatch's way: before the first column and behind the last its trainer."""
    return PeerId(route[column] if 0 <= column < len(route) else trainer)


def passes(route: Sequence[str], columns: int, column: int, peer: str) -> bool:
    """Return whether a route is one through so many columns, and names a peer in that one."""
    return len(route) == columns and route[column] == peer


def replaced(route: Sequence[PeerId], column: int, peer: PeerId) -> tuple[PeerId, ...]:
    """Return a route on which a peer stands in a column."""
    return (*route[:column], peer, *route[column + 1 :])
