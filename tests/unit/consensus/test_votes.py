"""Votes that outlast their process: on the disk before anybody is told, read once, and never given twice."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from swarm.consensus.acceptor import Acceptor, Vote
from swarm.consensus.ballot import Ballot, Incarnation, KeptVote, VoteFile
from swarm.consensus.changes import Admission, Changes, admission_bytes
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Member, Roster
from swarm.errors import Busy, Refused, Superseded
from swarm.step.messages import Decide, Propose
from tests.harness.expect import eventually
from tests.harness.rigs.consensus import COMMITTED, GENESIS, ROSTER, RUN, A, B, acceptances, record, sign, voted
from tests.harness.rigs.step import MemberBench, apply, decide, prepare, reconcile

ONE = record()
TWO = record(ONE)
BORN, REBORN = 11, 12


def named(incarnation: int) -> Roster:
    """The roster with A in one of its lives."""
    return Roster(m.model_copy(update={"incarnation": incarnation}) if m.peer == A else m for m in ROSTER.members)


AFTER = record(roster=named(BORN).members)
"""The record of step 1, which let A in."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vote"


def kept(vote: CloseRecord | None = ONE, *, after: CloseRecord = GENESIS, term: int = 2) -> KeptVote:
    """A vote in the step after a record, with a request in it."""
    member = Member(peer="N", role="stage", name="n", part="stage-0", addresses=("/memory/N",), incarnation=BORN)
    signature = sign(A, admission_bytes(RUN, 1, after.hash(), member))
    changes = Changes(joins=(Admission(step=1, member=member, signature=signature),), absent=("B",))
    given = None if vote is None else Vote(term=1, record=vote, changes=changes)
    return KeptVote(run=RUN, step=after.step + 1, previous=after.hash(), term=term, free=1, vote=given)


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vote", [kept(), kept(None)])
def test_vote_file_is_read_as_it_was_written(path: Path, vote: KeptVote) -> None:
    VoteFile(path).write(kept(TWO, after=ONE))
    VoteFile(path).write(vote)
    assert VoteFile(path).read() == vote
    assert [file.name for file in path.parent.iterdir()] == ["vote"]


def test_vote_file_that_is_not_there_is_no_vote(path: Path) -> None:
    assert VoteFile(path).read() is None


@pytest.mark.parametrize("cut", [0, 5, 40, 100, -1])
def test_vote_file_that_is_torn_is_no_vote(path: Path, cut: int) -> None:
    VoteFile(path).write(kept())
    path.write_bytes(path.read_bytes()[:cut])
    assert VoteFile(path).read() is None


@pytest.mark.parametrize("at", [3, 20, 60, -1])
def test_vote_file_with_a_flipped_bit_is_no_vote(path: Path, at: int) -> None:
    VoteFile(path).write(kept())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert VoteFile(path).read() is None


def test_vote_file_that_a_killed_process_left_half_written_is_taken_away(path: Path) -> None:
    VoteFile(path).write(kept())
    half, another = path.with_name(f".{path.name}.01ab.tmp"), path.with_name(".history.01ab.tmp")
    for left in (half, another):
        left.write_bytes(b"swarm vo")
    assert VoteFile(path).read() == kept()
    assert (half.exists(), another.exists()) == (False, True)


