"""``swarm status``, ``peers``, ``drain``, ``invite`` and ``id`` against processes that serve real control sockets."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from peers.cli.app import run
from peers.commands import leave as farewell
from peers.commands.leave import follow
from peers.commands.look import Seen, look_at_all, members_from, standing_from
from peers.commands.status_text import detail_lines, member_lines, status_lines
from peers.console.interrupt import Interrupted
from peers.console.words import CommandError, command_name
from peers.control.client import ask
from peers.control.status import AdmissionReport, MemberReport, StatusReport
from peers.home.places import PlaceInfo, list_places, look_at_place, take_place
from peers.invites.wishes import ROLES
from swarm.averaging.config import AveragingConfig, LocalConfig
from swarm.clock import SystemClock
from swarm.ids import PartName, stage_part
from swarm.membership.status_types import DeviceUse, MemoryReport, PartTurnout
from swarm.security.credentials import GrantRole
from swarm.step.blocked import few_voters
from tests.harness.rigs.peers import PROBE, FakeClock, kept_run, printed
from tests.harness.standing_peer import INVITE, PEER, RUN, running, standing

HEAVY = ("torch", "hivemind", "pydantic", "multiaddr", "cryptography", "asyncio", "rich", "uvloop", "numpy")


class At(SystemClock):
    """The machine's clock at another moment (seconds since the epoch)."""

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def wall(self) -> float:
        return self._moment


@pytest.fixture(autouse=True)
def _no_other_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(home))


@pytest.fixture
def otter(home: Path) -> Iterator[subprocess.Popen[str]]:
    with running(home) as process:
        yield process


@pytest.fixture
def mole(home: Path) -> Iterator[subprocess.Popen[str]]:
    with running(home, "--place", "gpu", "--name", "keen-mole", "--number", "2") as process:
        yield process


# --- with one peer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("status",), ("peers", "--json"), ("drain", "--no-wait"), ("--help",)])
def test_cli_asking_a_peer_imports_nothing_heavy(otter: subprocess.Popen[str], arguments: tuple[str, ...]) -> None:
    path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    ended = subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert ended.stderr == "heavy: \n"
    assert ended.returncode == 0


def test_status_shows_a_row_for_a_live_peer(otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["place", "name", "role", "part", "phase", "step", "loss", "tok/s", "members", "reach"]
    assert " ".join(row.split()) == "1 brave-otter stage stage-0 ready 12 of 60 5.031 2.6 k 3 direct"


@pytest.mark.parametrize("wanted", ["1", "brave-otter", PEER.format(1)[:20]])
def test_status_of_one_peer_has_more(
    otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], wanted: str
) -> None:
    assert run(["status", "--peer", wanted]) == 0
    shown = capsys.readouterr().out
    for words in (
        f"brave-otter (place 1, pid {otter.pid})", "stage-0, because it has the fewest replicas",
        f"tiny ({RUN[:12]}), 3 members", "direct: dialled by 2 peers", PEER.format(1), "sessions/",
    ):  # fmt: skip
        assert words in shown


