"""A peer on its way into a run: which donors it asks, how often, and what it says when there is no way in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.averaging.config import AveragingConfig
from swarm.config import WAIT_FOR_LOST_S
from swarm.consensus.changes import Admission
from swarm.consensus.placement import Wish
from swarm.consensus.records import CloseRecord, Decision
from swarm.consensus.roster import Roster
from swarm.consensus.slowness import Barred
from swarm.errors import (
    Busy,
    Ending,
    PeerError,
    Refused,
    RunEnded,
    Superseded,
    Unadmitted,
    Unreachable,
    Violation,
    WrongStep,
)
from swarm.events import LimitSlows
from swarm.ids import PeerId, stage_part
from swarm.membership import download, joining, memory
from swarm.membership.founding_record import genesis
from swarm.membership.joining import LISTEN_EVERY_S, Joining
from swarm.membership.observer import ObserverContext
from swarm.membership.rules import step_bytes
from swarm.membership.run import RunContext
from swarm.membership.status import PeerStatus
from swarm.models.spec import SplitConfig
from swarm.network.discovery.records import PeerRecord
from swarm.network.protocols import Rpc
from swarm.step.observe_messages import BACK, RunStanding
from tests.harness.rigs.membership import (
    CONTACT,
    DONOR,
    JOINER,
    OBSERVED,
    OTHER,
    RUN,
    EventList,
    FakeClock,
    Run,
    listed,
    sign,
    signed,
)

STEPS = 99
Behave = Callable[["Scripted"], Any]
NAMED = Roster([*OBSERVED.members, listed(JOINER)])


class Scripted:
    """An observer whose donors do what the test says; raising is one of the things."""

    def __init__(self, world: World, donors: Sequence[PeerId], name: str | None) -> None:
        self.world, self.candidates, self.name = world, tuple(donors), name
        self.donors: tuple[PeerId, ...] = ()
        self.head: CloseRecord | None = None

    async def start(
        self, contact: PeerId, known: CloseRecord | None = None, wanted: CloseRecord | None = None
    ) -> Decision:
        self.world.asked.append((self.candidates, self.name))
        self.world.wanted.append(wanted)
        if self.name is not None and self.world.start:
            error = self.world.start.pop(0)
            if error is not None:
                raise error
        for donor in self.candidates:
            behave = self.world.behave.get(donor)
            if behave is not None:
                behave(self)
        self.donors = self.candidates
        self.head = wanted or self.world.run.head
        return next(kept for kept in self.world.run.decisions if kept.record == self.head)

    async def begin(self, decision: Decision, part: Any) -> None:
        self.world.position.head = decision.record
        if part is not None:
            part.step = decision.record.step

    def resume(self, part: Any) -> None:
        self.world.resumed.append(self.donors)

    def go_on(self, head: CloseRecord, part: Any) -> None:
        self.head = head
        self.world.went_on.append(self.candidates)

    async def close(self) -> None:
        self.world.closed += 1

    async def follow(self) -> CloseRecord:
        """The next step closes, and its record names us."""
        follow = self.world.follow.pop(0) if self.world.follow else None
        if follow is not None:
            raise follow
        self.world.position.head = self.head = self.world.run.close(NAMED).record
        self.world.position.is_member = True
        return self.head


class World:
    """Everything around one :class:`Joining`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, steps: int = STEPS, stage: int | None = 0) -> None:
        self.run = Run(2)
        self.behave: dict[PeerId, Behave] = {}
        self.follow: list[Exception | None] = []
        self.start: list[Exception | None] = []
        self.asked: list[tuple[tuple[PeerId, ...], str | None]] = []
        self.wanted: list[CloseRecord | None] = []
        self.resumed: list[tuple[PeerId, ...]] = []
        self.went_on: list[tuple[PeerId, ...]] = []
        self.closed = 0
        self.downloads: list[tuple[str, int, tuple[PeerId, ...]]] = []
        self.made: list[Fetching] = []
        self.broken: list[tuple[int, Exception]] = []
        self.admissions: list[tuple[PeerId, Admission]] = []
        self.clock, self.events = FakeClock(), EventList()
        self.situation = PeerStatus(self.events)
        self.leaving = SimpleNamespace(asked=False, ending=Ending.DONE, admitted=_Flag())
        self.position = SimpleNamespace(
            head=None, is_member=False, back=None, names=lambda record: bool(self.admissions)
        )
        self.member = SimpleNamespace(observe=None, stand_in=self._stand_in)
        self.stood_in: list[Decision] = []
        self.heard: list[bool] = []
        self.lost: tuple[str, ...] = ()
        self.leaving_peers: set[PeerId] = set()
        self.announced: dict[PeerId, PeerRecord] | None = {}
        self.prepared = 0
        self.unreachable = ""
        run = SimpleNamespace(steps=steps, copies=1)
        split = SplitConfig(stages=2)
        self.around = SimpleNamespace(
            manifest=SimpleNamespace(
                run_id=RUN, run=run, split=split, cut_with=lambda parts: split.parts, averaging=AveragingConfig()
            ),
            boundary=lambda behind, ahead: SimpleNamespace(activation_bytes=5000, gradient_bytes=5000),
            endpoint=SimpleNamespace(
                peer=JOINER, addresses=("/memory/J",), learn=lambda peer, addresses: None, call=self._standing
            ),
            identity=SimpleNamespace(sign=lambda data: sign(JOINER, data)),
            device=None,
            events=self.events,
            clock=self.clock,
            watch=SimpleNamespace(follow=lambda roster: None, gone={}, incarnation=7, twin=self._twin),
            be_reachable=self._be_reachable,
            gate=None,
            credential=None,
        )
        self.settings = SimpleNamespace(
            role="stage",
            wish=Wish(stage),
            name="j",
            region="eu",
            dial_out_only=False,
            beside=(),
            limit_bytes_s=None,
            contacts=(),
            machine="",
        )
        monkeypatch.setattr(joining, "Observer", self._observer)
        monkeypatch.setattr(download, "build_empty", self._build)
        monkeypatch.setattr(download, "check_memory", lambda around, name: None)
        self.unfit: dict[str, str] = {}
        monkeypatch.setattr(memory, "lacking_memory", lambda around, name: self.unfit.get(name, ""))
        monkeypatch.setattr(download, "PartDownload", self._download)
        context = SimpleNamespace(
            around=self.around,
            settings=self.settings,
            rules=SimpleNamespace(
                run=RUN,
                target=16,
                part_bytes={stage_part(0): 500_000_000},
                one_reduces=False,
                frozen={},
                wait_for_lost_s=WAIT_FOR_LOST_S,
                rewind="auto",
            ),  # fmt: skip
            position=self.position,
            situation=self.situation,
            calls=self,
            directory=SimpleNamespace(lookup=self._lookup),
            exit=self.leaving,
            learn=lambda roster: None,
        )
        context.assigned = functools.partial(RunContext.assigned, context)
        self.joining = Joining(context, self.member, self._prepare, lambda *_: None)  # type: ignore[arg-type]

    def donors(self) -> list[PeerId]:
        """Who was asked for a part, in order."""
        return [donor for donors, name in self.asked if name is not None for donor in donors]

    async def ask(self, peer: PeerId, rpc: Rpc[Any, Any], body: Admission, *, timeout_s: float) -> None:
        """Stands in for the step calls."""
        self.admissions.append((peer, body))

    def _observer(self, context: ObserverContext, donors: Sequence[PeerId], name: str | None) -> Scripted:
        return Scripted(self, donors, name)

    async def _standing(self, peer: PeerId, rpc: Rpc[Any, Any], body: Any, *, timeout_s: float) -> tuple[Any, bytes]:
        if rpc == BACK:
            raise Refused("the run did not go back")
        leaving = peer in self.leaving_peers
        return RunStanding(founder=peer, closed=0, waiting_for="", lost=self.lost, leaving=leaving), b""

    async def _lookup(self, kind: type[PeerRecord]) -> dict[PeerId, PeerRecord]:
        if self.announced is None:
            raise Unreachable("the directory did not answer")
        return self.announced

    async def _twin(self, roster: Sequence[PeerId]) -> bool:
        return self.heard.pop(0)

    async def _stand_in(self, decision: Decision) -> None:
        self.stood_in.append(decision)

    async def _be_reachable(self, through: Sequence[PeerId]) -> str:
        return self.unreachable

    async def _build(self, around: Any, name: str, donors: Any) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(name=name), step=-1)

    def _download(self, around: Any, record: CloseRecord, part: Any) -> Fetching:
        self.made.append(Fetching(self, record, part))
        return self.made[-1]

    async def _prepare(self, part: Any, record: CloseRecord) -> None:
        self.prepared += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


