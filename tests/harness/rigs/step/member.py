"""A member of a step whose part, averaging and liveness a test can see through and break, and what a leader asks it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from swarm.averaging.allreduce.plan import RoundResult
from swarm.consensus.acceptor import NO_EVIDENCE
from swarm.consensus.ballot import Incarnation
from swarm.consensus.history import History
from swarm.consensus.records import CloseRecord, Contribution, Decision, rows_bytes
from swarm.consensus.roster import owner
from swarm.errors import BugError, PeerError
from swarm.ids import MicrobatchId, PartName, PeerId, StepWork
from swarm.optim.schedules import OptimizerConfig
from swarm.schema import Message
from swarm.step.calls import Liveness
from swarm.step.context import MemberContext
from swarm.step.member.member_service import MemberService
from swarm.step.member.open_step import Attempt, Round
from swarm.step.member.position import Forking, Position
from swarm.step.messages import Apply, Decide, Prepare, Propose, Reconcile
from swarm.step.rules import StepRules
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.common import RUN, InlineDevice, asked, sign, verify
from tests.harness.rigs.consensus import (
    COMMITTED,
    CURSOR,
    GENESIS,
    ROSTER,
    A,
    B,
    T,
    acceptances,
    evidence,
    microbatch,
    record,
    weights_digest,
)

RULES = StepRules(
    wait_for_lost_s=1000.0,
    run=RUN,
    steps=3,
    target=2,
    max_share=1.0,
    max_tokens=32,
    max_members=8,
    reproducible=False,
    optimizer=OptimizerConfig(lr=0.5, warmup_steps=0, min_lr_fraction=1.0),
    clip_norm=1.0,
)


HELD = {A: {microbatch(0)}, B: {microbatch(1)}, T: {microbatch(0), microbatch(1)}}


@dataclass
class CountedPart:
    """A part that counts what is done to it; ``swap`` without ``prepare`` is a bug, as in the real one."""

    name: str
    microbatches: frozenset[MicrobatchId]
    prepared: int = 0
    fed: bool | None = None
    shadow: str | None = None
    usual: tuple[float, float] = (0.0, 0.0)
    said: tuple[int, ...] = ()
    swapped: list[str] = field(default_factory=list)

    def accumulated(self, step: int) -> frozenset[StepWork]:
        """Return what is held, as of this step."""
        return frozenset(StepWork(step, microbatch) for microbatch in self.microbatches)

    def contribution(self, step: int, assigned: Set[StepWork], tokens: int) -> torch.Tensor | None:
        """Return something of the right kind, where these microbatches are held."""
        return torch.ones(4) if self.accumulated(step) == assigned else None

    def dropped(self, step: int) -> tuple[int, int]:
        return 0, 0

    def words(self, step: int, trainers: Sequence[str]) -> tuple[int, ...]:
        """Return what is said of these trainers."""
        return self.said

    def lengths(self, step: int) -> tuple[float, float]:
        """Return what is usual of what is held."""
        return self.usual

    def prepare(
        self, mean: torch.Tensor, *, lr: float, clip: float, step: int, fed: bool, left: torch.Tensor | None = None
    ) -> str:
        """Return a digest that depends on everything."""
        self.prepared, self.fed = self.prepared + 1, fed
        self.shadow = weights_digest(self.name, step, lr, clip)
        return self.shadow

    def swap(self) -> None:
        """Let the shadow count from now on."""
        if self.shadow is None:
            raise BugError("swap without prepare")
        self.swapped.append(self.shadow)
        self.shadow = None


class FakeAverage:
    """A round that can be held up and broken, and, as the real one, cannot be begun twice under one key."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, PartName, int]] = []
        self.weights: Mapping[PeerId, int] = {}
        self.cancelled = 0
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.squared_norm = 0.25
        self.waited: Mapping[PeerId, float] = {}

    async def __call__(self, wanted: Round, sums: torch.Tensor) -> RoundResult:
        """See :class:`~swarm.step.member.open_step.Average`."""
        key = (wanted.step, wanted.part, wanted.attempt)
        if key in self.begun:
            raise BugError(f"round {key} is known already")
        self.begun.append(key)
        self.weights = wanted.weights
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        digest = hashlib.sha256(f"{wanted.part}|{wanted.step}".encode()).hexdigest()
        return RoundResult(
            tensor=sums,
            squared_norm=self.squared_norm,
            digest=digest,
            contributors=tuple(wanted.weights),
            bytes_sent=0,
            seconds=0.0,
            waited=self.waited,
        )


