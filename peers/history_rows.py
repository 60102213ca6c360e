"""What ``swarm history`` shows of each close record, as facts and as lines. Pure; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.standing_text import table
from peers.words import listed
from swarm.ids import PeerId
from swarm.optimization.history_file import HistoryLine
from swarm.optimization.roster import Roster
from swarm.optimization.succession import owner

HEAD = ("step", "term", "loss", "tokens", "microbatches", "members", "leader", "hash", "changes")
SHOWN_NAMES = 8
"""More names than these are counted: a line for people has no room for a thousand."""


@dataclass(frozen=True, slots=True)
class Named:
    """A peer, and what it is called; its id where no roster before names it."""

    peer: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record. ``term`` is the one in which it was decided, ``proposed`` that in which it was proposed first.

    ``loss`` is nats per target token, None for a record without microbatches. ``members`` is the size of the next
    step's roster; ``joined``, ``left`` (asked to) and ``absent`` (lost) tell it from the one before, and are empty in
    the first row of a file. ``leader`` is who owned the term, None where the roster before is not known. ``accepted``
    is how many signatures lie with it, None where none were kept. ``cursors`` are (epoch, position) by trainer.
    ``provisional_since`` is the first step that was closed without a majority, of a record that counts only when one
    agrees; ``confirmed`` is the record that proves it did, ``ended`` one with which the run was ended early.
    """

    step: int
    term: int
    proposed: int
    founding: bool
    void: bool
    loss: float | None
    tokens: int
    microbatches: int
    aside: int
    members: int
    joined: tuple[Named, ...]
    left: tuple[Named, ...]
    absent: tuple[Named, ...]
    leader: Named | None
    accepted: int | None
    grad_norm: float
    clip: float
    lr: float
    hash: str
    previous: str
    cursors: Mapping[str, tuple[int, int]]
    provisional_since: int | None = None
    confirmed: bool = False
    ended: bool = False

    def document(self) -> dict[str, Any]:
        """The same as plain data for ``--json``."""
        return dataclasses.asdict(self)


def row_of(line: HistoryLine, before: Roster | None) -> Row:
    """The row of a record; ``before`` is the roster of the record before it, None where that is not known."""
    record, after = line.record, line.record.members
    known = before if before is not None else Roster(())
    lost = [PeerId(peer) for peer in record.absent]
    went = [peer for peer in known.peers if peer not in after and peer not in record.absent]
    came = [peer for peer in after.peers if peer not in known] if before is not None else []
    led = owner(before, record.step, line.term) if before is not None and len(before) else None
    return Row(
        step=record.step,
        term=line.term,
        proposed=record.term,
        founding=record.founding,
        void=record.void,
        loss=record.loss if record.committed else None,
        tokens=record.tokens,
        microbatches=len(record.committed),
        aside=len(record.aside),
        members=len(after),
        joined=_named(came, after),
        left=_named(went, known),
        absent=_named(lost, known),
        leader=None if led is None else _named([led], known)[0],
        accepted=None if line.acceptances is None else len(line.acceptances),
        grad_norm=record.grad_norm,
        clip=record.clip,
        lr=record.lr,
        hash=record.hash(),
        previous=record.previous,
        cursors=dict(record.cursors),
        provisional_since=record.lineage or None,
        confirmed=record.confirmation is not None,
        ended=record.ended,
    )


def row_lines(rows: Sequence[Row]) -> list[str]:
    """A table, a line for each row, below its head."""
    return table([HEAD, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    loss = "-" if row.loss is None else f"{row.loss:.4f}"
    leader = "-" if row.leader is None else row.leader.name
    numbers = (row.step, row.term, loss, row.tokens, row.microbatches, row.members)
    return (*map(str, numbers), leader, row.hash[:12], "; ".join(_changes(row)))


def _changes(row: Row) -> Iterable[str]:
    if row.founding:
        yield "the run begins" if row.step == 0 else "the run is resumed"
    if row.void:
        yield "given up"
    for word, peers in (("joined", row.joined), ("left", row.left), ("lost", row.absent)):
        if peers:
            yield f"{word}: {_listed(peers)}"
    if row.provisional_since is not None:
        yield f"provisional since step {row.provisional_since}"
    if row.ended:
        yield "the run was ended"
    if row.confirmed:
        yield "a majority agrees with what was provisional before it"
    if row.aside:
        yield f"{row.aside} microbatch{'es' * (row.aside > 1)} set aside"
    if row.term != row.proposed:
        yield f"proposed in term {row.proposed}"


def _listed(peers: Sequence[Named]) -> str:
    names = [peer.name for peer in peers[:SHOWN_NAMES]]
    more = len(peers) - len(names)
    return listed([*names, f"{more} more"] if more else names)


def _named(peers: Iterable[PeerId], roster: Roster) -> tuple[Named, ...]:
    found = (Named(peer, roster[peer].name if peer in roster else peer) for peer in peers)
    return tuple(sorted(found, key=lambda one: (one.name, one.peer)))
