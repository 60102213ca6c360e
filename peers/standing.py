"""What a running peer says about itself, over its control socket and in ``swarm status --json``.

Plain data with stable names; scripts read it. ``schema`` grows when a field changes its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["starting", "waiting", "syncing", "ready", "draining", "ended"]
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One peer, now. ``waiting_for`` is empty unless it waits; ``reason`` says why it holds its part.

    ``copies`` are the other parts of which it keeps a copy. ``reachability`` is in words, and so is ``disk``: what this
    machine's disk does not take, empty when it takes all. ``loss`` and ``tokens_per_s`` are of the last closed step,
    None before the first, the latter also for a step that this peer did not see open; ``started`` is seconds since the
    epoch.
    """

    schema: int = SCHEMA
    name: str
    peer: str
    pid: int
    role: str
    phase: Phase
    waiting_for: str
    run: str
    run_name: str
    part: str | None
    reason: str
    copies: tuple[str, ...] = ()
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    members: int
    addresses: tuple[str, ...]
    reachability: str
    started: float
    disk: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStanding:
    """One peer of the run as another sees it. ``state`` is member, waiting or draining; ``link`` is how this peer
    reaches it: self, direct, relayed, or unknown when it never had to. ``copies`` are the parts of which it has to keep
    a copy."""

    name: str
    peer: str
    role: str
    part: str | None
    copies: tuple[str, ...] = ()
    state: str
    link: str
    addresses: tuple[str, ...]
