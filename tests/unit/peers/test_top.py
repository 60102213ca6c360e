"""``swarm top``: what its screen shows of a run, without a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from peers.cli import top as command
from peers.cli.app import run as swarm
from peers.dashboard import observer
from peers.dashboard.feed import EVERY_S, StateFeed
from peers.dashboard.overview import Overview
from peers.invites.invite import Contacts
from peers.top.app import PANES, HelpScreen, TopApp
from peers.top.drawing import curve_of, duration, fitted, grid
from swarm.errors import ConfigError, install_command
from swarm.events import RunFound
from swarm.ids import PeerId
from swarm.monitoring.reader import Recorded
from tests.harness.rigs.clocks import HandClock
from tests.harness.rigs.peers import PEERS, RUN, eventful, printed, write
from tests.harness.standing_peer import INVITE, standing

pytestmark = pytest.mark.usefixtures("elsewhere")

SMALL, LARGE = (80, 24), (200, 60)
RECORDS = [line.record for line in eventful().lines]
HOSTILE = "[bold red]a[/] [@click=app.quit]b\x1b[2J‮c"
Act = Callable[[Overview], None]


class ScriptedSource:
    """A run of which each look brings the next act."""

    def __init__(self, *acts: Act) -> None:
        self.acts, self.looks = list(acts), 0

    async def poll(self, overview: Overview, *, watched: bool) -> None:
        """See :class:`peers.dashboard.sources.RunSource`."""
        self.looks += watched
        if self.acts:
            self.acts.pop(0)(overview)


def found(steps: int = 60, name: str = "tiny") -> Act:
    event = RunFound(run=RUN, name=name, stages=1, steps=steps, wire=2, source="an invite")
    return lambda overview: overview.event(Recorded(0.0, 0.0, PeerId(PEERS["otter"]), event))


def decided(*steps: int, every_s: float = 2.0, **changes: Any) -> Act:
    def act(overview: Overview) -> None:
        for step in steps:
            overview.record(RECORDS[step].model_copy(update=changes), at=1000.0 + every_s * step)

    return act


def said(busy: float = 0.0, probation: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
    """What a member says about itself, after ten seconds."""
    times = {"busy_s": busy, "waiting_s": 10 - busy if busy else 0.0, "idle_s": 0.0}
    counted = {"queued": 3, "under_way": 1, "compute_s": 0.1, "bytes_sent": 0, "bytes_received": 0}
    told = {
        "phase": "ready",
        "waiting_for": "",
        "averaging": False,
        "reachability": "direct",
        "links": [],
        "audits": [0, 0, 0, 0],
    }
    return {**times, **counted, **told, "probation": list(probation), **more}


def looked(vitals: Mapping[str, Mapping[str, Any]], silent: str = "", **names: str) -> Act:
    members = [
        {
            "name": names.get(name, name), "peer": peer, "role": "stage", "part": "stage-0", "state": "member",
            "link": "relayed" if name == "heron" else "direct", "copies": (), "addresses": (), "region": "", "lost": "",
        }
        for name, peer in PEERS.items() if name in vitals
    ]  # fmt: skip
    by_peer = {PEERS[name]: one for name, one in vitals.items()}
    seen = dataclasses.asdict(standing("otter"))
    more = {"unanswered": {PEERS[silent]: "stalled"}} if silent else {}
    return lambda overview: overview.look(
        {"seen": seen, "members": members, "vitals": by_peer, "round_trips": dict.fromkeys(by_peer, 0.012)} | more
    )


def all_of(*acts: Act) -> Act:
    def act(overview: Overview) -> None:
        for one in acts:
            one(overview)

    return act


BUSY = {"otter": said(7.5), "heron": said(2.5)}
PROBATION = [{"peer": PEERS["otter"], "left_s": 12.0, "reason": "it did not answer"}]
BEGUN = all_of(found(), decided(0, 1))


def watching(*acts: Act) -> tuple[TopApp, HandClock, ScriptedSource]:
    clock, source = HandClock(1010.0), ScriptedSource(*acts)
    return TopApp(StateFeed(source, Overview({"kind": "peer", "label": "otter"}), clock), clock), clock, source


async def next_look(pilot: Pilot[Any], clock: HandClock) -> None:
    """Let a second pass, and what came be drawn."""
    await pilot.pause()
    await clock.advance(EVERY_S)
    await pilot.pause()


def shown(app: TopApp) -> str:
    """Return the lines of the screen as they stand."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


def line_with(app: TopApp, text: str) -> str:
    return next(line for line in shown(app).splitlines() if text in line)


