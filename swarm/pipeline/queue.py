"""What a replica computes next: backward before forward, oldest first, and only for the open step."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Kind = Literal["backward", "forward"]


class WorkQueue(Generic[T]):
    """A pure priority queue, bounded for each step.

    Backward work frees a graph and brings a microbatch home, so it goes first and is never refused: it was paid for
    when its forward was admitted. Forward work of the next step may wait here while the open one is being closed.
    """

    def __init__(self, max_forward: int) -> None:
        self._max_forward = max_forward
        self._ticket = count()
        self._heaps: dict[Kind, list[tuple[int, int, T]]] = {"backward": [], "forward": []}

    def full(self, step: int) -> bool:
        """Whether another forward of that step would be refused: what comes ahead of its step takes no place from the
        open one's. O(n)."""
        return sum(of_step == step for of_step, _, _ in self._heaps["forward"]) >= self._max_forward

    def __len__(self) -> int:
        return sum(len(heap) for heap in self._heaps.values())

    def push(self, kind: Kind, step: int, item: T) -> None:
        """Add work that was admitted. O(log n)."""
        heapq.heappush(self._heaps[kind], (step, next(self._ticket), item))

    def pop(self, open_step: int) -> T | None:
        """The next item of the open step, or None. Older leftovers were dropped by :meth:`drop_before`."""
        for kind in ("backward", "forward"):
            heap = self._heaps[kind]
            if heap and heap[0][0] <= open_step:
                return heapq.heappop(heap)[2]
        return None

    def clear(self) -> None:
        """Forget everything."""
        for heap in self._heaps.values():
            heap.clear()

    def drop_before(self, step: int) -> None:
        """Forget what belongs to steps before ``step``."""
        for kind, heap in self._heaps.items():
            kept = [entry for entry in heap if entry[0] >= step]
            heapq.heapify(kept)
            self._heaps[kind] = kept
