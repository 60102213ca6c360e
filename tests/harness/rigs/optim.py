"""The rig of ``swarm.optim``: microbatches for a small model, and a digest of some optimizer steps, for comparing
processes and machines: ``python -m tests.harness.rigs.optim`` prints it."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from swarm.ids import MicrobatchId, PeerId, StepWork
from swarm.models.layout import FlatLayout
from swarm.optim.adamw import AdamWState, StepNumbers, adamw_step
from swarm.optim.schedules import OptimizerConfig
from tests.harness.rigs.models import MODEL as MODEL

GOLDEN = "89dca61508fac986f9fdfeaf2e2f25acd2677b899eb7ac44bbdfa1407d3cf50d"
"""What every machine must print. A change of this value is a change of every run's history."""

_LAYOUT = FlatLayout.from_shapes([("table", (331, 57)), ("norm", (57,)), ("matrix", (331, 57))], {"matrix"})


def work(position: int, step: int = 1, *, early: bool = False) -> StepWork:
    """Return what counts of a microbatch of a step."""
    return StepWork(step, microbatch(position), early)


def microbatch(position: int) -> MicrobatchId:
    """Return a microbatch of the only trainer."""
    return MicrobatchId(PeerId("trainer"), "00" * 8, 0, position)


def data(position: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a microbatch of :data:`MODEL`, the same ones whenever they are asked for."""
    tokens = torch.randint(0, MODEL.vocab_size, (2, 17), generator=torch.Generator().manual_seed(position))
    return tokens[:, :-1], tokens[:, 1:]


def _numbers(seed: int) -> Tensor:
    """Return values over many magnitudes, subnormal ones included, made of exact operations."""
    index = torch.arange(_LAYOUT.elements, dtype=torch.int64)
    mixed = ((index + 1 + seed * 7919) * 2654435761) % (1 << 32)
    mantissa = (mixed % (1 << 24)).float() - float(1 << 23)
    return torch.ldexp(mantissa, -((mixed >> 24) % 140)).clamp(-8.0, 8.0)


def digest_of_steps(device: str = "cpu") -> str:
    """Return the hex sha256 of parameters and moments after five steps."""
    zeros = torch.zeros(_LAYOUT.elements, device=device)
    state = AdamWState(_numbers(0).to(device), zeros, zeros)
    config = OptimizerConfig()
    for step in range(1, 6):
        numbers = StepNumbers(step=step, lr=3e-3 / step, clip=0.37)
        state = adamw_step(state, _numbers(step).to(device), _LAYOUT, config, numbers)
    total = hashlib.sha256()
    for vector in (state.params, state.exp_avg, state.exp_avg_sq):
        total.update(vector.cpu().numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(digest_of_steps())
