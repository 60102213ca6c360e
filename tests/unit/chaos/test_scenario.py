from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.chaos import faults, run_scenario
from peers.chaos.cast import SwarmSpec, cast_of, manifest_of, trainers_of
from peers.chaos.process_world import ProcessWorld
from peers.chaos.processes import RealPeer
from peers.chaos.run_scenario import scenarios
from peers.chaos.scenario import KINDS, Scenario, load_scenario, parse_scenario
from peers.chaos.strikes import planned
from swarm.errors import ConfigError

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "name": "small",
    "proves": "that it can be read",
    "until": {"steps": 10},
    "swarm": {"stages": 2, "replicas": 2, "trainers": 1, "regions": ["eu", "us"]},
}
CLOSED = {"event": "StepClosed", "where": {"step": 5}}


def _with(**keys: Any) -> Scenario:
    return parse_scenario({**SMALL, **keys}, "a.toml")


def _cast(scenario: Scenario) -> SwarmSpec:
    texts = {name: Path(f"/d/{name}.txt") for name in ("sample", *trainers_of(scenario))}
    return cast_of(scenario, Path("/d/run.toml"), texts)


def _refused(**keys: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        _plan(_with, keys)
    return str(refused.value)


def _plan(make: Callable[..., Scenario], keys: dict[str, Any]) -> None:
    scenario = make(**keys)
    planned(scenario, _cast(scenario))


@pytest.mark.parametrize("path", sorted((ROOT / "docker" / "scenarios").glob("*.toml")), ids=lambda path: path.stem)
def test_scenarios_of_the_project_can_be_cast_and_planned(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    strikes = planned(scenario, _cast(scenario))
    assert strikes or scenario.schedule or scenario.trace or scenario.compare


def test_list_says_what_each_proves_and_needs() -> None:
    told = {path: proves for path, _, proves in scenarios(ROOT / "docker" / "scenarios")}
    assert len(told) >= 11
    assert any("needs containers" in proves for proves in told.values())


def test_cast_has_the_founder_first_and_replicas_in_turn_in_the_regions() -> None:
    scenario = _with(swarm={**SMALL["swarm"], "later": [{"name": "late", "role": "trainer"}]})
    cast = _cast(scenario)
    assert cast.names == ("bootstrap", "host-0-0", "host-1-0", "host-0-1", "host-1-1", "trainer-0", "late")
    assert cast.chosen(("region:us",), "k") == ("host-0-1", "host-1-1")
    assert cast.chosen(("host-1-*", "trainer-0", "host-*-0"), "k") == ("host-1-0", "host-1-1", "trainer-0", "host-0-0")
    assert [member.later for member in cast.members] == [False] * 6 + [True]
    host = next(member for member in cast.members if member.name == "host-1-0").spec
    assert host.with_invite("I").arguments[:6] == ("join", "I", "--role", "stage", "--name", "host-1-0")
    assert host.arguments[8:10] == ("--stage", "1")


def test_founder_that_is_started_again_finds_its_run_in_its_home() -> None:
    (founder, *_) = _cast(_with()).members
    assert founder.spec.arguments[-2:] == ("--invite-file", "{home}/invite")
    world = ProcessWorld(Path("/w"))
    command = world.arguments(RealPeer(founder.spec, Path("/w/homes/bootstrap")))
    assert command[command.index("--invite-file") + 1] == "/w/homes/bootstrap/invite"


def test_manifest_has_what_the_scenario_says_over_what_is_small() -> None:
    scenario = _with(swarm={**SMALL["swarm"], "manifest": {"model": {"dim": 16}, "averaging": {"strategy": "pairs"}}})
    manifest = manifest_of(scenario, {})
    assert manifest["model"]["dim"] == 16
    assert manifest["model"]["vocab_size"] == 512
    assert manifest["averaging"] == {"strategy": "pairs"}
    assert manifest["run"]["start_when"] == {"stage_hosts": 4, "trainers": 1}
    assert (manifest["run"]["steps"], manifest["split"]["stages"]) == (10, 2)


def test_a_strike_for_many_is_one_and_a_strike_for_one_is_one_for_each() -> None:
    entries = [
        {"do": "kill", "peers": ["host-1-*"], "on": CLOSED, "back_s": 2, "keep_disk": False},
        {"do": "fill_disk", "peers": ["host-0-*"], "at_s": 3},
        {"do": "slow_links", "peers": ["region:us"], "others": ["bootstrap"], "mbit_per_s": 8, "loss": 0.1, "at_s": 4},
    ]
    scenario = _with(fault=entries)
    kill, *full, slow = planned(scenario, _cast(scenario))
    assert kill.strike.fault == faults.Kill(("host-1-0", "host-1-1"))
    assert (kill.back_s, kill.keep_disk, kill.at_s) == (2, False, None)
    assert [one.strike.label for one in full] == ["fill_disk-2", "fill_disk-2-2"]
    assert [one.at_s for one in full] == [3, 3]
    assert isinstance(slow.strike.fault, faults.SlowLinks)
    assert (slow.strike.fault.shape.bytes_per_s, slow.strike.fault.shape.loss) == (1e6, 0.1)


def test_bytes_are_corrupted_between_each_of_these_and_each_of_those() -> None:
    entry = {"do": "corrupt_bytes", "peers": ["host-0-*"], "others": ["host-1-*"], "messages": 2, "at_s": 3}
    scenario = _with(fault=[entry])
    pairs = {one.strike.fault: one.strike.label for one in planned(scenario, _cast(scenario))}
    assert len(pairs) == len(set(pairs.values())) == 4
    assert faults.CorruptBytes(("host-0-1", "host-1-0"), 2) in pairs


def test_limits_and_nat_are_of_regions_too() -> None:
    swarm = {**SMALL["swarm"], "limit": [{"peer": "region:us", "cpus": 0.5}], "nat": ["region:us"]}
    for member in _cast(_with(swarm=swarm)).members:
        of_us = member.spec.region == "us"
        assert (member.spec.cpus, member.spec.behind_nat) == ((0.5, True) if of_us else (None, False))


def test_each_kind_of_fault_can_be_planned() -> None:
    keys: dict[str, Any] = {
        "peers": ["host-0-0"], "others": ["host-1-0"], "cpus": 0.5, "mib": 64, "factor": 2, "offset_s": -60, "count": 2,
        "attacks": ["small"], "seconds": 3, "lie": "sum-x-10:0.5",
    }  # fmt: skip
    for do, takes in KINDS.items():
        more = {"loss": 0.1} if do == "slow_links" else {}
        scenario = _with(fault=[{"do": do, "on": CLOSED, **{key: keys[key] for key in takes.needs}, **more}])
        (one,) = planned(scenario, _cast(scenario))
        assert one.strike.fault.name == do


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"fault": [{"do": "kill", "on": CLOSED, "peers": []}]}, "at least one"),
        ({"fault": [{"do": "slow_links", "on": CLOSED, "peers": ["a"], "others": ["b"]}]}, "latency_ms"),
        ({"fault": [{"do": "strangers", "on": CLOSED, "peers": ["a"], "attacks": [], "seconds": 1}]}, "at least one"),
        ({"fault": [{"do": "strangers", "on": CLOSED, "peers": ["a"], "attacks": ["dns"], "seconds": 1}]}, "'large'"),
        ({"fault": [{"do": "lie", "on": CLOSED, "peers": ["a"], "lie": "sum-x-10:0"}]}, "KIND:RATE, with a kind of"),
        ({"untill": {}}, "untill"),
        ({"untill": {}}, "expected until, or another of baseline_steps"),
        ({"fault": [{"do": "kill", "peers": ["bootstrap"], "at_s": 1, "secs": 2}]}, "count, cpus, do, factor"),
        ({"swarm": {"limit": [{"peer": "bootstrap", "cpu": 1}]}}, "expected cpus, or another of cpus, disk_mib"),
        ({"fault": [{"do": "heal", "on": {"event": "StepClosed", "where": {"stp": 5}}}]}, "fields of StepClosed"),
        ({"fault": [{"do": "heal", "on": {**CLOSED, "peer": "host-9"}}]}, "fault.0.on.peer"),
        ({"fault": [{"do": "heal", "label": "late", "at_s": 61}], "until": {"minutes": 1}}, "at_s of late"),
        ({"until": {}}, "steps, minutes, or both"),
        ({"until": {"steps": "ten"}}, "until.steps"),
        ({"fault": [{"do": "kil", "peers": ["bootstrap"], "on": CLOSED}]}, "kill_daemon"),
        ({"fault": [{"do": "kill", "on": CLOSED}]}, "peers for do = 'kill'"),
        ({"fault": [{"do": "kill", "peers": ["bootstrap"], "mib": 3, "on": CLOSED}]}, "not mib"),
        ({"fault": [{"do": "kill", "peers": ["bootstrap"]}]}, "one of on and at_s"),
        ({"fault": [{"do": "kill", "peers": ["bootstrap"], "on": {"event": "StepClose"}}]}, "docs/reference/events.md"),
        ({"fault": [{"do": "kill", "peers": ["host-9"], "on": CLOSED}]}, "host-1-1"),
        ({"fault": [{"do": "heal", "on": {**CLOSED, "after": "cut"}}]}, "'cut'"),
        ({"fault": [{"do": "heal", "label": "a", "on": CLOSED}] * 2}, "no other fault has"),
        ({"fault": [{"do": "partition", "peers": ["host-*"], "others": ["host-0-0"], "at_s": 1}]}, "not among peers"),
        ({"fault": [{"do": "heal", "label": "drawn:a", "on": CLOSED}]}, "without a colon"),
        ({"schedule": {"per_hour": 100, "kinds": {}}}, "schedule.kinds"),
        ({"fault": [{"do": "kill", "peers": ["b*"], "at_s": 1, "back_s": 2, "keep_disk": False}]}, "another run"),
        ({"fault": [{"do": "restart", "peers": ["bootstrap"], "at_s": 1, "keep_disk": False}]}, "another run"),
        ({"expect": {"at_least": {"speed": 1}}}, "throughput_retained"),
        ({"expect": {"looked_at": ["I99"]}}, "I20"),
        ({"expect": {"happened": {"Nothing": 1}}}, "docs/reference/events.md"),
        ({"schedule": {"per_hour": 100, "kinds": {"explode": 1}}}, "schedule.kinds.explode"),
        ({"trace": {"speed": 2}}, "one of file and churn_per_minute"),
        ({"swarm": {"later": [{"name": "bootstrap"}]}}, "names used by no other peer"),
        ({"swarm": {"limit": [{"peer": "region:us", "cpus": 1}]}}, "swarm.limit.0.peer"),
        ({"swarm": {"limit": [{"peer": "hosts-*", "cpus": 1}]}}, "a peer of the scenario: bootstrap, host-0-0"),
        ({"swarm": {"nat": ["host-9-*"]}}, "swarm.nat"),
        ({"swarm": {"nat": ["*"]}}, "peers but bootstrap, by which the others join"),
        ({"swarm": {"links": {"link": [{"from": "host-0-0", "to": "host-9", "loss": 0.1}]}}}, "swarm.links = 'host-9'"),
        ({"swarm": {"links": {"machine": [{"peer": "hots-*", "up_mbit_per_s": 1}]}}}, "swarm.links = 'hots-*'"),
        ({"compare": {"name": "other", "manifest": {}}, "trace": {"churn_per_minute": 0.1}}, "nothing goes wrong"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_refused_by_key(keys: dict[str, Any], told: str) -> None:
    assert told in _refused(**keys)


def test_scenario_of_the_project_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert run_scenario._file(Path("nat")) == Path("docker/scenarios/nat.toml")
    for nearly in ("nat.toml", "natt"):
        with pytest.raises(ConfigError, match=r"Did you mean nat\?"):
            run_scenario._file(Path(nearly))
    assert run_scenario._file(Path("mine")) == Path("mine")
    assert run_scenario._file(Path("elsewhere/nat")) == Path("elsewhere/nat")
    monkeypatch.chdir(tmp_path)
    assert run_scenario._file(Path("nat")) == Path("nat")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="swarm chaos --list"):
        load_scenario(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(ConfigError, match="valid TOML"):
        load_scenario(broken)
    dated = tmp_path / "dated.toml"
    dated.write_text("name = 2020-01-01\n")
    with pytest.raises(ConfigError, match="JSON serializable"):
        load_scenario(dated)
