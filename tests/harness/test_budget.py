"""What is drawn: what is always run is never cut, the rest begins in the commit's order while there is time, and what a
run of everything makes of a phase that fails, hangs, or is over its time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import ci
from tests.harness.budget import GOOD, Phase, drawn_first, share, slowness
from tests.harness.ci import Step, run_phase
from tests.harness.drawn import OUTCOMES, told
from tests.harness.expect import LONG_S, wait_until


def test_slowness_of_a_machine_counts_what_tests_are_made_of() -> None:
    assert slowness(GOOD) == pytest.approx(1)
    third = {name: rate / 3 for name, rate in GOOD.items()}
    assert slowness(third) == pytest.approx(3)
    slow_disk = GOOD | {"disk": GOOD["disk"] / 100}
    assert 1 < slowness(slow_disk) < slowness(GOOD | {"python": GOOD["python"] / 100})


def test_share_is_what_others_do_not_need_and_by_what_each_needs_where_time_is_short() -> None:
    short, long = Phase("short", 10), Phase("long", 30)
    assert share(short, [long], 100) == 70
    assert share(short, [long], 20) == 5
    assert share(short, [long], 100, slow=4) == 25
    assert share(long, [], 79, slow=4) == 79
    assert share(long, [], -5) == 0


def test_order_is_the_seed_s_and_nothing_else_s() -> None:
    names = [f"test_{number}" for number in range(50)]
    drawn = drawn_first(names, "a")
    assert drawn == drawn_first(names[::-1], "a")
    assert sorted(drawn) == sorted(names)
    assert drawn != drawn_first(names, "b")


def test_told_counts_by_file() -> None:
    nodes = ["tests/swarms/test_b.py::test_x", "tests/swarms/test_a.py::test_y", "tests/swarms/test_b.py::test_z[1]"]
    assert told(nodes) == "swarms/test_a.py, swarms/test_b.py (2)"


# --- the plugin --------------------------------------------------------------------------------------------------

TESTS = """
import pytest
it_holds = pytest.mark.promise("it holds")
@it_holds
def test_promise(): pass
@pytest.mark.parametrize("number", range(6))
def test_rest(number): pass
def test_fails(): assert False
"""


@pytest.fixture
def outcomes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pytest, run by the test in a process of its own, writes outcomes."""
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = promise(name)")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv(OUTCOMES, str(pytester.path / "outcomes"))
    return pytester.path / "outcomes"


