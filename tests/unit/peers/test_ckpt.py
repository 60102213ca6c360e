"""``swarm ckpt`` and ``swarm new --resume`` on directories; from running peers they are in ``tests/processes``."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.checkpoints.checkpoint_sources import Source, directory_source
from peers.checkpoints.pull import pull
from peers.checkpoints.resume import FromCheckpoint, _told, find_resumable
from peers.checkpoints.writer import keep_run
from peers.console.words import CommandError
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_UNREACHABLE, EXIT_USAGE
from peers.home.places import Tenant, take_place
from peers.home.run_directory import RunDirectory, said_run_id
from peers.invites.invite import Granted, Invite
from peers.settings import PeerSettings
from swarm.averaging.allreduce.check import Commitment
from swarm.config import load_manifest
from swarm.consensus.admissions import AdmissionConfig, Admissions
from swarm.consensus.records import CloseRecord
from swarm.errors import StateError, Violation
from swarm.ids import ENDS, JourneyKey, MicrobatchId, RunId, stage_part
from swarm.membership.founding_record import founding_record
from swarm.models.spec import SplitConfig
from swarm.network.libp2p.identity import load_or_create
from swarm.schema import AFTER_CHARS
from swarm.security.credentials import Grant, GrantRole, sign_grant
from swarm.security.signing import PrivateIdentity, Signing, audit_bytes, peer_of
from swarm.state.checkpoints.donors import DirectoryDonor, Donor, Offer, PeerDonor
from swarm.state.checkpoints.parts import flaw, latest, part_path, read_manifest, step_directory, steps, write_manifest
from swarm.state.checkpoints.rotation import aside_directory, set_aside
from swarm.state.download import ChunkDonor
from tests.harness.rigs.averaging import make_plan
from tests.harness.rigs.peers import PARTS, FakeClock, KeptRun, Said, Typed, kept_run

pytestmark = pytest.mark.usefixtures("elsewhere")

PEER = peer_of(bytes(32))
STAGE_0, STAGE_1 = stage_part(0), stage_part(1)


@pytest.fixture
def kept(tmp_path: Path, run: KeptRun) -> RunDirectory:
    """Steps 10 (whole) and 20 (without stage 1), where a machine keeps the runs it joined."""
    root = tmp_path / "home" / "runs" / f"kept-{run.manifest.run_id[:12]}"
    run.keep(root, 10)
    return run.keep(root, 20, [ENDS, STAGE_0])


def another_run() -> KeptRun:
    return kept_run(name="other", nonce="0" * 15 + "1")


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


# --- ls and verify ---------------------------------------------------------------------------------------------------


def test_ls_and_verify_show_runs_steps_and_what_is_missing(
    kept: RunDirectory, run: KeptRun, typed: Typed, snapshot: Any
) -> None:
    (facts,) = typed("ckpt ls --json").json["runs"]
    assert (facts["name"], facts["run"], facts["newest_complete"]) == ("kept", run.manifest.run_id, 10)
    whole, partial = facts["steps"]
    assert (whole["step"], whole["complete"], whole["missing"], whole["troubles"]) == (10, True, [], [])
    assert whole["bytes"] == sum(part_path(kept.checkpoints, 10, part).stat().st_size for part in PARTS)
    assert (partial["step"], partial["complete"], partial["missing"]) == (20, False, ["stage-1"])
    assert [one["part"] for one in partial["parts"]] == ["ends", "stage-0"]
    document = typed("ckpt verify --json").json
    assert document["ok"]
    assert [(one["step"], one["complete"], one["proof"], one["missing"]) for one in document["steps"]] == [
        (10, True, "decided", []),
        (20, False, "decided", ["stage-1"]),
    ]
    said = [typed("ckpt", "ls", kept.root), typed("ckpt verify"), typed("ckpt", "verify", kept.root, "--step", "20")]
    assert said == snapshot


def test_ls_tells_of_what_was_set_aside(kept: RunDirectory, typed: Typed) -> None:
    set_aside(kept.checkpoints, [20])
    assert "  aside         step 20, in checkpoints/aside: " in typed("ckpt ls").out
    (facts,) = typed("ckpt ls --json").json["runs"]
    assert (facts["aside"], [one["step"] for one in facts["steps"]]) == ([20], [10])
    assert find_resumable(None, None).passed_over == ()


def test_ls_of_a_step_that_is_being_written_or_that_holds_nothing(
    kept: RunDirectory, typed: Typed, snapshot: Any
) -> None:
    """As it is seen at every moment of a save: a claim, a record, a part."""
    bare, claimed, halfway = (step_directory(kept.checkpoints, step) for step in (30, 40, 50))
    bare.mkdir()
    shutil.copytree(step_directory(kept.checkpoints, 20), halfway)
    record = read_manifest(kept.checkpoints, 20)
    write_manifest(kept.checkpoints, record.model_copy(update={"step": 50}))
    for directory in (claimed, halfway):
        directory.mkdir(exist_ok=True)
        for part in halfway.glob("*.safetensors"):
            part.unlink()
        (directory / ".ends.safetensors.lock").touch()
        os.utime(directory / ".ends.safetensors.lock", (1_700_000_000, 1_700_000_000))
    assert typed("ckpt ls") == snapshot
    assert flaw(kept.checkpoints, 30) is not None
    assert (latest(kept.checkpoints), find_resumable(None, None).step) == (10, 10)


def test_ls_of_nothing_and_of_damage(kept: RunDirectory, typed: Typed, tmp_path: Path) -> None:
    os.truncate(part_path(kept.checkpoints, 10, ENDS), 100)
    assert f"damaged: {part_path(kept.checkpoints, 10, ENDS).absolute()}: torn" in typed("ckpt ls").out
    assert "no run is kept here" in typed("ckpt", "ls", "--home", tmp_path / "other").err
    for strange in ("nowhere", "x" * 500, ""):
        assert typed("ckpt", "ls", strange).code == EXIT_USAGE


def test_verify_says_which_of_several_runs_it_checks(
    kept: RunDirectory, tmp_path: Path, typed: Typed, snapshot: Any
) -> None:
    step_directory(kept.checkpoints, 30).mkdir()
    newer = another_run().keep(tmp_path / "out" / "other", 0)
    os.utime(newer.root, (4e9, 4e9))
    said = [typed("ckpt verify"), typed("ckpt", "verify", said_run_id(kept)[:12])]
    assert [one.code for one in said] == [0, 0]
    assert said == snapshot


@pytest.mark.parametrize("name", ["ends.safetensors", "stage-0.safetensors", "record.json"])
def test_verify_changed_byte_is_exit_1_and_names_the_file(kept: RunDirectory, name: str, typed: Typed) -> None:
    path = step_directory(kept.checkpoints, 10) / name
    flip(path, path.stat().st_size // 2)
    said = typed("ckpt verify")
    assert (said.code, str(path) in said.err) == (1, True)
    assert "step 10: damaged" in said.out
    assert "step 20: 2 of 3 parts, undamaged" in said.out


def test_verify_of_no_checkpoint_or_step_is_usage(kept: RunDirectory, typed: Typed, snapshot: Any) -> None:
    no_step = typed("ckpt verify --step 11")
    shutil.rmtree(kept.checkpoints)
    said = [no_step, typed("ckpt verify")]
    assert [one.code for one in said] == [EXIT_USAGE] * 2
    assert said == snapshot


# --- pull ------------------------------------------------------------------------------------------------------------


def pull_from(typed: Typed, *sources: RunDirectory, into: Path | None = None) -> Said:
    """Pull what these directories hold."""
    words = [word for source in sources for word in ("--from", source.root)]
    return typed("ckpt", "pull", *([] if into is None else [into]), *words)


async def pulled_to(source: Source, directory: RunDirectory) -> Any:
    return await pull(source, directory, lambda *said: None, lambda *told: None)


def test_pull_from_a_directory_makes_the_newest_step_whole(
    kept: RunDirectory, run: KeptRun, tmp_path: Path, typed: Typed
) -> None:
    copy = run.keep(tmp_path / "copy", 20, [STAGE_1])
    document = typed("ckpt", "pull", "--from", copy.root, "--json").json
    assert (document["step"], document["fetched"], document["run"]) == (20, ["stage-1"], run.manifest.run_id)
    assert document["path"] == str(kept.root)
    assert latest(kept.checkpoints) == 20
    assert typed("ckpt verify --step 20").code == 0
    assert "step 20 was complete here already" in pull_from(typed, copy).out


async def test_pull_from_a_run_that_went_on_from_before_fetches_what_counts(run: KeptRun, tmp_path: Path) -> None:
    here = run.keep(tmp_path / "here", 60)
    there = RunDirectory(tmp_path / "there")
    for step in (24, 30, 31):
        run.keep(there.root, step, seed=5)
    donor = DirectoryDonor(there.checkpoints)
    source = Source(manifest=run.manifest, files=run.files, donors=(donor,), head=run.decisions[-1].record)
    lines: list[str] = []
    pulled = await pull(source, here, lambda *said: lines.append(" ".join(said)), lambda *told: None)
    assert (pulled.step, latest(here.checkpoints)) == (31, 31)
    assert steps(aside_directory(here.checkpoints)) == (60,)
    assert lines[0] == "set aside step 60: the run went on from before, these do not count any more"


def test_pull_of_what_cannot_be_had_says_why_and_leaves_what_was_there(
    kept: RunDirectory, run: KeptRun, tmp_path: Path, typed: Typed, snapshot: Any
) -> None:
    ends = run.keep(tmp_path / "copy", 20, [ENDS])
    other = another_run().keep(tmp_path / "other", 0)
    torn = run.keep(tmp_path / "torn", 20)
    flip(part_path(torn.checkpoints, 20, STAGE_1))
    said = [
        pull_from(typed, kept, other, into=tmp_path / "new"),
        pull_from(typed, other, into=kept.root),
        pull_from(typed, torn),
        pull_from(typed, ends, into=tmp_path / "new"),
        *(typed(f"ckpt pull {words}") for words in ("", "--from nobody", "--from swarm1:rubbish", "--from a --from b")),
    ]
    assert [one.code for one in said[:4]] == [EXIT_INCOMPATIBLE, EXIT_INCOMPATIBLE, 1, EXIT_UNREACHABLE]
    assert {one.code for one in said[4:]} == {EXIT_UNREACHABLE, EXIT_USAGE}
    assert [one.complaint for one in said] == snapshot
    assert (steps(kept.checkpoints), latest(kept.checkpoints)) == ((10, 20), 10)
    assert not (tmp_path / "new").exists()
    shutil.rmtree(step_directory(kept.checkpoints, 10))
    assert "of the newest, 20, no peer that answers has stage-1" in pull_from(typed, ends).err
    (tmp_path / "new").mkdir()
    assert pull_from(typed, ends, into=tmp_path / "new").code == EXIT_UNREACHABLE
    assert list((tmp_path / "new").iterdir()) == []


def test_pull_of_an_older_step_says_what_nobody_has_of_a_newer_one(
    run: KeptRun, tmp_path: Path, typed: Typed, snapshot: Any
) -> None:
    run.keep(tmp_path / "copy", 10)
    said = pull_from(typed, run.keep(tmp_path / "copy", 20, [ENDS]), into=tmp_path / "new")
    assert said.code == 0
    assert "step 10 is complete here" in said.out
    assert said.complaint == snapshot


async def test_pull_from_a_live_run_names_who_trains_what_nobody_has(run: KeptRun, tmp_path: Path) -> None:
    run.keep(tmp_path / "copy", 10)
    copy = run.keep(tmp_path / "copy", 20, [ENDS, STAGE_0])
    source = replace(directory_source([copy]), head=run.decisions[-1].record)
    pulled = await pulled_to(source, RunDirectory(tmp_path / "new"))
    lacks = "of step 20 no peer that answers has stage-1 (trained by peer-stage-1)"
    assert (pulled.step, pulled.newer) == (10, (lacks,))
    assert pulled.run_step == run.decisions[-1].record.step > pulled.step


class OfRun(PeerDonor):
    """A peer of a run that has what a directory holds."""

    def __init__(self, directory: RunDirectory) -> None:
        self._peer, self._files = PEER, DirectoryDonor(directory.checkpoints)

    async def offers(self) -> list[Offer[Donor]]:
        return [replace(one, donor=self._files) for one in await self._files.offers()]

    async def record(self, step: int) -> bytes:
        return await self._files.record(step)

    @property
    def frozen(self) -> ChunkDonor:
        return self._files.frozen


def granted(role: GrantRole, run: KeptRun) -> Grant:
    return Grant(run=run.manifest.run_id, serial="0" * 16, name="ana", role=role, until_step=9, key=PEER)


@pytest.mark.parametrize(
    ("role", "lacks"), [("stage", "does not give ends"), ("trainer", "does not give stage-0 and stage-1"), ("any", "")]
)
async def test_pull_with_an_invite_for_a_role_names_what_it_is_not_for(
    role: GrantRole, lacks: str, run: KeptRun, tmp_path: Path
) -> None:
    there = run.keep(tmp_path / "there", 10)
    found = directory_source([there])
    source = replace(found, donors=(OfRun(there),), grant=granted(role, run))
    new = RunDirectory(tmp_path / "new")
    if not lacks:
        assert (await pulled_to(source, new)).step == 10
        return
    with pytest.raises(CommandError, match=f"is for ana as {role}: of step 10 it {lacks}") as refused:
        await pulled_to(source, new)
    assert "invite --for ana --role any" in refused.value.next
    assert refused.value.exit_code == EXIT_USAGE
    beside = replace(source, donors=(*source.donors, *found.donors))
    assert (await pulled_to(beside, new)).step == 10


def test_pull_with_an_observer_s_invite_says_which_one_it_takes(run: KeptRun, typed: Typed) -> None:
    grant = Granted(grant=sign_grant(granted("observer", run), PrivateIdentity(bytes(32))), seed=None)
    invite = Invite(run=run.manifest.run_id, name="x", at=(f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}",), granted=grant)
    said = typed("ckpt", "pull", "--from", invite.text())
    assert said.code == EXIT_USAGE
    assert "this invite is for ana as observer: an observer gets no part of the model" in said.err
    assert "invite --for ana --role any" in said.err


def test_pull_that_breaks_off_keeps_what_it_fetched(run: KeptRun, tmp_path: Path, typed: Typed) -> None:
    copy = run.keep(tmp_path / "copy", 20)
    new = RunDirectory(tmp_path / "new")
    flip(part_path(copy.checkpoints, 20, STAGE_1))
    assert pull_from(typed, copy, into=new.root).code == 1
    assert list(new.checkpoints.glob("step-*/*stage-0.safetensors*"))
    flip(part_path(copy.checkpoints, 20, STAGE_1))
    assert pull_from(typed, copy, into=new.root).code == 0
    assert latest(new.checkpoints) == 20


# --- resume ----------------------------------------------------------------------------------------------------------


async def test_resume_takes_the_newest_whole_step_and_says_what_it_passed_over(
    kept: RunDirectory, run: KeptRun
) -> None:
    told = list[tuple[str, float, float]]()
    found = find_resumable(None, None, lambda *so_far: told.append(so_far))
    assert [what for what, _, _ in told] == ["step 20", "step 20", *["step 10"] * 3], "of each part that is here"
    assert all(0 <= done < total for _, done, total in told)
    assert (found.directory, found.step, found.manifest) == (kept, 10, run.manifest)
    assert found.passed_over == ("step 20 lacks stage-1 here",)
    origin, snapshots = await FromCheckpoint(kept.checkpoints, 10, run.manifest.run_id).load(lambda *_: None)
    record = next(one.record for one in run.decisions if one.record.step == 10)
    assert (origin.step, origin.previous, origin.cursors) == (10, record.hash(), record.cursors)
    assert {snapshot.part: origin.digests[snapshot.part] for snapshot in snapshots} == record.digests


def test_resume_says_who_alone_can_have_what_a_step_of_a_pause_lacks() -> None:
    split = SplitConfig(stages=2, variants=(1, 2), route_by="domain", domains=("law", "code"), own={"code": "acme"})
    away = stage_part(1, 1, 2)
    manifest: Any = SimpleNamespace(split=split, cut_with=lambda there: split.parts)
    checked: Any = SimpleNamespace(step=20, bad=(), parts=[part for part in split.parts if part != away])
    said = _told(checked, manifest)
    assert said.startswith(f"step 20 lacks {away} here, of which acme alone can have {away}, and nobody where")
    checked.parts = [part for part in split.parts if part != stage_part(0)]
    assert _told(checked, manifest) == "step 20 lacks stage-0 here"


async def test_what_a_member_signs_in_one_resumption_shows_nothing_in_another_of_the_same_checkpoint(
    kept: RunDirectory, run: KeptRun
) -> None:
    records, (key, *_) = list[CloseRecord](), run.keys
    for _ in range(2):
        origin, _ = await FromCheckpoint(kept.checkpoints, 10, run.manifest.run_id).load(lambda *_: None)
        records.append(founding_record(run.manifest.run_id, run.roster, origin))
    one, other = records
    assert one.model_copy(update={"resumed": other.resumed}) == other
    afters = [record.hash()[:AFTER_CHARS] for record in records]
    plans = [make_plan({peer: 1 for peer in run.roster.peers}, 12, after=after, checked=1.0) for after in afters]
    committed, signing = [bytes(16)] * len(plans[0].chunks), Signing(key.sign)
    told = Commitment.of(plans[0], committed, signing).to_bytes()
    Commitment.read(plans[0], key.peer, told, signing)
    with pytest.raises(Violation, match="did not sign what it commits to"):
        Commitment.read(plans[1], key.peer, told, signing)
    microbatch = MicrobatchId(key.peer, "0" * 16, 0, 0)
    hops = [JourneyKey(11, microbatch, 0, after) for after in afters]
    assert len({audit_bytes(one.run, hop, 0, key.peer, bytes(64), wrong=True) for hop in hops}) == 2
    closed = run.decide(10).record.model_dump()
    with pytest.raises(ValueError, match="only a record with which a run goes on"):
        CloseRecord.model_validate(closed | {"resumed": 1})


def test_resume_falls_back_from_a_step_with_a_flipped_bit(kept: RunDirectory, run: KeptRun) -> None:
    run.keep(kept.root, 20)
    assert find_resumable(kept.root, None).step == 20
    flip(part_path(kept.checkpoints, 20, ENDS))
    found = find_resumable(kept.root, None)
    assert found.step == 10
    assert "step 20 is damaged" in found.passed_over[0]


async def test_resume_checks_again_what_changed_meanwhile(kept: RunDirectory, run: KeptRun) -> None:
    flip(part_path(kept.checkpoints, 10, ENDS))
    with pytest.raises(StateError, match="ends"):
        await FromCheckpoint(kept.checkpoints, 10, run.manifest.run_id).load(lambda *_: None)


def test_resume_without_a_part_names_it_and_the_command(kept: RunDirectory, typed: Typed, snapshot: Any) -> None:
    shutil.rmtree(step_directory(kept.checkpoints, 10))
    said = typed("new --resume")
    assert said.code == 1
    assert said == snapshot


@pytest.mark.parametrize("here", ["whole", "in part", "damaged"])
def test_resume_of_a_run_whose_last_step_is_closed_says_what_there_is_of_it(
    run: KeptRun, tmp_path: Path, typed: Typed, snapshot: Any, here: str
) -> None:
    run.keep(tmp_path / "over", 58)
    run.keep(tmp_path / "over", 90, [STAGE_0])  # no step to go on from here
    directory = run.keep(tmp_path / "over", 100, [STAGE_0] if here == "in part" else PARTS)
    if here == "damaged":
        torn = part_path(directory.checkpoints, 100, STAGE_0)
        torn.write_bytes(torn.read_bytes()[:-1])
    said = typed("new", "--resume", directory.root)
    assert said.code == 1
    assert said == snapshot
    for destroys_or_denies in ("passes over", "emove"):
        assert destroys_or_denies not in said.err
    assert find_resumable(step_directory(directory.checkpoints, 58), None).step == 58
    if here == "in part":
        with pytest.raises(CommandError, match="step 100 lacks stage-1 and ends here"):
            find_resumable(step_directory(directory.checkpoints, 100), None)


def test_resume_does_not_go_back_behind_the_step_that_ended_the_run(run: KeptRun, tmp_path: Path, typed: Typed) -> None:
    run.keep(tmp_path / "ended", 10)
    run.decide(11, ended=True)
    directory = run.keep(tmp_path / "ended", 11, [STAGE_0])
    said = typed("new", "--resume", directory.root)
    assert said.code == 1
    assert "its last step, 11, is closed; step 11 lacks stage-1 and ends here" in said.err
    run.keep(tmp_path / "ended", 11)
    assert find_resumable(directory.root, None).step == 11


def saw(home: Path, run: RunId, *events: dict[str, Any], place: str | None = None, started: float = 0.0) -> None:
    """A peer was in the run, at a place of its own, and ended after these events."""
    clock = FakeClock()
    clock.now = started
    with take_place(home, place, clock=clock, tenant=Tenant(run=run, role="stage")) as taken:
        session = taken.open_session(name="n", peer="p", role="stage", run=run, run_name="kept")
        lines = ({"kind": "RunFound", "steps": 100}, *events)
        (session / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_resume_of_a_run_that_a_peer_here_saw_ended_does_not_go_back(
    kept: RunDirectory, run: KeptRun, tmp_path: Path
) -> None:
    saw(tmp_path / "home", run.manifest.run_id, {"kind": "StepClosed", "step": 23, "ended": True})
    with pytest.raises(CommandError, match="the run is over: its last step, 23, is closed; step 23 is not here"):
        find_resumable(kept.root, None)
    assert find_resumable(step_directory(kept.checkpoints, 10), None).step == 10
    run.decide(23, ended=True)
    run.keep(kept.root, 23)
    assert find_resumable(kept.root, None).step == 23


def test_resume_goes_on_where_another_peer_here_saw_the_run_go_on_after_its_end(
    kept: RunDirectory, run: KeptRun, tmp_path: Path
) -> None:
    saw(tmp_path / "home", run.manifest.run_id, {"kind": "StepClosed", "t": 1.0, "step": 23, "ended": True})
    with pytest.raises(CommandError, match="its last step, 23, is closed"):
        find_resumable(kept.root, None)
    run.keep(kept.root, 30, [STAGE_0])
    assert find_resumable(kept.root, None).step == 10, "what lies here of a later step says that it went on"
    shutil.rmtree(step_directory(kept.checkpoints, 30))
    saw(tmp_path / "home", run.manifest.run_id, {"kind": "StepClosed", "t": 2.0, "step": 22}, place="b")
    with pytest.raises(CommandError, match="its last step, 23, is closed"):
        find_resumable(kept.root, None)  # it was a little behind
    saw(tmp_path / "home", run.manifest.run_id, place="c", started=3.0)
    with pytest.raises(CommandError, match="its last step, 23, is closed"):
        find_resumable(kept.root, None)  # it found nobody
    later = {"kind": "StepClosed", "t": 4.0, "step": 21}
    saw(tmp_path / "home", run.manifest.run_id, later, place="d", started=3.0)
    assert find_resumable(kept.root, None).step == 10, "another peer here came later, and further back"


def test_resume_bad_usage(kept: RunDirectory, typed: Typed, snapshot: Any) -> None:
    beside = ("--preset tiny", "--steps 3", "--hosts 3", "--tokenizer t.json", "nowhere", "abcdef")
    said = [typed(f"new --resume {words}") for words in beside]
    assert {one.code for one in said} == {EXIT_USAGE}
    assert said == snapshot


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PeerSettings]:
    """What peers were started with."""
    found: list[PeerSettings] = []
    monkeypatch.setattr("peers.node.run_peer", lambda settings: found.append(settings) or 0)
    return found


def test_resume_starts_a_founder_with_the_checkpoint(
    kept: RunDirectory, run: KeptRun, started: list[PeerSettings], typed: Typed
) -> None:
    said = typed("new", "--resume", run.manifest.run_id[:10], "--listen", "/ip4/127.0.0.1/tcp/0")
    assert said.code == 0
    (settings,) = started
    assert (settings.role, settings.resume, settings.run_directory) == ("bootstrap", 10, kept.root)
    assert settings.manifest is not None
    assert load_manifest(settings.manifest).run_id == run.manifest.run_id
    assert "step 20 lacks stage-1 here" in said.out
    assert "after step 10" in said.out


def resumed_by_invite(run: KeptRun, root: Path, issuer: str) -> RunDirectory:
    """Keep a run by invite of which somebody of the manifest was the first issuer, and ``issuer`` is it since."""
    first = AdmissionConfig(mode="token", issuers=(peer_of(bytes([7]) * 32),))
    closed = replace(run, manifest=run.manifest.model_copy(update={"admission": first}))
    closed.decide(0)
    closed.decide(9)
    record = closed.decide(10).record.model_copy(update={"admissions": Admissions(issuers=(issuer,), number=1)})
    closed.decisions[-1] = closed.signed(record)
    return closed.keep(root, 10)


def test_resume_of_a_run_by_invite_takes_the_place_of_who_may_invite(
    run: KeptRun, tmp_path: Path, started: list[PeerSettings], typed: Typed
) -> None:
    home = tmp_path / "home"
    places = [take_place(home, name, clock=FakeClock()) for name in ("1", "2")]
    peers = [load_or_create(place.identity).peer for place in places]
    kept = resumed_by_invite(run, home / "runs" / "kept", peers[1])
    # The founder came back as a stage host before all were gone: its place is no founder's any more.
    for place, peer in zip(places, peers, strict=True):
        place.open_session(name="otter", peer=peer, role="stage", run=load_manifest(kept.manifest).run_id)
        place.close()
    resume = ["new", "--resume", kept.root, "--home", home, "--listen", "/ip4/127.0.0.1/tcp/0"]
    assert typed(*resume).code == 0
    assert started.pop().identity == home / "2" / "identity.key"
    refused = [typed(*resume, "--place", "1")]
    with take_place(home, "2", clock=FakeClock()):
        refused.append(typed(*resume))
    assert [(one.code, "--place 2" in one.err) for one in refused] == [(EXIT_USAGE, True)] * 2
    assert started == []
    shutil.rmtree(home / "2")
    said = typed(*resume)
    assert (said.code, "no issuer" in said.out, len(started)) == (0, True, 1)


@pytest.mark.parametrize("step", [None, 10])
def test_resume_while_a_peer_of_the_run_lives_here_says_so(
    run: KeptRun, tmp_path: Path, typed: Typed, snapshot: Any, step: int | None
) -> None:
    root = tmp_path / "home" / "runs" / "kept"
    keep_run(RunDirectory(root), run.manifest, run.files)
    if step is not None:
        run.keep(root, step)
    with take_place(tmp_path / "home", "1", clock=FakeClock()) as place:
        place.open_session(name="otter", peer=PEER, role="stage", run=run.manifest.run_id)
        said = typed("new --resume")
    assert said.code == EXIT_USAGE
    assert said.err == snapshot
