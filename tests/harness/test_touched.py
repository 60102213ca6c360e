"""Which tests a change asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.touched import ALWAYS, SEAM, TRAINING, touched


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("tests/unit/network", "tests/unit/models", "tests/unit/peers", "tests/unit/chaos"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/unit/models/test_gpt.py").touch()
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
        ("README.md", set()),
    ],
)
def test_change_asks_for_the_tests_of_its_package(root: Path, changed: str, asked: set[str]) -> None:
    assert set(touched([changed], root)) == asked | set(ALWAYS)
