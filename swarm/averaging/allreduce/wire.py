"""How a round's numbers travel: as they are, or rounded to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.compression.blockwise import INT8
from swarm.errors import BugError, Violation
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Payload

WireType = Literal["float32", "float64"]
WireCodec = Literal["float32", "int8"]


class Wire(Protocol):
    """Numbers to bytes and back, (elements,) of one type on both sides. Pure: equal bytes, equal numbers, anywhere."""

    @property
    def exact(self) -> bool:
        """Whether bytes are the numbers' own: then encoding and decoding are views and cost nothing."""

    def bytes_of(self, elements: int) -> int:
        """Exactly how many bytes so many numbers become."""

    def encode(self, values: NDArray[Any]) -> memoryview:
        """The bytes of a contiguous vector of the wire's type. They alias it where the wire is exact."""

    def decode(self, encoded: Payload, elements: int) -> NDArray[Any]:
        """The numbers. Raises Violation for a wrong length and for what no encoder makes."""


@dataclass(frozen=True, slots=True)
class ExactWire:
    """See :class:`Wire`. Values that are not finite pass: who adds or stores them looks."""

    dtype: WireType
    exact: bool = True

    def bytes_of(self, elements: int) -> int:
        """See :class:`Wire`."""
        return elements * np.dtype(self.dtype).itemsize

    def encode(self, values: NDArray[Any]) -> memoryview:
        """See :class:`Wire`."""
        return raw(values)

    def decode(self, encoded: Payload, elements: int) -> NDArray[Any]:
        """See :class:`Wire`."""
        if len(encoded) != self.bytes_of(elements):
            raise Violation(f"{len(encoded)} bytes, not {self.bytes_of(elements)}")
        return np.frombuffer(encoded, dtype=np.dtype(self.dtype).newbyteorder("<"))


@dataclass(frozen=True, slots=True)
class Int8Wire:
    """See :class:`Wire`, and :class:`~swarm.compression.blockwise.BlockwiseInt8` for the error, cost and what is
    refused. Blocks are counted from the start of what is encoded: the same chunk gives the same bytes in any group."""

    exact: bool = False

    def bytes_of(self, elements: int) -> int:
        """See :class:`Wire`."""
        return INT8.wire_bytes(_spec(elements))

    def encode(self, values: NDArray[Any]) -> memoryview:
        """See :class:`Wire`."""
        return INT8.encode(torch.from_numpy(values))

    def decode(self, encoded: Payload, elements: int) -> NDArray[Any]:
        """See :class:`Wire`."""
        values: NDArray[Any] = INT8.decode(encoded, _spec(elements)).numpy()
        return values


def wire_of(codec: WireCodec, dtype: WireType) -> Wire:
    """The wire for numbers of ``dtype``. Raises BugError for a codec that does not carry them."""
    if codec == "float32":
        return ExactWire(dtype)
    if dtype != "float32":
        raise BugError(f"codec {codec} carries float32, not {dtype}")
    return Int8Wire()


def raw(values: NDArray[Any]) -> memoryview:
    """A contiguous array's bytes, not copied."""
    return values.view(np.uint8).data


def _spec(elements: int) -> TensorSpec:
    return TensorSpec((elements,), "float32")
