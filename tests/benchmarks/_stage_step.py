"""A stage's whole step as a peer computes it, beside its module alone, and the GPU memory that both the stage and the
step take.

The whole step goes from wire bytes to wire bytes through the product's own code and device thread, as a replica's
worker does it: so many pieces of work under way at once as the device has lanes. The module alone is a forward and a
backward of the same weights and shapes by torch, tensors on the device already, gradients thrown away: what nobody who
trains can go below. Both wait for the device at the end of a round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from swarm.compression.codec import Codec
from swarm.device import DeviceThread
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import DType, token_spec
from swarm.pipeline.boundary import BoundarySpecs, going_forward
from swarm.pipeline.compute import Material, StageCompute
from tests.benchmarks._stage import Size, allocated, finish, first_snapshot, normal, trained_part

MICROBATCHES_A_STEP = 16
"""Over which the closing of a step is spread as quickstart's steps have."""

_TRAINER = PeerId("trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of GPU memory per parameter of the stage: its state ``at_rest``, the largest amount ``in_step``, during one
    microbatch, and while a step is closed (prepared and swapped)."""

    at_rest: float
    in_step: float
    closing: float


class WholeStep:
    """One stage on one device, and every time measured on it. :meth:`close` ends its threads.

    ``memory`` is None on a CPU. ``rounds`` are pairs of seconds a microbatch: the module alone, the whole step.
    ``closing_s`` is what one closing takes: the sum's way to the CPU, prepare and swap.
    """

    def __init__(self, size: Size, compute: DType, codec: Codec, device: torch.device) -> None:
        before = allocated(device)
        self.name, self.device, self._tokens = step_name(size, compute, codec, device), device, size.tokens
        model = size.model(compute)
        snapshot, activation = first_snapshot(model), family_of(model).boundary(size.microbatch, size.sequence)
        self._part = trained_part(model, device, snapshot)
        finish(device)
        at_rest = allocated(device) - before
        tokens = token_spec(size.microbatch, size.sequence)
        specs = BoundarySpecs(activation=activation, tokens=tokens, codec=codec, hosted=False)
        self._compute, self._thread = StageCompute(self._part, specs, device), DeviceThread(device)
        work = StepWork(1, MicrobatchId(_TRAINER, "00" * 8, 0, 0))
        self._payloads = [bytearray(codec.encode(normal(size.shape, seed), going_forward(work))) for seed in (1, 2)]
        self._number = 0
        self.rounds: list[tuple[float, float]] = []
        self._microbatches(self._thread.lanes)  # warm-up: kernels are chosen and memory is mapped at first use
        self._close()
        in_step, _ = self._peak(lambda: self._microbatches(self._thread.lanes))
        closing, self.closing_s = self._peak(self._close)
        parameters = sum(slot.elements for slot in self._part.layout.slots)
        sizes = [used / parameters for used in (at_rest, in_step - before, closing - before)]
        self.memory = Memory(at_rest=sizes[0], in_step=sizes[1], closing=sizes[2]) if device.type == "cuda" else None
        self._bare = self._module_alone(model, snapshot.params, specs)
        self._bare(1)

    def round(self, microbatches: int) -> None:
        """Some microbatches of each, the other one first each time."""
        works = (self._bare, self._microbatches)
        order = (0, 1) if len(self.rounds) % 2 == 0 else (1, 0)
        found = [0.0, 0.0]
        for which in order:
            found[which] = self._seconds(partial(works[which], microbatches)) / microbatches
        self.rounds.append((found[0], found[1]))

    def close(self) -> None:
        """End the device's threads."""
        asyncio.run(self._thread.close())

    def ratios(self) -> list[float]:
        """The module's time ÷ the whole step's, of each round: 1 is the ceiling."""
        return [bare / whole for bare, whole in self.rounds]

    def ratio_with_closing(self) -> float:
        """The same with the sum's way to the CPU, prepare and swap spread over :data:`MICROBATCHES_A_STEP`."""
        bare, whole = (median(times) for times in zip(*self.rounds, strict=True))
        return bare / (whole + self.closing_s / MICROBATCHES_A_STEP)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole step, without its closing."""
        return self._tokens / median(whole for _, whole in self.rounds)

    def _microbatches(self, count: int) -> None:
        """So many, on as many lanes as the device has."""
        asyncio.run(self._on_lanes(iter(range(count))))

    async def _on_lanes(self, todo: Iterator[int]) -> None:
        async def lane() -> None:
            for _ in todo:
                await self._microbatch()

        await asyncio.gather(*(lane() for _ in range(self._thread.lanes)))

    async def _microbatch(self) -> None:
        self._number += 1
        number, step = self._number, self._part.step + 1
        work = StepWork(step, MicrobatchId(_TRAINER, "00" * 8, 0, number))
        inputs, gradient = self._payloads
        run = self._thread.run_phases
        _, graph = await run(self._compute.forward(inputs, number, work, first=False))
        material = Material(work=work, seed=number, first=False, input=inputs, gradient=gradient)
        await run(self._compute.contribute(material, graph, _TRAINER))

    def _close(self) -> None:
        mean = self._part.gradient_sum() / self._part.layout.elements
        self._part.prepare(mean, lr=1e-5, clip=1.0, step=self._part.step + 1)
        self._part.swap()

    def _module_alone(self, model: GptConfig, params: Tensor, specs: BoundarySpecs) -> Callable[[int], None]:
        module = family_of(model).build(self._part.spec)
        install_weights(module, self._part.layout.views(params.to(self.device)), requires_grad=True)
        parameters = list(module.parameters_of("forward").values())
        x, gradient = (
            specs.codec.decode(payload, specs.activation).to(self.device, copy=True) for payload in self._payloads
        )

        def work(count: int) -> None:
            for _ in range(count):
                inputs = x.detach().requires_grad_()
                output = module(inputs, 1)
                torch.autograd.grad((output,), (inputs, *parameters), (gradient,))

        return work

    def _peak(self, work: Callable[[], None]) -> tuple[int, float]:
        """The most GPU memory allocated while this is done, and its seconds."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = self._seconds(work)
        return (torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0), seconds

    def _seconds(self, work: Callable[[], None]) -> float:
        finish(self.device)
        started = time.perf_counter()
        work()
        finish(self.device)
        return time.perf_counter() - started


def step_name(size: Size, compute: DType, codec: Codec, device: torch.device) -> str:
    """Return the name of a candidate: device, size, dtype, and the codec where it is not the default one."""
    suffix = "" if codec.name == "float32" else f"_{codec.name}_payloads"
    return f"{device.type}_{size.name}_{compute}{suffix}"
