"""A part whose newest state died with its last replica, and of which nobody keeps a copy: the run goes back to a
checkpoint by itself as soon as one is whole at the peers that are there, and repeats the steps since."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from peers.chaos.faults import Fault, Kill, Restart
from peers.chaos.invariants.check import check_run
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.local_swarm import founder_id
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.changes import ChangeRules
from swarm.errors import Advice
from swarm.events import Event, JourneyCompleted, PeerLost, StepGivenUp, Waiting, WentBack
from swarm.sim.loop import run_world
from swarm.step.leader.rescue import Rescuing
from tests.harness.faults_memory import MemoryWorld

STEPS = 20
"""So that every second one is kept."""
DONE, LOST = "every step of the run is closed", "the last replica of ends is lost"


def swarm_of(
    root: Path, hosts: int, trainers: int, *, may_fail: bool = False, run: Any = None, **shape: Any
) -> SimSwarm:
    """Each peer keeps its checkpoints in a directory of its own, as on a machine of its own."""
    names = ["bootstrap", *(f"host-{n}" for n in range(hosts)), *(f"trainer-{n}" for n in range(trainers))]
    sites = {name: {"run_directory": root / f"kept-{name}"} for name in names}
    sites |= {f"{name}-again-1": site for name, site in sites.items()}
    shape = {"split": {"stages": 2}, **shape, "run": {"steps": STEPS, "copies": 0, **(run or {})}}
    return SimSwarm(root, hosts=hosts, trainers=trainers, sites=sites, may_fail=may_fail, **shape)


def working(step: int) -> On:
    return On(JourneyCompleted, peer="trainer-0", where={"step": step})


def strike(swarm: SimSwarm, kill: Kill, *then: Fault, when: On, ends: str = DONE) -> None:
    """Run it to its end, which everybody else sees so; what follows the death happens when it is noticed."""
    after = (Strike(f"then-{index}", On(PeerLost, after="kill"), fault) for index, fault in enumerate(then))
    plan = FaultPlan(Strike("kill", when, kill), *after, world=MemoryWorld(swarm))
    try:
        run_world(swarm.run(timeout_s=30_000.0))
    finally:
        plan.assert_fired()
    told = {name: repr(peer.outcome) for name, peer in swarm.peers.items() if name not in kill.peers}
    assert {name for name, said in told.items() if ends not in said and LOST not in said} == set()
    assert any(ends in said for said in told.values())


def test_run_goes_back_by_itself_when_its_last_trainer_is_started_again(tmp_path: Path) -> None:
    undisturbed = swarm_of(tmp_path / "undisturbed", 2, 1, run={"reproducible": True})
    run_world(undisturbed.run(timeout_s=3000.0))
    swarm = swarm_of(tmp_path / "struck", 2, 1, run={"reproducible": True})
    strike(swarm, Kill(("trainer-0",)), Restart("trainer-0"), when=working(8))
    assert {(event.step, event.repeats) for event in swarm.events(WentBack)} == {(6, 8)}
    check_run([swarm.root]).assert_sound()
    assert swarm.history()[-1]["digests"] == undisturbed.history()[-1]["digests"]


def test_frozen_ends_are_made_again_from_nobodys_copy_and_no_step_is_repeated(tmp_path: Path) -> None:
    """Only adapters are trained, none of them in the ends: the last trainer's death lost nothing."""
    swarm = swarm_of(tmp_path, 2, 1, run={"steps": 8}, model={"lora": {"rank": 4, "base": "nf4"}})
    strike(swarm, Kill(("trainer-0",)), Restart("trainer-0"), when=working(5))
    assert not swarm.events(WentBack)
    assert {event.lost for event in swarm.events(StepGivenUp)} == {("ends",)}


def test_run_waits_for_a_part_without_a_whole_checkpoint_as_long_as_its_manifest_says(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path, 2, 1, run={"wait_for_lost_s": 60.0}, may_fail=True)
    strike(swarm, Kill(("trainer-0",)), when=working(2), ends="nobody took it over for 6")
    waits = [event.what for event in swarm.events(Waiting) if "next:" in event.what]
    assert any("the peers that are here lack" in what for what in waits)
    assert any("next: start trainer-0 where it was" in what for what in waits)


async def judged_by_nobody(self: Any, proof: Any, asking: Any) -> None:
    """A leader that asks nobody, and no person, before it proposes that the run goes back."""


@pytest.mark.parametrize("asks", [False, True])
def test_run_goes_back_only_once_a_person_has_said_so_whatever_its_leader_proposes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    swarm = swarm_of(tmp_path, 2, 1, run={"rewind": "ask", "wait_for_lost_s": 60.0}, may_fail=True)
    words, said, check = list[bool](), list[bool](), ChangeRules.check_wanted

    def checked(self: Any, now: Any, wanted: Any, record: str) -> None:
        words.append(wanted is not None)
        check(self, now, wanted, record)

    def say_so(event: Event) -> None:
        """As ``swarm rewind`` does, once the run waits for nothing else."""
        waits = event.what if isinstance(event, Waiting) else ""
        said.append("with this peer:" in waits and Advice.SAY_SO in waits)
        if "the run goes back to step 6 once that is wanted" in waits:
            cast(Any, swarm.peers["host-0"].membership).situation.may_go_back = True

    monkeypatch.setattr(ChangeRules, "check_wanted", checked)
    if not asks:
        monkeypatch.setattr(Rescuing, "_judged", judged_by_nobody)
    swarm.on_added.append(lambda name: swarm.peers[name].events.listeners.append(say_so))
    strike(swarm, Kill(("trainer-0",)), Restart("trainer-0"), when=working(8), ends=DONE if asks else "")
    assert {event.step for event in swarm.events(WentBack)} == ({6} if asks else set())
    assert any(words) == asks
    assert any(said)  # who was started again says what it takes, too
    assert not all(words)  # it was proposed, or looked for, without


MODES: dict[str, dict[str, Any]] = {
    "admitted": {"admission": {"mode": "token", "issuers": (str(founder_id()),)}},
    "overlap": {"speed": {"mode": "overlap"}},
    "local": {"averaging": {"mode": "local"}},
    "hosted": {"split": {"stages": 2, "ends": "hosted"}},
}


@pytest.mark.parametrize("mode", MODES)
def test_run_of_any_mode_goes_back_when_the_only_host_of_a_stage_is_started_again(tmp_path: Path, mode: str) -> None:
    swarm = swarm_of(tmp_path, 2, 2, **MODES[mode])
    strike(swarm, Kill(("host-0",)), Restart("host-0"), when=working(4))
    assert {event.step for event in swarm.events(WentBack)} == {2}
    check_run([swarm.root]).assert_sound()