class Fetching:
    """A download that brings so many bytes and fails, as often as the test says, and then succeeds."""

    def __init__(self, world: World, record: CloseRecord, part: Any) -> None:
        self.world, self.record, self.part = world, record, part
        self.verified_bytes = 0
        self.liars: set[PeerId] = set()

    async def run(self, donors: Sequence[PeerId]) -> None:
        self.world.downloads.append((self.part.spec.name, self.record.step, tuple(donors)))
        if self.world.broken:
            brought, error = self.world.broken.pop(0)
            self.verified_bytes += brought
            if isinstance(error, Violation):
                self.liars.add(PeerId(error.peer))
            raise error
        self.part.step = self.record.step


class _Flag:
    def __init__(self) -> None:
        self.given = False

    def set(self) -> None:
        self.given = True

    def is_set(self) -> bool:
        return self.given


async def test_joiner_asks_busy_donors_as_long_as_it_takes(world: World) -> None:
    world.start = [Busy("8 peers are joining")] * 40
    await world.joining.run(CONTACT)
    assert world.clock.now > 30.0, "it did not pause between its questions"
    assert any("8 peers are joining" in str(event) for event in world.events.events)


async def test_joiner_whose_donors_fail_in_the_middle_goes_on_from_what_it_holds(world: World) -> None:
    world.follow = [Unreachable("the stream broke")]
    await world.joining.run(CONTACT)
    assert len(world.went_on) == 1, "somebody kept what comes after it"
    assert (len(world.downloads), world.prepared, world.resumed) == (1, 1, [])


