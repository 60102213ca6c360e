"""What a play's things are labelled with."""

from __future__ import annotations

import pytest

from peers.chaos.engine import Engine


def test_play_of_tests_says_which_and_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TEST_ID", "ci-1/ab")
    assert "swarm.test=ci-1" in Engine("one").labels
    monkeypatch.delenv("SWARM_TEST_ID")
    assert not [word for word in Engine("one").labels if "swarm.test" in word]
