"""Which checkpoints stay."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ids import PartName
from swarm.state.checkpoints import rotation as checkpoint_aside
from swarm.state.checkpoints.files import HeldStep, step_directory
from swarm.state.checkpoints.parts import CheckpointManifest, latest, read_manifest, steps, write_manifest, write_part
from swarm.state.checkpoints.rotation import aside_directory, rotate, set_aside, superseded
from swarm.state.snapshot import digest
from tests.harness.rigs.state import RUN, snapshot

RECORD = CheckpointManifest(run=RUN, step=0, parts={})


def a_step(step: int, state: str) -> HeldStep:
    """``complete``, ``part`` (another is on another machine), or ``torn``."""
    parts = {} if state == "torn" else {PartName("stage-0"): 7}
    missing = (PartName("stage-1"),) if state == "part" else ()
    troubles = ("torn",) if state == "torn" else ()
    return HeldStep(step=step, record=RECORD, parts=parts, missing=missing, troubles=troubles)


def those(states: str) -> list[HeldStep]:
    names = {"c": "complete", "p": "part", "t": "torn"}
    return [a_step(10 * number, names[letter]) for number, letter in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "kept", "gone"),
    [
        ("ccccc", None, []),
        ("ccccc", 2, [10, 20]),
        ("ppppp", 2, [10, 20]),
        ("cccpp", 2, []),
        ("ccppp", 2, [20]),
        ("cctt", 1, []),
        ("cttc", 1, [10, 20]),
        ("cctpcpt", 1, [10, 20, 30]),
        ("tttt", 1, []),
        ("", 1, []),
    ],
)
def test_superseded_keeps_the_newest(states: str, kept: int | None, gone: list[int]) -> None:
    assert superseded(those(states), kept, 60) == gone


@given(states=st.text("cpt", max_size=12), kept=st.integers(1, 4))
def test_superseded_never_takes_the_last_good_one(states: str, kept: int) -> None:
    there = those(states)
    left = [one for one in there if one.step not in superseded(there, kept, 999)]
    complete = [one.step for one in there if one.complete]
    good = [one.step for one in there if one.parts]
    assert [one.step for one in left if one.complete][-kept:] == complete[-kept:]
    assert [one.step for one in left if one.parts][-kept:] == good[-kept:]
    assert [one.step for one in left if one.step > max(good, default=-1)] == [
        one.step for one in there if one.step > max(good, default=-1)
    ]
    assert superseded(left, kept, 999) == []


def test_superseded_keeps_the_newest_two_of_the_steps_that_other_machines_keep_too() -> None:
    assert superseded(those("ppppppppp"), 2, 80, 30) == [10, 20, 40, 50]
    assert superseded(those("pppppppppp"), 1, 90, 30) == [10, 20, 30, 40, 50, 70, 80]
    assert superseded(those("pppppptpp"), 1, 80, 30) == [10, 20, 40, 50, 60, 70], "a torn one is none"


@given(states=st.text("cpt", min_size=1, max_size=8), kept=st.integers(1, 4), more=st.text("p", max_size=9))
def test_superseded_never_takes_one_that_is_due_for_those_that_are_not(states: str, kept: int, more: str) -> None:
    before, newest = those(states), 10 * (len(states) - 1)
    there = those(states + more)
    gone = superseded(there, kept, 999, due=lambda step: step <= newest)
    good_or_whole = {one.step for one in before if one.parts}
    assert set(gone) & good_or_whole <= set(superseded(before, kept, 999))


def test_what_was_set_aside_goes_when_the_run_has_passed_it(tmp_path: Path) -> None:
    for step in (0, 1, 2, 3):
        write_manifest(tmp_path, CheckpointManifest(run=RUN, step=step, parts={}))
    assert set_aside(tmp_path, [2, 3]) == [2, 3]
    assert set_aside(tmp_path, [2, 3]) == []
    assert (steps(tmp_path), steps(aside_directory(tmp_path))) == ((0, 1), (2, 3))
    rotate(tmp_path, None, 3)
    rotate(tmp_path, 1, 2)
    assert steps(aside_directory(tmp_path)) == (3,)
    rotate(tmp_path, 1, 3)
    assert not aside_directory(tmp_path).exists()


def test_of_a_step_that_is_set_aside_again_the_newer_one_stays(tmp_path: Path) -> None:
    for run in (RUN, "cd" * 32):
        write_manifest(tmp_path, CheckpointManifest(run=run, step=2, parts={}))
        assert set_aside(tmp_path, [2]) == [2]
    assert read_manifest(aside_directory(tmp_path), 2).run == "cd" * 32


def test_rotate_deletes_directories_and_keeps_what_can_be_loaded(tmp_path: Path) -> None:
    for step in (0, 1, 2, 3, 4):
        part = snapshot(step=step)
        write_manifest(tmp_path, CheckpointManifest(run=RUN, step=step, parts={part.part: digest(part)}))
        write_part(tmp_path, part, {"run": RUN})
    (step_directory(tmp_path, 4) / "stage-0.safetensors").write_bytes(b"torn")
    assert rotate(tmp_path, None, 4) == []
    assert rotate(tmp_path, 2, 4) == [1]
    assert steps(tmp_path) == (0, 2, 3, 4)
    assert latest(tmp_path) == 3


def test_set_aside_by_two_at_once_keeps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_part(tmp_path, snapshot(step=4), {})
    set_aside(tmp_path, [4])
    path = write_part(tmp_path, snapshot(step=4), {})
    usual = tempfile.mkdtemp

    def faster(**options: Any) -> str:
        """Another peer does the same, just as this one is about to."""
        monkeypatch.setattr(tempfile, "mkdtemp", usual)
        assert set_aside(tmp_path, [4]) == [4]
        return usual(**options)

    monkeypatch.setattr(tempfile, "mkdtemp", faster)
    assert set_aside(tmp_path, [4]) == []
    aside = aside_directory(tmp_path)
    assert not path.exists()
    assert (step_directory(aside, 4) / path.name).is_file()
    assert [one.name for one in aside.iterdir()] == [step_directory(aside, 4).name]


def test_set_aside_by_two_in_the_middle_of_each_other_leaves_one_and_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in (RUN, "cd" * 32):
        write_manifest(tmp_path, CheckpointManifest(run=run, step=4, parts={}))
        if run == RUN:
            set_aside(tmp_path, [4])
    aside, usual = aside_directory(tmp_path), os.rename
    target = step_directory(aside, 4)

    def between(source: Path, to: Path) -> None:
        """Another peer moves the step, once this one has made room for it."""
        usual(source, to)
        if source == target:
            monkeypatch.setattr(os, "rename", usual)
            assert set_aside(tmp_path, [4]) == [4]

    monkeypatch.setattr(os, "rename", between)
    assert set_aside(tmp_path, [4]) == []
    assert read_manifest(aside, 4).run == "cd" * 32
    assert [one.name for one in aside.iterdir()] == [target.name]


def test_what_a_killed_process_left_of_setting_aside_goes_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, CheckpointManifest(run=RUN, step=2, parts={}))
    set_aside(tmp_path, [2])
    left = aside_directory(tmp_path) / ".old-killed"
    left.mkdir()
    rotate(tmp_path, 1, 2)
    assert left.exists(), "somebody may be at it"
    monkeypatch.setattr(checkpoint_aside, "ABANDONED_S", -600.0)
    rotate(tmp_path, 1, 2)
    assert not aside_directory(tmp_path).exists()


def test_rotation_beside_another_peer_s_does_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (4, 5, 6):
        write_part(tmp_path, snapshot(step=step), {})
    usual = os.listdir

    def late(path: Path) -> list[str]:
        """What another deletes between two looks."""
        names = usual(path)
        shutil.rmtree(step_directory(tmp_path, 4), ignore_errors=True)
        return names

    monkeypatch.setattr(os, "listdir", late)
    assert 4 not in rotate(tmp_path, 1, upto=6)
    assert (step_directory(tmp_path, 6)).is_dir()
