"""Few bits an element behind a Hadamard transform: ``int8h`` and ``int4h``, for what crosses boundaries between stages.

Activations have a few channels that are far larger than the rest (Dettmers et al., arXiv 2208.07339): with a scale for
a block they take all the steps. A Hadamard transform of 64 channels of a token spreads each over all of them (QuaRot,
Ashkboos et al., arXiv 2404.00456); what is rounded is near normal, and what was rounded is spread again.

* A token is one row of the last dimension, D elements, filled up with zeros to a multiple of 64. A tile is 64 of its
  elements D/64 apart, so that a processor adds vectors; tiles of other widths would need a rounded 1/√G.
* Transform: six times sums and differences, divided by 8, in float32 and in a fixed order. There is no product in it,
  so no machine fuses anything: the same bits everywhere, on CUDA as on a CPU.
* Scale of a tile: its largest magnitude ÷ the largest step L (127 or 7), rounded up to bfloat16. Step times scale is
  exact in float32.

On the wire: all scales, two bytes each, then the steps in the order of the elements: one signed byte each, or two a
byte, the first in the lower half, as step + 8.

| name | bytes an element | error of a tile x, in L2 |
|---|---|---|
| int8h | 1.031 | ≤ √64 · m / 252 |
| int4h | 0.531 | ≤ √64 · m / 13.8 |

m is the largest magnitude of the transformed tile: at most ‖x‖₂. Beyond ±2¹¹⁰ values are cut off; a tile whose scale
would be below 1.2e-38 becomes zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.compression.codec import EncodeContext, check_length, received
from swarm.compression.dense import all_finite
from swarm.errors import BugError, Violation
from swarm.models.spec import TensorSpec

TILE = 64
"""Elements that are transformed together. Its root is a power of two: dividing by it is exact."""

_PIECE = 1 << 16
"""Elements that a CPU works on at a time: what stays in a core's own cache."""
_SMALLEST, _LARGEST = 2.0**-126, 2.0**110


