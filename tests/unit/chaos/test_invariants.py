"""Good histories pass, and each broken one is found broken by the very invariant that it breaks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.chaos.faults import NAMES
from peers.chaos.invariants.__main__ import main
from peers.chaos.invariants.check import CHECKERS, Report, check, check_run
from peers.chaos.invariants.evidence import FaultFact, Gatherer, event_hash, gather
from peers.chaos.invariants.findings import ENDED_BY, HARMLESS, PASSING, REBORN, Limits
from peers.chaos.invariants.microbatches import prefix_problem
from swarm.consensus.records import NO_RECORD, CloseRecord, Contribution, Quarantined
from swarm.consensus.roster import Member
from swarm.events import (
    Accumulated,
    Committed,
    DigestMismatch,
    Event,
    JourneyCompleted,
    JourneySetAside,
    JourneyStarted,
    PeerLost,
    PeerReady,
    RosterChanged,
    RoundDone,
    StateDownloaded,
    StepClosed,
    SumTaken,
)
from swarm.ids import ENDS, MicrobatchId, PeerId, stage_part
from swarm.monitoring.reader import UNREADABLE, RawEvent, Recorded
from swarm.monitoring.recorder import Recorder
from tests.harness.rigs.clocks import FakeClock

HOSTS = {"host0": 0, "host1": 0, "host2": 1}
TRAINER = "trainer0"
SHARD = "5" * 16
STEPS, TARGET = 4, 3


@dataclasses.dataclass
class Stamped:
    """One event of a pretend run, changeable before it is checked."""

    wall: float
    event: Event
    dropped: int = 0


class PretendRun:
    """A sound run of three hosts and a trainer, whose events and records a test then corrupts."""

    def __init__(self) -> None:
        self.events: dict[str, list[Stamped]] = {peer: [] for peer in (*HOSTS, TRAINER)}
        self.records: list[CloseRecord] = [self._record(0, ())]
        for step in range(1, STEPS + 1):
            self._step(step)
        self.chains: dict[str, list[CloseRecord]] = {peer: list(self.records) for peer in self.events}
        self.faults: list[FaultFact] = []
        self.later: list[tuple[str, list[Stamped]]] = []
        """Further starts of a peer."""

    def _record(self, step: int, committed: tuple[Contribution, ...]) -> CloseRecord:
        previous = self.records[-1].hash() if step else NO_RECORD
        roles = {**{peer: ("stage", stage_part(stage)) for peer, stage in HOSTS.items()}, TRAINER: ("trainer", ENDS)}
        members = [
            {"peer": peer, "role": role, "name": peer, "part": part, "addresses": ()}
            for peer, (role, part) in sorted(roles.items())
        ]
        return CloseRecord(
            run="a" * 64,
            step=step,
            committed=committed,
            tokens=sum(one.tokens for one in committed),
            loss_sum=sum(one.loss_sum for one in committed),
            grad_norm=1.0,
            clip=1.0,
            lr=0.1,
            digests={part: f"{step:064x}" for part in ("ends", "stage-0", "stage-1")},
            cursors={TRAINER: (0, step * TARGET)},
            roster=tuple(Member.model_validate(member) for member in members),
            previous=previous,
        )

    def _step(self, step: int) -> None:
        contributions = []
        for index in range(TARGET):
            microbatch = MicrobatchId(PeerId(TRAINER), SHARD, 0, (step - 1) * TARGET + index)
            route = (PeerId(f"host{index % 2}"), PeerId("host2"))
            contributions.append(Contribution(microbatch=microbatch, tokens=8, loss_sum=16.0, route=route))
            self.say(TRAINER, step, JourneyStarted(step=step, microbatch=microbatch, route=route))
            for stage, host in enumerate(route):
                self.say(host, step, Accumulated(step=step, microbatch=microbatch, part=stage_part(stage)))
            self.say(
                TRAINER,
                step,
                JourneyCompleted(step=step, microbatch=microbatch, tokens=8, loss_sum=16.0, route=route, seconds=0.1),
            )
        record = self._record(step, tuple(contributions))
        self.records.append(record)
        for peer in self.events:
            if peer in HOSTS:
                part = stage_part(HOSTS[peer])
                done = RoundDone(step=step, part=part, members=2, participating=1, bytes_sent=1, seconds=0.001)
                self.say(peer, step, SumTaken(step=step, part=part, attempt=0))
                self.say(peer, step, done)
            self.say(peer, step, closed(record))
        self.say("host0", step, Committed(step=step, microbatches=tuple(one.microbatch for one in contributions)))

    def say(self, peer: str, step: int, event: Event) -> None:
        """Add an event, a second of the step's later than the one before."""
        self.events[peer].append(Stamped(10.0 * step + 0.01 * len(self.events[peer]), event))

    def change(self, peer: str, kind: type[Event], nth: int, **fields: Any) -> None:
        """Replace fields of the nth event of a kind."""
        stamped = [one for one in self.events[peer] if isinstance(one.event, kind)][nth]
        stamped.event = dataclasses.replace(stamped.event, **fields)

    def drop(self, peer: str, kind: type[Event], nth: int) -> None:
        """Forget the nth event of a kind."""
        self.events[peer].remove([one for one in self.events[peer] if isinstance(one.event, kind)][nth])

    def rewrite(self, step: int, **fields: Any) -> None:
        """Change everybody's record of a step, and those after it so that the chain holds, and what was announced."""
        old = [record.hash() for record in self.records]
        self.records[step] = self.records[step].model_copy(update=fields)
        for later in range(step + 1, len(self.records)):
            previous = {"previous": self.records[later - 1].hash()}
            self.records[later] = self.records[later].model_copy(update=previous)
        new = dict(zip(old, (record.hash() for record in self.records), strict=True))
        for stamped in (one for events in self.events.values() for one in events):
            if isinstance(stamped.event, StepClosed):
                stamped.event = dataclasses.replace(stamped.event, record=new[stamped.event.record])
        self.chains = {peer: list(self.records) for peer in self.events}

    def report(self, **limits: Any) -> dict[str, int]:
        """The failures by invariant, with how many each."""
        report = self.checked(**limits)
        return {name: len(report.of(name)) for name in ("files", *CHECKERS) if report.of(name)}

    def checked(self, **limits: Any) -> Report:
        """What the checkers say."""
        gatherer = Gatherer()
        for peer, events in [*self.events.items(), *self.later]:
            gatherer.recorded(Recorded(one.wall, one.wall, PeerId(peer), one.event, one.dropped) for one in events)
        for peer, records in self.chains.items():
            gatherer.history(peer, [record.model_dump_json().encode() for record in records])
        gatherer.faults = self.faults
        return check(gatherer.evidence(), Limits(**limits))

    def write(self, root: Path) -> None:
        """All of it as the files of a run."""
        for peer, events in self.events.items():
            home = root / peer
            home.mkdir(parents=True)
            clock = FakeClock()
            with Recorder(home / "events.jsonl", PeerId(peer), clock) as recorder:
                for stamped in events:
                    clock.now = stamped.wall
                    recorder.emit(stamped.event)
            text = "".join(record.model_dump_json() + "\n" for record in self.chains[peer])
            (home / "history.jsonl").write_text(text)


