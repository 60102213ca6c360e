"""No matter who dies, at whatever moment: everybody holds the state of the step before or of the one after, exactly.

Some moments of every kind; ``make nemesis`` has all events of a run, and several hundred of its messages. The benchmark
``trajectory`` kills real peers in every phase of their work, and starts trainers again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.chaos.plan import On
from swarm.averaging.allreduce.messages import AGREE
from swarm.step.messages import COMPLETE
from tests.harness.crashes import Crash, Life, crashes, live, sweep
from tests.harness.faults_messages import ANSWERS, ASKS
from tests.harness.faults_sweep import Moment

TELLING = ("step/1/", AGREE.name, COMPLETE.name)
"""Messages after which somebody counts on something."""
HOSTED = {"split": {"ends": "hosted"}}
EVERY = 10_000


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Life:
    return live(tmp_path_factory.mktemp("crashes") / "calm")


def is_event(kind: str) -> bool:
    """Whether it was written, not sent."""
    return " " not in kind


def is_message(kind: str) -> bool:
    """Whether it was sent."""
    return " " in kind


def is_telling(kind: str) -> bool:
    """Whether it was sent, and somebody counts on something after it."""
    return kind.partition(" ")[2].startswith(TELLING)


def test_death_at_an_event_leaves_nothing_between_two_steps(calm: Life, tmp_path: Path) -> None:
    chosen = crashes(calm, most=10, seed=4, kinds=is_event)
    assert len({crash.moment.on.kind for crash in chosen}) >= 9
    assert len({crash.victim for crash in chosen}) >= 4
    sweep(tmp_path, calm, chosen)


def test_death_around_a_message_leaves_nothing_between_two_steps(calm: Life, tmp_path: Path) -> None:
    chosen = crashes(calm, most=5, seed=2, kinds=is_telling)
    assert {str(crash.moment.on.kind).partition(" ")[0] for crash in chosen} == {ASKS.strip(), ANSWERS.strip()}
    sweep(tmp_path, calm, chosen)


@pytest.mark.nemesis
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kinds", "most", "least", "shape"),
    [(is_event, EVERY, 200, {}), (is_message, 160, 140, {}), (is_event, 80, 70, HOSTED), (is_message, 80, 70, HOSTED)],
    ids=["events", "messages", "events, hosted ends", "messages, hosted ends"],
)
def test_death_at_any_moment_leaves_nothing_between_two_steps(
    tmp_path: Path, kinds: Any, most: int, least: int, shape: dict[str, Any]
) -> None:
    calm = live(tmp_path / "calm", **shape)
    chosen = crashes(calm, most=most, seed=1, kinds=kinds)
    assert len(chosen) >= least
    sweep(tmp_path, calm, chosen, **shape)


def test_life_that_is_not_whole_says_where(calm: Life, tmp_path: Path) -> None:
    life = live(tmp_path / "life", Crash(Moment(On("StepClosed", peer="host-1", nth=2), 3)))
    life.assert_whole(calm)
    between = life.holdings[0]
    life.holdings[0] = type(between)(between.at, between.peer, between.part, between.step, "f" * 64)
    with pytest.raises(AssertionError, match="is no decided state"):
        life.assert_whole(calm)
