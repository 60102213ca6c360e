"""``swarm status``, ``peers``, ``drain``, ``invite`` and ``id`` against peers that serve real control sockets."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from peers.commands import leave as leave_command
from peers.commands.leave import follow
from peers.commands.look import Seen, look_at_all, standing_from
from peers.commands.status_text import detail_lines, member_lines, status_lines
from peers.console.interrupt import Interrupted
from peers.console.words import CommandError, sharing_text
from peers.control.client import ask
from peers.control.status import AdmissionReport, MemberReport, StatusReport
from peers.home.places import PlaceInfo, list_places, look_at_place, take_place
from peers.invites.invite import parse_invite
from peers.invites.wishes import ROLES
from swarm.averaging.config import AveragingConfig, LocalConfig
from swarm.clock import SystemClock
from swarm.consensus.trials import few_trainers
from swarm.ids import ENDS, PartName, shared_part, stage_part
from swarm.membership.status_types import DeviceUse, MemoryReport, PartTurnout, VariantReport
from swarm.pipeline.activity import AuditCounts
from swarm.schema import FEWEST_TRAINERS
from swarm.security.credentials import GrantRole
from swarm.step.blocked import few_voters
from tests.harness.rigs.peers import FakeClock, Typed, kept_run
from tests.harness.standing_peer import INVITE, PEER, RUN, Served, running, serving, standing

Snapshot = Any


class At(SystemClock):
    """The machine's clock at another moment (seconds since the epoch)."""

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def wall(self) -> float:
        return self._moment


@pytest.fixture(autouse=True)
def _no_other_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(home))
    monkeypatch.setitem(follow.__kwdefaults__, "look_every_s", 0.01)


@pytest.fixture
def otter(home: Path) -> Iterator[Served]:
    with serving(home) as peer:
        yield peer


@pytest.fixture
def mole(home: Path) -> Iterator[Served]:
    with serving(home, "--place", "gpu", "--name", "keen-mole", "--number", "2") as peer:
        yield peer


# --- with one peer ---------------------------------------------------------------------------------------------------


def test_status_and_peers_and_invite_of_a_live_peer(otter: Served, typed: Typed, snapshot: Snapshot) -> None:
    said = [typed(words) for words in ("status", "status --peer 1", "peers", "invite")]
    assert [one.code for one in said] == [0] * 4
    assert said == snapshot
    assert said[3].out == f"{INVITE}\n", "alone, to be piped"
    for wanted in ("brave-otter", PEER.format(1)[:20]):
        assert typed("status", "--peer", wanted).out == said[1].out


def test_status_and_peers_as_json_are_one_stable_line(otter: Served, home: Path, typed: Typed) -> None:
    found = typed("status --json").json
    assert list(found) == ["schema", "home", "places"]
    assert (found["schema"], found["home"]) == (1, str(home))
    (place,) = found["places"]
    assert list(place) == [
        "place", "path", "live", "phase", "pid", "started", "name", "peer", "role", "run", "run_name", "session",
        "data", "keeper", "end", "standing", "trouble", "owner",
    ]  # fmt: skip
    assert (place["live"], place["phase"], place["trouble"]) == (True, "ready", "")
    assert (place["standing"]["schema"], place["standing"]["step"], place["standing"]["pid"]) == (1, 12, place["pid"])
    found = typed("peers --json").json
    assert list(found) == ["schema", "seen_by", "run", "run_name", "step", "steps", "peers", "starting"]
    assert (found["schema"], found["run"], found["seen_by"]) == (1, RUN, PEER.format(1))
    assert [one["part"] for one in found["peers"]] == ["stage-0", "ends", "stage-2", None]