def closed(record: CloseRecord, **fields: Any) -> StepClosed:
    """What a peer says that swapped."""
    return StepClosed(
        step=record.step,
        loss=record.loss,
        tokens=record.tokens,
        microbatches=len(record.committed),
        grad_norm=record.grad_norm,
        clip=record.clip,
        lr=record.lr,
        digests=dict(record.digests),
        leader=PeerId("host0"),
        record=record.hash(),
        seconds=1.0,
        **fields,
    )


def first(step: int, index: int = 0) -> MicrobatchId:
    """A microbatch of a step."""
    return MicrobatchId(PeerId(TRAINER), SHARD, 0, (step - 1) * TARGET + index)


def test_sound_run_passes_and_everything_was_looked_at() -> None:
    run = PretendRun()
    assert run.report(target=TARGET, gap_s=11.0) == {}


Corrupt = Callable[[PretendRun], None]


def commit_again(run: PretendRun) -> None:
    again = run.records[2].committed[0].model_copy(update={"microbatch": first(1)})
    run.rewrite(2, committed=(again, *run.records[2].committed[1:]))
    run.events["host0"] = [one for one in run.events["host0"] if not isinstance(one.event, Committed)]


def leave_out_of_the_list(run: PretendRun) -> None:
    run.change("host0", Committed, 1, microbatches=(first(2, 0), first(2, 1)))


def lose_one(run: PretendRun) -> None:
    run.rewrite(2, committed=run.records[2].committed[1:], tokens=16, loss_sum=32.0)
    for peer in run.events:
        run.change(peer, StepClosed, 1, tokens=16, microbatches=2)
    run.change("host0", Committed, 1, microbatches=(first(2, 1), first(2, 2)))
    run.drop("host0", Accumulated, 2)
    run.drop("host2", Accumulated, 3)


