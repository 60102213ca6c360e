"""What peers ask each other, and tell, to know who is there: the bodies of ``health/1``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from swarm.schema import Count, Message, PeerIdField


class Ping(Message):
    """Are you there?"""


class Beat(Message):
    """Are you there, and where do you stand? Asked by this life of the sender."""

    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


class Heard(Message):
    """Does anybody else ask in my name? This is the life that I know of."""

    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)]


class Twin(Message):
    """Another life has asked in the caller's name since it wanted to know."""

    there: bool


class Standing(Message):
    """The sender's open step, whether it takes part in it, and of which lineage that is; ``incarnation`` is another for
    every process."""

    step: Count
    member: bool
    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)]
    lineage: Count = 0


class Lost(Message):
    """The sender believes that a peer is gone, or says so of itself. Told by this life of it."""

    peer: PeerIdField
    reason: Annotated[str, StringConstraints(max_length=400)]
    incarnation: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
