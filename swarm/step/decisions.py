"""Decide what closes a step: answers in, norms, totals, cursors, links and paces out; and the record of a step that is
given up. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median_high, median_low
from typing import Literal

from swarm.columns import held
from swarm.consensus.changes import Changes
from swarm.consensus.ledger import weights
from swarm.consensus.placement import holding
from swarm.consensus.records import CloseRecord, Contribution, GradientLengths, MeasuredLink
from swarm.consensus.roster import Roster
from swarm.consensus.trials import Trial
from swarm.errors import OutOfSync, Refused
from swarm.ids import PartName, PeerId
from swarm.optim.clipping import usual_lengths
from swarm.schema import MAX_BYTES_PER_S
from swarm.step.messages import Averaged

NORM_TOLERANCE = 1e-9
"""Relative. Replicas that hold the same mean may have added up its squares in another order."""


def alike(one: str, other: str) -> bool:
    """Return whether two replicas' results are the same: the digest, and the squared norm that may follow it
    (:attr:`~swarm.step.messages.Averaged.result`)."""
    (digest, _, norm), (digest2, _, norm2) = one.partition("/"), other.partition("/")
    if digest != digest2 or bool(norm) != bool(norm2):
        return False
    return not norm or math.isclose(float.fromhex(norm), float.fromhex(norm2), rel_tol=NORM_TOLERANCE)


class Disagreement(OutOfSync):
    """Replicas of one part answered with different ``digests``, or with one and different norms."""

    def __init__(self, what: str, part: PartName, digests: Mapping[PeerId, str]) -> None:
        answers = ", ".join(f"{peer}: {_short(digest)}" for peer, digest in sorted(digests.items()))
        super().__init__(f"replicas of {part} disagree about {what}: {answers}")
        self.part, self.digests = part, dict(digests)
        self.what: Literal["gradient", "weights"] = "gradient" if "gradient" in what else "weights"

    @property
    def shown(self) -> Mapping[PeerId, str]:
        """Return what people are shown: the digests alone where these differ."""
        alone = {peer: digest.partition("/")[0] for peer, digest in self.digests.items()}
        return alone if len(set(alone.values())) > 1 else self.digests

    @property
    def of_sums(self) -> bool:
        """Return whether they hold other means, rather than other norms of one: the one who reduced may have given it
        to them."""
        held = {digest.partition("/")[0] for digest in self.digests.values() if digest}
        return self.what == "gradient" and len(held) > 1

    @property
    def dissenters(self) -> tuple[PeerId, ...]:
        """Those that differ from what more replicas answered than anything else; nobody on a tie. Pure."""
        groups = _groups(self.digests)
        if not groups or (len(groups) > 1 and len(groups[0]) == len(groups[1])):
            return ()
        return tuple(sorted(set(self.digests) - set(groups[0])))


def _groups(digests: Mapping[PeerId, str]) -> list[list[PeerId]]:
    """Those that answered alike, the most first; who has no result is in none."""
    groups: list[list[PeerId]] = []
    for peer, digest in sorted(digests.items()):
        if digest:
            same = next((group for group in groups if alike(digests[group[0]], digest)), None)
            groups.append([peer]) if same is None else same.append(peer)
    return sorted(groups, key=len, reverse=True)


def _short(result: str) -> str:
    digest, _, norm = result.partition("/")
    return (digest[:12] or "none") + (f" with squared norm {float.fromhex(norm):g}" if norm else "")


def agreed(what: str, roster: Roster, digests: Mapping[PeerId, str]) -> dict[PartName, str]:
    """One digest per part when all its replicas answered the same. Raises Disagreement."""
    result: dict[PartName, str] = {}
    for part in roster.parts:
        answers = {peer: digests[peer] for peer in roster.replicas(part)}
        first = min(answers.values())
        if not first or not all(alike(first, answer) for answer in answers.values()):
            raise Disagreement(what, part, answers)
        result[part] = first
    return result


def part_norms(roster: Roster, averaged: Mapping[PeerId, Averaged]) -> dict[str, float]:
    """Squared L2 norm of each part's mean gradient: of what its replicas say, who hold the same, the lower middle.
    Raises Disagreement, about the norms too: who lies about one is treated like who lies about the mean."""
    agreed("the averaged gradient", roster, {peer: answer.result for peer, answer in averaged.items()})
    return {str(part): median_low(averaged[p].sq_norm for p in roster.replicas(part)) for part in roster.parts}


def guarded(
    roster: Roster, committed: Sequence[Contribution], said: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return what of this can be: replicas say of others of their part that they left sums out, of no more tokens than
    are in these."""
    found: dict[str, dict[str, int]] = {}
    for by, sums in sorted(said.items()):
        if not sums or by not in roster or roster[PeerId(by)].part is None:
            continue
        part = PartName(roster[PeerId(by)].part or "")
        most = weights(committed, roster.replicas(part), part)
        if all(0 < tokens <= most.get(PeerId(peer), 0) for peer, tokens in sums.items()):
            found[by] = dict(sums)
    return found


