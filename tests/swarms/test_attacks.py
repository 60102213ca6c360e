"""Members gone bad, in whole swarms: that the attack was made, and what it cannot do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from peers.chaos.liars.lies import Liar, lying
from peers.commands.history import fault_lines, read
from peers.commands.history_source import HistorySource
from peers.simulate.sim_swarm import SimSwarm
from swarm.averaging.allreduce.allreduce_service import AllReduce
from swarm.averaging.allreduce.exchange import Exchange
from swarm.averaging.allreduce.messages import ReduceRequest
from swarm.averaging.allreduce.partition import ReduceChunk
from swarm.averaging.allreduce.plan import RoundKey
from swarm.consensus.faults import FIRST_BAR
from swarm.consensus.placement import Candidate
from swarm.consensus.records import CloseRecord, Contribution
from swarm.consensus.roster import Roster, own_term
from swarm.events import (
    Accumulated,
    DigestMismatch,
    GradientsFarOut,
    HopDiffers,
    HopMoved,
    JourneySetAside,
    PartsCapped,
    ProvenWrong,
    RoundVoid,
    StepClosed,
    SumLeftOut,
)
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.membership.following import Following
from swarm.membership.founder import Founder
from swarm.membership.membership import Membership
from swarm.network.protocols import Answer, Incoming
from swarm.pipeline.compute import Contributed, Material, StageCompute
from swarm.pipeline.seals import Sealed
from swarm.pipeline.stage.microbatch_state import MicrobatchState
from swarm.pipeline.stage.sender import Sender
from swarm.pipeline.trainer.trainer import StepLeader, Trainer
from swarm.schema import Empty
from swarm.sim.links import Links
from swarm.sim.loop import PEER, LoopClock, run_world
from swarm.step.leader.close import StepClose
from swarm.step.loop import StepLoop
from swarm.step.member.open_step import Attempt, Mean
from swarm.step.messages import PREPARE, Prepare, Reconcile
from tests.harness.bad_leaders import corrupts_sums
from tests.harness.swarm import LocalPeer
from tests.swarms.story import DONE

LEARNS: dict[str, Any] = {
    "hosts": 4,
    "trainers": 2,
    "run": {"steps": 10},
    "model": {"layers": 2, "dim": 16, "context": 8},
    "optimizer": {"lr": 2e-2, "warmup_steps": 0},
    "stage_s": {"forward": 0.05, "backward": 0.1},
}


def losses(swarm: SimSwarm) -> list[float]:
    """By step."""
    return [event.loss for event in swarm.peers["bootstrap"].events.of(StepClosed)]


# --- a corrupt sum ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corrupt", [lambda sums: sums * 1e30, lambda sums: torch.full_like(sums, 1e30)])
def test_replica_whose_sum_is_huge_stops_nobody_else(
    tmp_path: Path, corrupt: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    swarm = SimSwarm(tmp_path, **LEARNS)
    with corrupts_sums("host-0", corrupt) as corrupted:
        run_world(swarm.run())
    assert list(corrupted) == list(range(1, 11))
    told = swarm.peers["bootstrap"].events.of(PartsCapped)
    assert {event.step: list(event.caps) for event in told} == corrupted
    assert not swarm.events(DigestMismatch)
    assert losses(swarm)[-1] < 0.9 * losses(swarm)[0], "with one factor for all nobody learns anything"
    for record in swarm.history()[1:]:
        assert record["clip"] > 1e-3


def test_replica_whose_sum_is_turned_around_is_left_out_and_named_by_those_that_guard(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, **LEARNS | {"hosts": 6, "averaging": {"guard": "leave-out"}})
    with lying(Liar("sum-x-10", mine=lambda: PEER.get() == "host-0")) as lie:
        run_world(swarm.run())
    assert lie.told == {(step,) for step in range(1, 11)}
    liar = swarm.peers["host-0"].endpoint.peer
    told = [event for event in swarm.events(SumLeftOut) if event.part == "stage-0"]
    assert {event.peer for event in told} == {liar}
    steps = {(event.step,) for event in told}
    assert steps <= lie.told
    assert (1,) not in steps, "once it may be chance"
    assert len(steps) >= 7, "in one or two its few microbatches are too like the others'"
    assert losses(swarm)[-1] < 0.9 * losses(swarm)[0]


@pytest.mark.parametrize("check", [0.02, 1.0])
def test_replica_whose_means_are_wrong_is_proven_wrong_at_its_first_lie_and_barred(
    check: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lies = Exchange._reduce, list[RoundKey]()

    def negated(exchange: Exchange, chunk: ReduceChunk, sums: Any) -> memoryview:
        result = honest(exchange, chunk, sums)
        if PEER.get() != "host-0" or exchange._plan.key.step < 3:
            return result
        lies.append(exchange._plan.key)
        return exchange.output.settle(chunk, -exchange.output.vector[chunk.start : chunk.stop])

    monkeypatch.setattr(Exchange, "_reduce", negated)
    steps = {"steps": 10 if check == 1 else 40}  # of a small share, a lie is drawn in one round of four
    swarm = SimSwarm(tmp_path, may_fail=True, **LEARNS | {"hosts": 6, "averaging": {"check": check}, "run": steps})
    run_world(swarm.run())
    assert len(set(lies)) == 1 or check < 1, "it is asked no second time"  # of few blocks its own may be drawn later
    liar, step = swarm.peers["host-0"].endpoint.peer, lies[-1].step
    (told,) = swarm.events(ProvenWrong)
    assert (told.step, told.peer, told.part, told.microbatch) == (step, liar, lies[0].part, None)
    assert (len(told.by), told.until) == (2, step + 1 + FIRST_BAR)
    assert {event.culprit for event in swarm.events(RoundVoid) if event.culprit} == {liar}
    records = {record["step"]: record for record in swarm.history()}
    assert {at: record["absent"] for at, record in records.items() if record["absent"]} == {step: [liar]}
    assert all(liar not in {one["peer"] for one in record["roster"]} for at, record in records.items() if at >= step)
    assert {name for name, peer in swarm.peers.items() if peer.outcome != DONE} == {"host-0"}
    kept = read(HistorySource(swarm.root / "bootstrap" / "history.jsonl"), last=None, verify=True)
    assert kept.broken == ""
    (line,) = fault_lines(kept.rows)
    assert f"{lies[0].part} of its average by host-0" in line
    assert line.endswith(f"all signatures verified; host-0 barred until step {told.until}")
    assert losses(swarm)[-1] < 0.9 * losses(swarm)[0]


def test_word_of_one_replica_on_anothers_means_bars_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, lies = Attempt.run, list[int]()

    async def run(attempt: Attempt, body: Reconcile, roster: Roster, *more: Any) -> Mean:
        mean = await honest(attempt, body, roster, *more)
        if PEER.get() != "host-0" or body.step != 3 or lies:
            return mean
        lies.append(body.step)
        (victim, *_) = [peer for peer in roster.replicas(PartName("stage-0")) if peer != attempt.me]
        said = mean.answer.model_copy(update={"failure": "a lie", "culprit": victim})
        return replace(mean, answer=said, proven=True)

    monkeypatch.setattr(Attempt, "run", run)
    swarm = SimSwarm(tmp_path, **LEARNS | {"hosts": 6, "run": {"steps": 5}, "averaging": {"check": 1.0}})
    run_world(swarm.run())
    assert lies == [3]
    assert not any(record.get("faults") or record["absent"] for record in swarm.history())
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}


# --- whose work counts for whom ---------------------------------------------------------------------------------------


def test_leader_that_has_all_of_its_stage_count_for_itself_closes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sum would be the mean: nobody guards against the only one."""
    honest, lies = StepClose._question, list[str]()

    def question(leading: StepClose, committed: Sequence[Contribution]) -> Reconcile:
        asked, name = honest(leading, committed), PEER.get()
        part = leading.book.roster[leading._context.calls.me].part
        if part not in ("stage-0", "stage-1") or name != min(lies, default=name):
            return asked
        lies.append(name)
        at, me = int(part[-1]), leading._context.calls.me
        routes = [(*one.route[:at], me, *one.route[at + 1 :]) for one in asked.committed]
        pairs = zip(asked.committed, routes, strict=True)
        return asked.model_copy(update={"committed": tuple(one.model_copy(update={"route": to}) for one, to in pairs)})

    monkeypatch.setattr(StepClose, "_question", question)
    swarm = SimSwarm(tmp_path, **LEARNS)
    run_world(swarm.run())
    assert lies
    assert len(losses(swarm)) == 10
    for record in swarm.history()[1:]:
        held = [{one["route"][stage] for one in record["committed"]} for stage in range(2)]
        assert [*map(len, held)] == [2, 2], "no trainer signs that one has computed what another has"
    assert not any(record["absent"] for record in swarm.history())


