"""What a leader believes of what members answer. Pure.

A lie that it passed on would be its own: others would refuse what it proposes, or a decision that lacks signatures.
"""

from __future__ import annotations

from swarm.errors import OutOfSync, Refused, Violation, WrongStep
from swarm.ids import PeerId
from swarm.optimization.acceptance import AcceptanceRules
from swarm.optimization.acceptor import Promised, check_promise
from swarm.optimization.contexts import Closing
from swarm.optimization.messages import Accepted, Promise, Propose
from swarm.optimization.records import acceptance_bytes, check_acceptances
from swarm.optimization.roster import Roster
from swarm.schema import Message


class AnswerRules:
    """Those of the leader of one term of a step."""

    def __init__(self, closing: Closing, step: int, term: int, roster: Roster) -> None:
        self._history, self._verify = closing.history, closing.verify
        self._step, self._term, self._roster = step, term, roster
        self._accepts = AcceptanceRules(closing.calls.me, closing.rules, closing.history, closing.verify)

    def check(self, peer: PeerId, asked: Message, answer: Message) -> None:
        """Raises Violation for an answer that cannot be honest, WrongStep when the step was closed meanwhile."""
        if isinstance(answer, Promise):
            self._check_promise(peer, answer)
        elif isinstance(answer, Accepted) and isinstance(asked, Propose):
            signed = acceptance_bytes(asked.record, asked.term)
            if not self._verify(peer, signed, answer.signature):
                raise Violation("its signature under the record is forged", peer=peer)

    def _check_promise(self, peer: PeerId, answer: Promise) -> None:
        """A record that a member says it accepted has to be proposed again: it must be one that others can accept."""
        if self._history.next_step != self._step:
            raise WrongStep(f"step {self._step} is closed, step {self._history.next_step} is open")
        candidate = answer.candidate
        offered = None if candidate is None else candidate.vote
        check_promise(Promised(answer.vote, answer.free, offered), self._term, self._history.check)
        try:
            for vote in filter(None, (answer.vote, offered)):
                self._accepts.check_possible(self._roster, vote)
            if candidate is not None:
                record = candidate.vote.record
                check_acceptances(record, self._roster, candidate.acceptances, self._verify, candidate.term)
        except (Refused, OutOfSync) as error:
            raise Violation(f"a vote on what no leader can have proposed: {error}", peer=peer) from error
