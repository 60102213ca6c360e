"""Who holds the newest state of a part alone, or as one of some who are told to go together, cannot be spared: that
state goes to its disk, or to a copy, or the peer says what is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from peers.home.run_directory import RunDirectory
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord
from swarm.errors import Ending, StateError
from swarm.events import CopyHeld, StateLeftBehind, StepClosed
from swarm.ids import ENDS, PeerId
from swarm.membership.last_holder import KEEP_S
from swarm.membership.membership import Membership
from swarm.membership.observer_service import ObserverService
from swarm.sim.links import Links
from swarm.sim.loop import as_peer, run_world
from swarm.state.checkpoints.files import held, steps
from swarm.state.checkpoints.parts import load_part
from swarm.state.snapshot import Snapshot, digest
from tests.harness.expect import eventually
from tests.swarms.story import run_beside

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
    copy = membership_of(swarm, "bootstrap")._chain.copying._kept[ENDS]
    await eventually(lambda: copy.step is not None and copy.step > held.step, deadline_s=LONG_S)


def secure(swarm: SimSwarm, within_s: float, name: str = "trainer-0") -> asyncio.Task[str]:
    coroutine = membership_of(swarm, name).secure(within_s)
    return asyncio.get_running_loop().create_task(coroutine, context=as_peer(name))


def on_disk(swarm: SimSwarm, name: str, root: Path) -> int:
    """The step of the newest state of its own part that a peer has on its disk, as the run's records state it."""
    part = membership_of(swarm, name)._chain.last._holding.part
    assert part is not None
    for record in reversed(swarm.history(name)):
        with contextlib.suppress(StateError):
            assert digest(load_part(root, record["step"], part.spec.name)) == record["digests"][part.spec.name]
            return int(record["step"])
    raise AssertionError(f"nothing is on the disk of {name}")


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
        copies = membership_of(swarm, "bootstrap")._chain.copying.copies
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

    run_beside(swarm, story)


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
        assert said == f"no other is known to have ends of step {told.step}; it is on this disk"
        assert (told.part, told.reason) == (ENDS, "")
        assert told.copied is not None
        assert told.copied <= at < told.step <= head_of(swarm).step
        records = {record["step"]: record for record in swarm.history("trainer-0")}
        state = load_part(RunDirectory(kept).checkpoints, told.step, ENDS)
        assert digest(state) == records[told.step]["digests"][ENDS]

    run_beside(swarm, story)


def test_last_trainer_that_can_do_neither_says_what_is_lost(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, copies=0)

    async def story() -> None:
        await closed(swarm, 2)
        said = await secure(swarm, 2.0)
        (told,) = left_behind(swarm)
        assert said == f"no other is known to have ends of step {told.step}, and this peer keeps no checkpoints"
        assert (told.part, told.copied) == (ENDS, None)
        assert told.reason == "this peer keeps no checkpoints"

    run_beside(swarm, story)


def test_last_holders_that_rely_on_each_other_and_are_told_at_once_write_to_their_disks_first(tmp_path: Path) -> None:
    names = ("host-0", "host-1", "trainer-0")
    disks = {name: RunDirectory(tmp_path / f"kept {name}") for name in names}
    sites = {name: {"run_directory": disks[name].root, "checkpoint_every": 10_000} for name in names}
    swarm = swarm_of(tmp_path, **sites)

    async def story() -> None:
        await followed(swarm)
        at = head_of(swarm).step

        async def goes(name: str) -> str:
            said = await secure(swarm, 4.0, name)
            swarm.kill(name)
            return said

        said = await asyncio.gather(*map(goes, names))
        relied = [name for name in names if any(f"the copy at {name} has its newest state" in one for one in said)]
        assert len(relied) > 1, f"the fault: those who keep the copies end, too: {said}"
        for name in names:
            assert on_disk(swarm, name, disks[name].checkpoints) >= at

    run_beside(swarm, story)


@pytest.mark.parametrize("victim", ["host-0", "trainer-0"])
def test_run_that_ends_for_a_lost_part_leaves_the_newest_state_on_disks(tmp_path: Path, victim: str) -> None:
    """Its copy is with a host that cannot be spared, as the only one of another stage, or with the bootstrap, which
    trains no part: all are asked to leave."""
    names = ("bootstrap", "host-0", "host-1", "trainer-0")
    disks = {name: RunDirectory(tmp_path / f"kept {name}") for name in names}
    sites = {name: {"run_directory": disks[name].root, "checkpoint_every": 10_000} for name in names}
    swarm = swarm_of(tmp_path, **sites)
    swarm._may_fail = True

    async def story() -> None:
        await swarm.open()
        running = asyncio.get_running_loop().create_task(swarm.run())
        await followed(swarm)
        await closed(swarm, head_of(swarm).step + 2)
        roster = head_of(swarm).members
        (lost,) = (roster[peer].part for peer in roster.peers if roster[peer].name == victim)
        swarm.kill(victim)
        left = [name for name in names if name != victim]
        for name in left:
            membership_of(swarm, name).leave("SIGTERM", Ending.DRAINED)
        await running
        assert all(f"last replica of {lost} is lost" in repr(swarm.peers[name].outcome) for name in left)
        head = swarm.history("bootstrap")[-1]
        kept = {part for disk in disks.values() for part in held(disk.checkpoints, head["step"]).parts}
        assert kept == set(head["digests"]), "also what nobody trains any more"

    run_world(story())


