"""One averager of hivemind in the benchmark ``allreduce``: ``_exchange_hivemind HOME SLOT CODEC PEERS ADDRESS …``.

A stock ``DecentralizedAverager`` with its own processes, daemon and DHT, and default settings, but that no group is
smaller than all members; the addresses are those of members that are there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch

from tests.benchmarks._exchange_load import TIMEOUT_S, error_of, vector_of
from tests.benchmarks._exchange_meter import Meter, family
from tests.benchmarks._pipeline_load import threads
from tests.benchmarks._worker import say

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.averaging.averager import DecentralizedAverager
    from hivemind.compression import NoCompression, Uniform8BitQuantization
    from hivemind.dht import DHT
    from hivemind.p2p import P2P

TENSORS = 8
"""A model is many tensors; hivemind updates them one by one."""

_CODECS = {"float32": NoCompression, "int8": Uniform8BitQuantization}
_LISTEN = ["/ip4/127.0.0.1/tcp/0"]


class Averager(DecentralizedAverager):  # type: ignore[misc]
    """Notes how long the exchange takes once its group is known, in the process that it forks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.exchange_s, self.touched = multiprocessing.Value("d", 0.0), multiprocessing.Event()
        super().__init__(*arguments, **options)

    async def _run_allreduce_inplace_(self, *arguments: Any, **options: Any) -> None:
        began = time.monotonic()
        await super()._run_allreduce_inplace_(*arguments, **options)
        self.exchange_s.value = time.monotonic() - began

    async def _aim(self, size: int | None) -> None:
        """Its leader waits for ``min_matchmaking_time``, or begins as soon as there are so many."""
        self._matchmaking.target_group_size = size

    async def _touch(self) -> None:
        """Have the tensors in this process's memory, too."""
        for tensor in self._averaged_tensors:
            tensor.sum()
        self.touched.set()


class Member:
    """Serves orders."""

    def __init__(self, averager: Averager, slot: int, elements: int) -> None:
        self._averager, self._slot, self._elements = averager, slot, elements
        self._fill()
        averager._outer_pipe.send(("_touch", [], {}))
        averager.touched.wait()
        daemons = [pid for pid in family()[1:] if _name(pid) == "p2pd"]
        self._meter = Meter({"peer": [pid for pid in family() if pid not in daemons], "daemon": daemons}, elements)

    def _fill(self) -> None:
        whole = torch.from_numpy(vector_of(self._slot, self._elements))
        with self._averager.get_tensors() as tensors:
            for tensor, piece in zip(tensors, whole.split(self._elements // TENSORS), strict=True):
                tensor.copy_(piece)

    def round(self, size: int | None) -> dict[str, Any]:
        """``step`` as it comes, ``exchange_s`` without matchmaking; ``members`` is 0 where it fails."""
        self._fill()
        self._averager._outer_pipe.send(("_aim", [size], {}))
        self._meter.begin()
        began = time.monotonic()
        try:
            members = len(self._averager.step(timeout=TIMEOUT_S))
        except Exception as error:  # noqa: BLE001 - whatever its caller would get is a round that failed
            members = 0
            print(f"hivemind: {error!r}", file=sys.stderr)
        seconds = time.monotonic() - began
        used = self._meter.end()
        digest = hashlib.sha256(self._numbers().data).hexdigest()
        return used | {
            "round_s": seconds,
            "exchange_s": self._averager.exchange_s.value,
            "digest": digest,
            "members": members,
        }

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry one out and answer."""
        match order:
            case {"round": int(), "size": size}:
                return self.round(size)
            case {"error": int(peers)}:
                return {"error": error_of(self._numbers(), peers)}
        raise ValueError(f"an order that this member does not understand: {order}")

    def _numbers(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        with self._averager.get_tensors() as tensors:
            found: np.ndarray[Any, np.dtype[np.float32]] = torch.cat(tensors).numpy()
        return found


def _name(pid: int) -> str:
    with open(f"/proc/{pid}/comm", encoding="ascii") as file:
        return file.read().strip()


def main(home: str, slot: str, codec: str, elements: str, peers: str, *initial: str) -> None:
    """Serve orders until stdin ends."""
    P2P._UNIX_SOCKET_PREFIX = f"/unix{home}/"  # else a socket stays in /tmp
    threads(1)
    for name in ("hivemind", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    dht = DHT(start=True, initial_peers=list(initial), host_maddrs=_LISTEN)
    averager = Averager(
        [torch.zeros(int(elements) // TENSORS) for _ in range(TENSORS)],
        dht,
        start=True,
        prefix="allreduce",
        min_group_size=int(peers),
        compression=_CODECS[codec](),
    )
    try:
        member = Member(averager, int(slot), int(elements))
        say({"addresses": [str(address) for address in dht.get_visible_maddrs()]})
        for line in sys.stdin:
            say(member.obey(json.loads(line)))
    finally:
        averager.shutdown()
        dht.shutdown()
