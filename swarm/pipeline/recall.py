"""Give again what was sent before: from what is retained, else computed anew, else fetched from a neighbour first.

An output needs the input, which is the output of the stage before, up to the trainer. The gradient of an input needs
that and the gradient of the output, which comes from the stage after, down to the trainer. So what waits for what is
a chain that ends at the trainer: there are no cycles, and where outputs and gradients are bounded apart, no deadlock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from swarm.columns import replaced, standing_at
from swarm.device import is_out_of_memory
from swarm.errors import BugError, Busy, PeerError, Refused, SwarmError, Violation
from swarm.ids import JourneyKey, MicrobatchId, PeerId, StepWork
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Answer, Incoming, Payload, RequestT, Rpc
from swarm.pipeline.compute import Material
from swarm.pipeline.messages import RECALL, TRAINER_RECALL, Recall, Recalled, TrainerRecall, TrainerWhat, What
from swarm.pipeline.seals import Across, Sealed, hash_of
from swarm.pipeline.stage.admission import StageContext, StageSettings
from swarm.pipeline.stage.memory import MemoryRelief
from swarm.pipeline.stage.microbatch_state import MicrobatchState
from swarm.pipeline.stage.table import MicrobatchTable
from swarm.waiting import retry_while_busy

MAX_RECALLS = 16
"""Recalls of one kind that are worked on at a time; one activation each. More are Busy."""

NESTED_SHARE = 0.8
"""Part of the time a caller gives that its callee may give to the next in the chain."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One microbatch's tensors to be had along a route, within some seconds; ``after`` begins the hash of the record
    that it follows."""

    work: StepWork
    route: tuple[PeerId, ...]
    within_s: float
    after: str

    @classmethod
    def of(cls, state: MicrobatchState, within_s: float) -> Errand:
        """Along the microbatch's route as it is now."""
        return cls(state.work, state.route, within_s, state.key.after)

    def through(self, peer: PeerId, hop: int) -> Errand:
        """Return the same where ``peer`` did the stage ``hop``: its neighbours give to who is named there."""
        return replace(self, route=replaced(self.route, hop, peer))

    def across(self, hop: int, what: What) -> Across:
        """Return the way of a stage's output, or of its input's gradient, to the stage ``hop``."""
        key = JourneyKey(self.work.step, self.work.microbatch, 0, self.after)
        return Across(key, hop, "forward" if what == "output" else "backward").again

    @property
    def nested(self) -> Errand:
        """The same with the time that is left to a neighbour."""
        return replace(self, within_s=NESTED_SHARE * self.within_s)


class Missing(Refused):
    """A neighbour cannot give what it should: ``hop`` says which, the trainer's being -1 or the number of stages."""

    def __init__(self, hop: int, peer: PeerId, error: PeerError) -> None:
        super().__init__(error.reason[:300], peer=peer)
        self.hop, self.error = hop, error


