"""Push-sum in training: after each leg half of what a replica holds goes to one other, and nobody waits.

The rules are those of :mod:`swarm.averaging.gossip.mass`: a parcel is the sender's until the receiver has said that it
took it, and the receiver's from then on. What is learnt in a leg is added to the mass held, and the weights with which
training goes on are its value, sum ÷ weight. Where a receiver does not answer in time, handing its parcel over goes on
beside the legs that follow. Every step begins anew with one weight each: all are averaged exactly when it closes, so
what a death takes along is missed by nobody afterwards.

:class:`Pushing` is the service, :class:`PushSum` the strategy that says who sends to whom.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Annotated

import torch
from pydantic import Field

from swarm.averaging.gossip.mass import Parcel, ParcelTaken, ParcelTransferred, PushSumNode, PushSumState
from swarm.averaging.gossip.mixing import Held, MixedPart, MixingContext, check_near, why_not
from swarm.averaging.gossip.patience import CEILING_S, PatientCalls
from swarm.averaging.gossip.versions import Version
from swarm.averaging.strategies.groups import shuffled
from swarm.errors import Refused, Violation, WrongStep
from swarm.events import Mixed
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Answer, AnyMethod, Incoming, Payload, Rpc
from swarm.schema import Count, Empty, Message, PartField


class PushRequest(Message):
    """ "This mass is yours once you have said that you took it." The payload is its sum, float32, little-endian."""

    part: PartField
    step: Count
    number: Count
    weight: Annotated[float, Field(gt=0)]


class TakenAnswer(Message):
    """It was put aside."""

    number: Count


class TransferRequest(Message):
    """ "Parcel ``number`` is yours." """

    part: PartField
    step: Count
    number: Count


PUSH = Rpc("mass/1/push", PushRequest, TakenAnswer)
YIELD = Rpc("mass/1/yield", TransferRequest, Empty)


class Pushing:
    """Mixes as :class:`~swarm.averaging.gossip.mixing.Taking` does, by pushing; and the ``mass/1`` service of it. What
    is done to the mass is done on the device thread, one thing at a time."""

    def __init__(self, context: MixingContext, strategy: PushSum, seed: int, reach: float) -> None:
        self._context, self._strategy, self._seed, self._reach = context, strategy, seed, reach
        self._patience = PatientCalls[None](context.clock)
        self._node: PushSumNode | None = None
        self._step = 0
        self._had = torch.empty(0)
        self._heard: set[PeerId] = set()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [
            PUSH.handled_with_payload(self._on_push, admit=self._admit),
            YIELD.handled(self._on_yield),
        ]

    async def mix(self, beside: asyncio.TaskGroup, name: PartName, part: MixedPart, replicas: Sequence[PeerId]) -> None:
        """After a leg: take in what was learnt, give half away, and go on from the value of what is held. Who is still
        being given to is given nothing more."""
        context, mine = self._context, part.version
        target = self._strategy.target(context.endpoint.peer, replicas, mine.leg - 1, self._seed)
        if target is None:
            return
        began, to = context.clock.monotonic(), None if self._patience.asks(target) else target
        own, parcel = await context.device.run(self._go_on, part, mine, to, len(replicas))
        heard, self._heard = len(self._heard), set()

        left_out = {target: "deadline: has not answered for an earlier leg yet"}
        if parcel is not None:
            give = functools.partial(self._hand_over, name, mine.step, parcel)
            left_out = why_not(await self._patience.answers(beside, [target], give))
        context.events.emit(
            Mixed(
                step=mine.step,
                part=name,
                leg=mine.leg,
                members=2,
                averaged=1 + heard,
                oldest=0,
                own=own,
                left_out=left_out,
                bytes_received=4 * mine.params.numel() * heard,
                seconds=context.clock.monotonic() - began,
            )
        )

    async def _hand_over(self, name: PartName, step: int, parcel: Parcel, target: PeerId) -> None:
        context = self._context
        body = PushRequest(part=name, step=step, number=parcel.number, weight=parcel.mass.weight)
        payload: Payload = parcel.mass.sum.numpy().data.cast("B")
        answer, _ = await context.endpoint.call(target, PUSH, body, timeout_s=CEILING_S, payload=payload)

        def hear() -> ParcelTransferred | None:
            if self._node is None or step != self._step:
                return None
            return self._node.taken(target, ParcelTaken(answer.number))

        given = await context.device.run(hear)
        if given is not None:
            ours = TransferRequest(part=name, step=step, number=given.number)
            await context.endpoint.call(target, YIELD, ours, timeout_s=CEILING_S)

    # --- where the part is worked on -----------------------------------------------------------------------------

    def _go_on(self, part: MixedPart, mine: Version, target: PeerId | None, replicas: int) -> tuple[str, Parcel | None]:
        """Weights change by what others' mass did, and stay as they are where nothing came. What became of our mass,
        and the parcel to be sent: one that was not answered is sent once more, and none to nobody."""
        node, now = self._begun(mine, replicas), mine.params.cpu()
        node.change(now - self._had)
        parcel = None if target is None else node.push(target)
        value = node.held.value
        self._had = value if part.mix(mine, value) else now
        if target is None:
            return "kept", None
        return ("pushed", parcel) if parcel else ("pushed again", node.unanswered_by(target))

    def _begun(self, version: Version, replicas: int) -> PushSumNode:
        """The node of the open step, which begins with what we are when we first push or are pushed to."""
        if self._node is None or self._step != version.step:
            self._had = version.params.cpu()
            self._node, self._step = (
                PushSumNode(PushSumState(self._had, 1.0), most_weight=float(replicas)),
                version.step,
            )
        return self._node

    # --- what others push ----------------------------------------------------------------------------------------

    def _admit(self, caller: PeerId, body: PushRequest, payload_bytes: int) -> None:
        held = self._for(caller, body.part, body.step)
        expected = 4 * held[1].version.params.numel()
        if payload_bytes != expected:
            raise Violation(f"mass of {payload_bytes} bytes instead of {expected}", peer=caller)

    async def _on_push(self, caller: PeerId, body: PushRequest, incoming: Incoming) -> Answer[TakenAnswer]:
        _, part, replicas = self._for(caller, body.part, body.step)
        vector = torch.frombuffer(incoming.payload, dtype=torch.float32)
        parcel = Parcel(body.number, PushSumState(vector, body.weight))

        def take() -> ParcelTaken:
            _check_open(part, body.step)
            check_near(parcel.mass.value, part.version.params, self._reach, caller)
            return self._begun(part.version, len(replicas)).take(caller, parcel)

        taken = await self._context.device.run(take)
        return Answer(TakenAnswer(number=taken.number))

    async def _on_yield(self, caller: PeerId, body: TransferRequest) -> Empty:
        _, part, _ = self._for(caller, body.part, body.step)

        def take_in() -> None:
            _check_open(part, body.step)
            if self._node is not None and self._step == body.step:
                self._node.yielded(caller, ParcelTransferred(body.number))

        await self._context.device.run(take_in)
        self._heard.add(caller)
        return Empty()

    def _for(self, caller: PeerId, name: str, step: int) -> Held:
        held = self._context.held()
        if held is None or held[0] != name:
            raise Refused(f"{name} is not held here")
        if caller not in held[2]:
            raise Refused(f"only replicas of {name} push to each other")
        _check_open(held[1], step)
        return held


def _check_open(part: MixedPart, step: int) -> None:
    """Once on the loop, and again where the part is worked on: a swap may have come between."""
    if part.version.step != step:
        raise WrongStep(f"step {part.version.step} is open here, not {step}")


# --- the strategy: one receiver each a round -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PushSum:
    """In round t the replica at place i sends half of its (sum, weight) to the one at i + 2^(t mod ⌈log2 P⌉): a
    directed exponential graph with one target each.

    Mixes parameters or deltas. What is sent and what is kept sum to what there was (columns of the mixing matrix sum to
    one), so Σ sums and Σ weights never change, and sum ÷ weight tends to the mean at every replica although nobody
    waits for what it is sent. Exact after log2 P rounds where P is a power of two; what k rounds leave is
    Σ_j Π_t cos²(π j 2^t / P) / (P-1) over j = 1 … P-1 when all go in step.
    Each replica sends the vector once a round. Source: stochastic gradient push, arXiv 1811.10792, section 3 and
    appendix A; Kempe, Dobra and Gehrke, FOCS 2003.
    """

    name: str = "push-sum"

    def target(self, peer: PeerId, replicas: Sequence[PeerId], step: int, seed: int) -> PeerId | None:
        """Return the target of ``peer``; None when it is alone. All replicas have another target in every round, and as
        many senders as targets."""
        places = shuffled(replicas, seed)
        if len(places) < 2:
            return None
        hops = 1 << (step % self.cycle(len(places)))
        return places[(places.index(peer) + hops) % len(places)]

    def cycle(self, replicas: int) -> int:
        """Rounds until the distances repeat: ⌈log2 P⌉."""
        return max(1, (replicas - 1).bit_length())

    def exact_after(self, replicas: int) -> int | None:
        """log2 P rounds where it is whole, and all go in step."""
        return self.cycle(replicas) if replicas & (replicas - 1) == 0 else None

    def left_after(self, rounds: int, replicas: int) -> float:
        """Return the same share as above. O(rounds · P)."""
        if replicas < 2:
            return 0.0
        cycle, total = self.cycle(replicas), 0.0
        for frequency in range(1, replicas):
            kept = 1.0
            for turn in range(rounds):
                kept *= cos(pi * frequency * (1 << turn % cycle) / replicas) ** 2
            total += kept
        return total / (replicas - 1)
