"""A peer on its way into a run: which donors it asks, how often, and what it says when there is no way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from peers import joining
from peers.joining import MAX_FAILURES, Joining
from peers.situation import Situation
from swarm.errors import EXIT_UNREACHABLE, EXIT_USAGE, Busy, Refused, RunEnded, StateError, Unreachable, WrongStep
from swarm.ids import PeerId
from swarm.optimization.changes import Admission
from swarm.optimization.observer import ObserverContext
from swarm.optimization.records import CloseRecord, Decision
from swarm.optimization.roster import Roster
from tests.harness.swarm import EventList
from tests.unit.optimization.observed import CONTACT, DONOR, JOINER, OTHER, ROSTER, Run, listed, signed
from tests.unit.optimization.world import RUN, sign
from tests.unit.peers.fake_clock import FakeClock

STEPS = 99
Behave = Callable[["Scripted"], Any]
NAMED = Roster([*ROSTER.members, listed(JOINER)])


class Scripted:
    """An observer whose donor does what the test says; raising is one of the things."""

    def __init__(self, world: World, donor: PeerId, name: str | None) -> None:
        self.world, self.donor, self.name = world, donor, name
        self.head: CloseRecord | None = None

    async def start(self, contact: PeerId, known: CloseRecord | None = None) -> Decision:
        self.world.asked.append((self.donor, self.name))
        behave = self.world.behave.get(self.donor)
        if behave is not None:
            behave(self)
        self.head = self.world.run.head
        return self.world.run.decisions[-1]

    async def begin(self, decision: Decision, part: Any) -> None:
        self.world.member.head = decision.record

    def resume(self, part: Any) -> None:
        self.world.resumed.append(self.donor)

    async def follow(self) -> CloseRecord:
        """The next step closes, and its record names us."""
        follow = self.world.follow.pop(0) if self.world.follow else None
        if follow is not None:
            raise follow
        self.world.member.head = self.head = self.world.run.close(NAMED).record
        self.world.member.is_member = True
        return self.head


class World:
    """Everything around one :class:`Joining`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, steps: int = STEPS, stage: int | None = 0) -> None:
        self.run = Run(2)
        self.behave: dict[PeerId, Behave] = {}
        self.follow: list[Exception | None] = []
        self.asked: list[tuple[PeerId, str | None]] = []
        self.resumed: list[PeerId] = []
        self.downloads: list[tuple[str, PeerId]] = []
        self.admissions: list[tuple[PeerId, Admission]] = []
        self.clock, self.events = FakeClock(), EventList(JOINER)
        self.situation = Situation(self.events)
        self.leaving = SimpleNamespace(asked=False, exit_code=0, admitted=_Flag())
        self.member = SimpleNamespace(head=None, is_member=False, observe=None)
        self.prepared = 0
        self.unreachable = ""
        run = SimpleNamespace(steps=steps)
        split = SimpleNamespace(stages=2, ends="private")
        self.around = SimpleNamespace(
            manifest=SimpleNamespace(run_id=RUN, run=run, split=split),
            endpoint=SimpleNamespace(peer=JOINER, addresses=("/memory/J",), learn=lambda peer, addresses: None),
            identity=SimpleNamespace(sign=lambda data: sign(JOINER, data)),
            device=None,
            events=self.events,
            clock=self.clock,
            watch=SimpleNamespace(follow=lambda roster: None),
            be_reachable=self._be_reachable,
        )
        settings = SimpleNamespace(role="stage", stage=stage, name="j")
        monkeypatch.setattr(joining, "Observer", self._observer)
        monkeypatch.setattr(joining, "build_empty", self._build)
        monkeypatch.setattr(joining, "download_part", self._download)
        monkeypatch.setattr(joining, "StepCalls", lambda endpoint: self)
        self.joining = Joining(settings, self.around, self.member, self.situation, self.leaving, self._prepare)  # type: ignore[arg-type]

    def donors(self) -> list[PeerId]:
        """Who was asked for a part, in order."""
        return [donor for donor, name in self.asked if name is not None]

    async def ask(self, peer: PeerId, method: str, body: Admission, reply: Any, *, timeout_s: float) -> None:
        """Stands in for the step calls."""
        self.admissions.append((peer, body))

    def _observer(self, context: ObserverContext, donor: PeerId, name: str | None) -> Scripted:
        return Scripted(self, donor, name)

    async def _be_reachable(self, through: Sequence[PeerId]) -> str:
        return self.unreachable

    async def _build(self, around: Any, name: str) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(name=name))

    async def _download(self, around: Any, record: CloseRecord, part: Any, donor: PeerId) -> None:
        self.downloads.append((part.spec.name, donor))

    async def _prepare(self, part: Any, record: CloseRecord) -> None:
        self.prepared += 1


class _Flag:
    def __init__(self) -> None:
        self.given = False

    def set(self) -> None:
        self.given = True

    def is_set(self) -> bool:
        return self.given


def fail(error: Exception, times: int = 10**6) -> Behave:
    """A donor that fails so often."""
    left = [times]

    def behave(observer: Scripted) -> None:
        if observer.name is not None and left[0] > 0:
            left[0] -= 1
            raise error

    return behave


async def test_joiner_takes_a_replica_as_its_donor_and_asks_the_leader_of_the_open_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    await world.joining.run(CONTACT)
    (leader, admission), head = world.admissions[0], world.run.decisions[2].record
    assert (leader, admission.step, admission.member.part) == (ROSTER.leader(3), 3, "stage-0")
    assert head.step == 2
    assert world.donors()[0] in (DONOR, OTHER)
    assert world.prepared == 1


