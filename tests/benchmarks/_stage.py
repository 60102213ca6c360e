"""Stages of several sizes, with weights, for the benchmark ``device``. No network, no event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.models.gpt_config import GptConfig
from swarm.models.hf.hf_config import HfConfig, canonical
from swarm.models.registry import family_of
from swarm.models.spec import DType, ModelConfig, PartSpec, SplitConfig
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import Snapshot, initial_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A stage and what passes through it: D, H, blocks, T, B."""

    name: str
    dim: int
    heads: int
    blocks: int
    sequence: int
    microbatch: int

    def __str__(self) -> str:
        return (
            f"{self.name}: dim {self.dim}, {self.heads} heads, {self.blocks} blocks, sequence {self.sequence}, "
            f"microbatch {self.microbatch}"
        )

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.microbatch * self.sequence

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an activation: (B, T, D)."""
        return self.microbatch, self.sequence, self.dim

    def model(self, compute: DType, dropout: float = 0.0) -> GptConfig:
        """A model with exactly this stage between its ends."""
        return GptConfig(
            vocab_size=257,
            dim=self.dim,
            layers=self.blocks,
            heads=self.heads,
            context=self.sequence,
            dropout=dropout,
            compute=compute,
        )

    def llama(self, compute: DType) -> HfConfig:
        """A Llama of ``transformers`` with this stage between its ends, random weights, two queries to a key."""
        config = {
            "model_type": "llama",
            "vocab_size": 257,
            "hidden_size": self.dim,
            "intermediate_size": 2 * self.dim,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "max_position_embeddings": self.sequence,
        }
        return HfConfig(
            family="hf",
            architecture="llama",
            layers=self.blocks,
            width=self.dim,
            vocab_size=257,
            context=self.sequence,
            scratch=True,
            compute=compute,
            config=canonical(config),
        )


TINY = Size(name="tiny", dim=64, heads=4, blocks=2, sequence=32, microbatch=4)
"""For many microbatches in bfloat16 on a CPU: without AVX-512 torch multiplies such matrices 50 times slower."""
SMALL = Size(name="small", dim=256, heads=4, blocks=2, sequence=128, microbatch=8)
LARGE = Size(name="large", dim=2048, heads=16, blocks=4, sequence=1024, microbatch=8)
"""For a GPU: minutes per microbatch on a CPU."""


def stage_spec(model: ModelConfig) -> PartSpec:
    """The one stage of a model that is not cut further."""
    return family_of(model).parts(SplitConfig(stages=1))[0]


def ends_spec(model: ModelConfig) -> PartSpec:
    """What a trainer holds of a model: its private ends."""
    return family_of(model).parts(SplitConfig(stages=1))[-1]


def first_snapshot(model: ModelConfig, spec: PartSpec | None = None) -> Snapshot:
    """The initial state of a part, without ``spec`` the stage; our model's is the same on every machine."""
    spec = spec or stage_spec(model)
    layout = family_of(model).layout(family_of(model).build(spec))
    weights = family_of(model).initial_weights(0, spec)
    return initial_snapshot(spec.name, layout, weights)


def trained_part(
    model: ModelConfig, device: torch.device, snapshot: Snapshot, spec: PartSpec | None = None
) -> TrainedPart:
    """A part on a device, without ``spec`` the stage, holding ``snapshot``."""
    part = TrainedPart(spec or stage_spec(model), model, AdamW(OptimizerConfig()), devices=(device,))
    part.install(snapshot)
    return part


def normal(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal float32 values on the CPU, a function of the arguments."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes of GPU memory that tensors have now; 0 on a CPU, where nobody counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