def test_peer_whose_run_ends_writes_its_own_part_whatever_becomes_of_its_copies(tmp_path: Path) -> None:
    disk = RunDirectory(tmp_path / "kept")
    swarm = swarm_of(tmp_path, **{"trainer-0": {"run_directory": disk.root, "checkpoint_every": 10_000}})
    asked: list[int] = []

    async def never(record: CloseRecord) -> list[Snapshot]:
        asked.append(on_disk(swarm, "trainer-0", disk.checkpoints))
        return await asyncio.get_running_loop().create_future()

    async def story() -> None:
        await closed(swarm, 2)
        head, began = head_of(swarm), asyncio.get_running_loop().time()
        await membership_of(swarm, "trainer-0")._chain.last.keep(head, never)
        assert asked == [head.step], "the fault: they do not come, and its own is there before"
        assert asyncio.get_running_loop().time() - began == pytest.approx(KEEP_S)

    run_beside(swarm, story)


def test_replicas_of_one_part_that_are_told_at_once_write_to_their_disks(tmp_path: Path) -> None:
    names = ("trainer-0", "trainer-1")
    disks = {name: RunDirectory(tmp_path / f"kept {name}") for name in names}
    sites = {name: {"run_directory": disks[name].root, "checkpoint_every": 10_000} for name in names}
    swarm = swarm_of(tmp_path, trainers=2, copies=0, **sites)

    async def story() -> None:
        await closed(swarm, 2)
        before, at = asyncio.get_running_loop().time(), head_of(swarm).step
        said = await asyncio.gather(*(secure(swarm, 4.0, name) for name in names))
        assert said == ["", ""], "the fault: each has the other"
        assert asyncio.get_running_loop().time() == before + 4.0
        for name in names:
            assert on_disk(swarm, name, disks[name].checkpoints) >= at
        assert left_behind(swarm) == []

    run_beside(swarm, story)


def test_trainer_whose_only_companion_dies_while_it_waits_says_what_is_lost(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, trainers=2, copies=0)

    async def story() -> None:
        await closed(swarm, 2)
        waiting = secure(swarm, 60.0)
        await asyncio.sleep(1.0)
        assert not waiting.done()
        swarm.kill("trainer-1")
        assert (await waiting).startswith("no other is known to have ends of step ")
        assert len(left_behind(swarm)) == 1
        assert len(head_of(swarm).members.replicas(ENDS)) == 1, "the fault: it is alone"

    run_beside(swarm, story)


def test_last_trainer_whose_device_does_not_give_its_state_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = {"trainer-0": {"run_directory": tmp_path / "kept", "checkpoint_every": 10_000}}
    swarm, fired = swarm_of(tmp_path, copies=0, **sites), list[str]()

    def refuse() -> None:
        fired.append("no memory")
        raise RuntimeError("out of memory")

    async def story() -> None:
        await closed(swarm, 2)
        part = membership_of(swarm, "trainer-0")._chain.last._holding.part
        with monkeypatch.context() as fault:
            fault.setattr(part, "snapshot", refuse)
            said = await secure(swarm, 2.0)
        assert fired == ["no memory"], "the fault, and no second try"
        (told,) = left_behind(swarm)
        assert told.reason == "it failed on its way to the disk: RuntimeError: out of memory"
        assert said == f"no other is known to have ends of step {told.step}, and {told.reason}"

    run_beside(swarm, story)


def test_last_moments_take_no_checkpoint_from_others(tmp_path: Path) -> None:
    """Of steps that are quick each is written, and there are more of them than checkpoints stay."""
    names = ("host-0", "host-1", "trainer-0")
    disks = {name: RunDirectory(tmp_path / f"kept {name}").checkpoints for name in names}
    kept = {"checkpoint_every": 7, "checkpoints_kept": 2}
    sites = {name: {"run_directory": disk.parent, **kept} for name, disk in disks.items()}
    swarm = SimSwarm(tmp_path, hosts=2, trainers=1, run={"steps": 1000, "copies": 0},
                     stage_s={"forward": 0.01, "backward": 0.02}, sites=sites)  # fmt: skip

    async def story() -> None:
        await closed(swarm, 8)
        (whole,) = {steps(disk)[-1] for disk in disks.values()}
        assert whole == 7
        said = await secure(swarm, 1.0)
        assert said.endswith("; it is on this disk")
        (_, due, *late) = steps(disks["trainer-0"])
        assert due == whole, "others keep no other"
        assert len(late) == kept["checkpoints_kept"]
        assert late[0] > whole + 1 + len(late), "the fault: more were written than stay"

    run_beside(swarm, story)