def lose_at_one_stage(run: PretendRun) -> None:
    run.drop("host1", Accumulated, 0)


def add_twice(run: PretendRun) -> None:
    accumulated = next(one.event for one in run.events["host2"] if isinstance(one.event, Accumulated))
    run.events["host2"].insert(1, Stamped(10.0, accumulated))


def keep_a_surplus(run: PretendRun) -> None:
    run.events["host1"].insert(0, Stamped(9.0, Accumulated(step=1, microbatch=first(1), part=stage_part(0))))


def miscount(run: PretendRun) -> None:
    run.rewrite(3, tokens=25)
    for peer in run.events:
        run.change(peer, StepClosed, 2, tokens=25)


def divide_by_another(run: PretendRun) -> None:
    run.change("host2", StepClosed, 0, tokens=23)


def average_with_another(run: PretendRun) -> None:
    run.change("host1", RoundDone, 1, participating=2)


def drift(run: PretendRun) -> None:
    run.change("host1", StepClosed, 3, digests={**run.records[4].digests, "stage-0": "f" * 64})


def notice_drift(run: PretendRun) -> None:
    run.say("host1", 4, DigestMismatch(step=4, part=stage_part(0), digests={}))


def skip_a_step(run: PretendRun) -> None:
    run.drop("host2", StepClosed, 1)
    run.events["host2"] = [
        one for one in run.events["host2"] if not (isinstance(one.event, Accumulated) and one.event.step == 2)
    ]


def run_ahead(run: PretendRun) -> None:
    last = run.records[-1]
    run.say("host2", 5, dataclasses.replace(closed(last), step=last.step + 1))


def close_early(run: PretendRun) -> None:
    lose_one(run)
    run.drop(TRAINER, JourneyStarted, 3)
    run.rewrite(2, cursors={TRAINER: (0, 5)})


def skip_data(run: PretendRun) -> None:
    run.rewrite(2, cursors={TRAINER: (0, 7)})


def read_again(run: PretendRun) -> None:
    run.rewrite(4, cursors={TRAINER: (0, 11)})


def stand_still(run: PretendRun) -> None:
    for stamped in (one for events in run.events.values() for one in events):
        if stamped.wall >= 30:
            stamped.wall += 100


def fork(run: PretendRun) -> None:
    run.chains["host1"][-1] = run.chains["host1"][-1].model_copy(update={"lr": 0.2})


def announce_another(run: PretendRun) -> None:
    run.change("host1", StepClosed, 3, record="e" * 64)


def break_the_chain(run: PretendRun) -> None:
    run.chains["host1"] = [run.records[0], *run.records[2:]]


def go_on_after_the_end(run: PretendRun) -> None:
    *before, middle, last = run.chains["host1"]
    middle = middle.model_copy(update={"ended": True})
    run.chains["host1"] = [*before, middle, last.model_copy(update={"previous": middle.hash()})]


def download_the_undecided(run: PretendRun) -> None:
    event = StateDownloaded(part=stage_part(0), step=9, donor=PeerId("host0"), bytes_received=1, seconds=1.0)
    run.say("host1", 4, event)


def write_after_the_restart(run: PretendRun) -> None:
    ready = PeerReady(part=stage_part(1), step=2, reason="it came back", seconds=1.0)
    run.later.append(("host2", [Stamped(29.0, ready)]))


def overflow(run: PretendRun) -> None:
    run.change("host1", StepClosed, 0, grad_norm=float("inf"))


def use_the_dead(run: PretendRun) -> None:
    run.faults.append(FaultFact(15.0, "kill", ("host1",)))


def use_the_paused(run: PretendRun) -> None:
    run.faults.append(FaultFact(5.0, "pause", ("host1",), 30.0))


def evict_the_slow(run: PretendRun) -> None:
    run.faults.append(FaultFact(25.0, "slow_link", ("host1", TRAINER)))
    run.say("host0", 3, PeerLost(peer=PeerId("host1"), name="host1", reason="no answer"))


