"""Find out where a model of ``transformers`` can be cut: by running it once, without data, and watching.

Which modules run before the first layer and after the last, what a layer is given and what it answers follows from that
pass, so no family needs code of its own. A model is refused where a cut would change what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from swarm.errors import ConfigError

_MAX_DEPTH = 4
_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a model can be cut.

    ``path`` names the list of its ``count`` layers; ``before`` and ``after`` are the modules with weights that run
    before the first and after the last of them. ``answers`` has for each layer the length of the tuple that it answers,
    0 for a tensor. ``given`` is what a layer gets beside the hidden state.
    """

    path: str
    count: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    answers: tuple[int, ...]
    given: tuple[str, ...]


class NotSeparable(ConfigError):
    """A model whose layers cannot be given to several peers."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__("model", model, "a model whose layers can be parted", "Use another model.", why=why)


def find_anatomy(model: Any) -> Anatomy:
    """Run the model's own forward once over tensors without data: about half a second, no memory.

    Args:
        model: What :func:`~swarm.models.hf.skeleton.skeleton` returns.

    Raises:
        NotSeparable: Its layers cannot be parted; the error says why.
    """
    name, count = str(model.config.model_type), int(model.config.get_text_config().num_hidden_layers)
    path, layers = _layer_list(model, name, count)
    _check_unshared(name, layers)
    outside = {at: module for at, module in model.named_modules() if not at.startswith(path) and module._parameters}
    ancestors = {path.rsplit(".", k)[0] for k in range(1, path.count(".") + 1)} | {""}
    for at in sorted(set(outside) & ancestors):
        raise NotSeparable(name, f"{at or 'the model'} itself has weights: {', '.join(outside[at]._parameters)}")
    watch = _Watch(name)
    with watch.over(layers, outside):
        _pass_without_data(model)
    ran = [at for at in watch.order if isinstance(at, int)]
    if ran != list(range(count)):
        raise NotSeparable(name, f"its layers ran in the order {ran}")
    first, last = watch.order.index(0), watch.order.index(count - 1)
    if between := [at for at in watch.order[first:last] if not isinstance(at, int)]:
        raise NotSeparable(name, f"{between[0]} runs between its layers")
    before = tuple(dict.fromkeys(str(at) for at in watch.order[:first]))
    after = tuple(dict.fromkeys(str(at) for at in watch.order[last + 1 :]))
    if idle := [at for at in outside if at not in before and at not in after]:
        raise NotSeparable(name, f"{idle[0]} has weights and takes no part in text")
    answers = tuple(watch.answers[i] for i in range(count))
    return Anatomy(path, count, before, after, answers, tuple(sorted(watch.given)))


def _layer_list(model: nn.Module, name: str, count: int) -> tuple[str, nn.ModuleList]:
    """The outermost list of so many modules, each of which has weights."""
    lists = {
        at: module
        for at, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(next(layer.parameters(), None) is not None for layer in module)
    }
    outer = [at for at in lists if not any(at.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise NotSeparable(
            name, f"it has {len(outer)} lists of {count} layers{': ' if outer else ''}{', '.join(outer)}"
        )
    return outer[0], lists[outer[0]]


def _check_unshared(name: str, layers: nn.ModuleList) -> None:
    owner: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            if owner.setdefault(id(parameter), number) != number:
                raise NotSeparable(name, f"layers {owner[id(parameter)]} and {number} share weights")


@dataclass(slots=True)
class _Watch:
    """What ran in which order, what layers were given, what they answered."""

    model: str
    order: list[int | str] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def over(self, layers: nn.ModuleList, outside: dict[str, nn.Module]) -> _Hooks:
        handles: list[Any] = []
        for number, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(self._before(number), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._after(number)))
        for at, module in outside.items():
            handles.append(module.register_forward_pre_hook(lambda _module, _args, at=at: self.order.append(at)))
        return _Hooks(handles)

    def _before(self, number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.order.append(number)
            beside = [(str(at), value) for at, value in enumerate(args) if at]
            beside += [(key, value) for key, value in kwargs.items() if key != "hidden_states"]
            for key, value in beside:
                tensors = list(_tensors(value))
                if tensors:
                    self.given.add(key)
                if any(tensor.requires_grad for tensor in tensors):
                    why = f"layer {number} is given {key} with the hidden state, and it depends on the text"
                    raise NotSeparable(self.model, why)

        return hook

    def _after(self, number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: tuple[Any, ...], answer: Any) -> None:
            self.answers[number] = len(answer) if isinstance(answer, tuple) else 0

        return hook


@dataclass(slots=True)
class _Hooks:
    handles: list[Any]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner, depth + 1)
    elif depth < _MAX_DEPTH and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        yield from _tensors(vars(value), depth + 1)


def _pass_without_data(model: nn.Module) -> None:
    """The parameters are bfloat16, in which every kernel that a family uses may be asked for."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes: dict[str, Tensor] = {}
        one: dict[int, Tensor] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            dtype = torch.bfloat16 if p.is_floating_point() else p.dtype
            made = one.setdefault(id(p), torch.empty(p.shape, dtype=dtype, requires_grad=p.is_floating_point()))
            fakes[name] = made
        fakes |= {name: torch.empty(b.shape, dtype=b.dtype) for name, b in model.named_buffers()}
        given = {"input_ids": torch.zeros((1, _TOKENS), dtype=torch.long), "use_cache": False}
        functional_call(model, fakes, (), given, tie_weights=False, strict=True)
