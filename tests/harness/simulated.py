"""A whole swarm in a virtual world: the product's own, which ``swarm simulate`` plays, as the tests know it."""

from __future__ import annotations

from peers.simulate.sim_swarm import SimSwarm as SimSwarm
from swarm.sim.loop import SimLoop as SimLoop
