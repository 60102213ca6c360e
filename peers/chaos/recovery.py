"""How long a starved stage waits until a host that moves there works for it. Pure.

A strike starves a stage when it hits replicas of it. Where a record then moves a host there, before the next strike,
the stage has recovered with the first microbatch that came home through that host at its new stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peers.chaos.invariants.evidence import Evidence, Fact
from peers.chaos.lives import PeerLifetime, Struck
from swarm.columns import held_columns, standing_at
from swarm.ids import PartName

RECOVERIES = {
    "moves": "hosts that records moved to another stage, lost stages taken over from a copy not counted",
    "recovered_s": "longest time from a strike to the first microbatch of a host that moved to a stage that was hit",
    "recovered_steps": "the same in steps closed meanwhile, the one counted that was open at the strike",
}
"""Names of the figures, and what each means; None where no strike was followed by a move to a stage that it hit."""


@dataclass(frozen=True, slots=True)
class _Move:
    """The record of ``step`` names a host at another part; its leader told so at ``wall``."""

    wall: float
    step: int
    peer: str
    part: str


def recovery(
    evidence: Evidence, strikes: Sequence[Struck], lives: Sequence[PeerLifetime], ended: float
) -> dict[str, float | int | None]:
    """Return the figures of :data:`RECOVERIES`. ``strikes`` are those that count, in order; what was told after
    ``ended`` does not. Cost: the journeys, once for each move."""
    moves = [one for fact in evidence.of("HostsMoved") if fact.wall <= ended for one in _moves(fact)]
    waits = []
    for strike, until in zip(strikes, [*(one.wall for one in strikes), ended][1:], strict=True):
        parts = _parts_hit(strike, lives)
        works = [
            work
            for move in moves
            if move.part in parts and strike.wall < move.wall <= until
            if (work := _first_work(evidence, move)) is not None
        ]
        if works:
            work = min(works, key=lambda fact: fact.wall)
            waits.append((work.wall - strike.wall, work.step - _open_step(evidence, strike.wall)))
    return {
        "moves": len({(move.step, move.peer) for move in moves}),
        "recovered_s": round(max(seconds for seconds, _ in waits), 2) if waits else None,
        "recovered_steps": max(steps for _, steps in waits) if waits else None,
    }


def _moves(fact: Fact) -> Iterator[_Move]:
    for peer, part in fact.fields["moves"].items():
        yield _Move(fact.wall, fact.step, str(peer), str(part))


def _parts_hit(strike: Struck, lives: Sequence[PeerLifetime]) -> set[str]:
    """Return what those held that it was meant for."""
    return {
        span.part
        for life in lives
        if life.player.name in strike.peers
        for span in life.spans
        if span.from_s < strike.wall <= span.to_s and span.hosts
    }


def _first_work(evidence: Evidence, move: _Move) -> Fact | None:
    """The first journey that a host made possible where it is since this move."""
    (column,) = held_columns((PartName(move.part),))
    came = (
        fact
        for fact in evidence.of("JourneyCompleted")
        if fact.step > move.step and standing_at(fact.fields["route"], column, "") == move.peer
    )
    return min(came, key=lambda fact: fact.wall, default=None)


def _open_step(evidence: Evidence, wall: float) -> int:
    closed = (fact.step for fact in evidence.of("StepClosed") if fact.wall <= wall)
    return max(closed, default=-1) + 1