# --- what it shows ---------------------------------------------------------------------------------------------------


async def test_a_replica_on_probation_is_said_with_who_and_why() -> None:
    vitals = {"otter": said(), "heron": said(probation=PROBATION)}
    app, _, _ = watching(all_of(BEGUN, looked(vitals)))
    async with app.run_test(size=LARGE) as pilot:
        await pilot.pause()
        assert "on probation by heron 12 s: it did not answer" in shown(app)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_each_pane_says_its_part_in_both_sizes(size: tuple[int, int]) -> None:
    app, _, _ = watching(all_of(found(), decided(0, 1, 2, 3, 4, 5)))
    expected = {
        "1": ["stage-0  2 live", "replica"],
        "2": ["0.157", "churn: ! lost   - left   + joined   ~ moved"],
        "3": ["computed", "otter", "100.0%"],
        "4": ["joined", "tern, stage-0, with step 2", "mole, stage-0, with step 3"],
    }
    async with app.run_test(size=size) as pilot:
        for key, texts in expected.items():
            await pilot.press(key)
            await pilot.pause()
            for text in texts:
                assert text in shown(app), key
        if size == LARGE:
            for texts in expected.values():
                assert all(text in shown(app) for text in texts)
        assert all(len(line) <= size[0] for line in shown(app).splitlines())