async def test_joiner_for_whom_nobody_kept_updates_begins_again_at_the_same_step_and_downloads_nothing(
    world: World,
) -> None:
    world.follow = [Unreachable("the stream broke"), WrongStep("not kept here any more")]
    await world.joining.run(CONTACT)
    assert len(world.resumed) == 1, "others are at the same step: nothing is downloaded twice"
    assert (len(world.downloads), world.prepared) == (1, 1)


async def test_joiner_that_fell_behind_downloads_anew_and_is_prepared_once(world: World) -> None:
    def close_many(observer: Scripted) -> None:
        if world.prepared:
            for _ in range(3):
                world.run.close()

    world.behave = {DONOR: close_many}
    world.follow = [WrongStep("not kept here any more")] * 2
    await world.joining.run(CONTACT)
    assert (len(world.downloads), world.prepared, world.resumed) == (2, 1, [])


async def test_joiner_whose_donors_all_die_while_it_downloads_goes_on_with_the_same_state(world: World) -> None:
    world.broken = [(1000, Unreachable("the stream broke"))] * 16
    await world.joining.run(CONTACT)
    assert len(world.made) == 1, "what was verified was thrown away"
    assert [step for _, step, _ in world.downloads] == [2] * 17, "as long as it gets on"
    asked = [wanted for wanted, (_, name) in zip(world.wanted, world.asked, strict=True) if name is not None]
    assert {None if wanted is None else wanted.step for wanted in asked[1:]} == {2}


async def test_joiner_whose_state_nobody_keeps_any_more_begins_with_the_newest(world: World) -> None:
    world.broken = [(1000, Unreachable("the stream broke"))]
    world.start = [None, WrongStep("stage-0 is at step 7 here, not 2")]
    before = world.run.head.step
    world.behave = {DONOR: lambda observer: world.run.close() if len(world.made) == 1 else None}
    await world.joining.run(CONTACT)
    assert [step for _, step, _ in world.downloads] == [before, before + 1]
    assert world.made[0] is not world.made[1]


