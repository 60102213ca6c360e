"""What a member keeps of a provisional lineage that it is of: see :mod:`swarm.consensus.branches`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarm.consensus.acceptor import Vote
from swarm.consensus.branches import Fork, check_alone, check_lineage
from swarm.consensus.history import History
from swarm.consensus.incarnation import Incarnation
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Roster, owner
from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.step.member.open_step import OpenStep
from swarm.step.messages import Decide, Promise, Propose


class Forking:
    """``fork`` is where our lineage began, and our vote there; None where what we know counts. ``given_up`` is that of
    one that does not, while we are cut off for it; ``elsewhere`` the record with which others went on without us, as
    far as that is known."""

    def __init__(
        self,
        me: PeerId,
        history: History,
        life: Incarnation,
        verify: Callable[[PeerId, bytes, bytes], bool],
        gone: Callable[[], Mapping[PeerId, str]],
    ) -> None:
        self._me, self._history, self._life, self._verify, self._gone = me, history, life, verify, gone
        self.fork: Fork | None = None
        self.given_up: Fork | None = None
        self.elsewhere: CloseRecord | None = None

    # --- what others ask of the step after the fork point --------------------------------------------------------

    def promise(self, caller: PeerId, step: int, term: int) -> Promise | None:
        """Follow a term of that step, and offer our candidate; None when it is another step. Raises Refused and
        Superseded as any step."""
        fork = self._at(caller, step, term)
        if fork is None:
            return None
        return Promise(vote=fork.acceptor.vote, free=fork.acceptor.free, candidate=fork.offer())

    def accept(self, caller: PeerId, body: Propose) -> bool:
        """Vote in that step; whether it was asked about. Raises as :meth:`promise`, and for what no honest leader
        proposes."""
        fork = self._at(caller, body.record.decides, body.term)
        if fork is not None:
            fork.accept(Vote(term=body.term, record=body.record, changes=body.changes))
        return fork is not None

    def _at(self, caller: PeerId, step: int, term: int) -> Fork | None:
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
        """Whom to watch: the roster, and those whom our lineage was cut off from, who may be back."""
        return roster.peers if self.fork is None else tuple(sorted({*roster.peers, *self.fork.others}))

    # --- what our lineage does -----------------------------------------------------------------------------------

    def check(self, body: Propose, roster: Roster) -> None:
        """That a record may follow our newest, as far as lineages go. Raises Refused."""
        history, record, me = self._history, body.record, self._me
        check_lineage(record, history.head, self.fork)
        if record.forks and record.term == body.term and me not in record.absent:
            check_alone(record, roster, history.head_hash, self._gone())

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
