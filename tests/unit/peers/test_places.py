from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peers.home.identity import friendly_name
from peers.home.places import (
    STATE_FILE,
    PlaceEnd,
    PlaceState,
    Tenant,
    home_directory,
    list_places,
    look_at_place,
    read_state,
    take_place,
    write_state,
)
from peers.home.sessions import KEPT_SESSIONS
from peers.session import load_identity, warn_of_copy
from peers.settings import VOTE_FILE
from swarm.consensus.ballot import KeptVote, VoteFile
from swarm.errors import ConfigError
from swarm.security.credentials import Grant, credential_for, sign_grant
from swarm.security.signing import PrivateIdentity

RUN = "9f2c41aa" + "0" * 56
ISSUER = PrivateIdentity(bytes(32))
TAKES_A_PLACE = """
import sys
from pathlib import Path
from peers.home.places import take_place
from swarm.clock import SystemClock
place = take_place(Path(sys.argv[1]), clock=SystemClock())
place.open_session(name="brave-otter", peer="x", role="stage")
print(place.name, flush=True)
sys.stdin.read()
"""


class Ticking:
    """A wall clock that a test moves."""

    now = 1_700_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


@pytest.mark.parametrize(
    ("given", "swarm_home", "xdg", "expected"),
    [
        (Path("a"), "/b", "/c", Path("a")),
        (None, "/b", "/c", Path("/b")),
        (None, None, "/c", Path("/c/swarm")),
        (None, None, "relative", Path("/h/.local/share/swarm")),
        (None, None, None, Path("/h/.local/share/swarm")),
        (Path("~/a"), None, None, Path("/h/a")),
        (None, "~/b", None, Path("/h/b")),
    ],
)
def test_home_directory_comes_from_flag_variable_or_custom(
    monkeypatch: pytest.MonkeyPatch, given: Path | None, swarm_home: str | None, xdg: str | None, expected: Path
) -> None:
    monkeypatch.setenv("HOME", "/h")
    for key, value in (("SWARM_HOME", swarm_home), ("XDG_DATA_HOME", xdg)):
        monkeypatch.delenv(key, raising=False) if value is None else monkeypatch.setenv(key, value)
    assert home_directory(given) == expected


def test_places_are_taken_in_turn_and_again_when_free(tmp_path: Path, clock: Ticking) -> None:
    home = tmp_path / "new" / "home"
    with take_place(home, clock=clock) as first, take_place(home, clock=clock) as second:
        assert (first.name, second.name) == ("1", "2")
        assert first.path.stat().st_mode & 0o777 == 0o700
        first.close()
        with take_place(home, clock=clock) as again:
            assert again.name == "1"


def test_place_of_the_same_role_in_the_run_comes_first_and_those_of_other_roles_are_left(
    tmp_path: Path, clock: Ticking
) -> None:
    with contextlib.ExitStack() as here:
        for role in ("bootstrap", "stage", "trainer"):
            place = here.enter_context(take_place(tmp_path, clock=clock))
            place.open_session(name="a", peer="b", role=role, run="one")
    with (
        take_place(tmp_path, clock=clock, tenant=Tenant(run="one", role="trainer")) as again,
        take_place(tmp_path, clock=clock, tenant=Tenant(run="one", role="trainer")) as another,
        take_place(tmp_path, clock=clock, tenant=Tenant(run="two", role="trainer")) as elsewhere,
    ):
        assert (again.name, another.name, elsewhere.name) == ("3", "4", "1")


def _leave_trainers(home: Path, clock: Ticking, *data: str) -> None:
    """Trainers of one run that were killed, in places 1, 2, … with their data."""
    with contextlib.ExitStack() as here:
        for one in data:
            place = here.enter_context(take_place(home, clock=clock))
            place.open_session(name="a", peer="b", role="trainer", run="one")
            place.trains_on(one)


def test_place_of_one_of_several_trainers_is_not_for_somebody_with_other_data(tmp_path: Path, clock: Ticking) -> None:
    _leave_trainers(tmp_path, clock, "cats", "dogs")
    with take_place(tmp_path, clock=clock, tenant=Tenant(run="one", role="trainer", data="birds")) as new:
        assert new.name == "3"


@pytest.mark.parametrize(
    ("holder", "expected"), [("ben", ["3", "1", "4"]), ("cy", ["1", "4", "5"]), ("", ["1", "2", "3"])]
)
def test_place_of_who_was_let_in_by_an_invite_is_not_for_the_holder_of_another(
    tmp_path: Path, clock: Ticking, holder: str, expected: list[str]
) -> None:
    def invited(name: str) -> str:
        grant = Grant(run=RUN, serial="0" * 16, name=name, role="any", until_step=9, key=str(ISSUER.peer))
        return credential_for(sign_grant(grant, ISSUER), ISSUER.peer, None).text()

    with contextlib.ExitStack() as here:
        for name in ("", "ann", "ben"):
            place = here.enter_context(take_place(tmp_path, clock=clock))
            place.open_session(name="a", peer="b", role="stage", run=RUN)
            if name:
                place.admitted(RUN, invited(name))
    tenant = Tenant(run=RUN, role="stage", holder=holder)
    with contextlib.ExitStack() as here:
        assert [here.enter_context(take_place(tmp_path, clock=clock, tenant=tenant)).name for _ in "123"] == expected


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-a", "a" * 42])
def test_place_with_an_odd_name_is_refused(tmp_path: Path, clock: Ticking, name: str) -> None:
    with pytest.raises(ConfigError, match="place"):
        take_place(tmp_path, name, clock=clock)
    assert list(tmp_path.iterdir()) == []


