"""A peer that joins a run in progress: it observes, catches up, and asks to be a member. The other side of
``swarm.optimization.observing``.

What is believed: the contact (the peer whose invite was followed) about which record is the newest, or when it has
left, more than half of a roster that was verified before; and nobody about anything else. The state is verified against
that record, every later record against the one before it and the signatures of its whole roster, every update by the
digest that its record names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from swarm.device import DeviceThread
from swarm.errors import DeadlineMissed, OutOfSync, Refused, StateError, Unreachable, Violation
from swarm.ids import PartName, PeerId, RunId
from swarm.network.protocols import Endpoint
from swarm.optimization.changes import Verify
from swarm.optimization.observing import (
    HASH,
    NEXT,
    STANDING,
    START,
    Decided,
    HashRequest,
    NextRequest,
    RecordHash,
    RunStanding,
    StandingRequest,
    StartRequest,
)
from swarm.optimization.part import TrainedPart
from swarm.optimization.records import CloseRecord, Decision, acceptance_bytes, check_acceptances

PATIENCE_S = 30.0
"""How long one question may take. A step may take longer: then it is asked again. So may the update of a large part
over a thin link: then it is given twice the time."""
ALIVE_S = 10.0
"""How long a donor that did not answer a question may take for the simplest one."""

Observe = Callable[[Decision], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverContext:
    """``observe`` is told of every verified decision, when our part is brought to it (``Member.observe``)."""

    run: RunId
    endpoint: Endpoint
    device: DeviceThread
    verify: Verify
    observe: Observe


class Observer:
    """Follows one run with the help of one donor. ``part`` is None for a peer that will hold nothing."""

    def __init__(self, context: ObserverContext, donor: PeerId, name: PartName | None) -> None:
        self._context, self.donor, self._name = context, donor, name
        self._part: TrainedPart | None = None
        self._head: CloseRecord | None = None
        self._patience_s = PATIENCE_S

    @property
    def head(self) -> CloseRecord:
        """The newest verified record. Raises OutOfSync before :meth:`start`."""
        if self._head is None:
            raise OutOfSync("nothing was observed yet")
        return self._head

    async def start(self, contact: PeerId, known: CloseRecord | None = None) -> Decision:
        """Be taken by the donor, which pins its state for us; returns the decision that vouches for that state.

        ``known`` is a record that was verified before: its members vouch when the contact has gone. Raises a PeerError
        of the donor, or the contact's when nobody else vouches; Violation when they tell different histories.
        """
        call = self._context.endpoint.call
        decided, _ = await call(self.donor, START, StartRequest(part=self._name), Decided, timeout_s=PATIENCE_S)
        if decided.record.run != self._context.run:
            raise Violation("a record of another run", peer=self.donor)
        if contact != self.donor:
            await self._confirm(contact, known, decided)
        self._head = decided.record
        return decided.decision()

    async def _confirm(self, contact: PeerId, known: CloseRecord | None, decided: Decided) -> None:
        record, asked = decided.record, HashRequest(step=decided.record.step)
        try:
            theirs, _ = await self._context.endpoint.call(contact, HASH, asked, RecordHash, timeout_s=PATIENCE_S)
        except (Unreachable, DeadlineMissed):
            if known is None or not self._vouched(known, decided):
                raise
            return
        if theirs.digest != record.hash():
            raise Violation(f"another record of step {record.step} than {contact} has", peer=self.donor)

    def _vouched(self, known: CloseRecord, decided: Decided) -> bool:
        """Whether more than half of a roster that we trust signed the record; or it is that very record."""
        if decided.record.hash() == known.hash():
            return True
        signed, electorate = acceptance_bytes(decided.record), known.members.peers
        signatures = (self._context.verify(p, signed, decided.acceptances.get(p, b"")) for p in electorate)
        return decided.record.step > known.step and 2 * sum(signatures) > len(electorate)

    async def begin(self, decision: Decision, part: TrainedPart | None) -> None:
        """``part`` holds the state that ``decision`` vouches for: follow from here."""
        self._part = part
        await self._context.observe(decision)

    def resume(self, part: TrainedPart | None) -> None:
        """``part`` is at the donor's record already, which was observed with the help of another: follow from here."""
        self._part = part

    async def follow(self) -> CloseRecord:
        """Take the next step's decision, waiting for it as long as it takes, and bring our part to it.

        Raises the donor's PeerError (WrongStep: we fell too far behind, start again; DeadlineMissed: it fell silent),
        Violation for a record that does not follow or an update of the wrong size, StateError when the update does not
        give what the record says.
        Cancelled, our part is at the step before or after, never between.
        """
        before = self.head
        decided, payload = await self._next(before.step + 1)
        record = decided.record
        if (record.run, record.step, record.previous) != (before.run, before.step + 1, before.hash()):
            raise Violation(f"a record that does not follow that of step {before.step}", peer=self.donor)
        try:
            check_acceptances(record, before.members, decided.acceptances, self._context.verify)
        except Refused as refused:
            raise Violation(refused.reason, peer=self.donor) from refused
        if self._part is not None:
            await self._context.device.run(self._update, self._part, record, payload)
        self._head = record
        await self._context.observe(decided.decision())
        return record

    async def _next(self, step: int) -> tuple[Decided, memoryview]:
        expected = 0 if self._part is None else 4 * self._part.layout.elements
        body = NextRequest(part=self._name, step=step)
        while True:
            try:
                decided, payload = await self._context.endpoint.call(
                    self.donor, NEXT, body, Decided, timeout_s=self._patience_s, max_reply_bytes=expected
                )
            except DeadlineMissed:
                await self._check_alive(step)
                continue
            if len(payload) != expected:
                raise Violation(f"an update of {len(payload)} bytes instead of {expected}", peer=self.donor)
            return decided, payload

    async def _check_alive(self, step: int) -> None:
        """After a question without an answer: the step is still open, or its update needs more time. Raises
        DeadlineMissed for a donor that has fallen silent."""
        call = self._context.endpoint.call
        standing, _ = await call(self.donor, STANDING, StandingRequest(), RunStanding, timeout_s=ALIVE_S)
        if standing.closed is not None and standing.closed >= step:
            self._patience_s *= 2

    def _update(self, part: TrainedPart, record: CloseRecord, payload: memoryview) -> None:
        """On the device thread."""
        mean = torch.frombuffer(payload, dtype=torch.float32)
        if not bool(torch.isfinite(mean).all()):
            raise Violation("an update that is not finite", peer=self.donor)
        found = part.prepare(mean, lr=record.lr, clip=record.clip, step=record.step)
        if found != record.digests.get(part.spec.name):
            part.discard()
            raise StateError(
                f"the update of {part.spec.name} for step {record.step} from {self.donor} gives digest {found[:12]}…, "
                f"which the record does not name: it was not applied"
            )
        part.swap()
