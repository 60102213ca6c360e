"""Weight gradients computed later: the bits of an undivided backward, in every family, and what is held meanwhile."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from swarm.errors import BugError
from swarm.models.family import PartModule
from swarm.models.layout import install_weights
from swarm.models.lora import LoraFamily, install_base
from swarm.models.lora_config import LoraConfig
from swarm.models.passes import (
    DeferredGradients,
    Graph,
    LinearRecorder,
    recorded_linear,
    run_backward,
    run_backward_input,
    run_forward,
)
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from tests.harness.rigs.foreign import foreign_model
from tests.harness.rigs.models import MODEL

MODELS: dict[str, Any] = {
    "gpt": lambda: MODEL,
    "gpt in bfloat16": lambda: MODEL.model_copy(update={"compute": "bfloat16"}),
    **{name: lambda name=name: foreign_model(name) for name in ("llama", "gpt2", "qwen2", "mixtral")},
    "llama in bfloat16": lambda: foreign_model("llama", compute="bfloat16"),
    "lora": lambda: foreign_model("llama").model_copy(update={"lora": LoraConfig(rank=4)}),
}
DEFERRED = {"gpt2": 0, "lora": 2}
"""Least number of layers deferred, where that is not a whole block's."""


def stage(model: Any) -> PartModule:
    family = family_of(model)
    spec = family.parts(SplitConfig(stages=2))[1]
    part = family.build(spec)
    if isinstance(family, LoraFamily):
        base = family.base(spec)
        install_base(part, base.views(base.pack(family.base_weights(0, spec, None))), torch.device("cpu"))
        drawn = torch.Generator().manual_seed(5)
        begun = family.initial_weights(0, spec)
        weights = {name: torch.randn(tensor.shape, generator=drawn) * 0.05 for name, tensor in begun.items()}
    else:
        weights = family.initial_weights(0, spec)
    install_weights(part, weights, requires_grad=True)
    return part


def data(model: Any, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    boundary = family_of(model).boundary(rows, 16)
    drawn = torch.Generator().manual_seed(7)
    kind = getattr(torch, boundary.dtype)
    x, grad = (torch.randn(boundary.shape, generator=drawn).to(kind) for _ in range(2))
    return x, grad


def passed(part: PartModule, x: torch.Tensor, grad: torch.Tensor, *, defers: bool) -> tuple[torch.Tensor, Any, Any]:
    output, graph = run_forward(part, x, seed=3, graph=True, defers=defers)
    assert graph is not None
    back, rest = run_backward_input(graph, grad)
    return output, back, rest


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_both_halves_have_the_bits_of_the_whole(name: str, rows: int, checkpointing: bool) -> None:
    model = MODELS[name]()
    part = stage(model)
    part.activation_checkpointing = checkpointing
    x, grad = data(model, rows)
    expected_output, expected_back, whole = passed(part, x, grad, defers=False)
    output, back, rest = passed(part, x, grad, defers=True)
    assert whole._passes == []
    assert len(rest._passes) >= (0 if checkpointing else DEFERRED.get(name, 4)), "the fault: layers were deferred"
    assert torch.equal(output, expected_output)
    assert torch.equal(back, expected_back)
    expected, found = whole.finish(), rest.finish()
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (weight, one), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(one, other), weight
        assert one.stride() == other.stride(), weight


def test_weight_that_is_used_twice_gets_the_sum_in_the_order_of_autograd() -> None:
    drawn = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn((8, 8), generator=drawn))
    x, grad = torch.randn((5, 8), generator=drawn), torch.randn((5, 8), generator=drawn)

    def through(recorder: LinearRecorder | None) -> list[tuple[str, torch.Tensor]]:
        entered = x.clone().requires_grad_()
        if recorder is None:
            output = twice(entered, weight)
        else:
            with recorder:
                output = twice(entered, weight)
        return run_backward(Graph(output, entered, {"w": weight}, recorder), grad)[1]

    def twice(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return recorded_linear(torch.tanh(recorded_linear(hidden, weight)), weight) + hidden @ weight

    recorder = LinearRecorder({"w": weight})
    ((_, found),), ((_, expected),) = through(recorder), through(None)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert recorder.passes == [], "spent"


def test_graph_and_activations_are_free_after_the_first_half_and_everything_after_the_second() -> None:
    part = stage(MODEL)
    x, grad = data(MODEL)
    _, graph = run_forward(part, x, seed=None, graph=True, defers=True)
    assert graph.output is not None
    node = weakref.ref(graph.output)
    _, rest = run_backward_input(graph, grad)
    gc.collect()
    assert node() is None
    inputs = weakref.ref(rest._passes[0].input)
    assert rest.bytes > inputs().nbytes  # type: ignore[union-attr]
    rest.finish()
    assert inputs() is None
    with pytest.raises(BugError, match="has no gradient"):
        rest.finish()


def test_input_that_was_changed_in_place_is_a_bug() -> None:
    weight = nn.Parameter(torch.ones((2, 2)))
    x = torch.ones((1, 2), requires_grad=True)
    recorder = LinearRecorder({"w": weight})
    with recorder:
        hidden = x * 1
        output = recorded_linear(hidden, weight)
    hidden.add_(1)
    with pytest.raises(BugError, match="changed in place"):
        run_backward_input(Graph(output, x, {"w": weight}, recorder), torch.ones((1, 2)))


def test_parameter_that_took_no_part_is_a_bug() -> None:
    with pytest.raises(BugError, match="w has no gradient"):
        DeferredGradients(("w",), {}, []).finish()
