"""One peer of the loop benchmark, in a process of its own: ``python -m tests.benchmarks._loop_peer HOME``.

Speaks JSON lines: it prints who it is, then for each order on stdin one report on stdout, and ends with its input.
An order is either whom to meet (``{"peer", "addresses"}``) or a round (``{"device", "stream", "warmup_s",
"seconds"}``, where device is ``stage``, ``kernel`` or empty). It runs what a stage host runs: uvloop,
:class:`LibP2PEndpoint`, :class:`DeviceThread`, and the stage's real work from wire bytes to wire bytes. What it streams
out is what its stage computed last; what its stage computes on is what streamed in last.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import uvloop

from swarm.clock import SystemClock
from swarm.compression.codec import EncodeContext
from swarm.compression.registry import codec_named
from swarm.device import DeviceThread
from swarm.errors import Violation
from swarm.events import Event, LoopLag
from swarm.ids import MicrobatchId, PeerId, RunId, StepWork
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig, token_spec
from swarm.monitoring.recorder import LoopLagProbe
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.network.protocols import Answer, AnyMethod, Incoming, Payload, Rpc
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.phases import complete
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.compute import Graph, Material, StageCompute
from swarm.schema import Empty
from swarm.state.snapshot import initial_snapshot

RUN = RunId("1a" * 32)
MODEL = GptConfig(vocab_size=512, dim=512, layers=2, heads=8, context=256)
MICROBATCH, SEQUENCE = 4, 256
MICROBATCHES_PER_STEP = 16
CALLS_IN_FLIGHT = 4
JOBS_IN_FLIGHT = 2
"""One runs and one waits, so that the device thread never pauses for the loop."""

KERNEL_DIM = 2048
"""A matrix product of this size takes as long as a forward."""

PROBE_S = 0.005
"""Ten times as often as a peer of a run looks, since here it is what is measured."""

_SINK = Rpc("bench/1/sink", Empty, Empty)
_TIMEOUT_S = 30.0


class StageWork:
    """Forward, backward and, every sixteen microbatches, an optimizer step of a one-stage cut, without pause."""

    def __init__(self) -> None:
        spec = family_of(MODEL).parts(SplitConfig(stages=1))[0]
        self._part = TrainedPart(spec, MODEL, AdamW(OptimizerConfig()))
        family = family_of(MODEL)
        self._part.install(initial_snapshot(spec.name, self._part.layout, family.initial_weights(0, spec)))
        activation = family.boundary(MICROBATCH, SEQUENCE)
        codec = codec_named("float32")
        self._specs = BoundarySpecs(
            activation=activation, tokens=token_spec(MICROBATCH, SEQUENCE), codec=codec, hosted=False
        )
        self._compute = StageCompute(self._part, self._specs, torch.device("cpu"))
        values = torch.randn(activation.shape, generator=torch.Generator().manual_seed(0))
        self._gradient = codec.encode(values * 1e-3, EncodeContext(step=1, direction="backward"))
        self.input: Payload = bytearray(codec.encode(values, EncodeContext(step=1, direction="forward")))
        self.output: Payload = self.input
        self.jobs = 0
        self._numbers = itertools.count()

    @property
    def payload_bytes(self) -> int:
        """Bytes of one activation on the wire."""
        return self._specs.activation_bytes

    async def run(self, device: DeviceThread, kind: str) -> None:
        """Until cancelled: a ``stage``'s work, or one ``kernel`` after the other, which keeps off the interpreter lock.
        What is already on the device thread then still ends."""
        endless = self._microbatches if kind == "stage" else self._kernels
        async with asyncio.TaskGroup() as group:
            for _ in range(JOBS_IN_FLIGHT):
                group.create_task(endless(device))

    async def _kernels(self, device: DeviceThread) -> None:
        square = torch.ones(KERNEL_DIM, KERNEL_DIM)
        while True:
            await device.run(torch.mm, square, square)
            self.jobs += 1

    async def _microbatches(self, device: DeviceThread) -> None:
        for number in self._numbers:
            work = StepWork(self._part.step + 1, _microbatch(number))
            self.output, graph = await device.run_phases(self._compute.forward(self.input, number, work, first=True))
            await device.run(self._contribute, self.input, number, graph)
            self.jobs += 2
            if number % MICROBATCHES_PER_STEP == MICROBATCHES_PER_STEP - 1:
                await device.run(self._close_step)
                self.jobs += 1

    def _contribute(self, payload: Payload, number: int, graph: Graph) -> None:
        """To the step that is open when its turn comes: the one before it in the device's queue may close one."""
        material = Material(
            work=StepWork(self._part.step + 1, _microbatch(number)),
            seed=number,
            first=True,
            input=payload,
            gradient=self._gradient,
        )
        complete(self._compute.contribute(material, graph, PeerId("trainer")))

    def _close_step(self) -> None:
        mean = self._part.gradient_sum() / (MICROBATCHES_PER_STEP * MICROBATCH * SEQUENCE)
        self._part.prepare(mean, lr=1e-4, clip=1.0, step=self._part.step + 1)
        self._part.swap()


