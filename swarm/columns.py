"""The columns of a run: what must hold each committed microbatch once. Pure.

A microbatch's route names one peer for each column, in the order in which it passes them. A column is a stage, and who
holds that part of the model may stand in it; who holds what several stages share, in the column of each. Variants of a
stage are several parts in one column: there who holds the one stands that the microbatch's choice leads to. Private
ends are no column: each trainer holds what it fed, and a route says nothing of it. Whoever asks who held, or may hold,
what of a microbatch asks here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from swarm.ids import MicrobatchId, PartName, PeerId, shared_by, stage_of, stage_part, variant_of

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


def becomes(part: PartName) -> tuple[PartName, ...]:
    """Return the parts that a part turns into when stages share nothing any more: itself, unless it is shared."""
    return stage_parts(shared_by(part)) or (part,)


def columns_of(part: PartName) -> range:
    """Return the columns in which who holds a part may stand."""
    if stages := shared_by(part):
        return range(stages)
    column = stage_of(part)
    return range(0) if column is None else range(column, column + 1)


def count_passed(parts: Iterable[PartName], committed: Collection[Routed]) -> dict[PartName, int]:
    """Return how many of these microbatches passed each variant among the parts."""
    several = (part for part in parts if variant_of(part)[1] > 1)
    return {part: sum(takes(part, one.choice) for one in committed) for part in several}


def columns(parts: Iterable[PartName]) -> tuple[tuple[PartName, ...], ...]:
    """Return of each column the parts whose holders may stand in it, of these parts."""
    found = defaultdict[int, list[PartName]](list)
    for part in sorted(parts, key=lambda part: (variant_of(part), part)):
        for column in columns_of(part):
            found[column].append(part)
    return tuple(tuple(found[column]) for column in range(max(found, default=-1) + 1))


RECENT = 4096
"""So many microbatches, about, say how busy variants are usually. What one step says changes with what comes next, and
who moves by it moves back."""
UNIT = 64
"""What a microbatch counts at first; with each that follows it counts less."""


def passed_by(before: Mapping[str, int], parts: Iterable[PartName], committed: Collection[Routed]) -> dict[str, int]:
    """Return how many microbatches have passed each variant among the parts lately, in 64ths: these, and as many of
    those of ``before`` as make :data:`RECENT`."""
    fades, found = min(len(committed), RECENT), dict[str, int]()
    for part, now in count_passed(parts, committed).items():
        known = before.get(part, 0)
        found[str(part)] = known - known * fades // RECENT + UNIT * now
    return found


def loads(parts: Iterable[PartName], passed: Mapping[str, int]) -> dict[PartName, float]:
    """Return which share of microbatches passes each variant among the parts, by how many have ``passed`` lately (see
    :func:`passed_by`); a little of each, since the next step may have some for one that none passed."""
    found: dict[PartName, float] = {}
    for each in columns(parts):
        some = {part: UNIT + passed.get(part, 0) for part in each if variant_of(part)[1] > 1}
        found |= {part: count / sum(some.values()) for part, count in some.items()}
    return found


def host_parts(parts: Iterable[PartName], of: Collection[int] | None = None) -> tuple[PartName, ...]:
    """Return those of these parts that stage hosts hold, in the order of columns: ``of`` these columns, else of all."""
    there = (part for column, each in enumerate(columns(parts)) for part in each if of is None or column in of)
    return tuple(dict.fromkeys(there))


def held_columns(parts: Iterable[PartName]) -> tuple[int, ...]:
    """Return the columns in which the holders of these parts may stand: the inverse of :func:`host_parts`."""
    return tuple(column for column, each in enumerate(columns(parts)) if each)


def held(committed: Iterable[RowT], part: PartName) -> Iterator[tuple[RowT, PeerId]]:
    """Yield each microbatch that passes a part with who holds its gradient of it, once for each of the part's columns:
    who stands in it; or its trainer."""
    there, (variant, of) = columns_of(part), variant_of(part)
    for one in committed:
        if one.choice % of != variant:
            continue
        if not there:
            yield one, PeerId(one.microbatch.trainer)
        for column in there:
            yield one, PeerId(one.route[column])


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


def shared_tokens(part: PartName, weights: Iterable[int]) -> int:
    """Return what a mean of sums of these token weights is divided by, where each token counts in several of them: once
    for each of the stages that share the part; 0 where it counts in one."""
    return sum(weights) // shared_by(part) if shared_by(part) else 0


# --- digests of what a part becomes -----------------------------------------------------------------------------------


def joined(digests: Iterable[str]) -> str:
    """Return what a replica says of its state: one digest, or those of all parts that it may be of from now on."""
    return "+".join(digests)


def digests_said(part: PartName, said: str) -> dict[PartName, str]:
    """Return the digests, by part, in what replicas of a part said of it: the inverse of :func:`joined`."""
    return dict(zip(becomes(part) if "+" in said else (part,), said.split("+"), strict=False))
