"""The rig of ``swarm.models``: small GPTs, and a family that is nothing like our own.

The foreign family's config is JSON in a string, its weights come from a file, its head is tied to its table, its layers
have a buffer that is part of the state, and a part is cut out of the whole module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from swarm.errors import ConfigError, StateError
from swarm.models.family import ModelFamily, PartCost, PartModule, Work
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import state_of
from swarm.models.spec import PartSpec, TensorSpec
from swarm.schema import Section

MODEL = GptConfig(vocab_size=300, dim=32, layers=2, heads=4, context=16)
TINY = GptConfig(vocab_size=300, dim=16, layers=2, heads=2, context=8)


class ForeignConfig(Section):
    """``config`` is theirs, ``source`` the file with the weights."""

    family: Literal["foreign"]
    config: str
    source: str = ""
    context: int = 8

    @property
    def theirs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.config)
        return found

    @property
    def vocab_size(self) -> int:
        return int(self.theirs["vocab"])

    @property
    def layers(self) -> int:
        return int(self.theirs["depth"])

    def check(self) -> None:
        if "depth" not in self.theirs:
            raise ConfigError("model.config", self.config, "a depth", "Add it.")


class Layer(nn.Module):
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("scale", torch.empty(width))
        self.register_buffer("once", torch.ones(1, device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x).tanh() * self.scale
        return out


class ForeignPart(PartModule):
    def __init__(self, model: ForeignConfig, spec: PartSpec) -> None:
        super().__init__(model)
        theirs = model.theirs
        self.wte = nn.Embedding(theirs["vocab"], theirs["width"]) if spec.embedding else None
        layers = [Layer(theirs["width"]) for _ in range(theirs["depth"])]
        self.h = nn.ModuleDict({str(i): layers[i] for i in range(spec.first_layer, spec.last_layer)})
        self.lm_head = nn.Linear(theirs["width"], theirs["vocab"], bias=False) if spec.head else None
        if self.wte is not None and self.lm_head is not None:
            self.lm_head.weight = self.wte.weight

    def embed(self, tokens: Tensor, seed: int | None = None) -> Tensor:
        assert self.wte is not None
        out: Tensor = self.wte(tokens)
        return out

    def forward(self, x: Tensor, seed: int | None = None) -> Tensor:
        hidden = x if x.is_floating_point() else self.embed(x)
        for layer in self.h.values():
            hidden = layer(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None
        out: Tensor = self.lm_head(hidden)
        return out

    def parameters_of(self, work: Work) -> dict[str, nn.Parameter]:
        ends = {id(module.weight) for module in (self.wte, self.lm_head) if module is not None}
        return {name: p for name, p in self.named_parameters() if (id(p) in ends) == (work != "forward")}


class ForeignFamily(ModelFamily):
    def __init__(self, model: ForeignConfig) -> None:
        super().__init__(model)
        self._model = model

    @property
    def described(self) -> str:
        return f"foreign, {self.layers} layers"

    def build(self, spec: PartSpec) -> PartModule:
        with torch.device("meta"):
            return ForeignPart(self._model, spec)

    def boundary(self, rows: int, sequence: int) -> TensorSpec:
        return TensorSpec((rows, sequence, self._model.theirs["width"]), "float32")

    def initial_weights(self, seed: int, spec: PartSpec | None = None, files: Path | None = None) -> dict[str, Tensor]:
        try:
            with safe_open(self._model.source, framework="pt") as file:
                return {name: file.get_tensor(name) for name in state_of(self.build(spec or self.whole))}
        except OSError as error:
            raise StateError(f"{self._model.source}: {error}") from error

    def cost(self, spec: PartSpec, sequence: int) -> PartCost:
        width, layers = self._model.theirs["width"], spec.last_layer - spec.first_layer
        table = self.vocab_size * width * (spec.embedding or spec.head)
        return PartCost(parameters=layers * (width + 1) * width + table, forward_flops=2 * layers * width * width)


def write_weights(path: Path, module: PartModule) -> None:
    """Write random weights for a whole model."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(t.shape, generator=generator) / 3 for name, t in state_of(module).items()}, path)