def test_invite_says_which_directory_it_makes_for_its_file(
    otter: Served, tmp_path: Path, typed: Typed, snapshot: Snapshot
) -> None:
    file = tmp_path / "a" / "b" / "ana.txt"
    assert [typed("invite", "--out", to) for to in (file, file, file / "ana.txt")] == snapshot
    assert file.read_text() == f"{INVITE}\n"


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        # No step is timed yet, so it expires with the run; then its last step follows from the pace.
        ("--grants-until 60 --tokens-per-s 0", "--for ana --role stage --expires 12h"),
        ("--grants-until 40 --tokens-per-s 0", "--for ana --role stage"),
        ("--grants-until 60", "--for ana --role stage"),
        ("--grants-until 60", "--for ana --role observer"),
        # The name has one already, which nobody has used, or somebody has.
        ("--grants-until 60 --given-to ana", "--for ana --role trainer"),
        ("--grants-until 60 --given-to ana", "--for zoe --role trainer"),
        ("--grants-until 60 --given-to ana --used", "--for ana --role trainer"),
    ],
)
def test_invite_for_a_name_says_what_it_is_good_for_and_how_it_is_used(
    home: Path, typed: Typed, snapshot: Snapshot, peer: str, words: str
) -> None:
    with serving(home, *peer.split()):
        said = typed(f"invite {words}")
    assert said.code == 0
    assert said.err == snapshot


def test_invite_refuses_options_before_it_looks_for_a_peer(typed: Typed, snapshot: Snapshot) -> None:
    refused = [
        typed("invite", *options)
        for options in (
            ["--for", "a b"],
            ["--for", "a", "--role", "boss"],
            ["--role", "boss"],
            ["--for", "a", "--expires", "7x"],
            ["--for", "a", "--id", "me"],
            ["--for", "a", "--organisation", "b c"],
            ["--role", "stage", "--no-vote"],
            ["--countersign", "swarm1:x", "--for", "a"],
            ["--for", "a,b"],
            ["--for", "a,b", "--out", "one.txt"],
            ["--for", "a,b", "--out", "many/", "--qr"],
            ["--for", "a,b", "--id", "me", "--out", "many/"],
            ["--for", "a,", "--out", "many/"],
            ["--out", "many/"],
        )
    ]
    assert {one.code for one in refused} == {2}
    assert refused == snapshot


def test_invites_for_several_go_to_a_file_each_and_replace_none(home: Path, tmp_path: Path, typed: Typed) -> None:
    into = tmp_path / "invites"
    with serving(home, "--grants-until", "60"):
        said = typed("invite", "--for", "ana,ben", "--role", "stage", "--out", f"{into}/")
        again = typed("invite", "--for", "cy,ana", "--role", "stage", "--out", into)
    found = {file.name: parse_invite(file.read_text()).granted for file in into.iterdir()}
    assert {name: one and one.grant.grant.name for name, one in found.items()} == {"ana.txt": "ana", "ben.txt": "ben"}
    assert {file.stat().st_mode & 0o777 for file in into.iterdir()} == {0o600}
    assert (said.code, said.out, said.err.count("The invite is in ")) == (0, "", 2)
    assert (again.code, f"{into / 'ana.txt'} is there" in again.err) == (2, True)


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), (None, 2)])
def test_revoke_that_costs_a_part_is_agreed_to_at_a_terminal_or_with_yes(
    otter: Served, typed: Typed, monkeypatch: pytest.MonkeyPatch, answer: str | None, code: int
) -> None:
    monkeypatch.setattr("sys.stdin", stdin := io.StringIO(answer or ""))
    monkeypatch.setattr(stdin, "isatty", lambda: answer is not None)
    said = typed("revoke ana")
    assert (said.code, said.out == "ana is revoked\n") == (code, code == 0)
    assert "nobody else" in said.err
    assert ("revoke ana --yes" in said.err) == (code != 0)
    assert typed("revoke ana --yes").out == "ana is revoked\n"
    told = json.loads(typed("revoke ana --yes --json").out)
    assert told == {"schema": 1, "peer": "brave-otter", "said": "ana is revoked"}


