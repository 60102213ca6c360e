"""What a member keeps of a provisional lineage that it is of: see :mod:`swarm.consensus.branches`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarm.consensus.acceptor import Vote, has_majority
from swarm.consensus.branches import Fork, check_lineage
from swarm.consensus.history import History
from swarm.consensus.incarnation import Incarnation
from swarm.consensus.records import CloseRecord, Decision, voters
from swarm.consensus.roster import Roster, owner
from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.step.member.open_step import OpenStep
from swarm.step.messages import Decide, Propose


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
