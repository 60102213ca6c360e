"""When a peer pauses, comes back, is started again and is given up, without a process and without waiting."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.cli.app import run
from peers.commands.look import Seen
from peers.commands.status_text import status_lines
from peers.exit_codes import EXIT_CODES, EXIT_PAUSED, FINAL, TRANSIENT, worth_a_retry
from peers.guards import watch_pauses
from peers.home.places import PlaceEnd, PlaceInfo, PlaceState, take_place
from peers.local.peer_order import PeerOrder
from peers.options.model import PeerOptions
from peers.preemption.local import CommandSource
from peers.sharing import keeper
from peers.sharing.conditions import FORGET, CheckFailed, PauseConditions, Steadily, minute_of_day, within
from peers.sharing.keeper import FIRST_S, LONGEST_S, MAX_TRIES, PeerKeeper, PeerProcess
from peers.sharing.limit_options import Return
from swarm.clock import SystemClock
from swarm.errors import Ending
from swarm.events import EventList, Paused
from tests.harness.expect import eventually
from tests.harness.rigs.clocks import FakeClock

NOW = 1_767_268_800.0


class Weather:
    """A battery that is on for some looks, and cannot be read at others (None)."""

    def __init__(self, *looks: bool | None) -> None:
        self.looks = list(looks)

    def __call__(self) -> bool:
        found = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if found is None:
            raise CheckFailed("no battery")
        return found


class Lives:
    """A peer whose lives take seconds and end with exit codes."""

    def __init__(self, clock: FakeClock, *lives: tuple[float, int]) -> None:
        self.clock, self.lives, self.backs = clock, list(lives), list[Return]()

    async def run(self, back: Return) -> int:
        seconds, code = self.lives.pop(0)
        self.backs.append(back)
        self.clock.now += seconds
        return code


def _order(back: Return, last: int) -> PeerOrder:
    return PeerOrder(options=PeerOptions(), back=back, words=False, json_lines=False)


async def kept(lives: Lives, *battery: bool | None, **options: Any) -> tuple[int, list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []
    keeper = PeerKeeper(
        PeerOptions(**options), lives.run, lives.clock, lambda *line: said.append(line), random.Random(7)
    )
    if battery:
        keeper._conditions = PauseConditions(["battery"], lives.clock, Weather(*battery))
    return await keeper.keep(), said


# --- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hours", "minutes", "others"),
    [((1320, 420), (1320, 1439, 0, 419), (420, 1319)), ((540, 1050), (540, 1049), (539, 1050, 0)),
     ((1080, 0), (1439,), (0,))],
)  # fmt: skip
def test_hours_are_half_open_also_over_midnight(
    hours: tuple[int, int], minutes: tuple[int, ...], others: tuple[int, ...]
) -> None:
    assert all(within(hours, minute) for minute in minutes)
    assert not any(within(hours, minute) for minute in others)


@pytest.fixture
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_in_berlin")
def test_hours_are_those_of_the_clock_on_the_wall_across_summer_time() -> None:
    before_spring = 1_774_745_940.0  # 2026-03-29T00:59:00Z, 01:59 there; the clocks go on to 03:00
    assert [minute_of_day(before_spring), minute_of_day(before_spring + 60)] == [119, 180]
    before_autumn = 1_792_889_940.0  # 2026-10-25T00:59:00Z, 02:59 there; the clocks go back to 02:00
    assert [minute_of_day(before_autumn), minute_of_day(before_autumn + 60)] == [179, 120]
    assert within((120, 180), minute_of_day(before_autumn + 60)), "the hour that comes twice pauses twice"


def test_flapping_condition_is_never_steady() -> None:
    steadily = Steadily(5.0)
    assert not any(steadily.seen(bool(look % 2), 4.0 * look) for look in range(101))
    assert [steadily.seen(True, 401.0 + at) for at in (0, 4, 5)] == [False, False, True]


def test_every_ending_is_retried_or_final_or_one_of_a_peer_that_was_told() -> None:
    told = {EXIT_CODES[Ending.DRAINED], EXIT_PAUSED}
    assert {*FINAL, *TRANSIENT} | told >= set(EXIT_CODES.values())
    assert not FINAL & TRANSIENT
    assert not any(map(worth_a_retry, [*FINAL, *told, 129, 130, 143]))
    assert all(map(worth_a_retry, [*TRANSIENT, 137, 139, 134]))


# --- conditions ------------------------------------------------------------------------------------------------------


async def test_check_that_fails_leaves_what_the_last_one_said_and_not_for_ever() -> None:
    conditions = PauseConditions(["battery"], FakeClock(), Weather(None, True, *[None] * FORGET, False, True))
    assert (await conditions.look(), conditions.news) == ("", {"battery": "no battery"})
    assert (await conditions.look(), conditions.news) == ("battery", {"battery": ""})
    looks = [(await conditions.look(), dict(conditions.news)) for _ in range(FORGET)]
    assert [found for found, _ in looks] == ["battery"] * (FORGET - 1) + [""]
    assert [news for _, news in looks] == [{"battery": "no battery"}] + [{}] * (FORGET - 1), "told once"
    assert [await conditions.look() for _ in range(2)] == ["", "battery"]


async def test_command_that_hangs_pauses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommandSource, "RUN_S", 0.1)
    conditions = PauseConditions(["command:sleep 600"], FakeClock())
    assert await conditions.look() == ""
    (problem,) = conditions.news.values()
    assert "takes longer than" in problem


async def test_command_holds_while_it_exits_with_0(tmp_path: Path) -> None:
    conditions = PauseConditions([f"command:test -e {tmp_path}/game", "hours:3-4"], FakeClock())
    assert await conditions.look() in ("", "hours:3-4")
    (tmp_path / "game").touch()
    assert await conditions.look() == f"command:test -e {tmp_path}/game"


async def test_peer_leaves_at_the_second_look_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    told, events, clock = [], EventList(), FakeClock()
    looks = iter(["", "battery", "", "battery", "battery"])

    async def look(self: PauseConditions) -> str:
        return next(looks)

    monkeypatch.setattr(PauseConditions, "look", look)

    class Orders:
        def by_notice(self, *given: object) -> None:
            told.append(given)

    class Settings:
        options, back = PeerOptions(pause_when=("battery",)), Return(keeper=1)

    await watch_pauses(Settings(), clock, events, Orders())
    assert next(looks, None) is None
    assert told == [("pause: battery", None, Ending.PAUSED)]
    assert events.events == [Paused(reason="battery")]


# --- keeping ---------------------------------------------------------------------------------------------------------


async def test_peer_comes_back_once_nothing_has_held_for_long_enough() -> None:
    lives = Lives(FakeClock(), (1000, EXIT_PAUSED), (10, 0))
    code, said = await kept(lives, False, True, True, False, True, False, pause_when=("battery",))
    assert (code, lives.lives) == (0, [])
    first, back = lives.backs
    assert first.reason == "", "it was never away"
    assert back.reason == "battery"
    assert back.seconds >= 60 + 3 * 5, "two looks that held, one that did not, one that did, and then a quiet minute"
    assert [label for label, _ in said] == ["paused", "resumes"]


async def test_peer_does_not_start_while_a_condition_holds() -> None:
    lives = Lives(FakeClock(), (10, 0))
    code, _ = await kept(lives, True, True, False, pause_when=("battery",))
    assert code == 0
    assert lives.backs[0].reason == "battery"


async def test_peer_that_flaps_stays_away_longer_each_time() -> None:
    lives = Lives(FakeClock(), (20, EXIT_PAUSED), (20, EXIT_PAUSED), (20, EXIT_PAUSED), (900, EXIT_PAUSED), (1, 0))
    code, _ = await kept(lives, False, pause_when=("battery",))
    assert code == 0
    away = [back.seconds for back in lives.backs[1:]]
    assert [away[0] >= 120, away[1] >= 240, away[2] >= 480, 60 <= away[3] < 120] == [True] * 4


async def test_peer_that_crashes_is_started_again_later_and_later_and_given_up_in_the_end() -> None:
    lives = Lives(FakeClock(), *[(1, 3)] * (MAX_TRIES + 1))
    code, said = await kept(lives, retry=True)
    assert (code, lives.lives) == (3, [])
    assert said[-1][0] == "gives up"
    pauses = [back.seconds for back in lives.backs[1:]]
    assert pauses[0] <= FIRST_S
    assert LONGEST_S / 2 <= pauses[-1] <= LONGEST_S


@pytest.mark.parametrize("code", [0, 2, 4, 75, 143])
async def test_peer_that_is_over_or_was_told_is_not_started_again(code: int) -> None:
    lives = Lives(FakeClock(), (1, code))
    assert (await kept(lives, retry=True))[0] == code


async def test_peer_that_was_leaving_for_a_pause_when_somebody_ended_us_ends_with_what_we_were_told() -> None:
    for told, code, ends_with in ((0, EXIT_PAUSED, 0), (75, EXIT_PAUSED, 75), (75, 0, 0), (75, 143, 143)):
        lives = Lives(FakeClock(), (5, code))
        keeps = PeerKeeper(PeerOptions(retry=True), lives.run, lives.clock, lambda *line: None, random.Random(7))
        keeps.told = told
        assert await keeps.keep() == ends_with


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 0)])
async def test_signal_that_ends_a_peer_before_it_takes_any_counts_as_ours(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(keeper, "launched", lambda command: ["sleep", "600"])
    process = PeerProcess(_order)
    running = asyncio.ensure_future(process.run(Return(keeper=1)))
    await eventually(lambda: process.send(number), what="the process")
    assert await running == code


async def test_peer_that_somebody_else_kills_ends_with_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "launched", lambda command: ["sh", "-c", "kill -TERM $$"])
    assert await PeerProcess(_order).run(Return(keeper=1)) == 143


# --- what swarm status says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "kept", "started", "phase"),
    [
        (EXIT_PAUSED, True, 4e9, "paused"),
        (137, True, 4e9, "retrying"),
        (0, True, 4e9, "ended"),
        (EXIT_PAUSED, True, 0.0, "ended"),  # that process is younger than the peer: it only has the number
        (EXIT_PAUSED, False, 4e9, "ended"),
    ],
)
def test_peer_that_is_away_comes_back_only_while_its_keeper_is_there(
    exit_code: int, kept: bool, started: float, phase: str, tmp_path: Path
) -> None:
    end = PlaceEnd(reason="it left in order", exit_code=exit_code, at=NOW)
    state = PlaceState(pid=1, started=started, name="otter", keeper=os.getpid() if kept else 0, end=end)
    seen = Seen(place=PlaceInfo(name="1", path=tmp_path, live=False, state=state))
    assert seen.phase == phase
    assert ("comes back by itself" in status_lines([seen])[-1]) is (phase != "ended")


@pytest.mark.parametrize(("exit_code", "kept", "code"), [(EXIT_PAUSED, True, 0), (137, True, 0), (1, False, 3)])
def test_status_ends_well_for_a_peer_that_is_paused_or_started_again(
    home: Path, capsys: pytest.CaptureFixture[str], exit_code: int, kept: bool, code: int
) -> None:
    with take_place(home, clock=SystemClock()) as place:
        place.open_session(name="otter", peer="p", role="stage", run="ab" * 32, run_name="tiny")
        place.kept_by(os.getpid() if kept else 0)
        place.ended("pause: battery" if exit_code == EXIT_PAUSED else "the daemon is gone", exit_code)
    for options in ([], ["--peer", "otter"]):
        assert run(["status", "--home", str(home), *options]) == code
        shown = capsys.readouterr()
        assert "error" not in shown.err
        if exit_code == EXIT_PAUSED:
            assert "pause: battery; comes back by itself when that is over (process" in shown.out
            assert not shown.err
        elif not kept:
            assert "with exit code 1: the daemon is gone" in shown.out
            assert shown.err.startswith("note: no peer runs here") or options
    assert run(["status", "--home", str(home), "--healthy"]) == (0 if exit_code == EXIT_PAUSED else 3)
