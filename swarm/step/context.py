"""What a member needs from its surroundings, and what the leader of a step does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.consensus.history import History
from swarm.consensus.incarnation import Incarnation
from swarm.consensus.records import CloseRecord, Confirmation, Decision
from swarm.events import EventSink
from swarm.ids import PeerId
from swarm.step.calls import Liveness, StepCalls
from swarm.step.leader.service import LeadService
from swarm.step.member.open_step import Attempt
from swarm.step.rules import StepRules


@dataclass(slots=True, kw_only=True)
class MemberContext:
    """What :class:`swarm.step.member.service.MemberService` works with.

    ``install`` downloads this peer's part for a founding record, from the peer that proposes it; ``decided`` is awaited
    after the swap and before anyone who waits for the next step goes on. ``founder`` may propose the genesis.
    ``attempt`` is how it gets its mean gradient; ``gone`` are those whom the health watch believes to be lost.
    """

    me: PeerId
    life: Incarnation
    rules: StepRules
    attempt: Attempt
    history: History
    sign: Callable[[bytes], bytes]
    verify: Callable[[PeerId, bytes, bytes], bool]
    install: Callable[[CloseRecord, PeerId], Awaitable[None]]
    decided: Callable[[Decision], Awaitable[None]]
    founder: PeerId
    gone: Callable[[], Mapping[PeerId, str]] = dict


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseContext:
    """What closing a step needs besides the step itself. ``verify`` says whether a peer signed some bytes. ``waiting``
    is told what the leader waits for, "" for nothing. ``copies`` of every part are kept by peers that hold another;
    ``patience_s`` is how long somebody is waited for who could take over a part that nobody holds any more (None: for
    ever). ``confirmed`` proves that our lineage counts, once it does; ``alone_at`` says when (seconds since the epoch)
    those that are there go on without a majority, None: never."""

    rules: StepRules
    calls: StepCalls
    history: History
    events: EventSink
    desk: LeadService
    liveness: Liveness
    clock: Clock
    timeout_s: Callable[[], float]
    verify: Callable[[PeerId, bytes, bytes], bool]
    waiting: Callable[[str], None] = lambda _: None
    confirmed: Callable[[], Confirmation | None] = lambda: None
    alone_at: Callable[[], float | None] = lambda: None
    copies: int = 0
    patience_s: float | None = None
