"""Mixtures of ``transformers`` whose experts others hold, without code of any family's own.

Families hand what a token goes to, and how much each counts, to a function that transformers looks up by name. Here one
is registered that asks others. A shard is the family's own module of experts with fewer of them: it finds each expert's
matrices where it looks for a row of a stack, one parameter an expert. Choices of others' experts get the number that
the module skips.

Imports transformers, so anyone who imports this file does so inside a function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm.models.exchange import ask_experts
from swarm.models.experts import ExpertShard
from swarm.models.hf.anatomy import Anatomy
from swarm.models.hf.hf_config import HfConfig
from swarm.models.spec import PartSpec

ELSEWHERE = "swarm_elsewhere"
"""What transformers knows experts as that are asked for."""


def experts_in(whole: nn.Module, anatomy: Anatomy, first: int, last: int) -> Iterator[tuple[int, str, Any]]:
    """Yield the modules of experts in layers ``first`` up to, not including, ``last`` of a model, whose function
    transformers looks up: the layer, the path, the module."""
    for number in range(first, last):
        layer = f"{anatomy.path}.{number}"
        for path, module in whole.get_submodule(layer).named_modules(prefix=layer):
            if hasattr(module, "_is_expert_parallel"):
                yield number, path, module


def leave_experts(whole: Any, anatomy: Anatomy, spec: PartSpec) -> bool:
    """Take the experts out of the layers of a part, which asks for them from now on. Return whether there are some."""
    found = list(experts_in(whole, anatomy, spec.first_layer, spec.last_layer))
    for number, _, module in found:
        module._parameters.clear()
        module.asks_for = number
    if found:
        whole.set_experts_implementation(ELSEWHERE)
    return bool(found)


def _ask(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return ask_experts(module.asks_for, hidden, index, weights)


ALL_EXPERTS_FUNCTIONS[ELSEWHERE] = _ask


class _Stack:
    """One kind of matrix of some experts: what a family's code takes for a stack of them."""

    def __init__(self, experts: nn.Module, first: int, name: str) -> None:
        self._experts, self._first, self._name = experts, first, name

    def __getitem__(self, number: Any) -> Tensor:
        found: Tensor = getattr(self._experts.get_submodule(str(self._first + int(number))), self._name)
        return found


class HfShard(ExpertShard):
    """A shard of the experts of a mixture, which computes them one after the other."""

    def __init__(self, model: HfConfig, spec: PartSpec, whole: Any, anatomy: Anatomy) -> None:
        """Take them out of ``whole``, a skeleton that nobody else has, whose anatomy is known."""
        found = list(experts_in(whole, anatomy, spec.first_layer, spec.last_layer))
        super().__init__(model, {number: f"model.{path}" for number, path, _ in found})
        whole.set_experts_implementation("eager")
        for _, path, module in found:
            own = spec.experts_of(module.num_experts)
            stacks, module.num_experts = dict(module._parameters), len(own)
            module._parameters.clear()
            for number in own:
                one = nn.Module()
                for name, stack in stacks.items():
                    one.register_parameter(name, nn.Parameter(torch.empty_like(stack[number])))
                module.add_module(str(number), one)
            for name in stacks:
                setattr(module, name, _Stack(module, own.start, name))
            module.first = own.start
            self.put(f"model.{path}", module)

    def forward(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """See :class:`~swarm.models.experts.ExpertShard`."""
        experts: Any = self.experts_of(layer)
        own = index - experts.first
        own = own.where((own >= 0) & (own < experts.num_experts), experts.num_experts)
        answer: Tensor = experts(hidden, own, weights)
        return answer