@dataclass(frozen=True, slots=True)
class HadamardCodec:
    """See :class:`~swarm.compression.codec.Codec`. Stateless; ``bits`` is 8 or 4.

    What is not finite gives its tile a scale that is not, which every receiver refuses, ``check_finite`` or not.
    """

    name: str
    bits: int

    @property
    def largest(self) -> int:
        """The largest step."""
        return (1 << (self.bits - 1)) - 1

    def wire_bytes(self, spec: TensorSpec) -> int:
        """See :class:`~swarm.compression.codec.Codec`."""
        width = spec.shape[-1] if spec.shape else 1
        return self._bytes(spec.elements // width * -(-width // TILE) if spec.elements else 0)

    def exact(self, dtype: str) -> bool:
        """See :class:`~swarm.compression.codec.Codec`."""
        return False

    def encode(self, tensor: Tensor, context: EncodeContext) -> memoryview:
        """See :class:`~swarm.compression.codec.Codec`. Never aliases the tensor."""
        return self.narrow(tensor, context).cpu().numpy().data

    def decode(self, buffer: bytes | bytearray | memoryview, spec: TensorSpec, *, check_finite: bool = False) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. Raises Violation, whatever ``check_finite`` says, for a scale or
        a step that no encoder makes."""
        values = self.widen(received(self, buffer, spec), spec)
        if check_finite and not all_finite(values):
            raise Violation(f"a value is not finite in {spec.dtype}")
        return values

    def narrow(self, tensor: Tensor, context: EncodeContext) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. On the tensor's device."""
        if not tensor.is_floating_point():
            raise BugError(f"codec {self.name} cannot carry {tensor.dtype}")
        if tensor.device.type not in ("cpu", "cuda"):  # Metal divides fast, and flushes what is subnormal
            tensor = tensor.cpu()
        rows = _rows(tensor.detach())
        per_row = -(-rows.shape[1] // TILE)
        wire = torch.empty(self._bytes(len(rows) * per_row), dtype=torch.uint8, device=tensor.device)
        scales, steps = self._parts(wire, per_row)
        for piece in _pieces(rows):
            tiles = _tiled(rows[piece], per_row)
            finite = tiles.abs().amax(0).isfinite()
            found = _transformed(tiles.clamp_(-_LARGEST, _LARGEST))
            scale = self._scales(found).where(finite, torch.nan)
            scales[piece] = scale.view(-1, per_row)
            by = scale.where(scale > 0, torch.inf)
            whole = found.div_(by).round_().nan_to_num_(0.0).to(torch.int8)
            in_order = whole.view(TILE, -1, per_row).transpose(0, 1).reshape(-1)
            steps[piece] = self._packed(in_order).view(steps[piece].shape)
        return wire

    def widen(self, wire: Tensor, spec: TensorSpec) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. On the device of the bytes. Raises as :meth:`decode`."""
        target = getattr(torch, spec.dtype)
        if not target.is_floating_point:
            raise BugError(f"codec {self.name} cannot carry {spec.dtype}")
        check_length(self, wire.numel(), spec)
        values = torch.empty(spec.shape, dtype=target, device=wire.device)
        rows = _rows(values)
        per_row = -(-rows.shape[1] // TILE)
        scales, steps = self._parts(wire, per_row)
        bits = scales.view(torch.int16)
        if not bool(((bits == 0) | ((bits >= _SMALLEST_BITS) & (bits <= _LARGEST_BITS))).all()):
            raise Violation("a scale is not finite or out of range")
        for piece in _pieces(rows):
            whole = self._unpacked(steps[piece].reshape(-1))
            if int(whole.amin()) < -self.largest:
                raise Violation("a step is out of range")
            tiles = whole.view(-1, TILE, per_row).transpose(0, 1).float().contiguous().view(TILE, -1)
            found = _transformed(tiles.mul_(scales[piece].float().view(-1)))
            back = found.view(TILE, -1, per_row).transpose(0, 1).reshape(-1, TILE * per_row)
            rows[piece] = back[:, : rows.shape[1]].to(target)
        return values

    def _bytes(self, tiles: int) -> int:
        return tiles * (2 + TILE * self.bits // 8)

    def _parts(self, wire: Tensor, per_row: int) -> tuple[Tensor, Tensor]:
        """Views of the scales, bfloat16 (rows, tiles of a row), and of the steps, uint8 (rows, bytes of a row)."""
        tiles = wire.numel() // self._bytes(1)
        each = per_row * TILE * self.bits // 8
        return wire[: 2 * tiles].view(torch.bfloat16).view(-1, per_row), wire[2 * tiles :].view(-1, each)

    def _scales(self, found: Tensor) -> Tensor:
        """Return those of transformed tiles (64, tiles), float32 with a bfloat16's bits."""
        most = found.abs().amax(0)
        scales = _rounded_up(most / torch.full_like(most, self.largest))
        return scales.where(scales >= _SMALLEST, 0.0)

    def _packed(self, steps: Tensor) -> Tensor:
        """Return the bytes of steps, int8 (elements,)."""
        if self.bits == 8:
            return steps.view(torch.uint8)
        halves = steps.add_(8).view(torch.uint8).view(-1, 2)
        return halves[:, 0] | (halves[:, 1] << 4)

    def _unpacked(self, steps: Tensor) -> Tensor:
        if self.bits == 8:
            return steps.view(torch.int8)
        return torch.stack((steps & 0x0F, steps >> 4), dim=-1).view(torch.int8).view(-1).sub_(8)


INT8H = HadamardCodec("int8h", 8)
INT4H = HadamardCodec("int4h", 4)

_SMALLEST_BITS, _LARGEST_BITS = 0x0080, 0x7700
"""Of the bfloat16 scales that encoders make, but for zero: 2⁻¹²⁶, and 2¹¹¹, for no value is beyond 2¹¹⁰. With it the
largest steps come to 2¹²¹: finite, but in float16."""


def _rows(tensor: Tensor) -> Tensor:
    """A view (rows, D); of what has no elements, no rows."""
    if not tensor.numel():
        return tensor.reshape(0, 1)
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)


def _pieces(rows: Tensor) -> list[slice]:
    """Rows that are worked on at a time: on a GPU all."""
    count = max(1, len(rows) if rows.is_cuda else _PIECE // rows.shape[1])
    return [slice(first, first + count) for first in range(0, len(rows), count)]


def _tiled(rows: Tensor, per_row: int) -> Tensor:
    """(rows, D) → float32 (64, tiles), a copy: the same element of all tiles lies together."""
    if rows.shape[1] % TILE:
        rows = torch.nn.functional.pad(rows, (0, per_row * TILE - rows.shape[1]))
    whole = rows.view(-1, TILE, per_row).transpose(0, 1)
    return torch.empty(whole.shape, dtype=torch.float32, device=rows.device).copy_(whole).view(TILE, -1)


def _transformed(tiles: Tensor) -> Tensor:
    """The Hadamard transform of tiles (64, tiles) over their elements; it is its own inverse. Takes their memory."""
    found, other = tiles.mul_(0.125), torch.empty_like(tiles)
    width = 1
    while width < TILE:
        pairs, into = (each.view(-1, 2, width * tiles.shape[1]) for each in (found, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        found, other, width = other, found, 2 * width
    return found


def _rounded_up(values: Tensor) -> Tensor:
    """float32 values, not negative, each the least bfloat16 that is not below it, as float32."""
    return ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
