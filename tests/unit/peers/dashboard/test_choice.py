"""Which run a person means by what there is at hand."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.console.words import CommandError
from peers.dashboard.find_run import Chosen, choose_run
from peers.exit_codes import EXIT_USAGE
from peers.home.places import take_place
from tests.harness.rigs.clocks import HandClock

pytestmark = pytest.mark.usefixtures("elsewhere")


def chosen(given: str) -> Chosen:
    return choose_run(given, None, Path("home"), command="top")


def refused(given: str) -> CommandError:
    with pytest.raises(CommandError) as error:
        chosen(given)
    assert error.value.exit_code == EXIT_USAGE
    return error.value


def local_run(path: str, at: float = 0.0, peer: str = "peers/otter") -> Path:
    """What ``swarm quickstart`` leaves."""
    home = Path(path, peer)
    home.mkdir(parents=True)
    (home / "events.jsonl").touch()
    os.utime(path, (at, at))
    return Path(path)


@contextlib.contextmanager
def running(place: str) -> Iterator[Path]:
    """Hold a peer's place, with the files of its session, which are there afterwards, too."""
    with take_place(Path("home"), place, clock=HandClock(1000.0)) as held:
        found = held.open_session(name=f"otter-{place}", peer="12D3KooWotter", role="stage", run="ab" * 32)
        (found / "events.jsonl").touch()
        yield found


def session(place: str) -> Path:
    """The session of a peer that has ended."""
    with running(place) as found:
        return found


def test_directory_of_a_run_is_shown_also_before_its_peers_have_begun() -> None:
    run = local_run("out/first")
    assert chosen("out/first") == chosen("first") == Chosen(directory=run)
    Path("out/second").mkdir()
    Path("out/second/launch.log").touch()
    assert chosen("out/second").directory == Path("out/second")


def test_of_a_directory_with_runs_the_newest_is_shown_and_said_to_be() -> None:
    for number, at in enumerate((30.0, 50.0, 40.0)):
        local_run(f"out/{number}", at)
    assert chosen("out") == Chosen(directory=Path("out/1"), among="the newest of 3 in out")


def test_running_peer_is_meant_by_its_name_its_place_and_the_directories_above() -> None:
    with running("3"):
        for given in ("otter-3", "3", "home/3", "home"):
            place = chosen(given).place
            assert place is not None, given
            assert (place.name, place.live) == ("3", True), given


def test_files_of_a_peer_that_has_ended_are_shown() -> None:
    found = session("3")
    for given in ("otter-3", "3", "home/3", "home/3/sessions", "home", str(found)):
        assert chosen(given).directory is not None, given
        assert chosen(given).directory.samefile(found), given  # type: ignore[union-attr]


def test_what_the_home_keeps_of_a_run_means_the_peer_that_was_in_it() -> None:
    found = session("3")
    kept = Path("home/runs/look")
    kept.mkdir(parents=True)
    (kept / "run.toml").write_text(f"# run {'ab' * 32}\n")
    assert chosen("home/runs/look").directory == found.absolute()


def test_what_means_nothing_is_refused_with_what_there_is() -> None:
    error = refused("otter")
    assert "no directory, no peer of this machine, and no invite" in str(error)
    assert "no peer has a place in home" in error.check
    session("3")
    local_run("out/first")
    error = refused("ottre")
    assert "peers here: otter-3; runs here: out/first; an invite begins with swarm1:" in error.check
    assert "top otter-3" in error.next
    assert refused("").exit_code == EXIT_USAGE


def test_directory_without_a_run_is_refused_with_what_is_in_it() -> None:
    Path("things/books").mkdir(parents=True)
    error = refused("things")
    assert str(error) == "no run is in things"
    assert "here is books" in error.check
    assert "swarm quickstart" in error.next


def test_peer_that_was_in_no_run_yet_is_no_run() -> None:
    take_place(Path("home"), "new", clock=HandClock(1000.0)).close()
    assert "has not joined a run yet" in str(refused("new"))


def test_name_that_two_peers_have_is_refused_with_both() -> None:
    for place in ("1", "2"):
        with take_place(Path("home"), place, clock=HandClock(1000.0)) as held:
            held.open_session(name="otter", peer=f"12D3KooW{place}", role="stage")
    error = refused("otter")
    assert "2 peers" in str(error)
    assert "place 1" in error.check
    assert "place 2" in error.check
