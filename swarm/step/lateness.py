"""Replicas of a stage that train apart may be late for a close: how many it needs, how long it waits for the rest, and
what those that it leaves out are owed. Pure.

A close needs a *quorum* of each stage's replicas, and then waits as long as arrivals usually differ, a few times over,
but no longer than a share of the step. Who is not ready by then is *late*: it stays a member, its routes stay in the
record, and what it learnt stays in its weights. The record names it, with the closes that it has missed in a row and
the tokens of what it did in them. So each microbatch is committed once, by the step that fed it, and moves each part's
anchor once at most: at that close, or where its replica was late at the next one in which that replica is. It moves it
never where the replica is lost before that, or gets its state from others, or a step is given up: an event says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from swarm.consensus.ledger import weights
from swarm.consensus.records import CloseRecord, Contribution, Late
from swarm.consensus.roster import Roster
from swarm.errors import Refused, Violation
from swarm.ids import PartName, PeerId

MULTIPLE = 4.0
"""So many times as long as arrivals usually differ is waited for the rest."""
LEAST = 0.25
"""At least this share of the longest that is waited."""
NEW_SHARE = 4
"""A close moves what is believed of arrivals by a quarter of the difference."""
MAX_SPREAD_MS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRules:
    """What the manifest says: ``quorum`` is the share of a stage's replicas that a close needs, ``grace`` the share of
    the step's time that it waits for the rest at most, and a replica that has missed ``may_miss`` closes in a row is
    waited for. ``last`` is the run's last step, whose close is of all. ``weighed``: what a late replica has learnt is
    weighed by the tokens of all its steps; with fragments it is not, for each turn of one brings several steps and is
    weighed by the tokens of the last. ``encoded``: bytes on a link for each of a part's sum."""

    quorum: float = 1.0
    grace: float = 0.1
    may_miss: int = 3
    last: int = 0
    weighed: bool = True
    encoded: float = 1.0

    def needed(self, replicas: int) -> int:
        """Return how many of a stage's replicas that are there a close needs."""
        return max(1, math.ceil(self.quorum * replicas - 1e-9))

    def excusable(self, roster: Roster, before: CloseRecord) -> dict[PeerId, int]:
        """Return who may be late in the step after the record ``before``, and how many closes in a row each has missed.
        Trainers may not: they sign their rows."""
        if self.quorum >= 1.0 or before.step + 1 >= self.last:
            return {}
        return {peer: times for peer in roster.hosts if (times := missed(before, peer)) < self.may_miss}

    def check(self, roster: Roster, before: CloseRecord, live: Collection[str], late: Collection[str]) -> None:
        """Raises Violation for an attempt that leaves out as late whom no honest leader does."""
        if not late:
            return
        if set(late) & set(live) or not set(late) <= self.excusable(roster, before).keys():
            raise Violation("it calls a member late that closes the step, or may not be late")
        for part in roster.parts:
            there = [peer for peer in roster.replicas(part) if peer in live or peer in late]
            if sum(peer in live for peer in there) < self.needed(len(there)):
                raise Violation(f"a close of {part} with fewer of its replicas than the run's quorum")

    def check_staying(self, roster: Roster, record: CloseRecord) -> None:
        """Raises Refused where the record lets go whom it calls late: what that one learnt would be lost."""
        after = {member.peer: member.part for member in record.roster}
        if record.late and record.ended:
            raise Refused("the record ends the run, and calls members late")
        for peer in record.late:
            if after.get(peer, "") != roster[PeerId(peer)].part:
                raise Refused(f"the record calls {peer} late, and has it leave its part")

    def owed(
        self, roster: Roster, before: CloseRecord, committed: Sequence[Contribution], late: Collection[str]
    ) -> dict[str, tuple[int, int]]:
        """Return what a record says of those that were late: how many closes in a row they have missed, and the tokens
        of what they did in them."""
        return {
            str(peer): (missed(before, peer) + 1, self._tokens(roster, before, committed, PeerId(peer)))
            for peer in sorted(late)
        }

    def _tokens(self, roster: Roster, before: CloseRecord, committed: Sequence[Contribution], peer: PeerId) -> int:
        if not self.weighed:
            return 0
        part = PartName(roster[peer].part or "")
        did = weights(committed, roster.replicas(part), part)
        return owed_tokens(before).get(peer, 0) + did[peer]


ALL = LateRules()
"""Every close waits for all."""


def missed(before: CloseRecord, peer: str) -> int:
    """Return how many closes in a row a peer has missed by being late."""
    return before.late.get(peer, (0, 0))[0]


def owed_tokens(before: CloseRecord) -> dict[PeerId, int]:
    """Return the tokens of what the next contributions of those who were late bring of the steps that they missed."""
    return {PeerId(peer): tokens for peer, (_, tokens) in before.late.items()}


