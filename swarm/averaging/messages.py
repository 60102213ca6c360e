"""What members of a round say to each other."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints

from swarm.averaging.plan import RoundKey, RoundPlan
from swarm.ids import PartName
from swarm.schema import Count, DigestField, Message, PartField

ENTER = "averaging/1/enter"
CHUNK = "averaging/1/chunk"
AGREE = "averaging/1/agree"
ABORT = "averaging/1/abort"


class RoundMessage(Message):
    """Names the round; ``plan`` is the digest of the sender's plan, so that nobody averages under two plans.

    By itself it asks: "Are you in?" The answer is Empty as soon as the round is expected there, Busy before.
    """

    step: Count
    part: PartField
    attempt: Count
    round: Count
    plan: DigestField

    @property
    def key(self) -> RoundKey:
        """The round."""
        return RoundKey(self.step, PartName(self.part), self.attempt, self.round)

    @classmethod
    def of(cls, plan: RoundPlan, **fields: object) -> Self:
        """A message about the round of ``plan``."""
        return cls.model_validate({**plan.key._asdict(), "plan": plan.digest, **fields})


class ChunkRequest(RoundMessage):
    """ "Here is my sum of this chunk, give me its mean." The payload is the sum (empty when ``weight`` is 0), the
    answer's payload what the plan gives. ``weight`` is a claim, checked against the plan and never used."""

    index: Count
    weight: Count


class Agreement(RoundMessage):
    """ "I hold the whole result, and this is its digest.\""""

    result: DigestField


class Abort(RoundMessage):
    """ "This round is void at my side.\""""

    reason: Annotated[str, StringConstraints(max_length=500)] = Field(default="no reason given")
