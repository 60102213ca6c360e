"""What whole swarms in one process need not wait for."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_time_for_disks_and_rubbish(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody reads these disks after a power cut, and what a story leaves is looked for once it is over: a quarter of
    its time otherwise."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    gc.disable()
    yield
    gc.enable()