def test_status_as_json_is_one_stable_line(
    otter: subprocess.Popen[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--json"]) == 0
    found = printed(capsys)
    assert list(found) == ["schema", "home", "places"]
    assert (found["schema"], found["home"]) == (1, str(home))
    (place,) = found["places"]
    assert list(place) == [
        "place", "path", "live", "phase", "pid", "started", "name", "peer", "role", "run", "run_name", "session",
        "data", "keeper", "end", "standing", "trouble", "owner",
    ]  # fmt: skip
    assert (place["live"], place["phase"], place["pid"], place["trouble"]) == (True, "ready", otter.pid, "")
    assert (place["standing"]["schema"], place["standing"]["step"], place["standing"]["pid"]) == (1, 12, otter.pid)


def test_peers_shows_the_swarm_by_part(otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["peers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run tiny ({RUN[:12]}) as brave-otter sees it: 4 peers, step 12 of 60"
    assert [line for line in lines[1:] if not line.startswith(" ")] == [
        "", "stage-0", "", "stage-2", "", "ends", "", "no part",
    ]  # fmt: skip
    assert lines[3].split()[:4] == ["brave-otter", "stage", "member", "self"]


def test_peers_as_json_is_one_stable_line(otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["peers", "--json"]) == 0
    found = printed(capsys)
    assert list(found) == ["schema", "seen_by", "run", "run_name", "step", "steps", "peers", "starting"]
    assert (found["schema"], found["run"], found["seen_by"]) == (1, RUN, PEER.format(1))
    assert [one["part"] for one in found["peers"]] == ["stage-0", "ends", "stage-2", None]


def test_invite_prints_the_invite_alone(otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["invite"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{INVITE}\n"
    assert "swarm join" in shown.err
    assert "note: brave-otter can be reached from this machine only" in shown.err


def test_invite_says_which_directory_it_makes_for_its_file(
    otter: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a" / "b" / "ana.txt"
    assert run(["invite", "--out", str(file)]) == 0
    assert f"The invite is in {file}, in the new directory {file.parent}.\n" in capsys.readouterr().err
    assert run(["invite", "--out", str(file)]) == 0
    assert f"The invite is in {file}.\n" in capsys.readouterr().err
    assert file.read_text() == f"{INVITE}\n"
    assert run(["invite", "--out", str(file / "ana.txt")]) == 2
    assert f"error: --out = '{file / 'ana.txt'}' cannot be used: Not a directory" in capsys.readouterr().err


def test_invite_says_that_it_expires_with_the_run_while_no_step_is_timed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(home, "--name", "new-otter", "--grants-until", "60", "--tokens-per-s", "0"):
        assert run(["invite", "--for", "ana", "--role", "stage", "--expires", "12h"]) == 0
    said = capsys.readouterr().err
    assert "note: no step has been timed yet, so this invite expires with the run's last step, and not in 12h" in said
    swarm = command_name()
    assert f"{swarm} revoke ana; {swarm} invite --for ana --role stage --expires 12h" in said


def test_invite_for_a_name_that_has_one_says_that_both_are_good_and_how_to_take_them_back(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(home, "--grants-until", "60", "--given-to", "ana"):
        assert run(["invite", "--for", "ana", "--role", "trainer"]) == 0
        said = capsys.readouterr().err
        assert run(["invite", "--for", "zoe", "--role", "trainer"]) == 0
        other = capsys.readouterr().err
    when = "2023-11-1[45]"  # as the zone of the machine has it
    assert re.search(f"an invite for ana had been given before this one: ana, as stage, until step 60, {when}", said)
    assert "not used yet. It stays good beside it: each admits one peer" in said
    assert f"{command_name()} revoke ana; then give one anew" in said
    assert "before this one" not in other


def test_invite_for_a_name_that_has_joined_says_who_used_it(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    with running(home, "--grants-until", "60", "--given-to", "ana", "--used"):
        assert run(["invite", "--for", "ana", "--role", "trainer"]) == 0
    said = capsys.readouterr().err
    assert "2 invites for ana had been given before this one: ana, as stage, until step 60" in said
    assert f"ana, as stage: used by {PEER.format(1)}. They stay good" in said


@pytest.mark.parametrize(("until", "pace"), [("60", "2612"), ("40", "0")])
def test_invite_whose_last_step_follows_from_the_pace_is_given_without_a_note(
    home: Path, capsys: pytest.CaptureFixture[str], until: str, pace: str
) -> None:
    with running(home, "--grants-until", until, "--tokens-per-s", pace):
        assert run(["invite", "--for", "ana", "--role", "stage"]) == 0
    said = capsys.readouterr().err
    assert f"it is for one peer, ana, as stage, until step {until}." in said
    assert "timed" not in said


@pytest.mark.parametrize(
    ("role", "use"),
    [
        ("stage", "On another machine: swarm join INVITE\n"),
        ("trainer", "On another machine: swarm join INVITE --role trainer --data TEXT\n"),
        ("observer", "On another machine: swarm dashboard INVITE, or swarm top INVITE\n"),
    ],
)
def test_invite_names_what_its_holder_types(
    home: Path, capsys: pytest.CaptureFixture[str], role: str, use: str
) -> None:
    with running(home, "--grants-until", "60"):
        assert run(["invite", "--for", "ana", "--role", role]) == 0
    assert use in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "cause", "check"),
    [
        (["--for", "a b"], "--for = 'a b' cannot be used", "expected 1 to 41 of these: letters a to z, digits"),
        (["--for", "a", "--role", "boss"], "--role = 'boss' cannot be used", "one of stage, trainer, observer and any"),
        (["--role", "boss"], "--role = 'boss' cannot be used", "one of stage, trainer, observer and any"),
        (["--for", "a", "--expires", "7x"], "--expires = '7x' cannot be used", "expected a number and s, m, h or d"),
        (["--for", "a", "--id", "me"], "--id = 'me' cannot be used", "expected a peer id (12D3KooW…)"),
        (["--for", "a", "--organisation", "b c"], "--organisation = 'b c' cannot be used", "expected 1 to 41 of these"),
        (["--role", "stage", "--no-vote"], "--for is missing", "expected a name beside --no-vote and --role"),
        (
            ["--countersign", "swarm1:x", "--for", "a"],
            "--for = 'a' cannot be used",
            "expected none beside --countersign",
        ),
    ],
)
def test_invite_refuses_options_before_it_looks_for_a_peer(
    capsys: pytest.CaptureFixture[str], options: list[str], cause: str, check: str
) -> None:
    assert run(["invite", *options]) == 2
    said = capsys.readouterr().err
    assert cause in said
    assert check in said
    assert "next: " in said


def test_invites_roles_are_those_that_can_be_granted() -> None:
    assert get_args(GrantRole) == ROLES


def test_drain_follows_until_the_peer_has_left(
    otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["drain"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "brave-otter: leaves when step 13 closes",
        "brave-otter: waiting: step 13 to close",
        "brave-otter: has left: it was drained (exit code 75)",
    ]
    assert otter.wait() == 75


def test_drain_without_waiting_only_tells(otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", "--no-wait"]) == 0
    assert capsys.readouterr().out == "brave-otter: leaves when step 13 closes\n"
    assert otter.poll() is None


def test_drain_all_tells_every_peer_of_the_machine_and_follows_them(
    otter: subprocess.Popen[str], mole: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["drain", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["brave-otter", "keen-mole"]
    assert sum("has left" in line for line in lines) == 2
    assert (otter.wait(), mole.wait()) == (75, 75)
    assert run(["drain", "--all"]) == 3
    assert "no peer runs here" in capsys.readouterr().err


@pytest.mark.parametrize("trouble", ["is stopped", "does not listen yet", "is killed meanwhile"])
def test_drain_all_tells_and_follows_the_others_whatever_one_of_them_does(
    otter: subprocess.Popen[str], mole: subprocess.Popen[str], home: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], trouble: str,
) -> None:  # fmt: skip
    def kill(*arguments: Any, **more: Any) -> Any:
        otter.kill()
        otter.wait()
        return look(*arguments, **more)

    look = farewell.look_at
    if trouble == "is stopped":
        monkeypatch.setattr(ask, "__kwdefaults__", {"timeout_s": 1.0})  # the mole must answer within it
        otter.send_signal(signal.SIGSTOP)
    elif trouble == "does not listen yet":
        (home / "1" / "control.sock").unlink()
    else:
        monkeypatch.setattr(farewell, "look_at", kill)
    code = run(["drain", "--all"])
    shown = capsys.readouterr()
    assert mole.wait(300) == 75
    assert "keen-mole: has left" in shown.out
    assert shown.err.startswith("error: brave-otter")
    assert code == (1 if trouble == "is killed meanwhile" else 3)


def test_drain_is_of_one_peer_or_of_all(otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", "--all", "--peer", "brave-otter"]) == 2
    assert "--all drains every peer and --peer one" in capsys.readouterr().err
    assert otter.poll() is None


def test_follow_without_a_process_to_watch_sees_the_end_all_the_same(
    otter: subprocess.Popen[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(farewell.os, "pidfd_open", nowhere)
    said: list[str] = []
    otter.terminate()
    assert follow(look_at_place(home / "1"), said.append, look_every_s=0.01) == 0
    assert said == ["brave-otter: has left: it was stopped by SIGTERM (exit code 75)"]


def test_drain_of_a_peer_that_is_killed_meanwhile_complains(
    otter: subprocess.Popen[str], home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*arguments: Any, **more: Any) -> Any:
        otter.kill()
        otter.wait()
        return look(*arguments, **more)

    look = farewell.look_at
    monkeypatch.setattr(farewell, "look_at", kill)
    assert run(["drain"]) == 1
    assert "ended without saying why" in capsys.readouterr().err
    assert run(["status"]) == 3
    assert "was killed, or its machine went down" in capsys.readouterr().out


def test_status_of_a_silent_peer_says_so_in_time(
    otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_at_all, "__kwdefaults__", {"timeout_s": 0.05})
    otter.send_signal(signal.SIGSTOP)
    assert run(["status", "--peer", "1"]) == 3
    shown = capsys.readouterr().out
    assert "silent" in shown
    assert f"brave-otter (place 1, pid {otter.pid}) does not answer" in shown


def test_health_of_a_peer_that_answers_is_good_and_says_nothing(
    otter: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--healthy"]) == 0
    assert capsys.readouterr().out == ""


def test_health_is_bad_when_one_is_silent_or_nobody_runs(
    otter: subprocess.Popen[str], home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["status", "--healthy", "--home", str(home / "none")]) == 3
    assert "no peer runs here" in capsys.readouterr().err
    monkeypatch.setattr(look_at_all, "__kwdefaults__", {"timeout_s": 0.05})
    otter.send_signal(signal.SIGSTOP)
    assert run(["status", "--healthy"]) == 3
    assert "is silent" in capsys.readouterr().err


def test_status_of_a_peer_that_has_no_socket_yet_says_starting(
    otter: subprocess.Popen[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "1" / "control.sock").unlink()
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert "starting" in shown
    assert "does not listen (yet, or any more)" in shown
    assert run(["peers"]) == 0
    assert capsys.readouterr().out == f"starting on this machine\n  brave-otter (place 1, pid {otter.pid})\n"
    assert run(["peers", "--json"]) == 0
    assert printed(capsys)["starting"] == [{"place": "1", "name": "brave-otter"}]
    assert run(["invite"]) == 3
    assert "it is starting or ending" in capsys.readouterr().err


def test_texts_of_a_peer_that_only_starts_say_so() -> None:
    young = dataclasses.replace(
        standing("brave-otter"), phase="waiting", waiting_for="a stage host", run="", run_name="", steps=0, step=0,
        part=None, reason="", loss=None, tokens_per_s=None,
    )  # fmt: skip
    assert member_lines(young, []) == ["brave-otter (waiting) takes part in no run yet; waiting: a stage host"]
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    _, row, remark = status_lines([Seen(place=place, standing=young)])
    assert row.split() == ["1", "brave-otter", "stage", "-", "waiting", "-", "-", "-", "3", "direct"]
    assert remark.strip() == "waiting: a stage host"
    assert "loss" not in "\n".join(detail_lines(Seen(place=place, standing=young)))


def test_status_says_of_which_parts_there_are_fewer_copies_than_the_run_asks_for() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    short = dataclasses.replace(standing("otter"), copies=("stage-1",), fewer_copies="ends has 1 of 2")
    seen = Seen(place=place, standing=short)
    assert "    copies: stage-1" in status_lines([seen])
    assert "    fewer copies in the run: ends has 1 of 2" in status_lines([seen])
    assert "copies in the run: ends has 1 of 2" in "\n".join(detail_lines(seen))
    assert "fewer" not in "\n".join(status_lines([Seen(place=place, standing=standing("otter"))]))


def test_status_says_what_the_death_of_one_voter_costs_where_there_are_fewer_than_three() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    short = dataclasses.replace(standing("otter"), few_voters=few_voters(2))
    assert "two voters only: while one is away nothing" in "\n".join(detail_lines(Seen(place=place, standing=short)))
    assert "one voter only" in few_voters(1)
    assert [few_voters(n) for n in (0, 3, 11)] == ["", "", ""]


def test_status_says_by_when_a_peer_ends_that_has_a_time_to_leave_in() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    seen = Seen(place=place, standing=dataclasses.replace(standing("otter"), ends_by=1_700_000_000.0))
    for lines in (status_lines([seen]), detail_lines(seen)):
        assert re.search("ends:? +at 2023-11-1[45] .* at the latest, whatever it waits for", "\n".join(lines))
    without = Seen(place=place, standing=standing("otter"))
    assert "at the latest" not in "\n".join([*status_lines([without]), *detail_lines(without)])


def test_open_vote_is_in_the_status_of_every_member_with_what_agrees() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    admission = AdmissionReport(
        mode="token", issuers=(), admitted=(), revoked=(), votes=(("revoke", "ana", 1, 3), ("dismiss", "12D3", 0, 3))
    )
    shown = "\n".join(detail_lines(Seen(place=place, standing=dataclasses.replace(standing("x"), admission=admission))))
    swarm = command_name()
    agreed = f"1 of the 3 that vote has agreed, and it takes 2; who agrees types: {swarm} revoke ana"
    assert f"to revoke ana: {agreed}" in shown
    assert "to dismiss 12D3: 0 of the 3 that vote have agreed" in shown
    assert f"{swarm} issuers --dismiss 12D3" in shown


def test_status_tells_the_early_share_of_the_last_steps_of_a_run_that_has_one() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    overlapped = Seen(place=place, standing=dataclasses.replace(standing("otter"), early=(0.0, 0.25)))
    assert "    early: 0 %, 25 % of the last 2 steps' microbatches" in status_lines([overlapped])
    assert "0 %, 25 % of the last 2 steps' microbatches" in "\n".join(detail_lines(overlapped))
    assert "early" not in "\n".join(status_lines([Seen(place=place, standing=standing("otter"))]))


def test_members_say_where_they_are_and_who_only_calls() -> None:
    plain = MemberReport(
        name="owl", peer=PEER.format(3), role="stage", part="stage-0", state="member", link="direct", addresses=()
    )
    there = dataclasses.replace(plain, name="hen", region="eu-west", outgoing=True, copies=("ends",))
    rows = member_lines(standing("otter"), [plain, there])[-2:]
    assert rows[0].split()[0] == "owl"
    assert "in" not in rows[0].split()
    assert rows[1].endswith("in eu-west; only calls; copies: ends")
    gone = dataclasses.replace(plain, state="lost", lost="no answer to 3 pings in a row")
    assert member_lines(standing("otter"), [gone])[-1].split()[2] == "lost"
    assert member_lines(standing("otter"), [gone])[-1].endswith("no answer to 3 pings in a row")
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    one_is_lost = Seen(place=place, standing=dataclasses.replace(standing("otter"), lost=1))
    assert "3, 1 lost" in status_lines([one_is_lost])[1]
    assert "3 members, 1 lost" in "\n".join(detail_lines(one_is_lost))


def test_turnout_is_shown_once_for_each_run_as_the_newest_step_has_it() -> None:
    def part(step: int, averaged: int, **why: str) -> PartTurnout:
        return PartTurnout(
            part="stage-0", step=step, live=3, participating=3, averaged=averaged, why=why, alone=False
        )  # fmt: skip

    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    old = dataclasses.replace(standing("otter"), step=11, averaging=(part(11, 3),))
    new = dataclasses.replace(standing("owl"), averaging=(part(12, 2, hen="no microbatch this step"),))
    lines = status_lines([Seen(place=place, standing=one) for one in (old, new)])
    assert lines[-2:] == [
        "averaging in tiny (9f2c41000000), when step 12 closed",
        "  stage-0  3 live / 3 participating / 2 averaged (hen: no microbatch this step)",
    ]
    assert "averaging  stage-0: 3 live / 3 participating / 3 averaged" in detail_lines(Seen(place=place, standing=old))
    answer = json.loads(json.dumps(dataclasses.asdict(new)))
    assert standing_from(StatusReport, answer, "owl") == new


def test_status_of_a_host_shows_what_its_device_computes() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    host = dataclasses.replace(standing("otter"), device_use=DeviceUse(flops_per_s=61.2e12, mfu=0.37))
    read = standing_from(StatusReport, json.loads(json.dumps(dataclasses.asdict(host))), "otter")
    assert read == host
    assert any("61.2 TFLOP/s (PaLM), 37 % MFU" in line for line in detail_lines(Seen(place=place, standing=read)))


def test_status_says_what_is_averaged_when_and_how_often_a_peer_mixed_alone() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    turnout = PartTurnout(part="ends", step=12, live=1, participating=1, averaged=1, why={}, alone=False)
    apart = AveragingConfig(mode="local", strategy="grid", local=LocalConfig(steps=4, sync_every=3))
    mixes = {"averages": apart.described, "mixed": 199, "mixed_alone": 68}
    one = Seen(place=place, standing=dataclasses.replace(standing("owl"), averaging=(turnout,), **mixes))
    words = "weights of replicas that train apart, mixed by grid every 4 batches; of all after every 3 times"
    alone = "199 times, 68 of them alone: the others were away, or too far behind"
    lines = status_lines([one])
    assert f"averaging in tiny (9f2c41000000), when step 12 closed: {words}" in lines
    assert f"    mixed: {alone}" in lines
    assert f"mixed      {alone}" in detail_lines(one)


MEMORY = MemoryReport(
    predicted={"copies": 0, "weights": 12_000_000, "graphs": 24_000_000, "round": 0},
    measured={"copies": 0, "weights": 12_000_000, "graphs": 0, "round": 5_000},
    resident=512_000_000,
    allocated=None,
)


def test_status_shows_memory_by_kind_as_predicted_and_as_measured() -> None:
    place = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
    alone = MemoryReport(predicted={}, measured={"copies": 7}, resident=1, allocated=3_000_000)
    host = dataclasses.replace(standing("otter"), memory=MEMORY)
    founder = dataclasses.replace(standing("owl"), memory=alone)
    lines = status_lines([Seen(place=place, standing=one) for one in (host, founder, standing("hen"))])
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table == [
        ["memory,", "bytes", "copies", "weights", "graphs", "round", "all", "process", "GPU"],
        ["otter", "predicted", "-", "12.0", "M", "24.0", "M", "-", "36.0", "M"],
        ["measured", "-", "12.0", "M", "-", "5.0", "k", "12.0", "M", "512", "M", "-"],
        ["owl", "predicted", "-", "-", "-", "-", "0"],
        ["measured", "7", "-", "-", "-", "7", "1", "3.0", "M"],
    ]
    words = "weights 12.0 M, 12.0 M; graphs 24.0 M, 0; round 0, 5.0 k; 512 M in the process"
    line = f"memory    36.0 M bytes predicted, 12.0 M measured: {words}"
    assert line in detail_lines(Seen(place=place, standing=host))
    assert "memory" not in "\n".join(status_lines([Seen(place=place, standing=standing("hen"))]))
    answer = json.loads(json.dumps(dataclasses.asdict(host)))
    assert standing_from(StatusReport, answer, "otter") == host


@pytest.mark.parametrize(
    "odd",
    [
        {"predicted": [1]},
        {"measured": {"weights": -1}},
        {"measured": {"weights": True}},
        {"measured": {"weights": 1.5}},
        {"measured": {"weights": 1 << 60}},
        {"measured": {"w" * 33: 1}},
        {"measured": {str(number): 1 for number in range(33)}},
        {"resident": None},
        {"allocated": "x"},
        7,
    ],
)
def test_memory_that_is_no_number_of_bytes_for_each_of_some_kinds_is_not_read(odd: Any) -> None:
    memory = dataclasses.asdict(MEMORY) | odd if isinstance(odd, dict) else odd
    answer = dataclasses.asdict(standing("otter")) | {"memory": memory}
    with pytest.raises(CommandError, match="cannot read"):
        standing_from(StatusReport, answer, "otter")


@pytest.mark.parametrize("answer", [None, {}, [1], "x"])
def test_members_from_what_is_no_list_of_them_complain(answer: object) -> None:
    with pytest.raises(CommandError):
        members_from(answer, "brave-otter")


# --- with several, and with none -------------------------------------------------------------------------------------


@pytest.fixture
def stranger(home: Path) -> Iterator[subprocess.Popen[str]]:
    with running(home, "--place", "gpu", "--name", "keen-mole", "--number", "2", "--run", "ab" * 32) as process:
        yield process


@pytest.mark.parametrize("command", ["peers", "drain", "invite"])
def test_commands_with_peers_of_several_runs_ask_which(
    otter: subprocess.Popen[str], stranger: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run([command]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        f"brave-otter (place 1, pid {otter.pid}) in tiny ({RUN[:12]}); keen-mole (place gpu, pid {stranger.pid})"
        in shown.err
    )
    example = "NAME" if command == "drain" else "brave-otter"
    assert f"{command} --peer {example}" in shown.err
    assert run([command, "--peer", "12D3KooWLbT7"]) == 2
    assert "that '12D3KooWLbT7' could mean" in capsys.readouterr().err
    assert run(["invite", "--peer", "gpu"]) == 0


def test_commands_with_several_peers_of_one_run_ask_any_that_answers(
    otter: subprocess.Popen[str], mole: subprocess.Popen[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["invite"]) == 0
    assert capsys.readouterr().out == f"{INVITE}\n"
    (home / "1" / "control.sock").unlink()  # brave-otter is only starting
    assert run(["peers"]) == 0
    shown = capsys.readouterr().out
    assert "as keen-mole sees it" in shown
    assert shown.endswith(f"\n\nstarting on this machine\n  brave-otter (place 1, pid {otter.pid})\n")
    assert run(["drain"]) == 2
    error = capsys.readouterr().err
    assert "there are 2 peers here" in error
    assert "drain --all" in error


def test_peers_shows_those_that_run_while_one_that_knows_no_run_yet_starts(
    otter: subprocess.Popen[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with take_place(home, "new", clock=SystemClock()):
        assert run(["peers"]) == 0
    shown = capsys.readouterr().out
    assert "as brave-otter sees it" in shown
    assert shown.endswith(f"\n\nstarting on this machine\n  place new, pid {os.getpid()}\n")


def test_drain_that_is_interrupted_says_that_the_peer_goes_on_leaving(
    otter: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*arguments: Any) -> int:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(farewell, "follow", pressed)
    with pytest.raises(Interrupted):
        run(["drain"])
    assert "brave-otter: goes on leaving; how far it is: " in capsys.readouterr().out


def test_drain_of_all_that_is_interrupted_says_so_of_each_that_still_leaves(
    otter: subprocess.Popen[str],
    mole: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def pressed(*arguments: Any) -> int:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(farewell, "follow", pressed)
    monkeypatch.setattr("peers.control.client.ask", lambda *_, **__: "leaves when step 13 closes")
    with pytest.raises(Interrupted):
        run(["drain", "--all"])
    assert capsys.readouterr().out.count("goes on leaving; how far it is: ") == 2
    assert (otter.poll(), mole.poll()) == (None, None)


def test_status_hides_what_ended_long_ago_unless_asked(
    otter: subprocess.Popen[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = Path(home / "1" / "place.json").stat().st_mtime
    for name, age in (("late", 3600.0), ("long", 90_000.0)):
        with take_place(home, name, clock=At(now - age)) as place:
            place.open_session(name=f"{name}-gone", peer=PEER.format(3), role="stage")
            place.ended("every step is closed", 0)
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert "late-gone" in shown
    assert "long-gone" not in shown
    assert shown.splitlines()[-1].startswith("not shown: 1 peer that ended more than a day ago (")
    assert run(["status", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "long-gone" in shown
    assert "not shown" not in shown
    assert run(["status", "--json"]) == 0
    assert [place["place"] for place in printed(capsys)["places"]] == ["1", "late", "long"]


def test_status_of_a_peer_killed_long_ago_is_hidden_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take_place(home, "1", clock=At(1_700_000_000.0)).close()
    assert run(["status"]) == 3
    shown = capsys.readouterr()
    assert shown.out.startswith("not shown: 1 peer")
    assert shown.err.startswith("error: no peer runs here")


@pytest.mark.parametrize(("end", "said"), [(None, True), (3, True), (130, True), (0, False)])
def test_status_where_the_last_peer_lost_its_run_names_the_way_to_go_on(
    home: Path, capsys: pytest.CaptureFixture[str], end: int | None, said: bool
) -> None:
    with take_place(home, "1", clock=At(1_700_000_000.0)) as place:
        place.open_session(name="a", peer=PEER.format(3), role="stage", run="ab" * 32)
        if end is not None:
            place.ended("over", end)
    assert run(["status"]) == 3
    assert ("new --resume" in capsys.readouterr().err) is said


@pytest.mark.parametrize("later", [False, True])
def test_status_where_a_relay_is_gone_names_the_command_that_starts_it_again(
    home: Path, capsys: pytest.CaptureFixture[str], later: bool
) -> None:
    with take_place(home, "vps", clock=At(1_700_000_000.0)) as taken:
        taken.open_session(name="a", peer=PEER.format(3), role="relay")
    if later:
        with take_place(home, "1", clock=At(1_700_000_001.0)) as taken:
            taken.open_session(name="b", peer=PEER.format(4), role="stage", run="ab" * 32)
    assert run(["status"]) == 3
    assert ("swarm relay --place vps " in capsys.readouterr().err) is not later


@pytest.mark.parametrize(("parts", "offered"), [(None, True), ([stage_part(0)], False)])
def test_status_after_an_orderly_end_is_a_note_that_offers_a_sample_where_one_can_be_had(
    home: Path, capsys: pytest.CaptureFixture[str], parts: list[PartName] | None, *, offered: bool
) -> None:
    kept = kept_run()
    directory = kept.keep(home / "runs" / kept.manifest.run_id, 4, *([] if parts is None else [parts]))
    with take_place(home, "1", clock=At(1_700_000_000.0)) as place:
        place.open_session(name="a", peer=PEER.format(3), role="stage", run=kept.manifest.run_id)
        place.ended("the run was ended with step 4, as all its peers were asked", 0)
    assert run(["status"]) == 3
    shown = capsys.readouterr().err
    assert shown.startswith("note: no peer runs here")
    assert "new --resume" in shown
    assert (f"sample {directory.root}" in shown) is offered


@pytest.mark.parametrize("went_on", [False, True])
def test_status_where_one_of_the_run_that_all_have_left_saw_its_end_names_the_way_to_go_on(
    home: Path, capsys: pytest.CaptureFixture[str], *, went_on: bool
) -> None:
    """The one that was started last could be spared, and left before; or it came when the run had been gone on with."""
    clock, run_id = FakeClock(), "ab" * 32
    with take_place(home, "1", clock=clock) as first, take_place(home, "2", clock=clock) as second:
        first.open_session(name="a", peer=PEER.format(1), role="stage", run=run_id)
        second.open_session(name="b", peer=PEER.format(2), role="stage", run=run_id)
        clock.now = 1.0
        first.ended("the run was ended with step 23, as all its peers were asked", 0)
        second.ended("it left in order", 0)
        clock.now = 2.0
    if went_on:
        with take_place(home, "2", clock=clock) as second:
            second.open_session(name="a", peer=PEER.format(2), role="stage", run=run_id)
            second.ended("it left in order", 0)
    assert run(["status"]) == 3
    assert ("new --resume" in capsys.readouterr().err) is not went_on


def test_status_lists_the_live_and_the_ended(
    otter: subprocess.Popen[str], mole: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mole.terminate()
    mole.wait()
    assert run(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["1", "brave-otter"]
    assert lines[2:4] == ["", "not running"]
    assert lines[4].split()[:2] == ["gpu", "keen-mole"]
    assert lines[4].endswith("with exit code 75: it was stopped by SIGTERM")
    assert run(["drain", "--peer", "keen-mole"]) == 3
    assert "it ended: it was stopped by SIGTERM (exit code 75)" in capsys.readouterr().err
    assert run(["status", "--peer", "keen-mole"]) == 3
    assert "ended" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "peers", "drain", "invite"])
def test_commands_where_no_peer_runs_say_how_to_start_one(
    home: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run([command]) == 3
    shown = capsys.readouterr()
    assert (shown.out, shown.err.splitlines()[0]) == ("", "error: no peer runs here")
    assert "join INVITE" in shown.err
    assert run([command, "--peer", "nobody"]) == 3
    assert "no peer here is called 'nobody'" in capsys.readouterr().err
    assert run([command, "--peer", ""]) == 3
    assert "the name is empty" in capsys.readouterr().err
    assert list(home.iterdir()) == []


def test_status_as_json_where_no_peer_runs_is_still_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--json", "--home", str(home / "new")]) == 3
    assert printed(capsys) == {"schema": 1, "home": str(home / "new"), "places": []}


# --- identities ------------------------------------------------------------------------------------------------------


def test_id_makes_nothing_unless_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["id"]) == 1
    assert "id --place 1 --create" in capsys.readouterr().err
    assert list(home.iterdir()) == []
    assert run(["id", "--create", "--json"]) == 0
    made = printed(capsys)
    assert list(made) == ["schema", "place", "peer", "name", "key"]
    assert run(["id", "--json"]) == run(["id", "--create", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [made, made]
    (place,) = list_places(home)
    assert not place.live
    assert run(["id"]) == 0
    assert made["peer"] in capsys.readouterr().out


def test_id_of_several_places_lists_them_and_as_json_wants_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("1", "gpu"):
        assert run(["id", "--create", "--place", place]) == 0
    capsys.readouterr()
    assert run(["id"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("place")] == ["1", "gpu"]
    assert run(["id", "--json"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, "there are 2 places here" in shown.err) == ("", True)
    assert "id --json --place 1" in shown.err
    assert run(["id", "--json", "--place", "gpu"]) == 0
    assert printed(capsys)["place"] == "gpu"


@pytest.mark.parametrize(("arguments", "code"), [(["--place", "../x", "--create"], 2), (["--place", "2"], 3)])
def test_id_of_what_is_no_place_is_explained(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    assert run(["id", "--create"]) == 0
    assert run(["id", *arguments]) == code
    assert "next:" in capsys.readouterr().err
    assert len(list(home.iterdir())) == 1
