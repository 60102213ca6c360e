"""What crosses a boundary between stages: its shape and codec, and its way between bytes on the host and a tensor on
the device that computes with it.

On a CUDA device the bytes go through page-locked memory, and decoding, encoding and the look for Inf and NaN are the
device's work: a host that does them takes several times as long as a large stage's forward and backward. The thread
that waits for them waits on the calling thread's stream alone, so that what another thread asked for goes on in the
background (:meth:`~swarm.device.Device.run_phases`). Every device gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from swarm.compression.codec import Codec, EncodeContext, check_length
from swarm.compression.dense import INT32, all_finite
from swarm.errors import Violation, WrongStep
from swarm.ids import StepWork
from swarm.models.packing import decode_starts, encode_starts, starts_bytes
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Payload
from swarm.pipeline.batch import Batch
from swarm.pipeline.messages import Direction

Mark = Any
"""An event of CUDA, or None: see :func:`mark`."""


COUNT_BYTES = 4


class RowNotes(NamedTuple):
    """What goes forward beside a tensor: the positions (B, T) of packed rows, None for rows of one text each, and how
    many of the microbatch's targets count."""

    positions: Tensor | None = None
    counted: int = 0

    @classmethod
    def of(cls, batch: Batch) -> RowNotes:
        """Return those of a microbatch."""
        return cls(batch.positions, int((batch.targets >= 0).sum()))


CodecsAcross = tuple[Codec, Codec]
"""At one boundary in one step: of activations, and of their gradients."""


