"""A stage without its experts, and all shards of these, in one process: to try whether they are the whole stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarm.ids import PartName
from swarm.models.exchange import Dispatch, GradientDispatch, Steps, T
from swarm.models.experts import ExpertShard
from swarm.models.family import ModelFamily, PartModule
from swarm.models.layout import install_weights
from swarm.models.passes import Gradients, run_experts, run_experts_backward
from swarm.models.spec import PartSpec


def shard_specs(spec: PartSpec, number: int) -> list[PartSpec]:
    """Return the specs of a stage's shards."""
    names = [PartName(f"{spec.name}.x{at}") for at in range(number)]
    return [replace(spec, name=name, expert_shards=number, shard=at) for at, name in enumerate(names)]


def without_experts(family: ModelFamily, spec: PartSpec, number: int, weights: Mapping[str, Tensor]) -> PartModule:
    """Return a stage whose experts are in so many shards, given the whole stage's weights."""
    spec = replace(spec, expert_shards=number)
    part = family.build(spec)
    install_weights(part, family.cut(spec, weights), requires_grad=True)
    return part


class LocalShards:
    """All shards of a stage, which answer what it asks.

    Attributes:
        specs: Theirs, in order.
        asked: What they were asked for.
        gradients: Of each, what backwards left of its parameters.
    """

    def __init__(self, family: ModelFamily, spec: PartSpec, number: int, weights: Mapping[str, Tensor]) -> None:
        self.specs, self.parts = shard_specs(spec, number), list[ExpertShard]()
        for one in self.specs:
            part: Any = family.build(one)
            install_weights(part, family.cut(one, weights), requires_grad=True)
            self.parts.append(part)
        self._experts = [one.experts_of(family.experts) for one in self.specs]
        self._graphs = dict[tuple[int, int], tuple[Any, Tensor]]()
        self.asked, self.gradients = list[Dispatch | GradientDispatch](), [Gradients() for _ in self.parts]

    def driven(self, steps: Steps[T], *, defers: bool = False) -> T:
        """Return what the steps of the stage's pass return."""
        answer: Any = None
        while True:
            try:
                self.asked.append(steps.send(answer))
            except StopIteration as end:
                value: T = end.value
                return value
            one = self.asked[-1]
            answer = self._forward(one, defers=defers) if isinstance(one, Dispatch) else self._backward(one)

    def _forward(self, asked: Dispatch, *, defers: bool) -> Tensor:
        total = torch.zeros_like(asked.hidden)
        for at, part in enumerate(self.parts):
            rows = asked.rows_of(self._experts[at])
            answer, graph = run_experts(part, asked.taken(rows), graph=True, defers=defers)
            self._graphs[asked.layer, at] = graph, rows
            total.index_add_(0, rows, answer)
        return total

    def _backward(self, asked: GradientDispatch) -> tuple[Tensor, Tensor]:
        of_hidden = torch.zeros_like(asked.gradient)
        of_weights = torch.zeros(len(asked.gradient), self._graphs[asked.layer, 0][0].gates.shape[1])
        for at in range(len(self.parts)):
            graph, rows = self._graphs.pop((asked.layer, at))
            hidden, weights, rest = run_experts_backward(graph, asked.gradient.index_select(0, rows))
            of_hidden.index_add_(0, rows, hidden)
            of_weights.index_add_(0, rows, weights)
            self.gradients[at] += rest.finish()
        return of_hidden, of_weights
