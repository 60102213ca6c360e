"""``swarm plan --table``: a row for each model, number of machines and link; and the page of ours that is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.exit_codes import EXIT_USAGE
from tests.harness.plan_page import PAGE, page
from tests.harness.rigs.peers import Typed

FILE = """
currency = "€"
links = [
  { name = "near", down_mbit = 1000, up_mbit = 1000, round_trip_ms = 1, profile = "lan" },
  { name = "far", down_mbit = 50, up_mbit = 20, round_trip_ms = 80, profile = "thin" },
]
models = [
  { name = "tiny", run = "tiny", tokens = 1e6 },
  { name = "wider", run = "tiny", tokens = 1e6, manifest = { model = { dim = 320 } } },
]
[[machines]]
name = "gpu"
device = "t4"
host_memory_gib = 16
price_hour = 0.5
counts = [2, 3]
links = ["near", "far"]
[[machines]]
name = "toy"
flops = 1e9
memory_gib = 0.001
counts = [2]
links = ["near"]
models = ["tiny"]
[[measured]]
model = "tiny"
machines = "gpu"
count = 2
link = "near"
tokens_s = 1234
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "table.toml"
    path.write_text(FILE)
    return path


def test_table_has_a_row_for_each_model_number_and_link(file: Path, typed: Typed) -> None:
    rows = typed("plan", "--table", file, "--json").json["rows"]
    on_gpus = [(count, link) for link in ("near", "far") for count in (2, 3)]
    assert [(row["model"], row["machines"], row["count"], row["link"]) for row in rows] == [
        *(("tiny", "gpu", *each) for each in on_gpus), ("tiny", "toy", 2, "near"),
        *(("wider", "gpu", *each) for each in on_gpus),
    ]  # fmt: skip
    first = rows[0]
    assert first["measured_tokens_s"] == 1234
    assert first["hours"] == pytest.approx(1e6 / first["tokens_s"] / 3600)
    assert first["cost"] == pytest.approx(2 * 0.5 * first["hours"]), "a host and a trainer"
    toy = rows[4]
    assert (toy["tokens_s"], toy["stages"], toy["alone_tokens_s"], toy["cost"]) == (None, None, None, None)
    lines = typed("plan", "--table", file).out.splitlines()
    assert len(lines) == 2 + len(rows)
    assert len(set(map(len, lines))) == 1, "columns stand below each other"
    assert " 1,230 " in lines[2]
    assert lines[2].rstrip(" |").rpartition(" ")[2].startswith("€")
    assert lines[6].count("–") == 6


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ('links = ["near", "far"]', 'links = ["here"]', "machines.links"),
        ('models = ["tiny"]', 'models = ["huge"]', "machines.models"),
        ("counts = [2, 3]", "counts = [1]", "machines.counts"),
        ("price_hour", "prize_hour", "machines.prize_hour"),
        ('run = "tiny", tokens = 1e6 }', 'run = "nowhere.toml", tokens = 1e6 }', "RUN.toml"),
        ('profile = "lan"', 'profile = "wlan"', "links.profile"),
    ],
)
def test_table_refuses_what_a_file_may_not_say(file: Path, typed: Typed, before: str, after: str, key: str) -> None:
    assert before in FILE
    file.write_text(FILE.replace(before, after, 1))
    said = typed("plan", "--table", file)
    assert said.code == EXIT_USAGE
    assert said.err.startswith(f"error: {key} = "), said.err


def test_table_stands_alone_and_has_a_file(file: Path, typed: Typed, tmp_path: Path) -> None:
    for words in (("tiny",), ("--explain",), ("--peers", file)):
        assert typed("plan", "--table", file, *words).code == EXIT_USAGE
    assert "readable TOML file" in typed("plan", "--table", tmp_path / "nothing").err


def test_page_of_plans_is_what_its_data_and_the_log_make_of_it() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.harness.plan_page"