async def test_joiner_asks_no_liar_again(world: World) -> None:
    world.broken = [(1000, Violation("not what its hash says", peer=DONOR))]
    await world.joining.run(CONTACT)
    assert [set(donors) for _, _, donors in world.downloads] == [{DONOR, OTHER}, {OTHER, CONTACT}]


async def test_joiner_that_comes_with_the_last_step_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, steps=3)
    with pytest.raises(RunEnded, match="no peer can join with it"):
        await world.joining.run(CONTACT)
    assert (world.downloads, world.admissions) == ([], [])


@pytest.mark.parametrize("until", [6, 7])
async def test_joiner_that_is_barred_for_as_long_as_anybody_may_join_ends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, until: int
) -> None:
    world = World(monkeypatch, steps=7)
    head = world.run.head.model_copy(update={"barred": {JOINER: Barred(times=1, until=until)}})
    world.run.decisions[-1] = replace(world.run.decisions[-1], record=head)
    if until < 7:  # whether it may join the others say
        await world.joining.run(CONTACT)
        assert world.admissions
        return
    why = "barred until step 7, and with the run's last step, 7, no peer can join"
    with pytest.raises(RunEnded, match=why) as ended:
        await world.joining.run(CONTACT)
    assert ended.value.ending is Ending.FAILED
    assert (world.downloads, world.admissions) == ([], [])


@pytest.mark.parametrize("roster", [OBSERVED, NAMED], ids=["a stranger", "one that took part in an earlier life"])
async def test_joiner_that_comes_after_the_last_step_ends_in_order(
    monkeypatch: pytest.MonkeyPatch, roster: Roster
) -> None:
    world = World(monkeypatch, steps=3)
    world.run.close(roster)
    with pytest.raises(RunEnded, match="the run is over: its last step, 3, is closed") as ended:
        await world.joining.run(CONTACT)
    assert ended.value.ending is Ending.DONE
    assert (world.downloads, world.admissions) == ([], [])


async def test_joiner_that_is_beside_it_as_the_run_is_ended_asks_nobody_that_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(self: Scripted) -> CloseRecord:
        world.position.head = self.head = world.run.close(OBSERVED, ended=True).record
        return self.head

    world.position.names = lambda record: False
    monkeypatch.setattr(Scripted, "follow", follow)
    with pytest.raises(RunEnded, match="the run was ended with step 3") as ended:
        await world.joining.run(CONTACT)
    assert ended.value.ending is Ending.DONE
    asked = len(world.asked)
    with pytest.raises(RunEnded, match="the run was ended with step 3"):
        await world.joining.again(None, world.run.head, CONTACT)
    assert len(world.asked) == asked


async def test_joiner_waits_for_the_run_to_miss_its_former_self_and_listens_for_another_meanwhile(world: World) -> None:
    world.run.close(NAMED)
    world.heard = [False, False, True]
    with pytest.raises(RunEnded, match="is in the run already"):
        await world.joining.run(CONTACT)
    assert 2 * LISTEN_EVERY_S <= world.clock.now < 3 * LISTEN_EVERY_S
    assert world.downloads == []
    assert world.stood_in[0].record == world.run.head, "it may still vote"


async def test_joiner_whose_earlier_life_held_another_part_takes_over_the_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, stage=None)
    world.run.close(NAMED)
    world.lost = ("stage-1",)
    world.heard = [False]
    await world.joining.run(CONTACT)
    assert world.situation.part == "stage-1"
    assert world.stood_in, "it listens first whether that life is there still"


async def test_joiner_takes_a_stage_that_fits_and_ends_where_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, stage=None)
    world.unfit = {stage_part(0): "it takes 9.0 GB"}
    await world.joining.run(CONTACT)
    assert world.admissions[0][1].member.part == stage_part(1)
    none = World(monkeypatch, stage=None)
    none.unfit = {stage_part(0): "it takes 9.0 GB", stage_part(1): "it takes 9.0 GB"}
    with pytest.raises(RunEnded, match="no stage fits: it takes 9.0 GB") as error:
        await none.joining.run(CONTACT)
    assert error.value.ending is Ending.MISUSED
    assert "allow this peer more" in error.value.remedy
    assert not none.downloads