class FakeLiveness:
    """Who is there, as the test says. ``found`` is who is found gone when the next check looks."""

    def __init__(self) -> None:
        self.gone: dict[PeerId, str] = {}
        self.unanswered: dict[PeerId, PeerError] = {}
        self.found: set[PeerId] = set()
        self.checked: list[tuple[PeerId, ...]] = []
        self._version = 0
        self._changed = asyncio.Event()

    def lose(self, peer: PeerId, reason: str = "silent", error: PeerError | None = None) -> None:
        """Let the peer be gone from now on, because of an error if there is one."""
        self.gone[peer] = reason
        if error is not None:
            self.unanswered[peer] = error
        self._tell()

    def find(self, peer: PeerId) -> None:
        """Let the peer be back."""
        self.gone.pop(peer, None)
        self.unanswered.pop(peer, None)
        self._tell()

    def _tell(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, peers: Collection[PeerId], reason: str) -> None:
        """See :class:`~swarm.step.calls.Liveness`."""
        self.checked.append(tuple(peers))
        for peer in self.found & set(peers):
            self.lose(peer, reason)

    def changed(self) -> Coroutine[None, None, None]:
        """See :class:`~swarm.step.calls.Liveness`."""
        return self._wait(self._version)

    async def _wait(self, version: int) -> None:
        while self._version == version:
            await self._changed.wait()


async def _nothing(*args: Any) -> None:
    return None


