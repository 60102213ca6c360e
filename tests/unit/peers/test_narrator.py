from __future__ import annotations

import dataclasses
import errno
import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from peers.console.event_words import describe, labelled
from peers.console.narration import EventLines, EventNarration
from peers.console.narrator import EventPrinter
from peers.console.voice import ConsolePrinter
from peers.settings import PeerSettings, exact_settings
from swarm.clock import moment
from swarm.events import (
    CheckpointFailed,
    CheckpointsSetAside,
    CheckpointWritten,
    CopyDropped,
    CopyHeld,
    DashboardServed,
    DataOpened,
    DonorDropped,
    Draining,
    Event,
    Invited,
    LimitSlows,
    LimitTooLow,
    LineageBegan,
    LineageConfirmed,
    LineageGivenUp,
    LinkUpgraded,
    LoopLag,
    PartAssigned,
    Participation,
    PeerBack,
    PeerLost,
    PeerReady,
    PeerStarted,
    PeerStopped,
    QuorumBack,
    QuorumLost,
    Reachability,
    RosterChanged,
    RunFound,
    RunStarted,
    StateDownloaded,
    StateLeftBehind,
    StepClosed,
    StepGivenUp,
    SyncProgress,
    TermBegan,
    Waiting,
)
from swarm.ids import ENDS, PartName, PeerId, RunId, stage_part
from swarm.state.checkpoints.files import part_path
from tests.harness.rigs.peers import FakeClock, kept_run

PEER = PeerId("12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW")
SHORT = "12D3Ko…uAx6zW"
ADDRESS = f"/ip4/192.0.2.7/tcp/31337/p2p/{PEER}"
FOUND = RunFound(run=RunId("ab" * 32), name="tiny", stages=2, steps=9, wire=2, source=PEER)
STARTED = PeerStarted(role="stage", name="s0", pid=1, addresses=(ADDRESS,), seconds=0.5)


