"""All that the stories take from the product and from the harness: this checkout's own names.

The base commit plays the same stories with its own copy of this file. Whoever moves or renames something corrects it
here; a name that is new here can be used by stories once the base has it, too.
"""

from __future__ import annotations

from data_shards.build import build_shard as build_shard
from peers.chaos import faults as faults
from peers.chaos.plan import FaultPlan as FaultPlan
from peers.chaos.plan import On as On
from peers.chaos.plan import Strike as Strike
from peers.simulate.sim_swarm import SimSwarm as SimSwarm
from swarm.averaging.config import StrategyName as StrategyName
from swarm.errors import Ending
from swarm.sim.links import Links as Links
from swarm.sim.loop import as_peer as as_peer
from swarm.sim.loop import run_world as run_world
from tests.harness.crashes import part_of
from tests.harness.faults_memory import MemoryWorld as MemoryWorld
from tests.harness.faults_messages import messages_told as messages_told
from tests.harness.swarm import LocalPeer, _documents

documents = _documents


def vectors_of(peer: LocalPeer) -> tuple[str, int, tuple[memoryview, ...]] | None:
    """What a peer trains: its part's name, the step it is at, and the bytes of weights and moments. None: nothing."""
    part = part_of(peer)
    if part is None or part._state is None:
        return None
    return part.spec.name, part.step, part.snapshot().buffers()


def leave(peer: LocalPeer) -> None:
    """Tell a member to leave in order."""
    assert peer.membership is not None
    peer.membership.leave("the story", Ending.DRAINED)
