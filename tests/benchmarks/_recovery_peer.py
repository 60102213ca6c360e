"""A real peer on a simulated device, which also says whose turn it is: the entry of the processes of ``recovery``.

Everything else is what ``swarm join`` runs: network, daemon, real numbers of a model so small that they cost nothing.
On shared cores a dead replica would free its core for the others; here a microbatch occupies a device for as long as
:data:`STAGE_S` says, whoever else lives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from peers import node, roles
from peers.node import run_peer
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.device import DeviceThread
from swarm.event import Event
from swarm.ids import MicrobatchId, PeerId
from swarm.pipeline.compute import StageCompute
from swarm.pipeline.journey import Journey
from swarm.pipeline.pace import Work
from swarm.pipeline.repair import Repair
from swarm.sim.device import Paced, SimulatedDevice

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
    simulate_device()
    tell_turns()
    return run_peer(settings)


def simulate_device() -> None:
    """Stages built in this process from now on take their time."""
    devices: list[SimulatedDevice] = []

    def device(*args: Any, **more: Any) -> SimulatedDevice:
        devices.append(SimulatedDevice(DeviceThread(*args, **more), SystemClock()))
        return devices[-1]

    def compute(part: Any, *more: Any) -> StageCompute:
        return StageCompute(Paced(part, devices[-1], STAGE_S), *more)

    mock.patch.object(node, "DeviceThread", device).start()
    mock.patch.object(roles, "StageCompute", compute).start()


def tell_turns() -> None:
    """Journeys of this process write :class:`HopBegan` and :class:`HopDone`."""
    begin: Callable[..., float] = Repair._begin

    @functools.wraps(begin)
    def told_begin(repair: Repair, at: int, work: Work) -> float:
        step, microbatch = repair._place
        replica = repair.way.hops[at].replica
        began = HopBegan(step=step, microbatch=microbatch, stage=at, replica=replica, work=work)
        repair._context.events.emit(began)
        return begin(repair, at, work)

    mock.patch.object(Repair, "_begin", told_begin).start()
    for name in ("deliver_output", "deliver_report"):
        mock.patch.object(Journey, name, _told(getattr(Journey, name))).start()


def _told(deliver: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(deliver)
    def told(journey: Journey, *args: Any) -> None:
        before = _done(journey)
        deliver(journey, *args)
        key = journey.key
        for (at, back), replica in _done(journey).items():
            if before.get((at, back)) != replica:
                done = HopDone(step=key.step, microbatch=key.microbatch, stage=at, replica=replica, back=back)
                journey._context.events.emit(done)

    return told


def _done(journey: Journey) -> dict[tuple[int, bool], PeerId]:
    hops = list(enumerate(journey._way.hops))
    out = {(at, False): hop.replica for at, hop in hops if hop.forwarded}
    return out | {(at, True): hop.replica for at, hop in hops if hop.contributed}
