"""The protocol of codecs: tensor to bytes and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from swarm.errors import Violation
from swarm.ids import MicrobatchId
from swarm.models.spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext:
    """The tensor of a run that is encoded. A codec that needs random numbers derives them from this alone.

    ``direction``: activations and token ids go "forward", their gradients "backward"; a replica's "sum" goes to be
    averaged, and the "result" comes back. ``microbatch`` is that of the first two, ``place`` the first element of what
    is averaged at a time.
    """

    step: int
    direction: Literal["forward", "backward", "sum", "result"]
    microbatch: MicrobatchId | None = None
    place: int = 0


class Codec(Protocol):
    """Tensor to bytes and back. Synchronous: large tensors do not belong on the event loop.

    ``spec`` is shape and dtype of the *tensor* on both sides; both peers know it before anything is sent.
    """

    @property
    def name(self) -> str:
        """Name on the wire."""

    def wire_bytes(self, spec: TensorSpec) -> int:
        """Exactly how many bytes a tensor becomes: what a receiver admits, not one more or less."""

    def exact(self, dtype: str) -> bool:
        """Return whether the bytes of a tensor of this dtype are its own: then it comes back as it was, and encoding
        and decoding cost nothing."""

    def encode(self, tensor: Tensor, context: EncodeContext) -> memoryview:
        """The tensor's bytes, from CPU or CUDA. May alias the tensor: do not change it until they are sent.

        The same tensor and context give the same bytes, whenever and on whatever machine: what a replica no longer has
        is encoded again. Raises BugError for a dtype that the codec does not carry.
        """

    def decode(self, buffer: bytes | bytearray | memoryview, spec: TensorSpec, *, check_finite: bool = False) -> Tensor:
        """A CPU tensor of ``spec``: a view of a writable buffer where the dtype allows it, else a copy.

        Raises Violation for a wrong length and, with ``check_finite``, for Inf or NaN; nothing is allocated before the
        length is right.
        """

    def narrow(self, tensor: Tensor, context: EncodeContext) -> Tensor:
        """Return the bytes that :meth:`encode` gives, uint8 (bytes,), on the device where they were made: the tensor's
        where the codec can make the same bytes there."""

    def widen(self, wire: Tensor, spec: TensorSpec) -> Tensor:
        """Return what :meth:`decode` gives for such bytes, on the device where they are; Inf and NaN pass. Raises
        Violation for a wrong length."""


def check_length(codec: Codec, size: int, spec: TensorSpec) -> None:
    """Raise Violation where so many bytes are not what a codec makes of a tensor of ``spec``."""
    expected = codec.wire_bytes(spec)
    if size != expected:
        raise Violation(f"{size} bytes for {codec.name} {spec.shape}: expected {expected}")


def received(codec: Codec, buffer: bytes | bytearray | memoryview, spec: TensorSpec) -> Tensor:
    """Return a payload's bytes, uint8 (bytes,): a view of a writable buffer, else a copy. Raises as
    :func:`check_length`, before anything is allocated."""
    view = memoryview(buffer).cast("B")
    check_length(codec, view.nbytes, spec)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # frombuffer warns of read-only memory, which it cannot protect: that case pays one copy.
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
