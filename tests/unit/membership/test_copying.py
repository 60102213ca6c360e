"""What a peer does with the copies it keeps once the run is over; how it keeps them is in ``tests/swarms``."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.consensus.records import CloseRecord
from swarm.ids import ENDS, PartName, PeerId, stage_part
from swarm.membership import copying
from swarm.membership.copying import Copies, Copying
from swarm.membership.rules import rules_of
from tests.harness.rigs.membership import LoopClock
from tests.harness.rigs.peers import KeptRun, kept_run

STEP = 11


class Copy:
    """Of one part: at ``step``, and at the next one after ``late_s``, or at once where it is ``ahead``."""

    def __init__(
        self,
        run: KeptRun,
        part: PartName,
        step: int | None,
        late_s: float = 0.0,
        *,
        snapshot_s: float = 0.0,
        ahead: bool = False,
    ) -> None:
        self._run, self._part, self.step, self._late_s, self._snapshot_s = run, part, step, late_s, snapshot_s
        self._ahead = ahead

    async def reach(self, step: int, within_s: float) -> bool:
        """See :class:`swarm.membership.part_copy.PartCopy`."""
        await asyncio.sleep(min(self._late_s, within_s))
        if self._late_s <= within_s:
            self.step = step
        return self.step == step

    async def finish(self, record: CloseRecord) -> bool:
        """See :class:`swarm.membership.part_copy.PartCopy`."""
        if self._ahead:
            self.step = record.step
        return self.step == record.step

    async def snapshot(self, step: int) -> Any:
        """Some numbers."""
        await asyncio.sleep(self._snapshot_s)
        found = self._run.states(self.step or 0)[self._part]
        return found if found.step == step else None


def copies(run: KeptRun, me: PeerId, **kept: Copy) -> Copying:
    around = SimpleNamespace(
        manifest=run.manifest, endpoint=SimpleNamespace(peer=me), clock=LoopClock(), events=None, watch=None
    )
    service = SimpleNamespace(copied=None, dropped=None)
    here = Copies()
    situation = SimpleNamespace(disk_refuses=None)
    peer = SimpleNamespace(around=around, rules=rules_of(run.manifest), situation=situation)
    found = Copying(cast(Any, peer), here, cast(Any, service))
    for name, copy in kept.items():
        here.kept[PartName(name.replace("_", "-"))] = cast(Any, copy)
    return found


async def test_copies_that_have_the_last_state_or_get_it_soon_are_given_and_no_others_waited_for() -> None:
    run = kept_run()
    run.decide(0)
    record = run.decide(STEP, ended=True).record
    me = PeerId(run.keys[2].peer)
    near = {"stage_0": Copy(run, stage_part(0), STEP - 1, 2.0), "stage_1": Copy(run, stage_part(1), None, 1000.0)}
    began = asyncio.get_running_loop().time()
    (found,) = await copies(run, me, **near).last(record)
    assert (found.part, found.step) == ("stage-0", STEP)
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.0)
    slow = Copy(run, stage_part(0), STEP, snapshot_s=2 * copying.LAST_S)
    (found,) = await copies(run, me, stage_0=slow).last(record)
    assert found.part == "stage-0", "it has what is needed, and only waits for its turn"
    began = asyncio.get_running_loop().time() - 2.0
    late = copies(run, me, stage_0=Copy(run, stage_part(0), STEP - 1, 1000.0))
    assert await late.last(record) == []
    assert asyncio.get_running_loop().time() - began == pytest.approx(2.0 + copying.LAST_S)


async def test_copies_that_are_left_are_given_as_they_are_or_with_the_update_that_is_here() -> None:
    run = kept_run()
    run.decide(0)
    record = run.decide(STEP).record
    near, behind = Copy(run, stage_part(0), STEP - 1, ahead=True), Copy(run, stage_part(1), STEP - 1, 1000.0)
    here, empty = Copy(run, ENDS, STEP), Copy(run, ENDS, None)
    began = asyncio.get_running_loop().time()
    found = await copies(run, PeerId("me"), stage_0=near, stage_1=behind, ends=here, stage_2=empty).left(record)
    assert [(state.part, state.step) for state in found] == [("stage-0", STEP), (ENDS, STEP)]
    assert asyncio.get_running_loop().time() == began, "nothing comes any more"


async def test_copies_stay_as_they_are_with_the_record_that_the_run_is_over_with() -> None:
    """Others may have to keep them from then on, who have nothing; nobody would train what is dropped for them."""
    run = kept_run()
    one = copies(run, PeerId("nobody of the roster"), stage_0=Copy(run, stage_part(0), STEP))
    await one.decided(run.decide(0))
    assert one._wanted == frozenset()
    assert one._changed.is_set(), "it is not ours to keep"
    one._changed.clear()
    await one.decided(run.decide(STEP, ended=True))
    assert not one._changed.is_set()
    assert ENDS in run.decisions[-1].record.digests
