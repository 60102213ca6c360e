"""A run that lives is never founded a second time beside itself, and its founder comes back to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from peers.cli.app import run
from peers.commands import comeback
from peers.commands.comeback import PlaceInRun, RunKnown, whom_to_ask
from peers.commands.history_source import RunMemory
from peers.doctor.contacts import AddressProbe, Answered
from peers.exit_codes import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from peers.home.places import (
    HeldPlace,
    Tenant,
    cut_off_founding,
    list_places,
    look_at_place,
    read_state,
    take_place,
    write_state,
)
from peers.home.sessions import HISTORY, KEPT_SESSIONS
from peers.invites.invite import Invite
from peers.invites.invite_file import write_invite
from peers.local.peer_order import PeerOrder
from peers.options.foundation import Foundation
from peers.options.model import PeerOptions
from peers.reaching import endpoint_config
from peers.settings import PeerSettings
from peers.sharing.limit_options import Return
from swarm.clock import SystemClock
from swarm.config import Manifest, load_manifest
from swarm.consensus.history import HistoryLine
from swarm.consensus.roster import Member, Roster
from swarm.ids import stage_part
from swarm.membership.founding_record import genesis
from swarm.network.libp2p.identity import load_or_create
from swarm.state.checkpoints.files import step_directory
from tests.harness.rigs.peers import kept_run, write


@dataclass(frozen=True, slots=True)
class Killed:
    """A founder that was killed: its home and files, those who start from then on, and another peer of the run, which
    answers as said when it is probed."""

    home: Path
    files: Path
    started: list[PeerSettings]
    other: str
    says: list[Answered]

    @property
    def manifest(self) -> Manifest:
        return load_manifest(self.files)

    @property
    def place(self) -> Path:
        return self.files.parents[2]

    def saw(self, step: int, session: Path | None = None) -> None:
        """Have the founder, or another's session, know the record of a step, with the other in it."""
        remember(session or self.files.parent, self.manifest.run_id, self.other, step)

    def type(self, *words: str, files: Path | None = None) -> int:
        return run(["new", str(files or self.files), "--home", str(self.home), *words])


def remember(session: Path, run_id: str, other: str, step: int) -> None:
    peer = other.rsplit("/", 1)[1]
    part = stage_part(0)
    member = Member(peer=peer, role="stage", name="brave-otter", part=part, addresses=(other,))
    record = genesis(run_id, Roster([member]), {part: "0" * 64})
    if step:
        record = record.model_copy(update={"step": step, "previous": "1" * 64})
    write(session / HISTORY, [HistoryLine(record)], torn=b'{"torn')


@pytest.fixture
def probing(monkeypatch: pytest.MonkeyPatch) -> list[Answered]:
    says: list[Answered] = ["closed"]

    async def probe_addresses(addresses: Any) -> list[AddressProbe]:
        return [AddressProbe(address=each, answered=says[-1]) for each in addresses]

    monkeypatch.setattr("peers.commands.comeback.probe_addresses", probe_addresses)
    return says


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probing: list[Answered]) -> Killed:
    started: list[PeerSettings] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("peers.node.run_peer", lambda settings: started.append(settings) or 0)
    text = tmp_path / "some.txt"
    text.write_text("Enough text to make a small tokenizer of, with a few words that come again. " * 20)
    home = tmp_path / "home"
    assert run(["new", "--preset", "tiny", "--admission", "token", "--text", str(text), "--home", str(home)]) == 0
    files = started.pop().manifest
    assert files is not None
    die(files.parents[2])
    other = f"/ip4/10.0.0.2/tcp/4001/p2p/{load_or_create(tmp_path / 'other.key').peer}"
    return Killed(home, files, started, other, probing)


def die(place: Path) -> None:
    state = read_state(place)
    assert state is not None
    write_state(place, replace(state, end=None))


def of_another(killed: Killed, home: Path) -> tuple[Path, Path]:
    """A machine whose stage host was in the run: its session, and the directory in which it keeps the run."""
    manifest = killed.manifest
    with take_place(home, "1", clock=SystemClock(), tenant=Tenant(run=manifest.run_id, role="stage")) as place:
        peer = load_or_create(place.identity).peer
        session = place.open_session(name="x", peer=peer, role="stage", run=manifest.run_id, run_name="tiny")
    kept = home / "runs" / "tiny"
    kept.mkdir(parents=True)
    for file in ("run.toml", "tokenizer.json"):
        shutil.copy(killed.files.with_name(file), kept / file)
    return session, kept


