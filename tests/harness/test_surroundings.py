"""What conftest promises every test."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.sources import ROOT

FORGETFUL = """
import asyncio, subprocess, sys

async def forever():
    await asyncio.Event().wait()

async def test_forgets_a_task():
    test_forgets_a_task.kept = asyncio.get_running_loop().create_task(forever())

async def test_ends_its_task():
    task = asyncio.get_running_loop().create_task(forever())
    task.cancel()

def test_forgets_nothing():
    pass
"""


async def test_loop_of_a_test_is_uvloop() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


def test_home_of_a_test_leaves_room_for_socket_names(home: Path) -> None:
    assert len(str(home)) < 40
    assert home.is_relative_to(tempfile.gettempdir())


@given(st.integers())
def test_fixtures_of_conftest_do_not_upset_hypothesis(number: int) -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1", number


def test_task_left_on_the_loop_fails_its_test_only(tmp_path: Path) -> None:
    # A whole pytest of its own, because the failure must come from conftest and not from what imports it.
    (tmp_path / "test_forgetful.py").write_text(FORGETFUL, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.conftest import _no_tasks_left\n"
        "from tests.conftest import _no_tasks_left_by_test\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    command += ["-o", "asyncio_default_fixture_loop_scope=function", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "3 passed, 1 error" in ended.stdout
    assert "ERROR test_forgetful.py::test_forgets_a_task" in ended.stdout
    assert "tasks left on the loop" in ended.stdout