class Heard:
    """A voice that remembers, and a sink that does."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.terminal = terminal
        self.lines: list[str] = []
        self.updates: list[str] = []
        self.events: list[Event] = []
        self.closed = False

    def say(self, text: str) -> None:
        self.lines.extend(text.splitlines())

    def update(self, text: str) -> None:
        self.updates.append(text)

    def close(self) -> None:
        self.closed = True

    def emit(self, event: Event) -> None:
        self.events.append(event)


def _step(step: int) -> StepClosed:
    return StepClosed(
        step=step, loss=7.5, tokens=4096, microbatches=4, grad_norm=1.0, clip=1.0, lr=0.1, digests={}, leader=PEER,
        record="r", seconds=2.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (FOUND, f"run           tiny, abababababab: 2 stages, 9 steps, wire version 2; from {SHORT}"),
        (STARTED, f"listening     {ADDRESS}"),
        (Reachability(how="direct", detail="by 2 peers", addresses=()), "reachability  direct: by 2 peers"),
        (
            LinkUpgraded(target=PEER, address=""),
            f"direct        {SHORT} is called directly from here on, no more through a relay",
        ),
        (
            DataOpened(tokens=512_000, microbatches=500, times=0.4),
            "data          512,000 tokens make 500 microbatches, more than the run reads",
        ),
        (
            DataOpened(tokens=512_000, microbatches=500, times=7.6),
            "data          512,000 tokens make 500 microbatches, which the run reads about 8 times",
        ),
        (
            DataOpened(tokens=1_024, microbatches=1, times=6000.0),
            "data          1,024 tokens make 1 microbatch, which the run reads about 6,000 times: so little text is "
            "learned by heart, and not what is common to texts; give more with --data",
        ),
        (Waiting(what="1 of 2 trainers are here"), "waiting       1 of 2 trainers are here"),
        (
            PartAssigned(part=PartName("stage-3"), reason="it has the fewest replicas"),
            "assigned      stage 3, because it has the fewest replicas",
        ),
        (
            LimitSlows(part=PartName("stage-3"), rate=125_000, step_bytes=21_000_000),
            "limit         a step takes about 3 minutes, for the whole run: this peer's share is 21.0 MB each way, "
            "where no codec makes it less, and it is held to 1 Mbit/s; a higher --max-upload and --max-download make "
            "it faster",
        ),
        (
            LimitTooLow(part=PartName("stage-3"), rate=125_000, needed=391_000),
            "limit         too low: averaging stage 3 is not done in time at 1 Mbit/s, so its rounds fail and the run "
            "leaves this peer out; check --max-upload and --max-download, and join again with 4mbit or more, or with "
            "--role trainer",
        ),
        (
            StateDownloaded(part=ENDS, step=4, donor=PEER, bytes_received=1_500_000, seconds=0.5),
            "synced        ends of step 4: 1.5 MB in 0.5 s, digest verified",
        ),
        (
            CopyHeld(part=ENDS, step=4, donor=PEER, bytes_received=1_500_000, seconds=0.5),
            "copying       the ends (embedding and head) of step 4, in case its replicas die: 1.5 MB in 0.5 s",
        ),
        (
            CopyDropped(part=PartName("stage-1"), reason="other peers keep it now"),
            "copying       stage 1 no longer: other peers keep it now",
        ),
        (
            StateLeftBehind(part=ENDS, step=4, copied=3, reason=""),
            "left behind   step 4 of the ends (embedding and head) is on this disk alone; its newest copy is of step 3",
        ),
        (
            StateLeftBehind(part=stage_part(1), step=4, copied=None, reason="there was no time to write it"),
            "left behind   step 4 of stage 1 is lost: there was no time to write it; there is no copy of it",
        ),
        (
            DonorDropped(part=ENDS, step=4, donor=PEER, code="violation", reason="a chunk is not\nwhat it must be"),
            f"syncing       the ends (embedding and head) no more from {SHORT}: a chunk is not what it must be",
        ),
        (
            CheckpointFailed(part=stage_part(1), step=20, reason="No space left on device", kept=10),
            "checkpoint    of step 20 was not written for stage 1: No space left on device; that of step 10 stays",
        ),
        (
            CheckpointFailed(part=stage_part(1), step=0, reason="I/O error", kept=None),
            "checkpoint    of step 0 was not written for stage 1: I/O error; no complete one is here",
        ),
        (
            CheckpointsSetAside(steps=(36, 48, 60), step=24, path="/h/aside"),
            "checkpoint    the run went on from step 24: what is kept here of steps 36, 48 and 60 does not count any "
            "more; in /h/aside until it passes them",
        ),
        (
            RunStarted(run=RunId("ab" * 32), stages=2, roster=({},) * 4, parameters=1000),
            "started       4 peers, 1,000 parameters",
        ),
        (
            RosterChanged(step=5, joined=({"name": "kind-owl", "part": "stage-1"},), left=({"name": "dry-hen"},)),
            "roster        step 5: kind-owl (stage-1) joined; dry-hen left",
        ),
        (Draining(reason="Ctrl-C"), "draining      leaving in order, asked by Ctrl-C; again leaves at once"),
        (
            Draining(reason="Ctrl-C", again=True),
            "draining      leaving in order already, now asked by Ctrl-C; again leaves at once",
        ),
        (Draining(reason="SIGTERM"), "draining      leaving in order, asked by SIGTERM"),
        (
            Draining(reason="Ctrl-C", bound="ends in 9 s at the latest"),
            "draining      leaving in order, asked by Ctrl-C; ends in 9 s at the latest; again leaves at once",
        ),
        (PeerLost(peer=PEER, name="s1", reason="it is silent"), "lost          s1: it is silent"),
        (
            QuorumLost(step=7, there=1, voters=3),
            "no quorum     1 of 3 voters can be reached: step 7 waits for a majority, however long that takes; nothing "
            "is lost. Who died counts again once it is started where it was; if too few ever are, end it: swarm new "
            "--resume goes on from the newest checkpoint",
        ),
        (
            QuorumLost(step=7, there=3, voters=8, alone_at=1_700_000_600.0),
            "no quorum     3 of 8 voters can be reached: step 7 waits for a majority until "
            f"{moment(1_700_000_600.0)}; then those that are here go on provisionally, which counts when a majority "
            "agrees later. Nothing is lost",
        ),
        (QuorumBack(step=7, seconds=31.4), "quorum        a majority is there again after 31 s: step 7 goes on"),
        (
            LineageBegan(step=7, there=3, voters=8),
            "provisional   3 of 8 voters go on from step 7 by themselves: it counts when a majority agrees",
        ),
        (
            LineageConfirmed(step=7, microbatches=12),
            "confirmed     a majority agrees with all since step 7: 12 microbatches",
        ),
        (
            LineageGivenUp(step=7, microbatches=12, reason="others did more"),
            "given up      12 microbatches since step 7: others did more",
        ),
        (PeerStopped(reason="every step is closed", exit_code=0), "done          every step is closed"),
        (PeerStopped(reason="s0 was stopped", exit_code=143), "ended         s0 was stopped"),
        (PeerStopped(reason="s1 is gone", exit_code=3), "ended         with exit code 3; the error says why"),
    ],
)
def test_narrator_says_what_happens(event: Event, line: str) -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock()).emit(event)
    assert heard.lines == [line]
    assert heard.events == [event]


def test_narrator_a_late_joiner_is_told_that_it_joined() -> None:
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    narrator.emit(StateDownloaded(part=ENDS, step=4, donor=PEER, bytes_received=1, seconds=0.5))
    narrator.emit(RunStarted(run=RunId("ab" * 32), stages=2, roster=({},) * 4, parameters=1000))
    assert heard.lines[1:] == ["joined        the run at step 4: 4 peers, 1,000 parameters"]


def test_narrator_calls_peers_by_their_names_once_it_knows_them() -> None:
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    other = "12D3KooWLbT7iWNTNKLbPXXdHbmWBVPvnxhVFBTj4yMJSJ1Hkv11"
    members = ({"peer": PEER, "name": "kind-owl"}, {"peer": other, "name": "dry\nhen"})
    narrator.emit(RunStarted(run=RunId("ab" * 32), stages=2, roster=members[:1], parameters=1000))
    narrator.emit(RosterChanged(step=5, joined=members[1:], left=()))
    narrator.emit(TermBegan(step=6, term=1, leader=PEER, reason=f"{other}: no answer to 3 pings in a row"))
    narrator.emit(StepGivenUp(step=7, lost=("stage-1",), holders={PEER: "stage-1"}))
    narrator.emit(STARTED)
    assert heard.lines[2:] == [
        "leading       step 6, in place of those that are gone: dry hen: no answer to 3 pings in a row",
        "given up      step 7, since stage-1 had nobody left: kind-owl holds stage-1 now; its work is done again",
        f"listening     {ADDRESS}",
    ]


def test_narrator_says_of_averaging_only_what_is_not_as_before() -> None:
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())

    def turnout(live: int, participating: int, **why: str) -> None:
        narrator.emit(
            Participation(
                step=3, part=PartName("stage-1"), live=live, participating=participating, averaged=participating,
                why={PeerId(peer): reason for peer, reason in why.items()},
                whole=live == participating > 1,
            )
        )  # fmt: skip

    turnout(3, 3)
    assert not heard.lines
    turnout(3, 2, owl="left out: rounds with it\nfailed")
    turnout(3, 2, owl="left out: rounds with it\nfailed")
    turnout(1, 1, owl="lost: silent", hen="lost: silent")
    turnout(2, 2)
    turnout(2, 2, owl="no microbatch this step")
    assert heard.lines == [
        "averaging     stage 1: 3 live / 2 participating / 2 averaged (owl: left out: rounds with it failed)",
        "averaging     stage 1: alone: nobody to average with",
        "averaging     stage 1: all 2 are in it again",
    ]


def test_narrator_first_step_of_a_joiner_has_no_rate_of_its_own() -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock()).emit(dataclasses.replace(_step(7), seconds=0.01, whole=False))
    assert heard.lines == ["step 7        loss 7.500, 4,096 tokens"]


@pytest.mark.parametrize(
    ("token", "line"),
    [
        ("", None),
        ("SWARM_DASHBOARD_TOKEN", "it asks for its token, which is in SWARM_DASHBOARD_TOKEN"),
        (
            "/a home/token",
            """the address with its token: echo "http://192.0.2.7:7300/#token=$(cat '/a home/token')\"""",
        ),
    ],
)
def test_narrator_says_what_opens_the_dashboard_and_no_token(token: str, line: str | None) -> None:
    words = describe(DashboardServed(address="http://192.0.2.7:7300/", token=token))
    assert words is not None
    first, *more = words[1].split("\n")
    assert (words[0], first) == ("dashboard", "http://192.0.2.7:7300/")
    assert [one.strip() for one in more] == ([] if line is None else [line])


