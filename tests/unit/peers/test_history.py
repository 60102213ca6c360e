"""``swarm history``: whose, what it shows, and what it finds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from peers.cli.app import run as swarm
from peers.commands.history import SHOWN_NAMES, Named, row_lines, row_of
from peers.home.places import take_place
from swarm.clock import SystemClock
from swarm.consensus.history import History, HistoryLine
from swarm.consensus.records import Quarantined
from swarm.consensus.roster import owner
from swarm.consensus.trials import Tally, Trial
from swarm.ids import MicrobatchId
from tests.harness.rigs.peers import PEERS, RUN, TRAINER, eventful, printed, roster, write

pytestmark = pytest.mark.usefixtures("elsewhere")

CHAIN = eventful()
TORN = b'{"run":"5a5a'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "copy" / "history.jsonl", CHAIN.lines)


# --- what it shows ---------------------------------------------------------------------------------------------------


def test_history_shows_a_line_for_each_step_and_who_came_and_went(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swarm(["history", "--file", str(path)]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == f"run (5a5a5a5a5a5a), steps 0 to 6: {path}"
    assert head.split() == ["step", "term", "loss", "tokens", "microbatches", "members", "leader", "hash", "changes"]
    cells = [row.split(maxsplit=8) for row in rows]
    assert [row[0] for row in cells] == [str(step) for step in range(7)]
    assert [row[7] for row in cells] == [line.record.hash()[:12] for line in CHAIN.lines]
    assert [row[5] for row in cells] == ["3", "3", "5", "4", "3", "3", "3"]
    assert cells[0][1:7] == ["0", "-", "0", "0", "3", "-"]
    assert (cells[1][2], cells[1][3], cells[1][4]) == ("0.1571", "21", "2")
    assert {number: row[8] for number, row in enumerate(cells) if len(row) > 8} == {
        0: "the run begins", 2: "joined: tern and vole", 3: "lost: mole; proposed in term 1", 4: "left: vole",
    }  # fmt: skip
    leader = owner(CHAIN.lines[2].record.members, 3, 2)
    assert PEERS[cells[3][6]] == leader
    assert cells[3][1] == "2"
    assert not any("\x1b" in row for row in rows)


def test_history_as_json_is_one_stable_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm(["history", "--file", str(path), "--json", "--verify", "--last", "4"]) == 0
    found = printed(capsys)
    assert list(found) == ["schema", "path", "run", "records", "rows", "torn", "earlier", "verified", "broken"]
    assert (found["schema"], found["run"], found["records"], found["torn"]) == (1, RUN, 7, False)
    assert found["verified"] == {"ok": True, "records": 7, "microbatches": 12, "trusted": None}
    assert [row["step"] for row in found["rows"]] == [3, 4, 5, 6]
    assert list(found["rows"][0]) == [
        "step", "term", "proposed", "founding", "void", "loss", "tokens", "microbatches", "aside", "members", "joined",
        "left", "absent", "leader", "accepted", "grad_norm", "clip", "lr", "hash", "previous", "cursors",
        "provisional_since", "confirmed", "ended", "codecs", "codecs_changed", "repeats",
        "left_out", "faults", "unfed", "variants", "parted",
    ]  # fmt: skip
    first = found["rows"][0]
    assert first["absent"] == [{"peer": PEERS["mole"], "name": "mole"}]
    assert (first["term"], first["proposed"], first["accepted"]) == (2, 1, 3)
    assert first["cursors"] == {TRAINER: [0, 6]}
    assert found["rows"][3]["hash"] == CHAIN.head.hash()


def test_history_row_of_many_and_strange_names_is_one_harmless_line() -> None:
    line = CHAIN.lines[2]
    row = dataclasses.replace(
        row_of(line, roster("otter", "mole", "heron")),
        joined=tuple(Named(f"p{n}", f"\x1b[31mn{n}\n") for n in range(SHOWN_NAMES + 3)),
        aside=2,
    )
    _, text = row_lines([row])
    assert text.isprintable()
    assert "n7 and 3 more; 2 microbatches set aside" in text


def test_history_row_of_a_joiner_s_first_record_knows_no_leader_and_counts_what_was_set_aside() -> None:
    aside = Quarantined(microbatch=MicrobatchId(TRAINER, "c0" * 8, 0, 9), reason="not finite")
    line = HistoryLine(CHAIN.lines[3].record.model_copy(update={"aside": (aside,)}), None, 2)
    row = row_of(line, None)
    assert (row.leader, row.joined, row.left, row.accepted, row.aside) == (None, (), (), None, 1)
    assert row.absent == (Named(PEERS["mole"], PEERS["mole"]),)
    assert "1 microbatch set aside" in row_lines([row])[1]


def test_history_row_tells_whose_sum_was_left_out_and_who_says_so() -> None:
    otter, mole, heron = (PEERS[name] for name in ("otter", "mole", "heron"))
    said = {mole: {otter: 11}, heron: {otter: 13}}  # of 21: they count some twice
    line = HistoryLine(CHAIN.lines[3].record.model_copy(update={"guarded": said}), None, 2)
    row = row_of(line, roster("otter", "mole", "heron"))
    assert [(one.peer.name, one.tokens) for one in row.left_out] == [("otter", 21)]
    assert "21 tokens of otter left out, as heron and mole said" in row_lines([row])[1]


def test_history_row_tells_of_a_trainer_of_which_nothing_more_is_taken() -> None:
    tally = Tally(microbatches=24, words=24, total=-2400, squares=240_000)
    trial = Trial(tallies={"stage-0": tally}, times=1, until=300)
    line = HistoryLine(CHAIN.lines[3].record.model_copy(update={"trials": {PEERS["otter"]: trial}}), None, 2)
    row = row_of(line, roster("otter", "mole", "heron"))
    assert "nothing more of otter until step 300: it pulls against the others" in row_lines([row])[1]


# --- whose -----------------------------------------------------------------------------------------------------------


def session(home: Path, place: str, name: str, lines: list[HistoryLine], *, run: str = RUN) -> Path:
    with take_place(home, place, clock=SystemClock()) as taken:
        root = taken.open_session(name=name, peer=PEERS["otter"], role="stage", run=run, run_name="small")
        if lines:
            write(root / "history.jsonl", lines)
        taken.ended("over", 0)
    return root


def test_history_without_a_name_is_the_longest_of_the_only_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        session(tmp_path / "home", place, f"peer-{place}", CHAIN.lines[:length])
        for place, length in (("a", 7), ("b", 2))
    )
    os.utime(second / "history.jsonl", (2_000_000_000, 2_000_000_000))
    assert swarm(["history", "--json"]) == 0
    assert printed(capsys)["path"] == str(first / "history.jsonl")
    session(tmp_path / "home", "c", "peer-c", CHAIN.lines, run="77" * 32)
    assert swarm(["history"]) == 2
    error = capsys.readouterr().err
    assert "peers of 2 runs are here" in error
    assert "history a" in error
    assert swarm(["history", "b", "--json"]) == 0
    assert printed(capsys)["path"] == str(second / "history.jsonl")


def test_history_of_a_local_run_s_directory_is_one_of_its_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = write(tmp_path / "out" / "first" / "peers" / "bootstrap" / "history.jsonl", CHAIN.lines)
    assert swarm(["history", "--file", "out/first", "--json"]) == 0
    assert printed(capsys)["path"] == str(kept)


def test_history_that_is_not_there_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> tuple[int, str]:
        return swarm(["history", *arguments]), capsys.readouterr().err

    assert error()[0] == 1
    assert "no peer of this machine has a history" in error()[1]
    code, said = error("nobody")
    assert (code, "no peer here is called 'nobody'" in said) == (3, True)
    code, said = error("--file", "nowhere")
    assert (code, "--file = 'nowhere'" in said, "next:" in said) == (2, True, True)
    assert error("a", "--peer", "b")[0] == 2
    assert error("a", "--file", "b")[0] == 2
    session(tmp_path / "home", "1", "otter", [])
    code, said = error("otter")
    assert (code, "otter (place 1) has no history" in said) == (1, True)
    older = session(tmp_path / "home", "2", "mole", CHAIN.lines)
    session(tmp_path / "home", "2", "mole", [])
    code, said = error("mole")
    assert (code, f"history --file {older / 'history.jsonl'}" in said) == (1, True)
    for text, why in (("", "no record yet"), ("# notes\n", "first line is no close record"), ("{", "no record yet")):
        (tmp_path / "file").write_text(text)
        code, said = error("--file", "file")
        assert (code, why in said.lower()) == (2, True), said


def test_history_being_written_or_cut_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "history.jsonl", CHAIN.lines[:2], TORN)
    History(path, RUN).begin(CHAIN.lines[3].record)
    write(path, CHAIN.lines[3:5], TORN)
    assert swarm(["history", "--file", str(path), "--verify"]) == 0
    *_, torn, before, verified = capsys.readouterr().out.splitlines()
    assert "an unfinished line" in torn
    assert "history-1.jsonl" in before
    assert "verified: 2 records" in verified
    assert "the first, of step 3, is taken on trust" in verified
    assert swarm(["history", "--file", str(path.with_name("history-1.jsonl")), "--json"]) == 0
    found = printed(capsys)
    assert (found["records"], found["torn"]) == (2, True)
