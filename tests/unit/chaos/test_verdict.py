from __future__ import annotations

from peers.chaos.invariants.check import check
from peers.chaos.invariants.evidence import Evidence
from peers.chaos.invariants.findings import Limits
from peers.chaos.scenario import parse_scenario
from peers.chaos.verdict import Judged, _broken, _not_reached, document, lines


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
