from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from peers.manifest_file import manifest_sent
from swarm.config import Manifest
from swarm.errors import Advice, Ending, Incompatible, RunEnded, SpeaksOtherWire, Unadmitted
from swarm.ids import PeerId, RunId
from swarm.membership.contact import UNADMITTED_TRIES, ask_standing, find_run
from swarm.network.addresses import by_peer, parse_address
from swarm.network.discovery.manifest import ManifestService
from swarm.security.signing import PrivateIdentity
from swarm.sim.network import SimNetwork
from tests.harness.rigs.clocks import LoopClock
from tests.harness.rigs.membership import FakeClock, tokenizer
from tests.harness.rigs.membership import manifest as manifest_of

TOKENIZER = {"tokenizer.json": tokenizer()}
OTHER_RUN = RunId("0" * 64)


class Liar(ManifestService):
    """Says yes to whatever run it is asked for."""

    def claim(self, run: str) -> Liar:
        self._run = run
        return self


def _document(**changes: Any) -> bytes:
    sections = json.loads(manifest_of().canonical())
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        sections[section][key] = value
    return json.dumps(sections, sort_keys=True, separators=(",", ":")).encode()


async def _ask(service: ManifestService, expected: RunId | None) -> tuple[PeerId, Manifest, dict[str, bytes]]:
    network = SimNetwork(LoopClock())
    asked, asking = (PrivateIdentity(bytes([number]) * 32).peer for number in (1, 2))
    serving, endpoint = network.endpoint(asked), network.endpoint(asking)
    serving.mount(service)
    try:
        return await find_run(endpoint, {asked: [f"/ip4/127.0.0.1/tcp/9/p2p/{asked}"]}, expected, manifest_sent)
    finally:
        await serving.close()
        await endpoint.close()


async def test_find_run_gives_all_files_that_the_manifest_names() -> None:
    sections = json.loads(_document())
    beside = {"LICENSE": b"free", "additional_chat_templates/tools.jinja": b"", "vocab.json": b"{}"}
    sections["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in beside.items()}
    document = json.dumps(sections, sort_keys=True, separators=(",", ":")).encode()
    _, manifest, files = await _ask(ManifestService(document, TOKENIZER | beside), None)
    assert (manifest.canonical(), files) == (document, TOKENIZER | beside)
    for sent, words in (
        (TOKENIZER, "other files than it names"),
        (TOKENIZER | beside | {"LICENSE": b"dear"}, "a LICENSE whose digest is not the manifest's"),
    ):
        with pytest.raises(RunEnded, match=words):
            await _ask(ManifestService(document, sent), None)


async def test_find_run_file_that_no_model_has_is_incompatible() -> None:
    sections = json.loads(_document()) | {"files": {"../run.toml": hashlib.sha256(b"").hexdigest()}}
    with pytest.raises(Incompatible, match="names of files with which models come"):
        await _ask(ManifestService(json.dumps(sections).encode(), TOKENIZER | {"../run.toml": b""}), None)


@pytest.mark.parametrize("service", [ManifestService, lambda *files: Liar(*files).claim(OTHER_RUN)])
async def test_find_run_another_run_than_the_invite_says_is_incompatible(service: Any) -> None:
    with pytest.raises(RunEnded, match="does not serve the run") as caught:
        await _ask(service(_document(), TOKENIZER), OTHER_RUN)
    assert caught.value.ending is Ending.INCOMPATIBLE
    assert "000000000000" in caught.value.check


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"run__wire": 1}, "run.wire"),
        ({"run__wire": 3}, "run.wire"),
        ({"model__layers": 1}, "split.stages"),
        ({"model__moe": 8}, "model.moe"),
    ],
)
async def test_find_run_manifest_of_another_version_is_incompatible(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(Incompatible, match="another version") as caught:
        await _ask(ManifestService(_document(**changes), TOKENIZER), None)
    assert caught.value.key == key
    assert caught.value.ending is Ending.INCOMPATIBLE


async def test_find_run_nobody_answers_names_an_address_and_how_many_there_are() -> None:
    network = SimNetwork(LoopClock())
    endpoint = network.endpoint(PrivateIdentity(b"\2" * 32).peer)
    addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{PrivateIdentity(bytes([port]) * 32).peer}" for port in (5, 6)]
    try:
        with pytest.raises(RunEnded, match="cannot reach") as caught:
            await find_run(endpoint, by_peer(map(parse_address, addresses)), None, manifest_sent)
    finally:
        await endpoint.close()
    assert caught.value.ending is Ending.UNREACHABLE
    assert any(f"{address} and 1 more" in caught.value.reason for address in addresses)
    assert "is that peer running" in caught.value.check


async def test_find_run_at_a_peer_that_speaks_another_wire_version_says_so_and_what_to_do() -> None:
    peer = PrivateIdentity(b"\1" * 32).peer

    class Older:
        """What our side makes of a peer whose frames are of another version."""

        async def call(self, target: PeerId, *question: Any, **options: Any) -> Any:
            raise SpeaksOtherWire("it speaks wire version 1, and not 2", peer=target)

    older: Any = Older()
    with pytest.raises(RunEnded, match="speaks wire version 1") as caught:
        await find_run(older, {peer: [f"/ip4/127.0.0.1/tcp/9/p2p/{peer}"]}, None, manifest_sent)
    assert caught.value.ending is Ending.INCOMPATIBLE
    assert (caught.value.check, caught.value.remedy) == (Advice.WHICH_VERSION, Advice.SAME_VERSION)


@pytest.mark.parametrize("late", [UNADMITTED_TRIES - 1, UNADMITTED_TRIES])
async def test_contact_that_has_yet_to_hear_of_us_is_asked_again(late: int) -> None:
    asked, standing = list[PeerId](), object()

    async def call(peer: PeerId, *_: Any, timeout_s: float) -> tuple[object, bytes]:
        asked.append(peer)
        if len(asked) <= late:
            raise Unadmitted("the invite for ana was used by another peer")
        return standing, b""

    endpoint: Any = SimpleNamespace(call=call)
    if late < UNADMITTED_TRIES:
        assert await ask_standing(endpoint, FakeClock(), PeerId("C")) is standing
    else:
        with pytest.raises(RunEnded, match="does not let this peer in"):
            await ask_standing(endpoint, FakeClock(), PeerId("C"))
    assert len(asked) == UNADMITTED_TRIES