# --- term after term -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_s", [0.1, 20.0])
def test_member_that_begins_term_after_term_and_leads_none_stops_no_run(
    every_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lead, begun = Membership.run, StepLoop._lead, Counter[int]()

    async def run(membership: Membership) -> None:
        campaign = asyncio.create_task(_begins_terms(membership)) if PEER.get() == "trainer-1" else None
        try:
            await honest(membership)
        finally:
            if campaign is not None:
                campaign.cancel()
                await asyncio.gather(campaign, return_exceptions=True)

    async def _begins_terms(membership: Membership) -> None:
        at, calls = membership._run.position, membership._run.calls
        await at.news.wait(lambda: at.open_step >= 3)
        while True:
            body = Prepare(step=at.open_step, term=own_term(at.roster, at.open_step, calls.me, at.term))
            if at.leader != calls.me or every_s > 1:
                begun[body.step] += 1
                asked = [calls.ask(peer, PREPARE, body, timeout_s=5.0) for peer in at.roster.peers]
                await asyncio.gather(*asked, return_exceptions=True)
            await LoopClock().sleep(every_s)

    async def leads(loop: StepLoop, step: int) -> None:
        if PEER.get() == "trainer-1" and step >= 3:
            await loop._at.wait_open(step + 1)
        else:
            await lead(loop, step)

    monkeypatch.setattr(Membership, "run", run)
    monkeypatch.setattr(StepLoop, "_lead", leads)
    shape = LEARNS | {"hosts": 2, "run": {"steps": 4}}
    swarm = SimSwarm(tmp_path, links=Links.parse({"default": {"latency_ms": 20}}), **shape)
    run_world(swarm.run())
    assert min(begun[3], begun[4]) > 2
    took = [event.seconds for event in swarm.peers["bootstrap"].events.of(StepClosed)]
    assert len(took) == 4
    assert max(took) < 400, "it was never late, and nobody else's term lasted"


# --- more microbatches than count ------------------------------------------------------------------------------------


def test_trainer_that_feeds_more_than_may_count_has_little_of_it_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that hosts add for nothing they compute once more when the step closes, and hold until then."""
    honest, lies = Trainer._begin_leased, set[int]()

    def begin(trainer: Trainer, step: int, granted: int | None, leader: StepLeader) -> None:
        honest(trainer, step, granted, leader)
        if PEER.get() == "trainer-1" and step not in lies and step >= 3:
            lies.add(step)
            for _ in range(60):
                trainer._issue(step, leader, early=False)

    monkeypatch.setattr(Trainer, "_begin_leased", begin)
    swarm = SimSwarm(tmp_path, **LEARNS | {"hosts": 2, "run": {"steps": 6}})
    run_world(swarm.run())
    assert lies >= {3, 4, 5}
    target = swarm.manifest.step_microbatches
    added = Counter((event.step, event.part) for event in swarm.events(Accumulated))
    assert target < max(added.values()) <= 3 * target, "twice what a step has of one, beside what counts of others"
    assert len(losses(swarm)) == 6


# --- lies about the time that a hop takes ----------------------------------------------------------------------------


def test_replica_that_claims_to_take_no_time_gets_its_share_and_a_half_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lies = Sender._report, 0

    async def report(
        sender: Sender, state: MicrobatchState, direction: Any, took: tuple[float, float] | None, **more: Any
    ) -> None:
        nonlocal lies
        if PEER.get() == "host-0" and took is not None:
            took, lies = (sum(took), 1e-9), lies + 1
        await honest(sender, state, direction, took, **more)

    monkeypatch.setattr(Sender, "_report", report)
    batch = {"microbatch_size": 1, "microbatches_per_step": 48}
    shape = {**LEARNS, "hosts": 3, "run": {"steps": 3}, "split": {"stages": 1}, "batch": batch}
    swarm = SimSwarm(tmp_path, links=Links.parse({"default": {"latency_ms": 20}}), **shape)
    run_world(swarm.run())
    assert lies > 24
    routes = [one["route"][0] for record in swarm.history()[1:] for one in record["committed"]]
    share = Counter(routes)[swarm.peers["host-0"].endpoint.peer] / len(routes)
    assert 0.2 < share <= 1.5 / 3, "it had 97 % where its word was enough"


# --- wrong gradients of its input ------------------------------------------------------------------------------------


def hands_on(name: str, times: float, monkeypatch: pytest.MonkeyPatch, *, since: int) -> set[MicrobatchId]:
    """Have a host hand back other gradients than it computed, from a step on; of which microbatches."""
    honest, lies = StageCompute._contributed, set[MicrobatchId]()

    def contributed(compute: StageCompute, material: Material, *about: Any) -> Contributed:
        result = honest(compute, material, *about)
        if PEER.get() != name or material.work.step < since or result.gradient is None:
            return result
        lies.add(material.work.microbatch)
        wrong = torch.frombuffer(bytearray(result.gradient), dtype=torch.float32) * times
        return replace(result, gradient=memoryview(wrong.numpy()).cast("B"))

    monkeypatch.setattr(StageCompute, "_contributed", contributed)
    return lies


def test_replica_that_hands_on_500_fold_gradients_corrupts_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies = hands_on("host-0", 500, monkeypatch, since=8)
    swarm = SimSwarm(tmp_path, **LEARNS)
    run_world(swarm.run())
    assert len(lies) >= 6, "the gates have seen enough by then"
    told = {event.microbatch: event.reason for event in swarm.events(JourneySetAside)}
    assert told.keys() == lies
    assert all("64 times the median" in reason for reason in told.values())
    peers = [peer.endpoint.peer for peer in swarm.peers.values()]
    assert not any(peer in reason for reason in told.values() for peer in peers), "nobody"
    assert all(move.refused for move in swarm.events(HopMoved) if move.microbatch in lies)
    committed = {MicrobatchId(*one["microbatch"]) for record in swarm.history() for one in record["committed"]}
    assert not committed & lies
    assert losses(swarm)[-1] < 0.8 * losses(swarm)[0]


def test_replica_that_hands_on_50_fold_gradients_is_named_and_nobody_else_where_influence_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies = hands_on("host-0", 50, monkeypatch, since=3)
    swarm = SimSwarm(tmp_path, **LEARNS | {"optimizer": LEARNS["optimizer"] | {"influence": 2.0}})
    run_world(swarm.run())
    assert len(lies) >= 6
    liar = swarm.peers["host-0"].endpoint.peer
    assert {event.peer for event in swarm.events(GradientsFarOut)} == {liar}
    assert not swarm.events(JourneySetAside)
    committed = {MicrobatchId(*one["microbatch"]) for record in swarm.history() for one in record["committed"]}
    assert lies <= committed, "they were scaled down, and count"
    before, *usual = ({p: tuple(v) for p, v in r["usual"].items()} for r in swarm.history()[1:])
    for after in usual:
        for part, lengths in after.items():
            assert all(was / 2 <= now <= was * 2 for was, now in zip(before[part], lengths, strict=True))
        before = after


# --- a receipt for another tensor than came ---------------------------------------------------------------------------


def test_replica_that_claims_another_input_than_it_got_is_named_and_its_work_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lies = Sender.report_backward, set[MicrobatchId]()

    async def report(sender: Sender, state: MicrobatchState, took: tuple[float, float] | None) -> None:
        if PEER.get() == "host-0":
            lies.add(state.work.microbatch)
            state.hashes.input = Sealed(bytes(31) + b"1", state.hashes.input.signature)
        await honest(sender, state, took)

    monkeypatch.setattr(Sender, "report_backward", report)
    swarm = SimSwarm(tmp_path, **LEARNS)
    run_world(swarm.run())
    assert lies
    liar = swarm.peers["host-0"].endpoint.peer
    named = swarm.events(HopDiffers)
    assert {event.peer for event in named} == {liar}
    assert lies <= {event.microbatch for event in named}
    assert not swarm.events(JourneySetAside)
    rows = [one for record in swarm.history()[1:] for one in record["committed"]]
    assert lies <= {MicrobatchId(*one["microbatch"]) for one in rows}, "others have computed them"
    assert all(liar not in one["route"] for one in rows)
    assert losses(swarm)[-1] < 0.9 * losses(swarm)[0]


# --- a host that gets slower and slower ------------------------------------------------------------------------------


def test_host_that_delays_each_forward_longer_than_the_last_is_waited_for_no_longer(tmp_path: Path) -> None:
    swarm = SimSwarm(tmp_path, **LEARNS | {"hosts": 3, "split": {"stages": 1}, "run": {"steps": 24}})
    with lying(Liar("slower", mine=lambda: PEER.get() == "host-0")) as lie:
        run_world(swarm.run())
    took = [event.seconds for event in swarm.peers["bootstrap"].events.of(StepClosed)]
    assert lie.kept["delay"] > 1, "it delayed nothing"
    assert max(took) < 15
    assert median(took[-8:]) < 2 * median(took[:4])


# --- founding --------------------------------------------------------------------------------------------------------


class Crowd(SimSwarm):
    """Hosts of which only the first answer when the run is founded; the honest ones come some seconds later."""

    async def open(self) -> None:
        await super().open()
        for number in range(2):
            await self._add(f"honest-{number}", "stage", 300 + number, self.founder)

    def _start(self, peer: LocalPeer, *, may_fail: bool = False) -> None:
        if peer.settings.name.startswith("honest"):
            self._group.create_task(self._later(peer))
        else:
            super()._start(peer, may_fail=may_fail)

    async def _later(self, peer: LocalPeer) -> None:
        await self.clocks["bootstrap"].sleep(10.0)
        super()._start(peer)


@pytest.mark.parametrize("late_s", [1e6, 130.0])
def test_founder_replaces_sybils_that_never_accept_and_the_late_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    honest, asked = Following.install, Counter[str]()

    async def install(following: Following, record: CloseRecord, donor: PeerId) -> None:
        if (name := PEER.get()).startswith("host"):
            asked[name] += 1
            await LoopClock().sleep(late_s)
        await honest(following, record, donor)

    monkeypatch.setattr(Following, "install", install)
    shape = {**LEARNS, "hosts": 2, "trainers": 1, "split": {"stages": 1}}
    swarm = Crowd(tmp_path, links=Links.parse({"default": {"latency_ms": 20}}), **shape)
    run_world(swarm.run())
    assert set(asked) == {"host-0", "host-1"}, "the sybils were to be in the founding record"
    named = {member["name"] for member in swarm.history()[0]["roster"]}
    assert named == {"bootstrap", "trainer-0", "honest-0", "honest-1"}
    assert len(losses(swarm)) == 10


def test_peer_that_accepted_a_founding_record_and_was_replaced_joins_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, instead, accepted = Following.install, Founder._instead, list[str]()

    async def install(following: Following, record: CloseRecord, donor: PeerId) -> None:
        if PEER.get() == "host-1":
            await LoopClock().sleep(1e6)
        await honest(following, record, donor)
        accepted.append(PEER.get())

    async def without_both(founder: Founder, late: Collection[PeerId], since: float) -> Sequence[Candidate] | None:
        return await instead(founder, [*late, swarm.peers["host-0"].endpoint.peer], since)

    monkeypatch.setattr(Following, "install", install)
    monkeypatch.setattr(Founder, "_instead", without_both)
    shape = {**LEARNS, "hosts": 2, "trainers": 1, "split": {"stages": 1}, "run": {"steps": 30}}
    swarm = Crowd(tmp_path, links=Links.parse({"default": {"latency_ms": 20}}), **shape)
    run_world(swarm.run())
    assert accepted.index("host-0") < accepted.index("honest-0")
    rosters = [{member["name"] for member in record["roster"]} for record in swarm.history()]
    assert "host-0" not in rosters[0]
    assert "host-0" in rosters[-2]
    assert swarm.peers["host-0"].outcome == DONE


# --- a reducer that gives one replica another mean -------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [4, 6])
def test_reducer_that_gives_another_replica_another_mean_gets_nobody_left_out(
    hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom it deceives would look like who lies: the part's next rounds are signed, and each has an idle reducer."""
    chunk, forged = AllReduce._chunk, Counter[PeerId]()

    async def forge(service: AllReduce, caller: PeerId, request: ReduceRequest, incoming: Incoming) -> Answer[Empty]:
        answer = await chunk(service, caller, request, incoming)
        if PEER.get() != "host-0" or request.step != 3 or caller != min(forged, default=caller):
            return answer
        forged[caller] += 1
        return Answer(answer.body, bytes([answer.payload[0] ^ 1, *answer.payload[1:]]))

    monkeypatch.setattr(AllReduce, "_chunk", forge)
    swarm = SimSwarm(tmp_path, hosts=hosts, trainers=2, run={"steps": 5})
    run_world(swarm.run())
    (victim,) = forged
    assert {event.digests.keys() >= {victim} for event in swarm.events(DigestMismatch) if event.step == 3} == {True}
    assert {peer.outcome for peer in swarm.peers.values()} == {DONE}
    assert not any(record["absent"] for record in swarm.history())