def test_label_as_wide_as_its_column_stands_apart_from_the_text() -> None:
    assert labelled("step 1247/2000", "loss 2.362") == "step 1247/2000 loss 2.362"
    assert labelled("lost", "mole") == "lost          mole"


@pytest.mark.parametrize(("again", "since"), [(False, "it entered the run"), (True, "it was cut off")])
def test_narrator_ready_says_since_when_it_counts(again: bool, since: str) -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock()).emit(PeerReady(part=ENDS, step=3, reason="", seconds=1.0, again=again))
    assert (
        heard.lines[0]
        == f"READY         the ends (embedding and head) at step 3, averages from step 4 on, 1.0 s after {since}"
    )


def test_narrator_ready_says_what_to_type_next() -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock()).emit(PeerReady(part=ENDS, step=3, reason="", seconds=1.0))
    assert heard.lines[0].startswith("READY         the ends")
    assert "status" in heard.lines[1]
    assert "drain" in heard.lines[1]


def test_narrator_passes_over_what_is_for_machines() -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock()).emit(LoopLag(p50_ms=1, p99_ms=1, max_ms=1))
    assert heard.lines == []
    assert len(heard.events) == 1


def test_narrator_fast_steps_are_told_once_a_second_and_the_last_always() -> None:
    heard, clock = Heard(), FakeClock()
    narrator = EventPrinter(heard, heard, clock)
    narrator.emit(FOUND)
    for step in range(1, 10):
        narrator.emit(_step(step))
        clock.now += 0.3
    assert [line.split()[1] for line in heard.lines[1:]] == ["1/9", "5/9", "9/9"]
    assert "loss 7.500, 4,096 tokens in 2.0 s (2,048 a second)" in heard.lines[-1]