def usual_by_part(
    roster: Roster, before: Mapping[str, GradientLengths], said: Mapping[str, GradientLengths]
) -> dict[str, GradientLengths]:
    """Return what is usual of each part's microbatches, by what its replicas said, and was before; nothing of a part of
    which nobody has ever said anything."""
    found: dict[str, GradientLengths] = {}
    for part in roster.parts:
        told = [said[peer] for peer in roster.replicas(part) if peer in said]
        usual = usual_lengths(before.get(part, (0.0, 0.0)), told)
        if any(usual):
            found[str(part)] = usual
    return found


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
    """Return where every shard continues: what its trainer said; of a lost one behind what was committed of it, else
    what the record before says; else the beginning.

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


def kept_digests(before: CloseRecord, changes: Changes) -> dict[str, str]:
    """Return the digests, after the step that follows ``before``, of the parts that an organisation keeps to itself and
    that nobody held in it: as they were, or what hosts of it say that now join with them."""
    said = {str(join.member.part): join.state for join in changes.joins if join.state is not None}
    return {str(part): before.digests[part] for part in before.members.paused} | said


def given_up(head: CloseRecord, previous: str, term: int, roster: Roster, changes: Changes, most: int) -> CloseRecord:
    """The void record of the step after ``head``, whose hash is ``previous``, with these changes, which make the
    roster: all else is as it was, but for states that joiners bring (:func:`kept_digests`). Pure: every member computes
    the same."""
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
        digests={**head.digests, **kept_digests(head, changes)},
        cursors=cursors(head, (), {}, roster, most),
        roster=roster.members,
        absent=changes.absent,
        void=True,
        usual=head.usual,
        passed=head.passed,
        dealt=head.dealt,
        trials=head.trials,
        codecs=head.codecs,
        lineage=head.lineage,
        returns=head.returns,
        slow=head.slow,
        barred=head.barred,
        previous=previous,
    )


def gone_back(
    head: CloseRecord, term: int, roster: Roster, absent: tuple[str, ...], most: int, to: CloseRecord
) -> CloseRecord:
    """The record with which the run goes back from ``head`` to the state after an earlier one, ``to``. Pure: every
    member computes the same. Weights and cursors are those of then, and so are the parts that hosts hold; who takes
    part, and what is known of links and of how busy variants are, are of now. What replicas were owed for a close that
    they had missed is of steps that do not count; whom the run takes nothing from since then rests on, by no words of
    such steps. Raises Refused where nobody holds what an organisation keeps to itself: hosts of others would be given
    it."""
    kept = [part for part in head.members.owners if part in to.digests and not roster.replicas(PartName(part))]
    if kept:
        raise Refused(f"no host of {kept[0]} is there, which {head.members.owners[kept[0]]} keeps to itself")
    opens = to.step + 1  # all take part from there on, whatever they joined
    rest = {peer: one.rest for peer, one in head.trials.items() if one.times > to.trials.get(peer, Trial()).times}
    members = tuple(one.model_copy(update={"since": min(one.since, opens)}) for one in roster.members)
    return CloseRecord(
        run=head.run,
        step=to.step,
        term=term,
        committed=(),
        tokens=0,
        loss_sum=0.0,
        grad_norm=0.0,
        clip=1.0,
        lr=0.0,
        digests=dict(to.digests),
        cursors=cursors(to, (), {}, roster, most),
        roster=holding(Roster(members, roster.admissions), tuple(map(PartName, to.digests))).members,
        absent=absent,
        void=True,
        repeats=head.step + 1,
        returns=head.returns + 1,
        links={peer: link for peer, link in head.links.items() if peer in roster},
        paces={peer: pace for peer, pace in head.paces.items() if peer in roster},
        usual=to.usual,
        passed=head.passed,
        dealt=head.dealt,
        trials={**to.trials, **rest},
        codecs=head.codecs,
        spread_ms=head.spread_ms,
        barred=head.barred,
        previous=head.hash(),
    )


ATTEMPTS_PER_TERM = 1 << 10
"""A later term's numbers of attempts are greater than all of an earlier one's."""


def round_inputs(
    roster: Roster,
    part: PartName,
    committed: Sequence[Contribution],
    live: Collection[str],
    forfeits: Collection[str],
) -> tuple[object, ...]:
    """Return on what a part's round depends: who takes part in it, what each must hold, and whose earlier work is in no
    weights. Attempts in which it is another have other numbers."""
    group = tuple(peer for peer in roster.replicas(part) if peer in live)
    holds = tuple((one.microbatch, one.tokens, one.early, peer) for one, peer in held(committed, part))
    return group, holds, tuple(peer for peer in group if peer in forfeits)


# --- links -----------------------------------------------------------------------------------------------------------
# What a close record says of the links of those that train a part, for the rounds of the next step.


NEW_SHARE = 4
"""A new measurement moves what is believed by a quarter of the difference."""


def measured(before: CloseRecord, averaged: Mapping[PeerId, Averaged], following: Roster) -> dict[str, MeasuredLink]:
    """(microseconds one way, bytes a second) of everybody of whom anything is known, 0 for what is not.

    A member's latency is the middle of what the others of its part measured to it. Its bandwidth is what came from it
    at those that heard it, the middle times their number, for it sent to all of them at once; or what came to it from
    the others, if it says that this is less. (A low rate may be the other's own link: two slow ones of five would have
    made all slow.) Where not more than half of the others measured anything nothing is learnt, and of two the higher
    counts: one that lies alone makes nobody's link slower but its own, and where three others measured it no faster
    either. What comes of it is within the bounds of a record, whatever was said.
    """
    known: dict[str, MeasuredLink] = {}
    for part in following.parts:
        replicas = following.replicas(part)
        for peer in replicas:
            others = [other for other in replicas if other != peer]
            heard, own = list(_reports(averaged, others, [peer])), list(_reports(averaged, [peer], others))
            latency = _middle([each for each, _ in heard], len(others))
            rate = _together([each for _, each in heard], len(others))
            if (said := _together([each for _, each in own], len(others))) and rate:
                rate = min(rate, said)
            old = before.links.get(peer, (0, 0))
            if any(now := (_moved(old[0], latency), _moved(old[1], rate))):
                known[peer] = now
    return known


def paces(before: CloseRecord, averaged: Mapping[PeerId, Averaged], following: Roster) -> dict[str, int]:
    """Microseconds of a microbatch at each replica of a stage that has told, now or before."""
    said = {peer: one.pace_us for peer, one in averaged.items()}
    known = {peer: said.get(peer, 0) or before.paces.get(peer, 0) for peer in following.hosts}
    return {str(peer): pace for peer, pace in known.items() if pace}


def _reports(averaged: Mapping[PeerId, Averaged], by: list[PeerId], of: list[PeerId]) -> Iterator[MeasuredLink]:
    for one in by:
        said = averaged[one].heard if one in averaged else {}
        yield from (said[other] for other in of if other in said)


def _middle(values: list[int], others: int) -> int:
    """Of what was measured, by more than half of the others; 0 by fewer."""
    found = [value for value in values if value]
    return median_high(found) if 2 * len(found) > others else 0


def _together(rates: list[int], others: int) -> int:
    return min(MAX_BYTES_PER_S, _middle(rates, others) * sum(rate > 0 for rate in rates))


def _moved(old: int, new: int) -> int:
    if not old or not new:
        return old or new
    return old + (new - old) // NEW_SHARE