BROKEN: dict[Corrupt, dict[str, int]] = {
    commit_again: {"I1": 1, "I2": 1, "I3": 2, "I10": 3},
    leave_out_of_the_list: {"I1": 1},
    lose_one: {"I2": 1, "I8": 1, "I10": 3},
    lose_at_one_stage: {"I3": 1},
    add_twice: {"I3": 1},
    keep_a_surplus: {"I3": 1},
    miscount: {"I4": 1},
    divide_by_another: {"I4": 1},
    average_with_another: {"I4": 1},
    drift: {"I5": 1},
    notice_drift: {"I5": 1},
    skip_a_step: {"I7": 1},
    run_ahead: {"I7": 1},
    close_early: {"I8": 1, "I10": 3},
    skip_data: {"I10": 1},
    read_again: {"I10": 1},
    stand_still: {"I13": 1},
    fork: {"I20": 1},
    announce_another: {"I20": 1},
    break_the_chain: {"I20": 1},
    go_on_after_the_end: {"I20": 3},
    download_the_undecided: {"I17": 1},
    write_after_the_restart: {"I21": 8},
    overflow: {"I26": 1},
    use_the_dead: {"I14": 1},
    use_the_paused: {"I14": 1},
    evict_the_slow: {"I15": 1},
}


@pytest.mark.parametrize("corrupt", BROKEN, ids=lambda corrupt: corrupt.__name__)
def test_broken_run_fails_by_the_name_of_what_it_broke(corrupt: Corrupt) -> None:
    run = PretendRun()
    corrupt(run)
    assert run.report(target=TARGET) == BROKEN[corrupt]


@pytest.mark.parametrize(
    ("faults", "failures"),
    [
        ((FaultFact(10.0, "pause", ("host1",), 2.0),), 1),  # long ago
        ((FaultFact(25.0, "pause", ("host1",), 2.0),), 0),
        ((FaultFact(25.0, "disconnect", ("host0",)),), 0),  # who is cut off itself misses all others
        ((FaultFact(1.0, "partition", ("host1",)), FaultFact(5.0, "heal", ())), 1),
        ((FaultFact(1.0, "partition", ("host1",)),), 0),
        ((FaultFact(1.0, "kill", ("host1",)),), 0),  # it never came back
        ((FaultFact(1.0, "skew_clock", ("host1",)),), 1),
        ((FaultFact(25.0, "skew_clock", ("host1",)),), 0),
        ((FaultFact(1.0, "fill_disk", ("host1",)), FaultFact(5.0, "free_disk", ("host1",))), 1),
        ((FaultFact(1.0, "disconnect", ("host1",)), FaultFact(5.0, "reconnect", ("host1",))), 1),
        ((FaultFact(1.0, "disconnect", ("host1",)), FaultFact(5.0, "reconnect", ("host1",), took_s=20.0)), 0),
    ],
)
def test_a_fault_excuses_whom_it_hit_while_it_lasts(faults: tuple[FaultFact, ...], failures: int) -> None:
    run = PretendRun()
    evict_the_slow(run)
    run.faults = list(faults)
    report = run.report(target=TARGET)
    assert report.get("I15", 0) == failures


def test_every_fault_says_when_it_is_over() -> None:
    families = [set(ENDED_BY), HARMLESS, PASSING, REBORN]
    assert set().union(*families) == {*NAMES.values(), "lie"}, "a restart as one that lies has a name of its own"
    assert sum(map(len, families)) == len(set().union(*families))


@pytest.mark.parametrize("corrupt", [evict_the_slow, use_the_dead])
def test_who_misses_whom_when_all_leave_does_not_count(corrupt: Corrupt) -> None:
    run = PretendRun()
    corrupt(run)
    assert run.report(target=TARGET, until=26.0) == {}


def test_a_kill_that_took_long_to_be_done_is_noticed_in_time() -> None:
    run = PretendRun()
    run.faults.append(FaultFact(15.0, "kill", ("host1",), took_s=2.0))
    assert run.report(target=TARGET) == {"I14": 1}
    run.faults = [FaultFact(15.0, "kill", ("host1",), took_s=30.0)]
    assert run.report(target=TARGET) == {}


@pytest.mark.parametrize("step", [2, 7])
def test_being_let_in_by_a_record_that_the_victim_knew_brings_it_back_for_nobody(step: int) -> None:
    run = PretendRun()
    use_the_dead(run)
    joined = ({"peer": "host1", "name": "host1", "part": "stage-0"},)
    for peer, wall, let_in in (("host1", 14.9, 2), ("host0", 15.5, step)):
        run.say(peer, 2, RosterChanged(step=let_in, joined=joined, left=()))
        run.events[peer][-1].wall = wall
    assert run.report().get("I14", 0) == (step == 2)


