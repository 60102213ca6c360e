"""Tell a leader that is there and does not close its step, so that its successor leads in its place.

A leader that is gone is found by the health watch. One that answers pings and stands still would hold the run up for
ever: only what it does can tell. The next in the step's succession judges it: as a witness it hears of every completed
microbatch, as a member of every question with which a step is closed, and trainers that get no quota tell it so. Where
one of them has work under way it is for the leader to judge that trainer. When the next one stands still as well, the
one after it judges both, after twice the time, and so on. Pure but for reading the clock.

It judges nobody while a majority or a part of the model is missing, for then no leader could close the step, nor on a
provisional lineage.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from swarm.clock import Clock
from swarm.consensus.acceptor import has_majority
from swarm.consensus.records import voters
from swarm.consensus.roster import lost_parts
from swarm.ids import PeerId
from swarm.step.calls import Liveness
from swarm.step.leader.lead_service import LeadService
from swarm.step.member.position import Position
from swarm.waiting import LATER_S, StallDetector

FLOOR_S = 30.0
"""A leader may take so long for anything that it does; longer where its questions may take longer."""
MARGIN_S = 10.0
ANSWERED_S = 2 * LATER_S
"""So long a leader may stand still that all have answered: as long as it waits for one that is behind the others; for
longer where no step before was as short."""
ALONE_STEPS, RECALLED_STEPS = 3, 64
"""In so many steps of so many a leader is excused by peers of one machine, who alone are at work for it. One that holds
up as many is waited for by no leader any more (:mod:`swarm.consensus.slowness`)."""
MAX_DOUBLINGS = 4
"""Each leader of a step gets twice the time of the one before: a machine that is slow for all is no fault."""
RECENT_STEPS, MAX_STEP_S = 4, 600.0
"""A leader may stand still for as long as the shortest of so many steps before took, of those that one leader closed:
no microbatch and no round takes longer, and who stalls one step makes nobody more patient in the next."""


ATTEMPTS = 3
"""One term may close for so many times what a leader may take for one thing, and once more for each member that was
missed: a leader that always finds something else to ask is succeeded, too."""


class LeaderProgress(NamedTuple):
    """What a leader has done in a term, as far as another peer sees it."""

    step: int
    term: int
    questions: int
    completed: int


class LeaderWatch:
    """One member's judgement of the leader that it may succeed.

    Args:
        me: This peer.
        position: Where it stands.
        lead: What it bore witness of.
        health: Who is gone.
        clock: Its steady time is read at each look.
        question_s: How long a leader's question may take now.
    """

    def __init__(
        self,
        me: PeerId,
        position: Position,
        lead: LeadService,
        health: Liveness,
        clock: Clock,
        question_s: Callable[[], float],
    ) -> None:
        self._me, self._at, self._lead, self._health = me, position, lead, health
        self._clock, self._question_s = clock, question_s
        self._stall: StallDetector[LeaderProgress | None] = StallDetector(clock.monotonic(), None)
        self._began: tuple[int, float] | None = None
        self._leaders: set[PeerId] = set()
        self._took: deque[float] = deque(maxlen=RECENT_STEPS)
        self._excused: dict[PeerId, deque[int]] = {}

    def overdue(self, answered: bool = False) -> dict[PeerId, str]:
        """Return who counts as gone though it answers, and why: the open step's leader and those between it and us;
        nobody while it is not late. Look again and again: a leader is late by what was seen of it before. ``answered``
        are all its questions, as those say of whom :meth:`to_ask` tells."""
        at, now = self._at, self._clock.monotonic()
        conduct, witnessed = at.open.conduct, self._lead.book.witnessed(self._health.gone)
        progress = LeaderProgress(at.open_step, at.term, conduct.questions, witnessed)
        still_s = self._stall.look(now, progress)
        self._measure(now)
        before = self._before()
        if not before:
            self._stall.excuse(now)
            return {}
        if conduct.vetoed_in == at.term:
            return dict.fromkeys(before, conduct.why) if len(before) == 1 else {}
        if lost_parts(at.roster, self._health.gone):
            self._stall.excuse(now)
            return {}
        if answered and still_s >= self._turns(before, self._answered_s()):
            return dict.fromkeys(before, f"it has had all answers, and asked nothing, for {still_s:.0f} s")
        allowed_s = max(FLOOR_S, self._question_s() + MARGIN_S, min(self._took, default=0.0))
        allowed_s = self._turns(before, allowed_s)
        closing_s = now - conduct.closing_at if conduct.asked_in == at.term else 0.0
        if closing_s >= allowed_s * (ATTEMPTS + len(conduct.missed)):
            return dict.fromkeys(before, f"it has been closing the step for {closing_s:.0f} s")
        if still_s < allowed_s:
            return {}
        return dict.fromkeys(before, why) if (why := self._late(still_s)) else {}

    def to_ask(self) -> list[PeerId]:
        """Return who may be at work on the last question of a leader that has asked nothing since for a while; nobody
        where none is due."""
        at, now = self._at, self._clock.monotonic()
        before = self._before()
        if not before or at.open.conduct.asked_in != at.term:
            return []
        if self._stall.still(now) < self._turns(before, self._answered_s()):
            return []
        return [peer for peer in at.roster.peers if peer not in {self._me, at.leader, *self._health.gone}]

    def has_answers(self, working: Collection[PeerId]) -> bool:
        """Return whether the leader has all its answers, where these of :meth:`to_ask` are at work for it, as they say,
        or do not say: peers of one machine are believed alone in ALONE_STEPS of RECALLED_STEPS. One that lies would
        excuse a leader in each step, and one that leads might have one other at work for ever."""
        at = self._at
        busy = {at.roster.machines[peer] for peer in [*working, *([self._me] if at.answering else [])]}
        if len(busy) != 1:
            return not busy
        excused = self._excused.setdefault(busy.pop(), deque(maxlen=ALONE_STEPS))
        if at.open_step not in excused:
            if len(excused) == ALONE_STEPS and at.open_step - excused[0] < RECALLED_STEPS:
                return True
            excused.append(at.open_step)
        return False

    def _answered_s(self) -> float:
        """Return how long a leader may stand still that all have answered. What an attempt lost it has computed again,
        in the midst of closing the step: it asks members nothing meanwhile."""
        return max(ANSWERED_S, min(self._took, default=math.inf))

    def _turns(self, before: Collection[PeerId], seconds: float) -> float:
        """Return how long those before us may stand still, of whom one may for so many seconds."""
        return seconds * len(before) * 2.0 ** min(len(self._leaders) - 1, MAX_DOUBLINGS)

    def _late(self, still_s: float) -> str:
        """Say why the leader should have done something by now; "" where it may have had nothing to do."""
        at, witness = self._at, self._lead.book.witness
        if at.open.conduct.asked_in == at.term:
            return f"it asked nothing for {still_s:.0f} s in the middle of closing the step"
        if self._lead.book.witnessed(self._health.gone) >= at.rules.target:
            return f"its batch was complete {still_s:.0f} s ago, and it does not close the step"
        if witness.starved and witness.starved >= set(at.roster.trainers) - self._health.gone.keys():
            return f"it gave trainers nothing to do for {still_s:.0f} s"
        return ""

    def _measure(self, now: float) -> None:
        """Note how long the step before took, unless it had several leaders: we look at least once at the beginning of
        each."""
        step = self._at.open_step
        if self._began is not None and self._began[0] == step - 1 and len(self._leaders) == 1:
            self._took.append(min(MAX_STEP_S, now - self._began[1]))
        if self._began is None or self._began[0] != step:
            self._began, self._leaders = (step, now), set()
        if step:
            self._leaders.add(self._at.leader)

    @property
    def judges(self) -> bool:
        """Return whether it is for us to judge by now or in a while: a majority is there, with which we could lead."""
        return bool(self._before())

    def _before(self) -> list[PeerId]:
        """Return the leader and who else is there between it and us in the succession; nobody where it is not for us
        to judge."""
        at, gone = self._at, self._health.gone
        if at.head is None or not at.is_member or at.over or at.leader == self._me or at.forking.fork is not None:
            return []
        if not has_majority(voters(at.roster, at.head.hash()), gone):
            return []
        order = at.roster.succession(at.open_step)
        first = order.index(at.leader)
        turns = [*order[first:], *order[:first]]
        return [peer for peer in turns[: turns.index(self._me)] if peer not in gone]
