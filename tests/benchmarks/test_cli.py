"""What the benchmark ``cli`` makes of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from tests.benchmarks.cli import COMMANDS, measure, result


def test_measure_takes_turns_and_leaves_the_first_round_out() -> None:
    clock = count()
    ran: list[tuple[str, ...]] = []

    def once(arguments: Sequence[str]) -> float:
        ran.append(tuple(arguments))
        return float(next(clock))

    found = measure(once, 2)
    assert ran == [(), *COMMANDS.values()] * 3
    assert found == {"python": [5, 10], "help": [6, 11], "status": [7, 12], "peers": [8, 13], "doctor_quick": [9, 14]}


def test_result_has_medians_beside_targets() -> None:
    found = {name: [0.3, 0.1, 0.2] for name in ("python", *COMMANDS)}
    told = result(found, [9.0, 11.126, 10.0])
    assert told.summary == {
        "help_ms": 200, "status_ms": 200, "peers_ms": 200, "doctor_quick_ms": 200,
        "help_target_ms": 150, "status_target_ms": 150, "peers_target_ms": 150, "doctor_quick_target_ms": 300,
        "doctor_s": 11.13, "doctor_target_s": 15,
    }  # fmt: skip
    assert told.rows[2] == ["swarm status", 200, 100, 300]
