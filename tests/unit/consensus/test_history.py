"""The chain of records, its file, and what a crash, a full disk or an earlier life leaves in it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swarm.consensus import history as history_file
from swarm.consensus import history as history_module
from swarm.consensus.history import History, HistoryLine, HistoryReader, earlier
from swarm.consensus.records import CloseRecord
from swarm.errors import Advice, ConfigError, OutOfSync, StateError
from swarm.membership.founding_record import Origin, founding_record
from tests.harness.expect import eventually
from tests.harness.rigs.consensus import GENESIS, ROSTER, RUN, acceptances, record

ONE = record()
TWO = record(ONE)
THREE = record(TWO)
RESUMED = founding_record(RUN, ROSTER, Origin.after(TWO))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def written(path: Path, *records: CloseRecord) -> History:
    history = History(path)
    history.begin(records[0])
    for one in records[1:]:
        history.append(one)
    return history


# --- one chain -------------------------------------------------------------------------------------------------------


def test_history_of_a_joiner_begins_with_its_first_record_and_is_one_chain(path: Path) -> None:
    history = written(path, ONE, TWO)
    assert (steps(path), history.head, history.next_step) == ([1, 2], TWO, 3)


def test_history_takes_only_the_next_record_of_the_chain(path: Path) -> None:
    history = written(path, ONE)
    for other, words in ((THREE, "step"), (TWO.model_copy(update={"previous": "0" * 64}), "follows")):
        with pytest.raises(OutOfSync, match=words):
            history.append(other)
    history.append(TWO)
    assert (steps(path), history.head) == ([1, 2], TWO)


def test_history_that_left_steps_out_begins_anew_and_keeps_what_was_before(path: Path) -> None:
    history = written(path, GENESIS, ONE)
    history.begin(THREE)
    assert (steps(path), history.head_hash) == ([3], THREE.hash())
    with pytest.raises(OutOfSync):
        history.append(TWO)
    history.append(record(THREE))
    assert steps(path) == [3, 4]
    assert [steps(one) for one in earlier(path)] == [[0, 1]]


@pytest.mark.parametrize(
    "other", [ONE, record(ONE, tokens=9), record(TWO, run="cd" * 32)], ids=["older", "another", "another run"]
)
def test_history_does_not_begin_anew_with_what_contradicts_it(other: CloseRecord, path: Path) -> None:
    history = History(path)
    history.begin(TWO)
    with pytest.raises(OutOfSync, match="not of the history that we know"):
        history.begin(other)
    history.begin(TWO)
    assert (steps(path), history.head) == ([2], TWO)


def test_nothing_follows_a_record_with_which_the_run_was_ended(path: Path) -> None:
    last = record(ended=True)
    history = written(path, GENESIS, last)
    with pytest.raises(OutOfSync, match="the run was ended with step 1"):
        history.append(record(last))
    assert steps(path) == [0, 1]


def test_history_that_begins_anew_with_its_newest_record_stays_as_it_is(path: Path) -> None:
    history = written(path, ONE, TWO)
    history.begin(TWO)
    history.append(THREE)
    assert (steps(path), names(path)) == ([1, 2, 3], ["history.jsonl"])


async def test_history_of_a_lineage_that_does_not_count_is_kept_under_a_number(path: Path) -> None:
    history = written(path, GENESIS, ONE, TWO)
    history.rewind(GENESIS)
    assert (history.head, history.next_step) == (GENESIS, 1)
    await history.add(record(term=4))
    history.append(record(history.head))
    assert steps(path) == [1, 2]
    assert steps(path.with_name("history-1.jsonl")) == [0, 1, 2]


def test_history_forgets_what_a_disk_refused_of_a_lineage_that_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = written(path, GENESIS)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _full)
        history.append(ONE)
        history.rewind(GENESIS)
    history.append(record(term=4))
    assert [json.loads(line)["term"] for line in path.read_text().splitlines()] == [4]


def test_history_that_a_disk_does_not_let_be_numbered_goes_on_without_a_gap(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = written(path, GENESIS)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _full)
        full.setattr(os, "rename", _full)
        history.append(ONE)
        with pytest.raises(OSError, match="No space"):
            history.rewind(GENESIS)
    assert history.head == ONE
    history.append(TWO)
    assert (steps(path), names(path)) == ([0, 1, 2], ["history.jsonl"])


def test_history_begins_with_a_founding_record_of_any_step(path: Path) -> None:
    history = History(path)
    history.check(RESUMED)
    history.append(RESUMED)
    assert (history.next_step, history.head_hash) == (3, RESUMED.hash())
    history.append(record(RESUMED))
    assert steps(path) == [2, 3]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (ONE, "step 1 came where step 0 is next"),
        (GENESIS.model_copy(update={"previous": "12" * 32}), "follows 121212121212"),
        (RESUMED.model_copy(update={"previous": "0" * 64}), "names no checkpoint's record"),
        (GENESIS.model_copy(update={"run": "cd" * 32}), "another run"),
    ],
    ids=["later step", "genesis after another", "resumed after none", "another run"],
)
def test_history_does_not_begin_by_itself_with_any_other_record(first: CloseRecord, words: str, path: Path) -> None:
    history = History(path, RUN)
    with pytest.raises(OutOfSync, match=words):
        history.append(first)
    assert names(path) == []


# --- what proves it --------------------------------------------------------------------------------------------------


def test_history_keeps_who_accepted_a_record_in_which_term(path: Path) -> None:
    history = History(path)
    history.begin(ONE, acceptances(ONE, 4), 4)
    history.append(TWO, acceptances(TWO, 1, ["A", "B"]), 1)  # type: ignore[list-item]
    history.append(THREE)
    first, second, third = HistoryReader(path)
    assert first == HistoryLine(ONE, acceptances(ONE, 4), 4)
    assert second == HistoryLine(TWO, acceptances(TWO, 1, ["A", "B"]), 1)  # type: ignore[list-item]
    assert third == HistoryLine(THREE, None, 0)
    assert [one.record.hash() for one in (first, second)] == [ONE.hash(), TWO.hash()]
    # The record's own fields stand at the top, so that any script finds step, loss_sum and digests there.
    line = json.loads(path.read_text().splitlines()[0])
    decision = line.pop("decision")
    assert CloseRecord.model_validate_json(json.dumps(line)) == ONE
    assert (decision["term"], set(decision["acceptances"])) == (4, {"A", "B", "T"})


@pytest.mark.parametrize("said", [{"repeats": 5}, {"repeats": 5, "step": 5, "void": True}])
def test_record_that_goes_back_is_void_and_of_a_step_before_the_open_one(said: dict[str, Any]) -> None:
    """Else a leader could have results of its own choice decided as if nobody had to know them."""
    with pytest.raises(ValidationError, match="a record that goes back is void"):
        CloseRecord.model_validate_json(json.dumps(json.loads(ONE.model_dump_json()) | said))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{}", "run"),
        (b"[]", ""),
        (b"nothing", "JSON"),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
        (HistoryLine(ONE, {"A": b"x"}).encode(), "decision.acceptances.A"),
        (json.dumps(ONE.model_dump(mode="json") | {"decision": {"term": -1, "acceptances": {}}}).encode(), "term"),
        (json.dumps(ONE.model_dump(mode="json") | {"loss_sum": float("nan")}).encode(), "loss_sum"),
        (json.dumps(ONE.model_dump(mode="json") | {"more": 1}).encode(), "more"),
    ],
)
def test_history_line_that_no_peer_has_written_is_named(line: bytes, words: str, path: Path) -> None:
    path.write_bytes(HistoryLine(GENESIS).encode() + line.strip() + b"\n" + HistoryLine(TWO).encode())
    reader = iter(HistoryReader(path))
    assert next(reader).record == GENESIS
    with pytest.raises(StateError, match=rf"history\.jsonl, line 2: not a close record: .*{words}"):
        next(reader)


def test_history_line_without_end_takes_no_memory_for_more_than_a_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_file, "MAX_LINE_BYTES", 1000)
    path.write_bytes(b"{" * 5000)
    with pytest.raises(StateError, match="line 1: longer than any record"):
        list(HistoryReader(path))


# --- an earlier life -------------------------------------------------------------------------------------------------


def test_history_of_an_earlier_life_is_kept_under_a_number(path: Path) -> None:
    written(path, GENESIS, ONE)
    for last in (TWO, THREE):
        again = History(path, RUN)
        assert (again.next_step, again.head_hash) == (0, "0" * 64)
        assert steps(path) != [last.step], "nothing changes before the first record"
        again.begin(last)
    assert names(path) == ["history-1.jsonl", "history-2.jsonl", "history.jsonl"]
    assert [steps(one) for one in [*earlier(path), path]] == [[0, 1], [2], [3]]


def test_history_numbers_go_on_after_the_highest_and_foreign_names_are_left_alone(path: Path) -> None:
    for name in ("history-9.jsonl", "history-old.jsonl", "history-2.json", "other-30.jsonl", "history-0.jsonl"):
        (path.parent / name).write_text("mine\n")
    written(path, ONE)
    written(path, TWO)
    assert [one.name for one in earlier(path)] == ["history-9.jsonl", "history-10.jsonl"]
    assert (path.parent / "history-9.jsonl").read_text() == "mine\n"


def test_history_of_another_run_is_refused_untouched(path: Path) -> None:
    written(path, GENESIS, ONE)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"a home of run {'cd' * 6}, and its history is of {RUN[:12]}") as found:
        History(path, "cd" * 32)
    assert (found.value.value, found.value.remedy) == (str(path.parent), Advice.OTHER_HOME)
    unknown = History(path)
    with pytest.raises(ConfigError, match="its history is of"):
        unknown.begin(ONE.model_copy(update={"run": "cd" * 32}))
    assert (path.read_bytes(), names(path)) == (before, ["history.jsonl"])


def test_history_that_is_none_is_refused(path: Path) -> None:
    path.write_text("# notes of mine\n")
    with pytest.raises(ConfigError, match="line 1: not a close record") as found:
        History(path)
    assert "Move it away" in found.value.remedy
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        History(path)


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_history_cut_anywhere_is_a_prefix_of_the_chain_and_is_taken_over(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(path)
    history.append(GENESIS, acceptances(GENESIS), 0)
    history.append(ONE, acceptances(ONE, 2), 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:size])
        reader = HistoryReader(path)
        kept = [line.record for line in reader]
        assert kept == [GENESIS, ONE][: (size >= first) + (size >= len(whole))]
        assert reader.torn is (size not in (0, first, len(whole)))
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            again = History(path, RUN)
        assert ("half record" in caplog.text) is reader.torn
        again.begin(TWO)
        again.append(THREE)
        assert steps(path) == [2, 3]
        assert [one.read_bytes() for one in earlier(path)] == ([whole[:size]] if kept else [])
        for one in [*earlier(path), path]:
            one.unlink()


class Crash(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("call", ["open", "fstat", "ftruncate", "pwrite", "fsync", "close", "rename"])
def test_history_after_a_crash_at_any_call_is_whole(path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call in turn is the last: before the first record, an append, and the beginning anew after a gap."""
    real, points = getattr(os, call), 0
    while True:
        home = path.parent / f"{call}-{points}"
        home.mkdir()
        calls = 0

        def last(*arguments: Any, limit: int = points, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                if call == "pwrite":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                raise Crash
            return real(*arguments, **named)

        died, done = False, 0
        with monkeypatch.context() as patch:
            patch.setattr(os, call, last)
            try:
                history = History(home / path.name)
                history.append(GENESIS)
                done += 1
                history.append(ONE)
                done += 1
                history.begin(THREE)
                done += 1
            except Crash:
                died = True
        lived = [line.record for one in [*earlier(home / path.name), home / path.name] if one.exists()
                 for line in HistoryReader(one)]  # fmt: skip
        assert lived in ([GENESIS, ONE, THREE][:done], [GENESIS, ONE, THREE][: done + 1])
        again = History(home / path.name, RUN)
        again.begin(THREE)
        assert steps(home / path.name) == [3]
        assert not any(name.startswith(".") for name in names(home / path.name))
        points += 1
        if not died:
            break
    assert points > (1 if call == "rename" else 3), "it never crashed"


@pytest.mark.parametrize(("call", "number"), [("pwrite", errno.ENOSPC), ("fsync", errno.EIO), ("open", errno.EMFILE)])
def test_history_on_a_disk_that_refuses_goes_on_in_memory_and_writes_all_that_is_missing_later(
    path: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    history = History(path, trouble=said.append)
    history.begin(GENESIS)
    real, refused = getattr(os, call), 0

    def full(*arguments: Any) -> Any:
        nonlocal refused
        refused += 1
        if call == "pwrite" and refused == 1:  # half of it fits
            return real(arguments[0], arguments[1][:100], arguments[2])
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        history.append(ONE)
        history.append(TWO)
    assert refused >= 2
    assert (history.head, history.next_step) == (TWO, 3)
    assert [line.record for line in HistoryReader(path)] == [GENESIS]
    history.append(THREE)
    assert [line.record for line in HistoryReader(path)] == [GENESIS, ONE, TWO, THREE]
    assert said == ["", os.strerror(number), os.strerror(number), ""]
    assert names(path) == ["history.jsonl"]


async def test_history_on_a_disk_that_stalls_holds_up_nobody_but_who_adds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_in: list[tuple[str, int]] = []
    history = History(path, trouble=lambda reason: told_in.append((reason, threading.get_ident())))
    await history.add(GENESIS)
    real, stalled, released = os.fsync, threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        stalled.set()
        assert released.wait(300)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    adding = asyncio.create_task(history.add(ONE))
    await eventually(stalled.is_set)
    assert (history.head, adding.done()) == (GENESIS, False)
    released.set()
    await adding
    history.append(TWO)
    assert (history.head, steps(path)) == (TWO, [0, 1, 2])
    assert set(told_in) == {("", threading.get_ident())}
    with pytest.raises(OutOfSync):
        await history.add(ONE)


def test_history_that_begins_anew_while_the_disk_refuses_is_written_as_two_chains(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = written(path, GENESIS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        history.append(ONE)
        history.begin(THREE)
    history.append(record(THREE))
    assert [steps(one) for one in earlier(path)] == [[0, 1]]
    assert steps(path) == [3, 4]


def test_history_keeps_so_many_records_for_a_disk_and_then_begins_a_chain_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "MAX_UNWRITTEN", 2)
    history = written(path, GENESIS)
    chain = [GENESIS]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        for _ in range(3):
            chain.append(record(chain[-1]))
            history.append(chain[-1])
    chain.append(record(chain[-1]))
    history.append(chain[-1])
    assert [steps(one) for one in earlier(path)] == [[0]]
    assert steps(path) == [3, 4], "a file has no gap"


def _full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_history_whose_file_was_exchanged_is_not_written_into(path: Path) -> None:
    said: list[str] = []
    history = History(path, trouble=said.append)
    history.begin(GENESIS)
    other = written(path, ONE)
    history.append(ONE)
    assert "exchanged" in said[-1]
    other.append(TWO)
    assert steps(path) == [1, 2]
    os.truncate(path, 5)
    other.append(THREE)
    assert path.stat().st_size == 5
    path.unlink()
    other.append(record(THREE))
    assert not path.exists()
    assert other.next_step == 5


def test_record_is_hashed_once_and_its_changed_copy_anew() -> None:
    other = ONE.model_copy(update={"lr": ONE.lr + 1, "roster": ROSTER.members[:2]})
    assert ONE.hash() is ONE.hash()
    assert ONE.members is ONE.members
    assert ONE.loss != ONE.model_copy(update={"loss_sum": ONE.loss_sum + 1}).loss
    assert other.hash() != ONE.hash()
    assert other.hash() == CloseRecord(**{name: getattr(other, name) for name in CloseRecord.model_fields}).hash()
    assert other.members.peers == ROSTER.peers[:2]
    assert ONE.model_copy().hash() == ONE.hash()
    assert ONE.model_copy() == ONE