@dataclass
class MemberBench:
    """One member and everything around it. ``founded`` starts it at step 1, after ``genesis``."""

    me: PeerId = A
    founded: bool = True
    genesis: CloseRecord = GENESIS
    install: Callable[[CloseRecord, PeerId], Awaitable[None]] = _nothing
    decided: Callable[[Decision], Awaitable[None]] = _nothing
    life: Incarnation | None = None
    rules: StepRules = RULES
    liveness: Liveness | None = None
    """Who is there, where not ``gone`` says it."""

    def __post_init__(self) -> None:
        self.part = CountedPart(str(ROSTER[self.me].part), frozenset(HELD[self.me]))
        self.average, self.device, self.history = FakeAverage(), InlineDevice(), History()
        self.settled: list[Mapping[MicrobatchId, tuple[PeerId, ...]]] = []
        self.lacks: Exception | None = None
        self.slow_settling: asyncio.Event | None = None
        self.gone: dict[PeerId, str] = {}
        self.ended: set[PeerId] = set()
        if self.founded:
            self.history.append(self.genesis)
        self.holder = SimpleNamespace(
            part=self.part,
            install=lambda record, donor: self.install(record, donor),
            decided=self._decided,
        )
        life = self.life or Incarnation(self.me)
        forking = Forking(self.me, self.history, life, verify, lambda: self.gone)
        self.position = Position(self.history, life, self.rules, T, forking)
        context = MemberContext(
            me=self.me,
            position=self.position,
            holder=self.holder,  # type: ignore[arg-type]
            attempt=Attempt(
                me=self.me,
                device=self.device,  # type: ignore[arg-type]
                settle=self._settle,
                average=self.average,
                cursor=lambda step, committed: CURSOR if self.me == T else None,
                attest=self._attest,
            ),
            clock=LoopClock(),
            sign=lambda data: sign(self.me, data),
            verify=verify,
            gone=self._gone,
            fell_silent=lambda peer: peer not in self.ended,
            check=self._check,
        )
        self.member = MemberService(context)

    async def _decided(self, decision: Decision) -> str:
        """Nothing is lacking here."""
        await self.decided(decision)
        return ""

    async def _settle(self, step: int, assigned: Mapping[StepWork, tuple[PeerId, ...]]) -> None:
        """Replay everything, unless the bench ``lacks`` something; ``slow_settling`` says when."""
        self.settled.append({work.microbatch: route for work, route in assigned.items()})
        if self.slow_settling is not None:
            await self.slow_settling.wait()
        if self.lacks is not None:
            raise self.lacks
        self.part.microbatches = frozenset(work.microbatch for work in assigned)

    def _gone(self) -> Mapping[PeerId, str]:
        return self.gone if self.liveness is None else self.liveness.gone

    async def _check(self, peers: Collection[PeerId], reason: str) -> None:
        if self.liveness is not None:
            await self.liveness.check(peers, reason)

    def _attest(self, step: int, rows: Sequence[Contribution], absent: Collection[str]) -> bytes:
        return sign(self.me, rows_bytes(RUN, step, self.history.head_hash, rows, absent))

    async def ask(self, body: Message, *, caller: PeerId | None = None) -> Any:
        """Return what the member answers; by default the right leader asks, and all have signed what they did."""
        if isinstance(body, Propose) and body.evidence == NO_EVIDENCE:
            body = body.model_copy(update={"evidence": evidence(body.record)})
        step = body.record.step if isinstance(body, Propose) else body.step  # type: ignore[attr-defined]
        leader = T if step == 0 else owner(ROSTER, step, getattr(body, "term", 0))
        return await asked(self.member, body, caller or leader)

    def replenish(self) -> None:
        """Compute the next step's microbatches, which are the same again."""
        self.part.microbatches = frozenset(HELD[self.me])


def prepare(step: int = 1, term: int = 1) -> Prepare:
    """Return what the leader of a later term asks first."""
    return Prepare(step=step, term=term)


def reconcile(
    step: int = 1,
    committed: tuple[Contribution, ...] = COMMITTED,
    *,
    term: int = 0,
    live: Collection[PeerId] = ROSTER.peers,
    attempt: int = 1,
) -> Reconcile:
    """Return the first question; ``attempt`` counts within the term."""
    numbers = {str(part): term * 1024 + attempt for part in ROSTER.parts}
    return Reconcile(step=step, term=term, committed=committed, live=tuple(live), attempts=numbers)


def apply(step: int = 1, lr: float = 0.5, clip: float | None = None, *, term: int = 0, **sq_norms: float) -> Apply:
    """Return the second question; the parts' squared norms are those of :class:`FakeAverage` but for ``sq_norms``, and
    ``clip`` is what follows from them, 1.0 if they are all as there."""
    norms = dict.fromkeys(map(str, ROSTER.parts), 0.25) | {part.replace("_", "-"): n for part, n in sq_norms.items()}
    clip = RULES.clipped(norms).clip if clip is None else clip
    return Apply(step=step, term=term, lr=lr, clip=clip, sq_norms=norms)


def decide(
    accepted: CloseRecord, *, term: int = 0, signers: Collection[PeerId] = ROSTER.peers, **changes: bytes
) -> Decide:
    """Return the last word, with some signatures changed."""
    signatures = acceptances(accepted, term, signers) | changes
    return Decide(step=accepted.step, record=accepted.hash(), term=term, acceptances=signatures)


async def brought_to(stage: str, **settings: Any) -> MemberBench:
    """Return a member that has answered everything up to and including ``stage``."""
    bench = MemberBench(**settings)
    for name, body in (("reconcile", reconcile()), ("apply", apply()), ("propose", Propose(record=record()))):
        await bench.ask(body)
        if name == stage:
            break
    return bench
