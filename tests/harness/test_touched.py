"""Which tests a change asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.touched import ALWAYS, HARNESS, RIGS, SEAM, STORIES, TRAINING, UNITS, touched


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("unit/network", "unit/models", "unit/peers", "unit/chaos", "harness", "swarms", "conformance"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / RIGS / "optim").mkdir(parents=True)
    for file in ("tests/unit/models/test_gpt.py", "tests/unit/test_config.py", TRAINING, STORIES):
        (tmp_path / file).touch()
    leaning = {"tests/unit/peers/test_data.py": "optim", "tests/unit/models/conftest.py": "models"}
    for file, rig in {**leaning, f"{RIGS}/optim/part.py": "models", f"{RIGS}/models.py": "common"}.items():
        (tmp_path / file).write_text(f"from tests.harness.rigs.{rig} import MODEL\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ("swarm/network/endpoint.py", {"tests/unit/network", SEAM, TRAINING}),
        ("swarm/models/gpt.py", {"tests/unit/models"}),
        ("peers/chaos/play.py", {"tests/unit/peers", "tests/unit/chaos"}),
        ("peers/node.py", {"tests/unit/peers", TRAINING}),
        ("tests/unit/models/test_gpt.py", {"tests/unit/models/test_gpt.py"}),
        ("tests/unit/models/test_gone.py", set()),
        ("swarm/config.py", {"tests/unit/test_config.py", TRAINING}),
        ("swarm/device.py", {TRAINING}),
        ("swarm/waiting.py", {UNITS, TRAINING}),
        ("swarm/events/step.py", {UNITS, TRAINING}),
        ("tests/unit/models/states.py", {"tests/unit/models"}),
        ("tests/unit/models/conftest.py", {"tests/unit/models"}),
        ("tests/harness/swarm.py", {HARNESS, UNITS, TRAINING}),
        ("tests/conftest.py", {HARNESS, UNITS, TRAINING}),
        ("tests/conformance/service.py", {SEAM}),
        ("tests/swarms/story.py", {TRAINING, STORIES}),
        ("tests/benchmarks/_stage.py", set()),
        ("pyproject.toml", {UNITS, TRAINING}),
        ("README.md", set()),
    ],
)
def test_change_asks_for_the_tests_of_its_package(root: Path, changed: str, asked: set[str]) -> None:
    assert set(touched([changed], root)) == asked | set(ALWAYS)


def test_what_lies_in_a_folder_that_is_asked_for_is_not_named_again(root: Path) -> None:
    asked = touched(["swarm/ids.py", "swarm/config.py", "tests/unit/models/test_gpt.py"], root)
    assert set(asked) == {UNITS, TRAINING} | set(ALWAYS)
    asked = touched([f"{RIGS}/models.py", "tests/unit/models/test_gpt.py"], root)
    assert set(asked) == {"tests/unit/models", "tests/unit/peers"} | set(ALWAYS), "a rig asks for who leans on it"
    assert set(touched([f"{RIGS}/optim/part.py"], root)) == {"tests/unit/peers"} | set(ALWAYS)
    assert set(touched([f"{RIGS}/common.py"], root)) == {HARNESS, UNITS, TRAINING} | set(ALWAYS)
