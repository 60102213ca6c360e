"""Dense codecs: every element in one fixed format, little-endian, in row-major order.

| name | bytes | error of an element x |
|---|---|---|
| float64 | 8 | none |
| float32 | 4 | none for float32 and narrower tensors |
| bfloat16 | 2 | ≤ 2⁻⁸·abs(x) (8 bits of mantissa); beyond 3.39·10³⁸ saturated |
| float16 | 2 | ≤ 2⁻¹¹·abs(x), or ≤ 2⁻²⁵ below 2⁻¹⁴; beyond ±65504 saturated, see :class:`DenseCodec` |
| int32 | 4 | none: token ids and targets, for int64 tensors |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.compression.codec import EncodeContext, check_length, received
from swarm.errors import BugError, Violation
from swarm.models.spec import TensorSpec

_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class DenseCodec:
    """See :class:`~swarm.compression.codec.Codec`. Stateless; one element is one value of ``dtype`` on the wire.

    A *finite* value too large for the format becomes the largest finite one. Refusing it would stop the run, since
    every replica computes the same activation; an outlier cut off at 65504 is a bounded error. Inf and NaN stay what
    they are, so that the receiver's ``check_finite`` refuses them.
    """

    name: str
    dtype: torch.dtype

    def wire_bytes(self, spec: TensorSpec) -> int:
        """See :class:`~swarm.compression.codec.Codec`."""
        return spec.elements * self.dtype.itemsize

    def exact(self, dtype: str) -> bool:
        """See :class:`~swarm.compression.codec.Codec`."""
        return dtype == self.name

    def encode(self, tensor: Tensor, context: EncodeContext) -> memoryview:
        """See :class:`~swarm.compression.codec.Codec`. Aliases a contiguous CPU tensor that has the wire's dtype."""
        return self.narrow(tensor, context).cpu().numpy().data

    def decode(self, buffer: bytes | bytearray | memoryview, spec: TensorSpec, *, check_finite: bool = False) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`."""
        values = self.widen(received(self, buffer, spec), spec)
        if check_finite and values.is_floating_point() and not all_finite(values):
            raise Violation(f"a value is not finite in {spec.dtype}")
        return values

    def narrow(self, tensor: Tensor, context: EncodeContext) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. On the tensor's device."""
        return self._converted(tensor.detach()).contiguous().view(-1).view(torch.uint8)

    def widen(self, wire: Tensor, spec: TensorSpec) -> Tensor:
        """See :class:`~swarm.compression.codec.Codec`. On their device; a view of them where the dtype allows it."""
        check_length(self, wire.numel(), spec)
        target = getattr(torch, spec.dtype)
        if target.is_floating_point != self.dtype.is_floating_point:
            raise BugError(f"codec {self.name} cannot carry {spec.dtype}")
        return wire.view(self.dtype).view(spec.shape).to(target)

    def _converted(self, source: Tensor) -> Tensor:
        if self.dtype == torch.int32:
            return _to_int32(source)
        if not source.is_floating_point():
            raise BugError(f"codec {self.name} cannot carry {source.dtype}")
        wire = source.to(self.dtype)
        if torch.finfo(source.dtype).max <= torch.finfo(self.dtype).max or all_finite(wire):
            return wire
        overflown = wire.isinf() & source.isfinite()
        limit = torch.finfo(self.dtype).max
        return torch.where(overflown, source.sign().to(self.dtype) * limit, wire)


FLOAT64 = DenseCodec("float64", torch.float64)
FLOAT32 = DenseCodec("float32", torch.float32)
BFLOAT16 = DenseCodec("bfloat16", torch.bfloat16)
FLOAT16 = DenseCodec("float16", torch.float16)
INT32 = DenseCodec("int32", torch.int32)


def _to_int32(source: Tensor) -> Tensor:
    if source.is_floating_point():
        raise BugError(f"codec int32 cannot carry {source.dtype}")
    if source.numel() and (int(source.max()) > _INT32.max or int(source.min()) < _INT32.min):
        raise BugError("a token id does not fit 32 bits")
    return source.to(torch.int32)


def all_finite(values: Tensor) -> bool:
    """Return whether no element is Inf or NaN. Waits for the device."""
    # A sum is not finite when an element is not: one pass and no temporary. Only a sum that overflows needs a look.
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())
