"""Asynchronous tests of this folder run in virtual time: an hour takes no time, and one that waits for nothing
fails."""

from __future__ import annotations

from tests.harness.rigs.clocks import virtual_loops as pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
