"""The product's world of processes, for tests that start peers by their arguments and look at each start."""

from __future__ import annotations

from peers.chaos.process_world import ProcessWorld
from peers.chaos.world import PeerSpec, Role
from tests.harness.by_hand import Started


def started(world: ProcessWorld, name: str, *arguments: str) -> Started:
    """Start ``swarm ARGUMENTS`` as this peer; the start, to wait for what it says."""
    role: Role = "bootstrap" if arguments[0] == "new" else "trainer" if "--data" in arguments else "stage"
    world.start(PeerSpec(name=name, role=role, arguments=arguments))
    return newest(world, name)


def newest(world: ProcessWorld, name: str) -> Started:
    """The newest start of a peer."""
    one = world.peers[name].starts[-1]
    return Started(one.process, one.output)