def test_place_in_a_home_that_is_a_file_is_refused(tmp_path: Path, clock: Ticking) -> None:
    home = tmp_path / "file"
    home.write_text("")
    with pytest.raises(ConfigError, match="--home or SWARM_HOME"):
        take_place(home, clock=clock)
    with pytest.raises(ConfigError, match="home"):
        list_places(home)


def test_place_keeps_the_name_of_its_peer_and_of_no_other(tmp_path: Path, clock: Ticking) -> None:
    with take_place(tmp_path, clock=clock) as place:
        who = load_identity(place, "anna")
        place.open_session(name=who.name, peer=who.peer, role="stage")
    with take_place(tmp_path, clock=clock) as place:
        assert load_identity(place, None).name == "anna"
        assert load_identity(place, "berta").name == "berta"
        place.identity.unlink()
        assert load_identity(place, None).name not in ("anna", "berta")


@pytest.mark.parametrize("ended", [True, False])
def test_place_that_is_a_copy_is_said_to_be_one_and_how_a_home_is_moved(
    tmp_path: Path, clock: Ticking, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    with take_place(home, clock=clock) as place:
        kept = KeptVote(run="a" * 64, step=3, previous="b" * 64, term=1, free=0, vote=None)
        VoteFile(place.identity.with_name(VOTE_FILE)).write(kept)
        warn_of_copy(place)
        if ended:
            place.ended("it was drained", 0)
        shutil.copytree(home, copy)
    assert capsys.readouterr().err == ""
    with take_place(copy, clock=clock) as place:
        warn_of_copy(place)
    said = capsys.readouterr().err
    assert said.startswith(f"note: place 1 in {copy} seems to be a copy")
    assert ("it was copied after its peer had ended" in said) == ended
    assert "To move a home: " in said


def test_place_of_a_killed_process_is_free_and_told_from_one_that_ended(tmp_path: Path, clock: Ticking) -> None:
    command = [sys.executable, "-c", TAKES_A_PLACE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        (info,) = list_places(tmp_path)
        assert (info.live, info.state and info.state.pid) == (True, process.pid)
        with take_place(tmp_path, clock=clock) as other:
            assert other.name == "2"
        process.send_signal(signal.SIGKILL)
        process.wait()
    info = look_at_place(tmp_path / "1")
    assert (info.live, info.title, info.state and info.state.end) == (False, "brave-otter", None)
    with take_place(tmp_path, clock=clock) as place:
        assert place.name == "1"


def test_sessions_keep_the_newest_and_what_is_not_theirs(tmp_path: Path, clock: Ticking) -> None:
    made = []
    for _ in range(KEPT_SESSIONS + 3):
        clock.now += 60
        with take_place(tmp_path, clock=clock) as place:
            made.append(place.open_session(name="a", peer="x", role="stage", run=RUN))
            (made[-1] / "events.jsonl").write_text("{}")
            (place.path / "sessions" / "mine").mkdir(exist_ok=True)
    kept = {path.name for path in (place.path / "sessions").iterdir()}
    assert kept == {path.name for path in made[-KEPT_SESSIONS:]} | {"mine"}
    assert all(re.fullmatch(r"\d{8}-\d{6}-9f2c41aa", path.name) for path in made)


def test_sessions_that_a_founder_needs_to_come_back_are_not_deleted(tmp_path: Path, clock: Ticking) -> None:
    run, other = "ab" * 32, "cd" * 32
    with take_place(tmp_path, clock=clock) as place:

        def start(run: str, *files: str) -> Path:
            clock.now += 1
            session = place.open_session(name="a", peer="x", role="bootstrap", run=run)
            for file in files:
                (session / file).touch()
            return session

        lost = start(other, "run.toml", "history.jsonl")  # it founded another since
        first = start(run, "run.toml")
        start(run, "run.toml")
        newest, knew = start(run, "run.toml"), start(run, "history.jsonl")
        last = [start(other, "history.jsonl"), *(start(other) for _ in range(KEPT_SESSIONS + 2))]
        kept = set((place.path / "sessions").iterdir())
    assert lost not in kept
    assert kept == {first, newest, knew, last[0], *last[-KEPT_SESSIONS:]}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "{}", '{"pid": "7", "started": 1}', '{"pid": 7, "started": 1, "end": {}}', "[" * 9999],
)  # fmt: skip
def test_state_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    assert read_state(tmp_path) is None


def test_state_of_a_later_version_is_read(tmp_path: Path) -> None:
    state = PlaceState(pid=7, started=1.5, name="a", end=PlaceEnd(reason="r", exit_code=0, at=2.0))
    write_state(tmp_path, state)
    document = json.loads((tmp_path / STATE_FILE).read_text())
    document["new"] = document["end"]["new"] = 1
    (tmp_path / STATE_FILE).write_text(json.dumps(document))
    assert read_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


def test_friendly_name_is_always_the_same_and_a_peer_name() -> None:
    assert friendly_name("12D3KooWabc") == friendly_name("12D3KooWabc") == "calm-crow"
    names = [friendly_name(f"12D3KooW{number}") for number in range(500)]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", name) for name in names)
    assert len(set(names)) > 480


def test_take_place_whose_state_cannot_be_written_is_an_error_and_not_taken(
    tmp_path: Path, clock: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: Path, state: PlaceState) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("peers.home.places.write_state", refuse)
        with pytest.raises(ConfigError, match="Permission denied") as caught:
            take_place(tmp_path, clock=clock)
    assert caught.value.key == "home"
    assert not (tmp_path / "2").exists()
    with take_place(tmp_path, clock=clock) as place:
        assert place.name == "1"
