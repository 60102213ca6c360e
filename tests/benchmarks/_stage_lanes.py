"""Whether work goes well that a device has under way at once, beside other work's copies; what it says of memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from swarm.pipeline.compute import Material, Rest, StageCompute
from tests.benchmarks._stage import Size, first_snapshot, normal, stage_spec
from tests.benchmarks._stage_checks import Answers, Check

MICROBATCHES = 12
TAKEN = 1 << 30
"""Bytes."""
_TRAINER = PeerId("trainer")


LANES = ("lanes_give_the_same_bytes", "lanes_give_the_same_sum")
DEFERRED = ("deferred_gradients_give_the_same_bytes", "deferred_gradients_give_the_same_sum")
TWO_STEPS = ("two_open_steps_give_the_same_bytes", "two_open_steps_give_the_same_sums", "two_open_steps_swap_the_same")


def lane_checks(device: torch.device, size: Size) -> list[Check]:
    """Several microbatches at once beside one at a time; on a GPU also its memory."""
    found = [
        Check(LANES, partial(check_lanes, device, size, defers=False)),
        Check(DEFERRED, partial(check_lanes, device, size, defers=True)),
        Check(TWO_STEPS, partial(check_two_steps, device, size)),
    ]
    if device.type == "cuda":
        names = ("free_memory_tells_what_is_taken", "out_of_memory_is_told")
        found.append(Check(names, partial(check_memory, device)))
    return found


def check_lanes(device: torch.device, size: Size, *, defers: bool) -> Answers:
    """Every payload must have the bytes that it has when nothing else is under way, and so must the sum in float64.
    With ``defers`` weight gradients are computed after other microbatches, which must change nothing either."""
    with _deterministic():
        alone, beside = _Stage(device, size), _Stage(device, size, defers=defers)
        expected = [alone.one_by_one(work) for work in _works(1)]
        found = asyncio.run(beside.at_once([_works(1)]))
    answers = (found == expected, torch.equal(alone.part.gradient_sum(1), beside.part.gradient_sum(1)))
    return dict(zip(DEFERRED if defers else LANES, answers, strict=True))


def check_two_steps(device: torch.device, size: Size) -> Answers:
    """A step fed ahead while the one before is prepared and swapped: the bytes and sums of one thing after another."""
    first, early, fresh = _works(1), _works(2, early=True), _works(2)
    with _deterministic():
        alone, beside = (_Stage(device, size, window=2, defers=defers) for defers in (False, True))
        expected = [alone.one_by_one(work) for work in (*first, *early)]
        digests = [alone.close()]
        expected += [alone.one_by_one(work) for work in fresh]
        found = asyncio.run(beside.at_once([first, early, fresh], digests))
    same = torch.equal(alone.part.gradient_sum(2), beside.part.gradient_sum(2))
    return dict(zip(TWO_STEPS, (found == expected, same, len({*digests}) == 1 and len(digests) == 2), strict=True))


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


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _works(step: int, *, early: bool = False) -> list[StepWork]:
    """A step's microbatches, those fed early numbered after the others."""
    numbers = range(MICROBATCHES * early, MICROBATCHES * (1 + early))
    return [StepWork(step, MicrobatchId(_TRAINER, "00" * 8, 0, number), early) for number in numbers]


class _Stage:
    """A stage that adds in float64, where the order does not matter, and its microbatches."""

    def __init__(self, device: torch.device, size: Size, *, window: int = 1, defers: bool = False) -> None:
        model = size.model("bfloat16", dropout=0.1)
        spec, update = stage_spec(model), AdamW(OptimizerConfig())
        self.part = TrainedPart(spec, model, update, devices=(device,), accumulator="float64", window=window)
        self.part.defer_weight_gradients(defers)
        self.part.install(first_snapshot(model))
        specs = BoundarySpecs(
            activation=family_of(model).boundary(size.microbatch, size.sequence),
            tokens=token_spec(size.microbatch, size.sequence),
            codec=BFLOAT16,
            hosted=False,
        )
        self._compute, self._size, self._device = StageCompute(self.part, specs, device), size, device

    def one_by_one(self, work: StepWork) -> tuple[bytes, bytes]:
        """Return the payloads that a microbatch leaves: forward, and back."""
        inputs, material = self._material(work)
        output, graph = complete(self._compute.forward(inputs, material.seed, work, first=False))
        result = complete(self._compute.contribute(material, graph, _TRAINER))
        return bytes(output), bytes(result.gradient or b"")

    async def at_once(
        self, steps: Sequence[Sequence[StepWork]], digests: list[str] | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Return those of all microbatches, of which as many are under way as the device has lanes.

        Weight gradients are computed a microbatch late. While the second of ``steps`` is under way, the first is
        closed, and its digest added to ``digests``; the third comes after both.
        """
        thread = DeviceThread(self._device)
        found = [await self._in_lanes(thread, steps[0])]
        if digests is not None:
            one, digest = await asyncio.gather(self._in_lanes(thread, steps[1]), thread.run(self.close))
            digests.append(digest)
            found += [one, await self._in_lanes(thread, steps[2])]
        await thread.close()
        return [payloads for one in found for payloads in one]

    async def _in_lanes(self, thread: DeviceThread, works: Sequence[StepWork]) -> list[tuple[bytes, bytes]]:
        found, todo, turned = dict[StepWork, tuple[bytes, bytes]](), iter(works), deque[tuple[Material, Rest]]()

        async def lane() -> None:
            for work in todo:
                inputs, material = self._material(work)
                output, graph = await thread.run_phases(self._compute.forward(inputs, material.seed, work, first=False))
                result, rest = await thread.run_phases(self._compute.turn_back(material, graph, _TRAINER))
                found[work] = bytes(output), bytes(result.gradient or b"")
                if turned:
                    await thread.run_phases(self._compute.add_weights(*turned.popleft()))
                turned.append((material, rest))

        await asyncio.gather(*(lane() for _ in range(thread.lanes)))
        for material, rest in turned:
            await thread.run_phases(self._compute.add_weights(material, rest))
        return [found[work] for work in works]

    def close(self) -> str:
        """Prepare the open step and swap it; returns the digest."""
        mean = normal((self.part.layout.elements,), 1) * 1e-3
        digest = self.part.prepare(mean, lr=1e-3, clip=0.7, step=1)
        self.part.swap()
        return digest

    def _material(self, work: StepWork) -> tuple[bytearray, Material]:
        number = work.microbatch.position
        inputs, gradient = (self._payload(work, 2 * number + which) for which in (0, 1))
        material = Material(work=work, seed=number, first=False, input=inputs, gradient=gradient)
        return inputs, material

    def _payload(self, work: StepWork, seed: int) -> bytearray:
        return bytearray(BFLOAT16.encode(normal(self._size.shape, seed), going_forward(work)))