@pytest.mark.parametrize(("limit", "told"), [(1000, 1), (10_000_000_000, 0), (None, 0)])
async def test_joiner_whose_limit_slows_steps_down_is_told_its_share_of_a_step(
    world: World, limit: int | None, told: int
) -> None:
    world.settings.limit_bytes_s = limit
    await world.joining.run(CONTACT)
    found = world.events.of(LimitSlows)
    assert [(one.part, one.rate) for one in found] == [(stage_part(0), 1000)] * told
    assert all(one.step_bytes > 1000 for one in found)


def test_share_of_a_step_is_what_is_passed_on_and_averaged() -> None:
    assert step_bytes(100, 16, 1000, 1) == 16_000
    assert step_bytes(100, 16, 1000, 2) == 8_000 + 100


async def test_joiner_that_wishes_for_a_stage_that_is_not_is_a_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, stage=7)
    with pytest.raises(RunEnded, match="there is no stage 7") as error:
        await world.joining.run(CONTACT)
    assert error.value.ending is Ending.MISUSED


async def test_joiner_that_nobody_can_call_is_told_so_before_it_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.unreachable = "behind a router, and no relay"
    with pytest.raises(RunEnded, match="behind a router"):
        await world.joining.run(CONTACT)
    assert (world.downloads, world.admissions) == ([], [])


async def test_joiner_whose_contact_does_not_answer_says_so(world: World) -> None:
    def silent(observer: Scripted) -> None:
        raise Unreachable("no such peer", peer=CONTACT)

    world.behave[CONTACT] = silent
    with pytest.raises(RunEnded, match="no member shows the newest record.*no such peer"):
        await world.joining.run(CONTACT)


async def test_joiner_that_was_told_to_leave_meanwhile_asks_for_nothing_more(world: World) -> None:
    world.leaving.asked, world.leaving.ending = True, Ending.DRAINED
    with pytest.raises(RunEnded, match="left before it took part") as error:
        await world.joining.run(CONTACT)
    assert (error.value.ending, world.admissions) == (Ending.DRAINED, [])


async def test_joiner_that_is_refused_asks_again_with_the_next_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception] = [Refused("the run is full")]

    async def ask(peer: PeerId, rpc: Rpc[Any, Any], body: Admission, *, timeout_s: float) -> None:
        world.admissions.append((peer, body))
        if answers:
            raise answers.pop()

    async def follow(self: Scripted) -> CloseRecord:
        named = len(world.admissions) > 1
        world.position.is_member = named
        world.position.head = self.head = world.run.close(NAMED if named else OBSERVED).record
        return self.head

    monkeypatch.setattr(world, "ask", ask, raising=False)
    monkeypatch.setattr(Scripted, "follow", follow)
    await world.joining.run(CONTACT)
    assert [body.step for _, body in world.admissions] == [3, 4]
    assert any("the run is full" in str(event) for event in world.events.events)


@pytest.mark.parametrize(
    "said", [WrongStep("step 0 is open"), Busy("full"), Superseded("another leads"), Unreachable("it is gone")]
)
async def test_who_asks_for_a_lost_part_asks_past_all_that_do_not_take_it(
    monkeypatch: pytest.MonkeyPatch, said: PeerError
) -> None:
    """Who leads may itself have been started anew, and know of no open step; and the step stays open for this peer:
    nobody else would be asked the next time."""
    world, many = World(monkeypatch), Roster([listed(PeerId(f"p{n}")) for n in range(9)])
    digests = {part: "0" * 64 for part in ("stage-0", "stage-1", "ends")}
    head = genesis(RUN, many, cast(Any, digests))
    order = many.succession(head.step + 1)

    async def ask(peer: PeerId, rpc: Rpc[Any, Any], body: Admission, *, timeout_s: float) -> None:
        world.admissions.append((peer, body))
        if peer in order[:6]:
            raise said

    monkeypatch.setattr(world, "ask", ask, raising=False)
    await world.joining._ask(head, lost=True)
    assert [peer for peer, _ in world.admissions] == list(order[:7])


