"""What a peer keeps, from its settings to its disk."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.ckpt_keeper import CheckpointKeeper
from peers.settings import PeerSettings
from swarm.errors import EXIT_ERROR, RunEnded
from swarm.ids import ENDS, PartName
from swarm.state.checkpoint import held, steps
from swarm.state.checkpoint_shelf import CheckpointShelf
from tests.unit.peers.fake_clock import FakeClock
from tests.unit.peers.kept_run import KeptRun, kept_run
from tests.unit.peers.test_checkpoints import Heard
from tests.unit.state.broken_disk import BrokenDisk, install


@pytest.fixture
def run() -> KeptRun:
    return kept_run()


class Device:
    """Runs at once what belongs on the device thread."""

    async def run(self, work: Any) -> Any:
        """See :class:`swarm.device.DeviceThread`."""
        return work()


def keeper(run: KeptRun, directory: Path | None, **more: Any) -> CheckpointKeeper:
    settings = PeerSettings(home=Path("unused"), role="bootstrap", run_directory=directory, **more)
    around = SimpleNamespace(manifest=run.manifest, events=Heard(), clock=FakeClock(), device=Device())
    return CheckpointKeeper(settings, cast(Any, around))


def holds(run: KeptRun, step: int, part: PartName = ENDS) -> Any:
    return SimpleNamespace(snapshot=lambda: run.states(step)[part])


async def test_keeper_writes_what_is_due_and_the_last_that_it_takes_part_in(tmp_path: Path, run: KeptRun) -> None:
    async with keeper(run, tmp_path / "{run}", checkpoint_every=10) as one:
        for step in (0, 1, 10, 11):  # the last one is not left out, however far behind the disk is
            await one.decided(run.decide(step), holds(run, step), departed=step == 11)
    root = tmp_path / f"kept-{run.manifest.run_id[:12]}" / "checkpoints"
    assert steps(root) == (0, 10, 11)
    assert all(set(held(root, step).parts) == {ENDS} for step in steps(root))
    (shelf,) = one.services()
    assert isinstance(shelf, CheckpointShelf)
    assert one.beginning() is None


async def test_keeper_whose_disk_takes_the_last_state_has_nothing_to_say(tmp_path: Path, run: KeptRun) -> None:
    async with keeper(run, tmp_path, checkpoint_every=10) as one:
        await one.decided(run.decide(0), holds(run, 0), departed=False)
        await one.decided(run.decide(100), holds(run, 100), departed=False)
    one.check_last()


async def test_keeper_whose_disk_refuses_the_last_state_ends_badly_and_leaves_what_was_there(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.keep(tmp_path, 0)
    with monkeypatch.context() as patch:
        disk = install(patch, BrokenDisk(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        async with keeper(run, tmp_path, checkpoint_every=10) as one:
            await one.decided(run.decide(100), holds(run, 100), departed=False)
    assert disk.fired
    with pytest.raises(RunEnded, match="last step, 100, is closed, but its checkpoint of ends is not") as ended:
        one.check_last()
    assert ended.value.exit_code == EXIT_ERROR
    assert "that of step 0 is as it was" in ended.value.reason
    assert "new --resume" in ended.value.remedy
    assert steps(tmp_path / "checkpoints") == (0,)


async def test_keeper_of_a_peer_without_a_part_or_a_directory_writes_nothing(tmp_path: Path, run: KeptRun) -> None:
    async with keeper(run, tmp_path) as one:
        await one.decided(run.decide(0), None, departed=True)
    assert steps(tmp_path / "checkpoints") == ()
    async with keeper(run, None) as nothing:
        await nothing.decided(run.decide(1), holds(run, 1), departed=True)
    assert (nothing.services(), nothing.beginning()) == ((), None)


async def test_keeper_of_a_resumed_run_begins_with_its_checkpoint(tmp_path: Path, run: KeptRun) -> None:
    run.keep(tmp_path, 10)
    beginning = keeper(run, tmp_path, resume=10).beginning()
    assert beginning is not None
    origin, _ = await beginning.load()
    assert origin.step == 10


async def test_keeper_left_by_an_error_passes_it_on_and_leaves_no_task(tmp_path: Path, run: KeptRun) -> None:
    before = asyncio.all_tasks()

    async def broken() -> None:
        async with keeper(run, tmp_path) as one:
            await one.decided(run.decide(0), holds(run, 0), departed=False)
            raise RunEnded("over", 3)

    with pytest.raises(BaseExceptionGroup) as caught:
        await broken()
    assert caught.group_contains(RunEnded)
    assert asyncio.all_tasks() == before
