"""What the benchmark ``allreduce-kill`` plays and how it judges what it finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.benchmarks import _allreduce_load as load
from tests.benchmarks import allreduce_kill
from tests.benchmarks._allreduce_candidates import Outcome, Round
from tests.benchmarks._allreduce_load import SIGNED, Fuse, Kill, Vector


def numbers(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def test_kills_meet_every_pair_of_event_and_victim_and_every_part_of_a_round() -> None:
    kills = load.shared_kills(12)
    assert len({(kill.event, kill.slot) for kill in kills}) == 12
    for event in load.SHARED_EVENTS:
        assert [kill.count(48) for kill in kills if kill.event == event] == [6, 18, 30, 42]
    assert {(kill.event, kill.slot) for kill in load.shared_kills(60)} == {(kill.event, kill.slot) for kill in kills}
    assert [kill.count(3) for kill in load.signed_kills(3)] == [1, 2, 3]
    assert len({(kill.slot, kill.share) for kill in load.signed_kills(12)}) == 12


def test_fuse_ends_the_process_at_the_event_meant_and_at_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(load.os, "kill", lambda pid, number: signals.append(number))
    fuse = Fuse(Kill(slot=0, event="sent", share=0.5), {"sent": 4})
    for event in ("reduced", "sent", "answered", "reduced"):
        fuse.note(event)
    assert not signals
    fuse.note("sent")
    assert signals == [load.signal.SIGKILL]
    assert capsys.readouterr().out == '{"fired": "sent", "count": 2, "of": 4}\n'


def test_whole_numbers_come_back_exactly_from_a_mean_of_any_of_them() -> None:
    inputs = {slot: load.vector_of(7, slot, "whole") for slot in range(load.MEMBERS)}
    for slots in ((0, 1), (1, 2, 3), (0, 1, 2, 3)):
        mean = load.exact_mean(inputs, slots)
        assert np.array_equal(inputs[slots[0]] + (mean - inputs[slots[0]]), mean)
        assert np.array_equal(mean, np.round(mean))
    assert np.array_equal(inputs[2], load.vector_of(7, 2, "whole"))
    assert not np.array_equal(inputs[2], load.vector_of(8, 2, "whole"))


def test_differing_share_compares_bits_between_all_survivors() -> None:
    first, second, third = numbers(1, 2, 3, 0.0), numbers(1, 5, 3, -0.0), numbers(1, 2, 4, 0.0)
    assert load.differing_share([first, first.copy(), first.copy()]) == 0
    assert load.differing_share([first, second]) == 0.5
    assert load.differing_share([first, second, third]) == 0.75
    assert load.differing_share([first]) == load.differing_share([]) == 0


@pytest.mark.parametrize(
    ("digests", "agreed"),
    [({0: "a", 1: "a"}, True), ({0: "a", 1: "b"}, False), ({0: "a", 1: ""}, False), ({0: "", 1: ""}, False)],
)
def test_result_is_applied_only_when_all_who_live_hold_the_same(digests: dict[int, str], agreed: bool) -> None:
    assert load.agreed_by_all(digests) is agreed


def outcome(candidate: str, kill: Kill | None, **fields: Any) -> Outcome:
    fired = {"fired": kill.event, "count": 1, "of": 2} if kill else {}
    found: dict[str, Any] = {
        "survivors": 3, "failed": 0, "false_successes": 0, "differing": 0.0, "differing_successes": 0.0,
        "answered_s": 1.0, "settled_s": 2.0,
    }  # fmt: skip
    played = Round(number=1, kind="whole", kill=kill, fired=fired)
    return Outcome(**({"candidate": candidate, "played": played} | found | fields))


def test_summary_counts_kills_only_and_tells_void_from_split_rounds() -> None:
    sent, signed = Kill(slot=0, event="sent", share=0.5), Kill(slot=0, event=SIGNED, share=0.5)
    result = allreduce_kill.to_result([
        outcome("ours", None, survivors=4),
        outcome("hivemind", None, survivors=4, differing=1.0),
        outcome("ours", sent, failed=3, attempts=2, inputs_kept=True),
        outcome("ours", signed, failed=1, attempts=2, inputs_kept=True),
        outcome("hivemind", sent, failed=1, false_successes=2, differing=0.5, differing_successes=0.25),
        outcome("hivemind", sent, differing=0.25),
    ])  # fmt: skip
    expected = {
        "ours_differing_share": 0.0, "hivemind_differing_share": 0.375, "hivemind_worst_differing_share": 0.5,
        "hivemind_differing_share_without_failed": 0.125, "rounds": 6, "ours_kills": 2, "ours_fired": 2,
        "hivemind_kills": 2, "hivemind_fired": 2, "hivemind_false_success_share": 0.5, "ours_void_rounds": 1,
        "ours_split_rounds": 1, "ours_completed_rounds": 0, "ours_inputs_kept": True,
    }  # fmt: skip
    assert result.summary.items() >= expected.items()
    assert [row[:3] for row in result.rows] == [
        ["none, whole", "hivemind", 1],
        ["none, whole", "ours", 1],
        ["sent", "hivemind", 2],
        ["sent", "ours", 1],
        [SIGNED, "ours", 1],
    ]
    assert all(len(row) == len(result.columns) for row in result.rows)


def test_summary_leaves_out_a_kill_that_did_not_fire_and_calls_nothing_measured_nothing() -> None:
    late = Kill(slot=0, event="sent", share=1.0)
    unfired = Round(number=1, kind="whole", kill=late, fired={})
    outcomes = [outcome("ours", late, attempts=2), outcome("hivemind", late, played=unfired, differing=0.5)]
    result = allreduce_kill.to_result(outcomes)
    assert (result.summary["ours_fired"], result.summary["hivemind_fired"], result.summary["hivemind_kills"]) == (
        1,
        0,
        1,
    )
    assert result.summary["hivemind_differing_share"] is result.summary["hivemind_worst_differing_share"] is None
    assert [row[:2] for row in result.rows] == [["sent", "ours"]]
