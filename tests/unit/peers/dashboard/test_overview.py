"""What is shown of a run, folded from its records, its events and what its members say."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from pathlib import Path

import pytest

from peers.control.status import SwarmLook
from peers.dashboard.folds import MAX_POINTS, Rates, StepPoint, StepSeries, clean
from peers.dashboard.overview import Overview
from peers.dashboard.sources import FilesSource, HistoryTail, directory_source
from swarm.errors import ConfigError
from swarm.events import (
    HeldOutLoss,
    HopMoved,
    PeerLost,
    PeerStarted,
    RunFound,
    Waiting,
    WentBack,
)
from swarm.ids import PeerId, RunId
from tests.harness.rigs.dashboard import look, member, seen, vitals
from tests.harness.rigs.peers import PEERS, batch, closed, eventful, told, write

OTTER, MOLE, HERON, TERN, VOLE = (PEERS[name] for name in ("otter", "mole", "heron", "tern", "vole"))


# --- from records ----------------------------------------------------------------------------------------------------


def test_records_say_who_is_there_what_counts_and_who_came_and_went() -> None:
    state = seen().document(200.0)
    assert (state["step"], state["members"], state["state"], state["tokens"]) == (6, 3, "training", 6 * 21)
    assert [row[0] for row in state["steps"]] == [1, 2, 3, 4, 5, 6]
    assert state["steps"][-1][4:] == [3, 106.0]
    assert state["tokens_per_s"] == 21.0
    assert sorted((one["step"], one["what"], one["name"]) for one in state["churn"]) == [
        (2, "joined", "tern"), (2, "joined", "vole"), (3, "lost", "mole"), (4, "left", "vole"),
    ]  # fmt: skip
    assert {one["name"]: one["state"] for one in state["peers"].values()} == {
        "otter": "member", "heron": "member", "tern": "member", "mole": "lost", "vole": "left",
    }  # fmt: skip
    otter, heron = state["peers"][OTTER], state["peers"][HERON]
    assert (otter["microbatches"], otter["tokens"], otter["trained_microbatches"]) == (12, 6 * 21, 0)
    assert (heron["microbatches"], heron["trained_microbatches"], heron["trained_tokens"]) == (0, 12, 6 * 21)
    assert [part["part"] for part in state["parts"]] == ["ends", "stage-0"]
    stage = state["parts"][1]
    assert (stage["peers"], stage["live"], stage["participating"], stage["averaged"]) == ([OTTER, TERN], 2, 2, 1)
    assert stage["why"] == {"tern": "no microbatch this step"}
    json.dumps(state, allow_nan=False)


def test_steps_that_did_not_count_are_taken_back() -> None:
    overview, lines = seen(), eventful().lines
    overview.event(told(HeldOutLoss(step=5, loss=2.5, tokens=9, microbatches=1, most=1)).record)
    assert overview.document(299.0)["held_out"] == (5, 2.5)
    overview.record(lines[5].record, 300.0)
    state = overview.document(301.0)
    assert state["held_out"] is None
    assert (state["step"], state["tokens"]) == (5, 5 * 21)
    assert state["peers"][OTTER]["microbatches"] == 10
    overview.record(lines[6].record, 302.0)
    assert overview.document(303.0)["peers"][OTTER]["microbatches"] == 12


def test_long_run_keeps_few_points_and_the_newest() -> None:
    series = StepSeries()
    for step in range(1, 4 * MAX_POINTS):
        series.add(StepPoint(step=step, loss=1.0, tokens=10, microbatches=1, at=float(step)))
    rows = series.rows()
    assert MAX_POINTS / 2 <= len(rows) <= MAX_POINTS + 1
    assert rows[0][0] <= 8
    assert rows[-1][0] == series.last == 4 * MAX_POINTS - 1
    assert series.tokens == 10 * (4 * MAX_POINTS - 1)
    assert series.tokens_per_s() == 10.0
    for step in range(1, 4 * MAX_POINTS):  # as somebody else tells it
        series.add(StepPoint(step=step, loss=1.0, tokens=10, microbatches=1, at=float(step)))
    assert series.tokens == 10 * (4 * MAX_POINTS - 1)
    assert series.rows() == rows
    series.rewind(4 * MAX_POINTS - 10)
    assert series.last == 4 * MAX_POINTS - 11
    assert series.tokens == 10 * (4 * MAX_POINTS - 11)


# --- from events -----------------------------------------------------------------------------------------------------


def test_events_say_when_and_why() -> None:
    overview = Overview({"kind": "files", "label": "a test"})
    events = [
        told(PeerStarted(role="stage", name="otter", pid=1, addresses=("/ip4/10.1.2.3/tcp/4",), seconds=1.0), wall=1.0),
        told(RunFound(run=RunId("5a" * 32), name="deep", stages=1, steps=50, wire=1, source=PeerId("x")), wall=2.0),
        closed(1, wall=10.0, loss=3.5), closed(1, "b", wall=9.5), closed(2, wall=12.0, loss=float("nan")),
        told(PeerLost(peer=MOLE, name="mole", reason="10.9.8.7:31 does not answer"), wall=12.5),
        told(HopMoved(step=3, microbatch=batch(1), stage=0, old=MOLE, new=OTTER, reason="unreachable"), wall=13.0),
        told(HopMoved(step=3, microbatch=batch(2), stage=0, old=MOLE, new=OTTER, reason="unreachable"), wall=13.1),
    ]  # fmt: skip
    for event in events:
        overview.event(event.record)
    state = overview.document(14.0)
    assert (state["run"]["name"], state["run"]["steps"], state["step"], state["loss"]) == ("deep", 50, 2, None)
    assert state["steps"][0] == [1, 3.5, 200.0, 1, None, 9.5]
    assert [(one["label"], one["text"]) for one in state["events"]] == [
        ("listening", "(address)"),
        ("run", "deep, 5a5a5a5a5a5a: 1 stage, 50 steps, wire version 1; from x"),
        ("lost", "mole: (address) does not answer"),
    ]
    assert [(one["what"], one["why"], one.get("times")) for one in state["moves"]] == [("microbatch", "unreachable", 2)]
    assert overview.document(500.0)["state"] == "past"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("dial /ip4/10.0.0.1/tcp/31337/p2p/12D3 failed", "dial (address) failed"),
        ("at 192.168.1.20:8080, and [2001:db8:0:1::5]:80", "at (address), and (address)"),
        (
            "fd00::5 and ::1, [::ffff:a00:1]:5, fe80::1ff:fe23:4567:890a%eth0.",
            "(address) and (address), (address), (address).",
        ),
        ("at 12:30:45 stage-0: 3.5 s; host.example:80", "at 12:30:45 stage-0: 3.5 s; host.example:80"),
        ("version 1.2.3 of step 12", "version 1.2.3 of step 12"),
        ("two\nlines \x1b[31mred", "two lines [31mred"),
    ],
)
def test_texts_have_no_network_address_and_are_one_line(text: str, shown: str) -> None:
    assert clean(text) == shown


# --- from what members say -------------------------------------------------------------------------------------------


def test_who_does_not_answer_waits_or_leaves_is_told_apart() -> None:
    overview = seen()
    said = {OTTER: vitals(phase="syncing", waiting_for="its part"), HERON: vitals()}
    silent = member("tern", "lost", lost="no answer to 6 pings from 10.0.0.1")
    overview.look(look(said, member("otter"), silent, member("mole", "waiting")))
    peers = overview.document(200.0)["peers"]
    assert (peers[OTTER]["state"], peers[OTTER]["why"]) == ("syncing", "its part")
    assert (peers[TERN]["state"], peers[TERN]["why"]) == ("silent", "no answer to 6 pings from (address)")
    assert (peers[MOLE]["state"], peers[MOLE]["here"]) == ("waiting", False)
    overview.look(look({HERON: vitals()}, member("otter")))
    assert overview.document(201.0)["peers"][OTTER]["why"] == "it did not answer just now"


def test_run_whose_last_replica_of_a_part_is_gone_says_what_it_waits_for_and_not_that_it_trains() -> None:
    overview = seen()
    revoked = member("heron", "lost", role="trainer", part="ends", lost="the invite for heron was revoked")
    overview.look(look({OTTER: vitals(), TERN: vitals()}, member("otter"), revoked))
    state = overview.document(107.0)
    assert state["state"] == "waiting"
    assert state["why"] == "a replica of ends: heron (the invite for heron was revoked)"
    itself = vitals(waiting_for="a trainer to join for ends: heron is lost; a copy is kept")
    overview.look(look({OTTER: itself, TERN: vitals()}, member("otter"), revoked))
    assert overview.document(108.0)["why"].startswith("a trainer to join for ends"), "who knows more says it"


def test_addresses_are_shown_where_asked_for() -> None:
    overview = Overview({"kind": "peer", "label": "a test"}, addresses=True)
    overview.record(eventful().lines[0].record)
    overview.look(look({OTTER: vitals()}, member("otter")))
    overview.event(told(PeerLost(peer=MOLE, name="mole", reason="10.9.8.7 is silent")).record)
    state = overview.document(1.0)
    assert state["peers"][OTTER]["addresses"] == ["/ip4/10.0.0.1/tcp/1"]
    assert state["events"][0]["text"] == "mole: 10.9.8.7 is silent"


def test_peer_that_was_started_anew_has_no_rates_from_before() -> None:
    rates = Rates()
    rates.look({OTTER: vitals(busy_s=100.0)})
    rates.look({OTTER: vitals(busy_s=1.0)})
    assert rates.by_peer == {}
    rates.look({OTTER: vitals(busy_s=2.0, idle_s=2.0)})
    assert rates.by_peer[OTTER].busy == pytest.approx(1 / 3)
    rates.look({})
    assert rates.by_peer == {}


def test_look_is_plain_data() -> None:
    assert json.loads(json.dumps(look({OTTER: vitals()}, member("otter"))))
    assert {field.name for field in dataclasses.fields(SwarmLook)} >= {"members", "vitals", "round_trips", "seen"}


# --- from files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [True, False])
async def test_run_that_went_back_waits_for_nobody_and_counts_its_steps_again(
    monkeypatch: pytest.MonkeyPatch, history: bool
) -> None:
    """Its history begins anew with the record of the return; the events of before are still there. Where a peer that is
    gone left the longest history, no record says that the run went back."""
    lines = eventful().lines
    back = lines[4].record.model_copy(update={"void": True, "repeats": 7, "returns": 1, "committed": (), "tokens": 0})
    again = [dataclasses.replace(lines[4], record=back), *lines[5:6]]
    gone = [PeerLost(peer=HERON, name="heron", reason="no answer"), Waiting(what="a replica of ends: heron")]
    events = [closed(step, wall=90.0 + step).record for step in range(1, 7)] + [
        told(one, wall=97.0).record for one in gone
    ]
    went = [
        told(WentBack(step=4, repeats=7, returns=1, absent=(HERON,)), name, wall).record
        for name, wall in (("a", 150.0), ("b", 152.0))
    ]
    overview, files = Overview({"kind": "peer", "label": "a test"}), FilesSource({}, None)
    records = [again[:1], again[1:]] if history else [lines, []]
    reads = iter(zip([[*events, went[0]], [closed(5, wall=151.0).record, went[1]]], map(deque, records), strict=True))
    monkeypatch.setattr(files, "_read", lambda: next(reads))
    await files.poll(overview, watched=False)
    assert overview.document(155.0)["state"] == "training", "the time of a step begins with the return"
    assert overview.document(180.0)["why"].startswith("no step has closed for 30 s, where one took 0.5 s")
    await files.poll(overview, watched=False)
    state = overview.document(153.0)
    assert (state["step"], state["state"], state["why"]) == (5, "training", "")
    assert [(row[0], row[-1]) for row in state["steps"]] == [(1, 91.0), (2, 92.0), (3, 93.0), (4, 94.0), (5, 151.0)]


def test_second_return_from_one_step_to_another_is_one_more() -> None:
    """As where a machine has too little memory for just that step. Others tell the first return late."""
    overview, shown = Overview({"kind": "files", "label": "a test"}), []
    first, second = (WentBack(step=4, repeats=7, returns=number, absent=(HERON,)) for number in (1, 2))
    for wall, event in enumerate((4, 5, 6, first, 5, 6, first, second, first, 5, second)):
        one = closed(event, wall=float(wall)) if isinstance(event, int) else told(event, "a", float(wall))
        overview.event(one.record)
        shown.append(overview.document(float(wall))["step"])
    assert shown == [4, 5, 6, 4, 5, 6, 6, 4, 4, 5, 5]


def test_history_that_was_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    lines = eventful().lines
    tail = HistoryTail(write(tmp_path / "history.jsonl", lines))
    assert len(list(tail.read())) == 7
    assert not list(tail.read())
    (tmp_path / "history.jsonl").unlink()
    assert not list(tail.read())
    write(tmp_path / "history.jsonl", lines[:2])
    assert [line.record.step for line in tail.read()] == [0, 1]


def test_line_that_no_peer_has_written_ends_a_history(tmp_path: Path) -> None:
    path = write(tmp_path / "history.jsonl", eventful().lines[:2])
    path.write_bytes(path.read_bytes() + b'{"run": "nonsense"}\n')
    assert len(list(HistoryTail(path).read())) == 2


def test_directory_without_a_run_is_an_error_that_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"events\.jsonl") as refused:
        directory_source(tmp_path)
    assert "swarm quickstart" in str(refused.value)


def test_hostile_words_of_a_member_are_no_state() -> None:
    overview = seen()
    overview.look(look({OTTER: vitals(phase="__proto__"), HERON: vitals(phase="waiting")}, member("otter")))
    state = overview.document(1.0)
    assert (state["peers"][OTTER]["state"], state["peers"][OTTER]["here"]) == ("unknown", True)
    assert (state["peers"][HERON]["state"], state["peers"][HERON]["here"]) == ("waiting", True)
    for wrong in ({"compute_s": 1e308}, {"busy_s": -1.0}, {"idle_s": float("inf")}, {"phase": "x" * 17}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            vitals(**wrong)


def test_another_run_in_the_same_place_begins_anew() -> None:
    overview = seen()
    other = eventful().lines[0].record.model_copy(update={"run": "7b" * 32})
    overview.record(other, 500.0)
    state = overview.document(501.0)
    assert (state["run"]["id"], state["step"], state["tokens"], state["churn"]) == ("7b" * 32, 0, 0, [])
