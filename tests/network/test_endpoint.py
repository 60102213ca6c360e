"""What only the real network has: streams full of garbage, runs that must not meet, sockets in a directory. Daemons
that die: test_supervision.py."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from swarm.clock import SystemClock
from swarm.errors import BugError, ConfigError, PeerError, Refused, Unreachable, Violation
from swarm.ids import RunId
from swarm.network.addresses import parse_address
from swarm.network.discovery.manifest import ManifestService, fetch_manifest
from swarm.network.discovery.records import PeerRecord
from swarm.network.endpoint import PUBLIC_PROTOCOL, EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.rpc.bodies import pack_request
from swarm.network.rpc.framing import HEADER_BYTES, Kind, decode_header, encode_frame
from tests.harness.expect import LONG_S, eventually, wait_until
from tests.harness.mortal_peer import RUN
from tests.harness.processes import children_of
from tests.harness.rigs.network import ECHO, HANG_UPLOAD, UP, Note, ServiceBench
from tests.harness.supervised import endpoint_of as opened

pytestmark = pytest.mark.network

OTHER_RUN = RunId("2c" * 32)
MIB = 1 << 20


def echo(
    source: LibP2PEndpoint, target: LibP2PEndpoint, timeout_s: float = LONG_S
) -> asyncio.Future[tuple[Note, memoryview]]:
    return asyncio.ensure_future(source.call(target.peer, ECHO, Note(number=1), timeout_s=timeout_s))


async def test_endpoint_opened_and_closed_leaves_nothing(home: Path) -> None:
    async with opened(home, "a") as endpoint:
        assert stat.S_IMODE((home / "a.key").stat().st_mode) == 0o600
        assert stat.S_IMODE((home / "a").stat().st_mode) == 0o700
        assert {each.name for each in (home / "a").iterdir()} == {"endpoint.lock", "p2pd.sock", "client.sock"}
        assert endpoint.addresses[0].endswith(f"/p2p/{endpoint.peer}")
    assert list((home / "a").iterdir()) == []
    assert not children_of(os.getpid())


async def test_endpoint_in_a_directory_with_a_long_path_uses_a_short_one(home: Path, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    config = EndpointConfig(run_dir=long)
    endpoint = await LibP2PEndpoint.open(config, load_or_create(home / "a.key"), SystemClock())
    short = endpoint._daemon.files.control.parent
    assert short != long
    assert stat.S_IMODE(short.stat().st_mode) == 0o700
    await endpoint.close()
    assert not short.exists()


async def test_endpoint_in_a_directory_that_is_in_use_is_refused(home: Path) -> None:
    async with opened(home, "a") as first:
        with pytest.raises(ConfigError, match="no other running peer"):
            await LibP2PEndpoint.open(EndpointConfig(run_dir=home / "a"), load_or_create(home / "b.key"), SystemClock())
        answer = echo(first, first)
        first.mount(ServiceBench())
        assert (await answer)[0].number == 1


async def test_endpoint_that_cannot_listen_says_what_the_daemon_said(home: Path) -> None:
    listen = [parse_address("/ip4/203.0.113.1/tcp/4001", use="listen")]
    config = EndpointConfig(run_dir=home / "a", listen=listen)
    with pytest.raises(Unreachable, match="p2pd ended with exit code 1"):
        await LibP2PEndpoint.open(config, load_or_create(home / "a.key"), SystemClock())
    assert list((home / "a").iterdir()) == []


async def test_endpoint_whose_bootstrap_is_dead_cannot_enter(home: Path) -> None:
    async with opened(home, "a", run=None) as first:
        dead = parse_address(first.addresses[0])
    config = EndpointConfig(run_dir=home / "b", bootstrap=[dead], dial_timeout_s=2)
    with pytest.raises(Unreachable, match="bootstrap"):
        await _enter_and_close(config, home / "b.key")


async def _enter_and_close(config: EndpointConfig, key: Path) -> None:
    endpoint = await LibP2PEndpoint.open(config, load_or_create(key), SystemClock())
    try:
        await endpoint.enter(RUN)
    finally:
        await endpoint.close()


PARENT = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from swarm.clock import SystemClock
    from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
    from swarm.network.libp2p.identity import load_or_create

    async def main():
        home = Path(sys.argv[1])
        config = EndpointConfig(run_dir=home / sys.argv[2])
        endpoint = await LibP2PEndpoint.open(config, load_or_create(home / "k"), SystemClock())
        print(endpoint.daemon_pid, flush=True)
        await endpoint.wait_daemon()

    asyncio.run(main())
    """
)