async def test_marks_stand_under_the_steps_at_which_peers_came_and_went() -> None:
    app, _, _ = watching(all_of(found(), decided(0, 1, 2, 3, 4, 5)))
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
        bars, marks = shown(app).splitlines()[2:4]
        assert bars.startswith(" loss  0.16 ")
        columns = 78 - 16
        stand = {number * columns // 5: mark for number, mark in enumerate(" +!-")}
        assert marks[len(" loss  0.16 ") :] == "".join(stand.get(at, " ") for at in range(max(stand) + 1))


async def test_names_and_reasons_of_others_are_shown_as_they_are() -> None:
    roster = RECORDS[2].members
    members = [member.model_copy(update={"name": HOSTILE}) for member in roster.members]
    record = RECORDS[2].model_copy(update={"roster": tuple(members)})
    hostile = [{"peer": PEERS["otter"], "left_s": 1.0, "reason": HOSTILE}]
    vitals = {"otter": said(probation=hostile), "heron": said(waiting_for=HOSTILE)}
    app, _, _ = watching(all_of(found(name=HOSTILE), decided(0, 1), lambda one: one.record(record, 1004.0),
                                looked(vitals, otter=HOSTILE, heron=HOSTILE)))  # fmt: skip
    async with app.run_test(size=LARGE) as pilot:
        for key in "1234":
            await pilot.press(key)
            await pilot.pause()
        text = shown(app)
        assert "[bold red]a[/] [@click" in text.splitlines()[0], "the run's name"
        assert text.count("[bold red]a[/]") >= 8
        assert "\x1b" not in text
        assert "‮" not in text


async def test_a_run_that_ends_says_so_and_stays_on_the_screen() -> None:
    app, clock, _ = watching(all_of(found(steps=2), decided(0, 1)), decided(2))
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
        assert "ETA 2 s" not in shown(app), "one step tells no speed"
        await next_look(pilot, clock)
        assert "tiny  ended" in shown(app)
        assert "ETA" not in shown(app)
        await next_look(pilot, clock)
        assert app.is_running


async def test_a_run_that_stalls_says_why_and_who_fell_silent_and_came_back() -> None:
    vitals = {"otter": said(), "heron": said()}

    def gone(overview: Overview) -> None:
        overview.pulse.missed("away", "nobody answers")

    away, back = [looked(vitals, silent="tern")] * 2, [looked(vitals | {"tern": said()})] * 2
    app, clock, _ = watching(all_of(found(), decided(3, 4, 5)), looked(vitals), *away, *back, gone)
    async with app.run_test(size=LARGE) as pilot:
        for _ in range(3):
            await next_look(pilot, clock)
        assert line_with(app, "  tern ").split()[1:3] == ["tern", "stalled"]
        assert "Counted since step 3" in shown(app)
        assert "tokens since step 3" in shown(app)
        assert "tern, stage-0, with step 5: it has" in line_with(app, "silent       tern")
        await next_look(pilot, clock)
        await next_look(pilot, clock)
        assert "tern, stage-0, with step 5" in line_with(app, "back         tern")
        for _ in range(12):
            await next_look(pilot, clock)
        assert "tiny  away" in shown(app)
        assert "! nobody answers; what is shown is from" in shown(app)


async def test_without_anything_known_it_waits() -> None:
    app, _, _ = watching()
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
        assert "(no name yet)  waiting" in shown(app)
        for key, text in {"1": "No member", "2": "No step is closed", "3": "No work", "4": "Nothing has"}.items():
            await pilot.press(key)
            await pilot.pause()
            assert text in shown(app)


# --- keys and looks --------------------------------------------------------------------------------------------------


async def test_keys_turn_the_panes_and_quit() -> None:
    app, _, _ = watching(BEGUN)
    async with app.run_test(size=SMALL) as pilot:
        for key, text in [("t", "0.157"), ("tab", "computed"), ("right", "step 1"), ("left", "computed"),
                          ("shift+tab", "0.157"), ("left", "stage-0"), ("left", "step 1")]:  # fmt: skip
            await pilot.press(key)
            await pilot.pause()
            assert text in shown(app), key
        await pilot.press("q")
    assert app.return_value is None
    assert not app.is_running


async def test_help_explains_and_goes() -> None:
    app, clock, source = watching(BEGUN)
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        assert "hold the picture" in shown(app)
        assert "is what nobody here can tell" in shown(app), "all of it fits on a small terminal"
        before = source.looks
        await next_look(pilot, clock)
        assert source.looks > before, "it goes on meanwhile"
        await pilot.press("q")
        await pilot.pause()
        assert not isinstance(app.screen, HelpScreen)
        assert app.is_running


async def test_pause_holds_the_picture_and_goes_on_with_the_newest() -> None:
    app, clock, _ = watching(BEGUN, decided(2), decided(3))
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
        await pilot.press("p")
        await next_look(pilot, clock)
        await next_look(pilot, clock)
        assert "PAUSED" in shown(app)
        assert "step 1/60" in shown(app)
        await pilot.press("p")
        await pilot.pause()
        assert "PAUSED" not in shown(app)
        assert "step 3/60" in shown(app)


async def test_keys_are_obeyed_while_a_look_takes_its_time() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    class SlowSource(ScriptedSource):
        async def poll(self, overview: Overview, *, watched: bool) -> None:
            asked.set()
            await answer.wait()

    clock = HandClock(1010.0)
    app = TopApp(StateFeed(SlowSource(), Overview({"kind": "peer", "label": "otter"}), clock), clock)
    async with app.run_test(size=SMALL) as pilot:
        await asked.wait()
        await pilot.press("4")
        await pilot.pause()
        assert "Nothing has happened yet" in shown(app)
        assert not answer.is_set()


async def test_the_picture_says_the_same_without_colours_and_in_both_themes(monkeypatch: pytest.MonkeyPatch) -> None:
    acts = (all_of(BEGUN, looked({"otter": said(), "heron": said()})), looked(BUSY))
    pictures = []
    for plain in (False, True):
        if plain:
            monkeypatch.setenv("NO_COLOR", "1")
        app, clock, _ = watching(*acts)
        async with app.run_test(size=LARGE) as pilot:
            await next_look(pilot, clock)
            pictures.append(shown(app))
            assert app.no_color == plain
            await pilot.press("d")
            await pilot.pause()
            assert app.theme == "textual-light"
            pictures.append(shown(app))
    assert len(set(pictures)) == 1


async def test_what_ends_the_looking_ends_the_screen() -> None:
    gone = ConfigError("RUN", "out/first", "a directory", "Name another.")

    def fail(overview: Overview) -> None:
        raise gone

    app, _, _ = watching(fail)
    async with app.run_test(size=SMALL) as pilot:
        await pilot.pause()
    assert app.return_value is gone


# --- drawing ---------------------------------------------------------------------------------------------------------


def many(peers: int, steps: int = 1500) -> dict[str, Any]:
    """A state of a large run."""
    overview = Overview({"kind": "files", "label": "x"})
    all_of(found(), decided(0, 1, 2), looked(BUSY))(overview)
    state = overview.document(1010.0)
    one = state["peers"][PEERS["otter"]]
    state["peers"] = {f"p{number}": one | {"name": f"peer-{number}"} for number in range(peers)}
    state["parts"] = [state["parts"][-1] | {"peers": list(state["peers"])}]
    state["steps"] = [[step, 5 - step / steps, 9.0, 8, peers, 2.0 * step] for step in range(1, steps + 1)]
    return state


def test_a_hundred_peers_are_a_hundred_rows_of_the_same_width() -> None:
    lines = grid(many(100), 120, 50).plain.splitlines()
    assert len(lines) == 102
    assert len({len(line) for line in lines[2:]}) == 1
    assert max(len(line) for line in lines) <= 120


def test_who_is_gone_is_listed_last() -> None:
    overview = Overview({"kind": "files", "label": "x"})
    all_of(found(), decided(0, 1, 2, 3, 4))(overview)
    lines = [line.split() for line in grid(overview.document(1010.0), 80, 24).plain.splitlines()]
    assert [line[:2] for line in lines[-3:]] == [["left", "and"], ["mole", "lost"], ["vole", "left"]]


def test_the_curve_of_many_steps_has_a_mean_for_each_column() -> None:
    rows = [[step, float(step), None, 8, 3, None] for step in range(1, 101)]
    assert curve_of(rows, 10) == [5.5, 15.5, 25.5, 35.5, 45.5, 55.5, 65.5, 75.5, 85.5, 95.5]
    assert curve_of(rows[:3], 6) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0], "few steps are as wide"
    assert curve_of([[1, None, None, 0, 3, None]], 10) == []
    rows[49][1] = float("nan")
    assert max(curve_of(rows, 10)) == 95.5
    assert curve_of([[1, 2.0], [2, None], [3, 4.0]], 3) == [2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (3780, "1 h 03 min"), (360000, "4 d 4 h")]
)
def test_durations_have_two_units_at_most(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_text_fills_its_columns_whatever_it_is_made_of() -> None:
    assert fitted("abc", 5) == "abc  "
    assert fitted("abc", 5, right=True) == "  abc"
    assert fitted("abcdef", 5) == "abcd…"
    assert fitted("東京東京", 5) == "東京…"
    assert fitted("a\nb\tc", 6) == "a b c "
    assert fitted("abc", 0) == ""


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_on_terminal", lambda: True)


def test_no_terminal_names_what_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm(["top"]) == 2
    told = capsys.readouterr().err
    assert "needs a terminal" in told
    assert "top --once for text" in told
    assert "dashboard for a browser" in told


@pytest.mark.usefixtures("terminal")
def test_an_invite_is_followed_by_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Observed:
        @classmethod
        @contextlib.asynccontextmanager
        async def open(cls, contacts: Contacts, clock: object) -> AsyncIterator[ScriptedSource]:
            opened.append(str(contacts.run_name))
            yield ScriptedSource(BEGUN)

    async def watched(feed: StateFeed, clock: object) -> BaseException | None:
        await feed.update()
        assert (feed.state()["source"]["kind"], feed.state()["step"]) == ("observer", 1)
        return None

    monkeypatch.setattr(observer, "ObserverSource", Observed)
    monkeypatch.setattr(command, "_watched", watched)
    assert swarm(["top", INVITE]) == 0
    assert opened == ["tiny"]


@pytest.mark.usefixtures("terminal")
def test_no_peer_here_is_said_as_swarm_peers_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm(["peers"]) == 3
    told = capsys.readouterr().err
    assert swarm(["top"]) == 3
    assert capsys.readouterr().err == told


@pytest.mark.usefixtures("terminal")
def test_a_directory_without_a_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert swarm(["top", str(tmp_path)]) == 2
    assert "events.jsonl" in capsys.readouterr().err
    assert swarm(["top", str(tmp_path), "--peer", "otter"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err


@pytest.mark.usefixtures("terminal")
def test_without_the_extra_it_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert swarm(["top"]) == 1
    assert install_command("top") in capsys.readouterr().err


@pytest.mark.usefixtures("terminal")
def test_what_ended_the_screen_is_what_the_command_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(tmp_path / "run" / "history.jsonl", [])
    path.with_name("events.jsonl").write_text("")
    ends: list[BaseException | None] = [None, ConfigError("RUN", "x", "a directory", "Name another.")]

    async def watched(feed: StateFeed, clock: object) -> BaseException | None:
        await feed.update()
        assert feed.state()["state"] == "past"
        return ends.pop(0)

    monkeypatch.setattr(command, "_watched", watched)
    assert swarm(["top", str(path.parent)]) == 0
    assert swarm(["top", str(path.parent)]) == 2
    assert "Name another" in capsys.readouterr().err


def test_once_prints_a_past_run_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, home = str(tmp_path / "first"), tmp_path / "first" / "peers" / "otter"
    write(home / "history.jsonl", eventful().lines)
    (home / "events.jsonl").write_text("")
    assert swarm(["top", "--once", run]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line in PANES] == list(PANES)
    assert not any(line.endswith(" ") for line in said.splitlines())
    assert swarm(["top", "--once", "--json", run]) == 0
    assert printed(capsys)["run"]
    assert swarm(["top", "--json", run]) == 2
