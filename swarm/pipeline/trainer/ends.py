"""A trainer's end of recall and settling: what it sent and what its private ends added, again from what it retains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.columns import passes, standing_at
from swarm.compression.dense import INT32
from swarm.errors import BugError, Busy, PeerError, Refused, SwarmError, Violation, WrongStep
from swarm.ids import JourneyKey, MicrobatchId, PeerId, StepWork
from swarm.models.dropout import dropout_seed
from swarm.network.protocols import Answer, Incoming, Payload
from swarm.pipeline.batch import Batch, BatchSource
from swarm.pipeline.boundary import RowNotes, going_forward
from swarm.pipeline.compute import EndsCompute, EndsMaterial
from swarm.pipeline.messages import RECALL, Recall, Recalled, TrainerRecall, TrainerWhat, What
from swarm.pipeline.recall import MAX_RECALLS, NESTED_SHARE
from swarm.pipeline.seals import Across, hash_of
from swarm.pipeline.settle import not_as_added
from swarm.pipeline.trainer.issued import IssuedTable
from swarm.pipeline.trainer.journey import IssuedMicrobatch, JourneyContext
from swarm.pipeline.window import StepWindow
from swarm.waiting import retry_while_busy


@dataclass(frozen=True, slots=True)
class _Need:
    """A tensor of a microbatch, to be had along a route."""

    kept: IssuedMicrobatch
    route: tuple[PeerId, ...]
    within_s: float


class TrainerEnds:
    """Gives again what one trainer retains of its work in the steps of ``window``, the open one of which takes from our
    shard from ``begin`` on. Implements :class:`~swarm.pipeline.settle.Settling` for the private ends."""

    def __init__(self, context: JourneyContext, source: BatchSource, window: StepWindow, issued: IssuedTable) -> None:
        self._context, self._source = context, source
        self._window, self._issued = window, issued
        self.begin, self._recalls = source.cursor, 0

    def _find(self, work: StepWork) -> IssuedMicrobatch:
        """Return what is retained, or for once what can be read again: nobody can make us hold more by asking."""
        if (kept := self._issued.find(work)) is not None:
            return kept
        batch, after = _read_again(self._source, work.microbatch), self._window.after_of(work)
        return IssuedMicrobatch(work, batch, after, complete=True)

    def _check_fed(self, work: StepWork) -> None:
        """Our shard is private: what is retained was fed, and of the open step what its quota reaches may have been fed
        before we were started anew. Nothing else is read for anybody."""
        microbatch = work.microbatch
        if microbatch.trainer != self._context.endpoint.peer:
            raise Refused(f"{microbatch} is another trainer's")
        if self._issued.find(work) is not None:
            return
        if work.step != self._window.step:
            raise WrongStep(f"step {work.step} is not open here, step {self._window.step} is")
        each, (epoch, position) = self._source.microbatches_per_epoch, self.begin
        beyond = (microbatch.epoch - epoch) * each + microbatch.position - position
        if microbatch.position >= each or not 0 <= beyond < self._context.target:
            raise Refused(f"{microbatch} is not of step {work.step}")

    # --- giving again --------------------------------------------------------------------------------------------

    async def answer(self, caller: PeerId, body: TrainerRecall, incoming: Incoming) -> Answer[Recalled]:
        """``trainer/1/recall``. Raises Busy, WrongStep, or Refused with the reason why it cannot be given."""
        self._check_caller(caller, body)
        if self._recalls >= 2 * MAX_RECALLS:
            raise Busy(f"{self._recalls} recalls are under way")
        left_s = incoming.deadline - self._context.clock.monotonic()
        self._recalls += 1
        try:
            work = self._window.work_of(body)
            self._check_fed(work)
            need = _Need(
                self._find(work), tuple(map(PeerId, body.route)), max(0.01, min(left_s, self._context.send_timeout_s))
            )
            if body.what in ("input", "received"):
                return Answer(Recalled(), self._retained(need.kept, body.what))
            payload = await self._give(need, body.what)
            return Answer(Recalled(seal=await self._seal(body, payload)), payload)
        except (Busy, WrongStep):
            raise
        except PeerError as error:
            raise Refused(f"the trainer: {error}"[:400]) from error
        finally:
            self._recalls -= 1

    async def _seal(self, body: TrainerRecall, payload: Payload) -> bytes:
        if body.what == "targets":
            return b""
        key = JourneyKey(body.step, body.microbatch, 0, body.after)
        out = body.what == "output"
        across = Across(key, 0, "forward") if out else Across(key, self._context.stages - 1, "backward")
        return self._context.seals.seal(across.again, await hash_of(payload))

    def _check_caller(self, caller: PeerId, body: TrainerRecall) -> None:
        stages = self._context.stages
        at = 0 if body.what in ("output", "received") else stages - 1
        known = self._context.replicas.wiring.replicas(at)
        if not passes(body.route, stages, at, caller) or caller not in known:
            raise Refused(f"{body.what} goes to stage {at} only")
        if (body.what == "targets") != (self._context.ends is None) and body.what != "output":
            raise Refused(f"there is no {body.what} to be had of this trainer")
        work, ends = self._window.work_of(body), self._context.ends
        if body.step == self._window.step and body.after != self._window.after_of(work):
            raise WrongStep(f"step {body.step} follows another record here")
        if ends is not None and not (ends.part.is_open(body.step) and ends.part.computes(work.version)):
            raise WrongStep(f"step {body.step} is not open here")

    def _retained(self, kept: IssuedMicrobatch, what: TrainerWhat) -> Payload:
        held = kept.output if what == "input" else kept.gradient
        if held is None:
            raise Refused(f"what came home of {kept.batch.id} is not held any more")
        return held

    async def _give(self, need: _Need, what: str) -> Payload:
        kept, ends = need.kept, self._context.ends
        work = kept.work
        if what == "targets":
            return INT32.encode(kept.batch.targets, going_forward(work))
        if ends is None:
            return self._context.specs.joined(
                INT32.encode(kept.batch.inputs, going_forward(work)), RowNotes.of(kept.batch)
            )
        if what == "output":
            seed, batch = self._seed(kept.batch.id), kept.batch
            sent = await self._on_device(lambda: ends.embed(batch.inputs, seed, work, RowNotes.of(batch)))
            hidden: Payload = sent[0]
            return hidden
        if kept.loss_gradient is not None:
            return kept.loss_gradient
        output = await self._output(need)
        gradient: Payload = (await self._on_device(lambda: ends.loss(output, kept.batch.targets, work)))[2]
        return gradient

    async def _output(self, need: _Need) -> Payload:
        """The last stage's output: retained, or from the route's last replica."""
        kept = need.kept
        if kept.output is not None:
            return kept.output
        payload = kept.output = await self._recall(need, self._context.stages - 1, "output")
        self._issued.hold(kept)
        return payload

    async def _gradient(self, need: _Need) -> Payload:
        """The gradient of the first stage's input: retained, or from the route's first replica."""
        kept = need.kept
        if kept.gradient is not None:
            return kept.gradient
        payload = kept.gradient = await self._recall(need, 0, "gradient")
        self._issued.hold(kept)
        return payload

    async def _recall(self, need: _Need, at: int, what: What) -> Payload:
        microbatch, within_s = need.kept.batch.id, NESTED_SHARE * need.within_s
        size = self._size(what, need.kept.work.step)
        if not need.route:
            raise Refused(f"the {what} of {microbatch} was dropped, and its route is not known")
        where: dict[str, Any] = {"step": need.kept.work.step, "microbatch": microbatch, "after": need.kept.after}
        body = Recall(**where, route=need.route, hop=at, what=what)
        peer = standing_at(need.route, at, microbatch.trainer)

        async def call() -> Payload:
            _, payload = await self._context.endpoint.call(peer, RECALL, body, timeout_s=within_s, max_reply_bytes=size)
            return payload

        payload = await retry_while_busy(call, self._context.clock, within_s=within_s)
        self.check_size(what, need.kept.work.step, memoryview(payload).nbytes, peer)
        return payload

    def check_size(self, what: What, step: int, size: int, peer: PeerId) -> None:
        """Raises Violation for a tensor from a peer, the last stage's output or the first one's gradient, that is not
        as long as it must be in this step."""
        if size != (expected := self._size(what, step)):
            raise Violation(f"{what} of {size} bytes where {expected} are expected", peer=peer)

    def _size(self, what: What, step: int) -> int:
        return self._context.specs.arriving_bytes(step, "forward" if what == "output" else "backward")[0]

    # --- settling ------------------------------------------------------------------------------------------------

    async def held(self, step: int) -> frozenset[StepWork]:
        """See :class:`~swarm.pipeline.settle.Settling`."""
        ends = self._private()
        return await self._context.device.run(ends.held, step)

    async def reverse(self, work: StepWork) -> None:
        """See :class:`~swarm.pipeline.settle.Settling`."""
        ends, material = self._private(), await self._material(work, ())
        if await _came(material) != self._find(work).added:
            raise not_as_added(work)
        await self._on_device(lambda: ends.reverse(material))

    async def take_all_out(self, step: int) -> None:
        """See :class:`~swarm.pipeline.settle.Settling`."""
        ends = self._private()
        await self._on_device(lambda: ends.take_all_out(step))

    async def replay(self, work: StepWork, route: tuple[PeerId, ...]) -> None:
        """See :class:`~swarm.pipeline.settle.Settling`."""
        ends, material = self._private(), await self._material(work, route)
        came, kept = await _came(material), self._find(work)

        def compute() -> None:
            new = work not in ends.held(work.step)
            ends.replay(material)
            if new:
                kept.added = came

        await self._on_device(compute)

    async def _material(self, work: StepWork, route: tuple[PeerId, ...]) -> EndsMaterial:
        kept = self._find(work)
        need = _Need(kept, route or kept.route, self._context.send_timeout_s)
        return EndsMaterial(
            work=work,
            seed=self._seed(work.microbatch),
            tokens=kept.batch.inputs,
            targets=kept.batch.targets,
            positions=kept.batch.positions,
            output=await self._output(need),
            gradient=await self._gradient(need),
        )

    def _private(self) -> EndsCompute:
        if self._context.ends is None:
            raise BugError("with hosted ends a trainer has nothing to settle")
        return self._context.ends

    def _seed(self, microbatch: MicrobatchId) -> int:
        return dropout_seed(self._context.seed, microbatch)

    async def _on_device(self, work: Callable[[], Any]) -> Any:
        try:
            return await self._context.device.run(work)
        except SwarmError:
            raise
        except Exception as error:  # one microbatch that cannot be computed is no end of a trainer
            raise PeerError(f"{type(error).__name__}: {error}") from error


async def _came(material: EndsMaterial) -> tuple[bytes, bytes]:
    return await hash_of(material.output), await hash_of(material.gradient)


def _read_again(source: BatchSource, microbatch: MicrobatchId) -> Batch:
    """A microbatch of our shard, by its name; the cursor stays where it is. Raises Refused for another shard's."""
    if microbatch.shard != source.shard:
        raise Refused(f"{microbatch} is not of the shard that is open here")
    cursor = source.cursor
    source.seek((microbatch.epoch, microbatch.position))
    try:
        batch = source.take()
    finally:
        source.seek(cursor)
    if batch.id != microbatch:
        raise Refused(f"{microbatch} is another trainer's")
    return batch