class Recalls:
    """One replica's fetching and giving again. One computation and one fetch of a kind at a time per microbatch."""

    def __init__(
        self,
        settings: StageSettings,
        context: StageContext,
        table: MicrobatchTable,
        memory: MemoryRelief,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._settings, self._context, self._table = settings, context, table
        self._memory, self._spawn = memory, spawn
        self._open: Counter[What] = Counter()
        self._running: dict[tuple[Any, ...], asyncio.Future[Any]] = {}

    # --- giving --------------------------------------------------------------------------------------------------

    async def answer(self, caller: PeerId, body: Recall, incoming: Incoming) -> Answer[Recalled]:
        """``pipeline/1/recall``, after admission. Raises Busy, or Refused with the reason where a chain is broken."""
        if self._open[body.what] >= MAX_RECALLS:
            raise Busy(f"{self._open[body.what]} recalls are under way")
        left_s = incoming.deadline - self._context.clock.monotonic()
        within_s = max(0.01, min(left_s, self._settings.send_timeout_s))
        route = tuple(map(PeerId, body.route))
        errand = Errand(self._table.window.work_of(body), route, within_s, body.after)
        self._open[body.what] += 1
        try:
            if body.what in ("input", "received"):
                return Answer(Recalled(), self.retained(errand.work, body.what))
            payload = await (self.output(errand) if body.what == "output" else self.input_gradient(errand))
        except PeerError as error:  # none of it is the caller's fault, nor says that we are not there
            raise Refused(f"stage {self._settings.stage}: {error}"[:400]) from error
        finally:
            self._open[body.what] -= 1
        if payload is None:
            raise Refused("token ids have no gradient")
        hop = self._settings.stage + (1 if body.what == "output" else -1)
        seal = self._context.seals.seal(errand.across(hop, body.what), await hash_of(payload))
        return Answer(Recalled(seal=seal), payload)

    def retained(self, work: StepWork, what: What) -> Payload:
        """What came, as it is held: for this nothing is computed or fetched. Raises Refused."""
        state = self._table.find(work)
        held = None if state is None else state.tensors.input if what == "input" else state.received
        if held is None:
            raise Refused(f"what came of {work.microbatch} is not held any more")
        return held

    async def output(self, errand: Errand) -> Payload:
        """This stage's output. Raises Missing, or what computing raises."""
        state = self._table.find(errand.work)
        if state is not None and state.tensors.output is not None:
            return state.tensors.output
        payload = await self.input(errand)
        seed, first = self._seed(errand.work.microbatch), self._settings.first
        computed: Payload = await self._compute(
            "output", errand, lambda: self._context.compute.output(payload, seed, errand.work, first=first)
        )
        return computed

    async def input_gradient(self, errand: Errand) -> Payload | None:
        """The gradient of this stage's input, None for token ids. Raises Missing, or what computing raises."""
        material = await self.material(errand)
        computed: Payload | None = await self._compute(
            "gradient", errand, lambda: self._context.compute.gradient(material)
        )
        return computed

    # --- fetching ------------------------------------------------------------------------------------------------

    async def material(self, errand: Errand) -> Material:
        """All that a contribution takes: held, or fetched. Raises Missing."""
        own_input, gradient, targets = await self.input(errand), None, None
        if self._settings.computes_loss:
            targets = await self.targets(errand)
        else:
            gradient = await self.output_gradient(errand)
        return Material(
            work=errand.work,
            seed=self._seed(errand.work.microbatch),
            first=self._settings.first,
            input=own_input,
            gradient=gradient,
            targets=targets,
        )

    async def input(self, errand: Errand) -> Payload:
        """Return what came, or should have come, from the stage before, or from the trainer."""
        state = self._table.find(errand.work)
        if state is not None and state.tensors.input is not None:
            return state.tensors.input
        hop = self._settings.stage - 1
        payload, sealed = await self._fetch(errand, hop, "output")
        if state is not None and not state.dropped and state.tensors.input is None:
            state.fetched_input(payload, sealed)
            self._table.retention.hold(state)
        return payload

    async def output_gradient(self, errand: Errand) -> Payload:
        """Return what came, or should have come, from the stage after, or from the trainer."""
        state = self._table.find(errand.work)
        if state is not None and state.tensors.gradient is not None:
            return state.tensors.gradient
        hop = self._settings.stage + 1
        payload, sealed = await self._fetch(errand, hop, "gradient")
        if state is not None and not state.dropped and state.tensors.gradient is None:
            self._keep_gradient(state, payload, sealed, errand)
        return payload

    def _keep_gradient(self, state: MicrobatchState, payload: Payload, sealed: Sealed, errand: Errand) -> None:
        sender = standing_at(errand.route, self._settings.stage + 1, errand.work.microbatch.trainer)
        state.fetched_gradient(payload, sender, sealed)
        self._table.retention.hold(state)

    async def targets(self, errand: Errand) -> Payload:
        """Hosted last stage: the targets, from the trainer."""
        state = self._table.find(errand.work)
        if state is not None and state.tensors.targets is not None:
            return state.tensors.targets
        payload, sealed = await self._fetch(errand, self._settings.stage + 1, "targets")
        if state is not None and not state.dropped and state.tensors.targets is None:
            state.fetched_targets(payload, sealed)
            self._table.retention.hold(state)
        return payload

    async def _fetch(self, errand: Errand, hop: int, what: TrainerWhat) -> tuple[Payload, Sealed]:
        peer = standing_at(errand.route, hop, errand.work.microbatch.trainer)
        key = (errand.work, errand.after, what, peer)
        fetched: tuple[Payload, Sealed] = await self._once(key, lambda: self._ask_or_miss(peer, errand, hop, what))
        return fetched

    async def _ask_or_miss(self, peer: PeerId, errand: Errand, hop: int, what: TrainerWhat) -> tuple[Payload, Sealed]:
        try:
            payload, seal = await self.ask(peer, errand, hop, what)
            if what == "targets":
                return payload, Sealed(await hash_of(payload))
            across = errand.across(self._settings.stage, what)
            return payload, await self._context.seals.opened(peer, across, payload, seal)
        except PeerError as error:
            raise Missing(hop, peer, error) from error

    async def ask(self, peer: PeerId, errand: Errand, hop: int, what: TrainerWhat) -> tuple[Payload, bytes]:
        """Return what a peer says that it has, with the signature that it says is under it: nothing is held of it here.
        Raises Violation for another length than it must have."""
        work = errand.work
        size = self._wire_bytes(work.ready_in, hop, what)
        fields: dict[str, Any] = {"step": work.step, "microbatch": work.microbatch, "after": errand.after}
        within_s = errand.nested.within_s
        if 0 <= hop < self._settings.stages and what != "targets":
            recall = Recall(**fields, route=errand.route, hop=hop, what=what)
            payload, seal = await self._insist(peer, RECALL, recall, size, within_s)
        else:
            home = TrainerRecall(**fields, route=errand.route, what=what)
            payload, seal = await self._insist(peer, TRAINER_RECALL, home, size, within_s)
        if memoryview(payload).nbytes != size:
            raise Violation(f"{what} of {memoryview(payload).nbytes} bytes where {size} are expected", peer=peer)
        return payload, seal

    async def _insist(
        self, peer: PeerId, rpc: Rpc[RequestT, Recalled], body: RequestT, size: int, within_s: float
    ) -> tuple[Payload, bytes]:
        async def call() -> tuple[Payload, bytes]:
            reply, payload = await self._context.endpoint.call(
                peer, rpc, body, timeout_s=within_s, max_reply_bytes=size
            )
            return payload, reply.seal

        return await retry_while_busy(call, self._context.clock, within_s=within_s)

    def _wire_bytes(self, step: int, hop: int, what: TrainerWhat) -> int:
        """Of a tensor that comes here, or to who holds this stage, in the open step; or that left."""
        specs, stage = self._settings.specs, self._settings.stage
        if what == "targets" or (what == "received" and hop == stage and self._settings.computes_loss):
            return specs.target_bytes
        if (what in ("input", "received")) is (hop != stage):
            return specs.leaving_bytes(step, "forward" if what in ("input", "output") else "backward")
        if what in ("input", "output") and self._settings.first and specs.hosted:
            return specs.token_bytes
        return specs.arriving_bytes(step, "forward" if what in ("input", "output") else "backward")[0]

    def _seed(self, microbatch: MicrobatchId) -> int:
        return dropout_seed(self._settings.seed, microbatch)

    # --- once ----------------------------------------------------------------------------------------------------

    async def _compute(self, what: What, errand: Errand, compute: Callable[[], Any]) -> Any:
        return await self._once((errand.work, errand.after, what), lambda: self.on_device(compute))

    async def on_device(self, compute: Callable[[], Any]) -> Any:
        """Run it on the device thread, once more when the device had no memory left and some was made: nobody else can
        do it. What goes wrong with one microbatch comes out as a PeerError."""
        try:
            return await self._context.device.run(compute)
        except SwarmError:
            raise
        except Exception as error:  # one microbatch that cannot be computed is no end of a replica
            if not is_out_of_memory(error):
                raise PeerError(f"{type(error).__name__}: {error}") from error
            await self._memory.after(error)
        try:
            return await self._context.device.run(compute)
        except SwarmError:
            raise
        except Exception as error:  # as above
            raise PeerError(f"{type(error).__name__}: {error}") from error

    async def _once(self, key: tuple[Any, ...], work: Callable[[], Awaitable[Any]]) -> Any:
        """The outcome of ``work``, shared by all who want it at a time; it goes on when one of them is cancelled."""
        future = self._running.get(key)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._spawn(self._work_for(key, future, work))
            self._running[key] = future  # not before: a replica that does not work now refuses the work
        return await asyncio.shield(future)

    async def _work_for(
        self, key: tuple[Any, ...], future: asyncio.Future[Any], work: Callable[[], Awaitable[Any]]
    ) -> None:
        try:
            future.set_result(await work())
        except BugError as bug:
            future.set_exception(bug)
            raise
        except PeerError as error:
            future.set_exception(error)
            future.exception()  # all who waited may have gone
        finally:
            del self._running[key]
            future.cancel()
