"""The requests to join and to leave with a step, as its leader keeps them, and the roster that they make.

``swarm.consensus.changes`` says what a roster may become; every member applies the same rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from swarm.consensus.admissions import Admissions
from swarm.consensus.changes import (
    ALL_ASKED,
    MAX_CHANGES,
    Admission,
    ChangeRules,
    Changes,
    Departure,
    OpenStepFacts,
    PersonsWord,
    Reassign,
    alike_in_state,
    each_grant_once,
)
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.errors import Busy, Refused, Violation, WrongStep
from swarm.ids import PeerId
from swarm.security.credentials import Order
from swarm.security.signing import Verify
from swarm.step.rules import StepRules


class ChangeRequests:
    """The requests of one open step. ``may_end``: the record before it is not provisional, so that a member that was
    cut off finds no run that has ended without it."""

    def __init__(
        self,
        rules: StepRules,
        verify: Verify,
        now: OpenStepFacts,
        *,
        may_end: bool = True,
    ) -> None:
        self.now, self._rules, self._may_end = now, rules, may_end
        self._changes = ChangeRules(rules.roster, verify)
        self._joins: dict[PeerId, Admission] = {}
        self._leaves: dict[PeerId, Departure] = {}
        self._unspared: dict[PeerId, Departure] = {}
        self._lost: frozenset[PeerId] = frozenset()
        self._settled = False

    # --- for who asks --------------------------------------------------------------------------------------------

    def check_time(self) -> None:
        """Raises WrongStep when it is too late to ask: the leader has settled who joins and leaves, or nobody does with
        the run's last step."""
        if self._settled or self.now.step >= self._rules.steps:
            raise WrongStep("it is too late for this step" if self._settled else "this is the run's last step")

    def join(self, caller: PeerId, request: Admission) -> None:
        """Take a request to join. Raises Refused, Violation, and Busy when too many join already."""
        self._changes.check_admission(dataclasses.replace(self.now, lost=self._lost), request)
        others = len(self._joins.keys() - {caller})
        if len(self.now.roster) + others >= self._rules.max_members:
            raise Refused(f"the run is full: a step's record has room for {self._rules.max_members} members")
        if others >= MAX_CHANGES:
            raise Busy(f"{MAX_CHANGES} peers join in this step already")
        self._joins[caller] = request

    def leave(self, caller: PeerId, request: Departure) -> None:
        """Take a request to leave. Raises Violation, and Refused for a peer that cannot be spared, whose request counts
        when all have asked."""
        self._changes.check_departure(self.now, request)
        others = [peer for peer in self._leaves if peer != caller]
        if (reason := self._changes.spared(self.now.roster, others, caller)) is None:
            self._leaves[caller] = request
            return
        self._unspared[caller] = request
        if self._end() is None:
            raise Refused(self._why_not_yet(reason))

    def _why_not_yet(self, reason: str) -> str:
        """Return why one that cannot be spared, for that reason, must wait for more than the step."""
        roster = self.now.roster
        if not self._may_end:
            return f"{reason}, once a majority is there again"
        if len(roster) > MAX_CHANGES or self._leaves.keys() | self._unspared.keys() < set(roster.peers):
            return reason
        return f"{ALL_ASKED}: the run ends soon, with the step that is open then, unless somebody joins"

    # --- for who leads -------------------------------------------------------------------------------------------

    def begin_term(self) -> None:
        """Another term: nothing is settled."""
        self._settled = False

    def forget(self) -> None:
        """Another leads, or we do in another term: who asked asks again."""
        self._joins, self._leaves, self._unspared, self._lost = {}, {}, {}, frozenset()

    def asking(self) -> tuple[PeerId, ...]:
        """Return the peers that have asked to join with this step so far."""
        return tuple(self._joins)

    def leaving(self) -> tuple[PeerId, ...]:
        """Return the members that have asked to leave with this step so far."""
        return (*self._leaves, *self._unspared)

    def expected(self, absent: Collection[PeerId]) -> Changes:
        """Return the changes of this step as far as is known now, without moves; ``absent`` are members that are
        lost."""
        return self._changes.gather(self.now.roster, tuple(self._joins.values()), tuple(self._leaves.values()), absent)

    def too_few(self, absent: Collection[PeerId]) -> str:
        """See :meth:`ChangeRules.too_few`, as far as is known now."""
        return self._changes.too_few(self.now, self.expected(absent))

    def settle(
        self,
        missing: Collection[PeerId],
        absent: Collection[PeerId] = (),
        moves: Sequence[Reassign] = (),
        before: CloseRecord | None = None,
        late: Collection[str] = (),
    ) -> tuple[Changes, Roster]:
        """Return the changes of this step, and the next step's roster. Later requests must wait for the next step.

        Where nobody joins or was lost, and all have asked for the end, the run ends.

        Args:
            missing: Peers that have asked to join and do not answer.
            absent: Members that were lost.
            moves: What members said, and was checked, that would hold another part.
            before: The record before the step, by which those move of them that are to.
            late: Members that are late for the close: what they learnt is owed a later one, so they stay where they
                are, and ask again.

        Raises:
            Refused: The run cannot do without those that were lost.
        """
        self._settled, self._lost = True, frozenset()  # who was taken for lost before is back, or absent
        joins = tuple(join for peer, join in self._joins.items() if peer not in missing and self._may(self.now, join))
        changes = None if joins or absent or late else self._end()
        if changes is None:
            leaves = tuple(leave for peer, leave in self._leaves.items() if peer not in late)
            changes = self._changes.gather(self.now.roster, joins, leaves, absent)
            if moves and before is not None:
                planned = self._rules.moves.planned(before, changes)
                wanted = [m for m in moves if planned.get(PeerId(m.peer)) == m.part and m.peer not in late]
                changes = self._changes.move(self.now.roster, changes, wanted)
        return changes, self._changes.apply(self.now, changes)

    def admitted(
        self, changes: Changes, following: Roster, orders: Collection[Order] = (), *, provisional: bool = False
    ) -> tuple[Changes, Admissions | None]:
        """Return the changes with those of the orders that are due, and what the record, whose roster is ``following``,
        and which is ``provisional`` or not, says of admission then."""
        now = dataclasses.replace(self.now, provisional=provisional)
        changes = self._changes.with_due(now, changes, following, orders)
        return changes, self._changes.admissions(now, changes, following)

    def _end(self) -> Changes | None:
        """See :meth:`ChangeRules.end`."""
        everybody = {**self._unspared, **self._leaves}  # who could not be spared before may be by now
        return self._changes.end(self.now.roster, tuple(everybody.values())) if self._may_end else None

    def _may(self, now: OpenStepFacts, join: Admission) -> bool:
        """Return whether it may still join: who is lost, and who can be called, has changed since it asked."""
        try:
            self._changes.check_admission(now, join)
        except (Refused, Violation):
            return False
        return True

    # --- for a step that is given up -----------------------------------------------------------------------------

    def joining(self, lost: Collection[PeerId]) -> tuple[Admission, ...]:
        """Return the requests to join with a step that is to be given up. From now on peers that are ``lost`` may ask,
        too: they were started anew."""
        self._lost = frozenset(lost)
        return tuple(self._joins.values())

    def all_want_the_end(self, lost: Collection[PeerId]) -> bool:
        """Return whether all members but those that are ``lost`` have asked that the run end: where nobody joins,
        nothing is waited for any more then, though no record can end the run while a part has no replica."""
        wanted = {peer for peer, asked in (*self._leaves.items(), *self._unspared.items()) if asked.ends}
        return wanted >= set(self.now.roster.peers) - set(lost)

    def check_reassign(self, peer: PeerId, part: str, move: Reassign) -> None:
        """Check the answer of a peer that was asked to hold a lost part. Raises Refused, and Violation where no
        honest peer would say this."""
        if (move.peer, move.part) != (peer, part):
            raise Violation(f"asked to hold {part} it answers for {move.peer} and {move.part}", peer=peer)
        self._changes.check_reassign(self.now, move)

    def checked(self, wanted: PersonsWord | None, record: str) -> PersonsWord | None:
        """Return a person's word that the run may go back to the record with this hash; None for one that members would
        refuse."""
        try:
            self._changes.check_wanted(self.now, wanted, record)
        except (Refused, Violation):
            return None
        return wanted

    def give_up(
        self, moves: Sequence[Reassign], joins: Sequence[Admission], absent: Collection[PeerId]
    ) -> tuple[Changes, Roster]:
        """As :meth:`settle`, for a step that is given up: without those of ``joins`` that may not join any more, use an
        invite that another of them uses, or say another state of a part. Raises Refused and Violation, with nothing
        settled, while the run cannot go on with the others."""
        now = dataclasses.replace(self.now, lost=frozenset(absent))
        asked = sorted(joins, key=lambda join: join.member.peer)
        granted = alike_in_state(each_grant_once([join for join in asked if self._may(now, join)]))
        changes = Changes(joins=tuple(granted), reassigns=tuple(moves), absent=tuple(sorted(absent)))
        roster = self._changes.give_up(now, changes)
        self._settled = True
        return changes, roster
