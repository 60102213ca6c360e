"""What a member needs from its surroundings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from swarm.ids import PeerId
from swarm.optimization.history import History
from swarm.optimization.life import Life
from swarm.optimization.open_step import Attempt
from swarm.optimization.records import CloseRecord, Decision
from swarm.optimization.rules import StepRules


@dataclass(slots=True, kw_only=True)
class MemberContext:
    """What :class:`swarm.optimization.member.Member` works with.

    ``install`` downloads this peer's part for a founding record, from the peer that proposes it; ``decided`` is awaited
    after the swap and before anyone who waits for the next step goes on. ``founder`` may propose the genesis.
    ``attempt`` is how it gets its mean gradient; ``gone`` are those whom the health watch believes to be lost.
    """

    me: PeerId
    life: Life
    rules: StepRules
    attempt: Attempt
    history: History
    sign: Callable[[bytes], bytes]
    verify: Callable[[PeerId, bytes, bytes], bool]
    install: Callable[[CloseRecord, PeerId], Awaitable[None]]
    decided: Callable[[Decision], Awaitable[None]]
    founder: PeerId
    gone: Callable[[], Mapping[PeerId, str]] = dict