def run(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    ended = pytester.runpytest_subprocess("-p", "tests.harness.drawn", "-p", "no:cacheprovider", *arguments)
    return ended.outlines


def ran(outcomes: Path) -> list[str]:
    lines = map(json.loads, outcomes.read_text().splitlines())
    return [line["test"].partition("::")[2] for line in lines if "test" in line]


def test_pytest_without_time_runs_the_promises_and_names_what_it_did_not_run(
    pytester: pytest.Pytester, outcomes: Path
) -> None:
    lines = run(pytester, "--budget", "0.0000001", "--draw", "c0ffee")
    assert ran(outcomes) == ["test_promise"]
    assert any("drawn by c0ffee: 7 tests:" in line for line in lines)
    assert "1 passed, 7 skipped" in lines[-1]


def test_pytest_with_time_runs_all_of_it_in_the_order_drawn(pytester: pytest.Pytester, outcomes: Path) -> None:
    orders = []
    for seed in ("one", "one", "two"):
        run(pytester, "--budget", "60", "--draw", seed)
        orders.append(ran(outcomes))
        outcomes.unlink()
    assert {len(order) for order in orders} == {8}
    assert {order[0] for order in orders} == {"test_promise"}
    assert orders[0] == orders[1] != orders[2]


def test_pytest_of_a_part_deselects_the_other(pytester: pytest.Pytester, outcomes: Path) -> None:
    run(pytester, "--part", "always")
    assert ran(outcomes) == ["test_promise"]
    outcomes.unlink()
    run(pytester, "--part", "rest")
    assert "test_promise" not in ran(outcomes)
    assert len(ran(outcomes)) == 7


# --- phases ------------------------------------------------------------------------------------------------------

PLAY = """
import json, os, sys, time
out = open(os.environ["SWARM_TEST_OUTCOMES"], "a")
def say(**line): print(json.dumps(line), file=out, flush=True)
say(collected=["a::one", "a::two", "b::three"])
say(test="a::one", outcome=sys.argv[1])
say(began="a::two", at=time.monotonic())
if sys.argv[2] == "hangs":
    open(os.path.join(os.environ["TMPDIR"], "half-written"), "w").close()
    time.sleep(10_000)
say(test="a::two", outcome="passed")
say(test="b::three", outcome="passed")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What phases leave is looked for in a directory that no other test writes to."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(ci.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path.parent))
    monkeypatch.setattr(ci, "_SHARED", ())


def phase(*arguments: str, always: bool = False) -> Step:
    return Step(Phase("a play", 10, always=always), (sys.executable, "-c", PLAY, *arguments))


def test_phase_that_passes_is_counted() -> None:
    outcome = run_phase(phase("passed", "0"), LONG_S, "")
    assert (outcome.failed, outcome.cut, outcome.tests["passed"], outcome.not_run) == (False, False, 3, [])


def test_phase_that_exits_otherwise_has_failed() -> None:
    assert run_phase(phase("passed", "1"), None, "").failed


def over(place: Path) -> Callable[[subprocess.Popen[bytes], float | None], None]:
    """The time of a phase is over when it hangs."""

    def wait(process: subprocess.Popen[bytes], limit_s: float | None) -> None:
        wait_until((place / "half-written").exists)
        raise subprocess.TimeoutExpired("a play", limit_s or 0.0)

    return wait


@pytest.mark.parametrize(("outcome_of_one", "failed"), [("passed", False), ("failed", True)])
def test_phase_over_its_time_is_ended_and_fails_only_by_what_had_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome_of_one: str, failed: bool
) -> None:
    monkeypatch.setattr(ci, "_wait", over(tmp_path))
    outcome = run_phase(phase(outcome_of_one, "hangs"), 2.0, "")
    assert (outcome.cut, outcome.failed) == (True, failed)
    assert outcome.not_run == ["a::two", "b::three"]
    assert "ended for want of time" in outcome.row() or failed
    assert not (tmp_path / "half-written").exists()


def test_phase_over_its_time_in_which_a_test_hangs_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ci, "_wait", over(tmp_path))
    outcome = run_phase(phase("passed", "hangs"), 2.0, "", hangs_s=0.0)
    assert (outcome.cut, outcome.failed, outcome.not_run) == (True, True, ["b::three"])
    assert "hangs: a::two" in capsys.readouterr().out


def test_phase_that_leaves_a_file_has_failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    leaves = Step(Phase("a play", 10), (sys.executable, "-c", "import os; open(os.environ['TMPDIR'] + '/x', 'w')"))
    assert run_phase(leaves, LONG_S, "").failed
    assert f"left behind: {tmp_path}/x" in capsys.readouterr().out


def test_run_of_everything_prints_what_was_drawn_and_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    every = [
        phase("passed", "0", always=True),
        phase("passed", "0"),
        Step(Phase("slow to begin", 1, least_s=10_000), ("false",)),
        Step(Phase("not here", 1), ("false",), why_not=lambda: "no engine"),
        Step(Phase("half here", 1), ("true",), needs={"root": str, "docker": lambda: "no engine", "browser": str}),
    ]
    assert ci.run_all(every, ci.now() + 60, 1.0, elapsed=5.0) == 0
    said = capsys.readouterr().out
    assert "not run: not here: no engine" in said
    assert "not run: half here: docker: no engine" in said
    assert "not run: slow to begin: its first test ends after 10000 s" in said
    assert said.splitlines()[-1].startswith("all passed after")
    assert [step.command for step in ci._possible(every[-1:])[0]] == [("true", "-m", "root or browser")]
    assert ci.run_all([phase("failed", "1", always=True)], ci.now() - 1, 1.0, elapsed=0.0) == 1
    assert "FAILED: a play" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slow", "hows"), [(1, ["always run", "whole", "whole"]), (3, ["always run", "drawn", "drawn"])]
)
def test_plan_says_what_a_slower_machine_draws_of_the_time_there_is(slow: float, hows: list[str]) -> None:
    every = [Step(Phase(name, seconds, always=name == "a"), ()) for name, seconds in (("a", 20), ("b", 10), ("c", 30))]
    first, *phases, unused = ci.plan(every, 100.0, slow)
    assert first.startswith(f"{slow} times as slow")
    assert [line.partition("  ")[2].rpartition("  ")[2] for line in phases] == hows
    assert float(unused.split()[-2]) == (40 if slow == 1 else 0)