@contextmanager
def beside(killed: Killed, role: str, step: int) -> Iterator[str]:
    """Another peer of the run lives in place 2 and has seen that step; its id."""
    run_id = killed.manifest.run_id
    with take_place(killed.home, "2", clock=SystemClock(), tenant=Tenant(run=run_id, role=role)) as place:
        peer = load_or_create(place.identity).peer
        killed.saw(step, place.open_session(name="x", peer=peer, role=role, run=run_id, run_name="tiny"))
        yield peer


# --- its peers answer ------------------------------------------------------------------------------------------------


def test_founder_that_was_killed_comes_back_any_number_of_times(killed: Killed, capsys: Any) -> None:
    killed.saw(5000)
    killed.says.append("peer")
    for _ in range(KEPT_SESSIONS + 3):
        assert killed.type() == EXIT_OK
        die(killed.place)
        assert cut_off_founding(list_places(killed.home)) == killed.files
    for settings in killed.started:
        assert (settings.role, settings.returns, settings.bootstrap[0]) == ("bootstrap", True, killed.other)
        assert (settings.identity, settings.run) == (killed.place / "identity.key", killed.manifest.run_id)
    out = capsys.readouterr().out
    assert "comes back to it" in out
    assert "as its founder" in out


def test_founder_comes_back_with_the_file_that_it_founded_its_run_with(
    killed: Killed, tmp_path: Path, capsys: Any
) -> None:
    """It may leave out the issuer, without whom the id is another."""
    text = killed.files.read_text()
    issuers = next(line for line in text.splitlines() if line.startswith("issuers"))
    typed = tmp_path / "typed" / "run.toml"
    typed.parent.mkdir()
    typed.write_text(text.replace(issuers, ""))
    shutil.copy(killed.files.with_name("tokenizer.json"), typed.parent)
    assert load_manifest(typed).run_id != killed.manifest.run_id
    killed.saw(5000)
    assert killed.type(files=typed) == EXIT_UNREACHABLE
    killed.says.append("peer")
    assert killed.type(files=typed) == EXIT_OK
    assert [settings.run for settings in killed.started] == [killed.manifest.run_id]


def test_place_of_a_founder_that_a_peer_of_another_run_has_is_named(killed: Killed, capsys: Any) -> None:
    killed.saw(5000)
    killed.says.append("peer")
    with take_place(killed.home, "1", clock=SystemClock()) as place:
        place.open_session(name="x", peer="", role="stage", run="a" * 64, run_name="another")
        assert killed.type() == EXIT_USAGE
    assert f"drain --peer 1 --home {killed.home}; then the same command" in capsys.readouterr().err
    assert killed.started == []


def test_run_that_lives_is_founded_in_no_other_place(killed: Killed, capsys: Any) -> None:
    killed.saw(5000)
    for says in ("peer", "closed"):
        killed.says.append(says)
        assert killed.type("--place", "mine") == EXIT_USAGE
        assert "expected 1, the place of the run's founder" in capsys.readouterr().err
    assert killed.started == []


@pytest.mark.parametrize(
    ("step", "says", "code", "words"),
    [
        (10, "peer", EXIT_USAGE, "join swarm1:"),
        (10, "no route", EXIT_UNREACHABLE, "where it was founded"),
        (None, "closed", EXIT_USAGE, "it was founded elsewhere"),
    ],
)
def test_run_is_not_founded_on_another_machine_of_it(
    killed: Killed, tmp_path: Path, capsys: Any, step: int | None, says: Answered, code: int, words: str
) -> None:
    session, kept = of_another(killed, tmp_path / "other")
    if step is not None:
        killed.saw(step, session)
    killed.says.append(says)
    assert killed.type("--home", str(tmp_path / "other"), files=kept / "run.toml") == code
    assert words in capsys.readouterr().err
    assert killed.started == []


# --- nobody answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [5000, 0])
@pytest.mark.parametrize("says", ["no route", "closed", "silent", "no name", "no peer"])
def test_run_whose_records_were_seen_is_not_founded_again_where_nobody_answers(
    killed: Killed, capsys: Any, says: Answered, step: int
) -> None:
    """The others may have gone on without it, and have come back at other ports."""
    killed.saw(step)
    killed.says.append(says)
    for _ in range(KEPT_SESSIONS + 1 if says == "closed" else 1):
        assert killed.type() == EXIT_UNREACHABLE
    err = capsys.readouterr().err
    for words in (f"at step {step}, 2", "brave-otter", "the same command once they answer", "--name NAME"):
        assert words in err or not step
    assert killed.started == []
    assert killed.files.exists()


