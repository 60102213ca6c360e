"""What a peer says of itself in the directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.settings import member_settings
from swarm.events import NullSink
from swarm.membership.announcer import Announcer, only_calls
from swarm.membership.status import PeerStatus
from tests.harness.rigs.membership import FakeClock
from tests.harness.settings import peer_settings

OWN = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"
RELAYED = f"{OWN}/p2p-circuit/p2p/12D3KooWLbT7iWNTNKLbPXXdHbmWBVPvnxhVFBTj4yMJSJ1Hkv01"


@pytest.mark.parametrize(
    ("addresses", "dial_out_only", "outgoing"),
    [((OWN,), False, False), ((OWN,), True, True), ((RELAYED, OWN), False, True), ((), False, False)],
)
def test_peer_only_calls_when_it_says_so_or_is_reached_through_a_relay(
    addresses: tuple[str, ...], dial_out_only: bool, outgoing: bool
) -> None:
    settings = member_settings(peer_settings(home=Path("h"), role="stage", region="eu", dial_out_only=dial_out_only))
    assert only_calls(settings, addresses) is outgoing
    around = SimpleNamespace(endpoint=SimpleNamespace(addresses=addresses), clock=FakeClock())
    run = SimpleNamespace(settings=settings, around=around, directory=None, situation=PeerStatus(NullSink()))
    announcer = Announcer(cast(Any, run))
    assert (announcer.record().region, announcer.record().outgoing) == ("eu", outgoing)
