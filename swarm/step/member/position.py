"""The position of one member in the run: the open step, its roster, and whether this peer takes part.

:class:`~swarm.step.member.member_service.MemberService` alone writes it; all else of the peer reads it, and waits on
it.
"""

from __future__ import annotations

from swarm.consensus.ballot import Ballot
from swarm.consensus.history import History
from swarm.consensus.incarnation import Incarnation
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Roster, owner
from swarm.ids import PeerId
from swarm.step.member.branch import Forking
from swarm.step.member.open_step import OpenStep
from swarm.step.rules import StepRules
from swarm.waiting import News


class Position:
    """One member's position, which begins where its history ends.

    Attributes:
        history: The chain of records that are decided here.
        life: Which life of this peer this process is.
        rules: What the manifest says about every step.
        founder: The peer that may propose the genesis.
        forking: What is kept of a provisional lineage.
        open: What this member has done for the open step.
        open_step: The step being worked on; 0 until the genesis is decided.
        roster: Who takes part in the open step; empty before the genesis.
        named: Whether the roster names this very life of the peer.
        departed: Whether the newest record is the one with which this peer left, as it had asked.
        cut_off: Why this peer cannot go on from what it holds, and must get the newest state from others; "" while it
            can. Observing a decision of others ends it.
        back: The decision with which the run goes back to a checkpoint: this position ends with it, and another begins.
        loading: Whether this peer gets the state that the run went back to, and is a member all the same.
        news: Told of every change; its failure is that of a decided step that could not be finished.
    """

    def __init__(
        self, history: History, life: Incarnation, rules: StepRules, founder: PeerId, forking: Forking
    ) -> None:
        self.history, self.life, self.rules, self.founder, self.forking = history, life, rules, founder, forking
        self.open_step = history.next_step
        begun = self.open_step > 0
        self.open = OpenStep(life.ballot(history.head) if begun else Ballot())
        self.roster = history.head.members if begun else Roster(())
        self.named = begun and life.is_named(history.head)
        self.departed, self.cut_off = False, ""
        self.back: Decision | None = None
        self.loading = False
        self.news = News()

    @property
    def term(self) -> int:
        """Return the highest term of the open step that this member knows."""
        return self.open.ballot.term

    @property
    def leader(self) -> PeerId:
        """Return the leader of that term."""
        return owner(self.roster, self.open_step, self.term) if len(self.roster) else self.founder

    @property
    def head(self) -> CloseRecord | None:
        """Return the newest record that is decided here; None before the genesis."""
        return self.history.head if self.history.next_step else None

    @property
    def is_member(self) -> bool:
        """Return whether this peer takes part in the open step, in this very life of it."""
        return self.named and not self.cut_off

    @property
    def over(self) -> bool:
        """Return whether the run's last step is closed, or one with which it was ended."""
        head = self.head
        return head is not None and self.rules.over(head)

    def go_back(self, decision: Decision) -> None:
        """The run goes back with this decision: one that asks is told that we are busy until the position that follows
        takes over."""
        self.back, self.cut_off = decision, f"the run goes back to step {decision.record.step}"

    def names(self, record: CloseRecord) -> bool:
        """Return whether the record lets this very life of the peer take part in the step after it."""
        return self.life.is_named(record)

    async def wait_open(self, step: int) -> None:
        """Return when ``step`` is open here, or over, or this peer is cut off. Raises RunEnded when a decided step
        could not be finished."""
        await self.news.wait(lambda: self.open_step >= step or bool(self.cut_off))

    async def wait_member(self) -> None:
        """Return when a step is open in which this peer takes part. Raises as :meth:`wait_open`."""
        await self.news.wait(lambda: self.open_step > 0 and self.is_member)

    async def wait_begun(self) -> None:
        """As :meth:`wait_member`; returns also when this peer did take part and was cut off."""
        await self.news.wait(
            lambda: self.back is not None or (self.open_step > 0 and (self.is_member or bool(self.cut_off)))
        )

    async def wait_term(self, step: int, term: int) -> None:
        """Return when a term above ``term`` of ``step`` is known here, or the step is closed, or this peer cut off."""
        await self.news.wait(lambda: self.open_step != step or self.term > term or bool(self.cut_off))
