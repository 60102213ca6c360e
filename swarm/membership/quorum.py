"""Tell people whether those that are there could decide the open step, and which parts nobody holds.

A member that is cut off with a few others says so (:class:`Quorum`); where no peer that is there holds a part, each
member says who must come (:class:`MissingReplicas`).
"""

from __future__ import annotations

from collections.abc import Callable

from swarm.consensus.acceptor import has_majority
from swarm.consensus.branches import Fork
from swarm.consensus.majority import majority
from swarm.consensus.records import CloseRecord, voters
from swarm.events import LineageBegan, QuorumBack, QuorumLost
from swarm.health.watch import HealthWatch
from swarm.ids import PeerId
from swarm.membership.run import RunContext
from swarm.step.blocked import awaited_holders, awaited_majority, awaited_near, awaited_word
from swarm.step.leader.provisional import may_go_on_alone
from swarm.step.member.position import Position
from swarm.waiting import first_done


async def _judging(look: Callable[[], None], watch: HealthWatch, at: Position) -> None:
    """Look whenever somebody is gone or back, and whenever this member stands elsewhere: in another step, under another
    leader, cut off or not any more. Until cancelled; raises what a decided step failed with."""

    def stands() -> tuple[int, PeerId, str]:
        return at.open_step, at.leader, at.cut_off

    async def once() -> None:
        seen, changed = stands(), watch.changed()
        look()
        await first_done(changed, at.news.wait(lambda: stands() != seen))

    while True:
        await once()


class Quorum:
    """One member's view, judged anew as :func:`_judging` has it.

    What it says is for people and logs: a step is decided by who answers, not by who is believed to be there. Without a
    majority for ``quorum_grace_s`` those that are there go on provisionally, 0: never (see
    ``swarm.step.leader.provisional``).
    """

    def __init__(self, run: RunContext) -> None:
        self._watch, self._at, self._situation = run.around.watch, run.position, run.situation
        self._clock, self._grace_s = run.around.clock, run.rules.quorum_grace_s
        self._since: float | None = None
        self._alone_at: float | None = None
        self._fork: Fork | None = None

    async def run(self) -> None:
        """Judge until cancelled."""
        await _judging(self.look, self._watch, self._at)

    def look(self) -> None:
        """Judge once, and say what has changed."""
        at, gone = self._at, self._watch.gone
        if at.cut_off and self._since is not None:
            self._back()  # a majority went on without us: it is there
        if at.head is None or not at.is_member or at.over:
            return
        fork = at.forking.fork
        electors = voters(at.roster, at.head.hash()) if fork is None else fork.voters
        there, needed = sum(peer not in gone for peer in electors), majority(len(electors))
        if fork is not None and fork is not self._fork:
            self._fork, self._situation.no_majority = fork, ""
            self._situation.events.emit(LineageBegan(step=fork.step, there=there, voters=len(electors)))
            self._situation.wait_for(f"provisional since step {fork.step}: {there} of {len(electors)} voters")
        elif there < needed and self._since is None:
            self._lost(at.head, there, len(electors))
        elif there >= needed and self._since is not None:
            self._back()
        elif self._since is not None and fork is None:
            self._situation.no_majority = awaited_majority(there, len(electors), needed, self._alone_at)

    def _lost(self, head: CloseRecord, there: int, voters: int) -> None:
        self._since = self._clock.monotonic()
        alone_at = self._alone_at = (
            self._clock.wall() + self._grace_s if may_go_on_alone(head, self._watch.gone, self._grace_s) else None
        )
        self._situation.events.emit(QuorumLost(step=self._at.open_step, there=there, voters=voters, alone_at=alone_at))
        self._situation.no_majority = awaited_majority(there, voters, majority(voters), alone_at)
        self._situation.wait_for(self._situation.no_majority)

    def _back(self) -> None:
        self._situation.no_majority = ""
        seconds, self._since = self._clock.monotonic() - (self._since or 0.0), None
        self._situation.events.emit(QuorumBack(step=self._at.open_step, seconds=seconds))
        if not self._at.cut_off:
            self._situation.wait_for("")


# --- parts that nobody who is there holds ----------------------------------------------------------------------------


class MissingReplicas:
    """One member's view, judged anew as :func:`_judging` has it.

    Only for people: the step's leader decides what is done about it (``swarm.step.leader.rescue``), and says so itself,
    for it has asked whether copies are there.
    """

    def __init__(self, run: RunContext) -> None:
        around = run.around
        self._watch, self._at, self._situation = around.watch, run.position, run.situation
        self._me, self._copies, self._how = around.endpoint.peer, around.manifest.run.copies, around.how_to_join
        self._asks, self._said = around.manifest.run.rewind == "ask", ""

    async def run(self) -> None:
        """Judge until cancelled."""
        await _judging(self.look, self._watch, self._at)

    def look(self) -> None:
        """Judge once, and say what has changed."""
        awaited = self._awaited()
        # What somebody else has this peer wait for meanwhile is not ours to take back.
        if awaited or (self._said and self._situation.waiting_for == self._said):
            self._situation.wait_for(awaited)
        self._said = awaited

    def _awaited(self) -> str:
        at, gone = self._at, self._watch.gone
        if at.head is None or not at.is_member or at.over:
            return ""
        if at.leader == self._me:
            return awaited_near(at.roster, self._me, gone, self._how)
        if not has_majority(voters(at.roster, at.head.hash()), gone):
            return ""  # who is cut off judges nobody
        word = awaited_word(at.roster, gone, self._copies) if self._asks else ""
        holders = awaited_holders(at.roster, gone, self._copies, how=self._how)
        return "; ".join(filter(None, (holders or awaited_near(at.roster, self._me, gone, self._how), word)))
