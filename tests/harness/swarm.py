"""A whole swarm in one process: the product's own, which ``swarm simulate`` plays, as the tests know it."""

from __future__ import annotations

from peers.simulate.local_swarm import TEXT as TEXT
from peers.simulate.local_swarm import VOCAB as VOCAB
from peers.simulate.local_swarm import LocalPeer as LocalPeer
from peers.simulate.local_swarm import LocalSwarm as LocalSwarm
from peers.simulate.local_swarm import OpenEndpoint as OpenEndpoint
from peers.simulate.local_swarm import _documents as _documents
from peers.simulate.local_swarm import small_manifest as small_manifest
