"""Where each parameter of a part lies in the part's flat vector.

Optimizer, averaging, digests, checkpoints and downloads all work on one flat vector per quantity; only the module
needs tensors with names, and gets views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm.errors import StateError

ALIGNMENT = 16
"""Elements. Every parameter starts on a 64-byte boundary, as if allocated alone: BLAS libraries promise the same bits
only for the same alignment. The gaps hold zeros, and stay zero through every step."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in the flat vector. ``decay`` says whether weight decay pulls at it."""

    name: str
    shape: tuple[int, ...]
    offset: int
    decay: bool

    @property
    def elements(self) -> int:
        """Number of elements, without the gap behind them."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All slots of a part, in the order of the module's parameters; ``elements`` is the vector's length."""

    slots: tuple[Slot, ...]
    elements: int

    @classmethod
    def of(cls, module: nn.Module) -> FlatLayout:
        """The layout of a module's parameters (which may be on the meta device)."""
        return cls.from_shapes((name, tuple(p.shape)) for name, p in module.named_parameters())

    @classmethod
    def from_shapes(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> FlatLayout:
        """The layout of parameters given by name and shape: everything else follows from these two."""
        slots, offset = [], 0
        for name, shape in shapes:
            decay = len(shape) >= 2 and name != "embedding.weight"
            slots.append(Slot(name, shape, offset, decay))
            offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(slots), offset)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(slot.name for slot in self.slots)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What :meth:`from_shapes` takes."""
        return tuple((slot.name, slot.shape) for slot in self.slots)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter as a view into ``flat`` (elements,)."""
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
        runs: list[tuple[int, int, bool]] = []
        ends = [slot.offset for slot in self.slots[1:]] + [self.elements]
        for slot, stop in zip(self.slots, ends, strict=True):
            if runs and runs[-1][2] == slot.decay:
                runs[-1] = (runs[-1][0], stop, slot.decay)
            else:
                runs.append((slot.offset, stop, slot.decay))
        return tuple(runs)
