"""A run of the benchmark ``goodput`` in small, and the account it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import _goodput_case, goodput


def test_small_run_loses_machines_and_counts_every_microbatch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_goodput_case, "REPLICAS", 3)
    first = _goodput_case.play(tmp_path, churn=0.2, seed=1, steps=4, slower=30.0)
    assert first["killed"] > 0
    assert first["noticed"] > 0
    assert first["committed"] == 4 * 6
    assert (first["lost"], first["duplicated"], first["digest_mismatches"]) == (0, 0, 0)
    assert first["broken"] == []
    assert 0.3 < first["goodput"] <= 1.0
    assert first["goodput_joining_too"] <= first["goodput"]
    cases = [{"churn": 0.0}, {"churn": 0.01}, {"churn": 0.05}, {"churn": 0.0, "mode": "overlap"}]
    result = goodput.to_result([first | case for case in cases])
    assert set(result.summary) == set(goodput.KEYS)
    assert result.summary["goodput_5pct"] == pytest.approx(first["goodput"], abs=1e-3)
    assert len(result.rows[0]) == len(result.columns)
