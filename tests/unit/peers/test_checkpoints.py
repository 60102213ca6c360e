"""The writer beside the training: when, what, and what happens when the disk refuses."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from peers.checkpoints import writer as checkpoints
from peers.checkpoints.writer import MAX_WAITING, CheckpointWriter, Periods
from swarm.events import CheckpointFailed, CheckpointWritten
from swarm.ids import ENDS
from swarm.state.checkpoints.files import clear_bare, part_path, step_directory
from swarm.state.checkpoints.parts import held, latest, read_manifest, steps
from tests.harness.rigs.peers import PARTS, BrokenDisk, EventList, FakeClock, KeptRun, install


def writer(root: Path, heard: EventList, *, every: int | None = 10, kept: int | None = None) -> CheckpointWriter:
    return CheckpointWriter(root, Periods.of(100, every), 100, kept=kept, events=heard, clock=FakeClock())


async def write_step(run: KeptRun, step: int, writers: list[CheckpointWriter]) -> None:
    """Everybody's part of a step, each by its own writer."""
    decision, states = run.decide(step), run.states(step)
    for one, part in zip(writers, PARTS, strict=True):
        one.heard(decision)
        await one.write(states[part], decision.record)


def test_writer_is_due_at_the_same_steps_everywhere(tmp_path: Path) -> None:
    usual = writer(tmp_path, EventList(), every=None)
    assert [step for step in range(101) if usual.due(step)] == list(range(0, 101, 10))
    for every in (3, 7, 1000):
        often = writer(tmp_path, EventList(), every=every)
        assert [step for step in range(101) if often.due(step)] == sorted({*range(0, 101, 10), *range(0, 101, every)})


async def test_machines_that_write_at_their_own_steps_have_a_whole_checkpoint_between_them(
    tmp_path: Path, run: KeptRun
) -> None:
    roots = [tmp_path / part for part in PARTS]
    writers = [writer(root, EventList(), every=every, kept=2) for root, every in zip(roots, (1, 7, None), strict=True)]
    for step in range(40):
        decision, states = run.decide(step), run.states(step)
        for one, part in zip(writers, PARTS, strict=True):
            one.heard(decision)
            if one.due(step):
                await one.write(states[part], decision.record)
        whole = set.intersection(*(set(steps(root)) for root in roots))
        assert step // 10 * 10 in whole
    assert steps(roots[0]) == (0, 20, 30, 38, 39)


async def test_writer_that_died_does_not_keep_the_next_one_out(tmp_path: Path, run: KeptRun) -> None:
    record = run.decide(0).record
    path = part_path(tmp_path, 0, ENDS)
    path.parent.mkdir(parents=True)
    (path.parent / f".{path.name}.lock").touch()
    (path.parent / f".{path.name}.0badcafe.tmp").write_bytes(b"half")
    heard = EventList()
    await writer(tmp_path, heard).write(run.states(0)[ENDS], record)
    assert len(heard.of(CheckpointWritten)) == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["ends.safetensors", "record.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_writer_on_a_disk_that_refuses_says_so_keeps_the_old_and_goes_on(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    heard = EventList()
    writers = [writer(tmp_path, heard, kept=1) for _ in PARTS]
    await write_step(run, 0, writers)
    await write_step(run, 10, writers)
    with monkeypatch.context() as patch:
        disk = install(patch, BrokenDisk(20, OSError(code, os.strerror(code))))
        await write_step(run, 20, writers)
    assert disk.fired
    failed = heard.of(CheckpointFailed)
    assert len(failed) == 1
    assert isinstance(failed[0], CheckpointFailed)
    assert (failed[0].step, failed[0].kept) == (20, 10)
    assert os.strerror(code) in failed[0].reason
    assert latest(tmp_path) == 10
    await write_step(run, 30, writers)
    assert latest(tmp_path) == 30
    assert steps(tmp_path) == (0, 20, 30), (
        "no more is whole before the last; of 20 there are parts, which others may lack"
    )


@pytest.mark.parametrize("at", range(1, 40))
async def test_writer_on_a_full_disk_leaves_no_directory_in_which_nothing_is(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    decision = run.decide(0)
    with monkeypatch.context() as patch:
        install(patch, BrokenDisk(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        await writer(tmp_path, EventList()).write(run.states(0)[ENDS], decision.record)
    assert not steps(tmp_path) or held(tmp_path, 0).parts


@pytest.mark.parametrize("claim", [None, ".ends.safetensors.lock", "ends.safetensors"])
def test_record_is_cleared_away_only_where_nobody_else_writes(tmp_path: Path, run: KeptRun, claim: str | None) -> None:
    root = run.keep(tmp_path, 0, []).checkpoints
    if claim is not None:
        (step_directory(root, 0) / claim).touch()
    clear_bare(root, 0)
    assert steps(root) == (() if claim is None else (0,))
    assert claim is None or read_manifest(root, 0).step == 0


def test_record_is_put_back_for_who_claims_a_part_while_it_is_cleared_away(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run.keep(tmp_path, 0, []).checkpoints
    rename = os.rename

    def claimed(source: Path, target: Path) -> None:
        rename(source, target)
        (step_directory(root, 0) / ".ends.safetensors.lock").touch()

    monkeypatch.setattr(os, "rename", claimed)
    clear_bare(root, 0)
    assert read_manifest(root, 0).step == 0


async def test_writer_does_not_write_a_state_that_is_not_the_record_s(tmp_path: Path, run: KeptRun) -> None:
    heard = EventList()
    record = run.decide(0).record
    await writer(tmp_path, heard).write(run.states(0, seed=5)[ENDS], record)
    (failed,) = heard.of(CheckpointFailed)
    assert isinstance(failed, CheckpointFailed)
    assert "was not written" in failed.reason
    assert held(tmp_path, 0).parts == {}


async def test_writer_keeps_the_newest_complete_ones(tmp_path: Path, run: KeptRun) -> None:
    writers = [writer(tmp_path, EventList(), kept=2) for _ in PARTS]
    for step in (0, 10, 20, 30, 40):
        await write_step(run, step, writers)
    assert steps(tmp_path) == (0, 30, 40)


async def test_writer_behind_a_slow_disk_leaves_out_and_says_so(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most MAX_WAITING states stay in memory, however slow the disk."""
    heard, gate = EventList(), threading.Event()
    real = checkpoints.write_part

    def slow(*arguments: object, **more: object) -> Path:
        gate.wait(300)
        return real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "write_part", slow)
    one = writer(tmp_path, heard)
    decisions = [run.decide(step) for step in (0, 10, 20)]
    tasks = [asyncio.create_task(one.write(run.states(d.record.step)[ENDS], d.record)) for d in decisions]
    await tasks[MAX_WAITING]
    (failed,) = heard.of(CheckpointFailed)
    assert isinstance(failed, CheckpointFailed)
    assert (failed.step, failed.kept) == (20, None)
    tasks.append(asyncio.create_task(one.write(run.states(20)[ENDS], decisions[2].record, last=True)))
    gate.set()
    await asyncio.gather(*tasks)
    assert [event.step for event in heard.of(CheckpointWritten) if isinstance(event, CheckpointWritten)] == [0, 10, 20]
