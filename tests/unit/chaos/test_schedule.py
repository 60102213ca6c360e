from __future__ import annotations

from pathlib import Path

import pytest

from peers.chaos.scenario import FaultSchedule, TraceSection
from peers.chaos.schedule import Draw, choose, draws, market, read_trace
from swarm.errors import ConfigError

SCHEDULE = FaultSchedule(per_hour=100, kinds={"kill": 3, "stop": 1, "pause": 1})
READY = {"host-0-0": "stage-0", "host-0-1": "stage-0", "host-1-0": "stage-1", "trainer-0": "ends", "trainer-1": "ends"}


def test_draws_come_at_the_rate_that_is_said_and_repeat_themselves() -> None:
    drawn = draws(SCHEDULE, 1, 600)
    assert len(drawn) == 16
    assert drawn == draws(SCHEDULE, 1, 600)
    assert drawn != draws(SCHEDULE, 2, 600)
    assert draws(SCHEDULE, 1, 3600)[:16] == drawn
    assert all(number * 36 < draw.at_s < (number + 1) * 36 for number, draw in enumerate(drawn))
    assert {draw.kind for draw in draws(SCHEDULE, 1, 3600)} == {"kill", "stop", "pause"}


def test_draws_leave_quiet_between_stretches() -> None:
    stretched = SCHEDULE.model_copy(update={"stretch_s": 120.0, "quiet_s": 75.0})
    plain, drawn = draws(SCHEDULE, 1, 600), draws(stretched, 1, 600)
    assert [draw.kind for draw in drawn] == [draw.kind for draw in plain[: len(drawn)]]
    assert len(drawn) < len(plain)
    gaps = [two.at_s - one.at_s for one, two in zip(drawn, drawn[1:], strict=False)]
    assert sum(gap >= 75 for gap in gaps) == int(plain[len(drawn) - 1].at_s // 120)
    assert drawn[-1].at_s < 600
    for wrong in ({"stretch_s": 60}, {"quiet_s": 60}):
        with pytest.raises(ValueError, match="stretch_s and quiet_s, or neither"):
            FaultSchedule.model_validate({"per_hour": 100, "kinds": {"kill": 1}, **wrong})


def test_nobody_is_chosen_who_is_the_last_of_a_part() -> None:
    for luck in (0.0, 0.3, 0.6, 0.9):
        chosen = choose(Draw(0.0, "kill", luck, 5.0, count=5), READY, READY)
        assert len(chosen) == 2
        assert {READY[name] for name in chosen} == {"stage-0", "ends"}
    assert choose(Draw(0.0, "kill", 0.5, 5.0), ("host-1-0",), READY) == ()


def test_market_takes_in_bulk_at_its_speed() -> None:
    slow = market(TraceSection(churn_per_minute=0.2), 12, 1, 600)
    fast = market(TraceSection(churn_per_minute=0.2, speed=2.0), 12, 1, 300)
    assert len(slow) == len(fast) > 5
    assert any(draw.count > 1 for draw in slow)
    assert {draw.kind for draw in slow} == {"kill", "stop"}
    assert all(one.at_s == pytest.approx(2 * other.at_s) for one, other in zip(slow, fast, strict=True))
    assert all(draw.new_disk and draw.seconds > 0 for draw in slow)


def test_trace_of_a_file_is_read_in_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("# seconds, how many, back after\n20, 2, 10\n\n4, 1, 6  # one\n")
    told = read_trace(TraceSection(file="trace.csv", speed=2.0), tmp_path, 0)
    assert [(draw.at_s, draw.count, draw.seconds) for draw in told] == [(2.0, 1, 3.0), (10.0, 2, 5.0)]


@pytest.mark.parametrize("text", ["1, 2\n", "a, b, c\n", "2, 0, 5\n", "nan, 1, 5\n", "2, 1, inf\n", "-1, 1, 5\n"])
def test_a_line_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.csv").write_text("1, 1, 1\n" + text)
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(TraceSection(file="trace.csv"), tmp_path, 0)
    with pytest.raises(ConfigError, match="check the path"):
        read_trace(TraceSection(file="none.csv"), tmp_path, 0)
