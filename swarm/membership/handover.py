"""Hand what averaging has rounded off here to another replica before this one leaves in order: ``residual/1``.

A replica that leaves with a record has sent its last contribution, and what was rounded off it
(:mod:`swarm.optim.part`) would go with it. One other replica of its part, which was in that round as well, takes it
and adds it to its own, in 8 bits. Nobody may add it twice: each is asked once, and the next only where one has said no.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from swarm.compression.blockwise import INT8
from swarm.compression.codec import EncodeContext
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.errors import Busy, PeerError, Refused, Violation, WrongStep
from swarm.events import ResidualHandedOver, ResidualLost
from swarm.ids import PartName, PeerId
from swarm.membership.holding import RoleManager
from swarm.membership.run import RunContext
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Answer, AnyMethod, Incoming, Rpc
from swarm.optim.part import TrainedPart
from swarm.schema import Count, Empty, Message
from swarm.waiting import retry_while_busy

MAX_LEFT = 64
"""Replicas that left and have handed nothing over yet, of which one remembers."""


class Residual(Message):
    """What averaging has rounded off at the caller, which left its part with the record of this step."""

    step: Count


HAND_OVER = Rpc("residual/1/hand-over", Residual, Empty)


class ResidualHandover:
    """Both sides of it."""

    def __init__(self, run: RunContext, holding: RoleManager) -> None:
        self._run, self._holding, self._device = run, holding, run.around.device
        self._me = run.around.endpoint.peer
        self._members = Roster(())
        self._left: OrderedDict[PeerId, tuple[PartName, int]] = OrderedDict()

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [HAND_OVER.handled_with_payload(self._on_residual, admit=self._admit)]

    # --- taking it -----------------------------------------------------------------------------------------------

    def opened(self, record: CloseRecord) -> None:
        """Remember who left in order with this record, as a replica of our part."""
        before, self._members = self._members, record.members
        part = self._holding.part
        if part is not None and self._me in before:
            for peer in before.replicas(part.spec.name):
                if peer not in record.members and peer not in record.absent:
                    self._left[peer] = part.spec.name, record.step
        for peer in [peer for peer in self._left if peer in record.members]:
            del self._left[peer]
        while len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)

    def _admit(self, caller: PeerId, body: Residual, payload_bytes: int) -> None:
        if body.step >= self._run.position.open_step:
            raise Busy(f"step {body.step} is not closed here yet")
        part = self._holding.part
        if part is None or self._left.get(caller) != (part.spec.name, body.step) or self._run.position.cut_off:
            raise Refused("it did not leave the part that is held here with that step, or has handed it over")
        expected = INT8.wire_bytes(_spec(part))
        if payload_bytes != expected:
            raise Violation(f"{payload_bytes} bytes of what was rounded off, not {expected}", peer=caller)

    async def _on_residual(self, caller: PeerId, body: Residual, incoming: Incoming) -> Answer[Empty]:
        self._admit(caller, body, len(incoming.payload))
        part = self._holding.part
        assert part is not None  # noqa: S101 - else it was not admitted
        del self._left[caller]
        await self._device.run(lambda: part.feedback.inherit(INT8.decode(incoming.payload, _spec(part))))
        return Answer(Empty())

    # --- giving it -----------------------------------------------------------------------------------------------

    async def give(self) -> None:
        """Hand over what this replica has, where the newest record lets it leave. Takes as long as averaging may, and
        never raises a PeerError: an event says what became of it."""
        part, head = self._holding.part, self._run.position.head
        if part is None or head is None or part.feedback.residual is None:
            return
        name, events = part.spec.name, self._run.around.events
        wire = await self._device.run(_encoded, part, head.step)
        reason = "no other replica of its part was in that step"
        for peer in self._members.replicas(name):
            if peer == self._me or peer not in head.members:
                continue
            try:
                await self._send(peer, name, head.step, wire)
            except (Refused, WrongStep, Busy) as error:
                reason = f"{peer}: {error.reason}"
            except PeerError as error:  # it may have it
                reason = f"{peer}: {error.reason}"
                break
            else:
                events.emit(ResidualHandedOver(step=head.step, part=name, to=peer))
                return
        events.emit(ResidualLost(step=head.step, part=name, peer=self._me, reason=reason[:400]))

    async def _send(self, peer: PeerId, part: PartName, step: int, wire: memoryview) -> None:
        around, within_s = self._run.around, self._run.round_deadline(part, False).seconds
        body = Residual(step=step)

        async def send() -> None:
            await around.endpoint.call(peer, HAND_OVER, body, timeout_s=within_s, payload=wire)

        await retry_while_busy(send, around.clock, within_s=within_s)


def _spec(part: TrainedPart) -> TensorSpec:
    return TensorSpec((part.layout.elements,), "float32")


def _encoded(part: TrainedPart, step: int) -> memoryview:
    residual = part.feedback.residual
    return INT8.encode(torch.zeros(0) if residual is None else residual, EncodeContext(step=step, direction="sum"))
