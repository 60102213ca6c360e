"""What the checks of ``swarm doctor`` say of facts that are given, without a machine that has them."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.console.words import CommandError
from peers.doctor.compute import BlockSpeed, DeviceSeen, PlannedPart
from peers.doctor.judge import (
    Gain,
    judge_bandwidth,
    judge_clock,
    judge_device,
    judge_gain,
    judge_parts,
    judge_reach,
    judge_round_trip,
    judge_run,
    judge_speed,
    step_seconds,
)
from peers.doctor.machine import MachineFacts, TorchBuild, check_before_start, judge_machine, look
from peers.doctor.results import CheckResult, DoctorReport, refused
from peers.exit_codes import EXIT_DOCTOR, EXIT_OK
from swarm.errors import ConfigError, Ending, RunEnded
from swarm.ids import PartName
from swarm.network.reach.probe import ProbedLink
from swarm.network.reach.reachability import How, Reach

PEER = "12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW"
MB = 1_000_000
SOUND = MachineFacts(
    python=(3, 12, 1), system="Linux", machine="x86_64", cores=8, missing=(), daemon="",
    torch=TorchBuild(version="2.13.0+cpu"), gpu=False, memory_free=8000 * MB, memory_total=16000 * MB,
    disk=Path("/data"), disk_free=50_000 * MB, disk_error="", files_soft=1024, files_hard=65536,
)  # fmt: skip


def judged(name: str, **other: Any) -> CheckResult:
    """The check of that name of a sound machine but for these facts."""
    return next(one for one in judge_machine(dataclasses.replace(SOUND, **other)) if one.name == name)


def shown(*results: CheckResult) -> list[str]:
    """The lines of results, each of which says something to do or to look at where it failed or warns."""
    for result in results:
        if result.level in ("warn", "fail"):
            assert result.cause, result
            assert result.check or result.next, result
    return [f"{result.level}: {line}" for result in results for line in result.lines()]


# --- the machine -----------------------------------------------------------------------------------------------------


def test_judge_machine_says_what_is_wrong_and_what_to_do(snapshot: Any) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("python", {"missing": ("hivemind", "blake3")}, "fail"),
        ("python", {"daemon": "p2pd is built for x86_64, and this machine is aarch64"}, "fail"),
        ("python", {"system": "Darwin"}, "fail"),
        ("python", {"python": (3, 14, 0)}, "warn"),
        ("torch", {"torch": None}, "fail"),
        ("torch", {"gpu": True}, "warn"),
        ("torch", {"gpu": True, "torch": TorchBuild(version="2.13.0+cu130", cuda="13.0")}, "ok"),
        ("memory", {"memory_free": 200 * MB}, "fail"),
        ("memory", {"memory_free": 700 * MB}, "warn"),
        ("disk", {"disk_free": 10 * MB}, "fail"),
        ("disk", {"disk_free": 500 * MB}, "warn"),
        ("disk", {"disk_error": "Permission denied"}, "fail"),
        ("open files", {"files_hard": 128}, "fail"),
        ("open files", {"files_hard": 512}, "warn"),
        ("open files", {"files_hard": resource.RLIM_INFINITY}, "ok"),
    ]
    found = [judged(name, **facts) for name, facts, _ in cases]
    assert [one.level for one in found] == [level for *_, level in cases]
    assert shown(*found) == snapshot


def test_look_reads_this_machine_and_makes_nothing(tmp_path: Path) -> None:
    facts = look(tmp_path / "no" / "home")
    assert (facts.disk, facts.disk_error, facts.missing, facts.daemon) == (tmp_path, "", (), "")
    assert facts.torch is not None
    assert facts.torch.version[:1].isdigit()
    assert 0 < facts.memory_free <= facts.memory_total
    assert list(tmp_path.iterdir()) == []


def test_check_before_start_stops_with_the_cause_or_says_its_doubts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    facts = dataclasses.replace(SOUND, files_hard=128, memory_free=100 * MB)
    monkeypatch.setattr("peers.doctor.machine.look", lambda home: facts)
    with pytest.raises(CommandError) as caught:
        check_before_start(tmp_path, lambda label, text: said.append((label, text)))
    assert caught.value.exit_code == EXIT_DOCTOR
    assert caught.value.cause.startswith("memory: 100 MB free")
    assert "also: open files" in caught.value.cause
    facts = dataclasses.replace(SOUND, files_hard=512, disk_error="Permission denied")
    check_before_start(tmp_path, lambda label, text: said.append((label, text)))
    assert [label for label, _ in said] == ["open files"], "a home that cannot be written has an error of its own"


# --- the run ---------------------------------------------------------------------------------------------------------


def seen(closed: int | None, *, lost: tuple[str, ...] = (), lacking: Any = (), ended: bool = False) -> Any:
    """A run of 60 steps and three peers."""
    return SimpleNamespace(
        manifest=SimpleNamespace(run=SimpleNamespace(name="mine", steps=60), run_id="ab" * 32),
        standing=SimpleNamespace(closed=closed, waiting_for="1 of 2 stage hosts are here", lost=lost, lacking=lacking),
        head=None if closed is None else SimpleNamespace(ended=ended),
        members=("a", "b", "c"),
        contact="a",
    )


def test_judge_run_says_where_it_stands(snapshot: Any) -> None:
    found = [
        judge_run(one)
        for one in (
            seen(12), seen(None, lost=("stage-0",)), seen(12, lost=("stage-1",)), seen(60), seen(12, ended=True),
            seen(12, lacking=(("st-mary", "stage-1"),)),
        )
    ]  # fmt: skip
    assert [one.level for one in found] == ["ok", "ok", "warn", "fail", "fail", "warn"]
    assert shown(*found) == snapshot


def test_judge_clock_takes_the_median(snapshot: Any) -> None:
    offsets = ([], [0.4, -0.2, 0.3], [1.6], [5.0, 5.5, 900.0], [-60.0, -61.0], [1e300])
    found = [judge_clock(each) for each in offsets]
    assert [one.level for one in found] == ["skipped", "ok", "ok", "warn", "fail", "fail"]
    assert shown(*found) == snapshot


def test_judge_round_trip_and_bandwidth_say_what_was_measured(snapshot: Any) -> None:
    """They warn of a long way and not of one busy peer, and of a narrow link."""
    link = ProbedLink(up=2.5e6, down=5e6, up_bytes=1 << 16, down_bytes=1 << 20)
    none = ProbedLink(up=0, down=0, up_bytes=0, down_bytes=0, problem="no method here")
    found = [
        judge_round_trip(0.012, [0.02, 0.03, 0.04]),
        judge_round_trip(0.9, [0.02]),
        judge_round_trip(0.9, [0.8]),
        judge_bandwidth(link, [1e6, 3e6, 2e6]),
        judge_bandwidth(dataclasses.replace(link, up=1e4), []),
        judge_bandwidth(none, []),
    ]
    assert [one.level for one in found] == ["ok", "ok", "warn", "ok", "warn", "skipped"]
    assert shown(*found) == snapshot


def test_judge_reach_of_each_kind(snapshot: Any) -> None:
    kinds: list[tuple[How, bool]] = [
        ("direct", False), ("local", True), ("local", False), ("relayed", False), ("unknown", False),
        ("outgoing", False),
    ]  # fmt: skip
    found = [judge_reach(Reach(how, f"{PEER} said so", ()), "hole-punched", near=near) for how, near in kinds]
    assert [one.level for one in found] == ["ok", "ok", "fail", "warn", "warn", "fail"]
    assert not any(PEER in one.found for one in found)
    assert shown(*found) == snapshot


def parts(*lacking: str) -> list[PlannedPart]:
    """Two stages and the ends, with what each lacks."""
    names = ("stage-0", "stage-1", "ends")
    return [
        PlannedPart(part=PartName(name), bytes=500 * MB, parameters=20 * MB, lacking=missing)
        for name, missing in zip(names, lacking, strict=True)
    ]


def test_judge_parts_says_which_fit_and_how_to_join_with_one(snapshot: Any) -> None:
    lacking = (("", "", ""), ("too little", "", "too little"), ("x", "x", ""), ("x", "x", "x"))
    found = [*(judge_parts(parts(*each), 10_000 * MB) for each in lacking), judge_parts(parts("", "", ""), 100 * MB)]
    assert [one.level for one in found] == ["ok", "warn", "warn", "fail", "warn"]
    assert shown(*found) == snapshot


def test_judge_speed_and_device_say_how_they_compare(snapshot: Any) -> None:
    own = BlockSpeed(stage_s=0.2, whole_s=0.9, measured="2 layers, 8 of 8 rows, best of 3")
    cpu = DeviceSeen(device="cpu", title="the CPU", free=8000 * MB, total=0, torch="2.13.0")
    gpu = dataclasses.replace(cpu, device="cuda:0", title="NVIDIA H100", total=80_000 * MB)
    speeds = [judge_speed("stage-0", own, others) for others in ([0.1, 0.1, 0.4], [1.0], [])]
    assert shown(*speeds, judge_device(cpu), judge_device(gpu)) == snapshot


# --- is it worth it? -------------------------------------------------------------------------------------------------

GAIN = Gain(
    part="stage-0", replicas=3, parameters=100 * MB, bytes_a_parameter=4.0, rounds=1, tokens_a_step=16_000,
    tokens_a_microbatch=1000, step_s=20.0, watched=True, whole_s=2.0, link=100e6, alone_fits=True,
)  # fmt: skip


def test_judge_gain_gives_the_numbers_and_says_who_would_be_slower(snapshot: Any) -> None:
    unknown = dataclasses.replace(GAIN, step_s=0.0, link=0.0)
    found = [
        judge_gain(GAIN),
        judge_gain(dataclasses.replace(GAIN, link=1e6)),
        judge_gain(dataclasses.replace(GAIN, whole_s=0.5)),
        judge_gain(unknown),
        judge_gain(dataclasses.replace(unknown, alone_fits=False)),
    ]
    assert [one.level for one in found] == ["ok", "warn", "warn", "skipped", "skipped"]
    assert shown(*found) == snapshot


def vitals(part: str | None, compute_s: float) -> Any:
    return SimpleNamespace(part=part, compute_s=compute_s)


def test_step_seconds_are_watched_or_those_of_the_slowest_stage() -> None:
    said = [
        vitals("stage-0", 0.5),
        vitals("stage-0", 0.5),
        vitals("stage-1", 0.4),
        vitals("ends", 9.0),
        vitals(None, 0),
    ]
    assert step_seconds([(0.0, 4), (1.0, 5), (5.0, 7)], cast(Any, said), 16) == (2.0, True)
    assert step_seconds([(0.0, 4), (1.0, 5)], cast(Any, said), 16) == (6.4, False)
    assert step_seconds([], [vitals("stage-0", 0.0), vitals("stage-0", 1e300)], 16) == (0.0, False)


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("--listen", "x", "a free port", "Take another.", why="it is taken"),
        CommandError("it is taken", check="expected a free port", next_="Take another."),
        RunEnded("it is taken", Ending.UNREACHABLE, check="expected a free port", remedy="Take another."),
    ],
)
def test_refused_says_what_the_error_says(error: Any) -> None:
    result = refused("port", "no port", error)
    assert (result.level, "it is taken" in result.cause) == ("fail", True)
    assert (result.check, result.next) == ("expected a free port", "Take another.")


def test_doctor_report_has_the_exit_code_and_the_last_word() -> None:
    shown: list[CheckResult] = []
    report = DoctorReport(shown.append)
    report.add(CheckResult(name="memory", found="little").warns("little"))
    assert (report.exit_code, len(shown)) == (EXIT_OK, 1)
    assert "--quick" in report.verdict(quick=True, invited=True)
    assert "swarm doctor INVITE" in report.verdict(quick=False, invited=False)
    assert "some did not end in time" in report.verdict(quick=False, invited=True)
    report.add(CheckResult(name="reachable", found="direct"))
    assert report.verdict(quick=False, invited=True) == "this machine can join; for memory see above"
    report.add(CheckResult(name="port", found="taken").fails("taken"))
    assert report.exit_code == EXIT_DOCTOR
    assert report.verdict(quick=False, invited=True) == "this machine cannot join as it is: for port see above"
    document = report.document()
    assert (document["schema"], document["ok"], [one["level"] for one in document["checks"]]) == (
        1, False, ["warn", "ok", "fail"],
    )  # fmt: skip
