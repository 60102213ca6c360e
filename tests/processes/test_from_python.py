"""The example of the Python API runs, cell by cell, as a notebook would have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.by_hand import RUN, some_text
from tests.harness.sources import ROOT

pytestmark = pytest.mark.process


def test_notebook_of_the_examples_trains_and_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "run.toml"
    manifest.write_text(RUN.format(steps=2))
    smaller = {
        "run": {"run": manifest, "stages": 1, "hosts": 1},
        "text": some_text(tmp_path),
        "home": tmp_path / "home",
    }
    monkeypatch.setenv("SWARM_LISTEN", "/ip4/127.0.0.1/tcp/0")
    cells: dict[str, Any] = {}
    for cell in (ROOT / "examples" / "notebook.py").read_text(encoding="utf-8").split("\n# %%\n")[1:]:
        exec(compile(cell, "notebook.py", "exec"), cells)
        cells |= {name: value for name, value in smaller.items() if "model" not in cells}
    assert [step.number for step in cells["steps"]] == [1, 2]
    assert cells["trainer"].exit_code == cells["founder"].exit_code == 0
    assert next(cells["model"].parameters()).shape == (512, 32), "the model of that run"
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"to take part elsewhere: swarm join {cells['founder'].invite}"
    assert [line.partition(":")[0] for line in said[1:3]] == ["step 1", "step 2"]
    assert len(said) >= 9
