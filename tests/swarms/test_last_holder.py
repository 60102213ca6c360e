"""The only trainer of a run is told to go, and cannot be spared: its newest state goes to a copy, or to its disk, or
it says what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from peers.home.run_directory import RunDirectory
from swarm.consensus.records import CloseRecord
from swarm.events import CopyHeld, StateLeftBehind, StepClosed
from swarm.ids import ENDS, PeerId
from swarm.membership.membership import Membership
from swarm.membership.observer_service import ObserverService
from swarm.sim.links import Links
from swarm.sim.loop import as_peer, run_world
from swarm.state.checkpoints.parts import load_part
from swarm.state.snapshot import digest
from tests.harness.expect import eventually
from tests.harness.simulated import SimSwarm

LONG_S = 300.0


class Withheld:
    """Updates of the ends do not go out: the fault. ``asked`` counts who wanted one meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.out = 0, asyncio.Event()
        self.out.set()
        for name in ("_on_next", "_on_ahead"):
            monkeypatch.setattr(ObserverService, name, self._held(getattr(ObserverService, name)))

    def _held(self, real: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def held(service: ObserverService, caller: PeerId, body: Any, incoming: Any) -> Any:
            if body.part == ENDS and not self.out.is_set():
                self.asked += 1
                await self.out.wait()
            return await real(service, caller, body, incoming)

        return held


def swarm_of(root: Path, *, trainers: int = 1, copies: int = 1, **sites: Any) -> SimSwarm:
    """A step takes about two seconds; the bootstrap alone may keep the copy of the ends."""
    return SimSwarm(
        root,
        hosts=2,
        trainers=trainers,
        run={"steps": 1000, "copies": copies},
        links=Links.parse({"default": {"latency_ms": 20}}),
        stage_s={"forward": 0.1, "backward": 0.2},
        sites=sites,
    )


def membership_of(swarm: SimSwarm, name: str) -> Membership:
    found = swarm.peers[name].membership
    assert found is not None
    return found


def head_of(swarm: SimSwarm, name: str = "trainer-0") -> CloseRecord:
    found = membership_of(swarm, name)._run.position.head
    assert found is not None
    return found


async def closed(swarm: SimSwarm, step: int) -> None:
    await eventually(
        lambda: any(event.step >= step for event in swarm.peers["trainer-0"].events.of(StepClosed)), deadline_s=LONG_S
    )


async def followed(swarm: SimSwarm) -> None:
    """Until the bootstrap has a copy of the ends, and has led it on by a step."""
    await eventually(lambda: swarm.peers["bootstrap"].events.of(CopyHeld), deadline_s=LONG_S)
    (held,) = swarm.peers["bootstrap"].events.of(CopyHeld)
    copy = membership_of(swarm, "bootstrap")._copying._kept[ENDS].copy
    await eventually(lambda: copy.step is not None and copy.step > held.step, deadline_s=LONG_S)


def secure(swarm: SimSwarm, within_s: float) -> asyncio.Task[str]:
    coroutine = membership_of(swarm, "trainer-0").secure(within_s)
    return asyncio.get_running_loop().create_task(coroutine, context=as_peer("trainer-0"))


def play(swarm: SimSwarm, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def both() -> None:
        await swarm.open()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(swarm.run())
            await story()
            running.cancel()

    run_world(both())


def left_behind(swarm: SimSwarm) -> list[StateLeftBehind]:
    return swarm.peers["trainer-0"].events.of(StateLeftBehind)


def test_last_trainer_waits_until_the_copy_has_its_newest_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = swarm_of(tmp_path)

    async def story() -> None:
        fault = Withheld(monkeypatch)
        await followed(swarm)
        fault.out.clear()
        at = head_of(swarm).step
        await closed(swarm, at + 2)
        waiting = secure(swarm, 60.0)
        await asyncio.sleep(5.0)
        assert fault.asked, "the fault: the copy wants an update and gets none"
        assert not waiting.done()
        copies = membership_of(swarm, "bootstrap")._copying.copies
        assert copies.held(ENDS, head_of(swarm).step) is None
        fault.out.set()
        said = await waiting
        head = head_of(swarm)
        assert said == f"no other trains ends, and the copy at bootstrap has its newest state, of step {head.step}"
        swarm.kill("trainer-0")
        await asyncio.sleep(3.0)
        state = copies.held(ENDS, head.step)
        assert state is not None, "what it had is with another"
        assert digest(state.snapshot()) == head.digests[ENDS]
        assert left_behind(swarm) == []

    play(swarm, story)


def test_last_trainer_whose_copy_cannot_come_in_time_writes_its_state_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    swarm = swarm_of(tmp_path, **{"trainer-0": {"run_directory": kept, "checkpoint_every": 10_000}})

    async def story() -> None:
        fault = Withheld(monkeypatch)
        await followed(swarm)
        fault.out.clear()
        at = head_of(swarm).step
        await closed(swarm, at + 2)
        said = await secure(swarm, 4.0)
        assert fault.asked
        (told,) = left_behind(swarm)
        assert said == f"no other has ends of step {told.step}; it is on this disk"
        assert (told.part, told.reason) == (ENDS, "")
        assert told.copied is not None
        assert told.copied <= at < told.step <= head_of(swarm).step
        records = {record["step"]: record for record in swarm.history("trainer-0")}
        state = load_part(RunDirectory(kept).checkpoints, told.step, ENDS)
        assert digest(state) == records[told.step]["digests"][ENDS]

    play(swarm, story)


def test_last_trainer_that_can_do_neither_says_what_is_lost(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, copies=0)

    async def story() -> None:
        await closed(swarm, 2)
        said = await secure(swarm, 2.0)
        (told,) = left_behind(swarm)
        assert said == f"no other has ends of step {told.step}, and this peer keeps no checkpoints"
        assert (told.part, told.copied) == (ENDS, None)
        assert told.reason == "this peer keeps no checkpoints"

    play(swarm, story)


def test_trainer_beside_another_has_nothing_to_wait_for(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, trainers=2, copies=0)

    async def story() -> None:
        await closed(swarm, 2)
        before = asyncio.get_running_loop().time()
        assert await secure(swarm, 60.0) == ""
        assert asyncio.get_running_loop().time() == before
        assert left_behind(swarm) == []

    play(swarm, story)
