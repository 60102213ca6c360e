"""What is retained of computed microbatches until their step is closed, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from swarm.network.protocols import Payload

RETENTION_BYTES = 1 << 30
"""Default budget of one peer."""


class HeldOfMicrobatches(NamedTuple):
    """What a peer holds of microbatches: how many graphs, and bytes of payloads."""

    graphs: int
    payload_bytes: int


class Retained(Protocol):
    """Something that holds tensors of one microbatch, wire-encoded."""

    @property
    def retained_bytes(self) -> int:
        """Bytes it holds now."""

    @property
    def complete(self) -> bool:
        """Return whether nothing is lost but convenience when it is let go: neighbours can give it again."""

    def clear(self) -> None:
        """Let go of everything large."""


R = TypeVar("R", bound=Retained)


class Retention(Generic[R]):
    """Keeps the sum of all :class:`Retained` within a budget by dropping the oldest complete ones. Pure.

    What is not complete is never dropped: admission bounds it. ``dropped`` is told of each, with its bytes.
    """

    def __init__(self, budget_bytes: int, dropped: Callable[[R, int], None]) -> None:
        self._budget, self._dropped = budget_bytes, dropped
        self._sizes: dict[int, tuple[R, int]] = {}
        self.bytes = 0

    def hold(self, retained: R) -> None:
        """It holds more, or less, than before, or became complete: count it again, and drop what is too much.

        O(1) within the budget, else O(what is held).
        """
        self.forget(retained)
        size = retained.retained_bytes
        if size:
            self._sizes[id(retained)] = (retained, size)
            self.bytes += size
        if self.bytes > self._budget:
            self._drop()

    def forget(self, retained: R) -> None:
        """It is not held any more. Idempotent."""
        _, size = self._sizes.pop(id(retained), (retained, 0))
        self.bytes -= size

    def _drop(self) -> None:
        for retained, size in list(self._sizes.values()):
            if self.bytes <= self._budget:
                return
            if retained.complete:
                self.forget(retained)
                retained.clear()
                self._dropped(retained, size)


def payload_bytes(*payloads: Payload | None) -> int:
    """Bytes of these payloads together."""
    return sum(memoryview(payload).nbytes for payload in payloads if payload is not None)
