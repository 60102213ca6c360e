"""The chain of records, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.errors import OutOfSync
from swarm.optimization.history import History
from tests.unit.optimization.world import GENESIS, record

ONE = record()
TWO = record(ONE)
THREE = record(TWO)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_history_of_a_joiner_begins_with_its_first_record_and_is_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.begin(ONE)
    history.append(TWO)
    assert (steps(path), history.head, history.next_step) == ([1, 2], TWO, 3)


def test_history_that_left_steps_out_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.begin(GENESIS)
    history.append(ONE)
    history.begin(THREE)
    assert (steps(path), history.head_hash) == ([3], THREE.hash())
    with pytest.raises(OutOfSync):
        history.append(TWO)
    history.append(record(THREE))
    assert steps(path) == [3, 4]


@pytest.mark.parametrize(
    "other", [ONE, record(ONE, tokens=9), record(TWO, run="cd" * 32)], ids=["older", "another", "another run"]
)
def test_history_does_not_begin_anew_with_what_contradicts_it(other: object, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.begin(TWO)
    with pytest.raises(OutOfSync, match="not of the history that we know"):
        history.begin(other)  # type: ignore[arg-type]
    history.begin(TWO)
    assert (steps(path), history.head) == ([2], TWO)