def test_daemon_dies_with_a_parent_that_is_killed(home: Path) -> None:
    long = "x" * 100
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(home), long], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        daemon = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not _running(daemon))
    left = [path for path in Path(os.environ["TMPDIR"]).glob(f"swarm-{os.geteuid()}-{parent.pid}-*")]
    assert left, "the killed process used a short directory"
    asyncio.run(_open_and_close(home, long))
    assert not any(path.exists() for path in left), "the next start sweeps it"


async def _open_and_close(home: Path, name: str) -> None:
    config = EndpointConfig(run_dir=home / name)
    endpoint = await LibP2PEndpoint.open(config, load_or_create(home / "k"), SystemClock())
    await endpoint.close()


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_peer_of_another_run_cannot_call(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice, run=OTHER_RUN) as bob:
        alice.mount(ServiceBench())
        bob.learn(alice.peer, alice.addresses)
        with pytest.raises(Unreachable, match="protocol"):
            await echo(bob, alice)
        record = PeerRecord(role="trainer", name="b", incarnation=1, status="ready", step=0)
        await bob.directory.announce(record, ttl_s=10)
        assert bob.peer not in await alice.directory.lookup(PeerRecord)


async def test_newcomer_fetches_the_manifest_before_it_enters(home: Path) -> None:
    tokenizer = os.urandom(3 * MIB)
    manifest = json.dumps({"tokenizer": {"digest": hashlib.sha256(tokenizer).hexdigest()}}).encode()
    files = {"tokenizer.json": tokenizer}
    run = RunId(hashlib.sha256(manifest).hexdigest())
    async with opened(home, "a", run=run) as host, opened(home, "b", host, run=None) as newcomer:
        host.mount(ManifestService(manifest, files))
        host.mount(ServiceBench())
        assert await fetch_manifest(newcomer, host.peer, run) == (manifest, files)
        assert await fetch_manifest(newcomer, host.peer) == (manifest, files)
        with pytest.raises(Refused, match="peer of run"):
            await fetch_manifest(newcomer, host.peer, OTHER_RUN)
        with pytest.raises(BugError, match="before the endpoint entered"):
            await echo(newcomer, host)
        stream = await newcomer._outgoing.stream(host.peer, PUBLIC_PROTOCOL)
        deadline = asyncio.get_running_loop().time() + LONG_S
        with pytest.raises(Refused, match="no method"):
            await stream.call(ECHO, Note(), deadline=deadline)


async def test_manifest_with_a_wrong_tokenizer_is_a_violation(home: Path) -> None:
    async with opened(home, "a", run=None) as host:
        host.mount(ManifestService(json.dumps({"tokenizer": {"digest": "0" * 64}}).encode(), {"tokenizer.json": b"x"}))
        with pytest.raises(Violation, match="tokenizer"):
            await fetch_manifest(host, host.peer)


