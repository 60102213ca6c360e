"""Tell a leader that is there and does not close its step, so that its successor leads in its place.

A leader that is gone is found by the health watch. One that answers pings and stands still would hold the run up for
ever: only what it does can tell. The next in the step's succession knows enough to judge it: as a witness it hears of
every completed microbatch, as a member of every question with which a step is closed, and trainers that get no quota
tell it so. Where one of them has work under way it is for the leader to judge that trainer. Pure but for reading the
clock.

It judges nobody while a majority or a part of the model is missing: then no leader could close the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from swarm.clock import Clock
from swarm.consensus.acceptor import has_majority
from swarm.consensus.records import voters
from swarm.consensus.roster import due_term, lost_parts
from swarm.ids import PeerId
from swarm.step.calls import Liveness
from swarm.step.leader.service import LeadService
from swarm.step.member.position import Position
from swarm.waiting import StallDetector

FLOOR_S = 30.0
"""A leader may take so long for anything that it does; longer where its questions may take longer."""
MARGIN_S = 10.0
MAX_DOUBLINGS = 4
"""Each term of a step gives its leader twice the time of the one before: a machine that is slow for all is no fault."""
RECENT_STEPS = 4
"""A leader may stand still for as long as the shortest of so many steps before took from its beginning to its end: no
microbatch and no round takes longer, and who stalls one step makes us no more patient in the next."""


class LeaderProgress(NamedTuple):
    """What a leader has done in a term, as far as another peer sees it."""

    step: int
    term: int
    questions: int
    completed: int


class LeaderWatch:
    """One member's judgement of the leader whose successor it is.

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
        self._took: deque[float] = deque(maxlen=RECENT_STEPS)

    def overdue(self) -> str:
        """Return why the open step's leader counts as gone though it answers, "" while it does not. Look again and
        again: a leader is late by what was seen of it before."""
        at, now = self._at, self._clock.monotonic()
        conduct = at.open.conduct
        progress = LeaderProgress(at.open_step, at.term, conduct.questions, self._lead.witness.told)
        still_s = self._stall.look(now, progress)
        self._measure(at.open_step, now)
        if not self.judges:
            self._stall.excuse(now)
            return ""
        if conduct.vetoed_in == at.term:
            return conduct.why
        allowed_s = max(FLOOR_S, self._question_s() + MARGIN_S, min(self._took, default=0.0))
        if still_s < allowed_s * 2 ** min(at.term, MAX_DOUBLINGS):
            return ""
        if conduct.asked_in == at.term:
            return f"it asked nothing for {still_s:.0f} s in the middle of closing the step"
        if len(self._lead.witness.completed) >= at.rules.target:
            return f"its batch was complete {still_s:.0f} s ago, and it does not close the step"
        if self._lead.witness.starved >= set(at.roster.trainers) - self._health.gone.keys():
            return f"it gave trainers nothing to do for {still_s:.0f} s"
        return ""

    def _measure(self, step: int, now: float) -> None:
        """Note how long the step before took: we look at least once at the beginning of each."""
        if self._began is not None and self._began[0] == step - 1:
            self._took.append(now - self._began[1])
        if self._began is None or self._began[0] != step:
            self._began = (step, now)

    @property
    def judges(self) -> bool:
        """Return whether it is for us to judge: we lead if the leader does not, and somebody could close the step."""
        at, gone = self._at, self._health.gone
        if at.head is None or not at.is_member or at.over or at.leader == self._me or at.forking.fork is not None:
            return False
        without = {*gone, at.leader}
        if due_term(at.roster, at.open_step, self._me, at.term, without) is None:
            return False
        return has_majority(voters(at.roster, at.head.hash()), gone) and not lost_parts(at.roster, gone)
