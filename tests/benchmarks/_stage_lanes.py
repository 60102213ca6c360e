"""Whether work goes well that a device has under way at once, beside other work's copies; what it says of memory."""

from __future__ import annotations

import asyncio
from functools import partial

import torch
from torch import Tensor

from swarm.compression.dense import BFLOAT16
from swarm.device import DeviceThread, is_out_of_memory, release_memory
from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.registry import family_of
from swarm.models.spec import token_spec
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.phases import complete
from swarm.pipeline.boundary import BoundarySpecs, going_forward
from swarm.pipeline.compute import Material, StageCompute
from tests.benchmarks._stage import Size, first_snapshot, normal, stage_spec
from tests.benchmarks._stage_checks import Answers, Check

MICROBATCHES = 12
TAKEN = 1 << 30
"""Bytes."""


def lane_checks(device: torch.device, size: Size) -> list[Check]:
    """Several microbatches at once beside one at a time; on a GPU also its memory."""
    found = [Check(("lanes_give_the_same_bytes", "lanes_give_the_same_sum"), partial(check_lanes, device, size))]
    if device.type == "cuda":
        names = ("free_memory_tells_what_is_taken", "out_of_memory_is_told")
        found.append(Check(names, partial(check_memory, device)))
    return found


def check_lanes(device: torch.device, size: Size) -> Answers:
    """Every payload must have the bytes that it has when nothing else is under way, and so must the sum in float64."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        alone, beside = _Stage(device, size), _Stage(device, size)
        expected = [alone.one_by_one(number) for number in range(MICROBATCHES)]
        found = asyncio.run(beside.at_once())
    finally:
        torch.use_deterministic_algorithms(before)
    return {
        "lanes_give_the_same_bytes": found == expected,
        "lanes_give_the_same_sum": torch.equal(alone.part.gradient_sum(), beside.part.gradient_sum()),
    }


def check_memory(device: torch.device) -> Answers:
    """What is taken must be free no more; work that is larger than the memory must be known for that."""
    thread = DeviceThread(device)
    release_memory(device)
    free = thread.free_memory()
    taken: Tensor | None = torch.empty(TAKEN, dtype=torch.uint8, device=device)
    left = thread.free_memory()
    del taken
    release_memory(device)
    asyncio.run(thread.close())
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        told = is_out_of_memory(error)
    else:
        told = False
    return {"free_memory_tells_what_is_taken": abs(free - left - TAKEN) < TAKEN // 8, "out_of_memory_is_told": told}


class _Stage:
    """A stage that adds in float64, where the order does not matter, and its microbatches."""

    def __init__(self, device: torch.device, size: Size) -> None:
        model = size.model("bfloat16", dropout=0.1)
        update = AdamW(OptimizerConfig())
        self.part = TrainedPart(stage_spec(model), model, update, device=device, accumulator="float64")
        self.part.install(first_snapshot(model))
        specs = BoundarySpecs(
            activation=family_of(model).boundary(size.microbatch, size.sequence),
            tokens=token_spec(size.microbatch, size.sequence),
            codec=BFLOAT16,
            hosted=False,
        )
        self._compute, self._size, self._device = StageCompute(self.part, specs, device), size, device

    def one_by_one(self, number: int) -> tuple[bytes, bytes]:
        """Return the payloads that a microbatch leaves: forward, and back."""
        inputs, material = self._material(number)
        output, graph = complete(self._compute.forward(inputs, number, material.work, first=False))
        result = complete(self._compute.contribute(material, graph, PeerId("trainer")))
        return bytes(output), bytes(result.gradient or b"")

    async def at_once(self) -> list[tuple[bytes, bytes]]:
        """Return those of all microbatches, of which as many are under way as the device has lanes."""
        thread, found = DeviceThread(self._device), dict[int, tuple[bytes, bytes]]()
        todo = iter(range(MICROBATCHES))

        async def lane() -> None:
            for number in todo:
                inputs, material = self._material(number)
                output, graph = await thread.run_phases(
                    self._compute.forward(inputs, number, material.work, first=False)
                )
                result = await thread.run_phases(self._compute.contribute(material, graph, PeerId("trainer")))
                found[number] = bytes(output), bytes(result.gradient or b"")

        await asyncio.gather(*(lane() for _ in range(thread.lanes)))
        await thread.close()
        return [found[number] for number in range(MICROBATCHES)]

    def _material(self, number: int) -> tuple[bytearray, Material]:
        work = StepWork(1, MicrobatchId(PeerId("trainer"), "00" * 8, 0, number))
        inputs, gradient = (self._payload(work, 2 * number + which) for which in (0, 1))
        material = Material(work=work, seed=number, first=False, input=inputs, gradient=gradient)
        return inputs, material

    def _payload(self, work: StepWork, seed: int) -> bytearray:
        return bytearray(BFLOAT16.encode(normal(self._size.shape, seed), going_forward(work)))