class StepCodecs:
    """The codecs at one holder's two boundaries where each step has its own: that of the open step, and of the one
    before, some work of which may still be under way. Written by the loop, read by the threads that compute.

    Args:
        behind: The boundary over which activations come, counted from the trainers' embedding.
        ahead: The one over which they go on.
        possible: All that any step may have.
    """

    def __init__(self, behind: int, ahead: int, possible: Sequence[CodecsAcross]) -> None:
        self._behind, self._ahead, self._possible = behind, ahead, tuple(possible)
        self._steps: dict[int, tuple[CodecsAcross, ...]] = {}

    def open_step(self, step: int, codecs: Sequence[CodecsAcross]) -> None:
        """The step has these, by boundary; what is known of others than the one before is forgotten."""
        before = {step - 1: self._steps[step - 1]} if step - 1 in self._steps else {}
        self._steps = before | {step: tuple(codecs)}

    def arriving(self, step: int, direction: Direction) -> Codec:
        """Return the codec of what comes. Raises WrongStep for a step that is not open."""
        return self._of(step)[self._behind][0] if direction == "forward" else self._of(step)[self._ahead][1]

    def leaving(self, step: int, direction: str) -> Codec:
        """Return the codec of what goes. Raises as :meth:`arriving`."""
        return self._of(step)[self._ahead][0] if direction == "forward" else self._of(step)[self._behind][1]

    def admitted(self, step: int, direction: Direction) -> tuple[Codec, ...]:
        """Return the codecs that what comes may have: of a step that is to open all that are possible, for only the
        record before it says which, and its decoder looks at the length once more."""
        if step in self._steps:
            return (self.arriving(step, direction),)
        return tuple(dict.fromkeys(pair[direction == "backward"] for pair in self._possible))

    def _of(self, step: int) -> tuple[CodecsAcross, ...]:
        codecs = self._steps.get(step)
        if codecs is None:
            raise WrongStep(f"step {step} is not open here")
        return codecs


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySpecs:
    """What crosses a stage boundary in this run, and how it is encoded: gradients by ``back``, where there is one, as
    everything else by ``codec``; or as ``steps`` says, where each step has codecs of its own. ``counted``: stages are
    told how many targets count. ``shaken``: what comes is changed in the last place, to see how much hangs on it."""

    activation: TensorSpec
    tokens: TensorSpec
    codec: Codec
    hosted: bool
    packed: bool = False
    counted: bool = False
    back: Codec | None = None
    steps: StepCodecs | None = None
    shaken: bool = False

    @property
    def gradient_bytes(self) -> int:
        """Exact size of a boundary gradient's payload, where no step has codecs of its own; else the largest."""
        return self._codec("backward").wire_bytes(self.activation)

    @property
    def activation_bytes(self) -> int:
        """Size of what goes forward to a stage, as :attr:`gradient_bytes`: an activation and :class:`RowNotes`."""
        return self.codec.wire_bytes(self.activation) + self.rows_bytes

    def arriving_bytes(self, step: int, direction: Direction) -> tuple[int, ...]:
        """Return the sizes that an activation of this step, or a gradient that comes "backward", may have here: one,
        more only for a step that is yet to open."""
        if self.steps is None:
            return (self.activation_bytes if direction == "forward" else self.gradient_bytes,)
        more = self.rows_bytes if direction == "forward" else 0
        return tuple(codec.wire_bytes(self.activation) + more for codec in self.steps.admitted(step, direction))

    @property
    def target_bytes(self) -> int:
        """Exact size of hosted targets, (B, T)."""
        return INT32.wire_bytes(self.tokens)

    @property
    def token_bytes(self) -> int:
        """Exact size of hosted token ids, (B, T), and :class:`RowNotes`."""
        return self.target_bytes + self.rows_bytes

    @property
    def rows_bytes(self) -> int:
        """Exact size of :class:`RowNotes`, behind each payload that goes forward: as much of them as this run needs."""
        return self._starts_bytes + (COUNT_BYTES if self.counted else 0)

    @property
    def _starts_bytes(self) -> int:
        return starts_bytes(*self.tokens.shape) if self.packed else 0

    def joined(self, payload: Payload, rows: RowNotes) -> Payload:
        """Return what goes forward: a tensor's payload, and behind it what else the next stage needs."""
        if not self.rows_bytes:
            return payload
        count = rows.counted.to_bytes(COUNT_BYTES, "little") if self.counted else b""
        return memoryview(b"".join((payload, encode_starts(rows.positions), count)))

    def parted(self, payload: Payload) -> tuple[Payload, RowNotes]:
        """Part what goes forward. Raises Violation for more targets than a microbatch has."""
        if not self.rows_bytes:
            return payload, RowNotes()
        data = memoryview(payload).cast("B")
        split, (rows, sequence) = data.nbytes - self.rows_bytes, self.tokens.shape
        starts, count = data[split : split + self._starts_bytes], data[split + self._starts_bytes :]
        counted = int.from_bytes(count, "little")
        if counted > rows * sequence:
            raise Violation(f"{counted} targets where a microbatch has {rows * sequence}")
        return data[:split], RowNotes(decode_starts(starts, rows, sequence) if self.packed else None, counted)

    def _codec(self, direction: str) -> Codec:
        return self.codec if direction == "forward" or self.back is None else self.back

    def arrive(self, payload: Payload, device: torch.device, direction: Direction, step: int) -> Tensor:
        """Return an activation, or its gradient that comes "backward", on the device, and complete there.

        Raises Violation for a wrong length and for what is not finite, WrongStep as :class:`StepCodecs`. Another thread
        than the caller's takes it with :func:`entered`. Cost on CUDA: one copy of the payload on the host, and twice
        its bytes of the device's memory for a moment.
        """
        codec = self._codec(direction) if self.steps is None else self.steps.arriving(step, direction)
        if self.shaken:
            return _shaken(codec.decode(payload, self.activation, check_finite=True)).to(device)
        if device.type != "cuda":
            return codec.decode(payload, self.activation, check_finite=True).to(device)
        check_length(codec, memoryview(payload).nbytes, self.activation)
        wire = _page_locked(payload)
        values = codec.widen(wire.to(device, non_blocking=True), self.activation)
        if not all_finite(values):
            raise Violation(f"a value is not finite in {self.activation.dtype}")
        return values

    def leaving_bytes(self, step: int, direction: Direction) -> int:
        """Return the size of what :meth:`leave` gives, and of what else goes forward with it."""
        more = self.rows_bytes if direction == "forward" else 0
        return self.leaving(step, direction).wire_bytes(self.activation) + more

    def left(self, payload: Payload, step: int, direction: Direction) -> tuple[Tensor, bytes]:
        """Return a tensor that left, on the host, and the bytes of what went with it. Raises Violation for a wrong
        length and for what is not finite."""
        data = memoryview(payload).cast("B")
        split = self.leaving(step, direction).wire_bytes(self.activation)
        decoded = self.leaving(step, direction).decode(data[:split], self.activation, check_finite=True)
        return decoded, bytes(data[split:])

    def leaving(self, step: int, direction: str) -> Codec:
        """Return the codec of what leaves. Raises WrongStep as :class:`StepCodecs`."""
        return self._codec(direction) if self.steps is None else self.steps.leaving(step, direction)

    def leave(self, tensor: Tensor, context: EncodeContext, what: str, ready: Mark) -> memoryview:
        """Return the payload of an activation, or of its gradient.

        Raises Violation for what is not finite: anyone who gets it would refuse it, and blame us. From CUDA the payload
        lies in page-locked memory for as long as somebody holds it.

        Args:
            tensor: On any device.
            context: What it is, for the codec.
            what: What it is, for a person.
            ready: What :func:`mark` gave when the work that it comes of had been asked for; that is waited for.
        """
        if ready is not None:
            torch.cuda.current_stream(tensor.device).wait_event(ready)
        if not all_finite(tensor):
            raise Violation(f"the {what} is not finite")
        codec = self.leaving(context.step, context.direction)
        if ready is None:
            return codec.encode(tensor, context)
        found = codec.narrow(tensor, context)
        wire = torch.empty(found.shape, dtype=torch.uint8, pin_memory=True)
        wire.copy_(found, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return wire.numpy().data


def _shaken(values: Tensor) -> Tensor:
    """Return each number one unit in the last place, or two, above or below: which, nobody can know before."""
    generator = torch.Generator()
    generator.seed()
    signs = torch.randint(0, 2, values.shape, generator=generator).mul_(2).sub_(1)
    return (values.double() * (1 + 0.75 * torch.finfo(values.dtype).eps * signs)).to(values.dtype)


def going_forward(work: StepWork) -> EncodeContext:
    """Return what tells a codec that encodes an activation, or token ids, which they are."""
    return EncodeContext(step=work.ready_in, microbatch=work.microbatch, direction="forward")


def coming_back(work: StepWork) -> EncodeContext:
    """Return what tells a codec that encodes a gradient which it is."""
    return EncodeContext(step=work.ready_in, microbatch=work.microbatch, direction="backward")


# --- between threads that use one device -----------------------------------------------------------------------------


MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def entered(tensor: MaybeTensor) -> MaybeTensor:
    """Return a tensor that arrived on another thread, for this one to compute with: its memory is not given to others
    before that has been done."""
    if tensor is not None and tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def mark(device: torch.device) -> Mark:
    """Return what tells when the work that this thread has given the device so far is done; None but on CUDA."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(ready: Mark) -> None:
    """Have what this thread asks of the device from now on follow what :func:`mark` was asked behind."""
    if ready is not None:
        torch.cuda.current_stream().wait_event(ready)


def _page_locked(payload: Payload) -> Tensor:
    """Return a copy of a payload from where a device can fetch it by itself, uint8 (bytes,)."""
    data = np.frombuffer(payload, dtype=np.uint8)
    wire = torch.empty(data.size, dtype=torch.uint8, pin_memory=True)
    wire.numpy()[:] = data
    return wire
