from __future__ import annotations

from peers.chaos.scenario import parse_scenario
from peers.chaos.verdict import Judged, lines


def test_an_invariant_that_broke_is_told_in_words() -> None:
    scenario = parse_scenario({"name": "a", "proves": "b", "until": {"minutes": 1}}, "a.toml")
    problems = ("I3 step 4: sums differ", "I3: nothing to look at", "host-0 ended, and nobody had struck it")
    told = lines(Judged(scenario, "processes", {}, None, (), (), (), problems, interrupted=False))
    assert [line for line in told if line.startswith("BROKEN: ")] == [f"BROKEN: {problem}" for problem in problems]
    (meaning,) = (line for line in told if line.startswith("I3: "))
    assert len(meaning) > 20
    assert told[-1] == "a: broken"
