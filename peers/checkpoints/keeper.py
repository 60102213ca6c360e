"""Keep one peer's run on this machine's disk: write its part, hand out checkpoints and, in the founder of a resumed
run, begin with one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from peers.checkpoints.resume import FromCheckpoint
from peers.checkpoints.writer import CheckpointWriter, Periods, run_directory_of
from peers.console.words import command_name, gathering
from peers.settings import PeerSettings
from swarm.consensus.records import CloseRecord, Decision
from swarm.errors import Ending, OtherWire, RunEnded, StateError
from swarm.membership.gate import given_by_role
from swarm.membership.roles import PeerContext
from swarm.membership.rules import rules_of
from swarm.membership.state_keeper import Beginning
from swarm.network.protocols import Service
from swarm.optim.part import TrainedPart
from swarm.state.checkpoints.checkpoint_service import CheckpointService
from swarm.state.checkpoints.files import held, steps
from swarm.state.snapshot import Snapshot

logger = logging.getLogger(__name__)


class CheckpointKeeper:
    """A :class:`swarm.membership.state_keeper.StateKeeper`, which does nothing for a peer without a run directory.
    Leaving its context waits for what is being written, so checkpoints may outlast the steps; left by an error, it
    waits for nothing but the file under way.

    ``begin`` makes the run's directory, blocking, before the first checkpoint of a peer that may never write one; None
    where it is there from the start.
    """

    def __init__(self, settings: PeerSettings, around: PeerContext, begin: Callable[[], None] | None = None) -> None:
        self._around, self._resume, self._begin = around, settings.resume, begin
        self._rules = rules_of(around.manifest)
        self._root: Path | None = None
        self._writer: CheckpointWriter | None = None
        self._writing: asyncio.TaskGroup | None = None
        self._own: asyncio.Task[None] | None = None
        self._before: tuple[int, ...] = ()
        if settings.run_directory is not None:
            self._root = run_directory_of(settings.run_directory, around.manifest).checkpoints
            own, last = settings.options.checkpoint_every, around.manifest.run.steps
            self._writer = CheckpointWriter(
                self._root,
                Periods(own, own) if settings.alone and own is not None else Periods.of(last, own),
                last,
                kept=settings.checkpoints_kept,
                events=around.events,
                clock=around.clock,
            )

    @property
    def root(self) -> Path | None:
        """See :class:`swarm.membership.state_keeper.StateKeeper`."""
        return self._root

    def services(self) -> Sequence[Service]:
        """The services to mount, from which other machines fetch checkpoints."""
        return () if self._root is None else (given_by_role(CheckpointService(self._root), self._around.gate),)

    def beginning(self) -> Beginning | None:
        """The checkpoint that a resumed run goes on from; None: a new run, with initial weights."""
        if self._root is None or self._resume is None:
            return None
        return FromCheckpoint(self._root, self._resume, self._around.manifest.run_id)

    async def decided(self, decision: Decision, held: TrainedPart | None, *, departed: bool) -> None:
        """A record was decided and our part has its result: write it when it is due, or the last that we take part in.
        Returns when the state is in hand; it is written meanwhile. Call it inside the context."""
        if self._writer is None:
            return
        assert self._writing is not None  # noqa: S101 - records are only decided inside the context
        self._writer.heard(decision)
        if self._before:  # the first record that this peer hears of: the run has come to there
            self._writing.create_task(self._writer.set_aside(self._before, decision.record))
            self._before = ()
        record, step = decision.record, decision.record.step
        last = departed or self._rules.over(record)
        if held is not None and (last or self._writer.due(step)):
            snapshot = await self._around.device.run(held.snapshot)
            self._own = self._writing.create_task(self._writer.write(snapshot, record, last=last))

    async def keep_copies(self, copies: Sequence[Snapshot], record: CloseRecord, within_s: float) -> None:
        """See :class:`swarm.membership.state_keeper.StateKeeper`. A disk that refuses is no failure of ours."""
        if self._writer is None:
            return
        until = self._around.clock.monotonic() + within_s
        if self._own is not None:
            await asyncio.wait([self._own])
        if problem := await self._begun():
            logger.info("no copy was written: %s", problem)
            return
        for snapshot in copies:
            if self._around.clock.monotonic() < until:  # a disk that was slow with our own part gets no more
                await self._writer.write_copy(snapshot, record)

    async def keep_now(self, state: Snapshot, record: CloseRecord) -> str:
        """See :class:`swarm.membership.state_keeper.StateKeeper`."""
        if self._writer is None:
            return "this peer keeps no checkpoints"
        if problem := await self._begun():
            return problem
        return await self._writer.write_now(state, record)

    async def _begun(self) -> str:
        """Have the run's directory there; returns why it is not, "" once it is."""
        if self._begin is not None:
            try:
                await asyncio.to_thread(self._begin)
            except (StateError, OtherWire) as error:
                return str(error)
            self._begin = None
        return ""

    def check_last(self) -> None:
        """Check that the last step's checkpoint is on this disk. Call it when the last step is closed and the context
        left; raises RunEnded, exit code 1, saying what there is instead. Reads a few small files."""
        lost = None if self._writer is None else self._writer.unkept()
        if lost is None or self._root is None:
            return
        earlier = [step for step in steps(self._root) if step < lost.step]
        held_in = [step for step in earlier if lost.part in held(self._root, step).parts]
        kept = f"that of step {held_in[-1]} is as it was" if held_in else "there is none of an earlier step either"
        swarm, root = command_name(), self._root.parent
        raise RunEnded(
            f"the last step, {lost.step}, is closed, but its checkpoint of {lost.part} is not on this disk: "
            f"{lost.reason}; {kept}",
            Ending.FAILED,
            check=f"is there room in {root}? Other machines that held {lost.part} keep it: {swarm} ckpt ls there",
            remedy=f"make room; then fetch the parts from them: {gathering(root)}; or repeat the steps since a "
            f"complete checkpoint: {swarm} new --resume {shlex.quote(str(root / 'checkpoints'))}/step-…",
        )

    async def __aenter__(self) -> CheckpointKeeper:
        if self._root is not None:
            with contextlib.suppress(OSError):  # nothing of it can be read, then
                self._before = await asyncio.to_thread(steps, self._root)
        self._writing = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._writing is not None  # noqa: S101 - entered
        await self._writing.__aexit__(kind, error, traceback)
