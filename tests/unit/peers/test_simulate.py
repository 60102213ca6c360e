"""``swarm simulate`` as it is typed: what a file may say, and what is printed and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.cli.app import run
from peers.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from peers.simulate.scenario_file import case_of, line_of, read_scenario
from tests.harness.rigs.peers import printed

HEAD = """model = "tiny"
steps = 6
microbatches = 60
rows = 2
"""
HOME = """
[[peers]]
name = "home"
count = 8
train = 2
flops = 2e9
memory_gib = 4
stay_hours = 0.02
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(HEAD + HOME)
    return path


def test_simulate_prints_steps_what_binds_and_a_hash(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(scenario)]) == EXIT_OK
    told = capsys.readouterr().out
    for words in ("scenario (flow)", "8 peers", "6 steps in", "microbatches/s", "bound by", "machines taken", "hash "):
        assert words in told


def test_simulate_writes_report_and_pictures(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(scenario), "--json", "--out", str(tmp_path / "out")]) == EXIT_OK
    document = printed(capsys)
    json.dumps(document, allow_nan=False)
    assert document == json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(document["steps"]) == document["closed"] == 6
    assert document["removed"] > 0
    assert document["ended_s"] == pytest.approx(sum(step["seconds"] for step in document["steps"]))
    for name in ("steps.svg", "peers.svg"):
        assert "<polyline" in (tmp_path / "out" / name).read_text()


def test_same_seed_gives_the_same_hash_and_another_one_another(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for seed in ("3", "3", "4"):
        assert run(["simulate", str(scenario), "--json", "--seed", seed]) == EXIT_OK
        found.append(printed(capsys)["hash"])
    assert found[0] == found[1] != found[2]


def test_machines_are_taken_as_a_file_says(scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("# at, how many, back after\n10, 2, 30\n20, 9, 5\n")
    scenario.write_text(HEAD + HOME + '[churn]\nfile = "trace.csv"\n')
    case, _ = case_of(read_scenario(scenario), scenario, "flow", 1)
    assert [(one.at_s, len(one.places), set(one.back_s)) for one in case.trace] == [
        (10.0, 2, {40.0}),
        (20.0, 4, {25.0}),
    ]
    assert not set(case.trace[0].places) & set(case.trace[1].places), "who is away is not taken again"
    scenario.write_text(HEAD + HOME + '[churn]\nshape = "none"\n')
    assert case_of(read_scenario(scenario), scenario, "flow", 1)[0].trace == ()


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        (HEAD.replace("tiny", "tinny") + HOME, "MODEL = 'tinny'", ""),
        (HEAD + HOME.replace("train = 2", "trian = 2"), "peers.trian = 2", "line 9"),
        (HEAD + HOME.replace("= 2e9", "= -1.0"), "peers.flops = -1.0", "line 10"),
        (
            HEAD + HOME + HOME.replace("home", "far").replace("flops = 2e9", "flops = 'x'"),
            "peers.flops = 'x'",
            "line 18",
        ),
        (HEAD + HOME.replace("train = 2", "train = 9"), "train: no more than count", "line 6"),
        (HEAD + HOME.replace("train = 2", ""), "peers.train = 0", ""),
        (HEAD + HOME.replace("count = 8", "count = 3"), "peers.count = 1", ""),
        (HEAD + HOME.replace("count = 8", "count = 9999") + HOME.replace("home", "far"), "fidelity = 'flow'", ""),
        (HEAD + HOME + "stage = 7\n", "peers.stage = 7", ""),
        (HEAD + HOME + HOME, "peers.name = 'home'", ""),
        (HEAD.replace("steps = 6", "") + HOME, "steps, hours, or both", ""),
        (HEAD + "stages = 99\n" + HOME, "stages = 99", ""),
        (HEAD.replace("steps = 6", "steps = 0") + HOME, "steps = 0", "line 2"),
        (HEAD + 'rebalance = "best"\n' + HOME, "rebalance = 'best'", "line 5"),
        (HEAD + "[churn]\nshop = 3\n" + HOME, "churn.shop = 3", "line 6"),
        (HEAD + HOME + '[churn]\nfile = "nowhere.csv"\n', "nowhere.csv", ""),
        (HEAD + "peers = 3\n", "peers = 3", "line 5"),
        (HEAD, "peers is missing", ""),
        ("model = \n", "SCENARIO = ", ""),
    ],
)
def test_simulate_refuses_what_means_nothing(
    text: str, cause: str, line: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(text)
    assert run(["simulate", str(scenario)]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert cause in told
    assert line in told
    assert "check:" in told
    assert "next:" in told


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["nowhere.toml"], "SCENARIO = 'nowhere.toml'"),
        (["FILE", "--fidelity", "best"], "--fidelity = 'best'"),
        (["FILE", "--seed", "-1"], "--seed = '-1'"),
    ],
)
def test_simulate_refuses_words(
    words: list[str], cause: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *(str(scenario) if word == "FILE" else word for word in words)]) == EXIT_USAGE
    assert cause in capsys.readouterr().err


def test_simulate_says_where_it_cannot_write(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["simulate", str(scenario), "--out", str(tmp_path / "file")]) == EXIT_ERROR
    told = capsys.readouterr().err
    assert "cannot be written" in told
    assert "next:" in told


def test_line_of_a_key_is_that_of_its_table() -> None:
    text = "a = 1\n[churn]\nshape = 'x'\n[[peers]]\nname = 'a'\n[[peers]]\nname = 'b'\n"
    assert line_of(text, ("a",)) == 1
    assert line_of(text, ("churn", "shape")) == 3
    assert line_of(text, ("peers", 1, "name")) == 7
    assert line_of(text, ("peers", 1, "count")) == 6, "the table that lacks it"
    assert line_of(text, ("b",)) is None
