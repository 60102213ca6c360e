"""A play in a world that is made up: peers that close a step each time somebody looks at the clock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.chaos import play
from peers.chaos.cast import SwarmSpec, cast_of
from peers.chaos.faults import CannotInflict, Fault, Kill, Restart, Strangers, Twin
from peers.chaos.injector import FaultInjector
from peers.chaos.plan import FaultPlan, Fired, Strike
from peers.chaos.play import Play, PlayOutcome
from peers.chaos.scenario import Scenario, parse_scenario
from peers.chaos.schedule import Draw
from peers.chaos.strikes import NEVER, planned
from peers.chaos.timeline import Timeline
from peers.chaos.watch import RunWatch
from peers.console.interrupt import Interrupted
from swarm.errors import ConfigError
from tests.harness.rigs.chaos import MadeUpWorld

SCENARIO: dict[str, Any] = {
    "name": "made-up",
    "proves": "that it is played as it is written",
    "baseline_steps": 2,
    "swarm": {"stages": 1, "replicas": 2, "trainers": 1},
    "until": {"steps": 40},
}
KILL = {"do": "kill", "peers": ["host-0-1"], "on": {"event": "StepClosed", "where": {"step": 5}}}


class Looks:
    """A clock that goes on when the play waits, which costs no time here."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, played: Play) -> None:
        self.now += play.LOOK_S


@pytest.fixture(autouse=True)
def _looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks()
    monkeypatch.setattr(play, "time", looks)
    monkeypatch.setattr(Play, "_wait", lambda played: looks.wait(played))


def _scenario(**keys: Any) -> Scenario:
    return parse_scenario({**SCENARIO, **keys}, "a.toml")


def _cast(scenario: Scenario) -> SwarmSpec:
    return cast_of(scenario, Path("/run.toml"), {"sample": Path("/s"), "trainer-0": Path("/t")})


def _injector(world: MadeUpWorld) -> tuple[FaultPlan, FaultInjector]:
    scenario, plan = _scenario(), FaultPlan(world=world)
    timeline = Timeline(lambda line: None, str)
    return plan, FaultInjector(scenario, _cast(scenario), world, plan, RunWatch(world.stamps), timeline)


def _play(world: MadeUpWorld, scenario: Scenario, draws: Sequence[Draw] = ()) -> tuple[PlayOutcome, list[str]]:
    cast = _cast(scenario)
    lines: list[str] = []
    played = Play(scenario, cast, world, planned(scenario, cast), draws)
    with world:
        played.run(lines.append)
    return played.outcome, lines


def test_who_is_killed_is_brought_back_and_told(tmp_path: Path) -> None:
    world = MadeUpWorld(tmp_path)
    outcome, lines = _play(world, _scenario(fault=[{**KILL, "back_s": 0.5, "keep_disk": False}]))
    assert outcome.problems == []
    assert [fault for _, fault in world.done] == [Kill(("host-0-1",)), Restart("host-0-1", keep_disk=False)]
    assert world.done[0][0] == 5
    assert sum("▲" in line for line in lines) == 2
    assert any("kill host-0-1" in line for line in lines)


def test_each_peer_of_a_run_that_admits_by_invite_gets_one_of_its_own(tmp_path: Path) -> None:
    world, manifest = MadeUpWorld(tmp_path), {"admission": {"mode": "token"}}
    outcome, _ = _play(world, _scenario(swarm={**SCENARIO["swarm"], "manifest": manifest}))
    assert outcome.problems == []
    assert world.invited == {
        "host-0-0": "swarm1:x-host-0-0-stage",
        "host-0-1": "swarm1:x-host-0-1-stage",
        "trainer-0": "swarm1:x-trainer-0-trainer",
    }


@pytest.mark.parametrize(
    ("mode", "fault", "cause"),
    [
        ("organisation", [], "nobody has an id before it is started"),
        ("token", [{"do": "joiner_storm", "count": 2, "at_s": 1}], "an invite admits one"),
    ],
)
def test_who_could_have_no_invite_is_in_no_scenario(mode: str, fault: list[dict[str, Any]], cause: str) -> None:
    swarm = {**SCENARIO["swarm"], "manifest": {"admission": {"mode": mode}}}
    scenario = _scenario(swarm=swarm, fault=fault)
    with pytest.raises(ConfigError, match=cause):
        _cast(scenario)


def test_a_fault_that_does_not_happen_is_a_problem(tmp_path: Path) -> None:
    never = {**KILL, "label": "never", "on": {"event": "CutOff"}}
    outcome, _ = _play(MadeUpWorld(tmp_path), _scenario(fault=[never]))
    assert "never: kill did not fire; 0 of 1 events seen" in outcome.problems[0]


