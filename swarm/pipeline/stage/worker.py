"""Compute what a replica has admitted, in the order of its queue; what comes of it is sent on beside."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from swarm.device import is_out_of_memory
from swarm.errors import BugError, PeerError, WrongStep
from swarm.events import Accumulated, GradientsFarOut
from swarm.ids import PeerId
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Payload
from swarm.phases import Phases, advance
from swarm.pipeline.compute import Contributed, Graph, Material
from swarm.pipeline.messages import Direction
from swarm.pipeline.seals import NOTHING, hash_of
from swarm.pipeline.stage.admission import StageContext, StageSettings
from swarm.pipeline.stage.memory import MemoryRelief
from swarm.pipeline.stage.microbatch_state import Action, MicrobatchState, Work
from swarm.pipeline.stage.sender import Report, Sender
from swarm.pipeline.stage.table import MicrobatchTable
from swarm.waiting import first_done

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ADDING = 2
"""Contributions under way at once: each holds a gradient of all the part's parameters until it is added."""

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Worker:
    """What is done with each piece of one replica's queue. Handing results on happens beside it (``spawn``), so that
    the next piece starts at once."""

    def __init__(
        self,
        settings: StageSettings,
        context: StageContext,
        table: MicrobatchTable,
        sender: Sender,
        memory: MemoryRelief,
        spawn: Spawn,
    ) -> None:
        self._settings, self._context, self._table = settings, context, table
        self._sender, self._memory, self._spawn = sender, memory, spawn
        self._wake = asyncio.Event()
        self._adding, self._under_way = asyncio.Semaphore(MAX_ADDING), 0
        self.pace = ComputePace()

    async def run(self) -> None:
        """Work until cancelled. Raises BugError, which ends the replica."""
        lanes = self._context.device.lanes
        if lanes == 1:
            return await self._take_turns()
        await first_done(*(self._take_turns() for _ in range(lanes)))

    async def _take_turns(self) -> None:
        """Do one piece after the other of the queue."""
        while True:
            state = self._table.queue.pop(self._table.step)
            if state is None:
                self._wake.clear()
                await self._wake.wait()
            elif not state.dropped:
                direction = state.start()
                if direction is not None:
                    await self._work(state, direction)

    def queue(self, direction: Direction, state: MicrobatchState) -> None:
        """Queue one direction of a microbatch, once."""
        now = self._context.clock.monotonic()
        waited = now - state.arrived
        if not state.queue(direction, now):
            return
        if direction == "backward" and state.tensors.graph is not None:
            self._table.stay.observe(waited)
        self._table.queue.push(direction, state.work, state)
        self._wake.set()

    def hurry(self, state: MicrobatchState) -> None:
        """Have a microbatch's weight gradients added next: its trainer waits for the receipt."""
        self._defer(state, "backward")

    def _defer(self, state: MicrobatchState, before: Work = "weights") -> None:
        self._table.queue.push(before, state.work, state)
        self._wake.set()

    def wake(self) -> None:
        """Look at the queue again: there may be more of the open step."""
        self._wake.set()

    async def _work(self, state: MicrobatchState, work: Work) -> None:
        direction: Direction = "forward" if work == "forward" else "backward"
        started = self._context.clock.monotonic()
        queued = started - state.arrived
        self._under_way += 1
        try:
            if work == "weights":
                await self._add_weights(state)
            elif work == "backward" and self._settings.defers:
                await self._turn_back(state, queued)
            elif work == "backward" or self._settings.computes_loss:
                await self._contribute(state, queued)
            elif state.tensors.graph is None:
                await self._forward(state, queued)
            self._memory.succeeded()
        except BugError:
            raise
        except PeerError as error:
            logger.warning("step %d, microbatch %s: %s", state.key.step, state.key.microbatch, error)
            self._give_up(state, direction, error)
        except Exception as error:  # one poisonous microbatch is its trainer's trouble, not the end of the replica
            if is_out_of_memory(error):
                self._give_up(state, direction, await self._memory.after(error, alone=self._under_way == 1))
                return
            logger.exception("step %d, microbatch %s", state.key.step, state.key.microbatch)
            self._give_up(state, direction, PeerError(f"{type(error).__name__}: {error}"))
        finally:
            self._under_way -= 1

    def _give_up(self, state: MicrobatchState, direction: Direction, error: PeerError) -> None:
        """Nothing was accumulated: forget the microbatch and say so. A new attempt may come."""
        if state.dropped:
            return
        key, route = state.key, state.route
        self._table.drop(state, f"its {direction} failed: {error}")
        self._spawn(self._sender.report_blocked(key, route, self._settings.stage, direction, error))

    async def _forward(self, state: MicrobatchState, queued: float) -> None:
        started = self._context.clock.monotonic()
        payload, seed = state.tensors.input, self._seed(state)
        if payload is None:
            raise BugError("a forward was queued without its input")

        def compute() -> Phases[tuple[Payload, Graph]]:
            return (yield from self._context.compute.forward(payload, seed, state.work, first=self._settings.first))

        output, graph = await self._context.device.run_phases(compute())
        if state.dropped:
            return
        follows = state.computed(output, graph if self._settings.keeps_graphs else None)
        if follows.action is Action.QUEUE_BACKWARD:
            self.queue("backward", state)
        if follows.action is not Action.TELL_FORWARD:
            return
        took = self._took("forward", queued, started)
        self._spawn(self._sender.report_forward(state, took))
        self._spawn(self._sender.send_output(state, output))

    async def _contribute(self, state: MicrobatchState, queued: float) -> None:
        """Both directions, or the way back, in one piece."""
        started, material = self._context.clock.monotonic(), self._material(state)
        graph, sender = await self._graph(state, material), state.tensors.gradient_sender

        def compute() -> Phases[Contributed]:
            result = yield from self._context.compute.contribute(material, graph, sender)
            state.accumulate(result.loss_sum, result.tokens)
            return result

        result = await self._compute(state, compute(), self._adding)
        took = self._took("backward", queued, started)
        self._tell_of(state, sender, result.far)
        if state.dropped:  # its lineage was given up meanwhile: nothing of it counts
            return
        self._added(state)
        self._hand_back(state, result.gradient, partial(self._sender.report_backward, state, took))

    async def _graph(self, state: MicrobatchState, material: Material) -> Graph | None:
        """Return what backward needs; None where that computes the forward itself. Where nothing is held the forward is
        computed here: its output, which others had sent on before, is in the receipt, too, by which this hop is
        judged."""
        output, graph = state.tensors.output, state.take_graph()
        if graph is None and output is None and not self._settings.computes_loss:
            again = self._context.compute.forward(material.input, material.seed, material.work, first=material.first)
            output, graph = await self._compute(state, again, nullcontext())
        if output is not None and state.hashes.output == NOTHING:
            state.hashes.output = await hash_of(output)
        return graph

    async def _turn_back(self, state: MicrobatchState, queued: float) -> None:
        """What the stage before waits for; the rest when there is nothing else to do, or at once where that would be
        more than may be held."""
        started, material = self._context.clock.monotonic(), self._material(state)
        graph, sender = await self._graph(state, material), state.tensors.gradient_sender
        work = self._context.compute.turn_back(material, graph, sender)
        contributed, rest = await self._compute(state, work, nullcontext())
        state.took = self._took("backward", queued, started)
        self._tell_of(state, sender, contributed.far)
        if state.dropped:
            return
        report: Report | None = None
        if state.turn_back(rest, self._context.clock.monotonic()):
            report = partial(self._sender.report_turned, state)
        elif state.accumulated:  # at the step's closing
            report = partial(self._sender.report_backward, state, state.took)
        self._hand_back(state, contributed.gradient, report)
        if self._table.deferred_bytes <= self._settings.deferred_bytes:
            self._defer(state)
        elif state.start() == "weights":
            await self._add_weights(state)

    def _tell_of(self, state: MicrobatchState, sender: PeerId | None, times: float) -> None:
        """Tell of who sent gradients that are far too long: they were scaled down, and did no harm."""
        if sender is not None and times:
            part = self._settings.part
            self._context.events.emit(GradientsFarOut(step=state.work.step, part=part, peer=sender, times=times))

    async def _add_weights(self, state: MicrobatchState) -> None:
        """What :meth:`_turn_back` left; both again where that was dropped for want of memory."""
        started, material, rest = self._context.clock.monotonic(), self._material(state), state.take_rest()

        def compute() -> Phases[None]:
            if rest is None:
                yield from self._context.compute.contribute(material, None, None)
            else:
                yield from self._context.compute.add_weights(material, rest)
            state.accumulate(0.0, 0)

        await self._compute(state, compute(), self._adding)
        if state.dropped:
            return
        (queued, computed), (_, more) = state.took, self._took("weights", 0.0, started)
        self._added(state)
        self._spawn(self._sender.report_backward(state, (queued, computed + more)))

    def _hand_back(self, state: MicrobatchState, gradient: Payload | None, report: Report | None) -> None:
        """Have the input's gradient hashed, reported and sent, beside: the device does not wait for it."""
        state.hashing = asyncio.Event()
        self._spawn(self._sender.hand_back(state, gradient, report))

    def _material(self, state: MicrobatchState) -> Material:
        tensors = state.tensors
        if tensors.input is None:
            raise BugError("a contribution was queued without its input")
        return Material(
            work=state.work,
            seed=self._seed(state),
            first=self._settings.first,
            input=tensors.input,
            gradient=tensors.gradient,
            targets=tensors.targets,
        )

    async def _compute(self, state: MicrobatchState, work: Phases[T], turn: AbstractAsyncContextManager[Any]) -> T:
        """Do a part of a contribution in its ``turn``. Between two phases another lineage's step of this number may
        have been opened; where work is done in one go that comes later."""
        beside = self._context.device.lanes > 1

        def watched() -> Phases[T]:
            while (end := advance(work)) is None:
                yield
                if beside and state.dropped:
                    raise WrongStep(f"it was dropped: {state.dropped}")
            result: T = end.value
            return result

        state.in_use += 1
        try:
            async with turn:
                return await self._context.device.run_phases(watched())
        finally:
            state.in_use -= 1

    def _added(self, state: MicrobatchState) -> None:
        """Tell that a microbatch is in the sum."""
        part = self._settings.part
        self._context.events.emit(Accumulated(part=part, **state.work._asdict()))
        self._table.retention.hold(state)

    def _took(self, work: Work, queued: float, started: float) -> tuple[float, float]:
        """Return the seconds that a piece of work waited and was computed: of the time that it was under way, what is
        its share among those that are (Little's law), so that a replica seems as fast as it is."""
        under_way_s = self._context.clock.monotonic() - started
        computed = under_way_s / max(1, self._under_way)
        self.pace.observe(work, computed)
        return queued + under_way_s - computed, computed

    def _seed(self, state: MicrobatchState) -> int:
        return dropout_seed(self._settings.seed, state.key.microbatch)


class ComputePace:
    """The time that the newest pieces of one replica's work took on its device; ``weights`` are what a backward left to
    do."""

    def __init__(self) -> None:
        self.microbatches = 0
        self._seconds = {work: deque[float](maxlen=32) for work in ("forward", "backward", "weights")}

    def observe(self, work: Work, seconds: float) -> None:
        """A piece is done; with its backward a microbatch is, for those who wait for it."""
        self._seconds[work].append(seconds)
        self.microbatches += work == "backward"

    @property
    def compute_s(self) -> float:
        """Mean seconds of a microbatch, both directions together; 0.0 before the first."""
        return sum(fmean(seconds) for seconds in self._seconds.values() if seconds)