def test_narrator_what_is_waited_for_with_each_step_is_told_once_a_minute() -> None:
    heard, clock = Heard(), FakeClock()
    narrator = EventPrinter(heard, heard, clock)
    for _ in range(13):
        narrator.emit(Waiting(what="another trainer"))
        narrator.emit(Waiting(what=""))
        clock.now += 6.0
    narrator.emit(Waiting(what="a leader"))
    assert heard.lines == [*["waiting       another trainer"] * 2, "waiting       a leader"]


LOST = PeerLost(peer=PEER, name="s1", reason="it was stopped")
LAG = LoopLag(p50_ms=1, p99_ms=1, max_ms=1)


def _labels(heard: Heard) -> list[str]:
    return [line.split()[0] for line in heard.lines]


def test_narrator_the_same_wait_is_said_again_after_it_said_that_all_were_back() -> None:
    heard, clock = Heard(), FakeClock()
    narrator = EventPrinter(heard, heard, clock)
    for _ in range(2):
        narrator.emit(LOST)
        narrator.emit(Waiting(what="a stage host to join"))
        clock.now += 5.0
        narrator.emit(PeerBack(peer=PEER, name="s1"))
        narrator.emit(Waiting(what=""))
        clock.now += 5.0
    assert _labels(heard) == ["lost", "waiting", "back"] * 2


def test_narrator_who_is_asked_to_leave_says_again_what_it_waits_for() -> None:
    heard, waits = Heard(), Waiting(what="a majority")
    narrator = EventPrinter(heard, heard, FakeClock())
    for event in (waits, waits, Draining(reason="Ctrl-C"), waits, waits):
        narrator.emit(event)
    assert _labels(heard) == ["waiting", "draining", "waiting"]


def test_narrator_a_wait_that_goes_on_is_said_once_its_time_has_come() -> None:
    heard, clock = Heard(), FakeClock()
    narrator = EventPrinter(heard, heard, clock)
    for what in ("another trainer", "", "another trainer"):
        narrator.emit(Waiting(what=what))
        clock.now += 1.0
    for _ in range(30):
        narrator.emit(LAG)
        clock.now += 10.0
    assert heard.lines == ["waiting       another trainer"] * 2


@pytest.mark.parametrize(
    "over", [Waiting(what=""), PeerReady(part=ENDS, step=3, reason="", seconds=1.0), PartAssigned(part=ENDS, reason="")]
)
def test_narrator_a_wait_that_is_over_is_not_said_late(over: Event) -> None:
    heard, clock = Heard(), FakeClock()
    narrator = EventPrinter(heard, heard, clock)
    for what in ("the run to start", "", "the run to start"):
        narrator.emit(Waiting(what=what))
    clock.now += 70.0
    narrator.emit(over)
    narrator.emit(LAG)
    assert _labels(heard).count("waiting") == 1


def test_narrator_end_says_that_one_part_was_kept_and_not_the_whole_step() -> None:
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    path = "/h/runs/a/checkpoints/step-00000004/ends.safetensors"
    narrator.emit(CheckpointWritten(part=ENDS, step=4, path=path, seconds=0.1))
    narrator.emit(PeerStopped(reason="stopped", exit_code=143))
    assert heard.lines[0] == "kept          ends of step 4 in /h/runs/a"
    assert heard.lines[1].strip().startswith("its other parts are elsewhere, or being written: ")
    assert "ckpt pull /h/runs/a --from A --from B" in heard.lines[1]
    assert heard.lines[2].strip().startswith("once all of them are here: ")
    assert heard.lines[2].endswith('sample /h/runs/a --prompt "The"')


