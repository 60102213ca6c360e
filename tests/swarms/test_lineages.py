"""Who is cut off for longer than the grace goes on alone; in the end the run has one history all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.chaos.faults import Kill, Partition
from peers.chaos.plan import On, Strike
from peers.simulate.local_swarm import founder_id
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import (
    Committed,
    CutOff,
    LineageBegan,
    LineageConfirmed,
    LineageGivenUp,
    PeerReady,
    QuorumBack,
    QuorumLost,
    StepClosed,
)
from swarm.sim.links import Links
from tests.swarms.story import live_through

GRACE_S = 4.0
WHOLE = ("host-0", "host-1", "trainer-0")
"""A replica of each part."""
OTHERS = ("host-2", "host-3", "trainer-1")
MOST = (*OTHERS, "trainer-2", "trainer-3")
"""Five of eight voters: the founder, who holds nothing, is none."""


def story(
    root: Path, *strikes: Strike, steps: int, grace_s: float = GRACE_S, trainers: int = 2, mode: str = "open"
) -> SimSwarm:
    """A run with these faults, which everybody but the killed sees to its end, and which keeps its invariants: one
    history, every microbatch once, none lost, and cursors that say so."""
    swarm = SimSwarm(
        root,
        hosts=4,
        trainers=trainers,
        links=Links.parse({"default": {"latency_ms": 5}}),
        stage_s={"forward": 0.3, "forward_loss": 0.3, "backward": 0.6},
        run={"steps": steps, "quorum_grace_s": grace_s},
        batch={"microbatch_size": 1, "microbatches_per_step": 4},
        **({} if mode == "open" else {"admission": {"mode": mode, "issuers": (str(founder_id()),)}}),
    )
    live_through(swarm, root, *strikes, steps=steps, timeout_s=900.0)
    return swarm


def cut_at_step_2(peers: tuple[str, ...], others: tuple[str, ...], seconds: float) -> Strike:
    """When the second step is closed."""
    return Strike("cut", On(StepClosed, peer="host-0", nth=2), Partition(peers, others, seconds=seconds))


def who(swarm: SimSwarm, kind: Any) -> set[str]:
    """Who wrote such an event."""
    return {name for name, peer in swarm.peers.items() if peer.events.of(kind)}


def provisional(swarm: SimSwarm, name: str) -> list[int]:
    """The steps of a peer's history that were closed without a majority."""
    return [record["step"] for record in swarm.history(name) if record["lineage"]]


def test_what_was_closed_without_a_majority_counts_when_the_others_did_nothing_else(tmp_path: Path) -> None:
    """The others have as many voters, but lack a stage."""
    few, waiting = (
        ("host-0", "host-2", "host-1", "trainer-0"),
        ("bootstrap", "host-3", "trainer-1", "trainer-2", "trainer-3"),
    )
    swarm = story(tmp_path, cut_at_step_2(few, waiting, 30.0), steps=16, trainers=4)
    assert who(swarm, QuorumLost) == {*few, *waiting}
    assert who(swarm, LineageBegan) == set(few)
    assert who(swarm, CutOff) == set(waiting)
    assert not who(swarm, LineageGivenUp)
    (confirmed,) = swarm.events(LineageConfirmed)
    steps = provisional(swarm, "host-0")
    assert steps == list(range(3, 3 + len(steps)))
    assert len(steps) >= 2
    assert confirmed.step == 3
    after = next(record for record in swarm.history("host-0") if record["step"] == steps[-1] + 1)
    assert len(after["confirmation"]["acceptances"]) >= 5
    assert all(len(swarm.peers[name].events.of(PeerReady)) == 2 for name in waiting)


def test_who_went_on_alone_gives_it_up_when_a_majority_did_too(tmp_path: Path) -> None:
    swarm = story(tmp_path, cut_at_step_2(WHOLE, ("bootstrap", *MOST), 28.0), steps=16, trainers=4)
    assert who(swarm, QuorumLost) == who(swarm, LineageBegan) == who(swarm, LineageGivenUp) == set(WHOLE)
    assert not who(swarm, LineageConfirmed)
    for name in WHOLE:
        (given_up,) = swarm.peers[name].events.of(LineageGivenUp)
        assert (given_up.step, given_up.microbatches > 0) == (3, True)
        assert len(swarm.peers[name].events.of(PeerReady)) == 2
        assert not provisional(swarm, name)
        assert (tmp_path / name / "history-1.jsonl").exists(), "what was given up is kept aside"


def test_of_two_lineages_the_one_that_did_more_counts(tmp_path: Path) -> None:
    """Where one must be admitted each side asks the other, of which its own newest record knows nothing."""
    swarm = story(
        tmp_path,
        Strike("boot", On(StepClosed, peer="host-0"), Kill(("bootstrap",))),
        cut_at_step_2(WHOLE, OTHERS, 40.0),
        steps=20,
        mode="token",
    )
    assert who(swarm, LineageBegan) == {*WHOLE, *OTHERS}
    (confirmed,) = swarm.events(LineageConfirmed)
    losers = who(swarm, LineageGivenUp)
    assert losers in (set(WHOLE), set(OTHERS))
    given_up = swarm.events(LineageGivenUp)
    assert all(event.microbatches <= confirmed.microbatches for event in given_up)
    assert all(event.step == 3 for event in given_up)


def test_run_whose_majority_never_comes_back_goes_on_and_says_that_it_is_provisional(tmp_path: Path) -> None:
    swarm = story(
        tmp_path, Strike("kill", On(StepClosed, peer="host-0", nth=2), Kill(("bootstrap", *MOST))), steps=7, trainers=4
    )
    assert who(swarm, LineageBegan) == set(WHOLE)
    assert not who(swarm, QuorumBack)
    assert {tuple(provisional(swarm, name)) for name in WHOLE} <= {(3, 4, 5, 6, 7), (4, 5, 6, 7)}


def test_without_a_grace_nobody_goes_on_alone(tmp_path: Path) -> None:
    swarm = story(tmp_path, cut_at_step_2(WHOLE, ("bootstrap", *MOST), 28.0), steps=16, grace_s=0.0, trainers=4)
    assert who(swarm, QuorumLost) == who(swarm, CutOff) == set(WHOLE)
    assert not who(swarm, LineageBegan)
    assert {event.step for event in swarm.events(Committed)} == set(range(1, 17))
