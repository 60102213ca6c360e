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

from swarm.compression.codec import EncodeContext, check_length
from swarm.errors import BugError, Violation
from swarm.models.spec import TensorSpec

BLOCK = 256
"""Elements that share a scale."""

_PIECE = 1 << 16
"""Elements worked on at a time, whole blocks: what stays in a core's own cache."""

_STEPS = 127
_FLOAT = np.dtype("<f4")
_SMALLEST = np.finfo(np.float32).smallest_normal
_LARGEST = np.nextafter(np.finfo(np.float32).max / np.float32(_STEPS), np.float32(0))
"""Scales between which neither the steps of a small block nor the values of a large one leave their format."""


@dataclass(frozen=True, slots=True)
class BlockwiseInt8:
    """See :class:`~swarm.compression.codec.Codec`. Stateless; blocks are counted in row-major order from the start of
    what is encoded, so that a chunk gives the same bytes in any group; the last may be shorter. Equal tensors give
    equal bytes on every machine, equal bytes equal tensors.

    A value that is not finite corrupts its block's scale, so that every receiver refuses it, ``check_finite`` or not.
    Cost: some 2 ms of CPU for a million elements to encode, half of it to decode; half a MiB beside the result.
    """

    name: str = "int8"

    def wire_bytes(self, spec: TensorSpec) -> int:
        """See :class:`~swarm.compression.codec.Codec`."""
        return _blocks(spec.elements) * _FLOAT.itemsize + spec.elements

    def exact(self, dtype: str) -> bool:
        """See :class:`~swarm.compression.codec.Codec`."""
        return False

    def encode(self, tensor: Tensor, context: EncodeContext) -> memoryview:
        """See :class:`~swarm.compression.codec.Codec`. Never aliases the tensor."""
        if not tensor.is_floating_point():
            raise BugError(f"codec {self.name} cannot carry {tensor.dtype}")
        values: NDArray[Any] = tensor.detach().to(torch.float32).cpu().contiguous().view(-1).numpy()
        wire = np.empty(_blocks(values.size) * _FLOAT.itemsize + values.size, dtype=np.uint8)
        scales, steps = _split(wire, values.size)
        for start in range(0, values.size, _PIECE):
            piece = slice(start, start + _PIECE)
            _encode(values[piece], scales[start // BLOCK : (start + _PIECE) // BLOCK], steps[piece])
        return wire.data

    def decode(self, buffer: bytes | bytearray | memoryview, spec: TensorSpec, *, check_finite: bool = False) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. Raises Violation, whatever ``check_finite`` says, for a scale or
        a step that no encoder makes: what it returns is finite."""
        target = getattr(torch, spec.dtype)
        if not target.is_floating_point:
            raise BugError(f"codec {self.name} cannot carry {spec.dtype}")
        view = memoryview(buffer).cast("B")
        check_length(self, len(view), spec)
        scales, steps = _split(np.frombuffer(view, dtype=np.uint8), spec.elements)
        if not ((scales >= 0) & (scales <= _LARGEST)).all():
            raise Violation("a scale is not finite or out of range")
        if steps.size and steps.min() < -_STEPS:
            raise Violation("a step is out of range")
        values = np.empty(spec.elements, dtype=np.float32)
        for start in range(0, values.size, _PIECE):
            piece = slice(start, start + _PIECE)
            _decode(steps[piece], scales[start // BLOCK : (start + _PIECE) // BLOCK], values[piece])
        return torch.from_numpy(values).view(spec.shape).to(target)

    def narrow(self, tensor: Tensor, context: EncodeContext) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. On the host, whatever the tensor's device."""
        return torch.from_numpy(np.frombuffer(self.encode(tensor, context), dtype=np.uint8))

    def widen(self, wire: Tensor, spec: TensorSpec) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. Decoded on the host, then moved to the device of the bytes."""
        return self.decode(wire.cpu().numpy().data, spec).to(wire.device)


INT8 = BlockwiseInt8()


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _split(wire: NDArray[Any], elements: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Views of the scales and of the steps."""
    end = _blocks(elements) * _FLOAT.itemsize
    return wire[:end].view(_FLOAT), wire[end:].view(np.int8)


def _encode(values: NDArray[Any], scales: NDArray[Any], steps: NDArray[Any]) -> None:
    """Fill in one piece's scales and steps: NaN for a scale where a value is not finite, 0 where all are too small."""
    if values.size % BLOCK:
        values = np.concatenate([values, np.zeros(-values.size % BLOCK, dtype=np.float32)])
    blocks = values.reshape(-1, BLOCK)
    scratch = np.abs(blocks)
    largest = scratch.max(axis=1)
    np.minimum(largest / np.float32(_STEPS), _LARGEST, out=scales)
    scales[scales < _SMALLEST] = 0
    scales[~np.isfinite(largest)] = np.nan
    with np.errstate(invalid="ignore"):
        np.divide(blocks, np.where(scales > 0, scales, np.float32(np.inf))[:, None], out=scratch)
        np.rint(scratch, out=scratch)
        steps[:] = scratch.reshape(-1)[: steps.size]


def _decode(steps: NDArray[Any], scales: NDArray[Any], values: NDArray[Any]) -> None:
    values[:] = steps
    whole = values.size // BLOCK * BLOCK
    blocks = values[:whole].reshape(-1, BLOCK)
    blocks *= scales[: len(blocks), None]
    values[whole:] *= scales[len(blocks) :]