def _microbatch(number: int) -> MicrobatchId:
    return MicrobatchId(PeerId("trainer"), "00" * 8, 0, number)


class Stream:
    """Activation-sized payloads to another peer, several at once; and the service that takes the other's."""

    def __init__(self, endpoint: LibP2PEndpoint, work: StageWork) -> None:
        self._endpoint, self._work = endpoint, work
        self.other = PeerId("")
        self.sent = self.received = 0

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [_SINK.handled_with_payload(self._take, admit=self._admit)]

    def _admit(self, caller: PeerId, body: Empty, payload_bytes: int) -> None:
        if payload_bytes != self._work.payload_bytes:
            raise Violation(f"{payload_bytes} bytes instead of {self._work.payload_bytes}")

    async def _take(self, caller: PeerId, body: Empty, incoming: Incoming) -> Answer[Empty]:
        self._work.input = incoming.payload
        self.received += len(incoming.payload)
        return Answer(Empty())

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``; what is on its way then still arrives."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLS_IN_FLIGHT):
                group.create_task(self._send(stop))

    async def _send(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            payload = self._work.output
            await self._endpoint.call(self.other, _SINK, Empty(), timeout_s=_TIMEOUT_S, payload=payload)
            self.sent += self._work.payload_bytes


class _Lags:
    """An event sink that keeps the probe's one event."""

    def __init__(self) -> None:
        self.lag: LoopLag | None = None

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`."""
        if isinstance(event, LoopLag):
            self.lag = event


class Peer:
    """Everything of one peer, and its rounds."""

    def __init__(self, endpoint: LibP2PEndpoint, device: DeviceThread) -> None:
        self.endpoint, self._device = endpoint, device
        self._work = StageWork()
        self.stream = Stream(endpoint, self._work)
        self._daemon = psutil.Process(endpoint.daemon_pid)
        endpoint.mount(self.stream)

    async def round(self, order: dict[str, Any]) -> dict[str, float]:
        """Do what is asked, and measure for ``seconds`` after ``warmup_s``. Only what ends in the window counts."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            computing = group.create_task(self._work.run(self._device, order["device"])) if order["device"] else None
            if order["stream"]:
                group.create_task(self.stream.run(stop))
            await asyncio.sleep(order["warmup_s"])
            report = await self._window(order["seconds"])
            stop.set()
            if computing is not None:
                computing.cancel()
        return report

    async def _window(self, seconds: float) -> dict[str, float]:
        lags = _Lags()
        before = self._counters()
        probe = asyncio.create_task(LoopLagProbe(lags, SystemClock(), interval_s=math.inf, tick_s=PROBE_S).run())
        await asyncio.sleep(seconds)
        after = self._counters()
        probe.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probe
        assert lags.lag is not None, "the probe says what it measured when it is cancelled"
        return {name: after[name] - before[name] for name in before} | lags.lag.fields()

    def _counters(self) -> dict[str, float]:
        """Cumulative figures. ``machine_cpu_s`` is what everybody on this machine used."""
        machine, daemon = psutil.cpu_times(), self._daemon.cpu_times()
        return {
            "seconds": time.monotonic(),
            "jobs": self._work.jobs,
            "sent_bytes": self.stream.sent,
            "received_bytes": self.stream.received,
            "cpu_s": time.process_time(),
            "loop_cpu_s": time.thread_time(),
            "loop_preempted": resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw,
            "daemon_cpu_s": daemon.user + daemon.system,
            "machine_cpu_s": sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice,
        }


@contextlib.asynccontextmanager
async def _opened(home: Path) -> AsyncIterator[Peer]:
    config = EndpointConfig(run_dir=home / "run")
    endpoint = await LibP2PEndpoint.open(config, load_or_create(home / "identity.key"), SystemClock())
    device = DeviceThread(torch.device("cpu"))
    try:
        await endpoint.enter(RUN)
        yield Peer(endpoint, device)
    finally:
        await device.close()
        await endpoint.close()


async def main(home: Path) -> None:
    """Serve orders until stdin ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with _opened(home) as peer:
        _say({"peer": peer.endpoint.peer, "addresses": peer.endpoint.addresses})
        while line := await reader.readline():
            order = json.loads(line)
            if "peer" in order:
                peer.stream.other = PeerId(order["peer"])
                peer.endpoint.learn(peer.stream.other, order["addresses"])
                _say({})
            else:
                _say(await peer.round(order))


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main(Path(sys.argv[1])))
