"""A death at every event that a run writes, in turn, and around several hundred of its messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.crashes import crashes, live, sweep

EVERY = 10_000
LEAST = 200
HOSTED = {"split": {"ends": "hosted"}}

pytestmark = [pytest.mark.nemesis, pytest.mark.timeout(3600)]


def is_event(kind: str) -> bool:
    """Whether it was written, not sent."""
    return " " not in kind


def is_message(kind: str) -> bool:
    """Whether it was sent."""
    return " " in kind


def test_death_at_every_event_leaves_nothing_between_two_steps(tmp_path: Path) -> None:
    calm = live(tmp_path / "calm")
    chosen = crashes(calm, most=EVERY, seed=1, kinds=is_event)
    assert len(chosen) >= LEAST
    sweep(tmp_path, calm, chosen)


def test_death_around_every_kind_of_message_leaves_nothing_between_two_steps(tmp_path: Path) -> None:
    calm = live(tmp_path / "calm")
    chosen = crashes(calm, most=160, seed=2, kinds=is_message)
    assert len(chosen) >= 140
    sweep(tmp_path, calm, chosen)


@pytest.mark.parametrize(("kinds", "most"), [(is_event, 80), (is_message, 80)])
def test_death_with_hosted_ends_leaves_nothing_between_two_steps(tmp_path: Path, kinds: Any, most: int) -> None:
    calm = live(tmp_path / "calm", **HOSTED)
    sweep(tmp_path, calm, crashes(calm, most=most, seed=3, kinds=kinds), **HOSTED)
