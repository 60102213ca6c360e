"""A real peer on a simulated device: the entry of the processes of ``recovery``.

Everything else is what ``swarm join`` runs: network, daemon, real numbers of a model so small that they cost nothing.
On shared cores a dead replica would free its core for the others; here a microbatch occupies a device for as long as
:data:`STAGE_S` says, no matter who else lives.
"""

from __future__ import annotations

from peers.node import open_device, run_peer
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.events import EventSink
from swarm.sim.device import SimulatedDevice

STAGE_S = {"forward": 0.06, "backward": 0.12}


def run(settings: PeerSettings) -> int:
    """See :func:`peers.node.run_peer`."""
    return run_peer(settings, simulated_device)


def simulated_device(settings: PeerSettings, events: EventSink) -> SimulatedDevice:
    """The peer's own device, on which stages take their time."""
    return SimulatedDevice(open_device(settings, events), SystemClock(), STAGE_S)
