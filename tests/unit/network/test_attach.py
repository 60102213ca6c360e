"""Our client of the daemon, as far as it needs none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from types import SimpleNamespace

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr

from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.network.libp2p.attach import AttachedP2P, DaemonClient, DaemonGone, _plain, peer_bytes


@pytest.mark.parametrize("peer", ["0", "000", "not base58"])
def test_attach_a_name_that_is_no_peer_id_is_unreachable(peer: str) -> None:
    """Routes and rosters name peers, and other peers write them."""
    with pytest.raises(Unreachable):
        peer_bytes(PeerId(peer))


PEER = "12D3KooW" + "A" * 38 + "KXSrAo"
DIALS = (
    f"failed to dial {PEER}: all dials failed "
    "* [/ip4/127.0.0.1/tcp/4001] dial to self attempted "
    "* [/ip4/10.1.2.3/tcp/4001] dial tcp4 0.0.0.0:4001->10.1.2.3:4001: i/o timeout "
    "* [/ip4/10.1.2.6/tcp/4001/p2p/x/p2p-circuit] error opening relay circuit: NO_RESERVATION (204) "
    "* [/ip4/10.1.2.4/tcp/4001] dial tcp4 10.1.2.4:4001: connect: connection refused "
    "* [/ip4/10.1.2.5/tcp/4001] dial tcp4 10.1.2.5:4001: connect: connection refused"
)


def test_of_dials_that_failed_each_reason_is_told_once() -> None:
    assert _plain(DIALS) == "i/o timeout; NO_RESERVATION (204) by a relay; connection refused"


def test_other_words_of_the_daemon_stay_as_they_are_with_short_ids() -> None:
    assert _plain(f"failed to dial: {PEER}:\n  gone") == "…KXSrAo: gone"


async def test_who_is_told_that_the_daemon_is_gone_begins_no_call_that_nobody_answers() -> None:
    loop = asyncio.get_running_loop()
    client = DaemonClient(HivemindMultiaddr("/unix/nowhere"))
    reading = loop.create_task(asyncio.sleep(60))
    pending: dict[int, asyncio.Future[None]] = {}
    client.control = SimpleNamespace(
        _read_task=reading, _write_task=None, _handler_tasks={}, _pending_calls=pending, close=lambda: None
    )

    async def store_at_one_after_the_other() -> int:
        for number in range(3):
            if not client.alive:
                return number
            pending[number] = loop.create_future()
            with contextlib.suppress(P2PDaemonError):
                await pending[number]
        return 3

    storing = loop.create_task(store_at_one_after_the_other())
    await asyncio.sleep(0)
    await client.end()
    assert await storing == 1
    assert reading.cancelled()


async def test_stream_for_which_we_have_no_file_descriptor_is_no_fault_of_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(path: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "open_unix_connection", full)
    p2p = AttachedP2P()
    p2p._client_listen_maddr = None  # asked for when it is collected
    with pytest.raises(DaemonGone, match="descriptor"):
        await p2p.open_stream(PeerId(PEER), "control")
