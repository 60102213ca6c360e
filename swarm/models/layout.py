"""Map each tensor of a part's state to its place in the part's flat vector, and back into the part's module.

Optimizer, averaging, digests, checkpoints and downloads all work on one flat vector per quantity; only the module
needs tensors with names, and gets views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from swarm.errors import StateError

ALIGNMENT = 16
"""Elements. Every parameter starts on a 64-byte boundary, as if allocated alone: BLAS libraries promise the same bits
only for the same alignment. The gaps hold zeros, and stay zero through every step."""

_ALIGNMENT_BYTES = 4 * ALIGNMENT

VECTORS = ("params", "exp_avg", "exp_avg_sq")
"""The vectors of AdamW's state."""
FACTORS = "factors"
"""The vector that has a number for each row and each column of a matrix; all others are as long as the parameters."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """Number of elements, without the gap behind them."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All slots of a part, in the order of the module's parameters and then buffers; ``elements`` is the vector's
    length.

    ``vectors`` are the names of the state's flat vectors, the parameters first: which there are is the optimizer's.

    Two are equal that have the same slots and vectors. ``decayed``, what weight decay pulls at, ``matrices``, those of
    the layers, ``buffers``, what has no gradient, and the tallies (:attr:`swarm.models.family.PartModule.steered`) are
    known to who trains the part; a state that was stored or downloaded does not say them.
    """

    slots: tuple[Slot, ...]
    elements: int
    decayed: frozenset[str] = field(default=frozenset(), compare=False)
    buffers: frozenset[str] = field(default=frozenset(), compare=False)
    matrices: frozenset[str] = field(default=frozenset(), compare=False)
    steered: frozenset[str] = field(default=frozenset(), compare=False)
    told: frozenset[str] = field(default=frozenset(), compare=False)
    vectors: tuple[str, ...] = VECTORS

    @classmethod
    def of(cls, module: nn.Module, decayed: Iterable[str], matrices: Iterable[str] = ()) -> FlatLayout:
        """Return the layout of a module's state (which may be on the meta device)."""
        held = state_of(module)
        slots = cls.from_shapes(((name, tuple(tensor.shape)) for name, tensor in held.items()), decayed)
        trained = {name for name, _ in module.named_parameters()}
        return replace(
            slots,
            buffers=frozenset(held.keys() - trained),
            matrices=frozenset(matrices),
            steered=getattr(module, "steered", frozenset()),
            told=getattr(module, "told", frozenset()),
        )

    def kept_by(self, vectors: tuple[str, ...]) -> FlatLayout:
        """Return the same for the state of an optimizer that keeps these vectors."""
        return replace(self, vectors=vectors)

    @classmethod
    def from_shapes(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], decayed: Iterable[str] = ()) -> FlatLayout:
        """Return the layout of tensors given by name and shape: their places follow from these two. Without any it is
        one gap, so that whatever is done with vectors needs no case of its own for a part that has nothing to train."""
        slots, offset = [], 0
        for name, shape in shapes:
            slots.append(Slot(name, shape, offset))
            offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(slots), offset or ALIGNMENT, frozenset(decayed))

    def kept_in(self, vector: str) -> FlatLayout:
        """Return where each tensor's numbers lie in a vector of the state."""
        return _factors_of(self.slots) if vector == FACTORS else self

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the elements of each vector of the state."""
        return tuple(self.kept_in(vector).elements for vector in self.vectors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(slot.name for slot in self.slots)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The argument of :meth:`from_shapes`."""
        return tuple((slot.name, slot.shape) for slot in self.slots)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each tensor as a view into ``flat`` (elements,)."""
        return {slot.name: flat[slot.offset : slot.offset + slot.elements].view(slot.shape) for slot in self.slots}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new float32 CPU vector filled from named tensors. Raises StateError, before anything is allocated, for a
        missing name or a wrong shape."""
        for slot in self.slots:
            tensor = tensors.get(slot.name)
            if tensor is None or tensor.shape != slot.shape:
                found = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise StateError(f"{slot.name}: expected shape {slot.shape}, found {found}; is it the same model?")
        flat = torch.zeros(self.elements, dtype=torch.float32)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name])
        return flat

    def decay_runs(self) -> tuple[tuple[int, int, bool], ...]:
        """The whole vector as the fewest (start, stop, decay), gaps counted to the slot before them."""
        if not self.slots:
            return ((0, self.elements, False),)
        runs: list[tuple[int, int, bool]] = []
        ends = [slot.offset for slot in self.slots[1:]] + [self.elements]
        for slot, stop in zip(self.slots, ends, strict=True):
            decay = slot.name in self.decayed
            if runs and runs[-1][2] == decay:
                runs[-1] = (runs[-1][0], stop, decay)
            else:
                runs.append((slot.offset, stop, decay))
        return tuple(runs)


