"""What a peer keeps, from its settings to its disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.checkpoints.keeper import CheckpointKeeper
from peers.checkpoints.writer import keep_run
from peers.exit_codes import EXIT_ERROR, exit_code_of
from peers.home.run_directory import RunDirectory
from swarm.config import load_manifest
from swarm.consensus.records import Decision
from swarm.disk import alone
from swarm.errors import Ending, RunEnded
from swarm.events import CheckpointsSetAside, CheckpointWritten
from swarm.ids import ENDS, PartName, stage_part
from swarm.membership.founding_record import Origin, founding_record
from swarm.membership.membership import COPIES_S
from swarm.state.checkpoints.checkpoint_service import CheckpointService
from swarm.state.checkpoints.parts import held, part_path, read_manifest, steps
from swarm.state.checkpoints.rotation import aside_directory
from tests.harness.rigs.peers import BrokenDisk, EventList, FakeClock, InlineDevice, KeptRun, install, peer_settings


def keeper(
    run: KeptRun,
    directory: Path | None,
    heard: EventList | None = None,
    clock: FakeClock | None = None,
    begin: Callable[[], None] | None = None,
    **more: Any,
) -> CheckpointKeeper:
    given = {"home": Path("unused"), "role": "bootstrap", "run_directory": directory, **more}
    around = SimpleNamespace(
        manifest=run.manifest, events=heard or EventList(), clock=clock or FakeClock(), device=InlineDevice(), gate=None
    )
    return CheckpointKeeper(peer_settings(**given), cast(Any, around), begin)


def holds(run: KeptRun, step: int, part: PartName = ENDS) -> Any:
    return SimpleNamespace(snapshot=lambda: run.states(step)[part])


async def test_keeper_writes_what_is_due_and_the_last_that_it_takes_part_in(tmp_path: Path, run: KeptRun) -> None:
    async with keeper(run, tmp_path / "{run}", checkpoint_every=10) as one:
        for step in (0, 1, 10, 11):  # the last one is not left out, however far behind the disk is
            await one.decided(run.decide(step), holds(run, step), departed=step == 11)
    root = tmp_path / f"kept-{run.manifest.run_id[:12]}" / "checkpoints"
    assert steps(root) == (0, 10, 11)
    assert all(set(held(root, step).parts) == {ENDS} for step in steps(root))
    (service,) = one.services()
    assert isinstance(service, CheckpointService)
    assert one.beginning() is None


async def test_keeper_of_a_run_on_one_machine_writes_only_what_is_due_there(tmp_path: Path, run: KeptRun) -> None:
    async with keeper(run, tmp_path, checkpoint_every=34, alone=True) as one:
        for step in (0, 10, 34):
            await one.decided(run.decide(step), holds(run, step), departed=False)
    assert steps(tmp_path / "checkpoints") == (0, 34)


async def test_keeper_writes_the_step_with_which_the_run_is_ended_and_misses_it(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.decide(0)
    ended = run.decide(11, ended=True)
    async with keeper(run, tmp_path, checkpoint_every=10) as one:
        await one.decided(ended, holds(run, 11), departed=False)
    one.check_last()
    assert steps(tmp_path / "checkpoints") == (11,)
    with monkeypatch.context() as patch:
        disk = install(patch, BrokenDisk(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        async with keeper(run, tmp_path / "full", checkpoint_every=10) as one:
            await one.decided(ended, holds(run, 11), departed=False)
    assert disk.fired
    with pytest.raises(RunEnded, match="last step, 11, is closed, but its checkpoint of ends is not"):
        one.check_last()


async def test_keeper_writes_what_is_here_of_others_parts_after_its_own_when_the_run_is_over(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = EventList()
    monkeypatch.setattr("peers.checkpoints.writer.MAX_WAITING", 1)
    run.decide(0)
    ended = run.decide(11, ended=True)
    copies = [run.states(11)[part] for part in (stage_part(0), stage_part(1))]
    async with keeper(run, tmp_path, heard) as one:
        await one.decided(ended, holds(run, 11), departed=False)
        await one.keep_copies(copies, ended.record, COPIES_S)
    assert [event.part for event in heard.events if isinstance(event, CheckpointWritten)] == [
        ENDS,
        "stage-0",
        "stage-1",
    ]
    assert held(tmp_path / "checkpoints", 11).complete
    with monkeypatch.context() as patch:
        disk = install(patch, BrokenDisk(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        async with keeper(run, tmp_path / "full") as one:
            await one.keep_copies(copies[:1], ended.record, COPIES_S)
    assert disk.fired
    one.check_last()  # it was not its own


class Waits(FakeClock):
    """Has something done when somebody waits for the first time."""

    def __init__(self, first: Callable[[], object]) -> None:
        self._first, self.waited = first, 0

    async def sleep(self, seconds: float) -> None:
        """Jumps."""
        self.waited += 1
        if self.waited == 1:
            self._first()
        await super().sleep(seconds)


@pytest.mark.parametrize("other", ["fails", "goes on", "has written it"])
async def test_keeper_sees_to_its_last_state_when_another_peer_of_this_machine_writes_it(
    tmp_path: Path, run: KeptRun, other: str
) -> None:
    """A peer that keeps a copy of the part may be the first to write it, and fail, be killed or stand still."""
    run.decide(0)
    ended = run.decide(11, ended=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(part_path(tmp_path / "checkpoints", 11, ENDS), wait=True))
        first = {"fails": stack.close, "goes on": bool, "has written it": lambda: run.keep(tmp_path, 11, [ENDS])}[other]
        clock = Waits(first)
        async with keeper(run, tmp_path, clock=clock, checkpoint_every=10) as one:
            await one.decided(ended, holds(run, 11), departed=False)
        assert clock.waited
        one.check_last()
        assert ENDS in held(tmp_path / "checkpoints", 11).parts


@pytest.mark.parametrize("owner", ["is killed", "stands still"])
async def test_keeper_sees_to_a_copy_whose_owner_does_not_finish_it(tmp_path: Path, run: KeptRun, owner: str) -> None:
    run.decide(0)
    ended, part = run.decide(11, ended=True), stage_part(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(part_path(tmp_path / "checkpoints", 11, part), wait=True))
        clock = Waits(stack.close if owner == "is killed" else bool)
        async with keeper(run, tmp_path, clock=clock) as one:
            await one.decided(ended, holds(run, 11), departed=False)
            await one.keep_copies([run.states(11)[part]], ended.record, COPIES_S)
        assert clock.waited
        assert set(held(tmp_path / "checkpoints", 11).parts) == {ENDS, part}


async def test_keeper_does_not_take_a_state_of_another_history_for_the_last(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last steps are done again on a disk that is so full that not even what lies there can be set aside."""
    run.keep(tmp_path, 24)
    run.keep(tmp_path, 100)
    again, refused = resumed_after(run, 24), []

    def full(*_: object) -> None:
        refused.append(errno.ENOSPC)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("peers.checkpoints.writer.set_aside", full)
    monkeypatch.setattr("peers.checkpoints.writer.write_manifest", full)
    async with keeper(run, tmp_path) as one:
        await one.decided(again, None, departed=False)
        await one.decided(run.decide(100, seed=7), holds(run, 100), departed=False)
    assert len(refused) == 2
    assert held(tmp_path / "checkpoints", 100).complete, "by the record that it has"
    with pytest.raises(RunEnded, match="last step, 100, is closed, but .* that of step 24 is as it was"):
        one.check_last()


