"""A replica takes over what another has rounded off: from who left its part, once, and of the right length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.compression.blockwise import INT8
from swarm.compression.codec import EncodeContext
from swarm.consensus.roster import Member, Roster
from swarm.errors import Busy, PeerError, Refused, Unreachable, Violation
from swarm.events import ResidualHandedOver, ResidualLost
from swarm.ids import PeerId
from swarm.membership.handover import HAND_OVER, Residual, ResidualHandover
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Incoming
from tests.harness.rigs.clocks import FakeClock
from tests.harness.rigs.common import EventList, InlineDevice
from tests.unit.optim.test_feedback import close, vector
from tests.unit.optim.test_part import parts

ME, LEFT, THIRD, OTHER = map(PeerId, ("A2me", "A1gone", "A3third", "A4other"))
STEP = 1


def roster(*peers: PeerId) -> Roster:
    held = {peer: "stage-1" if peer == OTHER else "stage-0" for peer in peers}
    return Roster(tuple(Member(peer=peer, role="stage", name=peer, part=held[peer], addresses=()) for peer in peers))


class Others:
    """The network: how each answers, and what it was sent."""

    peer = ME

    def __init__(self) -> None:
        self.answers: dict[PeerId, PeerError] = {}
        self.sent: list[tuple[PeerId, Any, memoryview]] = []

    async def call(self, peer: PeerId, rpc: Any, body: Any, *, timeout_s: float, payload: memoryview) -> None:
        assert rpc is HAND_OVER
        self.sent.append((peer, body, payload))
        if peer in self.answers:
            raise self.answers[peer]


class Home:
    """A replica of stage-0 in step 1, in which it has averaged."""

    def __init__(self) -> None:
        self.part = parts()[0]
        self.holding = SimpleNamespace(part=self.part)
        self.position = SimpleNamespace(open_step=STEP, cut_off="", head=None)
        self.others, self.events = Others(), EventList()
        around = SimpleNamespace(endpoint=self.others, device=InlineDevice(), events=self.events, clock=FakeClock())
        run = SimpleNamespace(
            around=around, position=self.position, round_deadline=lambda part, plainly: SimpleNamespace(seconds=9.0)
        )
        self.handover = ResidualHandover(cast(Any, run), cast(Any, self.holding))
        self.opened(STEP - 1, roster(LEFT, ME, THIRD, OTHER))
        close(self.part, vector(self.part, 2.0))

    def opened(self, step: int, members: Roster, absent: tuple[PeerId, ...] = ()) -> None:
        self.position.head = SimpleNamespace(step=step, members=members, absent=absent)
        self.position.open_step = step + 1
        self.handover.opened(cast(Any, self.position.head))

    async def take(self, caller: PeerId, values: torch.Tensor) -> None:
        payload = memoryview(bytearray(INT8.encode(values, EncodeContext(step=STEP, direction="sum"))))
        (method,) = self.handover.methods()
        assert method.admit is not None
        method.admit(caller, Residual(step=STEP), len(payload))
        await method.handle(caller, Residual(step=STEP), Incoming(payload, 9.0))


async def test_what_a_replica_that_left_hands_over_is_added_once() -> None:
    home = Home()
    home.opened(STEP, roster(ME, THIRD, OTHER))
    await home.take(LEFT, vector(home.part, 1.0))
    with pytest.raises(Refused, match="has handed it over"):
        await home.take(LEFT, vector(home.part, 1.0))
    close(home.part, vector(home.part, 0.0))
    assert home.part.feedback.residual is not None
    assert torch.allclose(home.part.feedback.residual, vector(home.part, 1.0))


async def test_nothing_is_taken_of_anybody_else() -> None:
    home = Home()
    with pytest.raises(Busy):
        await home.take(LEFT, vector(home.part, 1.0))
    home.opened(STEP, roster(ME), absent=(THIRD,))
    for stranger in (THIRD, OTHER, ME, PeerId("stranger")):
        with pytest.raises(Refused):
            await home.take(stranger, vector(home.part, 1.0))
    with pytest.raises(Violation, match="bytes"):
        await home.take(LEFT, torch.ones(7))
    with pytest.raises(Refused, match="norm"):
        await home.take(LEFT, vector(home.part, 1e3))


async def test_it_is_given_to_the_first_that_takes_it_and_to_nobody_twice() -> None:
    home = Home()
    home.opened(STEP, roster(LEFT, THIRD, OTHER))
    home.handover._members = roster(LEFT, ME, THIRD, OTHER)  # a record that lets this peer go opens no step here
    home.others.answers[LEFT] = Refused("it has averaged no step yet")
    await home.handover.give()
    assert [peer for peer, _, _ in home.others.sent] == [LEFT, THIRD]
    assert [event.to for event in home.events.of(ResidualHandedOver)] == [THIRD]
    spec = TensorSpec((home.part.layout.elements,), "float32")
    assert torch.allclose(INT8.decode(home.others.sent[1][2], spec), vector(home.part, 2.0))

    home.others.sent.clear()
    home.others.answers = {LEFT: Unreachable("the line is dead")}
    await home.handover.give()
    assert [peer for peer, _, _ in home.others.sent] == [LEFT], "it may have taken it"
    (lost,) = home.events.of(ResidualLost)
    assert (lost.peer, lost.part) == (ME, "stage-0")
    assert "the line is dead" in lost.reason
