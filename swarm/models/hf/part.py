"""One part of any causal language model of ``transformers``, by surgery on the model's own modules.

Every part runs the model's *own* forward, so masks, tables of angles, kinds of layers, multipliers and soft caps are
computed by the model's own code. Layers of other parts hand on what they get; what the part gets replaces the hidden
state where its first layer begins, and the pass is left where its last one ends.

Shapes: B microbatch, T sequence, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swarm.errors import BugError, ConfigError
from swarm.models.balance import balanced, targets_counted
from swarm.models.family import PartModule, Work
from swarm.models.hf.anatomy import Anatomy
from swarm.models.hf.hf_config import HfConfig
from swarm.models.packing import packed_positions
from swarm.models.spec import PartSpec


class _PassLeft(Exception):
    """The part's last layer is behind us: nothing that follows is ours."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class _Pass:
    """What the pass under way does at the layers: ``entering`` replaces the hidden state before layer ``at``, layers
    before that hand on; before layer ``leave`` it is left. The number of layers stands for behind the last one."""

    entering: Tensor | None = None
    at: int = 0
    leave: int | None = None


class _Gate(nn.Module):
    """Where a layer of another part is. Keeps what the model asks a layer for, such as its attention's kind."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        for key, value in vars(layer).items():
            if not key.startswith("_") and isinstance(value, str | int | float | bool | type(None)):
                setattr(self, key, value)
        self.__dict__["forward"] = forward


class _Absent(nn.Module):
    """Where an embedding or a head of another part is. What it answers is thrown away, and has the right shape."""

    def __init__(self, under_way: _Pass) -> None:
        super().__init__()
        self._under_way = under_way

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """Answer what came into the part."""
        if self._under_way.entering is None:
            raise BugError("a module of another part ran with nothing to stand for it")
        return self._under_way.entering


def _answered(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
    """Return what a layer makes of a hidden state, with what else it was given."""
    found = compute(hidden, *args[1:], **kwargs) if args else compute(**(kwargs | {"hidden_states": hidden}))
    answer: Tensor = found[0] if isinstance(found, tuple) else found
    return answer


def _tied(whole: nn.Module, anatomy: Anatomy) -> tuple[str, ...]:
    """Names of the weights that modules before the layers share with modules after them."""
    first = {id(p) for name in anatomy.before for p in whole.get_submodule(name).parameters()}
    return tuple(
        name
        for name, p in whole.named_parameters()
        if id(p) in first and any(p is other for at in anatomy.after for other in whole.get_submodule(at).parameters())
    )


def _routers(whole: Any, layers: Any) -> tuple[dict[int, nn.Module], float]:
    """The router of each layer that has one, and what one layer's balance loss weighs a target."""
    kind = whole._can_record_outputs["router_logits"].target_class
    found = {number: one for number, layer in enumerate(layers) for one in layer.modules() if isinstance(one, kind)}
    return found, float(whole.config.router_aux_loss_coef) / max(1, len(found))