async def test_keeper_that_took_long_for_its_own_part_begins_no_copy(tmp_path: Path, run: KeptRun) -> None:
    run.decide(0)
    ended = run.decide(11, ended=True)
    one = keeper(run, tmp_path)
    clock = cast(FakeClock, one._around.clock)
    async with one:
        await one.decided(ended, holds(run, 11), departed=False)
        keeping = asyncio.create_task(one.keep_copies([run.states(11)[stage_part(0)]], ended.record, COPIES_S))
        await asyncio.sleep(0)
        clock.now += 2 * COPIES_S
        await keeping
    assert tuple(held(tmp_path / "checkpoints", 11).parts) == (ENDS,)


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
    assert exit_code_of(ended.value) == EXIT_ERROR
    assert "that of step 0 is as it was" in ended.value.reason
    assert "new --resume" in ended.value.remedy
    assert steps(tmp_path / "checkpoints") == (0,)


def resumed_after(run: KeptRun, step: int) -> Decision:
    """The founding record with which a run goes on from a checkpoint, all that was decided since being forgotten."""
    record = next(one.record for one in run.decisions if one.record.step == step)
    founding = founding_record(run.manifest.run_id, run.roster, Origin.after(record))
    run.decisions.append(run.signed(founding))
    return run.decisions[-1]


