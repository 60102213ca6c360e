"""What a leader decides while it closes a step. Pure: answers in, scalars and the record out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.errors import OutOfSync
from swarm.ids import PartName, PeerId
from swarm.optimization.messages import Apply, Averaged
from swarm.optimization.records import CloseRecord, Contribution
from swarm.optimization.roster import Roster

CLIP_EPSILON = 1e-6
"""Keeps the division defined for a zero norm; the same as ``torch.nn.utils.clip_grad_norm_`` uses."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the members that closed a step hold: all the same."""

    committed: tuple[Contribution, ...]
    averaged: Mapping[PeerId, Averaged]
    norm: float
    apply: Apply
    digests: Mapping[PartName, str]
    live: tuple[PeerId, ...]


class Disagreement(OutOfSync):
    """Replicas of one part answered with different digests."""

    def __init__(self, what: str, part: PartName, digests: Mapping[PeerId, str]) -> None:
        answers = ", ".join(f"{peer}: {digest[:12] or 'none'}" for peer, digest in sorted(digests.items()))
        super().__init__(f"replicas of {part} disagree about {what}: {answers}")
        self.part, self.digests = part, dict(digests)

    @property
    def dissenters(self) -> tuple[PeerId, ...]:
        """Those that differ from what more replicas answered than anything else; nobody on a tie. Pure."""
        counts = Counter(digest for digest in self.digests.values() if digest).most_common(2)
        if not counts or (len(counts) > 1 and counts[0][1] == counts[1][1]):
            return ()
        return tuple(sorted(peer for peer, digest in self.digests.items() if digest != counts[0][0]))


def agreed(what: str, roster: Roster, digests: Mapping[PeerId, str]) -> dict[PartName, str]:
    """One digest per part when all its replicas answered the same. Raises Disagreement."""
    result: dict[PartName, str] = {}
    for part in roster.parts:
        answers = {peer: digests[peer] for peer in roster.replicas(part)}
        distinct = set(answers.values())
        if len(distinct) != 1 or "" in distinct:
            raise Disagreement(what, part, answers)
        result[part] = distinct.pop()
    return result


def global_norm(roster: Roster, averaged: Mapping[PeerId, Averaged]) -> float:
    """L2 norm of the whole model's mean gradient. Raises Disagreement.

    Squares of the parts are added in the order of their names, so that every leader gets the same bits. Of what a
    part's replicas say, who hold the same, the lower middle counts: most of them would have to lie.
    """
    agreed("the averaged gradient", roster, {peer: answer.digest for peer, answer in averaged.items()})
    total = 0.0
    for part in roster.parts:
        said = sorted(averaged[peer].sq_norm for peer in roster.replicas(part))
        total += said[(len(said) - 1) // 2]
    return math.sqrt(total)


def clip_factor(norm: float, clip_norm: float) -> float:
    """One factor for the whole model (Pascanu et al., arXiv 1211.5063): at most 1."""
    return min(1.0, clip_norm / (norm + CLIP_EPSILON))


def totals(committed: Sequence[Contribution]) -> tuple[int, float]:
    """Target tokens and loss sum of a step, added in the ledger's order."""
    return sum(c.tokens for c in committed), math.fsum(c.loss_sum for c in committed)


def cursors(
    before: CloseRecord,
    committed: Sequence[Contribution],
    averaged: Mapping[PeerId, Averaged],
    following: Roster,
    most: int,
) -> dict[str, tuple[int, int]]:
    """Where every shard continues: what its trainer said; of a lost one behind what was committed of it, else what the
    record before says; else the beginning.

    A trainer that has left keeps its place for when it comes back, as long as there is room for ``most`` cursors: then
    those that got least far are forgotten.
    """
    said: dict[str, tuple[int, int]] = {
        peer: answer.cursor for peer, answer in averaged.items() if answer.cursor is not None
    }
    counted: dict[str, tuple[int, int]] = {}
    for microbatch in sorted(one.microbatch for one in committed):
        counted[microbatch.trainer] = (microbatch.epoch, microbatch.position + 1)
    everybody: dict[str, tuple[int, int]] = {peer: (0, 0) for peer in following.trainers}
    everybody |= {**before.cursors, **counted, **said}
    gone = sorted((peer for peer in everybody if peer not in following), key=lambda peer: (everybody[peer], peer))
    for peer in gone[: max(0, len(everybody) - most)]:
        del everybody[peer]
    return everybody


def given_up(
    head: CloseRecord, previous: str, term: int, roster: Roster, absent: tuple[str, ...], most: int
) -> CloseRecord:
    """The void record of the step after ``head``, whose hash is ``previous``: all but the roster is as it was. Pure:
    every member computes the same."""
    return CloseRecord(
        run=head.run,
        step=head.step + 1,
        term=term,
        committed=(),
        tokens=0,
        loss_sum=0.0,
        grad_norm=0.0,
        clip=1.0,
        lr=0.0,
        digests=dict(head.digests),
        cursors=cursors(head, (), {}, roster, most),
        roster=roster.members,
        absent=absent,
        void=True,
        lineage=head.lineage,
        previous=previous,
    )
