from __future__ import annotations

import pytest

from peers.chaos.figures import StepClosing
from peers.chaos.invariants.check import check
from peers.chaos.invariants.evidence import Evidence
from peers.chaos.invariants.findings import Limits
from peers.chaos.scenario import Scenario, parse_scenario
from peers.chaos.verdict import Judged, _broken, _not_reached, compare, document, lines


def test_an_invariant_that_broke_is_told_in_words() -> None:
    scenario = parse_scenario({"name": "a", "proves": "b", "until": {"minutes": 1}}, "a.toml")
    problems = ("I3 step 4: sums differ", "I3: nothing to look at", "host-0 ended, and nobody had struck it")
    told = lines(Judged(scenario, "processes", {}, None, (), (), (), problems, interrupted=False))
    assert [line for line in told if line.startswith("BROKEN: ")] == [f"BROKEN: {problem}" for problem in problems]
    (meaning,) = (line for line in told if line.startswith("I3: "))
    assert len(meaning) > 20
    assert told[-1] == "a: broken"


def test_an_interrupted_play_is_judged_by_what_must_not_be_and_says_what_was_to_come() -> None:
    bars = {"at_least": {"steps": 20}, "at_most": {"lost": 0, "max_gap_s": 30}}
    expect = {**bars, "happened": {"CutOff": 1}, "looked_at": ["I14"]}
    scenario = parse_scenario({"name": "a", "proves": "b", "until": {"minutes": 1}, "expect": expect}, "a.toml")
    report, told = check(Evidence((), ()), Limits()), {"steps": 6, "lost": 1, "max_gap_s": None}
    assert "max_gap_s is not measured, at most 30 was expected" in _not_reached(scenario, report, told, {})
    assert _broken(scenario, report, told) == ["lost is 1, at most 0 was expected"]
    assert len(_not_reached(scenario, report, told, {})) > 3
    cut = Judged(scenario, "processes", {}, None, (), (), (), (), interrupted=True, to_come="dead to strike")
    said = lines(cut)
    assert any(line.startswith("interrupted before") and "dead to strike" in line for line in said)
    assert not any(line.startswith("BROKEN") for line in said)
    assert (said[-1], document(cut)["to_come"]) == ("a: interrupted", "dead to strike")


def _closed(scenario: Scenario, tokens: int) -> Judged:
    closed = tuple(StepClosing(step, 10.0 + 2 * step, tokens, 1.0) for step in range(1, 5))
    return Judged(scenario, "processes", {}, None, (), (), closed, (), interrupted=False)


@pytest.mark.parametrize(("tokens", "kept"), [(300, True), (240, False)])
def test_play_is_compared_by_tokens_a_second_behind_the_first_step(tokens: int, kept: bool) -> None:
    keys = {"compare": {"name": "other", "manifest": {"speed": {"mode": "sync"}}, "at_least": 1.5}}
    scenario = parse_scenario({"name": "s", "proves": "that", "until": {"steps": 4}, **keys}, "here")
    other = scenario.compared()
    assert other is not None
    both = compare(_closed(scenario, tokens), _closed(other, 200))
    assert both.compared == {"s": tokens / 2, "other": 100.0, "times": tokens / 200}
    assert (both.verdict == "kept") is kept
    assert any(line.split() == ["times", f"{tokens / 200:g}"] for line in lines(both))


def test_what_was_wrong_with_the_other_play_is_a_problem() -> None:
    keys = {"compare": {"name": "other", "manifest": {}}}
    scenario = parse_scenario({"name": "s", "proves": "that", "until": {"steps": 4}, **keys}, "here")
    other = Judged(scenario.compared() or scenario, "processes", {}, None, (), (), (), ("it broke",), interrupted=False)
    both = compare(_closed(scenario, 1), other)
    assert both.problems == ("other: it broke",)
    assert both.compared["times"] is None
