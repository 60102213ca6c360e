"""Who of a run's members does not answer, whether the run goes on, and whether what is shown of it is the present."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.dashboard.liveness import LOOKS, UNHEARD_S
from peers.dashboard.overview import Overview
from peers.dashboard.sources import DirectorySource, PlaceSource
from peers.home.places import look_at_place, take_place
from swarm.events import AttemptFailed, Event, PeerBack, PeerLost
from swarm.membership.vitals import LinkVitals
from swarm.monitoring.reader import RecordedEvent
from swarm.monitoring.recorder import ENVELOPE, encode_line
from tests.harness.rigs.clocks import HandClock, turns
from tests.harness.rigs.dashboard import look, member, seen, vitals
from tests.harness.rigs.peers import PEERS, closed, eventful, told, write

OTTER, MOLE, HERON, TERN, VOLE = (PEERS[name] for name in ("otter", "mole", "heron", "tern", "vole"))


def test_who_leaves_the_run_in_silence_was_lost_and_is_back_when_it_joins_again() -> None:
    overview, lines = Overview({"kind": "observer", "label": "a test"}), eventful().lines
    for line in lines[:4]:
        overview.record(line.record, 100.0 + line.record.step)
    for _ in range(LOOKS):  # the next record has vole left, and not absent
        overview.look(look({OTTER: vitals(), HERON: vitals(), TERN: vitals()}, unanswered={VOLE: "stalled"}))
    overview.record(lines[4].record, 104.0)
    state = overview.document(105.0)
    last = state["churn"][-1]
    assert (last["what"], last["name"], "though its connection stands" in last["why"]) == ("lost", "vole", True)
    assert (state["peers"][VOLE]["state"], state["peers"][VOLE]["why"][:12]) == ("lost", "with step 4:")
    again = {"roster": lines[3].record.roster, "step": 5}
    overview.record(lines[4].record.model_copy(update=again), 106.0)
    assert [one["what"] for one in overview.document(106.0)["churn"]][-1] == "back"


def test_a_link_to_itself_is_no_link() -> None:
    overview = seen()
    for sent in (0, 9000):
        links = tuple(LinkVitals(peer=peer, kind="direct", bytes_sent=sent, bytes_received=0) for peer in (OTTER, TERN))
        busy = vitals(links=links, busy_s=float(sent))
        overview.look(look({OTTER: busy, TERN: vitals()}, member("otter"), member("tern")))
    assert [(link["from"], link["to"]) for link in overview.document(200.0)["links"]] == [(OTTER, TERN)]


def test_run_of_which_nobody_answers_is_away_and_its_figures_are_old() -> None:
    overview = seen()
    overview.look(look({OTTER: vitals()}))
    assert overview.document(107.0)["fresh"]
    overview.look(look({}))
    overview.pulse.missed("away", "no member of the run answers")
    assert overview.document(108.0)["state"] == "training", "an answer may be late"
    state = overview.document(120.0)
    assert (state["state"], state["fresh"]) == ("away", False)
    assert state["why"].startswith("no member of the run answers; what is shown is from")
    assert "silent" not in [one["what"] for one in state["churn"]], "it may as well be us"


def test_events_name_peers_and_say_in_plain_words_what_the_network_says() -> None:
    overview = seen()
    reason = f"{OTTER}: deadline, no answer to health/1/beat in 3 s"
    overview.event(told(AttemptFailed(step=7, term=1, reason=reason), wall=1.0).record)
    (event,) = overview.document(200.0)["events"]
    words = "otter: none came in 3 s"
    assert event["text"] == f"the closing of step 7: {words}"


# --- where it is seen from ---------------------------------------------------------------------------------------


def recorded(path: Path, events: Sequence[RecordedEvent]) -> None:
    """Write a peer's events as it does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for one in events:
            event = one.record.event
            assert isinstance(event, Event)
            fields = {f"{name}_" if name in ENVELOPE else name: value for name, value in event.fields().items()}
            envelope = {"t": one.record.wall, "m": 0.0, "peer": one.record.peer, "kind": event.kind}
            file.write(encode_line(envelope | fields))


async def polled(source: PlaceSource, overview: Overview) -> None:
    """Look once, and take the answer."""
    for _ in range(2):
        await source.poll(overview, watched=True)
        await turns()


async def test_peers_that_come_later_are_read_too_and_the_churn_is_told_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "launch.log").touch()
    source, overview = DirectorySource(tmp_path), Overview({"kind": "files", "label": "a test"})
    await source.poll(overview, watched=True)
    state = overview.document(overview.pulse.wrote_at or 0.0)
    assert (state["state"], state["why"]) == ("waiting", "the run is being prepared: none of its peers has started")
    path = write(tmp_path / "peers" / "otter" / "history.jsonl", eventful().lines)
    lost = PeerLost(peer=MOLE, name="mole", reason="no answer to 6 pings")
    steps = {step: closed(step, wall=10.0 + step) for step in (1, 2, 3, 6)}
    events = [steps[1], steps[2], told(lost, wall=12.5), steps[3], steps[6]]
    for name, some in (("otter", events), ("heron", [told(PeerBack(peer=TERN, name="tern"), "heron", wall=14.0)])):
        recorded(path.parents[1] / name / "events.jsonl", some)
    await source.poll(overview, watched=True)
    state = overview.document(17.0)
    churn = [(one["what"], one["name"]) for one in state["churn"]]
    assert sorted(churn[:2]) == [("joined", "tern"), ("joined", "vole")]
    assert churn[2:] == [("silent", "mole"), ("lost", "mole"), ("left", "vole")]
    assert [one["why"] for one in state["churn"]][2:4] == ["no answer to 6 pings"] * 2
    assert state["step"] == 6


async def test_peer_that_hangs_or_is_gone_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [look({OTTER: vitals()}, member("otter", link="self"))]

    async def ask(self: PlaceSource) -> Any:
        return answers[0]

    monkeypatch.setattr(PlaceSource, "_ask", ask)
    overview = Overview({"kind": "peer", "label": "a test"})
    with take_place(tmp_path, clock=HandClock(1000.0)) as held:
        session = held.open_session(name="otter", peer=OTTER, role="stage")
        write(session / "history.jsonl", eventful().lines[:3])
        source = PlaceSource(look_at_place(held.path))
        for at in (1000.0, 1001.0):
            await polled(source, overview)
            assert overview.document(at)["fresh"]
        answers[0] = None  # as of one that is stopped
        for at in (1002.0, 1003.0):
            await polled(source, overview)
            overview.document(at)
        state = overview.document(1003.0 + UNHEARD_S)
        assert (state["state"], state["fresh"], state["peers"][OTTER]["state"]) == ("stalled", False, "stalled")
        assert state["why"].startswith("otter does not answer, though its process is there")
    answers[0] = {}
    await polled(source, overview)
    state = overview.document(1020.0)
    assert (state["state"], state["fresh"], state["peers"][OTTER]["state"]) == ("away", False, "away")
    assert state["why"].startswith("otter does not run any more: it was killed")