def weight(did: int, owed: Late | None) -> int:
    """Return what the contribution of a replica weighs that ``did`` so many tokens in the step, and before it what is
    ``owed``: the tokens of one step, on the average of all that it brings. It has come as much further as it made more
    steps; were they in its weight as well, each of its tokens would count several times."""
    missed, tokens = owed or (0, 0)
    return -(-(tokens + did) // (missed + 1)) if tokens else did


def lacking(before: CloseRecord, since: Mapping[PeerId, int]) -> tuple[PeerId, ...]:
    """Return those that the record before a step owes more than they hold, for they got a state from others meanwhile;
    ``since`` is by peer the first step whose work its weights hold."""
    owed = {PeerId(peer): before.step + 1 - times for peer, (times, tokens) in before.late.items() if tokens}
    return tuple(sorted(peer for peer, first in owed.items() if since.get(peer, 0) > first))


def forgone(before: CloseRecord, record: CloseRecord) -> dict[PeerId, tuple[int, str]]:
    """Return the tokens of what was owed by the record ``before``, and is in no weights any more after ``record``, by
    the peer that did it, with the reason."""
    return {
        peer: (tokens, "the step was given up" if record.void else "it was lost")
        for peer, tokens in owed_tokens(before).items()
        if tokens and (record.void or peer in record.absent)
    }


# --- how long a close waits ------------------------------------------------------------------------------------------


class LateVerdict(NamedTuple):
    """``late`` are those that the close leaves out, with the reason; None: wait on, ``until`` that moment at the
    longest. ``spread_s`` is how much later than the quorum the last one is that is in it; all of the grace, where one
    is left out that was not heard and is no straggler: it may have been too short."""

    late: Mapping[PeerId, str] | None
    until: float = math.inf
    spread_s: float = 0.0


def grace_s(rules: LateRules, before: CloseRecord, step_s: float) -> float:
    """Return how long a close waits for the rest once it has its quorum; ``step_s`` is how long the step has taken."""
    longest, usual_s = rules.grace * step_s, before.spread_ms / 1000
    return min(longest, max(LEAST * longest, MULTIPLE * usual_s)) if usual_s else longest


def judge(
    rules: LateRules,
    groups: Mapping[PartName, Sequence[PeerId]],
    excusable: Mapping[PeerId, int],
    ready: Mapping[PeerId, float],
    *,
    now: float,
    grace: float,
) -> LateVerdict:
    """Find who is late of the replicas that are there, ``groups`` by stage.

    Args:
        rules: The run's.
        groups: The replicas that close the step if they are ready.
        excusable: Those of them that may be late, with how many closes in a row they have missed.
        ready: When each was ready that has answered, on any clock; later than now where its link takes so much longer
            than others' for what it sends, and infinite for one that failed to answer.
        now: On the same clock.
        grace: Seconds that are waited for the rest.
    """
    everybody = [peer for group in groups.values() for peer in group]
    at = {peer: ready.get(peer, math.inf) for peer in everybody}
    unheard = [peer for peer in everybody if peer not in ready]
    firsts = [sorted(at[peer] for peer in group)[rules.needed(len(group)) - 1] for group in groups.values() if group]
    quorum_at = max([*firsts, *(at[peer] for peer in everybody if peer not in excusable)], default=now)
    if math.isinf(quorum_at):
        return LateVerdict(None if unheard else {})  # who fails to answer is judged by what comes next, as ever
    until = quorum_at + grace
    if unheard and now < until:
        return LateVerdict(None, until)
    late = {peer: _why(at[peer] - quorum_at, grace) for peer in everybody if at[peer] > until}
    spread_s = max(at[peer] for peer in everybody if peer not in late) - quorum_at if everybody else 0.0
    if any(peer in unheard and not excusable[peer] for peer in late):
        spread_s = grace
    return LateVerdict(late, until, spread_s)


def _why(behind_s: float, grace: float) -> str:
    if math.isinf(behind_s):
        return f"late: not ready {grace:.2g} s after a quorum was"
    return f"late: ready {behind_s:.2g} s after a quorum, over its link, and {grace:.2g} s are waited"


def handicaps(before: CloseRecord, group: Sequence[PeerId], part_bytes: float) -> dict[PeerId, float]:
    """Return by how many seconds longer than for the middle one of its part each replica's contribution takes over its
    link, as far as the record before the step says; ``part_bytes`` as they travel."""
    rates = {peer: before.links[peer][1] for peer in group if peer in before.links and before.links[peer][1]}
    if not rates:
        return {}
    seconds = {peer: part_bytes / rate for peer, rate in rates.items()}
    middle = median_low(seconds.values())
    return {peer: max(0.0, one - middle) for peer, one in seconds.items()}


def spread_ms(before: CloseRecord, seen_s: float) -> int:
    """Return how much arrivals usually differ, as a record says it after one in which they did by ``seen_s``."""
    seen = min(MAX_SPREAD_MS, max(1, round(seen_s * 1000)))
    old = before.spread_ms
    return max(1, old + (seen - old) // NEW_SHARE) if old else seen
