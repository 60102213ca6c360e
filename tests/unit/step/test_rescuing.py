"""The leader of a step whose part has lost its last replica, and what it is told by those who keep copies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.consensus.acceptor import has_majority
from swarm.consensus.changes import (
    Admission,
    Departure,
    PersonsWord,
    Reassign,
    admission_bytes,
    departure_bytes,
    reassign_bytes,
    wanted_bytes,
)
from swarm.consensus.copies import copy_holders
from swarm.consensus.proof import Proof
from swarm.consensus.records import CloseRecord, voters
from swarm.consensus.roster import Roster
from swarm.errors import Advice, Busy, DeadlineMissed, PeerError, Refused, RunEnded, Unreachable, Violation
from swarm.ids import PartName, PeerId
from swarm.membership.founding_record import genesis
from swarm.network.protocols import Rpc
from swarm.schema import Empty
from swarm.step.context import CloseContext
from swarm.step.leader.batch import BatchCollection
from swarm.step.leader.exclusion import ExclusionPolicy
from swarm.step.leader.lead_service import LeadService
from swarm.step.leader.rescue import AGAIN_S, SILENT_PART_S, Rescuing
from swarm.step.member.rescue import JUDGE, Consent, Judgement
from swarm.step.messages import OVER
from tests.harness.rigs.step import RULES, RUN, FakeLiveness, LoopClock, listed, sign, verify

A, B, C, D, T = (PeerId(name) for name in ("A", "B", "C", "D", "T"))
STRANGER = PeerId("Z")
LOST = PartName("stage-0")
ROSTER = Roster([listed(A), *(listed(peer, part="stage-1") for peer in (B, C, D)), listed(T, "trainer", "ends")])
PARTS = (LOST, PartName("stage-1"), PartName("ends"))
HEAD = genesis(RUN, ROSTER, {part: "0" * 64 for part in PARTS})
FIRST, SECOND = copy_holders(ROSTER, LOST, 2)


def reassign(peer: PeerId, *, of: PeerId | None = None, part: str = LOST, by: PeerId | None = None) -> Reassign:
    """What ``peer`` says, signed as ``by``."""
    signature = sign(by or peer, reassign_bytes(RUN, 1, HEAD.hash(), of or peer, part))
    return Reassign(step=1, peer=of or peer, part=part, signature=signature)


class _Batch(BatchCollection):
    """What the leader asks with: the scene."""

    def __init__(self, scene: Scene, closing: CloseContext, policy: ExclusionPolicy) -> None:
        super().__init__(closing, scene.lead.book, 0, policy, lambda: voters(ROSTER, HEAD.hash()))
        self.calls = scene  # type: ignore[assignment]

    async def can_decide(self) -> bool:
        return has_majority(voters(ROSTER, HEAD.hash()), self._context.liveness.gone)


class Scene:
    """A leader that has lost A; ``says`` is what each holder of a copy answers, ``told`` who hears of which part that
    the run is over for it. ``hears`` is called when the leader tells somebody so, and may raise."""

    def __init__(self, **more: Any) -> None:
        self.liveness, self.says = FakeLiveness(), dict[PeerId, Callable[[], Any]]()
        self.asked: list[PeerId] = []
        self.told: list[tuple[PeerId, str]] = []
        self.hears: Callable[[PeerId], object] = lambda peer: None
        self.waits, self.whole, self.knows = list[str](), False, True
        self.word: PeerId | None = None
        rules = dataclasses.replace(RULES, **more)
        self.lead = LeadService(rules, T, self._open, verify)
        self.lead.open_step(1, ROSTER, HEAD.hash())
        closing = SimpleNamespace(
            rules=rules, history=SimpleNamespace(head=HEAD, head_hash=HEAD.hash()), lead=self.lead,
            calls=SimpleNamespace(me=T, ask=self.ask), liveness=self.liveness, clock=LoopClock(), timeout_s=lambda: 5.0,
            waiting=self.waits.append, copies=2, verify=verify, checkpoint=self._checkpoint,
        )  # fmt: skip
        policy = ExclusionPolicy(ROSTER)
        batch = _Batch(self, cast(Any, closing), policy)
        self.rescuing = Rescuing(cast(Any, closing), self.lead.book, 0, policy, batch)
        self.liveness.lose(A)

    async def _open(self, step: int) -> None:
        return None

    async def _checkpoint(self, peers: Sequence[PeerId]) -> Proof | str:
        return Proof(record=HEAD) if self.whole else "they lack it"

    async def ask(self, peer: PeerId, rpc: Rpc[Any, Any], body: Any, **_: Any) -> Consent | Judgement | Empty:
        if rpc == OVER:
            self.told.append((peer, body.part))
            self.hears(peer)
            return Empty()
        if rpc == JUDGE:
            signed = wanted_bytes(RUN, HEAD.hash(), body.record)
            word = None if self.word is None else PersonsWord(peer=self.word, signature=sign(self.word, signed))
            return Judgement(known=self.knows, wanted=word)
        self.asked.append(peer)
        said = self.says.get(peer, lambda: Consent(reassign=reassign(peer)))()
        if isinstance(said, PeerError):
            raise said
        assert isinstance(said, Consent)
        return said

    async def record(self) -> CloseRecord | None:
        proposal = await self.rescuing.run()
        return None if proposal is None else proposal.record


def nobody_moves(scene: Scene) -> None:
    for peer in ROSTER.peers:
        scene.says[peer] = lambda: Consent(reassign=None)


async def test_who_keeps_a_copy_and_can_be_spared_takes_the_part_over() -> None:
    record = await Scene().record()
    assert record is not None
    assert record.void
    assert len(record.members.replicas(LOST)) == 1
    assert record.members.replicas(LOST)[0] in (FIRST, SECOND)


async def test_part_whose_copies_are_with_peers_that_cannot_be_spared_is_taken_over_by_another_that_gets_it_there() -> (
    None
):
    scene = Scene()
    for holder in (FIRST, SECOND):
        scene.says[holder] = lambda: Consent(reassign=None)
    record = await scene.record()
    (other,) = {B, C, D} - {FIRST, SECOND}
    assert record is not None
    assert record.members.replicas(LOST) == (other,)
    assert scene.asked.index(other) > max(map(scene.asked.index, (FIRST, SECOND)))


async def test_others_than_members_may_be_believed_gone() -> None:
    scene = Scene()
    scene.liveness.lose(STRANGER)
    record = await scene.record()
    assert record is not None
    assert record.absent == (A,)


async def test_replica_that_is_back_while_others_are_asked_ends_the_rescue() -> None:
    scene = Scene()

    def back() -> Consent:
        scene.liveness.find(A)
        return Consent(reassign=reassign(FIRST))

    scene.says[FIRST] = back
    assert await scene.record() is None
    assert FIRST in scene.asked


LIES: dict[str, Callable[[PeerId], Reassign]] = {
    "for a stranger": lambda me: reassign(me, of=STRANGER),
    "forged": lambda me: reassign(me, by=STRANGER),
    "for another part": lambda me: reassign(me, part="stage-1"),
    "in another's name": lambda me: reassign(SECOND if me == FIRST else FIRST),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("liar", [FIRST, SECOND])
async def test_lie_of_one_that_keeps_a_copy_is_a_no_and_the_other_takes_the_part_over(lie: str, liar: PeerId) -> None:
    scene = Scene()
    scene.says[liar] = lambda: Consent(reassign=LIES[lie](liar))
    record = await scene.record()
    assert record is not None
    assert set(scene.asked) == {FIRST, SECOND}
    assert record.members.replicas(LOST) == (SECOND if liar == FIRST else FIRST,)


@pytest.mark.parametrize("lie", LIES)
async def test_part_of_which_the_only_ones_that_keep_a_copy_lie_is_waited_for_as_one_without_a_copy(lie: str) -> None:
    scene = Scene()
    for liar in (FIRST, SECOND):
        scene.says[liar] = lambda liar=liar: Consent(reassign=LIES[lie](liar))  # type: ignore[misc]
    with pytest.raises(RunEnded, match=r"last replica of stage-0 is lost: a \(silent\)"):
        await scene.record()
    assert scene.told == [(peer, LOST) for peer in (B, C, D)]
    assert set(scene.asked) == {FIRST, SECOND}
    assert asyncio.get_running_loop().time() == pytest.approx(RULES.wait_for_lost_s, rel=0.1)


def asks_to_leave(scene: Scene, peer: PeerId, *, ends: bool = True) -> None:
    signature = sign(peer, departure_bytes(RUN, 1, HEAD.hash(), peer, ends=ends))
    request = Departure(step=1, peer=peer, ends=ends, signature=signature)
    with contextlib.suppress(Refused):  # who cannot be spared is heard all the same
        scene.lead.book.requests.leave(peer, request)


def all_leave(scene: Scene, *, but: PeerId | None = None) -> None:
    """All but the lost one ask that the run end, one perhaps only to leave."""
    for peer in (B, C, D, T):
        asks_to_leave(scene, peer, ends=peer != but)


@pytest.mark.parametrize("stays", [None, B])
async def test_run_ends_with_a_part_lost_once_all_others_were_asked_to_leave(stays: PeerId | None) -> None:
    scene = Scene()
    nobody_moves(scene)
    all_leave(scene, but=stays)
    why = "all others were asked to leave" if stays is None else "nobody took it over"
    with pytest.raises(RunEnded, match=rf"last replica of stage-0 is lost: a \(silent\) \({why}") as ended:
        await scene.record()
    assert (ended.value.check, ended.value.remedy) == (Advice.WHAT_IS_KEPT, Advice.RESUME)
    assert scene.told == [(peer, LOST) for peer in (B, C, D)]
    at_once = asyncio.get_running_loop().time() < 1
    assert at_once is (stays is None)


@pytest.mark.parametrize("first", [Busy("just taking the update"), DeadlineMissed("no answer"), Unreachable("broke")])
async def test_run_that_all_leave_goes_on_where_somebody_may_have_a_copy(first: PeerError) -> None:
    scene, said = Scene(), [first]
    scene.says[FIRST] = lambda: said.pop() if said else Consent(reassign=reassign(FIRST))
    scene.says[SECOND] = lambda: Consent(reassign=None)
    all_leave(scene)
    record = await scene.record()
    assert record is not None
    assert record.members.replicas(LOST) == (FIRST,)
    assert (said, scene.told) == ([], []), "and it was not sure at first"


async def test_run_that_all_leave_waits_for_who_only_fell_silent() -> None:
    scene = Scene()
    scene.liveness.lose(A, "no answer", DeadlineMissed("no answer to health/1/beat in 1.5 s"))
    nobody_moves(scene)
    all_leave(scene)
    with pytest.raises(RunEnded, match="all others were asked to leave"):
        await scene.record()
    assert asyncio.get_running_loop().time() == pytest.approx(SILENT_PART_S, rel=0.1)


async def test_run_that_all_leave_waits_for_who_asked_to_join_as_long_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be a host for another part, without which the step cannot be given up."""
    scene, asked = Scene(), 0

    async def standing(peer: PeerId, *_: Any, **__: Any) -> None:
        nonlocal asked
        assert peer == STRANGER
        asked += 1
        if asked > 3:
            raise Unreachable("it was killed")

    scene.rescuing._context.calls = SimpleNamespace(me=T, ask=standing)  # type: ignore[misc]
    monkeypatch.setitem(scene.lead.book.requests._joins, STRANGER, SimpleNamespace(member=listed(STRANGER)))
    nobody_moves(scene)
    all_leave(scene)
    monkeypatch.setattr(scene.lead.book.requests, "give_up", _never_enough)
    with pytest.raises(RunEnded, match="all others were asked to leave"):
        await scene.record()
    assert asked > 3, "the fault: it was there, and is not any more"
    assert scene.told == [(peer, LOST) for peer in (B, C, D)]
    assert asyncio.get_running_loop().time() <= 4 * AGAIN_S


