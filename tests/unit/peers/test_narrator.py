from __future__ import annotations

import dataclasses
import errno
import io
import json
import logging
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from peers.console.event_words import describe, labelled
from peers.console.narration import EventLines, EventNarration
from peers.console.narrator import EventPrinter
from peers.console.voice import ConsolePrinter
from peers.settings import PeerSettings, exact_settings
from swarm.events import (
    AuditOutcome,
    CheckpointFailed,
    CheckpointsSetAside,
    CheckpointWritten,
    CopyDropped,
    CopyHeld,
    DashboardServed,
    DataOpened,
    DeviceChosen,
    DonorDropped,
    Draining,
    Event,
    HeldOutLoss,
    HopAudited,
    HopDiffers,
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
    ProvenWrong,
    QuorumBack,
    QuorumLost,
    QuotaTaken,
    Reachability,
    RecordRefused,
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
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId, RunId, stage_part
from swarm.state.checkpoints.files import part_path
from tests.harness.rigs.peers import PARTS, FakeClock, kept_run

PEER = PeerId("12D3KooWMrSnzaXRF41zHeiKFu6JxTnmWJGKBmEmoW2LsquAx6zW")
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


EVENTS: tuple[Event, ...] = (
    DeviceChosen(device="cpu", why="no CUDA device is visible"),
    FOUND,
    STARTED,
    Reachability(how="direct", detail="by 2 peers", addresses=()),
    LinkUpgraded(target=PEER, address=""),
    DataOpened(tokens=512_000, microbatches=500, times=0.4),
    DataOpened(tokens=512_000, microbatches=500, times=7.6),
    DataOpened(tokens=1_024, microbatches=1, times=6000.0),
    HeldOutLoss(step=20, loss=5.125, tokens=2_048, microbatches=8, most=8),
    HeldOutLoss(step=20, loss=5.125, tokens=512, microbatches=2, most=8, reason="step 21 is not open here"),
    HeldOutLoss(step=20, loss=None, tokens=0, microbatches=0, most=8, reason="nobody holds stage 1 now"),
    Waiting(what="1 of 2 trainers are here"),
    PartAssigned(part=PartName("stage-3"), reason="it has the fewest replicas"),
    LimitSlows(part=PartName("stage-3"), rate=125_000, step_bytes=21_000_000),
    LimitTooLow(part=PartName("stage-3"), rate=125_000, needed=391_000),
    StateDownloaded(part=ENDS, step=4, donor=PEER, bytes_received=1_500_000, seconds=0.5),
    CopyHeld(part=ENDS, step=4, donor=PEER, bytes_received=1_500_000, seconds=0.5),
    CopyDropped(part=PartName("stage-1"), reason="other peers keep it now"),
    StateLeftBehind(part=ENDS, step=4, copied=3, reason=""),
    StateLeftBehind(part=stage_part(1), step=4, copied=None, reason="there was no time to write it"),
    DonorDropped(part=ENDS, step=4, donor=PEER, code="violation", reason="a chunk is not\nwhat it must be"),
    CheckpointFailed(part=stage_part(1), step=20, reason="No space left on device", kept=10),
    CheckpointFailed(part=stage_part(1), step=0, reason="I/O error", kept=None),
    CheckpointsSetAside(steps=(36, 48, 60), step=24, path="/h/aside"),
    RunStarted(run=RunId("ab" * 32), stages=2, roster=({},) * 4, parameters=1000),
    RosterChanged(step=5, joined=({"name": "kind-owl", "part": "stage-1"},), left=({"name": "dry-hen"},)),
    QuotaTaken(step=4, peer=PEER, mean=-0.61, microbatches=24, until=261),
    HopDiffers(step=4, microbatch=MicrobatchId(PEER, "00" * 8, 0, 7), stage=1, peer=PEER, reason="differs"),
    *(
        HopAudited(
            step=4,
            microbatch=MicrobatchId(PEER, "00" * 8, 0, 7),
            stage=1,
            peer=PEER,
            outcome=outcome,
            reason="3 of 64 rows are further out than 1e-05 of their length",
            by=(PEER,),
        )
        for outcome in get_args(AuditOutcome)
    ),
    ProvenWrong(
        step=4,
        peer=PEER,
        accused=PEER,
        part=stage_part(1),
        microbatch=MicrobatchId(PEER, "00" * 8, 0, 7),
        by=(PEER,),
        until=261,
    ),
    ProvenWrong(step=4, peer=PEER, accused=PEER, part=stage_part(1), microbatch=None, by=(PEER,), until=261),
    ProvenWrong(
        step=4,
        peer=PEER,
        accused=PeerId("p2"),
        part=stage_part(1),
        microbatch=MicrobatchId(PEER, "00" * 8, 0, 7),
        by=(PEER,),
        until=0,
    ),
    RecordRefused(step=4, peer=PEER, reason="no replica of stage-0 signed its result"),
    Draining(reason="Ctrl-C"),
    Draining(reason="Ctrl-C", again=True),
    Draining(reason="SIGTERM"),
    Draining(reason="Ctrl-C", bound="ends in 9 s at the latest"),
    PeerLost(peer=PEER, name="s1", reason="it is silent"),
    QuorumLost(step=7, there=1, voters=3),
    QuorumLost(step=7, there=3, voters=8, alone_at=1_700_000_600.0),
    QuorumBack(step=7, seconds=31.4),
    LineageBegan(step=7, there=3, voters=8),
    LineageConfirmed(step=7, microbatches=12),
    LineageGivenUp(step=7, microbatches=12, reason="others did more"),
    PeerStopped(reason="every step is closed", exit_code=0),
    PeerStopped(reason="s0 was stopped", exit_code=143),
    PeerStopped(reason="s1 is gone", exit_code=3),
)


def told(*story: Event | float, terminal: bool = False, founder: bool = False) -> Heard:
    """What a narrator of its own says of these events; a number is how many seconds pass."""
    heard, clock = Heard(terminal=terminal), FakeClock()
    narrator = EventPrinter(heard, heard, clock, founder=founder)
    for one in story:
        if isinstance(one, float):
            clock.now += one
        else:
            narrator.emit(one)
    assert heard.events == [one for one in story if not isinstance(one, float)]
    return heard


def test_narrator_says_what_happens_in_a_line_each(snapshot: Any) -> None:
    lines = [told(event).lines for event in EVENTS]
    assert {len(said) for said in lines} == {1}
    assert [said[0] for said in lines] == snapshot


OTHER = "12D3KooWLbT7iWNTNKLbPXXdHbmWBVPvnxhVFBTj4yMJSJ1Hkv11"
MEMBERS = ({"peer": PEER, "name": "kind-owl"}, {"peer": OTHER, "name": "dry\nhen"})
RUN = RunStarted(run=RunId("ab" * 32), stages=2, roster=({},) * 4, parameters=1000)
READY = PeerReady(part=ENDS, step=3, reason="", seconds=1.0)
LOST = PeerLost(peer=PEER, name="s1", reason="it was stopped")
LAG = LoopLag(p50_ms=1, p99_ms=1, max_ms=1)
STOPPED = PeerStopped(reason="stopped", exit_code=143)
TRAINER, START, NOTHING, MAJORITY = (
    Waiting(what=what) for what in ("another trainer", "the run to start", "", "a majority")
)


def turnout(live: int, participating: int, **why: str) -> Participation:
    return Participation(
        step=3, part=PartName("stage-1"), live=live, participating=participating, averaged=participating,
        why={PeerId(peer): reason for peer, reason in why.items()}, whole=live == participating > 1,
    )  # fmt: skip


def written(step: int, part: PartName, path: str = "/h/runs/a/checkpoints/step-{step:08}/{part}.safetensors") -> Event:
    return CheckpointWritten(part=part, step=step, path=path.format(step=step, part=part), seconds=0.1)


STORIES: dict[str, tuple[Event | float, ...]] = {
    "a late joiner is told that it joined": (
        StateDownloaded(part=ENDS, step=4, donor=PEER, bytes_received=1, seconds=0.5), RUN,
    ),
    "peers have their names once they are known": (
        dataclasses.replace(RUN, roster=MEMBERS[:1]),
        RosterChanged(step=5, joined=MEMBERS[1:], left=()),
        TermBegan(step=6, term=1, leader=PEER, reason=f"{OTHER}: no answer to 3 pings in a row"),
        StepGivenUp(step=7, lost=("stage-1",), holders={PEER: "stage-1"}),
        StepGivenUp(step=8, lost=("stage-1.v0of2",), holders={}),
        STARTED,
    ),
    "of averaging only what is not as before": (
        turnout(3, 3),
        turnout(3, 2, owl="left out: rounds with it\nfailed"),
        turnout(3, 2, owl="left out: rounds with it\nfailed"),
        turnout(1, 1, owl="lost: silent", hen="lost: silent"),
        turnout(2, 2),
        turnout(2, 2, owl="no microbatch this step"),
    ),
    "what is learnt of a step, where data leaves tokens out": (dataclasses.replace(_step(7), computed=16_384),),
    "the first step of a joiner has no rate": (dataclasses.replace(_step(7), seconds=0.01, whole=False),),
    "ready, and what to type next": (READY,),
    "ready again after it was cut off": (dataclasses.replace(READY, again=True),),
    "what is for machines is passed over": (LAG,),
    "fast steps once a second and the last always": (FOUND, *(e for n in range(1, 10) for e in (_step(n), 0.3))),
    "a wait with each step once a minute": (*(TRAINER, NOTHING, 6.0) * 13, Waiting(what="a leader")),
    "the same wait again after all were back": (
        *(LOST, Waiting(what="a stage host to join"), 5.0, PeerBack(peer=PEER, name="s1"), NOTHING, 5.0) * 2,
    ),
    "who is asked to leave says again what it waits for": (
        MAJORITY, MAJORITY, Draining(reason="Ctrl-C"), MAJORITY, MAJORITY,
    ),
    "a wait that goes on is said once its time has come": (
        TRAINER, 1.0, NOTHING, 1.0, TRAINER, 1.0, *(LAG, 10.0) * 30,
    ),
    "a wait that is over is not said late": (START, NOTHING, START, 70.0, NOTHING, LAG),
    "nor once it is ready": (START, NOTHING, START, 70.0, READY, LAG),
    "nor once it has a part": (START, NOTHING, START, 70.0, PartAssigned(part=ENDS, reason=""), LAG),
    "one part was kept and not the whole step": (written(4, ENDS), STOPPED),
    "all parts that were kept of the newest step": (
        written(4, ENDS), written(5, ENDS), written(5, stage_part(0)), STOPPED,
    ),
    "what was kept back is said before the end": (_step(1), _step(2), STOPPED),
    "a download is a line a quarter": tuple(
        SyncProgress(part=ENDS, step=1, donor=PEER, bytes_received=received, bytes_total=100)
        for received in range(0, 101, 5)
    ),
    "nothing of others reaches the terminal raw": (PeerLost(peer=PEER, name="\x1b[2Jx", reason="\r\x07"),),
}  # fmt: skip


def test_narrator_tells_stories(snapshot: Any) -> None:
    lines = {name: told(*story).lines for name, story in STORIES.items()}
    assert [text for name, said in lines.items() for text in (f"{name}:", *(f"  {line}" for line in said))] == snapshot


def test_narrator_says_what_opens_the_dashboard_and_no_token(snapshot: Any) -> None:
    said = [
        describe(DashboardServed(address="http://192.0.2.7:7300/", token=token))
        for token in ("", "SWARM_DASHBOARD_TOKEN", "/a home/token")
    ]
    assert ["\n".join(words or ()) for words in said] == snapshot


def test_label_as_wide_as_its_column_stands_apart_from_the_text() -> None:
    assert labelled("step 1247/2000", "loss 2.362") == "step 1247/2000 loss 2.362"
    assert labelled("lost", "mole") == "lost          mole"


@pytest.mark.parametrize(
    ("earlier", "parts"), [(False, PARTS), (True, (stage_part(0),))], ids=["it is whole", "an earlier one is"]
)
def test_narrator_end_offers_a_sample_of_a_step_that_is_whole(
    tmp_path: Path, snapshot: Any, *, earlier: bool, parts: tuple[PartName, ...]
) -> None:
    run = kept_run()
    if earlier:
        run.keep(tmp_path / "a", 4)
    directory = run.keep(tmp_path / "a", 8, parts)
    lines = told(written(8, stage_part(0), str(part_path(directory.checkpoints, 8, stage_part(0)))), STOPPED).lines
    assert lines == snapshot
    assert any("ckpt pull" in line for line in lines) is earlier, "no advice to gather what is there"


def test_narrator_end_is_said_though_the_disk_cannot_be_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(root: Path, step: int) -> None:
        raise PermissionError(errno.EIO, "I/O error")

    monkeypatch.setattr("peers.console.narrator.held", refused)
    assert told(written(4, ENDS), STOPPED).lines[-1].startswith("ended")


def test_narrator_download_moves_on_a_terminal() -> None:
    heard = told(*STORIES["a download is a line a quarter"], terminal=True)
    assert (len(heard.updates), heard.lines) == (21, [])


def test_narrator_invite_stands_alone_on_its_line_with_what_to_paste(snapshot: Any) -> None:
    lines = told(Invited(invite="swarm1:abc"), founder=True).lines
    assert "swarm1:abc" in lines
    assert lines == snapshot


def test_event_lines_are_what_the_recorder_writes() -> None:
    heard = Heard()
    EventLines(heard, heard, FakeClock(), peer="me").emit(PeerLost(peer=PEER, name="s1", reason="silent"))
    line = json.loads(heard.lines[0])
    assert {key: line[key] for key in ("peer", "kind", "peer_", "name")} == {
        "peer": "me", "kind": "PeerLost", "peer_": PEER, "name": "s1"
    }  # fmt: skip


# --- narration -------------------------------------------------------------------------------------------------------


def _settings(role: str, **more: Any) -> PeerSettings:
    needed = {"manifest": "m"} if role == "bootstrap" else {"bootstrap": (ADDRESS,)}
    return exact_settings(home="h", role=role, **needed, **more)


@pytest.mark.parametrize("came_back", [False, True])
@pytest.mark.parametrize("order", [(FOUND, STARTED), (STARTED, FOUND)])
def test_narration_founder_invites_once_it_can_be_reached(order: tuple[Event, ...], came_back: bool) -> None:
    heard = Heard()
    again = {"returns": True, "bootstrap": (ADDRESS,)} if came_back else {}
    narration = EventNarration(_settings("bootstrap", **again), heard, FakeClock(), peer=PEER)
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
    (line,) = told(event).lines
    assert "otter READY stage 0" in line
