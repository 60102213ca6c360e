"""What the comparison tells: equal sides, weights, events, counts; and that the stories are those there must be."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.golden.__main__ import CannotCompare, base_checkout
from tests.golden.compare import Report, Side, compare, read_side, table
from tests.golden.expected import Expected
from tests.golden.names import StrategyName, faults
from tests.golden.stories import STORIES, links, shape_of

HERE = Path(__file__).parent


def run(**changed: Any) -> dict[str, Any]:
    """What was recorded of one story with one seed."""
    closed = {"t": 2.0, "kind": "StepClosed", "step": 1, "loss": 5.5}
    usage = {"t": 2.5, "kind": "LinkUsage", "step": 1, "bytes_sent": 100}
    fields = {
        "story": "sync",
        "seed": 0,
        "digests": {"host-0": ["stage-0", 1, "aa"], "host-1": None},
        "events": {"host-0": [closed, usage], "host-1": [{"t": 1.0, "kind": "PeerReady", "step": 0}]},
        "faults": [["kill", ["host-1"]]],
        "missing": [],
        "counts": {"StepClosed": 1, "asks step/1/apply": 4},
        "error": "",
    }
    return copy.deepcopy(fields | changed)


def side(one: dict[str, Any], **more: Any) -> Side:
    """A side that lived through one story."""
    fields = {"sweeps": {"private events: moments": 200}, "tests": {"test_one": 2, "test_two": 1}}
    return Side({("sync", 0): one}, **(fields | more))


def told(ours: dict[str, Any], *expected: Expected, **more: Any) -> list[str]:
    """Every difference from :func:`run`."""
    return compare(side(run()), side(ours, **more), expected).differences


def test_compare_of_equal_sides_tells_how_much_was_compared() -> None:
    report = compare(side(run()), side(run()))
    assert report.differences == []
    assert table(report.rows).splitlines()[1].split() == ["sync", "1", "of", "1", "3", "1", "1"]


def test_compare_of_other_weights_fails_whatever_is_expected() -> None:
    ours = run(digests={"host-0": ["stage-0", 1, "bb"], "host-1": None})
    (difference,) = told(ours, Expected("events", "*", "*", "all"), Expected("counts", "*", "*", "all"))
    assert difference.startswith("sync, seed 0: weights of host-0 differ")


def test_compare_of_another_event_tells_the_earliest_with_both_lines() -> None:
    ours = run()
    ours["events"]["host-0"][0]["loss"] = 5.25
    ours["events"]["host-1"][0]["step"] = 7
    (difference,) = told(ours)
    first, base, this, hint, key = difference.splitlines()
    assert first == "sync, seed 0: event 0 of host-1 differs, and 1 other peers"
    assert base == '  base: {"t":1.0,"kind":"PeerReady","step":0}'
    assert this == '  this: {"t":1.0,"kind":"PeerReady","step":7}'
    assert "tests/golden/expected.py" in hint
    assert key == "    step: 0 → 7"


def test_compare_of_a_shorter_sequence_tells_what_is_missing() -> None:
    ours = run()
    del ours["events"]["host-1"][0]
    assert "  this: (nothing more)" in told(ours)[0].splitlines()


def test_compare_leaves_out_bytes_on_the_wire_and_events_that_are_expected() -> None:
    ours = run()
    ours["events"]["host-0"][1]["bytes_sent"] = 90
    assert told(ours) == []
    ours["events"]["host-0"][0]["loss"] = 5.25
    assert told(ours, Expected("events", "sy*", "StepClosed", "abc: rounded")) == []
    assert told(ours, Expected("events", "kill-*", "StepClosed", "abc: rounded"))


def test_compare_of_fewer_messages_moments_or_tests_tells_which() -> None:
    fewer = run(counts={"StepClosed": 1, "asks step/1/apply": 3})
    assert told(fewer) == ["sync, seed 0: asks step/1/apply: 4 → 3"]
    assert told(fewer, Expected("counts", "sync", "asks step/*", "abc: one message for two")) == []
    moments = {"private events: moments": 199}
    assert told(run(), sweeps=moments) == ["sweeps: private events: moments: 200 → 199"]
    lost = {"test_one": 1, "test_two": 1}
    assert told(run(), tests=lost) == ["tests: test_one: 2 → 1"]
    assert told(run(), Expected("counts", "tests", "test_one", "abc: merged"), tests=lost) == []


def test_compare_of_a_lost_test_tells_it_however_many_are_new() -> None:
    assert told(run(), tests={"test_renamed": 5, "test_two": 1}) == ["tests: test_one: 2 → 0"]


def test_compare_of_more_messages_tells_which() -> None:
    more = run(counts={"StepClosed": 1, "asks step/1/apply": 8, "asks new/1/method": 1})
    assert told(more) == ["sync, seed 0: asks new/1/method: 0 → 1", "sync, seed 0: asks step/1/apply: 4 → 8"]
    assert told(more, Expected("counts", "sync", "asks *", "abc: asked again")) == []


def test_compare_of_more_moments_and_tests_passes() -> None:
    tests = {"test_one": 3, "test_two": 1, "test_new": 1}
    assert told(run(), sweeps={"private events: moments": 201, "hosted": 1}, tests=tests) == []


def test_compare_of_a_story_in_which_nobody_trains_fails() -> None:
    idle = run(digests={"host-0": None})
    assert compare(side(idle), side(idle)).differences == [
        "sync, seed 0: neither side has weights that could be compared"
    ]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"faults": []}, "other faults fired"),
        ({"error": "Traceback\nStalled: nothing is ready"}, "this checkout failed: Stalled: nothing is ready"),
        ({"missing": ["never seen: PeerLost"]}, "this checkout did not do what the story tells: never seen: PeerLost"),
    ],
)
def test_compare_of_a_story_that_was_not_told_fails(changed: dict[str, Any], what: str) -> None:
    assert what in told(run(**changed))[0]


def test_compare_of_a_story_that_only_one_side_has_fails() -> None:
    found = compare(Side({}, {}, {}), side(run()))
    assert isinstance(found, Report)
    assert found.differences == ["sync, seed 0: was not run by both"]


def test_side_that_broke_off_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(json.dumps(run()) + "\n")
    with pytest.raises(ValueError, match="ends before its last line"):
        read_side(tmp_path / "out")


def test_base_that_is_not_in_the_clone_is_told_with_the_next_command(tmp_path: Path) -> None:
    with (
        pytest.raises(CannotCompare, match=r"no clone of the repository.*git clone"),
        base_checkout("fda2cc9", tmp_path / "base", tmp_path),
    ):
        pass
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with (
        pytest.raises(CannotCompare, match=r"does not have the commit; next: git fetch"),
        base_checkout("fda2cc9", tmp_path / "base", tmp_path),
    ):
        pass


# --- the stories -------------------------------------------------------------------------------------------------


def test_stories_have_every_strategy_and_every_fault_that_takes_a_peer_away() -> None:
    shapes = [shape_of(story, 0).get("averaging", {}) for story in STORIES.values()]
    assert {shape["strategy"] for shape in shapes if "strategy" in shape} == set(get_args(StrategyName))
    inflicted = {type(strike.fault) for story in STORIES.values() for strike in story.strikes}
    assert inflicted >= {faults.Kill, faults.Pause, faults.Restart, faults.Partition, faults.Twin}


def test_links_have_latency_alone_and_each_seed_has_its_own() -> None:
    described = links(1)
    shapes = [described.default, *(shape for _, _, shape in described.rules)]
    assert all((s.jitter_s, s.loss, s.reset, s.bytes_per_s) == (0, 0, 0, float("inf")) for s in shapes)
    assert links(1) == described != links(2)


def test_both_lists_of_names_have_the_same_names() -> None:
    def names(file: str) -> set[str]:
        found = set()
        for node in ast.parse((HERE / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                found |= {alias.asname for alias in node.names if alias.asname}
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {ast.unparse(target) for target in node.targets}
        return found

    assert names("names.py") == names("names_of_base.txt")
