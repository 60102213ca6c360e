"""The checks of ``swarm doctor`` that take seconds, with contacts that hang, vanish or know little."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.doctor.contacts import AddressProbe, judge_contacts, probe_addresses
from peers.doctor.machine import DoctorWishes, look
from peers.doctor.results import CheckResult, DoctorReport
from peers.doctor.slow import SlowChecks
from peers.invites.invite import Contacts
from peers.plan.work import averaged_bytes
from swarm.clock import SystemClock
from swarm.config import parse_manifest
from swarm.errors import Incompatible, Unreachable
from swarm.network.addresses import GREETING
from swarm.network.reach.probe import ProbedLink
from swarm.network.reach.reachability import Reach

PEER = "12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"
FAR, NEAR = (f"/ip4/{host}/tcp/31337/p2p/{PEER}" for host in ("192.0.2.7", "127.0.0.1"))
CONTACTS = Contacts(addresses=(NEAR,))
MANIFEST = parse_manifest(
    {
        "run": {"name": "mine", "start_when": {"stage_hosts": 2, "trainers": 1}},
        "model": {"vocab_size": 300, "dim": 32, "layers": 2, "heads": 2, "context": 16},
        "tokenizer": {"digest": "ab" * 32},
    },
    "this test",
)


class Guest:
    """A guest of a run that has not begun; its contact says what the test says."""

    def __init__(self, round_trip: float | Unreachable = 0.01) -> None:
        self._round_trip = round_trip
        self.endpoint = SimpleNamespace(peer="me", call=self._nobody)
        self.seen = SimpleNamespace(
            manifest=MANIFEST, contact=PEER, members=(PEER,), head=None,
            standing=SimpleNamespace(closed=None, waiting_for="others", lost=()),
        )  # fmt: skip

    async def _nobody(self, *question: Any, **how: Any) -> Any:
        raise Unreachable("nobody answers")

    async def round_trip(self) -> float:
        if isinstance(self._round_trip, Unreachable):
            raise self._round_trip
        return self._round_trip

    async def link(self, within_s: float) -> ProbedLink:
        return ProbedLink(up=1e7, down=1e7, up_bytes=1 << 20, down_bytes=1 << 20)

    async def reach(self) -> Reach:
        return Reach("direct", "dialled", ())

    async def way_to_contact(self) -> str:
        return "direct"

    async def watch_steps(self, until: float) -> list[tuple[float, int]]:
        return []

    def all_near(self) -> bool:
        return False


class Looking:
    """The slow checks of this machine, with another network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.report = DoctorReport(lambda result: None)
        self._patch, self._home = monkeypatch, tmp_path

    def with_guest(self, welcome: Any, *, limit_s: float = 60.0) -> dict[str, CheckResult]:
        """What is found where ``welcome()`` is the guest, or raises, or never comes."""

        async def answered(addresses: Sequence[str]) -> list[AddressProbe]:
            return [AddressProbe(address=address, answered="peer") for address in addresses]

        @asynccontextmanager
        async def guest_of(*which: Any, **how: Any) -> AsyncIterator[Any]:
            yield await welcome()

        self._patch.setattr("peers.doctor.contacts.probe_addresses", answered)
        self._patch.setattr("peers.doctor.network.guest_of", guest_of)
        facts = look(self._home)
        self.report.add(CheckResult(name="device", found="cpu"), CheckResult(name="port", found="any"))
        wishes = DoctorWishes(home=self._home, limit_s=limit_s)
        asyncio.run(SlowChecks(wishes, self.report, facts, CONTACTS, SystemClock()).run())
        return {result.name: result for result in self.report.results}


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Looking:
    return Looking(monkeypatch, tmp_path)


def test_slow_checks_of_a_contact_that_never_answers_end_in_time_and_say_so(looking: Looking) -> None:
    async def welcome() -> Guest:
        await asyncio.Event().wait()
        raise AssertionError

    found = looking.with_guest(welcome, limit_s=5)
    assert found["run"].level == "fail"
    assert "no contact says in time" in found["run"].found
    assert "--timeout 60" in found["run"].next
    assert "nothing is known of round trip, clock" in found["of the run"].found
    assert found["of the run"].found.endswith("parts and speed, nor whether the run gains by this machine")


