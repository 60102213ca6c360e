from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peers.preemption import watcher
from peers.preemption.local import CommandSource, FileSource
from peers.preemption.notice_source import WORD_BYTES, Notice, SourceFailed, spoken_notice
from peers.preemption.watcher import FAILURES_TOLD, PreemptionWatcher, reason_of
from swarm.clock import SystemClock
from swarm.events import Event, PreemptionNotice, PreemptionWatch
from tests.harness.expect import eventually
from tests.harness.metadata_server import azure_event, metadata_server
from tests.harness.processes import children_of
from tests.harness.rigs.peers import FakeClock

NOON = 1_767_268_800.0


@dataclass
class Heard:
    """What a watcher told, and what it had the peer do."""

    events: list[Event] = field(default_factory=list)
    left: list[tuple[str, float | None]] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def leave(self, reason: str, within_s: float | None) -> None:
        self.left.append((reason, within_s))

    def problems(self) -> list[str]:
        return [event.problem for event in self.events if isinstance(event, PreemptionWatch)]


class Scripted:
    """A source that says what it is told, one thing after the other."""

    name, pause_s = "the script", 1.0

    def __init__(self, *said: Notice | Exception | None) -> None:
        self.said = list(said)

    async def ask(self) -> Notice | None:
        said = self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


async def watched(*said: Notice | Exception | None) -> tuple[Heard, FakeClock]:
    heard, clock = Heard(), FakeClock()
    clock.now = NOON
    await PreemptionWatcher(clock, heard, heard.leave).watch(Scripted(*said))
    return heard, clock


async def ran(setting: str, url: str | None = None) -> Heard:
    heard = Heard()
    await PreemptionWatcher(SystemClock(), heard, heard.leave).run(setting, url)
    return heard


# --- the watcher -----------------------------------------------------------------------------------------------------


async def test_notice_is_told_and_acted_on_once() -> None:
    script = (None, None, Notice(left_s=30.0), Notice(left_s=5.0))
    heard, clock = await watched(*script)
    assert heard.events == [
        PreemptionWatch(source="the script", problem=""),
        PreemptionNotice(source="the script", deadline_s=30.0),
    ]
    assert heard.left == [("the script: this machine is taken back at 12:00:32 UTC", 28.0)]
    assert clock.now == NOON + 2


async def test_failures_are_told_once_asked_again_and_their_end_is_told() -> None:
    failed = SourceFailed("it is ill")
    heard, _ = await watched(None, *[failed] * (FAILURES_TOLD + 3), None, failed, None, Notice(left_s=None))
    assert heard.problems() == ["", "it is ill", ""]
    assert len(heard.left) == 1


async def test_source_that_fails_from_the_start_is_told_at_once() -> None:
    heard, _ = await watched(SourceFailed("status 403"), SourceFailed("status 403"), None, Notice(left_s=None))
    assert heard.problems() == ["", "status 403", ""]


async def test_mistake_of_ours_ends_the_watching_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def broken(self: FileSource) -> Notice | None:
        raise KeyError("ours")

    monkeypatch.setattr(FileSource, "ask", broken)
    heard = await ran(f"file:{tmp_path}/x")
    assert heard.problems() == ["", "KeyError: 'ours'"]
    assert heard.left == []


def test_reason_of_a_notice_says_when() -> None:
    assert reason_of("AWS", Notice(left_s=125.0), NOON) == "AWS: this machine is taken back at 12:02:05 UTC"
    assert reason_of("AWS", Notice(left_s=None), NOON) == "AWS: this machine is taken back"
    assert reason_of("AWS", Notice(left_s=1e300), NOON) == "AWS: this machine is taken back some day"


@pytest.mark.parametrize(("cloud", "name"), [("aws", "AWS"), ("gcp", "GCP"), ("azure", "Azure")])
@pytest.mark.parametrize("auto", [True, False])
async def test_clouds_are_watched_by_name_or_found(cloud: str, name: str, auto: bool) -> None:
    with metadata_server(cloud) as known:
        known.action = {"action": "terminate", "time": "2000-01-01T00:00:00Z"}
        known.preempted = True
        known.events = [azure_event("Preempt", known.machine)]
        heard = await ran("auto" if auto else cloud, known.url)
    assert [event.source for event in heard.events if isinstance(event, PreemptionNotice)] == [name]
    assert heard.events[0] == PreemptionWatch(source=name, problem="")
    assert len(heard.left) == 1


async def test_auto_where_nobody_answers_says_so_and_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "SEARCH_PAUSE_S", 0.0)
    with metadata_server("azure") as known:
        known.machine = ""
        heard = await ran("auto", known.url)
        assert known.asked("/metadata/instance/compute") == watcher.SEARCHES
    assert heard.events == [PreemptionWatch(source="", problem="none of AWS, GCP, Azure answers here")]
    assert heard.left == []