def test_invites_roles_are_those_that_can_be_granted() -> None:
    assert get_args(GrantRole) == ROLES


def test_drain_as_json_is_one_line_when_the_peer_has_left(home: Path, typed: Typed) -> None:
    with running(home) as otter:
        (begun,) = typed("drain --no-wait --json").json["peers"]
        said = typed("drain --json")
        assert otter.wait() == 75
    told = {"peer": "brave-otter", "place": "1", "said": "leaves when step 13 closes"}
    assert begun == told | {"exit_code": None}
    assert (said.code, said.err, said.json) == (0, "", {"schema": 1, "peers": [told | {"exit_code": 0}]})


def killed_meanwhile(otter: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it killed once somebody follows how it leaves."""
    look = leave_command.look_at

    def kill(*arguments: Any, **more: Any) -> Any:
        otter.end(killed=True)
        return look(*arguments, **more)

    monkeypatch.setattr(leave_command, "look_at", kill)


@pytest.mark.parametrize("trouble", ["is stopped", "does not listen yet", "is killed meanwhile"])
def test_drain_all_tells_and_follows_the_others_whatever_one_of_them_does(
    otter: Served, mole: Served, home: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed, trouble: str
) -> None:
    if trouble == "is stopped":
        monkeypatch.setattr(ask, "__kwdefaults__", {"timeout_s": 2.0})  # the mole must answer within it
        otter.be_silent()
    elif trouble == "does not listen yet":
        (home / "1" / "control.sock").unlink()
    else:
        killed_meanwhile(otter, monkeypatch)
    said = typed("drain --all")
    assert "keen-mole: has left" in said.out
    assert said.err.startswith("error: brave-otter")
    assert said.code == (1 if trouble == "is killed meanwhile" else 3)


def test_drain_is_of_one_peer_or_of_all(otter: Served, typed: Typed, snapshot: Snapshot) -> None:
    assert typed("drain --all --peer brave-otter") == snapshot
    assert otter.lives


def test_follow_without_a_process_to_watch_sees_the_end_all_the_same(
    otter: Served, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(leave_command.os, "pidfd_open", nowhere)
    said: list[str] = []
    otter.end()
    assert follow(look_at_place(home / "1"), said.append, look_every_s=0.01) == 0
    assert said == ["brave-otter: has left: it was stopped by SIGTERM (exit code 75)"]


def test_drain_of_a_peer_that_is_killed_meanwhile_complains(
    otter: Served, typed: Typed, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    killed_meanwhile(otter, monkeypatch)
    complains, status = typed("drain"), typed("status")
    assert (complains.code, status.code) == (1, 3)
    assert [complains, status] == snapshot


def test_a_silent_peer_is_said_to_be_so_in_time_and_is_not_healthy(
    otter: Served, home: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    healthy = typed("status --healthy")
    assert (healthy.code, healthy.out, healthy.err) == (0, "", "")
    monkeypatch.setattr(look_at_all, "__kwdefaults__", {"timeout_s": 0.05})
    otter.be_silent()
    said = [typed("status --peer 1"), typed("status --healthy"), typed("status", "--healthy", "--home", home / "none")]
    assert [one.code for one in said] == [3] * 3
    assert said == snapshot


def test_a_peer_that_has_no_socket_yet_is_starting(otter: Served, home: Path, typed: Typed, snapshot: Snapshot) -> None:
    (home / "1" / "control.sock").unlink()
    said = [typed("status"), typed("peers"), typed("invite")]
    assert [one.code for one in said] == [0, 0, 3]
    assert said == snapshot
    assert typed("peers --json").json["starting"] == [{"place": "1", "name": "brave-otter"}]


# --- the texts -------------------------------------------------------------------------------------------------------

PLACE = PlaceInfo(name="1", path=Path("h/1"), live=True, state=None)
MEMORY = MemoryReport(
    predicted={"copies": 0, "weights": 12_000_000, "graphs": 24_000_000, "round": 0},
    measured={"copies": 0, "weights": 12_000_000, "graphs": 0, "round": 5_000},
    resident=512_000_000,
    allocated=None,
)
APART = AveragingConfig(mode="local", strategy="grid", local=LocalConfig(steps=4, sync_every=3))
STANDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "only starts": {
        "phase": "waiting", "waiting_for": "a stage host", "run": "", "run_name": "", "steps": 0, "step": 0,
        "part": None, "reason": "", "loss": None, "tokens_per_s": None,
    },
    "fewer copies than asked for": {"copies": ("stage-1",), "fewer_copies": "ends has 1 of 2"},
    "two voters": {"few_voters": few_voters(2)},
    "four trainers": {"few_trainers": few_trainers(4)},
    "has a time to leave in": {"ends_by": 1_700_000_000.0},
    "early share": {"early": (0.0, 0.25)},
    "one is lost": {"lost": 1},
    "trainers that feed nothing": {"unfed": (("ann", 300), ("ben", 12))},
    "device": {"device_use": DeviceUse(flops_per_s=61.2e12, mfu=0.37)},
    "memory": {"memory": MEMORY},
    "memory of a founder": {"memory": MemoryReport(predicted={}, measured={"copies": 7}, resident=1, allocated=3_000)},
    "trains apart": {
        "averages": APART.described, "mixed": 199, "mixed_alone": 68,
        "averaging": (PartTurnout(part="ends", step=12, live=1, participating=1, averaged=1, why={}, alone=False),),
    },
    "hops computed again": {"audits": AuditCounts(made=40, wrong=2, doubtful=1, unjudged=3)},
    "variants": {
        "variants": (
            VariantReport(part="stage-1.v0of2", kinds=("law", "news"), hosts=3, passed=12, of=16),
            VariantReport(part="stage-1.v1of2", kinds=("code",), hosts=1, passed=4, of=16),
        ),
    },
    "stages share": {"sharing": sharing_text((shared_part(2), ENDS), 40)},
    "open votes": {
        "admission": AdmissionReport(
            mode="token", issuers=(), admitted=(), revoked=(),
            votes=(("revoke", "ana", 1, 3), ("dismiss", "12D3", 0, 3)),
        ),
    },
}  # fmt: skip


def seen(name: str, **more: Any) -> Seen:
    return Seen(place=PLACE, standing=dataclasses.replace(standing(name), pid=1, **more))


@pytest.mark.parametrize("what", STANDINGS)
def test_status_of_a_peer_says_what_it_does_and_what_is_unusual(snapshot: Snapshot, what: str) -> None:
    one = seen("otter", **STANDINGS[what])
    assert [*status_lines([one]), "", *detail_lines(one)] == snapshot
    answer = json.loads(json.dumps(dataclasses.asdict(one.standing)))
    read = standing_from(StatusReport, answer, "otter")
    assert json.loads(json.dumps(dataclasses.asdict(read))) == answer
    assert status_lines([Seen(place=PLACE, standing=read)]) == status_lines([one])


def test_fewer_voters_than_three_are_said(snapshot: Snapshot) -> None:
    assert "one voter only" in few_voters(1)
    assert [few_voters(n) for n in (0, 3, 11)] == ["", "", ""]


def test_fewer_trainers_than_can_be_judged_are_said() -> None:
    assert [bool(few_trainers(n)) for n in (1, FEWEST_TRAINERS - 1, FEWEST_TRAINERS)] == [True, True, False]


def test_turnout_is_shown_once_for_each_run_as_the_newest_step_has_it(snapshot: Snapshot) -> None:
    def part(step: int, averaged: int, **why: str) -> PartTurnout:
        return PartTurnout(
            part="stage-0", step=step, live=3, participating=3, averaged=averaged, why=why, alone=False
        )  # fmt: skip

    old = seen("otter", step=11, averaging=(part(11, 3),))
    new = seen("owl", averaging=(part(12, 2, hen="no microbatch this step"),))
    assert [*status_lines([old, new]), "", *detail_lines(old)] == snapshot


def test_members_say_where_they_are_and_who_only_calls(snapshot: Snapshot) -> None:
    plain = MemberReport(
        name="owl", peer=PEER.format(3), role="stage", part="stage-0", state="member", link="direct", addresses=()
    )
    there = dataclasses.replace(plain, name="hen", region="eu-west", outgoing=True, copies=("ends",), checked=8)
    gone = dataclasses.replace(plain, name="emu", state="lost", lost="no answer to 3 pings in a row")
    young = seen("otter", **STANDINGS["only starts"]).standing
    assert [*member_lines(standing("otter"), [plain, there, gone]), *member_lines(young, [])] == snapshot
    parts = [stage_part(0), *(stage_part(1, each, 12) for each in range(12)), stage_part(2), stage_part(10), ENDS, None]
    each = [dataclasses.replace(plain, part=part) for part in reversed(parts)]
    told = [line for line in member_lines(standing("otter"), each)[1:] if line and line[0] != " "]
    assert told == [part or "no part" for part in parts]


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


# --- with several, and with none -------------------------------------------------------------------------------------


def test_commands_with_peers_of_several_runs_ask_which(
    otter: Served, home: Path, typed: Typed, snapshot: Snapshot
) -> None:
    with serving(home, "--place", "gpu", "--name", "keen-mole", "--number", "2", "--run", "ab" * 32):
        said = [typed(words) for words in ("peers", "drain", "invite", "peers --peer 12D3KooWLbT7")]
        assert typed("invite --peer gpu").code == 0
    assert {(one.code, one.out) for one in said} == {(2, "")}
    assert said == snapshot


def test_commands_with_several_peers_of_one_run_ask_any_that_answers(
    otter: Served, mole: Served, home: Path, typed: Typed, snapshot: Snapshot
) -> None:
    assert typed("invite").out == f"{INVITE}\n"
    assert [one["invite"] for one in json.loads(typed("invite --json").out)["invites"]] == [INVITE]
    (home / "1" / "control.sock").unlink()  # brave-otter is only starting
    said = [typed("peers"), typed("drain")]
    assert [one.code for one in said] == [0, 2]
    assert said == snapshot


@pytest.mark.parametrize("words", ["drain --peer 1", "drain --all"])
def test_drain_that_is_interrupted_says_of_each_that_it_goes_on_leaving(
    otter: Served, mole: Served, monkeypatch: pytest.MonkeyPatch, typed: Typed, words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def pressed(*arguments: Any) -> int:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(leave_command, "follow", pressed)
    monkeypatch.setattr(leave_command, "ask", lambda *_, **__: "leaves when step 13 closes")
    with pytest.raises(Interrupted):
        typed(words)
    said = capsys.readouterr().out.count(": goes on leaving; how far it is: ")
    assert said == (2 if "--all" in words else 1)
    assert (otter.lives, mole.lives) == (True, True)


@pytest.mark.parametrize(("end", "said"), [(None, True), (3, True), (130, True), (0, False)])
def test_status_where_the_last_peer_lost_its_run_names_the_way_to_go_on(
    home: Path, typed: Typed, end: int | None, said: bool
) -> None:
    with take_place(home, "1", clock=At(1_700_000_000.0)) as place:
        place.open_session(name="a", peer=PEER.format(3), role="stage", run="ab" * 32)
        if end is not None:
            place.ended("over", end)
    shown = typed("status")
    assert (shown.code, "new --resume" in shown.err) == (3, said)


@pytest.mark.parametrize("later", [False, True])
def test_status_where_a_relay_is_gone_names_the_command_that_starts_it_again(
    home: Path, typed: Typed, later: bool
) -> None:
    with take_place(home, "vps", clock=At(1_700_000_000.0)) as taken:
        taken.open_session(name="a", peer=PEER.format(3), role="relay")
    if later:
        with take_place(home, "1", clock=At(1_700_000_001.0)) as taken:
            taken.open_session(name="b", peer=PEER.format(4), role="stage", run="ab" * 32)
    shown = typed("status")
    assert (shown.code, "swarm relay --place vps " in shown.err) == (3, not later)


@pytest.mark.parametrize(("parts", "offered"), [(None, True), ([stage_part(0)], False)])
def test_status_after_an_orderly_end_is_a_note_that_offers_a_sample_where_one_can_be_had(
    home: Path, typed: Typed, parts: list[PartName] | None, *, offered: bool
) -> None:
    kept = kept_run()
    directory = kept.keep(home / "runs" / kept.manifest.run_id, 4, *([] if parts is None else [parts]))
    with take_place(home, "1", clock=At(1_700_000_000.0)) as place:
        place.open_session(name="a", peer=PEER.format(3), role="stage", run=kept.manifest.run_id)
        place.ended("the run was ended with step 4, as all its peers were asked", 0)
    shown = typed("status")
    assert (shown.code, f"sample {directory.root}" in shown.err) == (3, offered)
    assert shown.err.startswith("note: no peer runs here")
    assert "new --resume" in shown.err


@pytest.mark.parametrize("went_on", [False, True])
def test_status_where_one_of_the_run_that_all_have_left_saw_its_end_names_the_way_to_go_on(
    home: Path, typed: Typed, *, went_on: bool
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
    shown = typed("status")
    assert (shown.code, "new --resume" in shown.err) == (3, not went_on)


def test_status_lists_the_live_and_the_ended(otter: Served, mole: Served, typed: Typed, snapshot: Snapshot) -> None:
    mole.end()
    said = [typed(words) for words in ("status", "drain --peer keen-mole", "status --peer keen-mole")]
    assert [one.code for one in said] == [0, 3, 3]
    assert said == snapshot


@pytest.mark.parametrize("command", ["status", "peers", "drain", "invite"])
def test_commands_where_no_peer_runs_say_how_to_start_one(
    home: Path, typed: Typed, snapshot: Snapshot, command: str
) -> None:
    said = [typed(command), typed(command, "--peer", "nobody"), typed(command, "--peer", "")]
    assert {(one.code, one.out) for one in said} == {(3, "")}
    assert said == snapshot
    assert list(home.iterdir()) == []


# --- identities ------------------------------------------------------------------------------------------------------


def test_id_makes_nothing_unless_asked(home: Path, typed: Typed, snapshot: Snapshot) -> None:
    assert typed("id") == snapshot
    assert list(home.iterdir()) == []
    made = typed("id --create --json").json
    assert list(made) == ["schema", "place", "peer", "name", "key"]
    assert typed("id --json").json == typed("id --create --json").json == made
    (place,) = list_places(home)
    assert not place.live
    assert made["peer"] in typed("id").out


def test_id_of_several_places_lists_them_and_as_json_wants_one(home: Path, typed: Typed) -> None:
    for place in ("1", "gpu"):
        assert typed("id", "--create", "--place", place).code == 0
    lines = typed("id").out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("place")] == ["1", "gpu"]
    refused = typed("id --json")
    assert (refused.code, refused.out) == (2, "")
    assert "there are 2 places here" in refused.err
    assert "id --json --place 1" in refused.err
    assert typed("id --json --place gpu").json["place"] == "gpu"


@pytest.mark.parametrize(("words", "code"), [("--place ../x --create", 2), ("--place 2", 3)])
def test_id_of_what_is_no_place_is_explained(
    home: Path, typed: Typed, snapshot: Snapshot, words: str, code: int
) -> None:
    assert typed("id --create").code == 0
    said = typed(f"id {words}")
    assert said.code == code
    assert said == snapshot
    assert len(list(home.iterdir())) == 1
