"""Stock hivemind in the benchmark ``pipeline``: ``_pipeline_hivemind SIZE HOME STAGE|client ADDRESS …``.

The same blocks as experts of a ``moe.Server`` each, called through ``RemoteExpert`` by threads of one client. float16
on the wire, no optimizer: gradients only add up, as ours do. What the server does by itself (a backward recomputes its
forward, every call goes through the client) is its design and stays.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm.models.gpt import Stage
from tests.benchmarks._pipeline_load import (
    SIZES,
    Order,
    Window,
    activation_of,
    blocks_of,
    gradient_of,
    threads,
)
from tests.benchmarks._stage import Size
from tests.benchmarks._worker import say

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht import DHT
    from hivemind.moe.client.expert import create_remote_experts
    from hivemind.moe.server.dht_handler import get_experts
    from hivemind.moe.server.module_backend import ModuleBackend
    from hivemind.moe.server.server import Server
    from hivemind.p2p import P2P
    from hivemind.proto.runtime_pb2 import CompressionType
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

IN_FLIGHT = 8
_LISTEN = ["/ip4/127.0.0.1/tcp/0"]
_FOUND_S = 60.0
_RETRY_S = 0.5


class Expert(nn.Module):
    """A stage's block with the signature that hivemind calls."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        output: Tensor = self.stage(hidden, None)
        return output


def serve(size: Size, stage: int, initial: Sequence[str]) -> None:
    """One expert, until stdin ends."""
    dht = DHT(start=True, initial_peers=list(initial), host_maddrs=_LISTEN)
    schema = BatchTensorDescriptor(size.sequence, size.dim, compression=CompressionType.FLOAT16)
    backend = ModuleBackend(
        f"stage.{stage}",
        Expert(blocks_of(size, size.blocks, stage)),
        optimizer=None,
        args_schema=(schema,),
        outputs_schema=schema,
        min_batch_size=1,
        max_batch_size=size.microbatch,
    )
    server = Server(dht, {backend.name: backend}, num_connection_handlers=1, device="cpu", update_period=30)
    server.run_in_background(await_ready=True)
    say({"pid": os.getpid()})
    sys.stdin.read()
    server.shutdown()
    dht.shutdown()


class Client:
    """Eight threads, each with one microbatch at a time."""

    def __init__(self, size: Size) -> None:
        self._dht = DHT(start=True, host_maddrs=_LISTEN)
        self._input, self._gradient = activation_of(size), gradient_of(size)
        self._stages, self._experts = size.blocks, list[Any]()
        self._window = Window(Order(warmup_s=0, seconds=0))
        self._until = 0.0

    def addresses(self) -> list[str]:
        """Where the servers find the directory."""
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def find(self) -> dict[str, Any]:
        """The experts, as soon as all are declared. Raises RuntimeError after a minute."""
        deadline = time.monotonic() + _FOUND_S
        names = [f"stage.{stage}" for stage in range(self._stages)]
        pause = threading.Event()
        while time.monotonic() < deadline:
            found = get_experts(self._dht, names)
            if all(found):
                self._experts = create_remote_experts(found, self._dht)
                return {}
            pause.wait(_RETRY_S)
        raise RuntimeError("hivemind's experts were not found")

    def round(self, order: Order) -> dict[str, float]:
        """What ends in the window counts."""
        self._window = window = Window(order)
        self._until = time.monotonic() + order.warmup_s + order.seconds
        workers = [threading.Thread(target=self._work) for _ in range(IN_FLIGHT)]
        for worker in workers:
            worker.start()
        pause = threading.Event()
        pause.wait(order.warmup_s)
        window.open()
        pause.wait(order.seconds)
        found = window.close()
        for worker in workers:
            worker.join()
        return found

    def _work(self) -> None:
        while time.monotonic() < self._until:
            hidden = self._input.detach().requires_grad_()
            for expert in self._experts:
                hidden = expert(hidden)
            torch.autograd.backward(hidden, self._gradient)
            self._window.note()

    def close(self) -> None:
        """End what it started."""
        self._dht.shutdown()


def lead(size: Size) -> None:
    """Serve orders until stdin ends."""
    client = Client(size)
    say({"pid": os.getpid(), "addresses": client.addresses()})
    for line in sys.stdin:
        order = json.loads(line)
        say(client.find() if order == {"find": True} else client.round(Order(**order)))
    client.close()
    os._exit(0)  # its destructors look for an event loop that is gone, each with a traceback


def main(size: str, home: str, role: str, *initial: str) -> None:
    """See the module."""
    P2P._UNIX_SOCKET_PREFIX = f"/unix{home}/"  # else sockets stay in /tmp
    threads(1)
    torch.set_num_interop_threads(1)
    if role == "client":
        lead(SIZES[size])
    else:
        serve(SIZES[size], int(role), initial)
