"""One averager of hivemind in the benchmark ``allreduce-kill``: ``_allreduce_hivemind HOME SLOT ADDRESS …``.

The addresses are those of members that are there. What runs from "the group is known" to "the caller has its answer" is
hivemind's own code, ``DecentralizedAverager._aggregate_with_group``: parts, all-reduce over its own daemon, tensors
updated in place. Only matchmaking is replaced: the group is given, so that rounds start at once.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import torch

from tests.benchmarks._allreduce_load import TIMEOUT_S, Fuse, Kill, vector_of
from tests.benchmarks._pipeline_load import threads
from tests.benchmarks._worker import orders, say

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
    from hivemind.averaging.averager import DecentralizedAverager
    from hivemind.averaging.group_info import GroupInfo
    from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES, TensorPartContainer, TensorPartReducer
    from hivemind.compression import CompressionInfo, NoCompression
    from hivemind.p2p import P2P, PeerID

TENSORS = 8
"""A model is many tensors; hivemind updates them one by one."""

CHUNK_TIMEOUT_S = 3.0
"""For a sender; a reducer has twice that. hivemind's defaults are none at all; with these a round ends."""

_LISTEN = ["/ip4/127.0.0.1/tcp/0"]


class Averager(DecentralizedAverager):  # type: ignore[misc]
    """Its state, without the processes it would fork around itself."""

    def __init__(self, p2p: P2P, elements: int) -> None:
        self._p2p, self.prefix = p2p, "allreducekill"
        self.mode, self.bandwidth, self._averaging_alpha = AveragingMode.NODE, None, 1.0
        self.lock_averaged_tensors = multiprocessing.Lock()
        self._running_groups: dict[bytes, asyncio.Future[AllReduceRunner]] = {}
        self._pending_groups_registered, self._state_updated = asyncio.Event(), asyncio.Event()
        self._pending_groups_registered.set()
        self._averaged_tensors: tuple[torch.Tensor, ...] = ()
        self.total_size = elements

    def __del__(self) -> None:
        """Nothing was forked."""

    @property
    def peer_id(self) -> PeerID:
        """Our own identity."""
        return self._p2p.peer_id

    def begin(self, numbers: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Hold these numbers, and as ``step`` does before it looks for a group, let early messages wait."""
        self._averaged_tensors = tuple(torch.from_numpy(numbers).split(self.total_size // TENSORS))
        self._pending_groups_registered.clear()

    async def average(self, number: int, peers: Sequence[PeerID]) -> Any:
        """What ``step`` does once it has a group, with its default settings but for the time-outs."""
        data = self.serializer.dumps([self.bandwidth, self.mode.value, self.serializer.dumps(None)])
        group = GroupInfo(number.to_bytes(20, "big"), tuple(peers), (data,) * len(peers))
        infos = tuple(CompressionInfo.from_tensor(tensor, key=at) for at, tensor in enumerate(self._averaged_tensors))
        with self._register_allreduce_group(group):
            return await asyncio.wait_for(
                self._aggregate_with_group(
                    group, tensor_infos=infos, weight=1.0, min_vector_size=0, compression=NoCompression(),
                    part_size_bytes=DEFAULT_PART_SIZE_BYTES, sender_timeout=CHUNK_TIMEOUT_S,
                    reducer_timeout=2 * CHUNK_TIMEOUT_S,
                ),
                timeout=TIMEOUT_S,
            )  # fmt: skip

    @property
    def numbers(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """What it holds now."""
        return torch.cat(self._averaged_tensors).numpy()


class Taps:
    """Notes on hivemind's classes for a fuse. Only a victim installs them: survivors run what hivemind is."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse
        self._sending = TensorPartContainer.iterate_input_parts_for
        self._resetting = TensorPartReducer.reset_accumulators
        self._answering = AllReduceRunner._accumulate_parts_streaming

    def install(self) -> None:
        """From now on, until this process dies of it."""
        taps = self

        async def send(container: TensorPartContainer, peer_index: int) -> AsyncIterator[Any]:
            async for part in taps._sending(container, peer_index):
                taps.fuse.note("sent")
                yield part

        def reset(reducer: TensorPartReducer) -> None:
            if reducer.current_part_index >= 0:
                taps.fuse.note("reduced")
            taps._resetting(reducer)

        async def answer(runner: AllReduceRunner, stream: Any, sender_index: int) -> AsyncIterator[Any]:
            async for message in taps._answering(runner, stream, sender_index):
                taps.fuse.note("answered")
                yield message

        TensorPartContainer.iterate_input_parts_for = send
        TensorPartReducer.reset_accumulators = reset
        AllReduceRunner._accumulate_parts_streaming = answer


def totals(elements: int, members: int) -> dict[str, int]:
    """How many events of each kind a member has in a whole round of equal parts."""
    parts = elements * 4 // DEFAULT_PART_SIZE_BYTES
    mine, others = parts // members, members - 1
    return {"sent": parts - mine, "reduced": mine, "answered": mine * others}


class Member:
    """Serves orders."""

    def __init__(self, averager: Averager, slot: int) -> None:
        self._averager, self._slot = averager, slot

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry one out and answer."""
        match order:
            case {"begin": int(number), "kind": str(kind)}:
                self._averager.begin(vector_of(number, self._slot, kind, self._averager.total_size))
            case {"step": int(step), "members": members, "kill": kill}:
                return await self._round(step, [PeerID.from_base58(peer) for peer in members], kill)
            case {"save": str(path)}:
                self._averager.numbers.tofile(path)
            case _:
                raise ValueError(f"an order that this member does not understand: {order}")
        return {}

    async def _round(self, step: int, peers: Sequence[PeerID], kill: dict[str, Any] | None) -> dict[str, Any]:
        """``contributors`` are those whom hivemind's answer lists; ``error`` is empty when it reports success."""
        if kill:
            Taps(Fuse(Kill(**kill), totals(self._averager.total_size, len(peers)))).install()
        began = time.monotonic()
        found: dict[str, Any] = {"error": "", "contributors": []}
        try:
            gathered = await self._averager.average(step, peers)
            found["contributors"] = [peer.to_base58() for peer in gathered]
        except Exception as error:  # noqa: BLE001 - whatever its caller would get is what is measured
            found["error"] = repr(error)
        return found | {"seconds": time.monotonic() - began}


async def main(home: str, slot: str, elements: str, *initial: str) -> None:
    """Serve orders until stdin ends."""
    P2P._UNIX_SOCKET_PREFIX = f"/unix{home}/"  # else a killed member's socket stays in /tmp
    threads(1)
    for name in ("hivemind", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    p2p = await P2P.create(initial_peers=list(initial), host_maddrs=_LISTEN, nat_port_map=False, auto_nat=False)
    try:
        averager = Averager(p2p, int(elements))
        await averager.add_p2p_handlers(p2p, namespace=averager.prefix)
        addresses = [str(address) for address in await p2p.get_visible_maddrs()]
        peer = p2p.peer_id.to_base58()
        say({"peer": peer, "addresses": addresses, "pid": os.getpid(), "daemon": p2p._child.pid})
        member = Member(averager, int(slot))
        async for order in orders():
            say(await member.obey(order))
    finally:
        await p2p.shutdown()