def test_run_of_which_steps_are_kept_is_not_founded_where_its_histories_are_gone(killed: Killed, capsys: Any) -> None:
    home = killed.home.with_name("other")
    _, kept = of_another(killed, home)
    shutil.rmtree(home / "1")
    step_directory(kept / "checkpoints", 10).mkdir(parents=True)
    assert killed.type("--home", str(home), files=kept / "run.toml") == EXIT_UNREACHABLE
    assert "a checkpoint of step 10 is kept here" in capsys.readouterr().err


def test_run_with_another_name_is_another_run(killed: Killed) -> None:
    killed.saw(5000)
    assert killed.type("--name", "anew") == EXIT_OK
    (settings,) = killed.started
    assert settings.manifest is not None
    assert load_manifest(settings.manifest).run_id != killed.manifest.run_id


def test_founder_that_came_back_is_not_founded_again_when_its_returns_knew_nobody(killed: Killed) -> None:
    """Each start has a session of its own, and the oldest are deleted: what the founder knew stays."""
    killed.saw(5000)
    killed.says.append("peer")
    for _ in range(KEPT_SESSIONS + 1):
        killed.type()
    killed.says.append("no route")
    assert killed.type() == EXIT_UNREACHABLE
    assert {settings.manifest for settings in killed.started} == {None}