class HfPart(PartModule):
    """See :class:`~swarm.models.family.PartModule`. Nothing is dropped out: ``seed`` does nothing."""

    def __init__(self, model: HfConfig, spec: PartSpec, whole: Any, anatomy: Anatomy) -> None:
        """Cut ``whole``, a skeleton that nobody else has, whose anatomy is known.

        Raises:
            ConfigError: Its head shares weights with its embedding, which another part would have.
        """
        super().__init__(model)
        tied = _tied(whole, anatomy)
        if tied and spec.embedding != spec.head:
            why = f"its head is its embedding, {tied[0]}: two stages would train it apart"
            remedy = "Use private ends, or a single stage."
            raise ConfigError("split.ends", "hosted", "private for this model", remedy, why=why)
        self._spec, self._anatomy, self._under_way = spec, anatomy, _Pass()
        if spec.expert_shards:
            from swarm.models.hf.experts import leave_experts

            self.asks = leave_experts(whole, anatomy, spec)
        layers = whole.get_submodule(anatomy.path)
        self._routers, self._balance = _routers(whole, layers) if model.balanced else ({}, 0.0)
        for number, layer in enumerate(layers):
            own = spec.first_layer <= number < spec.last_layer
            # Not a function of its own: a copy of this part must run its own layers.
            through = partial(self._through, number, layer.forward if own else None)
            if own:
                layer.forward = through
            else:
                layers[number] = _Gate(layer, through)
        ours = {*(anatomy.before if spec.embedding else ()), *(anatomy.after if spec.head else ())}
        for name in {*anatomy.before, *anatomy.after} - ours:
            whole.set_submodule(name, _Absent(self._under_way))
        self.model = whole

    # --- what a part computes ------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor, seed: int | None = None) -> Tensor:
        """See :class:`~swarm.models.family.PartModule`."""
        if not self._spec.embedding:
            raise BugError("this part has no embedding")
        return self._run(_Pass(leave=0), tokens)

    def forward(self, x: Tensor, seed: int | None = None) -> Tensor:
        """See :class:`~swarm.models.family.PartModule`."""
        if self._spec.first_layer == self._spec.last_layer:
            raise BugError("this part has no layers")
        if not x.is_floating_point():
            return self._run(_Pass(leave=self._spec.last_layer), x)
        return self._run(_Pass(x, self._spec.first_layer, self._spec.last_layer), x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`~swarm.models.family.PartModule`."""
        if not self._spec.head:
            raise BugError("this part has no head")
        return self._run(_Pass(hidden, self._anatomy.count), hidden).float()

    def parameters_of(self, work: Work) -> dict[str, nn.Parameter]:
        """See :class:`~swarm.models.family.PartModule`."""
        spec, anatomy = self._spec, self._anatomy
        modules = {"embed": anatomy.before, "head": anatomy.after}.get(work, ())
        if work == "forward":
            modules = tuple(f"{anatomy.path}.{i}" for i in range(spec.first_layer, spec.last_layer))
            modules += anatomy.before if spec.embedding and modules else ()
        used = {id(p) for name in modules for p in self.model.get_submodule(name).parameters()}
        return {name: p for name, p in self.named_parameters() if id(p) in used}

    def tie(self) -> None:
        """Make the weights one again that embedding and head share, after modules were given new ones."""
        if self._spec.embedding and self._spec.head:
            self.model.tie_weights()

    # --- the model's own forward ---------------------------------------------------------------------------------

    def _run(self, under_way: _Pass, x: Tensor) -> Tensor:
        now = self._under_way
        now.entering, now.at, now.leave = under_way.entering, under_way.at, under_way.leave
        given: dict[str, Tensor]
        if under_way.entering is None:
            given = {"input_ids": x}
        elif self._spec.embedding:  # what it embeds is replaced
            given = {"input_ids": torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)}
        else:
            given = {"inputs_embeds": x}
        try:
            answer: Tensor = self.model(**given, position_ids=packed_positions(), use_cache=False).logits
            return answer
        except _PassLeft as left:
            return left.hidden
        finally:
            now.entering = None

    def _through(self, number: int, compute: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Return what runs in place of a layer; ``compute`` is its own forward, None for one of another part."""
        last, width = number == self._anatomy.count - 1, self._anatomy.answers[number]
        now = self._under_way
        hidden = args[0] if args else kwargs["hidden_states"]
        if now.leave == number:
            raise _PassLeft(hidden)
        if now.at == number and now.entering is not None:
            hidden = now.entering
        if compute is not None and number >= now.at:
            layer = self.model.get_submodule(f"{self._anatomy.path}.{number}")
            run = partial(_answered, compute, args, kwargs)
            weight = self._balance * targets_counted() if torch.is_grad_enabled() else 0.0
            if weight and number in self._routers:
                run = partial(balanced, run, self._routers[number], weight)
            hidden = self.through(layer, run, hidden)
        if last and now.leave == number + 1:
            raise _PassLeft(hidden)
        if last and now.at == number + 1:
            hidden = now.entering
        return (hidden, *[None] * (width - 1)) if width else hidden
