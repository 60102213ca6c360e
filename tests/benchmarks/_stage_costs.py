"""Timing a stage phase by phase; each phase ends when the device has finished it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

from swarm.compression.codec import EncodeContext
from swarm.compression.dense import FLOAT32
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.registry import family_of
from swarm.models.spec import DType
from swarm.optim.adamw import AdamWState, StepNumbers, adamw_step
from swarm.optim.schedules import OptimizerConfig
from swarm.planning.costs import training_flops_per_token
from tests.benchmarks._stage import Size, allocated, finish, first_snapshot, normal, trained_part

T = TypeVar("T")

_CONTEXT = EncodeContext(step=1, direction="forward")

MICROBATCH_PHASES = ("decode", "forward", "encode", "backward", "accumulate")
STEP_PHASES = ("gradient_sum", "adamw", "prepare", "swap")


class Candidate:
    """One stage on one device, and every time measured on it."""

    def __init__(self, size: Size, compute: DType, device: torch.device) -> None:
        before = allocated(device)
        self.size, self.device = size, device
        self.name = f"{device.type}_{size.name}_{compute}"
        self._model = size.model(compute)
        snapshot = first_snapshot(self._model)
        self._part = trained_part(self._model, device, snapshot)
        self._state = AdamWState(*(vector.to(device) for vector in snapshot.vectors))
        self._spec = family_of(self._model).boundary(size.microbatch, size.sequence)
        self._payload = bytearray(FLOAT32.encode(normal(size.shape, 0), _CONTEXT))
        self._number = 0
        self._seconds = self._no_times()
        self._microbatch()  # warm-up: kernels are chosen and memory is mapped at first use
        self._step()
        self._seconds = self._no_times()
        self._resident_bytes = allocated(device) - before
        self.peak_bytes: int | None = None

    def round(self, microbatches: int) -> None:
        """Some microbatches, and the step that they belong to."""
        before = allocated(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(microbatches):
            self._microbatch()
        self._step()
        if self.device.type == "cuda":
            self.peak_bytes = self._resident_bytes + torch.cuda.max_memory_allocated(self.device) - before

    def milliseconds(self, phase: str) -> float:
        """Median over everything measured."""
        return 1000 * median(self._seconds[phase])

    @property
    def tokens_per_second(self) -> float:
        """Of forward, backward and accumulation."""
        return 1000 * self.size.tokens / sum(map(self.milliseconds, ("forward", "backward", "accumulate")))

    @property
    def wire_tokens_per_second(self) -> float:
        """The same from wire bytes to wire bytes: two payloads decoded and two encoded."""
        wire_s = 2 * (self.milliseconds("decode") + self.milliseconds("encode")) / 1000
        return self.size.tokens / (wire_s + self.size.tokens / self.tokens_per_second)

    @property
    def teraflops(self) -> float:
        """10¹² operations a second of forward and backward, as :mod:`swarm.planning.costs` counts them."""
        flops = self.size.tokens * training_flops_per_token(self._model, self._part.spec, self.size.sequence)
        return flops / (self.milliseconds("forward") + self.milliseconds("backward")) / 1e9

    def _microbatch(self) -> None:
        self._number += 1
        number, part = self._number, self._part
        x = self._timed("decode", lambda: FLOAT32.decode(self._payload, self._spec, check_finite=True).to(self.device))
        output, graph = self._timed("forward", lambda: part.forward(x, seed=number))
        assert graph is not None
        self._timed("encode", lambda: FLOAT32.encode(output, _CONTEXT))
        _, gradients = self._timed("backward", lambda: part.backward(graph, x))
        work = StepWork(part.step + 1, MicrobatchId(PeerId("trainer"), "00" * 8, 0, number))
        self._timed("accumulate", lambda: part.accumulate(work, gradients))

    def _step(self) -> None:
        part = self._part
        mean = self._timed("gradient_sum", part.gradient_sum) / self.size.tokens
        on_device, numbers = mean.to(self.device), StepNumbers(step=1, lr=1e-5, clip=1.0)
        self._timed("adamw", lambda: adamw_step(self._state, on_device, part.layout, OptimizerConfig(), numbers))
        self._timed("prepare", lambda: part.prepare(mean, lr=1e-5, clip=1.0, step=part.step + 1))
        self._timed("swap", part.swap)

    def _timed(self, phase: str, work: Callable[[], T]) -> T:
        finish(self.device)
        started = time.perf_counter()
        found = work()
        finish(self.device)
        self._seconds[phase].append(time.perf_counter() - started)
        return found

    @staticmethod
    def _no_times() -> dict[str, list[float]]:
        return {phase: [] for phase in (*MICROBATCH_PHASES, *STEP_PHASES)}
