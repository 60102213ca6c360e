"""Bare torch, the first candidate of ``pipeline``: ``python -m tests.benchmarks._pipeline_bare SIZE THREADS``.

Forward and backward of the four blocks in one process, gradients added up as autograd adds them; no loss, no codec.
"""

from __future__ import annotations

import json
import os
import sys
import time

from tests.benchmarks._pipeline_load import SIZES, Order, Window, activation_of, blocks_of, gradient_of, threads
from tests.benchmarks._stage import Size
from tests.benchmarks._worker import say


class Bare:
    """All four blocks and their ready-made input and gradient."""

    def __init__(self, size: Size) -> None:
        self._module = blocks_of(size, 1, 0)
        self._input, self._gradient = activation_of(size), gradient_of(size)

    def microbatch(self) -> None:
        """One whole microbatch, there and back."""
        inputs = self._input.detach().requires_grad_()
        self._module(inputs, None).backward(self._gradient)

    def round(self, order: Order) -> dict[str, float]:
        """Compute without pause; what ends in the window counts."""
        self._module.zero_grad()
        window, began = Window(order), time.monotonic()
        while time.monotonic() - began < order.warmup_s:
            self.microbatch()
        window.open()
        while time.monotonic() - window.opened < order.seconds:
            self.microbatch()
            window.note()
        return window.close()


def main(size: str, count: str) -> None:
    """Serve orders until stdin ends."""
    threads(int(count))
    bare = Bare(SIZES[size])
    say({"pid": os.getpid()})
    for line in sys.stdin:
        say(bare.round(Order(**json.loads(line))))