@pytest.mark.parametrize(("until", "looked"), [(26.0, 0), (36.0, 1)])
def test_a_kill_is_looked_at_once_two_steps_are_closed_without_its_victim(until: float, looked: int) -> None:
    run = PretendRun()
    use_the_dead(run)
    checked = run.checked(target=TARGET, until=until)
    assert (checked.looked["I14"], checked.of("I14")) == (looked, ())


def test_microbatch_that_came_in_after_the_sum_was_taken_is_no_surplus() -> None:
    run = PretendRun()
    taken = next(one for one in run.events["host1"] if isinstance(one.event, SumTaken))
    late = Accumulated(step=1, microbatch=first(2), part=stage_part(0))
    run.events["host1"].insert(run.events["host1"].index(taken) + 1, Stamped(taken.wall + 0.0005, late))
    assert run.report(target=TARGET) == {}


def test_what_is_reversed_after_the_sum_was_taken_was_in_it() -> None:
    run = PretendRun()
    events = run.events["host1"]
    taken = next(one for one in events if isinstance(one.event, SumTaken))
    surplus = Accumulated(step=1, microbatch=first(2), part=stage_part(0))
    events.insert(events.index(taken), Stamped(taken.wall, surplus))
    events.insert(events.index(taken) + 1, Stamped(taken.wall, _reversed(first(2))))
    assert run.report(target=TARGET) == {"I3": 1}


def test_microbatch_that_is_redone_in_a_later_step_is_not_lost() -> None:
    run = PretendRun()
    route = run.records[4].committed[0].route
    run.say(TRAINER, 3, JourneyStarted(step=3, microbatch=first(4), route=route))
    run.say(TRAINER, 5, JourneyStarted(step=5, microbatch=first(5), route=route))
    assert run.report() == {}


def test_contribution_reversed_and_replayed_elsewhere_is_where_the_record_says() -> None:
    run = PretendRun()
    moved = first(1)
    entry = next(one for one in run.events["host1"] if isinstance(one.event, Accumulated))
    run.events["host1"].insert(0, Stamped(entry.wall, Accumulated(step=1, microbatch=moved, part=stage_part(0))))
    assert run.report() == {"I3": 1}
    back = Recorded(10.5, 10.5, PeerId("host1"), _reversed(moved))
    gatherer = Gatherer()
    events = [Recorded(one.wall, one.wall, PeerId("host1"), one.event) for one in run.events["host1"]]
    gatherer.recorded([events[0], back, *events[1:]])
    gatherer.history("host1", [record.model_dump_json().encode() for record in run.records])
    assert not check(gatherer.evidence()).of("I3")


def test_peer_that_was_cut_off_goes_on_at_a_later_step() -> None:
    run = PretendRun()
    skip_a_step(run)
    assert run.report() == {"I7": 1}
    at = next(i for i, one in enumerate(run.events["host2"]) if one.event == closed(run.records[3]))
    gatherer = Gatherer()
    recorded = [Recorded(one.wall, one.wall, PeerId("host2"), one.event) for one in run.events["host2"]]
    cut = Recorded(25.0, 25.0, PeerId("host2"), RawEvent("CutOff", {"step": 1, "reason": "alone"}))
    gatherer.recorded([*recorded[:at], cut, *recorded[at:]])
    assert not check(gatherer.evidence()).of("I7")


@pytest.mark.parametrize(("dropped", "complaints"), [(3, 0), (0, 1)])
def test_line_that_a_full_disk_cut_short_is_readable_where_the_next_one_says_so(dropped: int, complaints: int) -> None:
    torn = Recorded(0.0, 0.0, PeerId(""), RawEvent(UNREADABLE, {"text": '{"t":1.0,"peer":"hos'}))
    after = Recorded(10.5, 10.5, PeerId("host1"), RawEvent("LinkUsage", {"step": 1}), dropped)
    gatherer = Gatherer()
    gatherer.recorded([torn, after], "host1/events.jsonl")
    assert len(gatherer.evidence().unreadable) == complaints
    gatherer.recorded([after, torn])
    assert len(gatherer.evidence().unreadable) == complaints + 1


def _reversed(microbatch: MicrobatchId) -> RawEvent:
    return RawEvent("ContributionReversed", {"step": 1, "microbatch": list(microbatch), "part": "stage-0"})


def test_run_founded_anew_goes_on_from_its_checkpoint() -> None:
    run = PretendRun()
    anew = run.records[2].model_copy(
        update={"committed": (), "tokens": 0, "loss_sum": 0.0, "previous": run.records[2].hash()}
    )
    run.rewrite(3, previous=anew.hash())
    for peer, records in run.chains.items():
        old, new = records[:3], [anew, *records[3:]]
        run.chains[peer] = new if peer == "host1" else [*old, *new]
    assert run.report(target=TARGET) == {}


