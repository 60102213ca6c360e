"""The runner's own promises: the last line is JSON, a list without a name, exit codes."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import benchmarks
from tests.benchmarks import _log, runner
from tests.benchmarks.runner import Result, Size, Table, main, measure, table

RESULT = Result(
    columns=("candidate", "rate_mib_s", "note"),
    rows=(("ours", 290.123456, "raw"), ("theirs", 122, None)),
    summary={"ratio": 2.378, "target": 2.0},
    notes=("loopback only",),
)


def plain(size: Size) -> Result:
    """Compares two things."""
    return RESULT


async def waiting(size: Size) -> Result:
    """Awaits before it compares."""
    await asyncio.sleep(0)
    return RESULT


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "discover", lambda: {"plain": plain, "waiting": waiting})


@pytest.mark.parametrize("size", Size)
@pytest.mark.parametrize("name", ["plain", "waiting"])
@pytest.mark.usefixtures("known")
def test_main_of_a_benchmark_ends_with_one_json_line(name: str, size: Size, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [] if size is Size.DEFAULT else [f"--{size}"]
    assert main([name, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert lines[0].startswith("machine: ")
    assert (last["benchmark"], last["full"], last["smoke"]) == (name, size is Size.FULL, size is Size.SMOKE)
    assert last.items() >= RESULT.summary.items()
    assert last["command"] == " ".join(["python -m tests.benchmarks", name, *flags])


@pytest.mark.usefixtures("known")
def test_main_without_a_name_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert "plain" in listed
    assert "Compares two things." in listed


@pytest.mark.usefixtures("known")
def test_main_of_an_unknown_name_exits_2_and_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plane"]) == 2
    assert "plain, waiting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"), [(["--log"], "worth a place in the log"), (["--full"], "not allowed with argument")]
)
@pytest.mark.usefixtures("known")
def test_main_of_a_smoke_takes_neither_log_nor_full(
    flags: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_log, "append", lambda _: pytest.fail("a smoke went into the log"))
    with pytest.raises(SystemExit) as ended:
        main(["plain", "--smoke", *flags])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_measure_of_a_summary_without_a_declared_key_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "KEYS", ("ratio", "target"))
    measure("plain", plain, size=Size.SMOKE, command="the command")
    monkeypatch.setitem(globals(), "KEYS", ("ratio", "seconds"))
    with pytest.raises(ValueError, match="of plain and the KEYS of its module differ in seconds, target"):
        measure("plain", plain, size=Size.SMOKE, command="the command")


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes a benchmark, the only one there is, that imports something that is not there."""
    monkeypatch.setattr(benchmarks, "__path__", [str(tmp_path)])

    def make(imported: str) -> None:
        (tmp_path / "fast.py").write_text(f"import {imported}\n", encoding="utf-8")
        importlib.invalidate_caches()

    yield make
    sys.modules.pop("tests.benchmarks.fast", None)


def test_discover_leaves_out_what_needs_a_package_that_is_missing(
    moved: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    moved("no_such_package.part")
    assert (runner.modules(), runner.discover()) == (["fast"], {})
    assert "fast cannot run here: No module named 'no_such_package'" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["swarm.no_such_module", "tests.benchmarks._no_such_module"])
def test_discover_of_a_benchmark_whose_import_of_ours_is_gone_raises(moved: Callable[[str], None], gone: str) -> None:
    moved(gone)
    with pytest.raises(ModuleNotFoundError, match=gone):
        runner.discover()


def test_table_of_a_result_aligns_numbers_right_and_text_left() -> None:
    assert table(RESULT).splitlines() == [
        "candidate  rate_mib_s  note",
        "---------  ----------  ----",
        "ours            290.1  raw",
        "theirs            122  -",
    ]


def test_log_gets_a_line_of_data_and_the_page_the_newest_run_of_each_size_whole(tmp_path: Path) -> None:
    log, page = tmp_path / "log.jsonl", tmp_path / "LOG.md"
    more = Table(title="where it goes", columns=("kind", "percent"), rows=(("ours", 61.25), ("theirs", None)))
    found = measure("plain", plain, size=Size.DEFAULT, command="the command")
    old = dataclasses.replace(found, date="long ago", result=dataclasses.replace(RESULT, summary={"ratio": 1.5}))
    new = dataclasses.replace(found, result=dataclasses.replace(RESULT, tables=(more,)))
    for one in (old, new, dataclasses.replace(old, name="gone")):
        _log.append(one.entry(), log, page)
    log.write_text(log.read_text() + '{"date": "then", "title": "what was learnt", "text": "much"}\n', encoding="utf-8")
    entries = _log.read(log)
    text = _log.page_of([*entries[:2], {**entries[2], "again": "1234567"}, *entries[3:]])
    assert entries[1]["summary"] == RESULT.summary
    assert entries[1]["tables"][0]["rows"] == [["ours", 61.25], ["theirs", None]]
    assert page.read_text() == _log.page_of(entries[:3])
    assert "`the command` at" in text
    assert "| ours | 290.1 | raw |" in text
    assert (
        "where it goes:\n\n| kind | percent |\n|---|---|\n| ours | 61.25 |\n| theirs | - |\n\nSummary: ratio 2.378"
        in text
    )
    assert "\n- loopback only\n" in text
    assert f"- long ago (default, {found.commit}): ratio 1.5" in text
    assert "## gone\n\nThis study is over; it can be run again at 1234567." in text
    assert "- then: what was learnt" in text


def test_page_is_what_the_data_make_of_it() -> None:
    assert _log.PAGE.read_text(encoding="utf-8") == _log.page_of(_log.read()), (
        "stale: python -m tests.benchmarks --page"
    )