def _never_enough(*_: Any) -> None:
    raise Refused("the run cannot go on with those that join")


@pytest.mark.parametrize("hears", [None, Refused("a replica is there"), Unreachable("it has ended, or is cut off")])
async def test_replica_that_is_back_while_others_are_told_of_the_end_prevents_it_only_where_nobody_heard(
    hears: PeerError | None,
) -> None:
    scene = Scene()
    nobody_moves(scene)
    all_leave(scene)

    def back(peer: PeerId) -> None:
        scene.liveness.find(A)
        if hears is not None:
            raise hears

    scene.hears = back
    if isinstance(hears, Refused):
        assert await scene.record() is None
    else:
        with pytest.raises(RunEnded, match="last replica of stage-0 is lost"):
            await scene.record()
    assert {peer for peer, _ in scene.told} == {B, C, D}, "the fault: it is back, and they were told"


async def test_changes_that_no_record_may_have_end_no_leader() -> None:
    scene = Scene()
    requests, failed = scene.lead.book.requests, list[int]()
    give_up = requests.give_up

    def fails_once(*asked: Any) -> Any:
        if not failed:
            failed.append(1)
            raise Violation("two peers that join with one invite")
        return give_up(*asked)

    requests.give_up = fails_once  # type: ignore[method-assign]
    assert await scene.record() is not None
    assert failed


