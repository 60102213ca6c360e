"""Adapters beside frozen weights: a family's parts with LoRA, and the frozen weights as one string of bytes.

An adapted part is the family's own part, whose linear modules keep their place and their name, and get two matrices of
their own, ``lora_a`` (rank, in) and ``lora_b`` (out, rank). These are all of its state: they are what is trained,
averaged, copied and kept. The rest is frozen, and installed once (:func:`install_base`).

Shapes: B microbatch, T sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swarm.errors import BugError, StateError
from swarm.models.dropout import dropout, dropping, seed_of_drops
from swarm.models.family import ModelFamily, PartCost, PartModule
from swarm.models.layout import FlatLayout, install_tensors, state_of
from swarm.models.lora_config import BaseDType, LoraConfig
from swarm.models.nf4 import Nf4, quantise, sizes
from swarm.models.passes import recorded_linear
from swarm.models.spec import ModelConfig, PartSpec, TensorSpec

Stored = Tensor | Nf4
"""A frozen tensor as it is stored."""

# --- a family whose parts have adapters ------------------------------------------------------------------------------


class LoraFamily(ModelFamily):
    """The models of another family with adapters; see :class:`~swarm.models.family.ModelFamily`."""

    def __init__(self, model: ModelConfig, inner: ModelFamily, lora: LoraConfig) -> None:
        super().__init__(model)
        self.inner, self.lora = inner, lora

    @property
    def described(self) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return f"{self.inner.described}; LoRA of rank {self.lora.rank} beside it in {self.lora.base}"

    @property
    def packs(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.packs

    @property
    def balances(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.balances

    @property
    def mixture(self) -> bool:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.mixture

    def parts(self, split: Any) -> tuple[PartSpec, ...]:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.parts(split)

    def warm_up(self) -> None:
        """See :class:`~swarm.models.family.ModelFamily`."""
        self.inner.warm_up()

    def boundary(self, rows: int, sequence: int) -> TensorSpec:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.boundary(rows, sequence)

    def build(self, spec: PartSpec) -> PartModule:
        """See :class:`~swarm.models.family.ModelFamily`; needs :func:`install_base` before use as well."""
        part = self.inner.build(spec)
        kinds, linear = self._kinds(part), self._linear(part)
        part.frozen = frozenset(kinds)
        for path, module in linear:
            stored = kinds[path + ".weight"]
            apart = stored == "nf4" or (stored == "bfloat16" and module.weight.dtype == torch.float32)
            if self.lora.chooses(path):
                _adapt(module, self.lora, path)
            if apart:
                _store_apart(module)
        if self.lora.dropout:
            _heed_seed(part)
        return part

    def dense(self, spec: PartSpec) -> PartModule:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.build(spec)

    @property
    def experts(self) -> int:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.experts

    @property
    def uncut_experts(self) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return super().uncut_experts or "adapters are trained, and experts have none"

    def initial_weights(self, seed: int, spec: PartSpec | None = None, files: Path | None = None) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`: of the adapters, so that they change nothing at first."""
        part = self.build(spec or self.whole)
        return {name: _drawn(seed, name, tuple(tensor.shape)) for name, tensor in state_of(part).items()}

    def cost(self, spec: PartSpec, sequence: int) -> PartCost:
        """See :class:`~swarm.models.family.ModelFamily`: ``parameters`` are the adapters'."""
        whole, part = self.inner.cost(spec, sequence), self.build(spec)
        trained, base = sum(tensor.numel() for tensor in state_of(part).values()), self.base(spec)
        kinds = {slot.name: slot.kind for slot in base.slots}
        # What is stored apart is no tensor of the part: it lies in the string, all of which is held for it.
        copied = [t for name, t in _held(part).items() if t.dtype != getattr(torch, kinds[name], None)]
        return PartCost(
            parameters=trained,
            forward_flops=whole.forward_flops + 2 * trained,
            idle=whole.idle,
            frozen=whole.parameters,
            frozen_bytes=base.bytes,
            frozen_held=base.bytes + sum(tensor.numel() * tensor.element_size() for tensor in copied),
        )

    def used_share(self, name: str, parameter: Tensor) -> float:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.used_share(name, parameter)

    def export_config(self) -> dict[str, Any]:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.export_config()

    def export_weights(self, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`~swarm.models.family.ModelFamily`; takes merged weights (:func:`merged`)."""
        return self.inner.export_weights(spec, weights)

    def exported_module(self, path: str) -> str:
        """See :class:`~swarm.models.family.ModelFamily`."""
        return self.inner.exported_module(path)

    # --- the frozen weights --------------------------------------------------------------------------------------

    def base(self, spec: PartSpec) -> BaseLayout:
        """Return where a part's frozen weights lie in their string of bytes."""
        part = self.inner.build(spec)
        shapes = {name: tuple(tensor.shape) for name, tensor in state_of(part).items()}
        return BaseLayout.of((name, kind, shapes[name]) for name, kind in self._kinds(part).items())

    def base_weights(self, seed: int, spec: PartSpec, files: Path | None) -> dict[str, Tensor]:
        """Return the float32 weights of a part that are frozen. Raises as
        :meth:`~swarm.models.family.ModelFamily.initial_weights`."""
        return self.inner.initial_weights(seed, spec, files)

    def choices(self, spec: PartSpec) -> set[str]:
        """Return what the linear modules of a part's layers are called, by the last of their path."""
        return {path.rpartition(".")[2] for path, _ in self._linear(self.inner.build(spec))}

    def adapted(self, part: PartModule) -> list[str]:
        """Return the paths of the modules of a part, which :meth:`build` made, that have an adapter."""
        return [path for path, module in part.named_modules() if hasattr(module, "lora_a")]

    def _kinds(self, part: PartModule) -> dict[str, BaseDType]:
        """Return what each tensor of a part is stored in: vectors are few, and stay float32."""
        linear, base = {path + ".weight" for path, _ in self._linear(part)}, self.lora.base
        others: BaseDType = "bfloat16" if base == "nf4" else base
        return {
            name: "float32" if tensor.ndim < 2 else base if name in linear else others
            for name, tensor in state_of(part).items()
        }

    def _linear(self, part: PartModule) -> list[tuple[str, Any]]:
        """The linear modules of the layers: no embedding, no head, no stack of experts."""
        inner = self.inner.matrices(part)
        return [(path, m) for path, m in part.named_modules() if _is_linear(m) and path + ".weight" in inner]


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or stands_upright(module)  # what inherits from one may answer something else


def stands_upright(module: nn.Module) -> bool:
    """Return whether a module's weight is (in, out): GPT-2's, which transformers calls Conv1D."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _drawn(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """A as torch draws a linear module, evenly within ±1/√in; B zeros."""
    if name.endswith(".lora_b"):
        return torch.zeros(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(key))
    return (2 * drawn - 1) / math.sqrt(shape[1])


# --- one linear module -----------------------------------------------------------------------------------------------
# The module stays what it is, so that whatever looks at it finds it; only what it computes is another. That is no
# function of its own: a copy of the part, which holds the parameters of another step, must use its own adapters.


def _heed_seed(part: Any) -> None:
    """Have the adapters of a part drop by the seed that its forward is given: its layers do not hand it on."""
    part.forward = partial(_with_drops, part.forward)


def _with_drops(plain: Callable[[Tensor, int | None], Tensor], x: Tensor, seed: int | None = None) -> Tensor:
    with dropping(seed):
        return plain(x, seed)


def _adapt(module: Any, lora: LoraConfig, path: str) -> None:
    """Give a linear module an adapter, on the meta device. ``path`` is the module's in the whole model."""
    rows, columns = module.weight.shape[::-1] if stands_upright(module) else module.weight.shape
    kind = module.weight.dtype
    module.lora_a = nn.Parameter(torch.empty((lora.rank, columns), dtype=kind, device="meta"))
    module.lora_b = nn.Parameter(torch.empty((rows, lora.rank), dtype=kind, device="meta"))
    module.plain = partial(type(module).forward, module)
    module.forward = partial(_adapted, module, lora, path)


def _adapted(module: Any, lora: LoraConfig, path: str, x: Tensor) -> Tensor:
    seen = dropout(x, lora.dropout, seed=seed_of_drops(), layer=path)
    change = recorded_linear(recorded_linear(seen, module.lora_a), module.lora_b)
    answer: Tensor = module.plain(x) + change * lora.scale
    return answer


def _store_apart(module: Any) -> None:
    """Have a linear module use a weight that is stored smaller than it is computed with (:func:`install_base`)."""
    module.weight, module.stored = None, None
    plain = partial(_stored, module, stands_upright(module))
    if hasattr(module, "lora_a"):
        module.plain = plain
    else:
        module.forward = plain


def _stored(module: Any, upright: bool, x: Tensor) -> Tensor:
    if module.stored is None:
        raise BugError("a part with frozen weights was used before they were installed")
    answer: Tensor = _StoredLinear.apply(x, module.stored, upright)  # type: ignore[no-untyped-call]
    return answer if module.bias is None else answer + module.bias


class _StoredLinear(torch.autograd.Function):
    """x·Wᵀ with a weight that is made of its stored form, and again for the backward: it is never held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Stored, upright: bool) -> Tensor:
        """Keep the stored weight alone."""
        ctx.stored, ctx.upright = stored, upright
        return nn.functional.linear(x, _matrix(stored, upright, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient of x; the weight has none."""
        return grad @ _matrix(ctx.stored, ctx.upright, grad.dtype), None, None


def _matrix(stored: Stored, upright: bool, dtype: torch.dtype) -> Tensor:
    """(out, in)"""
    dense = dense_of(stored, dtype)
    return dense.t() if upright else dense


def dense_of(stored: Stored, dtype: torch.dtype) -> Tensor:
    """Return a stored tensor in a dtype: itself where it has that."""
    return stored.dense(dtype) if isinstance(stored, Nf4) else stored.to(dtype)


# --- frozen weights --------------------------------------------------------------------------------------------------


_ALIGNMENT = 64
_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class BaseSlot:
    """One tensor in the string: ``size`` bytes from ``offset``."""

    name: str
    kind: BaseDType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes; of nf4 the packed weights, then the scales."""
        elements = math.prod(self.shape)
        if self.kind == "nf4":
            packed, scales = sizes(elements)
            return packed + 2 * scales
        return elements * _BYTES[self.kind]


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """The frozen weights of a part as ``bytes`` bytes, each tensor on a boundary of 64 as if allocated alone."""

    slots: tuple[BaseSlot, ...]
    bytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, BaseDType, tuple[int, ...]]]) -> BaseLayout:
        """Return the layout of tensors in this order."""
        slots, offset = list[BaseSlot](), 0
        for name, kind, shape in tensors:
            slots.append(BaseSlot(name, kind, shape, offset))
            offset += -(-slots[-1].size // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(slots), offset)

    @property
    def flat(self) -> FlatLayout:
        """The string as a state of one vector is kept and handed out: its bits are no numbers."""
        return FlatLayout.from_shapes([("base", (self.bytes // 4,))]).kept_by(("base",))

    def pack(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the string, as a vector of :attr:`flat`, of float32 weights by name. Raises StateError for a missing
        or misshapen one, or one that is not finite."""
        string = torch.zeros(self.bytes, dtype=torch.uint8)
        for slot in self.slots:
            tensor = weights.get(slot.name)
            if tensor is None or tuple(tensor.shape) != slot.shape:
                raise StateError(f"{slot.name}: expected shape {slot.shape}; is it the same model?")
            place = string[slot.offset : slot.offset + slot.size]
            if slot.kind == "nf4":
                try:
                    packed = quantise(tensor)
                except ValueError as error:
                    raise StateError(f"{slot.name} has {error}") from None
                place[: packed.packed.numel()] = packed.packed
                place[packed.packed.numel() :].view(torch.bfloat16).copy_(packed.scales)
            else:
                place.view(getattr(torch, slot.kind)).copy_(tensor.reshape(-1))
        return string.view(torch.float32)

    def views(self, vector: Tensor) -> dict[str, Stored]:
        """Return the tensors of a string by name, without a copy."""
        string, found = vector.view(torch.uint8), dict[str, Stored]()
        for slot in self.slots:
            place = string[slot.offset : slot.offset + slot.size]
            if slot.kind == "nf4":
                packed, _ = sizes(math.prod(slot.shape))
                found[slot.name] = Nf4(place[:packed], place[packed:].view(torch.bfloat16), slot.shape)
            else:
                found[slot.name] = place.view(getattr(torch, slot.kind)).view(slot.shape)
        return found


def install_base(part: PartModule, stored: Mapping[str, Stored], device: torch.device) -> None:
    """Give an adapted part its frozen weights, for good: themselves where dtype and device agree, else a copy. Raises
    StateError for a missing name or a wrong shape."""
    if lacking := sorted(part.frozen - stored.keys()):
        raise StateError(f"{lacking[0]} is not among the frozen weights; is it the same model?")
    held = _held(part)
    install_tensors(part, held, {name: dense_of(stored[name], tensor.dtype) for name, tensor in held.items()}, device)
    for path, module in part.named_modules():
        if hasattr(module, "stored"):
            module.__dict__["stored"] = stored[path + ".weight"].to(device)


def _held(part: PartModule) -> dict[str, Tensor]:
    """The frozen weights that are tensors of the part: all that are not stored apart."""
    return {name: t for name, t in (*part.named_parameters(), *part.named_buffers()) if name in part.frozen}


def frozen_tensors(part: PartModule) -> list[Tensor]:
    """Return what a part holds that is not trained; nothing of one without adapters."""
    found: list[Tensor] = [p for name, p in part.named_parameters() if name in part.frozen]
    for module in part.modules():
        stored = module.__dict__.get("stored")
        found += [stored.packed, stored.scales] if isinstance(stored, Nf4) else [] if stored is None else [stored]
    return found


def merged(
    family: LoraFamily, spec: PartSpec, adapters: Mapping[str, Tensor], base: Mapping[str, Stored]
) -> dict[str, Tensor]:
    """Return the weights of a part with its adapters added to what was frozen, in float32: a copy of both."""
    weights = {name: dense_of(stored, torch.float32).clone() for name, stored in base.items()}
    part = family.build(spec)
    for path in family.adapted(part):
        change = family.lora.scale * (adapters[f"{path}.lora_b"].float() @ adapters[f"{path}.lora_a"].float())
        upright = stands_upright(part.get_submodule(path))
        weights[path + ".weight"] += change.t() if upright else change
    return weights
