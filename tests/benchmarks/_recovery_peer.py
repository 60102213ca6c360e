"""A real peer on a simulated device, which also says whose turn it is: the entry of the processes of ``recovery``.

Everything else is what ``swarm join`` runs: network, daemon, real numbers of a model so small that they cost nothing.
On shared cores a dead replica would free its core for the others; here a microbatch occupies a device for as long as
:data:`STAGE_S` says, whoever else lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from peers.node import open_device, run_peer
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.events.base import Event
from swarm.ids import JourneyKey, MicrobatchId, PeerId
from swarm.pipeline.trainer import journey_state, journey_table
from swarm.pipeline.trainer.context import JourneyContext
from swarm.pipeline.trainer.journey import Journey
from swarm.pipeline.trainer.pace import Work
from swarm.pipeline.trainer.route import Receipt, RouteState
from swarm.pipeline.trainer.taken import IssuedMicrobatch
from swarm.sim.device import SimulatedDevice

STAGE_S = {"forward": 0.06, "backward": 0.12}


@dataclass(frozen=True, slots=True, kw_only=True)
class HopBegan(Event):
    """A trainer counts on a replica for a hop from now on: it was asked, or the hop before it was done."""

    step: int
    microbatch: MicrobatchId
    stage: int
    replica: PeerId
    work: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HopDone(Event):
    """A trainer knows that a replica did its hop; ``back`` when that was its contribution."""

    step: int
    microbatch: MicrobatchId
    stage: int
    replica: PeerId
    back: bool


def run(settings: PeerSettings) -> int:
    """See :func:`peers.node.run_peer`."""
    tell_turns()
    return run_peer(settings, simulated_device)


def simulated_device(settings: PeerSettings) -> SimulatedDevice:
    """The peer's own device, on which stages take their time."""
    return SimulatedDevice(open_device(settings), SystemClock(), STAGE_S)


def tell_turns() -> None:
    """Journeys of this process write :class:`HopBegan` and :class:`HopDone`."""
    mock.patch.object(journey_state, "RouteState", ToldWay).start()
    mock.patch.object(journey_table, "Journey", TellingJourney).start()


class ToldWay(RouteState):
    """The state of one journey, of whose turns ``tell`` hears."""

    key: JourneyKey
    tell: Callable[[Event], None]

    def begin_turn(self, at: int, now: float, seconds: float, work: Work) -> None:
        """See :class:`~swarm.pipeline.trainer.route.RouteState`."""
        super().begin_turn(at, now, seconds, work)
        step, microbatch, replica = self.key.step, self.key.microbatch, self.hops[at].replica
        self.tell(HopBegan(step=step, microbatch=microbatch, stage=at, replica=replica, work=work))

    def forwarded(self, at: int, peer: PeerId) -> bool:
        """See :class:`~swarm.pipeline.trainer.route.RouteState`."""
        before = self._done_by()
        news = super().forwarded(at, peer)
        self._tell_done(before)
        return news

    def contributed(self, at: int, peer: PeerId, receipt: Receipt) -> bool:
        """See :class:`~swarm.pipeline.trainer.route.RouteState`."""
        before = self._done_by()
        news = super().contributed(at, peer, receipt)
        self._tell_done(before)
        return news

    def _done_by(self) -> dict[tuple[int, bool], PeerId]:
        hops = list(enumerate(self.hops))
        out = {(at, False): hop.replica for at, hop in hops if hop.forwarded}
        return out | {(at, True): hop.replica for at, hop in hops if hop.contributed}

    def _tell_done(self, before: dict[tuple[int, bool], PeerId]) -> None:
        step, microbatch = self.key.step, self.key.microbatch
        for (at, back), replica in self._done_by().items():
            if before.get((at, back)) != replica:
                self.tell(HopDone(step=step, microbatch=microbatch, stage=at, replica=replica, back=back))


class TellingJourney(Journey):
    """Tells its way whose it is, and whom to tell."""

    def __init__(self, context: JourneyContext, kept: IssuedMicrobatch, *more: Any) -> None:
        super().__init__(context, kept, *more)
        way = self._state.way
        assert isinstance(way, ToldWay)
        way.key, way.tell = self.key, context.events.emit
