"""Cut the layers of a part across the devices of one peer (tensor parallelism: Megatron, arXiv 1909.08053).

What attention and feed-forward answer is a sum over heads, or over inner columns. Each becomes several modules of its
own kind, its strips, that have a share of the heads or columns each. What goes in goes to all of them, and what they
answer is added in their order on the first device. Which device a strip is on changes no number. So a run that fixes
how many there are (``split.tensor``) has the same bits at every peer, whatever its devices.

Nothing else is cut: layout, state, digests, averaging and downloads are of whole tensors. A strip's weights are its
share of them, put there by :meth:`Strips.install`; gradients are added up where they are made, and joined by
:meth:`Strips.add_into`. There is no group of processes: autograd goes from device to device.

Shapes: B microbatch, T sequence, D width; I inner columns or heads times their width.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from swarm.errors import ConfigError
from swarm.models.layout import FlatLayout, aligned, install_tensors, refresh_weights, state_of

COLUMNS, ROWS, ALIKE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of a module of which strips have some outputs, some inputs, or all of it."""

_WHOLE = {
    "colwise_gather_output": "it looks across heads, or a matrix of it has several in one",
    "rowwise_split_input": "it looks across heads, or a matrix of it has several in one",
    "mla_kv_a_proj": "all heads share a latent",
    "moe_tp_experts": "it has experts",
    "packed_colwise": "it has experts",
    "packed_rowwise": "it has experts",
}
_NUMBER, _STRIP = re.compile(r"(?<=\.)\d+(?=\.|$)"), re.compile(r"\.strips\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How a family's layers can be cut: the ``styles`` of modules by their path in a part, ``*`` for a layer's number,
    in the words of transformers; the heads of an attention, which strips share out; and why modules that no style names
    stay whole."""

    styles: Mapping[str, str] = field(default_factory=dict)
    heads: int = 0
    key_value_heads: int = 0
    why_whole: str = "transformers says of no way to cut it"


def kind_of(path: str) -> str:
    """Return a module's path with ``*`` for the number of its layer."""
    return _NUMBER.sub("*", path)


# --- what can be cut -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorCut:
    """What of a part's layers can be cut: paths of modules, each with the styles of those in it; and why other kinds of
    modules stay whole on the first device. ``share`` is that of the part's elements which are cut."""

    units: Mapping[str, Mapping[str, str]]
    whole: Mapping[str, str]
    share: float


def find_cut(part: nn.Module, plan: TensorPlan) -> TensorCut:
    """Return what of a part, which has no strips yet, can be cut. Its state may be on the meta device."""
    named: dict[str, dict[str, str]] = {}
    for path, _ in part.named_modules():
        if (style := plan.styles.get(kind_of(path))) is not None:
            unit, _, name = path.rpartition(".")
            named.setdefault(unit, {})[name] = style
    units, whole = dict[str, Mapping[str, str]](), dict[str, str]()
    for path, styles in named.items():
        if reason := _stays_whole(part.get_submodule(path), styles):
            whole[kind_of(path)] = reason
        else:
            units[path] = styles
    elements, cut = 0, 0
    for name, parameter in part.named_parameters():
        elements += parameter.numel()
        path = name.rpartition(".")[0]
        if any(path.startswith(f"{unit}.") for unit in units):
            cut += parameter.numel()
        elif parameter.ndim > 1 and _NUMBER.search(path):
            of = kind_of(path.rpartition(".")[0])
            if not any(f"{of}.".startswith(f"{known}.") for known in whole):
                whole[of] = plan.why_whole
    return TensorCut(units, whole, cut / max(1, elements))


def _stays_whole(unit: nn.Module, styles: Mapping[str, str]) -> str:
    """Return why a module cannot be cut; "" where it can."""
    for name, style in styles.items():
        if style not in (COLUMNS, ROWS, ALIKE):
            return _WHOLE.get(style, f"{name} is {style}")
        if style != ALIKE and type(unit.get_submodule(name)) is not nn.Linear:
            return f"{name} is no plain linear module"
    if not {COLUMNS, ROWS} <= set(styles.values()):
        return "its plan names only some of its parts"
    left = [name for name in state_of(unit) if name.rpartition(".")[0] not in styles]
    return f"its plan does not name {left[0]}" if left else ""


def _check_number(path: str, unit: nn.Module, styles: Mapping[str, str], plan: TensorPlan, number: int) -> None:
    """Raise ConfigError where a module cannot be cut into so many."""
    sizes = {}
    if any(hasattr(unit, width) for width in ("head_dim", "head_size")):
        sizes = {"attention heads": plan.heads, "key and value heads": plan.key_value_heads}
    for name, style in styles.items():
        linear: Any = unit.get_submodule(name)
        if style != ALIKE:
            sizes[f"columns of {name}"] = linear.out_features if style == COLUMNS else linear.in_features
    for what, size in sizes.items():
        if size % number:
            why = f"{kind_of(path)} has {size} {what}"
            raise ConfigError("split.tensor", number, f"a divisor of {size}", "Use a smaller one, or 1.", why=why)


# --- strips ----------------------------------------------------------------------------------------------------------


class TensorShare(NamedTuple):
    """A tensor of a part with strips: ``size`` from ``start`` on of one of the whole part's, along ``dim``, or all of
    it; and the number of its device."""

    whole: str
    place: int
    dim: int | None = None
    start: int = 0
    size: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """Return this share of the whole tensor, a view."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.size)


class Strips:
    """The strips of a part, which is cut when this is made. Memory: on the first device what is not cut, and on each
    its share of what is. A matrix that is cut along its rows is copied on the host, too.

    Attributes:
        devices: In the order in which strips lie on them.
        layouts: For each device, where the gradients that are made on it lie in a vector of their own.
    """

    def __init__(
        self, part: nn.Module, layout: FlatLayout, plan: TensorPlan, number: int, devices: Sequence[torch.device]
    ) -> None:
        """Cut a part, whose state is on the meta device, into ``number``, a multiple of that of devices. Raises
        ConfigError where that does not go."""
        each, cut = number // len(devices), find_cut(part, plan)
        for path, styles in cut.units.items():
            _check_number(path, part.get_submodule(path), styles, plan, number)
        homes = [devices[at // each] for at in range(number)]
        for path, styles in cut.units.items():
            _cut(part.get_submodule(path), styles, homes)
        self.devices, self._layout = tuple(devices), layout
        wholes = dict(layout.shapes)
        self._pieces = {name: _piece(name, one, wholes, each) for name, one in state_of(part).items()}
        self.layouts = tuple(
            FlatLayout.from_shapes(
                (name, tuple(one.shape))
                for name, one in state_of(part).items()
                if self._pieces[name].place == place and self._pieces[name].whole not in layout.buffers
            )
            for place in range(len(devices))
        )

    def install(self, part: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Give a part, this one or a copy of it, whole weights by name: see
        :func:`~swarm.models.layout.install_weights`."""
        shares, held = {name: _owned(share) for name, share in self._shares(weights)}, state_of(part)
        for place, device in enumerate(self.devices):
            here = {name: one for name, one in held.items() if self._pieces[name].place == place}
            install_tensors(part, here, shares, device, requires_grad=True)
        homes = {id(module): home for unit in part.modules() for module, home in _homes(unit)}
        for module in part.modules():
            home = homes.get(id(module), self.devices[0])
            if any(buffer.device != home for buffer in module.buffers(recurse=False)):
                module._apply(partial(Tensor.to, device=home), recurse=False)  # type: ignore[no-untyped-call]

    def refresh(self, part: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Take over the changed values of the whole weights that were installed."""
        refresh_weights(part, dict(self._shares(weights)))

    def _shares(self, weights: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return ((name, piece.of(weights[piece.whole])) for name, piece in self._pieces.items())

    def add_into(self, wholes: Mapping[str, Tensor], gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Add gradients, by the names that they have in the part, to whole ones: one after the other."""
        for name, gradient in gradients:
            piece = self._pieces[name]
            piece.of(wholes[piece.whole]).add_(gradient)

    def joined(self, sums: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return sums of gradients, one of each of :attr:`layouts`, as one of the whole part, (elements,), there."""
        flat = torch.zeros(self._layout.elements, dtype=sums[0].dtype, device=device)
        wholes = self._layout.views(flat)
        for layout, one in zip(self.layouts, sums, strict=True):
            self.add_into(wholes, layout.views(one.to(device)).items())
        return flat


def strips_of(
    part: nn.Module, layout: FlatLayout, plan: Callable[[], TensorPlan], number: int, devices: Sequence[torch.device]
) -> Strips | None:
    """Cut a part as :class:`Strips` does; None, with nothing done, where nothing is asked for or can be cut."""
    if number == 1 or not find_cut(part, found := plan()).units:
        return None
    return Strips(part, layout, found, number, devices)


def _piece(name: str, tensor: Tensor, wholes: Mapping[str, tuple[int, ...]], each: int) -> TensorShare:
    """Return what a tensor is of the whole part; ``each`` strips lie on a device."""
    whole, strip = _STRIP.sub("", name), _STRIP.search(name)
    number = int(strip[1]) if strip else 0
    for dim, (size, all_of_it) in enumerate(zip(tensor.shape, wholes[whole], strict=True)):
        if size != all_of_it:
            return TensorShare(whole, number // each, dim, number * size, size)
    return TensorShare(whole, number // each)


def _owned(share: Tensor) -> Tensor:
    """Return a share as it lies in every replica's memory: kernels are chosen by strides and alignment, too."""
    return aligned(share.contiguous(), share.device)


def _homes(unit: nn.Module) -> Iterable[tuple[nn.Module, torch.device]]:
    """Every module of a cut module's strips, with its device; none of any other."""
    for strip, home in zip(getattr(unit, "strips", ()), getattr(unit, "homes", ()), strict=True):
        yield from ((module, home) for module in strip.modules())


def _cut(unit: Any, styles: Mapping[str, str], homes: Sequence[torch.device]) -> None:
    """Have a module's strips compute what it does. It stays what it is, so that whatever looks at it finds it."""
    kept = {id(one): one for one in (getattr(unit, "config", None),) if one is not None}
    strips = [copy.deepcopy(unit, dict(kept)) for _ in homes]
    for at, strip in enumerate(strips):
        for name, style in styles.items():
            if style != ALIKE:
                _narrow(strip.get_submodule(name), 0 if style == COLUMNS else 1, len(homes), first=at == 0)
    unit._modules.clear()
    unit._parameters.clear()
    unit.strips, unit.homes = nn.ModuleList(strips), tuple(homes)
    unit.forward = partial(_in_strips, unit)  # no function of its own: a copy must run its own strips


def _narrow(linear: Any, dim: int, number: int, *, first: bool) -> None:
    """Have a linear module be one of so many, with some of its outputs (``dim`` 0) or inputs. What is added to an
    output that all make together, the ``first`` adds."""
    shape = list(linear.weight.shape)
    shape[dim] //= number
    linear.weight = nn.Parameter(torch.empty(shape, dtype=linear.weight.dtype, device="meta"))
    linear.out_features, linear.in_features = shape
    if linear.bias is not None and dim == 0:
        linear.bias = nn.Parameter(torch.empty(shape[:1], dtype=linear.bias.dtype, device="meta"))
    elif not first:
        linear.bias = None


def _in_strips(unit: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a module answers, (B, T, D) or a tuple that begins with that: the sum of its strips' answers."""
    given, form = tree_flatten((args, kwargs))
    spread = [_spread(one, unit.homes) if isinstance(one, Tensor) else [one] * len(unit.homes) for one in given]
    found = []
    for at, strip in enumerate(unit.strips):
        own_args, own_kwargs = tree_unflatten([each[at] for each in spread], form)
        found.append(strip(*own_args, **own_kwargs))
    total = _sum([one[0] if isinstance(one, tuple) else one for one in found], unit.homes[0])
    return (total, *[None] * (len(found[0]) - 1)) if isinstance(found[0], tuple) else total


def _spread(tensor: Tensor, homes: Sequence[torch.device]) -> Sequence[Tensor]:
    """Return a tensor on the device of each strip."""
    if tensor.requires_grad and torch.is_grad_enabled():
        found: tuple[Tensor, ...] = _Spread.apply(tensor, homes)  # type: ignore[no-untyped-call]
        return found
    return _on_each(tensor, homes)


def _on_each(tensor: Tensor, homes: Sequence[torch.device]) -> list[Tensor]:
    there = {home: tensor.to(home) for home in homes}
    return [there[home] for home in homes]


def _sum(tensors: Sequence[Tensor], home: torch.device) -> Tensor:
    """Add two tensors or more, one after the other, on one device."""
    first, second, *others = (tensor.to(home) for tensor in tensors)
    total = first + second
    for tensor in others:
        total += tensor
    return total


class _Spread(torch.autograd.Function):
    """A tensor to each strip, and the sum of its gradients back, in the strips' order: autograd would add them as
    devices come to their end."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, homes: Sequence[torch.device]) -> tuple[Tensor, ...]:
        """Send a tensor once to each device."""
        ctx.home = tensor.device
        return tuple(one.view_as(one) for one in _on_each(tensor, homes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Add on the device that it came from."""
        return _sum(gradients, ctx.home), None