def test_a_peer_that_ends_and_that_nobody_struck_is_a_problem_with_its_last_words(tmp_path: Path) -> None:
    world = MadeUpWorld(tmp_path, {4: lambda world: world.living.discard("host-0-0")}, steps=0)
    outcome, _ = _play(world, _scenario(until={"minutes": 60}))
    assert "host-0-0 ended with -9, which no strike explains" in outcome.problems[0]
    assert "the last word of host-0-0" in outcome.problems[0]
    assert [(end.name, end.struck) for end in outcome.ends] == [("host-0-0", False)]


def test_a_founder_that_ends_at_once_is_a_problem(tmp_path: Path) -> None:
    world = MadeUpWorld(tmp_path)
    world.start = lambda spec: None  # type: ignore[method-assign]
    outcome, _ = _play(world, _scenario())
    assert "bootstrap ended before it founded the run" in outcome.problems[0]


def test_draws_begin_after_the_baseline_and_spare_the_last_of_a_part(tmp_path: Path) -> None:
    world = MadeUpWorld(tmp_path, steps=0)
    schedule = {"per_hour": 100, "kinds": {"kill": 1}, "among": ["host-*", "trainer-*"]}
    draws = [Draw(0.1, "kill", 0.5, 0.5), Draw(0.2, "kill", 0.5, 0.5), Draw(0.3, "kill", 0.9, 0.5)]
    outcome, _ = _play(world, _scenario(schedule=schedule, until={"minutes": 0.2}), draws)
    assert outcome.problems == []
    kills = [(step, fault.victims) for step, fault in world.done if isinstance(fault, Kill)]
    backs = [step for step, fault in world.done if isinstance(fault, Restart)]
    assert len(kills) == len(backs) == 3
    assert kills[0][0] >= 3
    assert all(victims in (("host-0-0",), ("host-0-1",)) for _, victims in kills)
    assert all(back <= step for back, (step, _) in zip(backs, kills[1:], strict=False)), "one replica is there always"


def test_a_draw_that_hits_nobody_is_drawn_again_and_counted_once(tmp_path: Path) -> None:
    class Late(MadeUpWorld):
        """The first who is struck had just ended, and nobody had noticed."""

        def inflict(self, fault: Fault) -> Iterable[str]:
            if not self.done:
                self.done.append((self.step, fault))
                raise CannotInflict("does not run now")
            return super().inflict(fault)

    world = Late(tmp_path, steps=0)
    schedule = {"per_hour": 100, "kinds": {"kill": 1}}
    outcome, lines = _play(world, _scenario(schedule=schedule, until={"minutes": 0.1}), [Draw(0.1, "kill", 0.5, 0.5)])
    assert outcome.problems == []
    assert [type(fault) for _, fault in world.done] == [Kill, Kill, Restart]
    assert sum("▲ kill" in line for line in lines) == 1


def test_who_crashes_just_before_a_strike_on_it_is_not_excused(tmp_path: Path) -> None:
    class Exact(MadeUpWorld):
        """Hits nobody who has ended."""

        def inflict(self, fault: Fault) -> Iterable[str]:
            if not set(fault.victims) & self.living:
                raise CannotInflict("does not run now")
            return super().inflict(fault)

    world = Exact(tmp_path, {3: lambda world: world.living.discard("host-0-1")}, steps=0)
    kill = {**KILL, "on": {"event": "StepClosed", "where": {"step": 4}}}
    outcome, _ = _play(world, _scenario(fault=[kill], until={"minutes": 60}))
    assert [(end.name, end.struck) for end in outcome.ends] == [("host-0-1", False)]
    assert any("which no strike explains" in problem for problem in outcome.problems)


def test_a_schedule_that_strikes_nobody_is_a_problem(tmp_path: Path) -> None:
    schedule = {"per_hour": 100, "kinds": {"kill": 1}, "among": ["trainer-0"]}
    outcome, _ = _play(MadeUpWorld(tmp_path), _scenario(schedule=schedule), [Draw(0.1, "kill", 0.5, 0.5)])
    assert outcome.problems == ["nothing that was to be drawn has struck: 1 draws are left"]


@pytest.mark.parametrize("until", [{"minutes": 0.01}, {"steps": 40}], ids=lambda until: next(iter(until)))
def test_departures_are_not_what_happened(tmp_path: Path, until: dict[str, float]) -> None:
    class Talkative(MadeUpWorld):
        """Those who leave are missed by the others."""

        def stop(self, names: Iterable[str], grace_s: float) -> None:
            self.say("host-0-0", "PeerLost", peer="x", reason="")
            super().stop(names, grace_s)

    outcome, _ = _play(Talkative(tmp_path, steps=40 if "steps" in until else 0), _scenario(until=until))
    assert outcome.problems == []
    assert outcome.happened["StepClosed"] > 1
    assert outcome.happened["PeerLost"] == 0
    assert outcome.by_clock == ("minutes" in until)


