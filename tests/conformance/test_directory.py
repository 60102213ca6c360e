"""Announcing and finding, and what hostile peers try, in both worlds."""

from __future__ import annotations

import pytest

from swarm.errors import BugError
from swarm.network.discovery.records import MAX_TTL_S, PeerRecord, encode_record
from swarm.network.rpc.bodies import pack
from tests.harness.rigs.network import Peer, World

pytestmark = pytest.mark.asyncio(loop_scope="module")


def record(step: int = 0, name: str = "alice") -> PeerRecord:
    return PeerRecord(role="stage", name=name, stage=1, part="stage-1", incarnation=1, status="ready", step=step)


async def test_announced_record_is_found_by_everybody(alice: Peer, bob: Peer) -> None:
    await alice.directory.announce(record(), ttl_s=30)
    await bob.directory.announce(record(name="bob"), ttl_s=30)
    for peer in (alice, bob):
        found = await peer.directory.lookup(PeerRecord)
        assert found[alice.endpoint.peer] == record()
        assert found[bob.endpoint.peer] == record(name="bob")


@pytest.mark.parametrize("ttl_s", [90, 30, 1])
async def test_announced_again_replaces_the_record_whatever_its_lifetime(ttl_s: float, alice: Peer, bob: Peer) -> None:
    await alice.directory.announce(record(step=int(ttl_s)), ttl_s=ttl_s)
    assert (await bob.directory.lookup(PeerRecord))[alice.endpoint.peer].step == int(ttl_s)


async def test_announced_for_too_long_is_our_own_bug(alice: Peer) -> None:
    with pytest.raises(BugError, match="ttl_s"):
        await alice.directory.announce(record(), ttl_s=MAX_TTL_S + 1)


async def test_record_past_its_lifetime_is_not_found(world: World, alice: Peer, bob: Peer) -> None:
    await alice.directory.announce(record(), ttl_s=60)
    assert alice.endpoint.peer in await bob.directory.lookup(PeerRecord)
    world.clock.shift_s = MAX_TTL_S + 1
    try:
        assert alice.endpoint.peer not in await bob.directory.lookup(PeerRecord)
    finally:
        world.clock.shift_s = 0.0


async def test_record_announced_after_the_clock_was_set_back_replaces_the_one_before(
    world: World, alice: Peer, bob: Peer
) -> None:
    world.clock.shift_s = 300.0
    try:
        await alice.directory.announce(record(step=1), ttl_s=30)
    finally:
        world.clock.shift_s = 0.0
    await alice.directory.announce(record(step=2), ttl_s=30)
    assert (await bob.directory.lookup(PeerRecord))[alice.endpoint.peer].step == 2


async def test_record_of_a_stranger_is_taken_when_it_is_right(world: World, alice: Peer, bob: Peer) -> None:
    assert await world.plant(bob, None, world.clock.wall() + 30, encode_record(record(name="stranger")))
    found = await alice.directory.lookup(PeerRecord)
    assert "stranger" in {each.name for each in found.values()}


async def test_record_with_a_forged_signature_is_refused(world: World, bob: Peer) -> None:
    assert not await world.plant(bob, None, world.clock.wall() + 30, encode_record(record()), forged=True)


async def test_record_under_another_peers_name_is_refused(world: World, alice: Peer, bob: Peer) -> None:
    await alice.directory.announce(record(step=5), ttl_s=30)
    expiry = world.clock.wall() + 100
    assert not await world.plant(bob, alice.endpoint.peer, expiry, encode_record(record(step=6)))
    assert (await bob.directory.lookup(PeerRecord))[alice.endpoint.peer].step == 5


@pytest.mark.parametrize("lifetime_s", [MAX_TTL_S + 60, 1e9, float("inf"), float("nan"), -60.0])
async def test_record_with_an_impossible_lifetime_is_refused(lifetime_s: float, world: World, bob: Peer) -> None:
    assert not await world.plant(bob, None, world.clock.wall() + lifetime_s, encode_record(record()))


@pytest.mark.parametrize(
    "changed",
    [
        {"stage": 100_000},
        {"status": "immortal"},
        {"step": -1},
        {"step": 2**60},
        {"addresses": ["/ip4/1.2.3.4/tcp/1"] * 9},
        {"addresses": ["x" * 10_000]},
        {"name": "\n"},
        {"extra": 1},
        {"wire": 1},
        {"wire": 3},
    ],
)
async def test_record_out_of_range_is_refused(changed: dict[str, object], world: World, bob: Peer) -> None:
    body = pack(record().to_wire() | changed)
    assert not await world.plant(bob, None, world.clock.wall() + 30, body)


async def test_record_that_is_no_record_is_refused(world: World, bob: Peer) -> None:
    for body in (b"", b"\xc1", b"\x91" * 500, pack(1)):
        assert not await world.plant(bob, None, world.clock.wall() + 30, body)
