"""The messages between the members of a round."""

from __future__ import annotations

import operator
from typing import Annotated, Self

from pydantic import Field, StringConstraints

from swarm.averaging.allreduce.partition import BLOCKS
from swarm.averaging.allreduce.plan import MOST_CHECKED, RoundKey, RoundPlan
from swarm.ids import PartName
from swarm.network.protocols import Rpc
from swarm.schema import AfterField, Count, DigestField, Empty, Message, PartField, PeerIdField, SignatureField


class RoundMessage(Message):
    """Names the round; ``plan`` is the digest of the sender's plan, so that nobody averages under two plans.

    By itself it asks: "Are you in?", and is answered as soon as the round is expected there, Busy before, in a round
    that is checked with the receiver's commitment for payload; or "Stay with me", and is answered when the receiver has
    the whole result: until then its death is known at once.
    """

    step: Count
    part: PartField
    attempt: Count
    round: Count
    after: AfterField = ""
    plan: DigestField

    @property
    def key(self) -> RoundKey:
        """The round."""
        return RoundKey(self.step, PartName(self.part), self.attempt, self.round, self.after)

    @classmethod
    def of(cls, plan: RoundPlan, **fields: object) -> Self:
        """A message about the round of ``plan``."""
        return cls.model_validate({**plan.key._asdict(), "plan": plan.digest, **fields})


class ReduceRequest(RoundMessage):
    """ "Here is my sum of this chunk, with those of all below me: give me its result." The payload is the sum (empty
    when ``weight`` is 0), the answer's payload what the plan gives. ``weight`` is a claim, checked against the plan and
    never used. A ``level`` above 0 is a trade of sums instead: the answer is empty, and comes at once."""

    index: Count
    weight: Count
    level: Annotated[int, Field(ge=0, le=64)] = 0


class SumRequest(RoundMessage):
    """ "Give me your sum of this chunk, or of a ``block`` of it, as you gave it to its reducer." The answer's payload
    is it."""

    index: Count
    block: Annotated[int, Field(ge=0, lt=BLOCKS)] | None = None


class Checked(RoundMessage):
    """ "I have checked." Turn 0 is about what was drawn: ``wrong`` has a chunk whose mean is none of its sums, signed.
    Turn 1 tells on what others called wrong. Turn 2 asks whether the receiver has looked at that, and is answered once
    it has."""

    turn: Annotated[int, Field(ge=0, le=2)]
    wrong: Annotated[dict[PeerIdField, tuple[Count, SignatureField]], Field(max_length=MOST_CHECKED)] = {}


class Agreement(RoundMessage):
    """ "I hold the whole result, and this is its digest." In a round that is checked ``sums`` has the root and
    signature of each commitment that was given to the sender: by these it reduced, as it says before anybody checks
    that."""

    result: DigestField
    sums: Annotated[
        dict[PeerIdField, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{192}$")]],
        Field(max_length=MOST_CHECKED, exclude_if=operator.not_),
    ] = {}


class Abort(RoundMessage):
    """ "This round is void at my side; it broke on ``culprit``, if I know."

    Nobody believes it: a receiver blames the culprit as well only if it sees the same itself."""

    culprit: PeerIdField | None = None
    reason: Annotated[str, StringConstraints(max_length=500)] = Field(default="no reason given")


SUM = Rpc("averaging/1/sum", SumRequest, Empty)
CHECKED = Rpc("averaging/1/checked", Checked, Empty)
ENTER = Rpc("averaging/1/enter", RoundMessage, Empty)
STAY = Rpc("averaging/1/stay", RoundMessage, Empty)
CHUNK = Rpc("averaging/1/chunk", ReduceRequest, Empty)
AGREE = Rpc("averaging/1/agree", Agreement, Empty)
ABORT = Rpc("averaging/1/abort", Abort, Empty)