def test_a_play_by_the_clock_goes_on_until_everything_has_happened(tmp_path: Path) -> None:
    late = {**KILL, "on": {"event": "StepClosed", "where": {"step": 60}}}
    world = MadeUpWorld(tmp_path, steps=0)
    outcome, _ = _play(world, _scenario(fault=[late], until={"minutes": 0.001}))
    assert outcome.problems == []
    assert world.step >= 62


@pytest.mark.parametrize(
    ("kind", "expect"), [("steps", {"at_least": {"steps": 40}}), ("CutOff", {"happened": {"CutOff": 1}})]
)
def test_a_play_by_the_clock_goes_on_until_what_it_expects_has_happened(
    tmp_path: Path, kind: str, expect: dict[str, Any]
) -> None:
    happens = {40: lambda world: world.say("host-0-1", "CutOff", reason="it was cut off")} if kind == "CutOff" else {}
    world = MadeUpWorld(tmp_path, happens, steps=0)
    outcome, _ = _play(world, _scenario(until={"minutes": 0.001}, expect=expect))
    assert (outcome.problems, outcome.happened["CutOff"]) == ([], len(happens))
    assert 40 <= world.step < 60


def test_a_run_that_stands_still_is_given_up(tmp_path: Path) -> None:
    world = MadeUpWorld(tmp_path, steps=0)
    close = world._close

    def stand_still() -> None:
        if world.step < 5:
            close()
        world._wall += 5.0

    world._close = stand_still  # type: ignore[method-assign]
    outcome, _ = _play(world, _scenario(until={"minutes": 60}, expect={"gap_s": 10.0}))
    assert "no step was closed for" in outcome.problems[0]


def test_interrupt_ends_everybody_and_passes(tmp_path: Path) -> None:
    def interrupt(world: MadeUpWorld) -> None:
        raise Interrupted(2)

    world = MadeUpWorld(tmp_path, {4: interrupt})
    scenario = _scenario(fault=[{**KILL, "label": "dead", "on": {"event": "StepClosed", "where": {"step": 90}}}])
    cast = _cast(scenario)
    play = Play(scenario, cast, world, planned(scenario, cast), ())
    with pytest.raises(Interrupted):
        play.run(lambda line: None)
    assert play.outcome.interrupted
    assert play.outcome.to_come == "dead to strike at StepClosed where step = 90"
    assert set(world.stopped) == set(cast.names)


def test_who_has_too_little_memory_is_brought_back_once_it_was_killed(tmp_path: Path) -> None:
    limit = {**KILL, "do": "limit_memory", "mib": 8, "back_s": 0.3}
    world = MadeUpWorld(tmp_path, {30: lambda world: world.living.discard("host-0-1")}, steps=0)
    outcome, _ = _play(world, _scenario(fault=[limit], until={"minutes": 0.01}))
    assert outcome.problems == []
    (struck, _), (back, restart) = world.done
    assert (struck, restart) == (5, Restart("host-0-1"))
    assert back > 30
    spared = MadeUpWorld(tmp_path)
    outcome, _ = _play(spared, _scenario(fault=[limit]))
    assert outcome.problems == ["host-0-1 was not killed for its memory"]


@pytest.mark.parametrize(("code", "kept", "forced"), [(75, True, False), (-9, True, True), (1, False, False)])
def test_who_is_told_to_leave_may_leave_or_be_too_late_and_not_crash(
    tmp_path: Path, code: int, kept: bool, forced: bool
) -> None:
    stop = {**KILL, "do": "stop"}
    world = MadeUpWorld(tmp_path, {30: lambda world: world.end("host-0-1", code)}, steps=0)
    outcome, _ = _play(world, _scenario(fault=[stop], until={"minutes": 0.01}))
    assert (outcome.problems == []) is kept
    assert [(end.struck, end.forced) for end in outcome.ends] == [(kept, forced)]


@pytest.mark.parametrize("at", ["a time", "an event"])
@pytest.mark.parametrize("leaves", [True, False])
def test_who_is_still_leaving_when_it_is_started_again_was_forced(tmp_path: Path, leaves: bool, at: str) -> None:
    stop = {**KILL, "do": "stop", **({"back_s": 0.5} if at == "a time" else {})}
    back = {"do": "restart", "peers": ["host-0-1"], "on": {"event": "StepClosed", "where": {"step": 8}}}
    happens = {7: lambda world: world.end("host-0-1", 75)} if leaves else {}
    world = MadeUpWorld(tmp_path, happens, steps=0)
    faults = [stop] if at == "a time" else [stop, back]
    outcome, _ = _play(world, _scenario(fault=faults, until={"minutes": 0.02}))
    assert outcome.problems == []
    assert isinstance(world.done[-1][1], Restart)
    (end,) = outcome.ends
    assert (end.name, end.struck, end.forced, end.code) == ("host-0-1", True, not leaves, 75 if leaves else None)