def matrices_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return how many matrices a tensor is, of how many rows and columns: of no columns where it is none."""
    return (math.prod(shape[:-2]), shape[-2], shape[-1]) if len(shape) > 1 else (1, math.prod(shape), 0)


@lru_cache(maxsize=64)
def _factors_of(slots: tuple[Slot, ...]) -> FlatLayout:
    def shape(of: tuple[int, ...]) -> tuple[int, ...]:
        matrices, rows, columns = matrices_of(of)
        return (matrices * (rows + columns),) if len(of) > 1 else of

    return FlatLayout.from_shapes((slot.name, shape(slot.shape)) for slot in slots)


def full_vectors(vectors: Iterable[str]) -> int:
    """Return how many of a state's vectors are as long as the parameters. The others are some thousandths of them."""
    return sum(vector != FACTORS for vector in vectors)


def aligned(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on the device. A network buffer may start anywhere; BLAS promises equal bits for equal alignment
    only."""
    x = x.to(device)
    return x.clone() if x.device.type == "cpu" and x.data_ptr() % _ALIGNMENT_BYTES else x


# --- between a module and the vector ---------------------------------------------------------------------------------


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return by name what a part's state is made of: parameters, a tied one once, then persistent buffers of floats;
    none of what is frozen (:attr:`swarm.models.family.PartModule.frozen`)."""
    kept = module.state_dict(keep_vars=True)
    buffers = {name: b for name, b in module.named_buffers() if name in kept and b.is_floating_point()}
    frozen: frozenset[str] = getattr(module, "frozen", frozenset())
    return {name: t for name, t in (*module.named_parameters(), *buffers.items()) if name not in frozen}


def install_weights(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    requires_grad: bool = False,
    device: torch.device | None = None,
) -> None:
    """Make every tensor of a module's state that of its name: itself where dtype and device agree, else a rounded copy.

    The parameters are new objects, so graphs made before keep what they were made with; tied ones stay tied. Also moves
    the module's other buffers to ``device``, by default that of the weights. Raises StateError, with nothing changed,
    for a missing name or a wrong shape.
    """
    held = state_of(module)
    device = device or (next(iter(weights.values())).device if weights else torch.device("cpu"))
    install_tensors(module, held, weights, device, requires_grad=requires_grad)
    if any(buffer.device != device for buffer in module.buffers()):
        module.to(device)


def install_tensors(
    module: nn.Module,
    held: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    device: torch.device,
    *,
    requires_grad: bool = False,
) -> None:
    """Put ``weights`` where the module's tensors ``held`` are, by name; see :func:`install_weights`."""
    for name, old in held.items():
        tensor = weights.get(name)
        if tensor is None or tensor.shape != old.shape:
            found = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise StateError(f"{name}: expected shape {tuple(old.shape)}, found {found}; is it the same model?")
    fresh: dict[int, Tensor] = {}
    for name, old in held.items():
        tensor = weights[name].detach().to(old.dtype).to(device)  # first: half as much is moved
        is_parameter = isinstance(old, nn.Parameter)
        fresh[id(old)] = nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor
    places = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, old in places:
        if id(old) in fresh:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, fresh[id(old)])


@torch.no_grad()
def refresh_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Take over the changed values of weights that :func:`install_weights` gave to a module. A graph made before is of
    no use any more: going back through it raises RuntimeError where it would need what has changed."""
    for name, held in state_of(module).items():
        tensor = weights[name]
        if held.data_ptr() == tensor.data_ptr():
            increment_version(held)  # they were changed behind torch's back
        else:
            held.copy_(tensor.to(held.dtype))
