from __future__ import annotations

from typing import Any

from tests.benchmarks.scenarios import COLUMNS, FIGURES, to_result


def _play(name: str, problems: list[str], **figures: Any) -> dict[str, Any]:
    told = dict.fromkeys(FIGURES) | {"faults": 2, "lost": 0, "duplicated": 0, "digest_mismatches": 0}
    told |= {"load": 1.0, "whole_s": 60.0} | figures
    verdict = "broken" if problems else "kept"
    return told | {"scenario": name, "world": "containers", "verdict": verdict, "problems": problems}


def test_to_result_counts_what_was_kept_and_adds_up_what_was_lost() -> None:
    plays = [_play("oom", []), _play("oom", ["nobody was killed\nthe log says"], lost=1), _play("nat", [])]
    result = to_result(plays)
    assert result.summary["plays"] == 3
    assert result.summary["kept"] == 2
    assert result.summary["not_kept"] == {"oom": 1}
    assert (result.summary["faults"], result.summary["lost"]) == (6, 1)
    assert [row[-1] for row in result.rows] == ["", "nobody was killed the log says", ""]
    assert all(len(row) == len(COLUMNS) for row in result.rows)
