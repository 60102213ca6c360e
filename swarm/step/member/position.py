"""The position of one member in the run: the open step, its roster, and whether this peer takes part.

:class:`~swarm.step.member.member_service.MemberService` alone writes it; all else of the peer reads it, and waits on
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from swarm.consensus.acceptor import Vote, has_majority
from swarm.consensus.ballot import Ballot, Incarnation
from swarm.consensus.branches import Fork, check_lineage
from swarm.consensus.history import History
from swarm.consensus.records import CloseRecord, Decision, voters
from swarm.consensus.roster import Roster, owner
from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.security.signing import Verify
from swarm.step.member.open_step import OpenStep
from swarm.step.messages import Decide, Propose
from swarm.step.rules import StepRules
from swarm.waiting import News


class Forking:
    """What a member keeps of a provisional lineage that it is of: see :mod:`swarm.consensus.branches`.

    ``fork`` is where our lineage began, and our vote there; None where what we know counts. ``given_up`` is that of
    one that does not, while we are cut off for it; ``elsewhere`` the record with which others went on without us, as
    far as that is known.
    """

    def __init__(
        self,
        me: PeerId,
        history: History,
        life: Incarnation,
        verify: Verify,
        gone: Callable[[], Mapping[PeerId, str]],
    ) -> None:
        self._me, self._history, self._life, self._verify, self._gone = me, history, life, verify, gone
        self.fork: Fork | None = None
        self.given_up: Fork | None = None
        self.elsewhere: CloseRecord | None = None

    # --- what others ask of the step after the fork point --------------------------------------------------------

    def asked(self, caller: PeerId, step: int, term: int) -> Fork | None:
        """Follow a term of that step; None when it is another step. Raises Refused and Superseded as any step."""
        fork = self.fork
        if fork is None or step != fork.step:
            return None
        if caller != owner(fork.point.members, step, term):
            raise Refused(f"{owner(fork.point.members, step, term)} leads step {step} in term {term}")
        fork.acceptor.follow(term)
        return fork

    def decided(self, body: Decide) -> CloseRecord | None:
        """Take note of what a majority decided in that step; the record, if it is not our candidate. Raises Refused."""
        if self.fork is None or body.step != self.fork.step:
            return None
        return self.fork.decided(body.record, body.term, body.acceptances)

    # --- who else there is ---------------------------------------------------------------------------------------

    def helpers(self, head: CloseRecord | None) -> tuple[CloseRecord | None, tuple[PeerId, ...]]:
        """The newest record that we know to count when we are cut off, and who may help us to come back."""
        known, me = self.elsewhere or head, self._me
        with_us = (me,) if self.given_up is None or self.elsewhere is not None else (*self.given_up.ours, me)
        return known, () if known is None else tuple(peer for peer in known.members.peers if peer not in with_us)

    def watched(self, roster: Roster) -> tuple[PeerId, ...]:
        """Return whom to watch: the roster, and those whom our lineage was cut off from, who may be back."""
        return roster.peers if self.fork is None else tuple(sorted({*roster.peers, *self.fork.others}))

    # --- what our lineage does -----------------------------------------------------------------------------------

    def check(self, body: Propose, roster: Roster, candidate: Vote | None) -> None:
        """That a record may follow our newest, as far as lineages go; ``candidate`` is what we closed without a
        majority. Raises Refused."""
        record = body.record
        check_lineage(record, self._history.head, self.fork)
        if not record.forks or self._me in record.absent:
            return
        if record.term == body.term:
            self.check_alone(roster)
        elif candidate is None or candidate.record.hash() != record.hash():
            raise Refused("it was not closed without a majority by this member, as it says")

    def check_alone(self, roster: Roster) -> None:
        """That a member that can ask a majority does not fork. Raises Refused."""
        if has_majority(voters(roster, self._history.head_hash), self._gone()):
            raise Refused("a majority is there, as far as is known here: no step is closed without it")

    async def closed(self, decision: Decision, point: CloseRecord | None, state: OpenStep) -> None:
        """A step was closed here; ``point`` is the record before it. Raises OSError.

        What is voted from here on in a step that is provisionally closed lies on no disk. So what does lie there goes
        first: a later life must not take it for all that was voted."""
        record = decision.record
        if record.forks and point is not None and state.candidate is not None:
            acceptor = await state.ballot.retire(f"step {record.step} was closed without a majority")
            await self._life.forget()
            self.fork = Fork(
                point,
                acceptor,
                state.candidate,
                self._me,
                self._verify,
                term=decision.term,
                acceptances=decision.acceptances,
            )
        elif not record.provisional:
            self.fork = None
        if self.fork is not None:
            self.fork.closed += len(record.committed)

    def observed(self, record: CloseRecord) -> None:
        """We go on from what others decided; of our own lineage we keep what we were asked at its beginning."""
        self.elsewhere = self.given_up = None
        if self.fork is not None and record.lineage != self.fork.step:
            self.fork = None

    def rewind(self, elsewhere: CloseRecord | None) -> Fork:
        """It does not count: our history ends where it began. There is one. Raises OSError."""
        fork = self.fork
        assert fork is not None  # noqa: S101 - asked before
        self._history.rewind(fork.point)
        self.fork, self.given_up, self.elsewhere = None, fork, elsewhere
        return fork


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
        asked: The questions under way of a step that closes, by who asks, the step and the term.
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
        self.asked: Counter[tuple[PeerId, int, int]] = Counter()
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
    def answering(self) -> bool:
        """Return whether a question of that leader is under way: what others ask, or asked before, is none of it."""
        return self.asked[self.leader, self.open_step, self.term] > 0

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
