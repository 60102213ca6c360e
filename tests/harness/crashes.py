"""A swarm in virtual time in which one peer dies at one moment, and what must be true of everybody afterwards.

    calm = live(root / "calm")
    for number, crash in enumerate(crashes(calm, most=200, seed=1)):
        live(root / str(number), crash).assert_whole(calm)

Each one that is looked at, at the death, at every close after it and at the end, holds the state of a decided step,
exactly: the one before or the one after, nothing between.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.chaos.faults import Kill, Restart
from peers.chaos.invariants.check import check_run
from peers.chaos.invariants.findings import Limits
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import CutOff, PeerReady
from swarm.optim.part import TrainedPart
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.state.snapshot import digest
from tests.harness.faults_memory import MemoryWorld
from tests.harness.faults_messages import messages_told
from tests.harness.faults_sweep import Moment, Moments
from tests.harness.swarm import LocalPeer

STEPS = 6
LAST_BACK = 2
"""Who dies in a later step than this one may come back too late to be let in again."""
GAP_S = 20.0
"""The longest that the run may take from one close to the next, in virtual seconds; without faults it takes one."""
SHAPE: Mapping[str, Any] = {
    "hosts": 4,
    "trainers": 2,
    "run": {"steps": STEPS, "reproducible": True},
    "model": {"layers": 2, "dim": 16, "context": 8},
    "batch": {"microbatch_size": 1, "microbatches_per_step": 4},
    "stage_s": {"forward": 0.05, "forward_loss": 0.05, "backward": 0.1},
}
OVER = "every step of the run is closed"
BACK = ("", "disk", "bare", "at once")


@dataclass(frozen=True, slots=True)
class Crash:
    """One death. ``back`` says how the peer returns: not (""), with its ``disk`` or ``bare`` when the next step is
    closed, or ``at once`` with its disk."""

    moment: Moment
    back: str = ""

    def __str__(self) -> str:
        on = self.moment.on
        return f"{on.peer} dies at {on.kind} {on.nth}, in step {self.moment.step}, returns: {self.back or 'no'}"

    @property
    def victim(self) -> str:
        """Who dies."""
        return self.moment.on.peer

    def strikes(self) -> list[Strike]:
        """As a plan has them."""
        if self.back == "at once":
            return [Strike("death", self.moment.on, Restart(self.victim))]
        death = Strike("death", self.moment.on, Kill((self.victim,)))
        if not self.back:
            return [death]
        back = Restart(self.victim, keep_disk=self.back == "disk")
        return [death, Strike("return", On("StepClosed", nth=1, after="death"), back)]


@dataclass(frozen=True, slots=True)
class Holding:
    """What one peer's weights were when it was looked at."""

    at: str
    peer: str
    part: str
    step: int
    digest: str


@dataclass
class Life:
    """A run that is over."""

    swarm: SimSwarm
    crash: Crash | None
    moments: Moments = field(default_factory=Moments)
    plan: FaultPlan | None = None
    holdings: list[Holding] = field(default_factory=list)
    error: BaseException | None = None

    def records(self, name: str) -> dict[int, dict[str, Any]]:
        """One peer's history by step."""
        return {record["step"]: record for record in self.swarm.history(name)}

    @property
    def survivors(self) -> list[str]:
        """Those who never died."""
        gone = "" if self.crash is None else self.crash.victim
        return [name for name in self.swarm.peers if name != gone and not name.startswith(f"{gone}-again")]

    def look(self, at: str) -> None:
        """Everybody's weights as they are now, the dead one's included: nothing changes them any more."""
        for name, peer in self.swarm.peers.items():
            part = part_of(peer)
            if part is None or part._state is None:
                continue
            states = [part.snapshot()]
            if part.parting is not None and part.step >= part.parting.step:
                states = [part.parted(stage) for stage in part.parting.layouts]
            self.holdings += [Holding(at, name, one.part, part.step, digest(one)) for one in states]

    # --- what must be true ---------------------------------------------------------------------------------------

    def assert_whole(self, calm: Life) -> None:
        """Raises AssertionError."""
        assert self.crash is not None
        assert self.plan is not None
        if self.error is not None:
            raise AssertionError(f"{self.crash}: {self.error!r}") from self.error
        self.plan.assert_fired()
        self._assert_run_is_over()
        decided = self.records(self.survivors[0])
        self._assert_nothing_between(decided)
        check_run([self.swarm.root], Limits(gap_s=GAP_S)).assert_sound()
        if not self.crash.victim.startswith("trainer"):
            assert decided[STEPS]["digests"] == calm.records("host-0")[STEPS]["digests"], "other weights than in peace"
        if self.crash.back and self.crash.moment.step <= LAST_BACK:
            assert any(self.swarm.peers[name].events.of(PeerReady) for name in self._returned()), "it never came back"

    def _returned(self) -> list[str]:
        assert self.crash is not None
        return [name for name in self.swarm.peers if name.startswith(f"{self.crash.victim}-again")]

    def _assert_run_is_over(self) -> None:
        for name in self.survivors:
            peer = self.swarm.peers[name]
            assert peer.outcome == OVER, f"{name}: {peer.outcome!r}"
            assert not peer.events.of(CutOff), f"{name} was cut off, which no fault had hit"

    def _assert_nothing_between(self, decided: Mapping[int, Mapping[str, Any]]) -> None:
        for one in self.holdings:
            wanted = decided[one.step]["digests"].get(one.part) if one.step in decided else None
            assert one.digest == wanted, f"{one} is no decided state: {wanted}"
        for at in dict.fromkeys(one.at for one in self.holdings):
            steps = {one.step for one in self.holdings if one.at == at and one.peer in self.survivors}
            assert max(steps, default=0) - min(steps, default=0) <= 1, f"{at}: members at steps {sorted(steps)}"


