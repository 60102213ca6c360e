"""Who holds a batch up: only trainers of which nothing came while the leader looked."""

from swarm.ids import PeerId
from swarm.step.leader.exclusion import AWAY_S, LOOK_S, SLOWEST, STALLED_S, BatchStall

SLOW, OTHER = PeerId("1" * 64), PeerId("2" * 64)


class Watch:
    """A leader that looks every ``LOOK_S``."""

    def __init__(self) -> None:
        self.now, self._rule = 100.0, BatchStall(100.0)

    def over(self, seconds: float, done: int, *waits_for: PeerId) -> dict[PeerId, str]:
        until, late = self.now + seconds, self._rule.look(self.now, done, waits_for)
        while self.now < until and not late:
            self.now += LOOK_S
            late = self._rule.look(self.now, done, waits_for)
        return late


def test_trainer_that_all_others_wait_for_is_stalled_after_a_minute() -> None:
    watch = Watch()
    assert watch.over(STALLED_S - LOOK_S, 3, SLOW) == {}
    assert watch.over(LOOK_S, 3, SLOW) == {SLOW: "nothing came of its work for 60 s"}


def test_nobody_is_stalled_while_all_have_something_to_do() -> None:
    assert Watch().over(100 * STALLED_S, 3) == {}


def test_any_report_gives_all_the_time_again() -> None:
    watch = Watch()
    assert watch.over(STALLED_S - LOOK_S, 3, SLOW) == {}
    assert watch.over(STALLED_S - LOOK_S, 4, SLOW) == {}


def test_another_that_is_waited_for_has_all_the_time_of_its_own() -> None:
    watch = Watch()
    assert watch.over(STALLED_S - LOOK_S, 3, SLOW) == {}
    assert watch.over(STALLED_S - LOOK_S, 3, OTHER) == {}


def test_slow_trainer_has_several_times_as_long_as_the_others_needed() -> None:
    watch = Watch()
    assert watch.over(10 * STALLED_S, 0) == {}
    assert watch.over(SLOWEST * 10 * STALLED_S - LOOK_S, 5, SLOW) == {}
    assert SLOW in watch.over(LOOK_S, 5, SLOW)


def test_time_in_which_nobody_looked_counts_for_nothing() -> None:
    watch = Watch()
    assert watch.over(STALLED_S - LOOK_S, 3, SLOW) == {}
    watch.now += 1000 * AWAY_S
    assert watch.over(STALLED_S - LOOK_S, 3, SLOW) == {}
    assert SLOW in watch.over(LOOK_S, 3, SLOW), "nor is the batch taken for a slow one"
