"""The check of a report accepts a good one and names what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.report import NONE_OF, NUMBERS, faults, main

GOOD = dict.fromkeys(NUMBERS, 3) | dict.fromkeys(NONE_OF, 0) | {"exit_reason": "completed"}


def test_faults_of_a_good_report_are_none() -> None:
    assert faults(GOOD, {"steps": 3}) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"steps": 2}, "steps = 2 where 3 is expected"),
        ({"loss_last": float("nan")}, "loss_last = nan is no number"),
        ({"loss_last": None}, "loss_last = None is no number"),
        ({"microbatches_lost": 1}, "microbatches_lost = 1 where 0 is expected"),
        ({"bytes_per_step": 0}, "bytes_per_step = 0 where more than 0 is expected"),
        ({"exit_reason": "error"}, "exit_reason = 'error' where 'completed' is expected"),
    ],
)
def test_faults_of_a_bad_report_name_it(changed: dict[str, object], told: str) -> None:
    assert faults(GOOD | changed, {"steps": 3}) == [told]


def test_main_of_a_missing_or_incomplete_report_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 1
    (tmp_path / "half.json").write_text(json.dumps({"steps": 3}), encoding="utf-8")
    assert main([str(tmp_path / "half.json"), "--steps", "3"]) == 1
    assert "exit_reason is missing" in capsys.readouterr().err