def crashes(calm: Life, *, most: int, seed: int, kinds: Callable[[str], bool] = lambda kind: True) -> list[Crash]:
    """At most ``most`` deaths at moments of a run in peace, of all kinds in equal shares. How they return is drawn too,
    as far as there is time left for it; before the run has begun it needs everybody back, and its founder alive."""
    drawn = calm.moments.draw(most=most, seed=seed, kinds=kinds)
    rng, chosen = random.Random(seed), []
    for moment in drawn:
        if moment.step == 0 and moment.on.peer != "bootstrap":
            chosen.append(Crash(moment, "at once"))
        elif moment.step > 0:
            chosen.append(Crash(moment, rng.choice(BACK) if moment.step < STEPS else ""))
    return chosen


def sweep(root: Path, calm: Life, chosen: Sequence[Crash], **shape: Any) -> None:
    """Live through each of these deaths. Raises AssertionError naming all after which something was not whole, whose
    files are kept."""
    wrong = []
    for number, crash in enumerate(chosen):
        place = root / str(number)
        try:
            live(place, crash, **shape).assert_whole(calm)
            shutil.rmtree(place)
        except AssertionError as error:
            wrong.append(f"{place}: {crash}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(chosen)} deaths:", *wrong])


def live(root: Path, crash: Crash | None = None, **shape: Any) -> Life:
    """A whole run, with one death or in peace. Costs about a second."""
    root.mkdir(parents=True)
    swarm = SimSwarm(root, links=Links.parse({"default": {"latency_ms": 20}}), **{**SHAPE, **shape})
    life = Life(swarm, crash)
    with MemoryWorld(swarm) as world, messages_told(world):
        world.listen(life.moments.hear)
        if crash is not None:
            life.plan = FaultPlan(*crash.strikes(), world=world)
            world.listen(_looking(life))
        try:
            run_world(_to_its_end(life))
        except BaseExceptionGroup as error:
            life.error = error
    life.look("the end")
    return life


def _looking(life: Life) -> Any:
    def hear(peer: str, kind: str, fields: Mapping[str, Any]) -> None:
        assert life.plan is not None
        if "death" in life.plan.fired and (kind == "StepClosed" or not life.holdings):
            life.look(f"{kind} {fields.get('step', '')} of {peer}")

    return hear


async def _to_its_end(life: Life) -> None:
    """Until those who never died have ended. Who came back too late to take part is not waited for."""
    swarm = life.swarm
    await swarm.open()
    run = asyncio.ensure_future(swarm.run())
    waiting = asyncio.ensure_future(_survivors_end(life))
    await asyncio.wait([run, waiting], return_when=asyncio.FIRST_COMPLETED)
    for name, peer in swarm.peers.items():
        if peer.outcome is None and not swarm.is_dead(name):
            swarm.kill(name)
    waiting.cancel()
    await run


async def _survivors_end(life: Life) -> None:
    while any(life.swarm.peers[name].outcome is None for name in life.survivors):
        await life.swarm.network.clock.sleep(1.0)


def part_of(peer: LocalPeer) -> TrainedPart | None:
    return None if peer.membership is None else peer.membership._chain.last._holding.part