# --- nobody keeps a copy: the run goes back to a checkpoint ----------------------------------------------------------


def bare(error: PeerError | None = None, **rules: Any) -> Scene:
    """Nobody has a copy, a checkpoint is whole, and a stranger asks to hold what was lost."""
    scene = Scene(**rules)
    scene.liveness.lose(A, "no answer", error)
    scene.whole = True
    for holder in (FIRST, SECOND):
        scene.says[holder] = no_copy
    return scene


def no_copy() -> Consent:
    raise Refused("there is no copy")


def joins(scene: Scene, peer: PeerId) -> None:
    scene.lead.book.requests._lost = frozenset({A})
    member = listed(peer)
    signature = sign(peer, admission_bytes(RUN, 1, HEAD.hash(), member))
    scene.lead.book.requests.join(peer, Admission(step=1, member=member, signature=signature))


SILENT = DeadlineMissed("no answer to health/1/beat in 1.5 s")


@pytest.mark.parametrize(
    ("silent", "who", "after_s"), [(False, STRANGER, 0.0), (True, STRANGER, SILENT_PART_S), (True, A, 0.0)]
)
async def test_run_goes_back_at_once_but_for_a_replica_that_may_come_back(
    silent: bool, who: PeerId, after_s: float
) -> None:
    """One that was started anew does not come back as it was."""
    scene = bare(SILENT if silent else None, wait_for_lost_s=10 * SILENT_PART_S)
    joins(scene, who)
    record = await scene.record()
    assert record is not None
    assert (record.step, record.decides, record.members.replicas(LOST)) == (0, 1, (who,))
    assert asyncio.get_running_loop().time() == pytest.approx(after_s, abs=3.0)


async def test_run_goes_back_to_no_checkpoint_where_its_manifest_says_so_or_nobody_agrees() -> None:
    scene = bare(rewind="never")
    joins(scene, STRANGER)
    with pytest.raises(RunEnded):
        await scene.record()
    scene = bare(rewind="ask")
    joins(scene, STRANGER)
    going = asyncio.create_task(scene.record())
    await asyncio.sleep(5)
    assert f"the run goes back to step 0 once that is wanted: {Advice.SAY_SO}" in scene.waits[-1]
    scene.word = STRANGER  # who asks to join an open run may be anybody
    await asyncio.sleep(5)
    assert not going.done()
    scene.word = A  # who is lost may be there again, and ask to hold its part
    record = await going
    assert record is not None
    assert record.repeats == 1


async def test_run_does_not_go_back_to_what_too_few_of_those_that_vote_know() -> None:
    """They would refuse it, and a leader that proposes it all the same could never propose anything else."""
    scene = bare()
    scene.knows = False
    joins(scene, STRANGER)
    with pytest.raises(RunEnded):
        await scene.record()
    assert any("too few of those that vote know that step 0 was so decided" in what for what in scene.waits)
