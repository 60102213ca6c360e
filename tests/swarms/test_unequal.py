"""Stages of unlike sizes, and hosts of unlike memory: each holds what it can, from the first record on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm.device import Device, DeviceThread, resolve_device
from swarm.errors import RunEnded
from swarm.events import DigestMismatch, PartAssigned, PeerReady, StepClosed
from swarm.ids import PartName
from swarm.membership.part_memory import part_bytes
from swarm.membership.rules import spec_of
from tests.harness.expect import eventually
from tests.harness.swarm import LocalSwarm

PLENTY = 1 << 34


class LimitedDevice(DeviceThread):
    """Has so much memory left, whatever the process takes."""

    def __init__(self, left: int) -> None:
        super().__init__(resolve_device("cpu"))
        self._left = left

    def free_memory(self) -> int:
        return self._left


class UnequalSwarm(LocalSwarm):
    """Peers with little memory are named in ``little``, with what they have."""

    def __init__(self, root: Path, little: dict[str, int], *, steps: int = 4) -> None:
        self.little = little
        split = {"stages": 2, "layers_per_stage": (5, 1)}
        super().__init__(root, hosts=3, run={"steps": steps}, model={"layers": 6}, split=split)

    def _device(self, name: str) -> Device:
        return LimitedDevice(self.little.get(name, PLENTY))

    def takes(self, part: str) -> int:
        """Bytes that training a part takes."""
        return sum(part_bytes(self.manifest, spec_of(self.manifest, PartName(part))).values())


@pytest.mark.parametrize("large", range(3))
async def test_small_hosts_get_the_small_stage_whoever_comes_first(large: int, tmp_path: Path) -> None:
    swarm = UnequalSwarm(tmp_path, {})
    assert swarm.takes("stage-1") < swarm.takes("stage-0")
    swarm.little |= {f"host-{number}": swarm.takes("stage-1") for number in range(3) if number != large}
    await swarm.run()
    got = {name: peer.events.of(PartAssigned)[-1].part for name, peer in swarm.peers.items() if "host" in name}
    assert got == {f"host-{number}": "stage-0" if number == large else "stage-1" for number in range(3)}
    assert [record["step"] for record in swarm.history()] == list(range(5))
    assert not swarm.events(DigestMismatch)


async def test_newcomer_takes_the_stage_that_it_can_hold_or_none(tmp_path: Path) -> None:
    """The small stage has two replicas and the large one has one: who could hold both would take the large one."""
    swarm = UnequalSwarm(tmp_path, {}, steps=60)
    small = swarm.takes("stage-1")
    swarm.little |= {"host-0": small, "host-1": small, "late": small, "tiny": small - 1}

    async def story() -> None:
        founder = swarm.peers["bootstrap"].events
        await eventually(lambda: bool(founder.of(StepClosed)))
        late = await swarm.join("late", "stage", 300)
        tiny = await swarm.join("tiny", "stage", 301, may_fail=True)
        large = await swarm.join("large", "stage", 302)
        await eventually(lambda: all(bool(peer.events.of(PeerReady)) for peer in (late, large)))
        await eventually(lambda: tiny.outcome is not None)
        assert [peer.events.of(PeerReady)[0].part for peer in (late, large)] == ["stage-1", "stage-0"]
        assert "no stage fits: training stage-0 takes" in str(ended(tiny.outcome))

    await swarm.open()
    async with asyncio.TaskGroup() as group:
        group.create_task(swarm.run())
        group.create_task(story())
    assert not swarm.events(DigestMismatch)


def ended(outcome: object) -> BaseException:
    """The RunEnded in what ended a peer."""
    if isinstance(outcome, BaseExceptionGroup):
        found = outcome.subgroup(RunEnded)
        assert found is not None
        return ended(found.exceptions[0])
    assert isinstance(outcome, RunEnded)
    return outcome