async def test_stream_refused_is_closed_though_its_caller_goes_on(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        reader, writer = await bob._daemon.p2p.open_stream(alice.peer, f"swarm/control/1/{RUN[:32]}")
        writer.write(bytes(HEADER_BYTES))
        await asyncio.wait_for(reader.read(-1), LONG_S)
        await eventually(lambda: not alice._incoming.open)
        writer.close()


GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: swarm\r\n\r\n" + bytes(HEADER_BYTES),
    b"\xff" * 4096,
    encode_frame(Kind.REPLY, 1, b"\x80"),
    encode_frame(Kind.CANCEL, 7),
    encode_frame(Kind.CHUNK, 3, b"abc"),
    encode_frame(Kind.REQUEST, 1, b"\xc1"),
    encode_frame(Kind.REQUEST, 0, b"\xc0"),
    encode_frame(Kind.REQUEST, 1, b"\x91" * 3000),
    encode_frame(Kind.REQUEST, 1, b"\x91" * 3000, head=pack_request(ECHO.name, 5, 0, Note())[0]),
)


async def test_stream_full_of_garbage_is_told_why_and_closed(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        alice.mount(ServiceBench())
        for garbage in GARBAGE:
            reader, writer = await bob._daemon.p2p.open_stream(alice.peer, f"swarm/tensors/1/{RUN[:32]}")
            writer.write(garbage + bytes(3 * MIB))  # much more than it reads before it refuses
            header = decode_header(await asyncio.wait_for(reader.readexactly(HEADER_BYTES), LONG_S))
            told = await asyncio.wait_for(reader.readexactly(header.content_bytes), LONG_S)
            writer.close()
            assert header.kind is Kind.ERROR, garbage[:40]
            assert b"violation" in told, garbage[:40]
            assert (await echo(bob, alice))[0].number == 1


async def test_stream_half_written_is_forgotten_at_its_end(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        bench = ServiceBench()
        alice.mount(bench)
        payload = bytes(MIB)
        asking = asyncio.ensure_future(
            bob.call(alice.peer, HANG_UPLOAD, Note(number=MIB), timeout_s=LONG_S, payload=payload)
        )
        await asyncio.wait_for(bench.started.wait(), LONG_S)
        for caller in bob._outgoing._callers.values():
            caller.close("the test closes it")
        with pytest.raises(Unreachable):
            await asking
        await asyncio.wait_for(bench.cancelled.wait(), LONG_S)
        await eventually(lambda: not alice._incoming.open)
        assert not alice._dispatcher._usage


async def test_large_upload_does_not_delay_small_ones(home: Path) -> None:
    async with opened(home, "a") as alice, opened(home, "b", alice) as bob:
        bench = ServiceBench()
        bob.mount(bench)
        big = bytes(192 * MIB)
        large = asyncio.ensure_future(alice.call(bob.peer, UP, Note(number=len(big)), timeout_s=LONG_S, payload=big))
        await eventually(lambda: bench.admitted)
        for _ in range(5):
            small, _ = await alice.call(bob.peer, UP, Note(number=9), timeout_s=LONG_S, payload=b"123456789")
            assert small.number == 9
            await echo(alice, bob)
        assert not large.done()
        assert (await large)[0].number == len(big)


async def test_learned_addresses_of_others_are_ignored(home: Path) -> None:
    async with opened(home, "a", run=None) as alice:
        stranger = load_or_create(home / "s.key").peer
        alice.learn(stranger, ["", "nonsense", "/ip4/1.2.3.4/tcp/1", alice.addresses[0], "/ip4/999.1.1.1/tcp/1"])
        assert alice._hints.of(stranger) == ()
        alice.learn(stranger, ["nonsense", f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}"])
        assert [str(each) for each in alice._hints.of(stranger)] == ["/ip4/127.0.0.1/tcp/1"]


async def test_peer_restarted_with_its_identity_is_reached_again(home: Path) -> None:
    async with opened(home, "a") as alice:
        for number in (1, 2):
            async with opened(home, "b", alice) as bob:
                bob.mount(ServiceBench())
                alice.learn(bob.peer, bob.addresses)
                assert (await echo(alice, bob))[0].number == 1, number
        with pytest.raises(PeerError):
            await echo(alice, bob, timeout_s=1)
