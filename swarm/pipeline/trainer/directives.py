"""What a journey's state machine can ask for: the actions, each of which comes with its reason. Pure.

A :class:`JourneyPhase` is one too: the journey goes on with what is done in it.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

from swarm.ids import PeerId
from swarm.pipeline.messages import Direction


class JourneyPhase(Enum):
    """How far a microbatch has come."""

    CHOOSING = "choosing"  # its replicas, one a stage
    EMBEDDING = "embedding"  # what the first stage gets is being made
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    ADDING = "adding"  # every stage has added it; the trainer's own ends do so now
    COMPLETE = "complete"
    VOID = "void"  # it cannot be computed, whoever tries
    LOST = "lost"  # nobody wants it any more


class Warn(NamedTuple):
    """Have all journeys look again: a replica has fallen silent."""


class SendHop(NamedTuple):
    """Call ``peer`` so that hop ``at`` is done: ``forward`` and ``backward`` give it the tensor, ``resend`` has the
    replica before it send its output again, ``adopt`` has it taken over on the way back, and the gradient passed on
    once more if ``pass_on``."""

    at: int
    verb: Literal["forward", "resend", "backward", "adopt"]
    peer: PeerId
    within_s: float
    route: tuple[PeerId, ...]
    attempt: int
    pass_on: bool = True


class PauseHop(NamedTuple):
    """Wait before hop ``at`` is tried again."""

    at: int
    seconds: float


class WithdrawHop(NamedTuple):
    """Give up the call, or the pause, at hop ``at``."""

    at: int


class SupplyTargets(NamedTuple):
    """Hosted ends: bring the targets to the last stage."""

    peer: PeerId


class MoveHop(NamedTuple):
    """Another replica has the hop from now on, or the same one again."""

    stage: int
    old: PeerId
    new: PeerId
    direction: Direction
    late: bool


class SuspectReplica(NamedTuple):
    """Have the health watch look at a peer."""

    peer: PeerId


class DropHop(NamedTuple):
    """Tell a replica that another does its work; whether that arrives matters little."""

    at: int
    peer: PeerId


JourneyAction = (
    JourneyPhase | Warn | SendHop | PauseHop | WithdrawHop | SupplyTargets | MoveHop | SuspectReplica | DropHop
)


class Directive(NamedTuple):
    """An action, and why."""

    action: JourneyAction
    reason: str
