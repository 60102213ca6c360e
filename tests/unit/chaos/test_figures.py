"""Figures, lives and the picture, over a run of two replicas that was written by hand: one is killed and comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from peers.chaos.figures import FIGURES, Played, _of_relayed, by_kind, closed_by_minority, closings, figures, missed
from peers.chaos.invariants.check import Report, check
from peers.chaos.invariants.evidence import Evidence, Fact
from peers.chaos.invariants.findings import Limits
from peers.chaos.lives import PeerLifetime, Player, Struck, lives
from peers.chaos.picture import picture_svg
from swarm.ids import PeerId

PLAYERS = (Player("host-0-0", "A", "stage", "eu"), Player("host-0-1", "B", "stage", "us"))
KILL = Struck(10.5, "kill", "kill-1", ("host-0-1",))
BACK = Struck(13.0, "restart", "back:kill-1:host-0-1", ("host-0-1",), back=True)


def _fact(peer: str, wall: float, kind: str, /, **fields: Any) -> Fact:
    return Fact(PeerId(peer), 0, wall, kind, fields)


def _ready(peer: str, wall: float, part: str = "stage-0") -> Fact:
    return _fact(peer, wall, "PeerReady", part=part, step=0, seconds=1.0, again=False, reason="")


def _part(peer: str, wall: float, part: str) -> Fact:
    return _fact(peer, wall, "PartAssigned", part=part, reason="")


def _journey(step: int, wall: float, route: str) -> Fact:
    return _fact("T", wall, "JourneyCompleted", step=step, microbatch=("T", "s", 0, int(10 * wall)), route=tuple(route))


def _closed(peer: str, step: int, wall: float, record: str = "") -> Fact:
    numbers = {"loss": 6.0 - step / 10, "tokens": 100, "microbatches": 1, "grad_norm": 1.0, "clip": 1.0, "lr": 0.1}
    return _fact(peer, wall, "StepClosed", step=step, record=record or f"r{step}", digests={}, **numbers)


def _took_part(step: int, wall: float, live: int, there: int) -> Fact:
    return _fact("A", wall, "Participation", step=step, part="stage-0", live=live, participating=there)


FACTS = (
    *(_fact(peer, 1.0, "PeerStarted", seconds=1.0) for peer in "AB"),
    *(_ready(peer, 2.0) for peer in "AB"),
    *(_closed("A", step, 2.0 + 2 * step) for step in range(1, 9)),
    _took_part(4, 10.0, 2, 2),
    _took_part(5, 12.0, 2, 1),
    _took_part(6, 14.0, 1, 1),
    _fact("B", 14.0, "PeerStarted", seconds=1.0),
    _ready("B", 16.0),
)


def _lives(strikes: tuple[Struck, ...] = (KILL, BACK), facts: tuple[Fact, ...] = FACTS) -> tuple[PeerLifetime, ...]:
    return lives(Evidence(facts, ()), PLAYERS, strikes, {}, 20.0)


def _spans(lifetime: PeerLifetime) -> list[tuple[str, float, float]]:
    return [(span.state, span.from_s, span.to_s) for span in lifetime.spans]


def _figures(strikes: tuple[Struck, ...] = (KILL, BACK), facts: tuple[Fact, ...] = FACTS) -> dict[str, Any]:
    evidence = Evidence(facts, ())
    life = lives(evidence, PLAYERS, strikes, {}, 20.0)
    return figures(Played(evidence=evidence, report=check(evidence), strikes=strikes, lives=life, stages=1))


def test_every_figure_has_a_meaning() -> None:
    assert set(_figures()) == set(FIGURES)


def test_life_of_who_is_killed_and_comes_back() -> None:
    calm, struck = _lives()
    assert _spans(calm) == [
        ("joining", 0.0, 2.0),
        ("ready", 2.0, 20.0),
    ]
    assert _spans(struck) == [
        ("joining", 0.0, 2.0),
        ("ready", 2.0, 10.5),
        ("joining", 13.0, 16.0),
        ("ready", 16.0, 20.0),
    ]


def test_life_of_who_was_left_behind_after_a_pause_that_ends_with_another_strike() -> None:
    facts = (*FACTS[:4], _fact("B", 9.0, "CutOff", step=5, reason=""), _ready("B", 12.0))
    strikes = (Struck(5.0, "partition", "x", ("host-0-1",)), Struck(8.0, "heal", "y", ()))
    _, struck = _lives(strikes, facts)
    assert _spans(struck)[2:] == [
        ("cut off", 5.0, 8.0),
        ("ready", 8.0, 9.0),
        ("cut off", 9.0, 12.0),
        ("ready", 12.0, 20.0),
    ]


@pytest.mark.parametrize(
    ("kind", "ends", "over"),
    [("disconnect", "heal", False), ("disconnect", "reconnect", True), ("partition", "heal", True)],
)
def test_life_of_who_is_cut_off_goes_on_with_what_ends_that(kind: str, ends: str, over: bool) -> None:
    strikes = (Struck(5.0, kind, "x", ("host-0-1",)), Struck(8.0, ends, "y", ("host-0-1",)))
    _, struck = _lives(strikes, FACTS[:4])
    assert _spans(struck)[2:] == ([("cut off", 5.0, 8.0), ("ready", 8.0, 20.0)] if over else [("cut off", 5.0, 20.0)])


def test_an_end_that_was_only_seen_ends_a_life() -> None:
    (_, gone) = lives(Evidence(FACTS[:4], ()), PLAYERS, (), {"host-0-1": [7.0]}, 20.0)
    assert (gone.spans[-1].state, gone.spans[-1].to_s) == ("ready", 7.0)


def test_starved_stage_has_recovered_with_the_first_microbatch_of_who_moved_there() -> None:
    to = {"step": 5, "moves": {"A": "stage-1"}, "reasons": ()}
    moved = (_fact("A", 12.5, "HostsMoved", **to), _part("A", 12.5, "stage-1"))
    facts = (*FACTS[:2], _ready("A", 2.0), _ready("B", 2.0, "stage-1"), *FACTS[4:12], *moved)
    worked = _journey(5, 12.0, "AB"), _journey(6, 14.0, "CB"), _journey(6, 14.5, "CA"), _journey(7, 16.0, "CA")
    told = _figures((KILL,), (*facts, *worked))
    assert (told["moves"], told["recovered_s"], told["recovered_steps"]) == (1, 4.0, 1)
    idle = _figures((KILL,), (*facts, *worked[:2]))
    assert (idle["moves"], idle["recovered_s"], idle["recovered_steps"]) == (1, None, None)
    elsewhere = _figures((replace(KILL, peers=("host-0-0",)),), (*facts, *worked))
    assert (elsewhere["moves"], elsewhere["recovered_s"]) == (1, None)


def test_throughput_is_what_was_committed_beside_what_was_before_and_could_be() -> None:
    told = _figures()
    assert (told["steps"], told["seconds"], told["max_gap_s"]) == (8, 14.0, 2.0)
    assert (told["baseline_steps"], told["baseline_step_s"]) == (3, 2.0)
    assert told["baseline_tokens_per_s"] == told["tokens_per_s"] == 50.0
    assert told["throughput_retained_raw"] == 1.0
    # Two were there for 0.5 + 2 of the 8 seconds from the last calm step (10) to the last one (18), else one.
    assert told["capacity"] == pytest.approx((2.5 * 2 + 5.5) / 8 / 2, abs=1e-4)
    assert told["throughput_retained"] == pytest.approx(1 / told["capacity"], abs=1e-3)
    assert told["faults"] == 1
    assert told["faults_per_hour"] == pytest.approx(3600 / 7.5)


def _interleaved(quiet_s: float, tokens: dict[int, int]) -> dict[str, Any]:
    """Two stretches: a strike at 10.5 and another at 40.5, each back three seconds later; a step every two seconds."""
    strikes = tuple(
        replace(strike, wall=strike.wall + later, label=f"{strike.label}{later}")
        for later in (0, 30)
        for strike in (KILL, BACK)
    )
    facts = [*(_fact(peer, 1.0, "PeerStarted", seconds=1.0) for peer in "AB"), *(_ready(peer, 2.0) for peer in "AB")]
    for back in (14.0, 44.0):
        facts += [_fact("B", back, "PeerStarted", seconds=1.0), _ready("B", back + 2)]
    closed = [_closed("A", step, 2.0 + 2 * step) for step in range(1, 31)]
    facts += [replace(one, fields={**one.fields, "tokens": tokens.get(one.step, 100)}) for one in closed]
    evidence = Evidence(tuple(sorted(facts, key=lambda fact: fact.wall)), ())
    life = lives(evidence, PLAYERS, strikes, {}, 62.0)
    return figures(
        Played(
            evidence=evidence,
            report=check(evidence),
            strikes=strikes,
            lives=life,
            stages=1,
            ended=62.0,
            by_clock=True,
            quiet_s=quiet_s,
        )
    )


def test_throughput_is_compared_with_the_quiet_around_each_stretch() -> None:
    # Steps 5 to 7 (12 to 16 s) and 20 to 30 (42 to 62 s) are struck; 2 to 4 and 8 to 19 are quiet.
    told = _interleaved(20.0, {})
    assert (told["stretches"], told["baseline_steps"]) == (2, 15)
    assert told["throughput_retained_raw"] == 1.0
    assert told["faults_per_hour"] == pytest.approx(3600 * 2 / (5.5 + 21.5), abs=0.1)
    spread = told["throughput_retained_error"]
    # A machine that became half as fast in the middle of the play changes both sides, and the figure little.
    slower = _interleaved(20.0, dict.fromkeys(range(14, 31), 50))
    assert slower["throughput_retained_error"] is not None
    assert slower["baseline_tokens_per_s"] < told["baseline_tokens_per_s"]
    assert slower["throughput_retained_error"] != spread
    together = _interleaved(1e9, {})
    assert (together["stretches"], together["baseline_steps"]) == (1, 3)
    assert together["throughput_retained_error"] is None


def test_without_a_strike_or_a_baseline_nothing_is_made_up() -> None:
    assert _figures(())["throughput_retained"] is None
    early = Struck(4.5, "kill", "kill-1", ("host-0-1",))
    assert _figures((early,))["throughput_retained"] is None
    assert missed(_figures(()), {"throughput_retained": 0.5}, {}) == [
        "throughput_retained is not measured, at least 0.5 was expected"
    ]


def test_a_standstill_before_the_end_by_time_is_a_gap_and_takes_its_part_of_the_throughput() -> None:
    evidence = Evidence(FACTS, ())
    limits = Limits(gap_s=5.0, waited_until=34.0)
    told = check(evidence, limits)
    assert [str(one) for one in told.of("I13")] == ["I13 step 8: the last for 16.00 s"]
    assert not check(evidence, replace(limits, waited_until=20.0)).of("I13")
    by_clock = Played(evidence=evidence, report=told, strikes=(KILL,), lives=_lives(), stages=1, ended=34.0,
                      by_clock=True)  # fmt: skip
    assert figures(by_clock)["max_gap_s"] == 16.0
    assert figures(by_clock)["throughput_retained_raw"] == pytest.approx(1 / 3, abs=1e-4)
    none = figures(replace(by_clock, strikes=(replace(KILL, wall=18.5),)))
    assert none["throughput_retained_raw"] == 0.0
    assert figures(replace(by_clock, by_clock=False))["max_gap_s"] == 2.0


def test_what_is_given_up_while_all_leave_does_not_count() -> None:
    late = (
        _fact("A", 19.0, "LineageGivenUp", step=7, microbatches=1, reason=""),
        _fact("A", 11.5, "StepGivenUp", step=5, lost="stage-0"),
        _fact("A", 17.9, "StepGivenUp", step=8, lost="stage-0"),
    )
    evidence = Evidence((*FACTS, *late), ())
    report = Report(failures=(), looked={}, steps=0)
    played = Played(evidence=evidence, report=report, strikes=(KILL,), lives=_lives(), stages=1, ended=17.0)
    assert figures(played)["rewinds"] == 0
    assert figures(played)["steps_given_up"] == 1
    assert figures(replace(played, ended=20.0))["rewinds"] == 1


def test_bars_that_are_kept_are_not_told() -> None:
    told = _figures()
    assert missed(told, {"steps": 8, "faults": 1}, {"lost": 0}) == []
    assert missed(told, {"steps": 9}, {"max_gap_s": 1.0}) == [
        "steps is 8, at least 9 was expected",
        "max_gap_s is 2.0, at most 1 was expected",
    ]


def test_what_ends_a_fault_is_none() -> None:
    strikes = (KILL, BACK, Struck(11.0, "heal", "h", ()), Struck(12.0, "pause", "p", ("host-0-0",), 1.0))
    assert by_kind(strikes) == {"kill": 1, "pause": 1}


def test_picture_shows_everybody_and_is_xml() -> None:
    strikes = (KILL, BACK, Struck(17.0, "pause", "pause <1>", ("host-0-0",), 1.0))
    svg = picture_svg("a <title>", _lives(strikes), strikes, closings(Evidence(FACTS, ())))
    tree = ElementTree.fromstring(svg)
    words = {node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a <title>", "host-0-0", "host-0-1", "eu", "us", "ready", "loss (nats per token)"} <= words
    titles = {node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")}
    assert {"kill: kill-1", "kill"} <= titles, "a strike, and the legend"
    assert "joining, 3.0 s" in titles
    assert any("polyline" in node.tag for node in tree.iter())


class _Hashed:
    """A record of which only the hash is asked."""

    def __init__(self, name: str) -> None:
        self._name = name

    def hash(self) -> str:
        return self._name


def test_what_a_minority_closes_alone_and_stays_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evidence, "records", {1: _Hashed("r1"), 2: _Hashed("r2"), 3: _Hashed("r3")})
    cut = Struck(5.0, "partition", "cut", ("host-0-1",), 10.0)
    both = (_closed("A", 1, 4.9), _closed("B", 1, 6.5), _closed("A", 2, 7.0))
    alone = (_closed("B", 2, 8.0, "other"), _closed("B", 3, 9.0), _closed("A", 3, 16.0))

    def alone_of(*facts: Fact) -> int:
        evidence, report = Evidence(facts, ()), Report(failures=(), looked={}, steps=0)
        played = Played(evidence=evidence, report=report, strikes=(cut,), lives=_lives(), stages=1)
        return closed_by_minority(played)

    assert alone_of(*both) == 0
    assert alone_of(*both, *alone[:1]) == 0, "it did not stay"
    assert alone_of(*both, *alone) == 1


def test_holes_are_those_between_peers_that_nobody_can_call() -> None:
    def reached(peer: str, how: str) -> Fact:
        return _fact(peer, 3.0, "Reachability", how=how, detail="", addresses=[])

    def direct(peer: str, target: str) -> Fact:
        return _fact(peer, 4.0, "LinkUpgraded", target=target, address="")

    def told(*facts: Fact) -> tuple[object, object]:
        found = _of_relayed(Evidence((*map(reached, "ABC", ("relayed", "relayed", "direct")), *facts), ()))
        return found["relayed"], found["punched"]

    assert told() == (2, 0)
    assert told(direct("A", "C"), direct("C", "A")) == (2, 0), "who can be called is called without a hole"
    assert told(direct("A", "B"), direct("A", "B")) == (2, 1)
    assert told(direct("A", "B"), direct("B", "A")) == (2, 2)
