"""A close record with what proves it: who accepted it, and the record that named who may. Pure.

It proves that a majority (:mod:`.majority`) of those whom the record before named have accepted this one. Whether that
chain is the run's own is another matter, which the peers of the run know.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from swarm.consensus.majority import majority
from swarm.consensus.records import MAX_VOTERS, CloseRecord, Decision, acceptance_bytes, check_acceptances
from swarm.consensus.roster import Roster
from swarm.errors import Refused, StateError
from swarm.ids import PeerId
from swarm.schema import Count, Message, PeerIdField
from swarm.security.signing import verify

Standing = Literal["decided", "unproven"]
_Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]


class Proof(Message):
    """A record, the signatures of those who accepted it in ``term``, and the record before it (None for a founding
    record, and where it is not known)."""

    record: CloseRecord
    term: Count = 0
    acceptances: Annotated[dict[PeerIdField, _Signature], Field(max_length=20_000)] = {}
    before: CloseRecord | None = None

    @staticmethod
    def of(decision: Decision, before: CloseRecord | None) -> Proof:
        """The proof of a decision; ``before`` is the newest record known before it, whichever that is."""
        record = decision.record
        follows = before is not None and not record.founding and before.hash() == record.previous
        return Proof(
            record=record,
            term=decision.term,
            acceptances={peer: signature.hex() for peer, signature in decision.acceptances.items()},
            before=before if follows else None,
        )

    def standing(self) -> Standing:
        """Return whether its signatures show that the record was decided, or there is too little here to tell. Raises
        StateError when they show that it was not."""
        record = self.record
        if self.before is not None and self.before.hash() != record.previous:
            raise StateError(f"the record of step {record.step} does not follow the one that lies with it")
        if self.before is not None and record.founding:
            raise StateError(f"the record of step {record.step} commits nothing: a run does not begin in its middle")
        electorate = self.before.members if self.before is not None else record.members if record.founding else None
        if electorate is None or not self.acceptances:
            return "unproven"
        signatures = {peer: bytes.fromhex(one) for peer, one in self.acceptances.items()}
        try:
            check_acceptances(record, electorate, signatures, verify, self.term)
        except Refused as refused:
            raise StateError(f"the record of step {record.step} was not decided: {refused.reason}") from refused
        return "decided"

    def accepted_among(self, known: Collection[PeerId]) -> bool:
        """Return whether so many of those known to take part accepted it as it takes to decide a step: what lies with a
        record may name any electorate. False also where too many of them have come since."""
        signed = acceptance_bytes(self.record, self.term)
        signers = [peer for peer in known if peer in self.acceptances]
        right = sum(verify(peer, signed, bytes.fromhex(self.acceptances[peer])) for peer in signers)
        return right >= majority(min(len(known), MAX_VOTERS))


def proven_among(proof: Proof, known: Roster) -> bool:
    """Return whether as many of those of a roster that vote have signed the record as decide one. Not where more vote
    than decide a step: then a few could have."""
    voting = known.entitled
    return len(voting) <= MAX_VOTERS and proof.accepted_among(voting)