async def test_watcher_that_is_cancelled_ends_at_once() -> None:
    with metadata_server("gcp") as known:
        heard = Heard()
        watching = asyncio.ensure_future(PreemptionWatcher(SystemClock(), heard, heard.leave).run("gcp", known.url))
        await eventually(lambda: known.asked("/computeMetadata/v1/instance/preempted") == 2)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    assert heard.problems() == [""]


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (b"", None),
        (b"30", 30.0),
        (b" 1.5\n", 1.5),
        (b"2026-01-01T12:02:00Z\n", 120.0),
        (b"2026-01-01T12:02:00", 120.0),
        (b"2026-01-01T13:02:00+01:00", 120.0),
        (b"2020-01-01", 0.0),
        (b"-5", None),
        (b"nan", None),
        (b"inf", None),
        (b"1e999", None),
        (b"0001-01-01T00:00:00+23:59", 0.0),
        (b"going down", None),
        (b"\xff\x00\x17", None),
        (b"9" * WORD_BYTES * 2, None),
    ],
)
def test_words_of_a_notice_say_when_or_nothing(words: bytes, left: float | None) -> None:
    assert spoken_notice(words, NOON).left_s == left


# --- a file ----------------------------------------------------------------------------------------------------------


async def file_says(path: Path) -> Notice | None:
    return await FileSource(path, FakeClock()).ask()


async def test_file_whose_words_come_a_moment_later_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "going"
    path.touch()

    class Clock(FakeClock):
        async def sleep(self, seconds: float) -> None:
            path.write_text("30")

    assert await FileSource(path, Clock()).ask() == Notice(left_s=30.0)


async def test_file_of_another_kind_is_the_notice_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert await file_says(tmp_path / "pipe") == Notice(left_s=None)
    assert await file_says(tmp_path) == Notice(left_s=None)
    assert await file_says(Path("/dev/zero")) == Notice(left_s=None)


async def test_file_without_end_is_read_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "going").write_bytes(b"x" * (1 << 20))
    assert await file_says(tmp_path / "going") == Notice(left_s=None)


async def test_file_below_a_file_is_not_there_and_one_that_cannot_be_looked_for_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert await file_says(tmp_path / "file" / "x") is None
    with pytest.raises(SourceFailed, match="file name too long"):
        await file_says(tmp_path / ("x" * 300))


# --- a command -------------------------------------------------------------------------------------------------------


async def command_says(*command: str) -> Notice | None:
    before = {process.pid for process in children_of(os.getpid())}
    try:
        return await CommandSource(command, FakeClock()).ask()
    finally:
        assert {process.pid for process in children_of(os.getpid())} <= before


@pytest.mark.parametrize(
    ("script", "notice"),
    [
        ("exit 0", Notice(left_s=None)),
        ("echo 30", Notice(left_s=30.0)),
        ("echo 30; exit 1", None),
        ("exit 126", None),
        ("kill -9 $$", None),
        ("echo noise >&2", Notice(left_s=None)),
    ],
)
async def test_command_that_succeeds_is_the_notice(script: str, notice: Notice | None) -> None:
    assert await command_says("sh", "-c", script) == notice


async def test_command_that_cannot_be_run_fails() -> None:
    with pytest.raises(SourceFailed, match="cannot be run: no such file"):
        await command_says("no-such-command-anywhere")


async def test_command_for_which_there_is_no_room_now_fails_and_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(asyncio, "create_subprocess_exec", none_left)
        with pytest.raises(SourceFailed, match="resource temporarily unavailable"):
            await command_says("true")
    assert await command_says("true") == Notice(left_s=None)


async def test_command_that_prints_without_end_is_bounded() -> None:
    assert await command_says("sh", "-c", "head -c 5000000 /dev/zero") == Notice(left_s=None)


def sleeper(pids: Path) -> Sequence[str]:
    """A command that hangs and has a child that hangs; both write their pids."""
    return "sh", "-c", f"echo $$ >> {shlex.quote(str(pids))}; (echo x; exec sleep 60) & echo $! >> {pids}; wait"


def gone(pids: Path) -> bool:
    """Whether everything that was named there has ended."""

    def alive(pid: str) -> bool:
        try:
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    return not any(alive(pid) for pid in pids.read_text().split())


async def test_command_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = asyncio.Timeout(None)
    monkeypatch.setattr(asyncio, "timeout", lambda _: limit)
    asking = asyncio.ensure_future(command_says(*sleeper(tmp_path / "pids")))
    await eventually(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    limit.reschedule(asyncio.get_running_loop().time())
    with pytest.raises(SourceFailed, match=f"takes longer than {CommandSource.RUN_S:g} s"):
        await asking
    await eventually(lambda: gone(tmp_path / "pids"))


async def test_command_of_a_cancelled_watcher_is_ended_with_its_children(tmp_path: Path) -> None:
    asking = asyncio.ensure_future(command_says(*sleeper(tmp_path / "pids")))
    await eventually(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await eventually(lambda: gone(tmp_path / "pids"))


async def test_command_of_a_peer_that_is_killed_is_ended(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from peers.preemption.local import CommandSource; from swarm.clock import SystemClock\n"
        "asyncio.run(CommandSource(sys.argv[1:], SystemClock()).ask())"
    )
    script = f"echo $$ > {shlex.quote(str(tmp_path / 'pids'))}; exec sleep 60"
    peer = await asyncio.create_subprocess_exec(sys.executable, "-c", program, "sh", "-c", script)
    await eventually(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    peer.kill()
    await peer.wait()
    await eventually(lambda: gone(tmp_path / "pids"))