async def test_whoever_waits_for_a_return_asks_other_members_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first look may all be gone, while the run goes back and counts on this peer."""
    world, asked = World(monkeypatch), list[Sequence[PeerId]]()
    known: Any = SimpleNamespace(members=SimpleNamespace(peers=tuple(PeerId(f"p{n}") for n in range(9))))

    async def went_back(run: Any, record: Any, peers: Sequence[PeerId]) -> None:
        asked.append(peers)

    monkeypatch.setattr(joining, "went_back", went_back)
    for _ in range(3):
        await world.joining._went_back(known)
    assert [len(set(peers)) for peers in asked] == [4, 4, 4]
    assert {peer for peers in asked for peer in peers} == set(known.members.peers)


@pytest.mark.parametrize("all_say_so", [True, False])
async def test_joiner_believes_two_that_its_invite_does_not_count(
    monkeypatch: pytest.MonkeyPatch, all_say_so: bool
) -> None:
    """One that says so alone has not heard yet, or lies: the joiner asks again with the next step."""
    world, said = World(monkeypatch), list[PeerId]()

    async def ask(peer: PeerId, rpc: Rpc[Any, Any], body: Admission, *, timeout_s: float) -> None:
        world.admissions.append((peer, body))
        if body.step == 3 and (all_say_so or not said):
            said.append(peer)
            raise Unadmitted("the invite for ana was revoked")
        if body.step == 3:
            raise Superseded("another leads")

    async def follow(self: Scripted) -> CloseRecord:
        named = world.admissions[-1:] != [] and world.admissions[-1][1].step > 3
        world.position.is_member = named
        world.position.head = self.head = world.run.close(NAMED if named else OBSERVED).record
        return self.head

    monkeypatch.setattr(world, "ask", ask, raising=False)
    monkeypatch.setattr(Scripted, "follow", follow)
    if all_say_so:
        with pytest.raises(RunEnded, match="does not let this peer in: the invite for ana was revoked"):
            await world.joining.run(CONTACT)
        assert len(said) == 2
    else:
        await world.joining.run(CONTACT)
        assert len(said) == 1
        assert {body.step for _, body in world.admissions} == {3, 4}


def on_the_way(**said: Any) -> PeerRecord:
    """What a peer that is not in the roster says in the directory, by default that it heads for stage 0."""
    fields = {"role": "stage", "part": "stage-0", "status": "waiting"} | said
    return PeerRecord(name="z", incarnation=1, step=0, **fields)


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({}, "stage-1"),
        ({"part": None, "stage": 0}, "stage-1"),
        ({"part": "stage-1"}, "stage-0"),
        ({"part": None, "stage": 1}, "stage-0"),
        *(({"part": f"stage-{stage}", "status": "ready"}, None) for stage in (0, 1)),
        *(({"part": f"stage-{stage}", "status": "draining"}, None) for stage in (0, 1)),
        *(({"part": f"stage-{stage}", "role": "trainer"}, None) for stage in (0, 1)),
        ({"part": "stage-500"}, None),
    ],
)
async def test_joiner_goes_where_nobody_else_is_on_the_way(
    said: dict[str, Any], part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose record says nothing of an arrival changes nothing."""
    parts: list[str | None] = []
    for announced in ({PeerId("Z"): on_the_way(**said)}, None):
        world = World(monkeypatch, stage=None)
        even = Roster([listed(DONOR), listed(OTHER, part="stage-1"), listed(CONTACT, "trainer", "ends")])
        world.run.decisions[-1] = signed(world.run.head.model_copy(update={"roster": even.members}))
        world.announced = announced
        told: list[str | None] = []
        world.situation.placed = lambda told=told, world=world: told.append(world.situation.part)  # type: ignore[misc]
        await world.joining.run(CONTACT)
        assert told == [world.situation.part], "others hear of it at once"
        assert "fewest replicas (1)" in world.situation.reason
        parts.append(world.situation.part)
    assert parts[0] == (part or parts[1])