def test_vote_file_that_was_copied_elsewhere_is_no_vote_there(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    VoteFile(home / "vote").write(kept())
    shutil.copytree(home, other)
    assert VoteFile(other / "vote").read() is None
    assert (VoteFile(other / "vote").written_elsewhere(), VoteFile(home / "vote").written_elsewhere()) == (True, False)
    (other / "vote").write_bytes((home / "vote").read_bytes()[:-1])
    assert not VoteFile(other / "vote").written_elsewhere(), "of one that is torn nobody knows"
    os.rename(home, tmp_path / "moved")
    assert VoteFile(tmp_path / "moved" / "vote").read() == kept()


# --- the ballot ------------------------------------------------------------------------------------------------------


class Disk:
    """Keeps what it is given, may refuse it, and may be slow."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Vote | None]] = []
        self.full = False
        self.gate = threading.Event()
        self.gate.set()

    def keep(self, acceptor: Acceptor) -> None:
        """See :data:`swarm.consensus.ballot.Keep`."""
        self.gate.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.kept.append((acceptor.term, acceptor.vote))


async def test_ballot_is_on_the_disk_when_it_is_told_and_written_once() -> None:
    disk = Disk()
    ballot, vote = Ballot(keep=disk.keep), Vote(term=1, record=ONE)
    assert not await ballot.follow(0)
    assert disk.kept == [], "nothing was promised that a member without memory would not promise"
    for _ in range(2):
        await ballot.follow(1)
        await ballot.accept(vote)
    assert disk.kept == [(1, None), (1, vote)]
    with pytest.raises(Superseded):
        await ballot.follow(0)
    with pytest.raises(Refused, match="another record"):
        await ballot.accept(Vote(term=1, record=record(grad_norm=3.0)))
    assert len(disk.kept) == 2


async def test_ballot_that_the_disk_refuses_is_not_given_and_can_be_given_later() -> None:
    disk, said = Disk(), list[str]()
    ballot, vote = Ballot(keep=disk.keep, trouble=said.append), Vote(term=1, record=ONE)
    disk.full = True
    for _ in range(2):
        with pytest.raises(Busy, match="cannot be kept: No space left"):
            await ballot.accept(vote)
    assert (ballot.term, ballot.vote) == (0, None)
    disk.full = False
    await ballot.accept(vote)
    assert (ballot.term, ballot.vote) == (1, vote)
    assert said == ["No space left on device"] * 2 + [""]


async def test_ballot_of_a_question_that_was_given_up_is_written_before_the_next_is_answered() -> None:
    disk = Disk()
    disk.gate.clear()
    ballot = Ballot(keep=disk.keep)
    first = asyncio.create_task(ballot.follow(3))
    await eventually(lambda: bool(ballot._keeping), what="the writing")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    disk.gate.set()
    assert not await ballot.follow(3), "what was being written is promised"
    assert disk.kept == [(3, None)]
    await ballot.close()


async def test_ballot_that_abstains_says_why() -> None:
    ballot = Ballot(abstains="it was started anew")
    for asked in (ballot.follow(0), ballot.accept(Vote(term=0, record=ONE))):
        with pytest.raises(Busy, match="started anew"):
            await asked


# --- lives -----------------------------------------------------------------------------------------------------------


def test_life_takes_part_in_what_names_it_and_in_nothing_else() -> None:
    assert Incarnation(A, BORN).is_named(AFTER)
    assert not Incarnation(A, REBORN).is_named(AFTER)
    assert not Incarnation(A, BORN).is_named(record(roster=()))
    founded = Incarnation(A, REBORN)
    assert not founded.is_named(GENESIS)
    founded.founded()
    assert founded.is_named(GENESIS)


async def _votes(life: Incarnation, after: CloseRecord) -> bool:
    try:
        await life.ballot(after).follow(7)
    except Busy:
        return False
    return True


async def test_life_that_is_named_votes_whatever_lies_on_its_disk(path: Path) -> None:
    VoteFile(path).write(kept(after=AFTER, vote=None, term=6))
    life = Incarnation(A, BORN, VoteFile(path))
    assert not life.inherits(AFTER)
    assert life.ballot(AFTER).term == 0
    assert await _votes(life, AFTER)
    left = VoteFile(path).read()
    assert left is not None
    assert (left.step, left.previous, left.term) == (2, AFTER.hash(), 7)


@pytest.mark.parametrize(
    ("left", "votes"),
    [
        (None, False),
        (kept(record(AFTER), after=AFTER), True),
        (kept(None, after=AFTER), True),
        (kept(AFTER), True),
        (kept(ONE), False),
        (kept(None), False),
        (kept(record(AFTER), after=AFTER).model_copy(update={"run": "cd" * 32}), False),
        (kept(record(TWO), after=TWO), False),
    ],
    ids=["nothing", "a vote", "a promise", "the record before", "another before", "older", "another run", "later"],
)
async def test_life_started_anew_votes_only_with_a_disk_that_reaches_up_to_the_step(
    path: Path, left: KeptVote | None, votes: bool
) -> None:
    if left is not None:
        VoteFile(path).write(left)
    life = Incarnation(A, REBORN, VoteFile(path))
    assert life.inherits(AFTER) == votes
    assert await _votes(life, AFTER) == votes


# --- members ---------------------------------------------------------------------------------------------------------


async def observing(life: Incarnation) -> MemberBench:
    """A process that was started anew and sees the record that names the life before it."""
    bench = MemberBench(A, founded=False, life=life)
    bench.holder.part = None
    await bench.member.stand_in(Decision(AFTER, acceptances(AFTER)))
    return bench


async def test_member_is_not_heard_before_its_vote_is_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = MemberBench(A, life=Incarnation(A, 0, VoteFile(path)))

    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for body in (reconcile(), apply()):
        await bench.ask(body)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for body in (Propose(record=ONE), prepare()):
            with pytest.raises(Busy, match="cannot be kept"):
                await bench.ask(body)
    assert VoteFile(path).read() is None
    await bench.ask(Propose(record=ONE))
    left = VoteFile(path).read()
    assert left is not None
    assert left.vote == voted(0, ONE)
    await bench.ask(prepare())
    left = VoteFile(path).read()
    assert left is not None
    assert (left.term, left.vote) == (1, voted(0, ONE)), "with what bears it out"


async def test_member_started_anew_without_its_disk_answers_nothing_in_the_open_step() -> None:
    bench = await observing(Incarnation(A, REBORN))
    assert bench.position.open_step == 0, "it does not even look on"
    await bench.member.observe(Decision(AFTER, acceptances(AFTER)))
    assert (bench.position.open_step, bench.position.is_member) == (2, False)
    for body in (
        prepare(2),
        reconcile(2),
        apply(2),
        Propose(record=record(AFTER)),
        Propose(record=record(AFTER), term=1),
    ):
        with pytest.raises(Busy, match="started anew"):
            await bench.ask(body)


async def test_member_started_anew_with_its_disk_votes_and_does_nothing_else(path: Path) -> None:
    vote = record(AFTER)
    VoteFile(path).write(kept(vote, after=AFTER, term=1))
    bench = await observing(Incarnation(A, REBORN, VoteFile(path)))
    assert (bench.position.open_step, bench.position.is_member) == (2, False)
    promise = await bench.ask(prepare(2, term=2))
    assert promise.vote is not None
    assert promise.vote.record == vote
    assert promise.votes_only
    for body in (reconcile(2, term=2), apply(2, term=2)):
        with pytest.raises(Busy, match="nothing else"):
            await bench.ask(body)
    await bench.ask(Propose(record=vote, term=2))
    left = VoteFile(path).read()
    assert left is not None
    assert left.vote == promise.vote.model_copy(update={"term": 2}), "with the requests that explained it"
    assert left.term == 2


async def test_member_that_voted_for_its_former_life_is_not_cut_off_when_the_run_goes_on_without_it(path: Path) -> None:
    VoteFile(path).write(kept(None, after=AFTER, term=1))
    bench = await observing(Incarnation(A, REBORN, VoteFile(path)))
    absent = Changes(absent=(A,))
    without = [m for m in named(BORN).members if m.peer != A]
    committed = tuple(one.model_copy(update={"route": (B,)}) for one in COMMITTED)
    decided = record(AFTER, roster=tuple(without), absent=(A,), term=1, committed=committed)
    await bench.ask(Propose(record=decided, changes=absent, term=1))
    signed = acceptances(decided, 1)
    await bench.ask(Decide(step=2, record=decided.hash(), term=1, acceptances=signed))
    assert (bench.position.open_step, bench.position.is_member) == (3, False)
    assert not bench.position.cut_off
    assert not bench.position.departed


async def test_vote_of_a_closed_step_that_a_slow_disk_takes_late_does_not_replace_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is started there anew would take it for proof that nothing was voted since."""
    slow, started, write = threading.Event(), threading.Event(), VoteFile.write

    def stalls(file: VoteFile, left: KeptVote) -> None:
        if left.step == 1:
            started.set()
            slow.wait(60)
        write(file, left)

    bench = MemberBench(A, life=Incarnation(A, 0, VoteFile(path)))
    for body in (reconcile(), apply(), Propose(record=ONE)):
        await bench.ask(body)
    monkeypatch.setattr(VoteFile, "write", stalls)
    promising = asyncio.create_task(bench.ask(prepare()))
    await eventually(started.is_set)
    promising.cancel()
    closing = asyncio.create_task(bench.ask(decide(ONE)))
    promised = asyncio.create_task(bench.ask(prepare(2, term=4)))
    await eventually(lambda: bench.history.head == ONE)
    for _ in range(8):
        await asyncio.sleep(0)
    assert not promised.done(), "a promise that the disk may forget"
    slow.set()
    await asyncio.gather(closing, promised)
    left = VoteFile(path).read()
    assert left is not None
    assert (left.step, left.term) == (2, 4)
