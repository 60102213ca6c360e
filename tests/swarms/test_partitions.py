"""No matter who is cut off from whom, and for how long: the run has one history, and both sides say what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import pytest

from peers.chaos.faults import Fault, Heal, Kill, Partition
from peers.chaos.invariants.findings import Limits
from peers.chaos.plan import FaultPlan, On, Strike
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.copies import KEPT_UPDATES
from swarm.consensus.roster import owner
from swarm.events import (
    Committed,
    CutOff,
    Event,
    PeerLost,
    PeerReady,
    QuorumBack,
    QuorumLost,
    StepClosed,
    Waiting,
    WorkWithdrawn,
)
from swarm.sim.links import Links
from swarm.step.leader.exclusion import LOOK_S, STALLED_S
from tests.swarms.story import live_through

EventT = TypeVar("EventT", bound=Event)
EVERYBODY = {"bootstrap", "host-0", "host-1", "host-2", "host-3", "trainer-0", "trainer-1"}
FEW = ("host-3", "trainer-1")
STEPS = 10


def cut(*peers: str, **how: Any) -> Partition:
    """These from all others."""
    return Partition(peers, tuple(sorted(EVERYBODY - set(peers))), **how)


def at_step_3(fault: Fault) -> Strike:
    """It strikes when the third step is closed."""
    return Strike("cut", On(StepClosed, peer="host-0", nth=3), fault)


def healed(steps: int) -> Strike:
    """When so many more steps are closed."""
    return Strike("heal", On(StepClosed, peer="host-0", nth=steps, after="cut"), Heal())


def story(root: Path, *strikes: Strike, steps: int = STEPS, limits: Limits | None = None) -> tuple[SimSwarm, FaultPlan]:
    """A run with these faults, which everybody but the killed sees to its end, and which keeps its invariants: one
    history, every microbatch once, none lost, and cursors that say so."""
    swarm = SimSwarm(
        root,
        hosts=4,
        trainers=2,
        links=Links.parse({"default": {"latency_ms": 5}}),
        stage_s={"forward": 0.1, "forward_loss": 0.1, "backward": 0.2},
        run={"steps": steps},
    )
    plan = live_through(swarm, root, *strikes, steps=steps, timeout_s=600.0, limits=limits)
    return swarm, plan


def of(swarm: SimSwarm, name: str, kind: type[EventT]) -> list[EventT]:
    """A peer's events of a kind."""
    return swarm.peers[name].events.of(kind)


def leader_at_the_cut(swarm: SimSwarm) -> str:
    """Who leads the step during which the links are cut, in its first term."""
    members = [record for record in swarm.history("host-0") if record["step"] == 3][0]["roster"]
    ids = {peer.endpoint.peer: name for name, peer in swarm.peers.items()}
    roster = swarm.peers["host-0"].membership.roster  # type: ignore[union-attr]
    assert {member["peer"] for member in members} == set(roster.peers), "all are back in the end"
    return ids[owner(roster, 4, 0)]


def check_both_sides_say_so(swarm: SimSwarm, few: tuple[str, ...], *, told: bool = False) -> None:
    """The few told that they lack a majority and wait, then that they were cut off and are back; the others went on,
    and told whom they had lost. Who is ``told`` what the others decide learns that it is cut off before it misses a
    majority."""
    ids = {swarm.peers[name].endpoint.peer for name in few}
    for name, peer in swarm.peers.items():
        lost, ready = peer.events.of(QuorumLost), peer.events.of(PeerReady)
        closed = [event.step for event in peer.events.of(StepClosed)]
        if name not in few:
            assert not lost, name
            assert closed == list(range(1, STEPS + 1)), name
            continue
        # The founder holds nothing, and has no vote.
        assert [(event.step, event.voters) for event in lost] == ([] if told else [(4, 6)]), name
        assert told or any("a majority: " in event.what for event in peer.events.of(Waiting)), name
        assert [event.step for event in peer.events.of(QuorumBack)] == ([] if told else [4]), name
        assert len(peer.events.of(CutOff)) == 1, name
        assert len(ready) == 2, name
        assert closed == [1, 2, 3, *range(ready[1].step + 1, STEPS + 1)], name
    missed = {event.peer for name in EVERYBODY - set(few) for event in of(swarm, name, PeerLost)}
    assert missed == ids


@pytest.mark.parametrize("deaf", [True, False])
def test_link_that_works_one_way_only_counts_as_cut(tmp_path: Path, deaf: bool) -> None:
    """One hears nobody, or nobody hears it."""
    others = tuple(sorted(EVERYBODY - {"host-3"}))
    sides = (others, ("host-3",)) if deaf else (("host-3",), others)
    swarm, _ = story(tmp_path, at_step_3(Partition(*sides, one_way=True)), healed(3))
    assert leader_at_the_cut(swarm) == "host-3"
    check_both_sides_say_so(swarm, ("host-3",), told=not deaf)


