"""Our client of the daemon, as far as it needs none."""

from __future__ import annotations

import pytest

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.attach import peer_bytes


@pytest.mark.parametrize("peer", ["0", "000", "not base58"])
def test_attach_a_name_that_is_no_peer_id_is_unreachable(peer: str) -> None:
    """Routes and rosters name peers, and other peers write them."""
    with pytest.raises(Unreachable):
        peer_bytes(PeerId(peer))