def test_slow_checks_of_a_contact_that_vanishes_say_so_and_go_on(looking: Looking) -> None:
    async def welcome() -> Guest:
        return Guest(Unreachable("the stream broke"))

    found = looking.with_guest(welcome)
    assert (found["round trip"].level, found["round trip"].cause) == ("fail", "the stream broke")
    assert found["reachable"].level == "ok"
    assert (found["clock"].level, found["bandwidth"].level) == ("skipped", "skipped")


def test_slow_checks_of_a_run_of_another_version_have_the_words_of_join(looking: Looking) -> None:
    async def welcome() -> Guest:
        raise Incompatible("run.wire", 9, "2, the wire version of this swarm", "Update swarm on this machine.")

    found = looking.with_guest(welcome)
    assert (found["run"].level, found["run"].next) == ("fail", "Update swarm on this machine.")


def test_slow_checks_of_a_device_on_which_torch_fails(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore words")

    async def welcome() -> Guest:
        return Guest()

    monkeypatch.setattr("peers.doctor.compute.try_device", broken)
    found = looking.with_guest(welcome)
    assert found["computes"].found == "auto computes nothing: CUDA error: no kernel image is available"
    assert found["computes"].level == "fail"
    assert (found["parts"].level, found["speed"].level) == ("skipped", "skipped")


# --- contacts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answered", "said"),
    [("closed", "no peer listens"), ("silent", "firewall"), ("no route", "no way there"), ("no name", "no address"),
     ("no peer", "something else")],
)  # fmt: skip
def test_judge_contacts_says_why_nobody_answers(answered: Any, said: str) -> None:
    result = judge_contacts(
        [AddressProbe(address=FAR, answered=answered), AddressProbe(address=NEAR, answered="closed")]
    )
    assert (result.level, said in result.cause, bool(result.check), bool(result.next)) == ("fail", True, True, True)


def test_judge_contacts_one_that_answers_is_enough() -> None:
    probes = [AddressProbe(address=FAR, answered="silent"), AddressProbe(address=NEAR, answered="peer", seconds=0.002)]
    result = judge_contacts(probes)
    assert (result.level, result.found.startswith("1 of 2 addresses answer"), "2 ms" in result.found) == (
        "ok", True, True,
    )  # fmt: skip
    quic = AddressProbe(address=f"/ip4/192.0.2.7/udp/9/quic-v1/p2p/{PEER}", answered="untried")
    assert judge_contacts([quic]).level == "ok"


async def test_probe_tells_a_peer_from_another_service_and_a_closed_port() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        writer.close()

    async def other(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6 and more words")
        writer.close()

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in (greet, other)]
        ports = [*(server.sockets[0].getsockname()[1] for server in servers), closed.getsockname()[1]]
        found = await probe_addresses([f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in ports])
        for server in servers:
            server.close()
            await server.wait_closed()
    assert [probe.answered for probe in found] == ["peer", "no peer", "closed"]
    assert found[2].words == "Connection refused"


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        ({}, 4.0),
        ({"mode": "local"}, 4.0),
        ({"mode": "local", "local": {"fragments": 4}}, 1.0),
        ({"mode": "local", "strategy": "grid", "codec": "int8", "local": {"sync_every": 4}}, (4.0 * 3 + 1.0) / 4),
    ],
)
def test_averaged_bytes_are_the_mean_of_a_steps_rounds(averaging: dict[str, Any], expected: float) -> None:
    document = MANIFEST.model_dump(mode="json", exclude_none=True) | {"averaging": averaging}
    assert averaged_bytes(parse_manifest(document, "a test")) == pytest.approx(expected, rel=0.02)


def test_exact_sums_go_as_float64_and_their_mean_as_float32() -> None:
    document = MANIFEST.model_dump(mode="json", exclude_none=True)
    document["run"] |= {"reproducible": True}
    assert averaged_bytes(parse_manifest(document, "a test")) == (8 + 4) / 2
