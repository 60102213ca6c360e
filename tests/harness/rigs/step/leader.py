"""Members that answer a leader as they are told, on a network in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from swarm.consensus.acceptor import promise_bytes
from swarm.consensus.history import History
from swarm.consensus.records import CloseRecord, Contribution, acceptance_bytes, by_trainer, rows_bytes
from swarm.consensus.roster import Roster
from swarm.errors import WrongStep
from swarm.ids import MicrobatchId, PeerId
from swarm.network.protocols import AnyMethod, Rpc
from swarm.schema import Empty
from swarm.sim.network import SimEndpoint, SimNetwork
from swarm.step.calls import StepCalls
from swarm.step.context import CloseContext
from swarm.step.leader.close import StepClose
from swarm.step.leader.lead_service import LeadService
from swarm.step.messages import (
    AGAIN,
    APPLY,
    ASIDE,
    COMPLETE,
    DECIDE,
    FAULT,
    LEASE,
    OVER,
    PREPARE,
    PROPOSE,
    RECONCILE,
    RESUME,
    Accepted,
    Apply,
    Averaged,
    Complete,
    Lease,
    Leased,
    Prepared,
    Promise,
    Reconcile,
    SignedReceipt,
    TrainerResumed,
)
from swarm.step.observe_messages import NEXT, START
from swarm.step.results import Asked, ResultSigning
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.common import RUN, EventList, asked, sign, verify
from tests.harness.rigs.consensus import COMMITTED, CURSOR, GENESIS, ROSTER, A, B, T, listed
from tests.harness.rigs.step.member import RULES, FakeLiveness

QUESTIONS: tuple[Rpc[Any, Any], ...] = (RECONCILE, APPLY, PROPOSE, DECIDE)
LEADER, SUCCESSOR = ROSTER.succession(1)[:2]
OTHER = next(peer for peer in (A, B) if peer != LEADER)
U = PeerId("U")
HOSTED = Roster(
    [
        listed(A, name="n"),
        listed(B, name="n"),
        listed(T, "trainer", None, name="n"),
        listed(U, "trainer", None, name="n"),
    ]
)
PAIRED = Roster([*ROSTER.members[:2], *(listed(peer, "trainer", "ends", name="t") for peer in (T, U))])
"""Two replicas of each part."""
THREE = Roster([*ROSTER.members, listed("C")])
"""A part with a replica more: two of them can be right."""


class Puppet:
    """A member that answers as it is told; ``asked`` are the methods in order, with their bodies."""

    def __init__(self, peer: PeerId, roster: Roster, *, leads: bool = True) -> None:
        self.peer, self.leads = peer, leads
        self.bodies: list[tuple[Rpc[Any, Any], Any]] = []
        self.instead: dict[Rpc[Any, Any], Callable[[Any], Any]] = {}
        self.part = str(roster[peer].part) if roster[peer].part else ""
        self.gradient = {"stage-0": "a" * 64, "ends": "b" * 64}.get(self.part, "")
        self.weights = {"stage-0": "c" * 64, "ends": "d" * 64}.get(self.part, "")
        self.cursor = CURSOR if roster[peer].role == "trainer" else None
        self.peers = roster.peers
        self.sq_norm, self.previous = 3.0, GENESIS.model_copy(update={"roster": roster.members}).hash()

    @property
    def asked(self) -> list[Rpc[Any, Any]]:
        return [rpc for rpc, _ in self.bodies]

    def told(self, method: Rpc[Any, Any]) -> list[Any]:
        return [body for rpc, body in self.bodies if rpc == method]

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        kinds: list[tuple[Rpc[Any, Any], Callable[[Any], Any]]] = [
            (PREPARE, lambda body: Promise(vote=None, free=0)),
            (RECONCILE, self._averaged),
            (APPLY, self._prepared),
            (PROPOSE, lambda b: Accepted(signature=sign(self.peer, acceptance_bytes(b.record, b.term)))),
            (DECIDE, lambda body: Empty()),
            (OVER, lambda body: Empty()),
            (AGAIN, lambda body: Empty()),
            (NEXT, _wrong_step),
            (START, _wrong_step),
        ]
        leading: list[tuple[Rpc[Any, Any], Callable[[Any], Any]]] = [
            (LEASE, lambda body: Leased(total=body.total, reason="")),
            (COMPLETE, lambda body: Empty()),
            (ASIDE, lambda body: Empty()),
            (FAULT, lambda body: Empty()),
            (RESUME, lambda body: TrainerResumed(kept=len(body.started))),
        ]
        kinds += leading if self.leads else []
        return [rpc.handled(self._handler(rpc, usual)) for rpc, usual in kinds]

    def _averaged(self, body: Reconcile) -> Averaged:
        own = by_trainer(body.committed).get(self.peer)
        absent = body.absent(self.peers)
        rows = sign(self.peer, rows_bytes(RUN, body.step, self.previous, own, absent)) if own else b""
        return Averaged(digest=self.gradient, sq_norm=self.sq_norm, cursor=self.cursor, rows=rows)

    def _prepared(self, body: Apply) -> Prepared:
        if not self.weights:
            return Prepared(digest="")
        asked, signing = Asked(self.told(RECONCILE)[-1], body), ResultSigning(RUN, body.step, self.previous)
        signed = signing.data(self.part, asked.attempts[self.part], "weights", asked.inputs("weights"), self.weights)
        return Prepared(digest=self.weights, signed=sign(self.peer, signed))

    def _handler(self, rpc: Rpc[Any, Any], usual: Callable[[Any], Any]) -> Any:
        async def handle(caller: PeerId, body: Any) -> Any:
            self.bodies.append((rpc, body))
            answer = self.instead.get(rpc, usual)(body)
            answer = await answer if asyncio.iscoroutine(answer) else answer
            answer = usual(body) if answer is None else answer
            if isinstance(answer, Promise) and not answer.signed:
                said = promise_bytes((RUN, body.step, self.previous), body.term, answer.accepted, answer.free)
                return answer.model_copy(update={"signed": sign(self.peer, said)})
            return answer

        return handle


def _wrong_step(body: Any) -> Any:
    raise WrongStep("the step is not closed here")


class Stage:
    """Puppets on a network, one of which leads step 1 with a service of its own."""

    def __init__(self, roster: Roster = ROSTER, *, hosted: bool = False, leader: PeerId | None = None) -> None:
        self.roster, self.leader = roster, leader or roster.succession(1)[0]
        self.network, self.events, self.liveness = SimNetwork(LoopClock()), EventList(), FakeLiveness()
        self.puppets = {peer: Puppet(peer, roster) for peer in roster.peers}
        self.endpoints: dict[PeerId, SimEndpoint] = {}
        self.waited: list[str] = []
        self.lead = LeadService(
            RULES, self.leader, self._opened, lambda peer, data, signature: True, hosted=hosted, term_of=lambda: 0
        )
        self.lead.open_step(1, roster, self.genesis.hash(), {})

    @property
    def genesis(self) -> CloseRecord:
        return GENESIS.model_copy(update={"roster": self.roster.members})

    async def _opened(self, step: int) -> None:
        return None

    async def set(self) -> Stage:
        for peer, puppet in self.puppets.items():
            self.endpoints[peer] = self.network.endpoint(peer)
            await self.endpoints[peer].enter(RUN)
            self.endpoints[peer].mount(puppet)
        history = History()
        history.append(self.genesis)
        self.calls = StepCalls(self.endpoints[self.leader])
        self.closing = CloseContext(
            rules=RULES,
            calls=self.calls,
            history=history,
            events=self.events,
            lead=self.lead,
            liveness=self.liveness,
            clock=LoopClock(),
            timeout_s=lambda: 5.0,
            verify=verify,
            waiting=self.waited.append,
        )
        return self

    async def ask_lead(self, body: Any, caller: PeerId) -> Any:
        """Return what we answer as the leader to a trainer."""
        return await asked(self.lead, body, caller)

    async def feed(self, contributions: Sequence[Contribution] = COMMITTED, *, term: int = 0) -> None:
        """Have trainers lease and complete these."""
        for one in contributions:
            trainer = PeerId(one.microbatch.trainer)
            await self.ask_lead(Lease(step=1, term=term, total=one.microbatch.position + 1), trainer)
            receipts = (SignedReceipt(digest=bytes(32), signature=bytes(64)),) * len(one.route)
            await self.ask_lead(Complete(step=1, term=term, contribution=one, receipts=receipts), trainer)

    def leading(self, term: int = 0) -> StepClose:
        return StepClose(self.closing, self.lead.book, term)

    def asked(self, method: str) -> AbstractSet[PeerId]:
        return {peer for peer, puppet in self.puppets.items() if method in puppet.asked}

    def die(self, peer: PeerId) -> Callable[[Any], Any]:
        """Return an answer: the peer is killed, and found gone by the next look."""

        async def answer(body: Any) -> Any:
            self.liveness.found.add(peer)
            self.network.kill(peer)
            await asyncio.get_running_loop().create_future()

        return answer

    def stall(self, peer: PeerId) -> Callable[[Any], Any]:
        """Return an answer: none, and the watch finds out by itself."""

        async def answer(body: Any) -> Any:
            self.liveness.lose(peer, "silent")
            await asyncio.get_running_loop().create_future()

        return answer


def no(error: Exception, *, times: int = 1_000) -> Callable[[Any], Any]:
    """Return an answer: so often this error, then as usual."""
    left = iter(range(times))

    def answer(body: Any) -> Any:
        if next(left, None) is not None:
            raise error

    return answer


async def silence(body: Any) -> Any:
    """Answer nothing at all."""
    await asyncio.get_running_loop().create_future()


def broken(culprit: PeerId | None, **fields: Any) -> Callable[[Any], Any]:
    """Return an answer: the round failed."""
    return lambda body: Averaged(digest="", sq_norm=0.0, cursor=None, failure="void", culprit=culprit, **fields)


async def stage(**settings: Any) -> Stage:
    """Return a stage whose trainers have fed the step."""
    made = await Stage(**settings).set()
    await made.feed()
    return made


def by(trainer: PeerId, position: int, host: PeerId = A) -> Contribution:
    """Return a trainer's contribution, computed by ``host``."""
    microbatch = MicrobatchId(trainer, "00" * 8, 0, position)
    return Contribution(microbatch=microbatch, tokens=10, loss_sum=1.5, route=(host,))