def test_of_two_with_one_key_one_may_give_up(tmp_path: Path) -> None:
    world = MadeUpWorld(tmp_path)
    plan, injector = _injector(world)
    strike = Strike("two", NEVER, Twin("host-0-1"))
    plan.fired["two"] = Fired(strike, 1.0, ("host-0-1",), ("A",))
    injector.note()
    assert injector.excuses.explain("host-0-1", 1)
    plan.fired["dead"] = Fired(Strike("dead", NEVER, Kill(("host-0-1",))), 2.0, ("host-0-1",), ("A",))
    injector.note()
    injector.ended("host-0-1", 3.0, -9)
    assert injector.excuses.explain("host-0-1", 1), "that was the kill: neither has given up yet"
    injector.ended("host-0-1-twin", 4.0, 1)
    assert not injector.excuses.explain("host-0-1", 1)
    world.living.add("host-0-1")
    plan.fired["back"] = Fired(Strike("back", NEVER, Restart("host-0-1-twin")), 5.0, ("host-0-1-twin",), ("A",))
    injector.note()
    assert injector.excuses.explain("host-0-1-twin", 1), "the other runs"


def test_who_crashes_as_the_time_is_over_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.chaos.play.LOOK_AT_PEERS_S", 1e9)  # between two looks
    world = MadeUpWorld(tmp_path, {8: lambda world: world.end("host-0-1", 1)}, steps=0)
    outcome, _ = _play(world, _scenario(until={"minutes": 0.02}))
    assert "host-0-1 ended with 1, which no strike explains" in outcome.problems[0]


@pytest.mark.parametrize("cut", [True, False])
def test_what_broke_as_it_was_done_is_told_however_the_play_ends(tmp_path: Path, cut: bool) -> None:
    class Broken(MadeUpWorld):
        """Kills nobody."""

        def inflict(self, fault: Fault) -> Iterable[str]:
            raise OSError("the engine is gone")

    def interrupt(world: MadeUpWorld) -> None:
        raise Interrupted(2)

    world = Broken(tmp_path, {8: interrupt} if cut else {}, steps=0)
    after = {"do": "pause", "seconds": 1.0, "peers": ["host-0-0"], "on": {"event": "StepClosed", "after": "first"}}
    scenario = _scenario(fault=[{**KILL, "label": "first"}, after], until={"minutes": 0.02})
    cast = _cast(scenario)
    play = Play(scenario, cast, world, planned(scenario, cast), ())
    with contextlib.suppress(Interrupted):
        play.run(lambda line: None)
    told = "\n".join(play.outcome.problems)
    assert play.outcome.interrupted is cut
    assert "a fault broke: first: OSError: the engine is gone" in told
    assert ("pause-2: pause did not fire" in told) is not cut
    assert "not over" not in told, "nobody waits for what cannot happen any more"


def test_a_play_does_not_end_before_what_lasts_is_over(tmp_path: Path) -> None:
    pause = {**KILL, "do": "pause", "seconds": 6.0}
    world = MadeUpWorld(tmp_path, steps=0)
    outcome, _ = _play(world, _scenario(fault=[pause], until={"minutes": 0.01}))
    assert outcome.problems == []
    assert world.step >= 5 + 60, "the pause and the steps after it, of 0.1 s each"


def test_who_is_struck_late_has_time_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that it may take counts from the last strike, when that comes after the scenario's own time."""
    monkeypatch.setattr("peers.chaos.play.SPARE_S", 4.0)
    late = {**KILL, "on": {"event": "StepClosed", "where": {"step": 35}}, "back_s": 3.0}
    outcome, _ = _play(MadeUpWorld(tmp_path, steps=0), _scenario(fault=[late], until={"minutes": 0.01}))
    assert (outcome.problems, outcome.by_clock) == ([], True)


def test_play_waits_for_strangers_to_end(tmp_path: Path) -> None:
    world = MadeUpWorld(tmp_path)
    plan, injector = _injector(world)
    strike = Strike("attack", NEVER, Strangers(("host-0-1",), ("small",), 1.0))
    plan.fired["attack"] = Fired(strike, 1.0, ("host-0-1", "strangers-1"), ("A", ""))
    world.living |= {"bootstrap", "strangers-1"}
    assert injector.waiting() == "strangers-1 to end"
    world.living.discard("strangers-1")
    assert injector.waiting() == ""
