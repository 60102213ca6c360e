"""Trainers that pull against all others, and one that is only unlike them, in whole swarms."""

from __future__ import annotations

import inspect
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.liars.lies import Liar, lying
from peers.data.text import built_in_corpus
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.trials import FIRST_REST
from swarm.events import QuotaTaken, StepClosed
from swarm.sim.loop import PEER, run_world

STEPS = 16
FIVE: dict[str, Any] = {
    "hosts": 3,
    "trainers": 5,
    "run": {"steps": STEPS, "seed": 1},
    "split": {"stages": 1},
    "model": {"layers": 2, "dim": 16, "context": 16},
    "batch": {"microbatch_size": 4, "microbatches_per_step": 15, "max_share": 0.2},
    "optimizer": {"lr": 2e-2, "warmup_steps": 0, "trainer_test": True},
    "stage_s": {"forward": 0.05, "backward": 0.1},
}
"""Each trainer feeds three microbatches of a step."""


def last_loss(swarm: SimSwarm) -> float:
    """Of the last four steps."""
    return sum(event.loss for event in swarm.peers["bootstrap"].events.of(StepClosed)[-4:]) / 4


def texts() -> list[list[str]]:
    text = "\n\n".join(built_in_corpus().documents)
    return [[text[at * 35_000 : (at + 1) * 35_000]] for at in range(5)]


def test_trainer_whose_gradients_are_turned_around_feeds_nothing_more_and_the_others_learn_as_if_it_were_not_there(
    tmp_path: Path,
) -> None:
    clean = SimSwarm(tmp_path / "clean", **FIVE, documents=texts())
    run_world(clean.run())
    swarm = SimSwarm(tmp_path / "swarm", **FIVE, documents=texts())
    with lying(Liar("pulls-x-1", mine=lambda: PEER.get() == "trainer-0")) as lie:
        run_world(swarm.run())
    assert lie.fired >= 24
    liar = swarm.peers["trainer-0"].endpoint.peer
    told = swarm.events(QuotaTaken)
    (step,) = {event.step for event in told}
    assert 8 <= step <= 12
    assert {(event.peer, event.until) for event in told} == {(liar, step + 1 + FIRST_REST)}
    assert len(told) == len(swarm.peers), "all say so, itself too"
    assert all(event.mean < -0.2 for event in told)
    assert not clean.events(QuotaTaken)
    for record in swarm.history()[1:]:
        fed = Counter(one["microbatch"][0] for one in record["committed"])
        assert len(record["committed"]) == 15
        assert (fed[liar] == 3) is (record["step"] <= step)
        assert liar in {member["peer"] for member in record["roster"]}, "it stays a member"
    assert last_loss(swarm) < 1.05 * last_loss(clean)
    for peer in swarm.peers.values():
        assert peer.membership is not None
        assert peer.membership.situation.unfed == (("trainer-0", step + 1 + FIRST_REST),)
    leader = {event.leader for event in swarm.peers["bootstrap"].events.of(StepClosed) if event.step > step}
    assert len(leader) > 1, "several leaders have kept to it"


OTHERS: dict[str, Callable[[str], str]] = {
    "code": lambda text: "\n".join(map(inspect.getsource, (inspect, tokenize)))[:35_000],
    "capitals": str.upper,
}


@pytest.mark.parametrize("other", OTHERS)
def test_honest_trainer_of_another_domain_keeps_its_quota(tmp_path: Path, other: str) -> None:
    """Code among prose, and text that has hardly a letter in common with the others'."""
    documents = texts()
    documents[0] = [OTHERS[other](documents[0][0])]
    swarm = SimSwarm(tmp_path, **FIVE, documents=documents)
    run_world(swarm.run())
    assert not swarm.events(QuotaTaken)
    trials = swarm.history()[-1]["trials"]
    assert trials.keys() == {swarm.peers[f"trainer-{at}"].endpoint.peer for at in range(5)}
    tallies = {peer: one["tallies"]["stage-0"] for peer, one in trials.items()}
    assert all(one["microbatches"] >= 24 for one in tallies.values()), "all were judged"
    means = {peer: one["total"] / one["words"] for peer, one in tallies.items()}
    own = means.pop(swarm.peers["trainer-0"].endpoint.peer)
    assert own > (0.0 if other == "code" else -40.0), (
        "below three quarters of what the others are it would be cut, were it sure"
    )
    assert min(means.values()) > 30.0