async def test_keeper_of_a_run_resumed_from_an_older_step_keeps_what_it_writes(tmp_path: Path, run: KeptRun) -> None:
    for step in (24, 36, 48, 60):
        run.keep(tmp_path, step)
    heard = EventList()
    async with keeper(run, tmp_path, heard, checkpoint_every=6, checkpoints_kept=2) as one:
        await one.decided(resumed_after(run, 24), holds(run, 24), departed=False)
        for step in (30, 36):
            await one.decided(run.decide(step), holds(run, step), departed=step == 36)
    root = tmp_path / "checkpoints"
    assert steps(root) == (24, 30, 36)  # 24: the newest complete one
    assert steps(aside_directory(root)) == (48, 60)
    assert run.decisions[-1].record.digests[ENDS] == read_manifest(root, 36).parts[ENDS]
    (said,) = heard.of(CheckpointsSetAside)
    assert isinstance(said, CheckpointsSetAside)
    assert (said.steps, said.step) == ((36, 48, 60), 24)


async def test_keeper_of_a_peer_that_joins_below_its_own_checkpoints_sets_them_aside(
    tmp_path: Path, run: KeptRun
) -> None:
    for step in (24, 36, 60):
        run.keep(tmp_path, step)
    resumed_after(run, 24)
    async with keeper(run, tmp_path, checkpoint_every=6) as one:
        await one.decided(run.decide(31), None, departed=False)
        run.keep(tmp_path, 42)  # another peer of this machine is ahead
        await one.decided(run.decide(36, seed=7), None, departed=False)
    root = tmp_path / "checkpoints"
    assert (steps(root), steps(aside_directory(root))) == ((24, 42), (36, 60))


async def test_keeper_of_a_founder_makes_the_run_s_directory_only_for_what_it_must_keep(
    tmp_path: Path, run: KeptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "kept"
    begin = functools.partial(keep_run, RunDirectory(here), run.manifest, run.files)
    async with keeper(run, here, begin=begin) as one:
        await one.decided(run.decide(0), None, departed=False)
        assert not here.exists()
        with monkeypatch.context() as patch:
            disk = install(patch, BrokenDisk(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            refused = await one.keep_now(run.states(0)[ENDS], run.decide(0).record)
        assert disk.fired
        assert refused.startswith(f"{here}: No space left on device")
        assert await one.keep_now(run.states(0)[ENDS], run.decide(0).record) == ""
    assert set(held(here / "checkpoints", 0).parts) == {ENDS}
    assert load_manifest(RunDirectory(here).manifest).run_id == run.manifest.run_id
    ended = run.decide(11, ended=True)
    async with keeper(run, tmp_path / "other", begin=functools.partial(keep_run, RunDirectory(tmp_path / "other"),
                      run.manifest, run.files)) as one:  # fmt: skip
        await one.keep_copies([run.states(11)[ENDS]], ended.record, COPIES_S)
    assert RunDirectory(tmp_path / "other").tokenizer.exists()


async def test_keeper_of_a_resumed_run_begins_with_its_checkpoint(tmp_path: Path, run: KeptRun) -> None:
    run.keep(tmp_path, 10)
    beginning = keeper(run, tmp_path, resume=10).beginning()
    assert beginning is not None
    origin, _ = await beginning.load(lambda *_: None)
    assert origin.step == 10


async def test_keeper_left_by_an_error_passes_it_on_and_leaves_no_task(tmp_path: Path, run: KeptRun) -> None:
    before = asyncio.all_tasks()

    async def broken() -> None:
        async with keeper(run, tmp_path) as one:
            await one.decided(run.decide(0), holds(run, 0), departed=False)
            raise RunEnded("over", Ending.UNREACHABLE)

    with pytest.raises(BaseExceptionGroup) as caught:
        await broken()
    assert caught.group_contains(RunEnded)
    assert asyncio.all_tasks() == before
