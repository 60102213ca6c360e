"""What leaves a trainer: activations, four a microbatch, and never a token, a label or a byte of text."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from data_shards.tokenize import Tokenizer
from swarm.events import JourneyCompleted
from swarm.models.registry import family_of
from swarm.network.protocols import MAX_BODY_BYTES
from swarm.network.rpc.link import Link
from tests.harness.libp2p_swarm import LibP2PSwarm
from tests.harness.swarm import LocalSwarm

CANARY = "xylophone quagmire zephyr 7f3a91 kumquat"
RUN = 6
"""Consecutive token ids that count as a find: chance would give one in 300⁶."""


class SpiedTransport:
    """A transport that shows what it is given."""

    def __init__(self, transport: Any, written: bytearray) -> None:
        self._transport, self._written = transport, written

    def write(self, data: Any) -> None:
        """Keep a copy, pass it on."""
        self._written += data
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@contextmanager
def spy_on_the_transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, bytearray]]:
    """Every byte that anything in this process hands to a stream: between it and the network there is only the
    daemon's socket, and what it sends is encrypted. Links write to their transport, hivemind to its writers."""
    written: dict[int, bytearray] = defaultdict(bytearray)
    write, take_over = asyncio.StreamWriter.write, Link.take_over

    def spy_write(self: asyncio.StreamWriter, data: Any) -> None:
        written[id(self)] += data
        write(self, data)

    async def spy_take_over(self: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await take_over(self, reader, writer)
        self._transport = SpiedTransport(self._transport, written[id(self)])  # type: ignore[assignment]

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.StreamWriter, "write", spy_write)
        patch.setattr(Link, "take_over", spy_take_over)
        yield written


def spellings(tokens: list[int]) -> dict[str, list[bytes]]:
    """How a run of the canary's tokens could look on a wire."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for start in range(len(tokens) - RUN + 1):
        window = tokens[start : start + RUN]
        for dtype in ("<u2", "<i4", "<i8", "<f4", ">u2", ">i4"):
            found[dtype].append(np.asarray(window).astype(dtype).tobytes())
        found["msgpack"].append(b"".join(msgpack.packb(token) for token in window))
        found["text"].append(", ".join(map(str, window)).encode())
    return found


def finds(written: dict[int, bytearray], tokens: list[int]) -> list[str]:
    """Which spellings of the canary are in what was written."""
    words = CANARY.split()
    everything = [bytes(stream) for stream in written.values()]
    found = [f"plain {word}" for word in words if any(word.encode() in stream for stream in everything)]
    for spelling, patterns in spellings(tokens).items():
        if any(pattern in stream for pattern in patterns for stream in everything):
            found.append(spelling)
    return found


def documents() -> list[list[str]]:
    return [[f"{CANARY} {trainer} {number} {CANARY}. " * 4 for number in range(12)] for trainer in range(2)]


async def run_under_the_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> list[str]:
    swarm = LibP2PSwarm(
        tmp_path, hosts=2, trainers=2, documents=documents(), split={"stages": 2, "ends": ends}, run={"steps": 2}
    )
    with spy_on_the_transport(monkeypatch) as written:
        await swarm.run()
    assert sum(map(len, written.values())) > 100_000
    ((found, _),) = Tokenizer(swarm.tokenizer).encode_documents([f" {CANARY}"])
    return finds(written, found.tolist())


@pytest.mark.promise("private bytes stay")
@pytest.mark.network
async def test_private_ends_send_no_token_no_label_and_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await run_under_the_spy(tmp_path, monkeypatch, "private") == []


@pytest.mark.network
async def test_the_spy_sees_the_tokens_that_hosted_ends_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<i4" in await run_under_the_spy(tmp_path, monkeypatch, "hosted")


@pytest.mark.parametrize("stages", [1, 2, 4])
async def test_a_trainers_link_carries_four_activations_a_microbatch_for_any_number_of_stages(
    tmp_path: Path, stages: int
) -> None:
    swarm = LocalSwarm(
        tmp_path,
        hosts=4,
        trainers=1,
        split={"stages": stages},
        run={"steps": 2},
        model={"dim": 64, "context": 64},
        batch={"microbatch_size": 4, "microbatches_per_step": 8},
    )
    await swarm.run()
    trainer = swarm.peers["trainer-0"]
    hosts = {peer.endpoint.peer for name, peer in swarm.peers.items() if name.startswith("host")}
    usage = trainer.endpoint.statistics()
    sent = sum(usage.bytes_sent.get(host, 0) for host in hosts)
    received = sum(usage.bytes_received.get(host, 0) for host in hosts)

    activation = 4 * family_of(swarm.manifest.model).boundary(4, 64).elements
    microbatches = len(trainer.events.of(JourneyCompleted))
    assert microbatches == 16
    control = 8_000  # reports, receipts, acknowledgements and the steps' questions, a microbatch
    for link in (sent, received):
        assert 2 * activation <= link / microbatches <= 2 * activation + control
    assert control < activation < MAX_BODY_BYTES
