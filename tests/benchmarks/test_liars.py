"""The totals of the benchmark ``liars``, of runs that are made up."""

from __future__ import annotations

from typing import Any

from peers.chaos.liars.orders import KINDS
from tests.benchmarks.liars import ALL, ATTACKS, KEYS, list_cases, to_result
from tests.benchmarks.runner import Size

RUN: dict[str, Any] = {
    "lie": "", "liar": "", "rate": 1.0, "seed": 1, "trainers": 2, "defended": False, "fired": 0, "loss": 2.0,
    "step_s": 1.0, "worst_s": 2.0, "stopped": "", "caught": {}, "named": {}, "named_wrongly": 0, "told": {},
}  # fmt: skip
COSTS = {"none": {"overhead_cpu": 0.0, "overhead_bytes": 0.0}, ALL: {"overhead_cpu": 0.05, "overhead_bytes": 0.07}}
LIE: dict[str, Any] = RUN | {"lie": "late", "liar": "host-0", "fired": 3}


def test_every_lie_is_told_beside_honest_runs_of_its_shape() -> None:
    assert {one.lie for one in ATTACKS} == set(KINDS)
    for size in Size:
        cases = list_cases(size)
        honest = [(one["seed"], one["trainers"], one["defended"]) for one in cases if not one["lie"]]
        assert len(honest) == len(set(honest))
        assert {(one["seed"], one["trainers"], one["defended"]) for one in cases} == set(honest)


def test_totals_are_of_who_was_named_and_of_who_should_not_have_been() -> None:
    often, seldom = ({"host-0": {"SumLeftOut": times}} for times in (5, 4))
    honest = RUN | {"defended": True, "loss": 2.1, "named": {"host-0": {"SumLeftOut": 2}}}
    bare = LIE | {"worst_s": None, "stopped": "why"}
    caught = LIE | {"defended": True, "caught": {"SumLeftOut": 7}, "named": often, "loss": 2.2, "worst_s": 3.0}
    missed = caught | {"named": seldom | {"host-1": {"SumLeftOut": 2}}, "loss": 3.0, "named_wrongly": 2}
    found = to_result([RUN, honest, bare, caught, missed], COSTS)
    summary = found.summary
    assert summary.keys() == set(KEYS)
    assert (summary["f1"], summary["f1_bare"]) == (0.4, 0.0)
    assert (summary["lies"], summary["caught"], summary["caught_p99"]) == (2, 1, 7)
    assert (summary["worst_loss_ratio"], summary["worst_loss_ratio_bare"]) == (1.5, 1.0)
    assert (summary["worst_seconds_ratio"], summary["worst_step_s"]) == (1.0, 3.0)
    assert summary["honest_loss_ratio"] == 1.05
    assert (summary["runs_stopped"], summary["named_wrongly"], summary["honest_accused"]) == (1, 2, 1)
    assert (summary["overhead_cpu"], summary["overhead_bytes"], summary["overhead"]) == (0.05, 0.07, 0.07)
    assert found.tables[0].rows == [["none", 0.0, 0.0], [ALL, 0.05, 0.07]]
    assert [row[0] for row in found.rows] == ["none", "none", "late", "late", "late"]