def test_microbatch_that_was_set_aside_is_not_lost_and_leaves_no_hole() -> None:
    run = PretendRun()
    gone, left = run.records[2].committed[0], run.records[2].committed[1:]
    lose_one(run)
    assert run.report(target=TARGET) == {"I2": 1, "I8": 1, "I10": 3}
    said = JourneySetAside(step=2, microbatch=gone.microbatch, reason="it is not finite, no matter who computes it")
    run.say(gone.microbatch.trainer, 2, said)  # what its trainer says is in no record
    assert run.report(target=TARGET) == {"I2": 1, "I8": 1, "I10": 3}
    aside = Quarantined(microbatch=gone.microbatch, reason="it is not finite, no matter who computes it")
    run.rewrite(2, committed=left, aside=(aside,))
    assert run.report(target=TARGET) == {"I8": 1}


def test_nothing_to_look_at_is_not_soundness(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    report = check_run([tmp_path])
    assert not report.failures
    with pytest.raises(AssertionError, match="I1: nothing to look at"):
        report.assert_sound()


def test_epochs_of_one_shard_join_without_holes() -> None:
    whole = {(epoch, position) for epoch in range(2) for position in range(5)}
    assert prefix_problem(whole, (2, 0)) == ""
    assert prefix_problem(whole | {(2, 0)}, (2, 1)) == ""
    assert "holes" in prefix_problem(whole - {(0, 3)}, (2, 0))
    assert "[4, 5]" in prefix_problem(whole - {(0, 4)}, (2, 0))
    assert "read again" in prefix_problem(whole, (1, 4))
    assert "holes" in prefix_problem(set(), (1, 0))


def test_files_of_a_run_are_read_from_the_directory_above_them(tmp_path: Path) -> None:
    PretendRun().write(tmp_path / "peers")
    report = check_run([tmp_path], Limits(target=TARGET))
    report.assert_sound()
    assert report.steps == STEPS
    assert event_hash(gather([tmp_path])) == event_hash(gather([tmp_path / "peers"]))


def test_line_torn_by_a_kill_is_no_failure_but_a_corrupt_one_is(tmp_path: Path) -> None:
    PretendRun().write(tmp_path)
    history = tmp_path / "host1" / "history.jsonl"
    whole = history.read_bytes()
    history.write_bytes(whole[:-40])
    check_run([tmp_path]).assert_sound()
    lines = whole.splitlines(keepends=True)
    history.write_bytes(lines[0] + b"{}\n" + b"".join(lines[1:]))
    assert len(check_run([tmp_path]).of("files")) == 1


def test_history_lines_with_their_proof_are_read_too(tmp_path: Path) -> None:
    PretendRun().write(tmp_path)
    history = tmp_path / "host1" / "history.jsonl"
    lines = history.read_bytes().splitlines()
    proof = b',"decision":{"term":0,"acceptances":{}}}\n'
    history.write_bytes(b"".join(line[:-1] + proof for line in lines))
    (tmp_path / "host1" / "history-1.jsonl").write_bytes(lines[0] + b"\n")
    check_run([tmp_path]).assert_sound()


def test_command_line_names_failures_and_ends_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound, corrupt = PretendRun(), PretendRun()
    drift(corrupt)
    sound.write(tmp_path / "sound")
    corrupt.write(tmp_path / "corrupt")
    assert main([str(tmp_path / "sound")]) == 0
    assert "0 failures" in capsys.readouterr().out
    assert main([str(tmp_path / "corrupt"), "--target", str(TARGET)]) == 1
    assert "I5 step 4, host1: other digests of stage-0" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2


def test_faults_are_read_beside_the_homes(tmp_path: Path) -> None:
    PretendRun().write(tmp_path)
    line = {"t": 15.0, "kind": "kill", "peers": ["host1"]}
    (tmp_path / "faults.jsonl").write_text(json.dumps(line) + "\n")
    assert len(check_run([tmp_path]).of("I14")) == 1


def test_what_a_full_disk_did_not_take_is_not_held_against_a_peer() -> None:
    run = PretendRun()
    run.drop("host0", StepClosed, 1)
    run.drop("host0", Accumulated, 4)
    assert run.report() == {"I3": 1, "I7": 1}
    closings = [one for one in run.events["host0"] if isinstance(one.event, StepClosed)]
    closings[1].dropped = 2
    assert run.report() == {}
