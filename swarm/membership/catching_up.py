"""Say when this peer is ready for a close, and catch up with one that was made without it, because it was late.

It is a member as before. It needs the mean with which the step closed, and no more: one update, as copies get them,
from a replica that was in the averaging and keeps it for who was late (``swarm.membership.observer_service``). What
this peer learnt stays in its weights and is averaged with its next contribution (``swarm.step.lateness``). Until then
it has not closed the step, and trainers take other replicas. Where nobody has the update any more it is cut off, and
comes back as others do.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.consensus.copies import copy_holders
from swarm.consensus.records import CloseRecord
from swarm.device import Device
from swarm.errors import Busy, PeerError, StateError, Violation
from swarm.events import CaughtUp
from swarm.ids import PeerId
from swarm.membership.holding import RoleManager
from swarm.membership.observer import prepare_update, update_bytes, update_in
from swarm.membership.run import RunContext
from swarm.network.protocols import AnyMethod
from swarm.optim.local_part import LocalPart
from swarm.step.member.member_service import MemberService
from swarm.step.member.open_step import Mean, OpenStep
from swarm.step.messages import ARRIVE, Apply, Arrive, Arrived, Averaged
from swarm.step.observe_messages import NEXT, NextRequest
from swarm.step.turnout import REASON_CHARS
from swarm.waiting import ExponentialBackoff

logger = logging.getLogger(__name__)

TURNS = 6
"""How often those who may have the update are asked: they may just be closing the step themselves."""


@dataclass(frozen=True, slots=True)
class ArrivalService:
    """Answers a step's leader that asks who is ready."""

    member: MemberService
    device: Device
    holding: RoleManager

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [ARRIVE.handled(self._on_arrive)]

    async def _on_arrive(self, caller: PeerId, body: Arrive) -> Arrived:
        """Return what has come is in the weights as soon as the device has done it: where replicas train apart nothing
        is reversed or replayed for a close."""
        try:
            await self.member.from_leader(caller, body.step, body.term, votes_only=False)
        except Busy:
            if not (reason := self.member.position.cut_off):
                raise
            return Arrived(cut_off=reason[:REASON_CHARS])
        await self.device.run(int)
        part = self.holding.part
        return Arrived(since=part.since if isinstance(part, LocalPart) else 0)


class CatchingUp:
    """That of one peer with what it holds."""

    def __init__(self, run: RunContext, holding: RoleManager) -> None:
        self._run, self._around, self._holding = run, run.around, holding

    async def prepare(self, state: OpenStep, record: CloseRecord) -> None:
        """Prepare the result of a decided record that calls this peer late, to be swapped to. Returns with nothing
        prepared where it does not, or nobody brings the update. Cancelled, it has changed nothing."""
        part, me = self._holding.part, self._around.endpoint.peer
        if me not in record.late or not isinstance(part, LocalPart):
            return
        await state.stop_averaging()
        state.averaging = state.applied = state.digest = None
        began, patience = self._around.clock.monotonic(), ExponentialBackoff(0.1)
        for _ in range(TURNS):
            for donor in self._donors(part, record):
                try:
                    mean = await self._fetch(donor, part, record)
                    digest = await self._around.device.run(prepare_update, part, record, mean, donor, part.prepare_late)
                except (PeerError, StateError) as error:
                    logger.info("step %d, %s does not bring the update: %s", record.step, donor, error)
                    continue
                norms = {str(part): norm for part, norm in record.norms.items()}
                state.applied = Apply(
                    step=record.step, term=record.term, lr=record.lr, clip=record.clip, sq_norms=norms
                )
                state.digest = digest
                state.averaging = asyncio.create_task(_given(mean))  # we serve others with it, as who was in the round
                await state.wait_mean()
                seconds = self._around.clock.monotonic() - began
                size = mean.numel() * mean.element_size()
                self._around.events.emit(
                    CaughtUp(step=record.step, part=part.spec.name, bytes_received=size, seconds=seconds)
                )
                return
            await self._around.clock.sleep(patience.pause_s())

    def _donors(self, part: LocalPart, record: CloseRecord) -> Sequence[PeerId]:
        """Return who was in the averaging, in an order of our own, for several may be late at once; then who keeps a
        copy."""
        gone, me = self._around.watch.gone, self._around.endpoint.peer
        outside = {*record.late, *record.absent, *gone}
        roster, name = self._run.position.roster, part.spec.name
        donors = [peer for peer in roster.replicas(name) if peer not in outside]
        random.Random(f"{me}|{record.step}").shuffle(donors)
        copies = copy_holders(record.members, name, self._around.manifest.run.copies)
        return [*donors, *(peer for peer in copies if peer not in outside)]

    async def _fetch(self, donor: PeerId, part: LocalPart, record: CloseRecord) -> torch.Tensor:
        """Return the mean of the step, float32 on CPU. Raises PeerError."""
        size, body = update_bytes(part, record.step), NextRequest(part=part.spec.name, step=record.step)
        timeout_s = self._run.round_deadline(part.spec.name, False).seconds
        decided, payload = await self._around.endpoint.call(
            donor, NEXT, body, timeout_s=timeout_s, max_reply_bytes=size
        )
        if decided.record.hash() != record.hash():
            raise Violation(f"an update of another record of step {record.step}", peer=donor)
        return update_in(payload, size, donor)


async def _given(mean: torch.Tensor) -> Mean:
    return Mean(mean, Averaged(digest="", sq_norm=0.0, cursor=None))
