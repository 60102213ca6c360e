"""What a peer says of itself in the directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from peers.settings import member_settings
from swarm.errors import RunEnded
from swarm.events import NullSink
from swarm.ids import stage_part
from swarm.membership.announcer import Announcer, only_calls
from swarm.membership.part_memory import part_bytes
from swarm.membership.rules import spec_of
from swarm.membership.status import PeerStatus
from swarm.network.discovery.records import PeerRecord, numbers_in
from tests.harness.rigs.membership import FakeClock
from tests.harness.rigs.membership import manifest as manifest_of
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
    around = SimpleNamespace(endpoint=SimpleNamespace(addresses=addresses), clock=FakeClock(), credential=None)
    run = SimpleNamespace(settings=settings, around=around, directory=None, situation=PeerStatus(NullSink()))
    announcer = Announcer(cast(Any, run))
    assert (announcer.record().region, announcer.record().outgoing) == ("eu", outgoing)


async def test_stage_host_says_before_anything_else_which_stages_its_memory_does_not_hold() -> None:
    manifest = manifest_of(hosts=3, stages=3, ends="hosted")
    takes = {stage: sum(part_bytes(manifest, spec_of(manifest, stage_part(stage))).values()) for stage in range(3)}
    assert takes[1] < takes[0]

    def announcer_of(free: int, stage: int | None = None) -> tuple[Announcer, list[PeerRecord]]:
        announced: list[PeerRecord] = []

        async def announce(record: PeerRecord, *, ttl_s: float) -> None:
            announced.append(record)
            raise asyncio.CancelledError

        settings = member_settings(peer_settings(home=Path("h"), role="stage", stage=stage))
        cpu = torch.device("cpu")
        device = SimpleNamespace(torch_device=cpu, torch_devices=(cpu,), free_memory=lambda: free)
        around = SimpleNamespace(
            endpoint=SimpleNamespace(addresses=()),
            clock=FakeClock(),
            manifest=manifest,
            device=device,
            credential=None,
            home=None,
        )
        directory = SimpleNamespace(announce=announce)
        run = SimpleNamespace(settings=settings, around=around, directory=directory, situation=PeerStatus(NullSink()))
        return Announcer(cast(Any, run)), announced

    announcer, announced = announcer_of(takes[1])
    with pytest.raises(asyncio.CancelledError):
        await announcer.run()
    assert [numbers_in(record.unfit) for record in announced] == [(0, 2)]
    for stage, words in ((None, "no stage fits: training stage-0 takes"), (0, "training stage-0 takes")):
        announcer, announced = announcer_of(takes[1] - 1, stage)
        with pytest.raises(RunEnded, match=f"^{words}"):
            await announcer.run()
        assert announced == []
    announcer, announced = announcer_of(takes[0] + takes[2])
    with pytest.raises(asyncio.CancelledError):
        await announcer.run()
    assert "unfit" not in announced[0].model_dump()
