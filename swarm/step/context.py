"""What a member needs from its surroundings, and what the leader of a step does."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.clock import Clock
from swarm.consensus.history import History
from swarm.consensus.proof import Proof
from swarm.consensus.records import CloseRecord, Confirmation, Decision
from swarm.events import EventSink, NullSink
from swarm.ids import PartName, PeerId
from swarm.security.credentials import Order
from swarm.security.signing import Verify
from swarm.step.calls import Liveness, StepCalls
from swarm.step.leader.lead_service import LeadService
from swarm.step.member.open_step import Attempt, HeldPart, OpenStep
from swarm.step.member.position import Position
from swarm.step.rules import StepRules


class PartHolder(Protocol):
    """Who holds this peer's part, and follows what is decided; implemented by ``swarm.membership.following``."""

    @property
    def part(self) -> HeldPart | None:
        """The part that it trains; None for a peer that holds nothing (a bootstrap, hosted-ends trainers)."""

    async def install(self, record: CloseRecord, donor: PeerId) -> None:
        """Download the part that a founding record names, from the peer that proposes it. Raises its PeerError."""

    async def decided(self, decision: Decision) -> str:
        """Awaited after the swap and before anyone who waits for the next step goes on. Returns why this peer cannot go
        on from what it holds, where the record gives it another part, whose state is not here; else nothing."""


async def _never_late(state: OpenStep, record: CloseRecord) -> None:
    return None


async def _knows_none(step: int, record: str) -> bool:
    return False


async def _none_whole(peers: Sequence[PeerId]) -> Proof | str:
    return "nobody keeps checkpoints"


async def _none_there(peers: Collection[PeerId]) -> Collection[PeerId]:
    return ()


async def _nobody_knows(peers: Collection[PeerId], reason: str) -> None:
    return None


@dataclass(slots=True, kw_only=True)
class MemberContext:
    """What :class:`swarm.step.member.member_service.MemberService` works with.

    ``attempt`` is how it gets its mean gradient; ``gone`` are those whom the health watch believes to be lost,
    ``fell_silent`` whether one of them may only be cut off (:func:`~swarm.step.calls.fell_silent`), ``doubted`` those
    that did not answer when they were asked last. ``suspect`` and ``check`` have it find out at once about some, the
    latter to the end (:meth:`~swarm.step.calls.Liveness.check`); ``taking_part`` asks who answers as a member, for one
    that watches nobody. ``catch_up`` prepares the result of a decided record
    whose rounds were made without this peer (:mod:`swarm.membership.catching_up`). ``knows`` says whether a checkpoint
    on this disk has that record, ``leaving`` whether this peer was asked to leave; ``copied`` are the parts of which it
    keeps a copy just as it was after a step. ``events`` hear of records that no member can accept, and
    of what a step's experts had no room for.
    """

    me: PeerId
    position: Position
    holder: PartHolder
    attempt: Attempt
    sign: Callable[[bytes], bytes]
    verify: Verify
    clock: Clock
    gone: Callable[[], Mapping[PeerId, str]] = dict
    doubted: Callable[[], Collection[PeerId]] = tuple
    fell_silent: Callable[[PeerId], bool] = lambda peer: True
    suspect: Callable[[PeerId, str], None] = lambda peer, reason: None
    check: Callable[[Collection[PeerId], str], Awaitable[None]] = _nobody_knows
    taking_part: Callable[[Collection[PeerId]], Awaitable[Collection[PeerId]]] = _none_there
    catch_up: Callable[[OpenStep, CloseRecord], Awaitable[None]] = _never_late
    knows: Callable[[int, str], Awaitable[bool]] = _knows_none
    leaving: Callable[[], bool] = lambda: False
    copied: Callable[[int], Collection[PartName]] = lambda step: ()
    events: EventSink = NullSink()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseContext:
    """What closing a step needs besides the step itself. ``verify`` says whether a peer signed some bytes. ``waiting``
    is told what the leader waits for, "" for nothing. ``averaging_s`` is how long the averaging of all parts may take,
    of which these average plainly; other questions have ``timeout_s``. ``copies`` of every part are kept by peers that
    hold another. ``confirmed`` proves that our lineage counts, once it does; ``alone_at`` says when (seconds
    since the epoch) those that are there go on without a majority, None: never; ``refused`` whether we vetoed the
    record with this hash in the open step; ``orders`` are those about admission that no record has carried
    out; ``opened_at`` (monotonic seconds) is when that step opened here. ``checkpoint`` finds the newest one of which
    these peers have every part, with its proof, else what they lack."""

    rules: StepRules
    calls: StepCalls
    history: History
    events: EventSink
    lead: LeadService
    liveness: Liveness
    clock: Clock
    timeout_s: Callable[[], float]
    verify: Verify
    waiting: Callable[[str], None] = lambda _: None
    confirmed: Callable[[], Confirmation | None] = lambda: None
    alone_at: Callable[[], float | None] = lambda: None
    averaging_s: Callable[[Collection[str]], float] = lambda plainly: 0.0
    copies: int = 0
    refused: Callable[[str], bool] = lambda _: False
    orders: Callable[[], Collection[Order]] = lambda: ()
    opened_at: Callable[[], float] = lambda: -math.inf
    checkpoint: Callable[[Sequence[PeerId]], Awaitable[Proof | str]] = _none_whole
