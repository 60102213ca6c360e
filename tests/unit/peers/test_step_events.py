"""What a member tells of the steps that close: a rate only of those that it saw open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from peers.situation import Situation
from peers.step_events import StepEvents
from swarm.events import StepClosed
from swarm.optimization.records import CloseRecord
from tests.unit.optimization.puppets import Sink
from tests.unit.optimization.world import GENESIS, record
from tests.unit.peers.fake_clock import FakeClock
from tests.unit.peers.kept_run import kept_run


class Told:
    """One peer's step events; ``close`` closes a step so many seconds after the one before."""

    def __init__(self) -> None:
        self.events, self.clock = Sink(), FakeClock()
        self.situation = Situation(self.events)
        endpoint = SimpleNamespace(statistics=lambda: SimpleNamespace(total=(0, 0)))
        around = SimpleNamespace(manifest=kept_run().manifest, events=self.events, clock=self.clock, endpoint=endpoint)
        self.steps = StepEvents(cast(Any, around), self.situation)

    def close(self, closed: CloseRecord, *, took_part: bool, after_s: float = 2.0) -> float | None:
        """The rate that the peer shows then."""
        self.clock.now += after_s
        self.steps.closed(closed, took_part=took_part)
        return self.situation.tokens_per_s


def test_peer_of_the_first_hour_has_a_rate_from_the_first_step_on() -> None:
    told = Told()
    assert told.close(GENESIS, took_part=False, after_s=60.0) is None
    first = record(GENESIS)
    assert told.close(first, took_part=True) == first.tokens / 2.0
    assert [event.whole for event in told.events.of(StepClosed)] == [True]


def test_peer_that_joins_shows_no_rate_of_a_step_that_was_open_before_it_came() -> None:
    told = Told()
    observed = record(record(GENESIS))
    assert told.close(observed, took_part=False) is None
    naming = record(observed)
    assert told.close(naming, took_part=False, after_s=0.001) is None  # it catches up: these come at once
    joined = record(naming)
    assert told.close(joined, took_part=True, after_s=0.001) is None
    after = record(joined)
    assert told.close(after, took_part=True) == after.tokens / 2.0
    assert [(event.step, event.whole) for event in told.events.of(StepClosed)] == [(4, False), (5, True)]
    assert told.situation.loss == after.loss