def test_nobody_goes_on_where_nobody_has_a_majority(tmp_path: Path) -> None:
    half, other = ("host-0", "host-1", "trainer-0"), ("host-2", "host-3", "trainer-1")
    swarm, plan = story(
        tmp_path,
        Strike("boot", On(StepClosed, peer="host-0"), Kill(("bootstrap",))),
        at_step_3(Partition(half, other, seconds=30.0)),
    )
    for name in (*half, *other):
        assert [(event.step, event.there, event.voters) for event in of(swarm, name, QuorumLost)] == [(4, 3, 6)]
        assert [event.step for event in of(swarm, name, QuorumBack)] == [4]
        assert not of(swarm, name, CutOff), "nobody missed anything"
    (fourth,) = (event for event in swarm.events(Committed) if event.step == 4)
    assert fourth.microbatches
    assert all(record["absent"] == [] for record in swarm.history("host-0") if record["step"] != 2)


def test_majority_without_a_whole_stage_waits_until_the_link_is_mended(tmp_path: Path) -> None:
    swarm, _ = story(tmp_path, at_step_3(cut("bootstrap", "host-1", "host-3", seconds=40.0)))
    roster = swarm.peers["host-0"].membership.roster  # type: ignore[union-attr]
    assert {roster[swarm.peers[name].endpoint.peer].part for name in ("host-1", "host-3")} == {"stage-0"}
    waited = [
        event.what for name in ("host-0", "host-2", "trainer-0", "trainer-1") for event in of(swarm, name, Waiting)
    ]
    assert any(what.startswith("a replica of stage-0: ") for what in waited)
    assert not swarm.events(CutOff)


def test_few_that_are_away_for_long_get_the_newest_state(tmp_path: Path) -> None:
    swarm, _ = story(tmp_path, at_step_3(cut(*FEW)), healed(KEPT_UPDATES + 4), steps=KEPT_UPDATES + 10)
    for name in FEW:
        (away,) = of(swarm, name, CutOff)
        assert "steps ahead" in away.reason
        assert len(of(swarm, name, PeerReady)) == 2


def test_link_that_fails_again_and_again_leaves_one_history(tmp_path: Path) -> None:
    spells = [3.0, 2.0, 5.0, 4.0, 7.0, 3.0]
    strikes = [
        Strike(
            f"cut {number}",
            On(StepClosed, peer="host-0", nth=1 if number else 3, after=f"cut {number - 1}" if number else ""),
            cut(*FEW, seconds=seconds),
        )
        for number, seconds in enumerate(spells)
    ]
    swarm, plan = story(tmp_path, *strikes, steps=14)
    assert plan.counts == {"partition": len(spells)}
    assert swarm.events(CutOff)


def test_leader_cut_off_as_it_decides_is_not_contradicted(tmp_path: Path) -> None:
    """It knows that the record is decided and can tell nobody: the others decide the same one."""
    swarm, _ = story(
        tmp_path, Strike("cut", On(Committed, peer="trainer-1", where={"step": 3}), cut("trainer-1")), healed(3)
    )
    first = next(event for event in of(swarm, "trainer-1", Committed) if event.step == 3)
    again = [event for event in swarm.events(Committed) if event.step == 3 and event is not first]
    assert again
    assert {event.microbatches for event in again} == {first.microbatches}
    assert of(swarm, "trainer-1", CutOff)


def test_trainer_cut_off_from_a_whole_stage_only_does_not_hold_the_run_up(tmp_path: Path) -> None:
    """Everybody else reaches it, the step's leader too, so that nobody takes it for lost: the others fill the batch."""
    cut_link = at_step_3(Partition(("trainer-0",), ("host-0", "host-2")))
    swarm, _ = story(tmp_path, cut_link, healed(3), limits=Limits(gap_s=STALLED_S + 3 * LOOK_S))
    roster = swarm.peers["host-1"].membership.roster  # type: ignore[union-attr]
    assert {roster[swarm.peers[name].endpoint.peer].part for name in ("host-0", "host-2")} == {"stage-1"}
    stalled = swarm.peers["trainer-0"].endpoint.peer
    assert [(event.step, event.trainers) for event in swarm.events(WorkWithdrawn)] == [(4, (stalled,))]
    assert stalled not in {peer.peer for name in ("host-1", "host-3") for peer in of(swarm, name, PeerLost)}
    left_out = [event.step for event in of(swarm, "trainer-0", CutOff)]
    assert left_out[0] == 4
    assert len(of(swarm, "trainer-0", PeerReady)) == 1 + len(left_out), "it came in again, and stalled nobody any more"
