"""What the comparison tells: equal sides, weights, events, counts; what it keeps; that the stories are those there must
be."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.golden import __main__ as golden
from tests.golden import lives
from tests.golden.__main__ import CannotCompare, commit_of
from tests.golden.compare import Runs, compare, table
from tests.golden.expected import EXPECTED, Expected
from tests.golden.lives import KEPT, Lives, default_place, key
from tests.golden.names import StrategyName, faults
from tests.swarms.stories import STORIES, links, shape_of


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


def side(one: dict[str, Any]) -> Runs:
    """A side that lived through one story."""
    return {("sync", 0): one}


def told(ours: dict[str, Any], *expected: Expected) -> list[str]:
    """Every difference from :func:`run`."""
    return compare(side(run()), side(ours), expected).differences


def test_compare_of_equal_sides_tells_how_much_was_compared() -> None:
    report = compare(side(run()), side(run()))
    assert report.differences == []
    assert table(report.rows).splitlines()[1].split() == ["sync", "1", "of", "1", "3", "1", "1"]


def test_compare_of_other_weights_fails_but_for_the_parts_that_are_named() -> None:
    ours = run(digests={"host-0": ["stage-0", 1, "bb"], "host-1": None})
    ours["events"]["host-0"][0]["loss"] = 5.25
    weights, _ = told(ours)
    assert weights.startswith("sync, seed 0: weights of host-0 differ")
    assert told(ours, Expected("weights", "sync", "stage-0", "another rounding")) == []
    assert told(ours, Expected("weights", "sync", "ends", "another rounding"))[0] == weights


def test_line_without_a_difference_is_an_error_where_its_story_was_played() -> None:
    lines = [Expected("weights", "sync", "*", "abc"), Expected("events", "s*", "StepClosed", "abc")]
    needless = [
        f"expected.py: nothing differs in {line.what} of {line.name} in {line.story}: take this line out"
        for line in lines
    ]
    assert told(run(), *lines, Expected("counts", "kill-host", "*", "abc")) == needless


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


def test_compare_of_fewer_messages_tells_which() -> None:
    fewer = run(counts={"StepClosed": 1, "asks step/1/apply": 3})
    assert told(fewer) == ["sync, seed 0: asks step/1/apply: 4 → 3"]
    assert told(fewer, Expected("counts", "sync", "asks step/*", "abc: one message for two")) == []


def test_compare_of_more_messages_tells_which() -> None:
    more = run(counts={"StepClosed": 1, "asks step/1/apply": 8, "asks new/1/method": 1})
    assert told(more) == ["sync, seed 0: asks new/1/method: 0 → 1", "sync, seed 0: asks step/1/apply: 4 → 8"]
    assert told(more, Expected("counts", "sync", "asks *", "abc: asked again")) == []


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
    assert compare({}, side(run())).differences == ["sync, seed 0: was not run by both"]


def test_base_that_is_not_in_the_clone_is_told_with_the_next_command(tmp_path: Path) -> None:
    with pytest.raises(CannotCompare, match=r"no clone of the repository.*git clone"):
        commit_of("fda2cc9", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(CannotCompare, match=r"does not have the commit; next: git fetch"):
        commit_of("fda2cc9", tmp_path)


# --- the lives that are kept -------------------------------------------------------------------------------------


def test_golden_without_time_names_what_was_not_run_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def one_side_of_two(commit: str, runs: list[tuple[str, int]], place: Path) -> tuple[Runs, Runs]:
        asked.append(runs)
        return side(run()), {}

    monkeypatch.setattr(golden, "both_sides", one_side_of_two)
    monkeypatch.setattr(golden, "commit_of", lambda revision, root: "c0ffee")
    monkeypatch.delenv(golden.UNTIL, raising=False)
    monkeypatch.setenv(golden.OUTCOMES, str(tmp_path / "outcomes"))
    for seed in ("a", "a", "b"):
        assert golden.main(["--seeds", "2", "--minutes", "0.001", "--draw", seed]) == 0
        assert "not run: out of time: " in capsys.readouterr().err
    assert asked[0] == asked[1] != asked[2]
    collected = json.loads((tmp_path / "outcomes").read_text().splitlines()[0])["collected"]
    assert len(collected) == 2 * len(STORIES)
    assert sorted(asked[0]) == sorted((story, number) for story in STORIES for number in range(2))


def test_lives_are_kept_by_story_and_seed(tmp_path: Path) -> None:
    kept = Lives(tmp_path / "caches", "base")
    assert kept.find("sync", 0) is None
    kept.keep([run(), run(story="local", seed=1)])
    assert kept.find("sync", 0) == run()
    assert kept.find("local", 1) == run(story="local", seed=1)
    assert kept.find("local", 0) is None is Lives(tmp_path / "caches", "another").find("sync", 0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "of another story", "no file"])
def test_life_that_is_not_whole_is_not_there_and_is_made_anew(tmp_path: Path, damage: str) -> None:
    kept = Lives(tmp_path, "base")
    kept.keep([run(), run(story="local")])
    path = tmp_path / "base" / "sync-0.json.gz"
    whole = path.read_bytes()
    if damage == "no file":
        path.unlink()
        path.mkdir()
    else:
        other = (tmp_path / "base" / "local-0.json.gz").read_bytes()
        flipped = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
        path.write_bytes({"cut": whole[:-9], "flipped": flipped, "empty": b""}.get(damage, other))
    assert kept.find("sync", 0) is None
    if damage != "no file":
        kept.keep([run()])
        assert kept.find("sync", 0) == run()


def test_lives_of_few_bases_are_kept_and_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "of somebody else").mkdir()
    keys = [key(letter * 40, []) for letter in "0123456789abcdef"[: KEPT + 2]]
    for each in keys:
        Lives(tmp_path, each).keep([run()])
    assert {path.name for path in tmp_path.iterdir()} == {"of somebody else", *keys[-KEPT:]}
    assert Lives(tmp_path, keys[-1]).find("sync", 0)
    (tmp_path / "file").touch()
    Lives(tmp_path / "file", "base").keep([run()])


def test_key_is_another_for_another_commit_definition_processor_or_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, cpu = tmp_path / "stories.py", tmp_path / "cpuinfo"
    story.write_text("one")
    cpu.write_text("flags : avx2\n")
    monkeypatch.setattr(lives, "CPU", cpu)
    found = [key("a" * 40, [story]), key("b" * 40, [story])]
    assert key("a" * 40, [story]) == found[0]
    story.write_text("two")
    found.append(key("a" * 40, [story]))
    cpu.write_text("flags : avx2 avx512f\n")
    found.append(key("a" * 40, [story]))
    monkeypatch.setattr(lives.metadata, "distributions", list)
    found.append(key("a" * 40, [story]))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    found.append(key("a" * 40, [story]))
    assert len(set(found)) == len(found)


def test_lives_are_below_the_users_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_place() == Path("/caches/swarm-tests/golden")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_place() == Path("/home/me/.cache/swarm-tests/golden")


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


def test_expected_lines_name_stories_that_there_are() -> None:
    assert [line for line in EXPECTED if not any(line.is_of(story) for story in STORIES)] == []
