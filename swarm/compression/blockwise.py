"""Blockwise int8: every 256 elements share a float32 scale, the largest magnitude among them ÷ 127.

On the wire: the scales, little-endian, then one signed byte for each element, -127 to 127: 1.016 bytes per element.
Error of an element: at most 1/254 of its block's largest magnitude (and 2⁻²² of that for rounding); a block whose
largest magnitude is below 1.5e-36 becomes zeros. After Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(2022), section 2.1, with linear instead of dynamic steps: decoding is one exact rule, the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.errors import BugError, Violation
from swarm.models.spec import TensorSpec

BLOCK = 256
"""Elements that share a scale."""

_STEPS = 127
_FLOAT = np.dtype("<f4")
_SMALLEST = np.finfo(np.float32).smallest_normal
_LARGEST = np.nextafter(np.finfo(np.float32).max / np.float32(_STEPS), np.float32(0))
"""Scales between which neither the steps of a small block nor the values of a large one leave their format."""


@dataclass(frozen=True, slots=True)
class BlockwiseInt8:
    """See :class:`~swarm.compression.codec.Codec`. Stateless; blocks are counted in row-major order, the last may be
    shorter. Equal tensors give equal bytes on every machine, equal bytes equal tensors.

    What is not finite spoils its block's scale, so that every receiver refuses it, ``check_finite`` or not.
    Cost: some 1 ms of CPU for a million elements, either way; a copy of the tensor in float32 meanwhile.
    """

    name: str = "int8"

    def wire_bytes(self, spec: TensorSpec) -> int:
        """See :class:`~swarm.compression.codec.Codec`."""
        return _blocks(spec.elements) * _FLOAT.itemsize + spec.elements

    def encode(self, tensor: Tensor) -> memoryview:
        """See :class:`~swarm.compression.codec.Codec`. Never aliases the tensor."""
        if not tensor.is_floating_point():
            raise BugError(f"codec {self.name} cannot carry {tensor.dtype}")
        values: NDArray[Any] = tensor.detach().to(torch.float32).cpu().contiguous().view(-1).numpy()
        count = _blocks(values.size)
        wire = np.empty(count * _FLOAT.itemsize + values.size, dtype=np.uint8)
        blocks = _padded(values, count).reshape(count, BLOCK)
        scales = _scales(blocks)
        wire[: scales.nbytes] = scales.view(np.uint8)
        with np.errstate(invalid="ignore"):
            steps = blocks / np.where(scales > 0, scales, np.inf)[:, None]
            np.rint(steps, out=steps)
            wire[scales.nbytes :].view(np.int8)[:] = steps.reshape(-1)[: values.size]
        return wire.data

    def decode(self, buffer: bytes | bytearray | memoryview, spec: TensorSpec, *, check_finite: bool = False) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. Raises Violation, whatever ``check_finite`` says, for a scale or
        a step that no encoder makes: what it returns is finite."""
        target = getattr(torch, spec.dtype)
        if not target.is_floating_point:
            raise BugError(f"codec {self.name} cannot carry {spec.dtype}")
        view = memoryview(buffer).cast("B")
        if len(view) != self.wire_bytes(spec):
            raise Violation(f"{len(view)} bytes for {self.name} {spec.shape}: expected {self.wire_bytes(spec)}")
        count = _blocks(spec.elements)
        scales = np.frombuffer(view, dtype=_FLOAT, count=count)
        steps = np.frombuffer(view, dtype=np.int8, offset=scales.nbytes)
        if not ((scales >= 0) & (scales <= _LARGEST)).all():
            raise Violation("a scale is not finite or out of range")
        if steps.size and steps.min() < -_STEPS:
            raise Violation("a step is out of range")
        values = np.zeros(count * BLOCK, dtype=np.float32)
        values[: steps.size] = steps
        values.reshape(count, BLOCK)[...] *= scales[:, None]
        return torch.from_numpy(values[: steps.size]).view(spec.shape).to(target)


INT8 = BlockwiseInt8()


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _padded(values: NDArray[Any], count: int) -> NDArray[Any]:
    if values.size == count * BLOCK:
        return values
    padded = np.zeros(count * BLOCK, dtype=np.float32)
    padded[: values.size] = values
    return padded


def _scales(blocks: NDArray[Any]) -> NDArray[Any]:
    """One for each row; NaN where a value is not finite, 0 where all are too small."""
    largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    scales = np.minimum(largest / np.float32(_STEPS), _LARGEST)
    scales[scales < _SMALLEST] = 0
    scales[~np.isfinite(largest)] = np.nan
    return np.asarray(scales, dtype=_FLOAT)
