"""Fifty times over: what a quick test cannot see adding up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cycles import cycle_daemon, cycle_peer

CYCLES = 50

pytestmark = [pytest.mark.nemesis, pytest.mark.network, pytest.mark.timeout(600)]


async def test_daemon_killed_fifty_times_leaves_nothing_behind(home: Path) -> None:
    await cycle_daemon(home, cycles=CYCLES)


async def test_peer_killed_fifty_times_leaves_nothing_behind(home: Path) -> None:
    await cycle_peer(home, cycles=CYCLES)