async def test_joiner_asks_busy_donors_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for donor in (DONOR, OTHER):
        world.behave[donor] = fail(Busy("8 peers are joining"), 5 * MAX_FAILURES)
    await world.joining.run(CONTACT)
    assert len(world.donors()) > 10 * MAX_FAILURES
    assert world.clock.now > 30.0, "it did not pause between its questions"
    assert any("8 peers are joining" in str(event) for event in world.events.events)


async def test_joiner_gives_up_after_some_failures_and_names_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for donor in (DONOR, OTHER):
        world.behave[donor] = fail(StateError("the digest is wrong"))
    with pytest.raises(RunEnded, match="nobody could help .* the digest is wrong") as error:
        await world.joining.run(CONTACT)
    assert error.value.exit_code == EXIT_UNREACHABLE
    assert len(world.donors()) == MAX_FAILURES
    assert set(world.donors()) == {DONOR, OTHER}


async def test_joiner_whose_donor_fails_in_the_middle_goes_on_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.follow = [Unreachable("the stream broke")]
    await world.joining.run(CONTACT)
    first, second = world.donors()
    assert first != second
    assert world.resumed == [second], "the other is at the same step: nothing is downloaded twice"
    assert (len(world.downloads), world.prepared) == (1, 1)


async def test_joiner_that_fell_behind_downloads_anew_and_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    def close_many(observer: Scripted) -> None:
        if world.prepared:
            for _ in range(3):
                world.run.close()

    world.behave = dict.fromkeys((DONOR, OTHER), close_many)
    world.follow = [WrongStep("not kept here any more")]
    await world.joining.run(CONTACT)
    assert (len(world.downloads), world.prepared, world.resumed) == (2, 1, [])


async def test_joiner_that_is_named_while_it_changes_donors_does_not_ask_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    closed: list[Decision] = []

    def name_us(observer: Scripted) -> None:
        if world.prepared and not closed:
            closed.append(world.run.close(NAMED))
            world.member.is_member = True

    world.behave = dict.fromkeys((CONTACT, DONOR, OTHER), name_us)
    world.follow = [Unreachable("the stream broke")] * 2
    await world.joining.run(CONTACT)
    assert JOINER not in world.donors()
    assert len(world.downloads) == 2


async def test_joiner_whose_stage_has_changed_before_it_held_anything_builds_the_right_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first choice got a replica meanwhile: the part that was built for it is of no use."""
    world = World(monkeypatch, stage=None)
    thin = Roster([listed(DONOR), listed(OTHER, part="stage-1"), listed(CONTACT, "trainer", "ends")])
    full = {
        "stage-0": Roster([*thin.members, listed("N")]),
        "stage-1": Roster([*thin.members, listed("N", part="stage-1")]),
    }
    world.run.decisions[-1] = signed(world.run.head.model_copy(update={"roster": thin.members}))
    downloaded: list[str] = []

    async def download(around: Any, record: CloseRecord, part: Any, donor: PeerId) -> None:
        downloaded.append(part.spec.name)
        if len(downloaded) == 1:
            after = full[part.spec.name]
            world.run.decisions[-1] = signed(record.model_copy(update={"roster": after.members}))
            raise StateError("the link broke")

    monkeypatch.setattr(joining, "download_part", download)
    await world.joining.run(CONTACT)
    assert sorted(downloaded) == ["stage-0", "stage-1"]
    assert world.situation.part == downloaded[1]


@pytest.mark.parametrize("steps", [2, 3])
async def test_joiner_that_comes_with_the_last_step_or_after_it_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    world = World(monkeypatch, steps=steps)
    with pytest.raises(RunEnded, match="nobody joins with that one"):
        await world.joining.run(CONTACT)
    assert (world.downloads, world.admissions) == ([], [])


async def test_joiner_whose_identity_takes_part_already_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.run.close(NAMED)
    with pytest.raises(RunEnded, match="takes part in the run already"):
        await world.joining.run(CONTACT)
    assert world.downloads == []


async def test_joiner_that_wishes_for_a_stage_that_is_not_is_a_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, stage=7)
    with pytest.raises(RunEnded, match="there is no stage 7") as error:
        await world.joining.run(CONTACT)
    assert error.value.exit_code == EXIT_USAGE


async def test_joiner_that_nobody_can_call_is_told_so_before_it_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.unreachable = "behind a router, and no relay"
    with pytest.raises(RunEnded, match="behind a router"):
        await world.joining.run(CONTACT)
    assert (world.downloads, world.admissions) == ([], [])


async def test_joiner_whose_contact_does_not_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    def silent(observer: Scripted) -> None:
        raise Unreachable("no such peer", peer=CONTACT)

    world.behave[CONTACT] = silent
    with pytest.raises(RunEnded, match="the contact is gone.*no such peer"):
        await world.joining.run(CONTACT)


async def test_joiner_that_was_told_to_leave_meanwhile_asks_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.leaving.asked, world.leaving.exit_code = True, 75
    with pytest.raises(RunEnded, match="left before it took part") as error:
        await world.joining.run(CONTACT)
    assert (error.value.exit_code, world.admissions) == (75, [])


async def test_joiner_that_is_refused_asks_again_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    answers: list[Exception] = [Refused("the run is full")]

    async def ask(peer: PeerId, method: str, body: Admission, reply: Any, *, timeout_s: float) -> None:
        world.admissions.append((peer, body))
        if answers:
            raise answers.pop()

    async def follow(self: Scripted) -> CloseRecord:
        named = len(world.admissions) > 1
        world.member.is_member = named
        world.member.head = self.head = world.run.close(NAMED if named else ROSTER).record
        return self.head

    monkeypatch.setattr(world, "ask", ask, raising=False)
    monkeypatch.setattr(Scripted, "follow", follow)
    await world.joining.run(CONTACT)
    assert [body.step for _, body in world.admissions] == [3, 4]
    assert any("the run is full" in str(event) for event in world.events.events)
