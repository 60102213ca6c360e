"""How the benchmark ``allreduce`` judges what its members answer; no process is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.benchmarks._exchange_case import HIVEMIND, HIVEMIND_TOLD, OURS, Found, found
from tests.benchmarks._exchange_load import Case
from tests.benchmarks.allreduce import to_result

FOUR = Case(peers=4, codec="float32")


def answer(**figures: Any) -> dict[str, Any]:
    usual = {"exchange_s": 2.0, "round_s": 2.0, "wire_bytes": 1.5 * 4 * FOUR.elements, "extra_memory": 0.2}
    return {**usual, "extra_daemon": 0.1, "cpu_s": 1.0, "digest": "d", **figures}


def of(candidate: str, *, case: Case = FOUR, **figures: Any) -> Found:
    return found(case, candidate, [[answer(**figures)] * case.peers], error=0.0)


def test_found_takes_the_slowest_member_and_the_median_round() -> None:
    rounds = [[answer(exchange_s=1.0), answer(exchange_s=seconds)] for seconds in (9.0, 3.0, 5.0)]
    one = found(Case(peers=2, codec="float32"), OURS, rounds, error=0.0)
    assert one.figures["exchange_s"] == 5.0
    assert one.figures["cpu_s"] == 2.0
    assert (one.rounds, one.failed, one.identical) == (3, 0, True)


def test_found_leaves_out_rounds_that_some_missed_and_sees_bits_that_differ() -> None:
    whole = [answer(members=2, digest="a"), answer(members=2, digest="b")]
    one = found(Case(peers=2, codec="float32"), HIVEMIND, [whole, [answer(members=1)] * 2], error=0.0)
    assert (one.rounds, one.failed, one.identical) == (1, 1, False)


def test_least_bytes_are_what_a_reduce_scatter_and_an_all_gather_send() -> None:
    assert FOUR.least_bytes == 1.5 * 4 * FOUR.elements
    assert Case(peers=2, codec="int8").least_bytes == FOUR.elements


def test_result_has_the_figures_of_four_peers_first_and_the_others_nested() -> None:
    eight = Case(peers=8, codec="int8")
    theirs = {"exchange_s": 4.0, "round_s": 9.0}
    everything = [of(OURS), of(HIVEMIND, **theirs), of(HIVEMIND_TOLD, exchange_s=4.0, round_s=5.0)]
    everything += [of(OURS, case=eight), of(HIVEMIND, case=eight, **theirs), of(HIVEMIND_TOLD, case=eight)]
    result = to_result(everything, load_before=0.5)
    figures = {"ours_s": 2.0, "hivemind_s": 4.0, "speedup_exchange": 2.0, "speedup_round": 4.5, "bytes_ratio": 1.0}
    assert result.summary.items() >= {**figures, "extra_memory_ratio": 0.2, "bit_identical": True}.items()
    assert list(result.summary["cases"]) == ["8 x int8"]
    assert len(result.rows) == 6
    assert all(len(row) == len(result.columns) for row in result.rows)


def test_result_with_a_candidate_that_never_succeeded_says_none() -> None:
    never = found(FOUR, HIVEMIND, [[answer(members=1)] * 4], error=0.0)
    result = to_result([of(OURS), never, replace(never, candidate=HIVEMIND_TOLD)], load_before=0.5)
    assert result.summary["ours_s"] == 2.0
    assert result.summary["hivemind_s"] is None
    assert result.summary["speedup_exchange"] is None
