"""What a peer that joins asks of the members whose help it has, and what they answer: the bodies of ``observe/1``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from swarm.consensus.records import CloseRecord, Decision
from swarm.network.protocols import Rpc
from swarm.schema import Count, DigestField, Empty, Message, OrganisationName, PartField, PeerIdField, SignatureField

MAX_LACKING = 64


class StandingRequest(Message):
    """Where does the run stand?"""


class RunStanding(Message):
    """Who founds the run, the newest closed step (None before the genesis), what the start waits for, which parts
    nobody holds any more, as far as is known there (see :func:`swarm.consensus.roster.lost_parts`), whether the one
    that answers has been asked to leave, and whether it was in the run before and is on its way back: such a one may
    know less than who asks. ``lacking`` are the stages that organisations lack, where microbatches stay in one."""

    founder: PeerIdField
    closed: Count | None
    waiting_for: Annotated[str, StringConstraints(max_length=400)]
    lost: Annotated[tuple[Annotated[str, StringConstraints(max_length=16)], ...], Field(max_length=1025)] = ()
    leaving: bool = False
    returning: bool = False
    lacking: Annotated[
        tuple[tuple[OrganisationName, PartField], ...],
        Field(max_length=MAX_LACKING, exclude_if=lambda lacking: not lacking),
    ] = ()


class HashRequest(Message):
    """Which record did you see decided for this step?"""

    step: Count


class RecordHash(Message):
    """Hash of the record."""

    digest: DigestField


class StartRequest(Message):
    """Let me observe ``part``, from the state after ``step`` on (None: the newest); without a part: what is the newest
    decision? ``spare``: but not while another downloads from you."""

    part: PartField | None
    step: Count | None = None
    spare: bool = False


class NextRequest(Message):
    """The decision of ``step``, when there is one, and the update of ``part``."""

    part: PartField | None
    step: Count


class BackRequest(Message):
    """Did the run go back to a checkpoint more often than ``returns``, first after the record with this hash? The
    answer is the decision with which it did, that one or the newest."""

    previous: DigestField
    returns: Count


class AheadRequest(Message):
    """The update of ``part`` with which ``step`` closes if nothing goes wrong any more; those before it I have. The
    answer has none when the step was given up."""

    part: PartField
    step: Count


class StayRequest(Message):
    """Keep the updates of ``part`` for me from now on, too: another peer helps me, and may die. Those to step ``had`` I
    have."""

    part: PartField
    had: Count


class Staying(Message):
    """They are kept, those after step ``closed``."""

    closed: Count


class LeaveRequest(Message):
    """Keep nothing of ``part`` for me any more."""

    part: PartField


class Decided(Message):
    """A decision as it travels; the payload beside it is the update: float32, little-endian."""

    record: CloseRecord
    acceptances: Annotated[dict[PeerIdField, SignatureField], Field(max_length=20_000)]
    term: Count = 0

    @classmethod
    def of(cls, decision: Decision) -> Decided:
        """Without the update."""
        return cls(record=decision.record, acceptances=dict(decision.acceptances), term=decision.term)

    def decision(self) -> Decision:
        """Without the update."""
        return Decision(self.record, self.acceptances, term=self.term)


STANDING = Rpc("observe/1/standing", StandingRequest, RunStanding)
HASH = Rpc("observe/1/hash", HashRequest, RecordHash)
START = Rpc("observe/1/start", StartRequest, Decided)
NEXT = Rpc("observe/1/next", NextRequest, Decided)
BACK = Rpc("observe/1/back", BackRequest, Decided)
AHEAD = Rpc("observe/1/ahead", AheadRequest, Empty)
STAY = Rpc("observe/1/stay", StayRequest, Staying)
LEAVE = Rpc("observe/1/leave", LeaveRequest, Empty)