def test_narrator_end_offers_a_sample_of_an_earlier_step_that_is_whole(tmp_path: Path) -> None:
    run = kept_run()
    run.keep(tmp_path / "a", 4)
    directory = run.keep(tmp_path / "a", 8, [stage_part(0)])
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    path = str(part_path(directory.checkpoints, 8, stage_part(0)))
    narrator.emit(CheckpointWritten(part=stage_part(0), step=8, path=path, seconds=0.1))
    narrator.emit(PeerStopped(reason="stopped", exit_code=143))
    assert "ckpt pull" in heard.lines[1]
    assert heard.lines[2].strip().startswith("until then, from an earlier step: ")


def test_narrator_end_names_all_parts_that_were_kept_of_the_newest_step() -> None:
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    for step, part in ((4, ENDS), (5, ENDS), (5, stage_part(0))):
        path = f"/h/runs/a/checkpoints/step-{step:08}/{part}.safetensors"
        narrator.emit(CheckpointWritten(part=part, step=step, path=path, seconds=0.1))
    narrator.emit(PeerStopped(reason="stopped", exit_code=143))
    assert heard.lines[0] == "kept          ends and stage-0 of step 5 in /h/runs/a"


def test_narrator_end_is_said_though_the_disk_cannot_be_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(root: Path, step: int) -> None:
        raise PermissionError(errno.EIO, "I/O error")

    monkeypatch.setattr("peers.console.narrator.held", refused)
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    path = "/h/runs/a/checkpoints/step-00000004/ends.safetensors"
    narrator.emit(CheckpointWritten(part=ENDS, step=4, path=path, seconds=0.1))
    narrator.emit(PeerStopped(reason="stopped", exit_code=143))
    assert heard.lines[-1].startswith("ended")


def test_narrator_end_does_not_advise_to_gather_what_is_there(tmp_path: Path) -> None:
    directory = kept_run().keep(tmp_path / "a", 4)
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    path = str(part_path(directory.checkpoints, 4, ENDS))
    narrator.emit(CheckpointWritten(part=ENDS, step=4, path=path, seconds=0.1))
    narrator.emit(PeerStopped(reason="stopped", exit_code=143))
    assert "ckpt pull" not in heard.lines[1]
    assert heard.lines[1].endswith(f'sample {directory.root} --prompt "The"')


def test_narrator_what_was_kept_back_is_said_before_the_end() -> None:
    heard, clock = Heard(), FakeClock()
    narrator = EventPrinter(heard, heard, clock)
    narrator.emit(_step(1))
    narrator.emit(_step(2))
    narrator.emit(PeerStopped(reason="stopped", exit_code=143))
    assert [line.split()[0] for line in heard.lines] == ["step", "step", "ended"]
    assert heard.closed


def _progress(received: int) -> SyncProgress:
    return SyncProgress(part=ENDS, step=1, donor=PEER, bytes_received=received, bytes_total=100)


def test_narrator_download_is_a_line_per_quarter_where_there_is_no_terminal() -> None:
    heard = Heard()
    narrator = EventPrinter(heard, heard, FakeClock())
    for received in range(0, 101, 5):
        narrator.emit(_progress(received))
    assert [line.split("(")[1] for line in heard.lines] == ["25%)", "50%)", "75%)", "100%)"]


def test_narrator_download_moves_on_a_terminal() -> None:
    heard = Heard(terminal=True)
    narrator = EventPrinter(heard, heard, FakeClock())
    for received in (0, 10, 100):
        narrator.emit(_progress(received))
    assert (len(heard.updates), heard.lines) == (3, [])


def test_narrator_nothing_of_others_reaches_the_terminal_raw() -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock()).emit(PeerLost(peer=PEER, name="\x1b[2Jx", reason="\r\x07"))
    assert not set("\x1b\r\x07") & set("".join(heard.lines))


def test_narrator_invite_stands_alone_on_its_line_with_what_to_paste() -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock(), founder=True).emit(Invited(invite="swarm1:abc"))
    assert "swarm1:abc" in heard.lines
    assert any(line.endswith("join swarm1:abc --role stage") for line in heard.lines)
    assert any(line.endswith("join swarm1:abc --role trainer --data TEXT") for line in heard.lines)