def test_failed_return_through_a_relay_says_what_to_do_where_nobody_is_left(
    killed: Killed, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A probe cannot tell whether who is behind it lives."""
    killed.saw(5000)
    killed.says.append("untried")
    monkeypatch.setattr("peers.node.run_peer", lambda settings: killed.started.append(settings) or EXIT_UNREACHABLE)
    assert killed.type() == EXIT_UNREACHABLE
    assert [settings.manifest for settings in killed.started] == [None]
    assert "new --resume" in capsys.readouterr().err


def test_founder_of_a_run_that_is_over_is_told_so(killed: Killed, capsys: Any) -> None:
    """A supervisor is not to start it again for ever."""
    steps = killed.manifest.run.steps
    killed.saw(steps)
    events = ({"kind": "RunFound", "steps": steps}, {"kind": "StepClosed", "step": steps})
    killed.files.with_name("events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    killed.says.append("no route")
    assert [killed.type(), run(invited(killed))] == [EXIT_OK] * 2
    assert capsys.readouterr().err.count(f"this run ended here at step {steps}, its last") == 2
    assert killed.started == []


# --- it had not begun ------------------------------------------------------------------------------------------------


def test_founder_of_a_run_that_never_began_founds_it_again_as_who_it_was(killed: Killed) -> None:
    run_id = killed.manifest.run_id
    for _ in range(KEPT_SESSIONS + 1):
        assert killed.type() == EXIT_OK
        die(killed.place)
        settings = killed.started.pop()
        assert settings.manifest is not None
        assert load_manifest(settings.manifest).run_id == run_id
        assert settings.identity == killed.place / "identity.key"


# --- two at once -----------------------------------------------------------------------------------------------------


def test_run_is_not_founded_beside_its_founder(killed: Killed, capsys: Any) -> None:
    with take_place(killed.home, "1", clock=SystemClock()) as place:
        place.joined(killed.manifest.run_id, "tiny")
        assert killed.type() == EXIT_USAGE
    assert "drain --peer 1" in capsys.readouterr().err
    assert killed.started == []


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], HeldPlace]], None]]:
    """Have another process begin as soon as this one has decided."""
    decide = comeback.way_back
    with ExitStack() as held:

        def meanwhile(begin: Callable[[], HeldPlace]) -> None:
            def way_back(home: Path, seen: comeback.RunKnown, wanted: str | None) -> comeback.Past | None:
                decided = decide(home, seen, wanted)
                held.enter_context(begin())
                return decided

            monkeypatch.setattr(comeback, "way_back", way_back)

        yield meanwhile


@pytest.mark.parametrize("step", [None, 5000])
def test_of_two_founders_at_once_one_begins(
    killed: Killed, at_once: Callable[[Callable[[], HeldPlace]], None], capsys: Any, step: int | None
) -> None:
    if step is not None:
        killed.saw(step)
    killed.says.append("peer" if step else "closed")
    at_once(lambda: take_place(killed.home, "1", clock=SystemClock()))
    assert killed.type() == EXIT_USAGE
    assert "has it" in capsys.readouterr().err
    assert killed.started == []


def test_of_two_that_found_a_run_first_one_begins(
    killed: Killed, tmp_path: Path, at_once: Callable[[Callable[[], HeldPlace]], None], capsys: Any
) -> None:
    def begin() -> HeldPlace:
        place = take_place(tmp_path / "empty", clock=SystemClock())
        place.joined(killed.manifest.run_id, "tiny")
        return place

    at_once(begin)
    shutil.copytree(killed.files.parent, tmp_path / "copy")
    typed = tmp_path / "copy" / "run.toml"
    typed.write_text(typed.read_text().partition("\n")[2])  # no founding wrote it
    assert killed.type("--home", str(tmp_path / "empty"), files=typed) == EXIT_USAGE
    assert "drain --peer 1" in capsys.readouterr().err
    assert killed.started == []


# --- with its invite in a file ---------------------------------------------------------------------------------------


def invited(killed: Killed) -> list[str]:
    """The words with which a supervisor starts it again."""
    peer = load_or_create(killed.place / "identity.key").peer
    at = (f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}",)
    write_invite(killed.home / "invite", Invite(run=killed.manifest.run_id, name="tiny", at=at).text())
    return ["new", "--preset", "tiny", "--home", str(killed.home), "--invite-file", str(killed.home / "invite")]


@pytest.mark.parametrize(("says", "code"), [("peer", EXIT_OK), ("no route", EXIT_UNREACHABLE)])
def test_founder_that_a_supervisor_starts_again_comes_back(
    killed: Killed, says: Answered, code: int, tmp_path: Path
) -> None:
    killed.saw(5000)
    killed.says.append(says)
    relay = f"/ip4/10.0.0.3/tcp/4001/p2p/{load_or_create(tmp_path / 'relay.key').peer}"
    words = [*invited(killed), "--through", relay]
    assert [run(words) for _ in range(KEPT_SESSIONS + 1)] == [code] * (KEPT_SESSIONS + 1)
    assert len(killed.started) == (KEPT_SESSIONS + 1 if code == EXIT_OK else 0)
    for settings in killed.started:
        assert (settings.role, settings.manifest, settings.run) == ("bootstrap", None, killed.manifest.run_id)
        assert settings.identity == killed.place / "identity.key"
        config = endpoint_config(settings)
        # Anyone who could call it here, as a peer of the same house, would say that it needs no relay.
        assert ([str(each) for each in config.relays], config.behind_nat) == ([relay], True)


def test_founder_that_a_supervisor_starts_again_founds_what_had_not_begun(killed: Killed) -> None:
    assert run(invited(killed)) == EXIT_OK
    (settings,) = killed.started
    assert settings.manifest is not None
    assert load_manifest(settings.manifest).run_id == killed.manifest.run_id
    assert settings.identity == killed.place / "identity.key"


# --- from a checkpoint -----------------------------------------------------------------------------------------------


@pytest.fixture
def resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probing: list[Answered]) -> tuple[Path, list[Any]]:
    """A run with a checkpoint, whose founder was killed here while another peer went on."""
    started: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("peers.node.run_peer", lambda settings: started.append(settings) or 0)
    kept = kept_run()
    directory = kept.keep(tmp_path / "home" / "runs" / "kept", 10)
    run_id = kept.manifest.run_id
    with take_place(tmp_path / "home", clock=SystemClock(), tenant=Tenant(run=run_id, role="bootstrap")) as place:
        peer = load_or_create(place.identity).peer
        session = place.open_session(name="x", peer=peer, role="bootstrap", run=run_id, run_name="kept")
    shutil.copy(directory.manifest, session / "run.toml")
    remember(session, run_id, f"/ip4/10.0.0.2/tcp/4001/p2p/{load_or_create(tmp_path / 'other.key').peer}", 12)
    return tmp_path / "home", started


def test_run_does_not_go_on_from_a_checkpoint_beside_a_peer_that_answers(
    resumable: tuple[Path, list[Any]], probing: list[Answered], capsys: Any
) -> None:
    home, started = resumable
    probing.append("peer")
    assert run(["new", "--resume", "--home", str(home)]) == EXIT_USAGE
    assert f"/run.toml --home {home} to take part in it" in capsys.readouterr().err
    assert started == []
    # Who answers may wait for just this, as a peer that a supervisor starts again and again.
    assert run(["new", "--resume", str(home / "runs/kept/checkpoints/step-00000010"), "--home", str(home)]) == EXIT_OK
    assert [settings.resume for settings in started] == [10]


@pytest.mark.parametrize(
    ("says", "code"),
    [
        *((says, EXIT_OK) for says in ("closed", "silent", "no peer", "another")),
        *((says, EXIT_UNREACHABLE) for says in ("no route", "no name", "untried")),
    ],
)
def test_run_goes_on_from_a_checkpoint_where_nobody_answers_and_not_where_others_cannot_be_asked(
    resumable: tuple[Path, list[Any]], probing: list[Answered], says: Answered, code: int, capsys: Any
) -> None:
    """This machine may be on no network, or they are behind relays."""
    home, started = resumable
    probing.append(says)
    assert run(["new", "--resume", "--home", str(home)]) == code
    assert [settings.resume for settings in started] == ([10] if code == EXIT_OK else [])
    assert ("DIR/checkpoints/step-" in capsys.readouterr().err) is (code != EXIT_OK)


# --- the rest --------------------------------------------------------------------------------------------------------


def test_nobody_is_probed_at_on_this_machine_who_has_another_address(killed: Killed) -> None:
    """Two machines' peers may have one port."""
    own = killed.other.replace("10.0.0.2", "127.0.0.1")
    assert asked(killed, killed.other, own) == (killed.other,)
    assert asked(killed, own) == (own,)
    assert asked(killed, "no address", killed.other) == (killed.other,)


def asked(killed: Killed, *addresses: str) -> tuple[str, ...]:
    place = look_at_place(killed.place)
    memory = RunMemory(step=1, at=0.0, addresses=addresses, names=())
    known = PlaceInRun(place=place, here=False, founder=True, memory=memory)
    return whom_to_ask(RunKnown(run=killed.manifest.run_id, name="tiny", witnesses=(known,)))


@pytest.mark.parametrize("kept", ["in its session", "in its home", "beside checkpoints", "copied"])
def test_run_is_not_founded_in_another_home_with_the_file_of_its_founding(
    killed: Killed, tmp_path: Path, capsys: Any, kept: str
) -> None:
    file, home, other = killed.files, killed.home, str(tmp_path / "other")
    if kept != "in its session":
        directory = (home / "runs" if kept == "in its home" else tmp_path) / "tiny"
        shutil.copytree(file.parent, directory)
        file = directory / "run.toml"
        if kept == "copied":
            file = file.rename(directory / "mine.toml")
        else:
            (directory / "checkpoints").mkdir()
    assert run(["new", str(file), "--home", other]) == EXIT_USAGE
    said = capsys.readouterr().err
    named = {"beside checkpoints": f"new --resume {file.parent}", "copied": "where it was founded, to come back to it"}
    back = named.get(kept, f"new {file} --home {home}")
    assert "two runs with one id" in said
    assert back in said
    assert not killed.started
    assert run(["new", str(file), "--name", "again", "--home", other]) == EXIT_OK


@pytest.mark.parametrize("command", [["status"], ["new", "--resume"]])
def test_where_a_founder_was_killed_the_command_that_brings_it_back_is_named(
    killed: Killed, capsys: Any, command: list[str]
) -> None:
    run([*command, "--home", str(killed.home)])
    assert f"swarm new {killed.files} --home {killed.home}" in capsys.readouterr().err


def test_founder_that_is_kept_is_told_from_its_second_start_on_to_come_back_to_what_it_founded(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a start in between ends before it has a place: that never founds another run instead."""
    state, told = read_state(killed.place), list[PeerOrder]()
    assert state is not None

    def keep(options: PeerOptions, order: Callable[[Return, int], PeerOrder], say: Any) -> int:
        told.extend(order(Return(keeper=1), process) for process in (0, state.pid, 1 << 30))
        return 0

    monkeypatch.setattr("peers.sharing.keeper.keep", keep)
    assert run(["new", "--preset", "tiny", "--retry", "--home", str(killed.home)]) == 0
    assert [order.foundation for order in told] == [Foundation(preset="tiny"), *[Foundation(file=killed.files)] * 2]
    assert all(order.options.retry for order in told)