def test_event_lines_are_what_the_recorder_writes() -> None:
    heard = Heard()
    EventLines(heard, heard, FakeClock(), peer="me").emit(PeerLost(peer=PEER, name="s1", reason="silent"))
    line = json.loads(heard.lines[0])
    assert {key: line[key] for key in ("peer", "kind", "peer_", "name")} == {
        "peer": "me", "kind": "PeerLost", "peer_": PEER, "name": "s1"
    }  # fmt: skip


# --- narration -------------------------------------------------------------------------------------------------------


def _settings(role: str, **more: Any) -> PeerSettings:
    needed = {"manifest": "m", "tokenizer": "t"} if role == "bootstrap" else {"bootstrap": (ADDRESS,)}
    return exact_settings(home="h", role=role, **needed, **more)


@pytest.mark.parametrize("order", [(FOUND, STARTED), (STARTED, FOUND)])
def test_narration_founder_invites_once_it_can_be_reached(order: tuple[Event, ...]) -> None:
    heard = Heard()
    narration = EventNarration(_settings("bootstrap"), heard, FakeClock(), peer=PEER)
    for event in (*order, *order):
        narration.emit(event)
    invited = [event for event in heard.events if isinstance(event, Invited)]
    assert len(invited) == 1
    assert invited[0].invite.startswith("swarm1:")


def test_narration_others_invite_nobody_and_a_silent_one_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    heard = Heard()
    narration = EventNarration(_settings("stage"), heard, FakeClock(), peer=PEER)
    narration.emit(FOUND)
    narration.emit(STARTED)
    assert heard.events == [FOUND, STARTED]
    assert capsys.readouterr().out == ""


def test_narration_in_words_puts_what_is_logged_into_the_same_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard, logger = Heard(), logging.getLogger("swarm.consensus.ballot")
    monkeypatch.setattr("peers.console.narration.ConsolePrinter", lambda: heard)
    narration = EventNarration(_settings("stage", verbose=True), heard, FakeClock(), peer=PEER)
    logger.info("for nobody")
    logger.warning("%s is not a vote\nREADY", "/h/vote")
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("the peer failed")
    narration.emit(PeerStopped(reason="stopped", exit_code=143))
    logger.warning("nobody listens any more")
    assert heard.lines[:2] == ["warning       /h/vote is not a vote READY", "error         the peer failed"]
    assert heard.lines[2].startswith("Traceback ")
    assert heard.lines[-2:] == ["ValueError: no", "ended         stopped"]


# --- the voice -------------------------------------------------------------------------------------------------------


def _pipe() -> tuple[int, io.TextIOWrapper]:
    reading, writing = os.pipe()
    return reading, os.fdopen(writing, "w", encoding="ascii")


def test_voice_says_everything_before_it_closes() -> None:
    reading, out = _pipe()
    with out:
        voice = ConsolePrinter(out)
        voice.say("one")
        voice.update("moving")
        voice.say("…two")
        voice.close()
    with os.fdopen(reading, "rb") as file:
        assert file.read() == b"one\n\rmoving\x1b[K\r\x1b[K?two\n"
    assert not voice.terminal


def test_voice_nobody_reads_is_no_trouble() -> None:
    reading, out = _pipe()
    voice = ConsolePrinter(out)
    os.close(reading)
    for _ in range(10):
        voice.say("x" * 10_000)
    voice.close()
    out.close()


def test_voice_a_reader_who_stands_still_holds_up_nobody() -> None:
    reading, out = _pipe()
    voice = ConsolePrinter(out)
    for _ in range(3000):
        voice.say("x" * 1000)
    os.close(reading)
    voice.close()
    out.close()


FORGED = "otter\nREADY         stage 0\r\n\u2028error: run this"


@pytest.mark.parametrize(
    "event",
    [
        RosterChanged(step=1, joined=({"name": FORGED, "role": "stage"},), left=()),
        PeerLost(peer=PEER, name=FORGED, reason=FORGED),
        Waiting(what=FORGED),
        PartAssigned(part=None, reason=FORGED),
        PeerStopped(reason=FORGED, exit_code=75),
    ],
)
def test_narrator_names_of_others_forge_no_lines(event: Event) -> None:
    heard = Heard()
    EventPrinter(heard, heard, FakeClock()).emit(event)
    assert len(heard.lines) == 1
    assert "otter READY stage 0" in heard.lines[0]
