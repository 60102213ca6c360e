"""A member while its leader asks in the wrong order, twice, too late, or lies."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from swarm.consensus.changes import Changes, Departure, departure_bytes
from swarm.consensus.records import CloseRecord, Decision, acceptance_bytes
from swarm.consensus.slowness import Barred, Slow
from swarm.consensus.trials import Trial
from swarm.errors import Refused, RoundFailed, RunEnded, StateError, Superseded, Violation, WrongStep
from swarm.ids import PeerId
from swarm.step.member.open_step import MAX_HEARD, SETTLE_ROUNDS
from swarm.step.messages import Propose
from tests.harness.expect import eventually
from tests.harness.rigs.step import (
    COMMITTED,
    GENESIS,
    ROSTER,
    RULES,
    RUN,
    A,
    B,
    CountedPart,
    MemberBench,
    T,
    apply,
    brought_to,
    decide,
    listed,
    microbatch,
    prepare,
    reconcile,
    record,
    sign,
    stop,
    weights_digest,
)

STRANGER = PeerId("X")


async def test_member_that_waited_for_more_than_it_may_tell_of_names_so_many() -> None:
    bench = MemberBench()
    bench.average.waited = {PeerId(f"P{number:04}"): 9.0 for number in range(MAX_HEARD + 1)}
    assert len((await bench.ask(reconcile())).waited) == MAX_HEARD


@pytest.mark.parametrize("me", [A, B, T])
async def test_member_asked_everything_twice_answers_the_same_and_does_it_once(me: PeerId) -> None:
    bench = MemberBench(me)
    for body in (reconcile(), apply(), Propose(record=record()), decide(record())):
        first, second = await bench.ask(body), await bench.ask(body)
        assert first == second
    assert (len(bench.average.begun), bench.part.prepared, len(bench.part.swapped)) == (1, 1, 1)
    assert bench.part.fed, "whatever its mean is"


@pytest.mark.parametrize(
    ("stage", "body", "words"),
    [
        ("", apply(), "nothing was averaged"),
        ("", Propose(record=record()), "nothing was averaged and applied"),
        ("", decide(record()), "not accepted here"),
        ("reconcile", Propose(record=record()), "nothing was averaged and applied"),
        ("reconcile", decide(record()), "not accepted here"),
        ("apply", decide(record()), "not accepted here"),
        ("propose", Propose(record=record(cursors={})), "another record"),
        ("propose", decide(record(grad_norm=3.0)), "not accepted here"),
    ],
)
async def test_member_asked_out_of_order_or_otherwise_refuses_and_goes_on(stage: str, body: Any, words: str) -> None:
    bench = await brought_to(stage) if stage else MemberBench()
    with pytest.raises(Refused, match=words):
        await bench.ask(body)
    assert bench.part.swapped == []
    for later in (reconcile(), apply(), Propose(record=record()), decide(record())):
        await bench.ask(later)
    assert bench.position.open_step == 2


@pytest.mark.parametrize(
    ("stage", "body", "words"),
    [
        ("reconcile", apply(lr=0.25), "whose rate is 0.5"),
        ("reconcile", apply(clip=1.5), "clip factor 1.5"),
        ("reconcile", apply(clip=1e-30), "clip factor of 1e-30 where the parts' norms give 1.0"),
        ("reconcile", apply(clip=0.0), "clip factor 0.0"),
        ("reconcile", apply(stage_0=0.26), "squared norm of 0.26"),
        ("reconcile", apply(stage_1=4.0), "not those of the run's parts"),
        ("reconcile", apply().model_copy(update={"sq_norms": {"stage-0": 0.25}}), "not those of the run's parts"),
        ("reconcile", apply().model_copy(update={"guarded": {A: {B: 4}}}), "left out other sums than it did"),
        ("", reconcile(committed=COMMITTED[:1]), "1 microbatches"),
        ("", reconcile(committed=COMMITTED[::-1]), "2 microbatches"),
        ("", reconcile(committed=(COMMITTED[0], COMMITTED[0])), "1 of them different"),
        ("", reconcile(committed=(COMMITTED[0], COMMITTED[1].model_copy(update={"route": ()}))), "0 replicas"),
        ("", reconcile(committed=(COMMITTED[0], COMMITTED[1].model_copy(update={"tokens": 33}))), "33 target tokens"),
    ],
)
async def test_member_does_not_take_a_leaders_word(stage: str, body: Any, words: str) -> None:
    bench = await brought_to(stage) if stage else MemberBench()
    with pytest.raises(Violation, match=words):
        await bench.ask(body)
    for later in (reconcile(), apply(), Propose(record=record()), decide(record())):
        await bench.ask(later)
    assert bench.position.open_step == 2


@pytest.mark.parametrize("body", [reconcile(), apply(), Propose(record=record())])
@pytest.mark.parametrize("caller", [STRANGER, *ROSTER.succession(1)[1:]])
async def test_member_asked_by_one_who_does_not_lead_refuses(body: Any, caller: PeerId) -> None:
    bench = await brought_to("propose")
    with pytest.raises(Refused, match="leads step 1 in term 0"):
        await bench.ask(body, caller=caller)


async def test_member_takes_the_decision_with_its_proof_from_anybody() -> None:
    bench = await brought_to("propose")
    await bench.ask(decide(record()), caller=STRANGER)
    assert (len(bench.part.swapped), bench.position.open_step) == (1, 2)


async def test_member_that_bounds_microbatches_lets_nobody_say_otherwise_what_is_usual_here() -> None:
    bench = MemberBench(rules=dataclasses.replace(RULES, influence=2.0))
    bench.part.usual = (1.0, 0.5)
    assert (await bench.ask(reconcile())).lengths == (1.0, 0.5)
    for lie in ({}, {A: (2.0, 0.5)}):
        with pytest.raises(Violation, match="other lengths of microbatches"):
            await bench.ask(apply().model_copy(update={"lengths": lie}))
    told = {A: (1.0, 0.5), B: (4.0, 4.0), T: (3.0, 0.0)}
    await bench.ask(apply().model_copy(update={"lengths": told}))
    usual = {"stage-0": (1.0, 0.5), "ends": (3.0, 0.0)}
    for changes, words in (
        ({"lengths": told}, "not what its lengths give"),
        ({"lengths": told, "usual": usual | {"ends": (6.0, 0.0)}}, "not what its lengths give"),
        ({"lengths": told | {PeerId("X"): (1.0, 1.0)}, "usual": usual}, "scalars|where there are none"),
        ({"lengths": {A: (1.0, 0.5)}, "usual": {"stage-0": (1.0, 0.5)}}, "scalars"),
    ):
        with pytest.raises(Refused, match=words):
            await bench.ask(Propose(record=record(**changes)))
    await bench.ask(Propose(record=record(lengths=told, usual=usual)))


async def test_member_that_tests_trainers_lets_nobody_say_otherwise_what_it_said_of_them() -> None:
    bench = MemberBench(rules=dataclasses.replace(RULES, tries_trainers=True))
    bench.part.said = (5, -5, 7)
    assert (await bench.ask(reconcile())).words == (5, -5, 7)
    for lie in ({}, {A: (5, 5, 7)}):
        with pytest.raises(Violation, match="something else of trainers"):
            await bench.ask(apply().model_copy(update={"words": lie}))
    await bench.ask(apply().model_copy(update={"words": {A: (5, -5, 7)}}))
    for changes, words in (
        ({"words": {A: (5, -5, 7)}}, "those that cannot have said them"),  # it holds the work of one trainer
        ({"trials": {T: Trial(times=1, until=9)}}, "what its words and the record before give|scalars"),
        ({}, "scalars"),
    ):
        with pytest.raises(Refused, match=words):
            await bench.ask(Propose(record=record(**changes)))


async def test_member_asked_for_other_scalars_prepares_those_and_accepts_no_others() -> None:
    bench = await brought_to("apply")
    other = apply(ends=4.0)
    answer = await bench.ask(other)
    assert (answer.digest, bench.part.prepared) == (weights_digest("stage-0", 1, 0.5, other.clip), 2)
    with pytest.raises(Refused, match="scalars"):
        await bench.ask(Propose(record=record()))
    digests = {name: weights_digest(name, 1, 0.5, other.clip) for name in ("ends", "stage-0")}
    clipped = record(
        clip=other.clip, digests=digests, norms=other.sq_norms, grad_norm=RULES.clipped(other.sq_norms).norm
    )
    await bench.ask(Propose(record=clipped))
    await bench.ask(decide(clipped))
    assert bench.part.swapped == [answer.digest]


async def test_member_whose_part_is_far_out_caps_it_and_accepts_only_a_record_that_says_so() -> None:
    bench = MemberBench()
    bench.average.squared_norm = 1e60
    await bench.ask(reconcile())
    far = apply(stage_0=1e60, ends=4.0)
    await bench.ask(far)
    clip, cap = far.clip, 2.0 / 1e30  # the norm of the ends, which is the lower of two
    digests = {"ends": weights_digest("ends", 1, 0.5, clip), "stage-0": weights_digest("stage-0", 1, 0.5, clip * cap)}
    said = {"clip": clip, "digests": digests, "norms": far.sq_norms, "grad_norm": RULES.clipped(far.sq_norms).norm}
    for caps in ({}, {"stage-0": 0.5}, {"stage-0": cap, "ends": 0.5}):
        with pytest.raises(Refused, match="caps"):
            await bench.ask(Propose(record=record(**said, caps=caps)))
    capped = record(**said, caps={"stage-0": cap})
    await bench.ask(Propose(record=capped))
    await bench.ask(decide(capped))
    assert bench.part.swapped == [digests["stage-0"]]


LIES: list[tuple[dict[str, Any], str]] = [
    ({"committed": COMMITTED[:1], "tokens": 10, "loss_sum": 1.5}, "not those that were averaged"),
    ({"tokens": 22}, "sums of its microbatches"),
    ({"loss_sum": 0.5}, "sums of its microbatches"),
    ({"lr": 0.25}, "scalars"),
    ({"clip": 0.5}, "scalars"),
    ({"grad_norm": 9.0}, "scalars"),
    ({"norms": {"ends": 4.0, "stage-0": 0.25}}, "scalars"),
    ({"guarded": {B: {A: 4}}}, "scalars"),
    ({"norms": {"ends": 0.25}}, "scalars"),
    ({"digests": {"stage-0": "f" * 64}}, "digest of stage-0"),
    ({"digests": {}}, "digest of stage-0"),
    ({"previous": "f" * 64}, "follows"),
    ({"run": "cd" * 32}, "another run"),
    ({"roster": ROSTER.members[:2]}, "not what the requests"),
    ({"roster": ROSTER.members[1:]}, "not what the requests"),
    ({"ended": True}, "and else goes on"),
]


@pytest.mark.parametrize(("changes", "words"), LIES, ids=[next(iter(changes)) for changes, _ in LIES])
async def test_member_accepts_no_record_that_differs_from_what_it_computed(changes: dict[str, Any], words: str) -> None:
    bench = await brought_to("apply")
    with pytest.raises(Refused, match=words):
        await bench.ask(Propose(record=record(**changes)))
    await bench.ask(Propose(record=record()))


def everybody_leaves() -> Changes:
    return Changes(
        leaves=tuple(
            Departure(
                step=1,
                peer=peer,
                ends=True,
                signature=sign(peer, departure_bytes(RUN, 1, GENESIS.hash(), peer, ends=True)),
            )
            for peer in ROSTER.peers
        )
    )


async def test_member_whose_run_is_ended_swaps_stays_in_the_roster_and_is_done() -> None:
    bench, closed = await brought_to("apply"), record(ended=True)
    await bench.ask(Propose(record=closed, changes=everybody_leaves()))
    assert not bench.position.over
    await bench.ask(decide(closed))
    assert (bench.position.over, bench.position.departed, bench.position.is_member) == (True, False, True)
    assert bench.part.swapped == [closed.digests["stage-0"]]


async def test_member_has_the_end_that_a_dead_leader_proposed_proposed_again() -> None:
    bench, closed = await brought_to("apply"), record(ended=True)
    await bench.ask(Propose(record=closed, changes=everybody_leaves()))
    promise = await bench.ask(prepare(term=1))
    assert promise.vote.record == closed
    await bench.ask(Propose(record=closed, changes=promise.vote.changes, term=1))
    await bench.ask(decide(closed, term=1))
    assert (bench.position.over, bench.part.swapped) == (True, [closed.digests["stage-0"]])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "and else goes on"),
        ({"ended": True, "lineage": 1}, "not provisionally"),
        ({"ended": True, "roster": ()}, "not what the requests"),
    ],
)
async def test_member_of_which_all_want_the_end_accepts_nothing_but_the_end_that_a_majority_decides(
    fields: dict[str, Any], words: str
) -> None:
    bench = await brought_to("apply")
    bench.gone.update(dict.fromkeys((B, T), "silent") if fields.get("lineage") else {})
    with pytest.raises(Refused, match=words):
        await bench.ask(Propose(record=record(**fields), changes=everybody_leaves()))


async def test_member_that_trains_accepts_no_other_cursor_than_its_own() -> None:
    bench = await brought_to("apply", me=T)
    with pytest.raises(Refused, match="cursor"):
        await bench.ask(Propose(record=record(cursors={T: (0, 6)})))


FORGED = [bytes(64), decide(record(grad_norm=3.0)).acceptances[B], decide(record(), term=1).acceptances[B]]


@pytest.mark.parametrize("forged", FORGED, ids=["zeros", "another record's", "another term's"])
async def test_member_swaps_only_with_a_majoritys_signatures(forged: bytes) -> None:
    bench = await brought_to("propose")
    with pytest.raises(Refused, match="1 of 3 voters accepted it: that is no majority"):
        await bench.ask(decide(record(), signers=[A], B=forged, X=sign(STRANGER, acceptance_bytes(record()))))
    assert bench.part.swapped == []
    await bench.ask(decide(record(), signers=[A, B]))
    assert bench.position.open_step == 2


async def test_member_whose_sum_differs_has_it_settled_before_it_averages() -> None:
    bench = MemberBench()
    bench.part.microbatches = frozenset({microbatch(5)})
    assert (await bench.ask(reconcile())).failure == ""
    assert bench.settled == [{microbatch(0): (A,)}]
    assert bench.part.microbatches == {microbatch(0)}


async def test_member_that_does_not_hold_what_counts_says_what_it_lacks_and_can_be_asked_again() -> None:
    bench = MemberBench()
    bench.part.microbatches, bench.lacks = frozenset({microbatch(5)}), Refused("its trainer is gone")
    for _ in range(2):
        answer = await bench.ask(reconcile())
        assert (answer.culprit, answer.missing) == (A, (microbatch(0),))
        assert answer.failure == "it does not hold what counts: its trainer is gone"
    assert (bench.average.begun, len(bench.settled)) == ([], 1)
    bench.lacks = None
    assert (await bench.ask(reconcile(attempt=2))).failure == ""


async def test_member_whose_sum_never_holds_still_gives_up_with_a_reason() -> None:
    bench = MemberBench()
    bench.part.microbatches = frozenset()

    bench.holder.part = CountedPart("stage-0", frozenset({microbatch(0), microbatch(9)}))
    answer = await bench.ask(reconcile())
    assert "still changes after" in answer.failure
    assert (len(bench.settled), bench.average.begun) == (SETTLE_ROUNDS, [])


# --- what goes wrong in the middle -------------------------------------------------------------------------------


async def cancel_asking(bench: MemberBench, body: Any) -> None:
    """Ask, and hang up while the member is at it."""
    asking = asyncio.create_task(bench.ask(body))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asking.done()
    await stop(asking)


async def test_member_that_fetches_what_it_lacks_begins_anew_with_other_routes_and_once_it_averages_does_not() -> None:
    bench = MemberBench(T)
    bench.part.microbatches, bench.slow_settling = frozenset(), asyncio.Event()
    elsewhere = tuple(one.model_copy(update={"route": (A,)}) for one in COMMITTED)
    asked = [asyncio.create_task(bench.ask(reconcile()))]
    await eventually(lambda: len(bench.settled) == 1)
    asked.append(asyncio.create_task(bench.ask(reconcile(committed=elsewhere))))
    await eventually(lambda: len(bench.settled) == 2)
    assert bench.settled == [{microbatch(0): (A,), microbatch(1): (host,)} for host in (B, A)]
    bench.average.gate = asyncio.Event()
    bench.slow_settling.set()
    await eventually(lambda: bench.average.begun)
    late = asyncio.create_task(bench.ask(reconcile()))
    bench.average.gate.set()
    assert (await late).failure == ""
    assert (len(bench.average.begun), bench.average.cancelled) == (1, 0)
    with pytest.raises(Superseded):
        await asked[0]
    assert (await asked[1]).failure == ""


async def test_member_whose_round_failed_gives_the_reason_every_time() -> None:
    bench = MemberBench()
    bench.average.error = RoundFailed("went silent", peer=B)
    for _ in range(2):
        answer = await bench.ask(reconcile())
        assert (answer.failure, answer.culprit, answer.digest) == ("went silent", B, "")
    with pytest.raises(Refused, match="nothing was averaged"):
        await bench.ask(apply())
    assert len(bench.average.begun) == 1
    bench.average.error = None
    assert (await bench.ask(reconcile(attempt=2))).failure == ""
    await bench.ask(apply())


async def test_member_closed_while_averaging_leaves_nothing_running() -> None:
    bench = MemberBench()
    bench.average.gate = asyncio.Event()
    await cancel_asking(bench, reconcile())
    await bench.member.close()
    await bench.member.close()
    assert bench.average.cancelled == 1


async def test_member_closed_while_it_closes_a_step_leaves_nothing_running() -> None:
    bench = await brought_to("propose")
    bench.device.gate = asyncio.Event()
    await cancel_asking(bench, decide(record()))
    await bench.member.close()
    bench.device.gate.set()
    assert (bench.position.open_step, bench.history.head) == (1, GENESIS)


async def test_member_opens_the_next_step_only_when_its_surroundings_are_ready() -> None:
    seen: list[int] = []
    gate = asyncio.Event()

    async def decided(closed: Decision) -> None:
        await gate.wait()
        seen.append(bench.position.open_step)

    bench = await brought_to("propose", decided=decided)
    deciding = asyncio.create_task(bench.ask(decide(record())))
    await eventually(lambda: bench.part.swapped)
    waiting = asyncio.create_task(bench.position.wait_open(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    await deciding
    await waiting
    assert seen == [1]


async def test_member_tells_of_a_closed_step_the_digest_that_it_computed_itself() -> None:
    told: list[str] = []

    async def decided(closed: Decision) -> None:
        told.append(closed.digest)

    bench = await brought_to("apply", decided=decided)
    computed = (await bench.ask(apply())).digest
    await bench.ask(Propose(record=record()))
    await bench.ask(decide(record()))
    assert told == [computed]
    assert computed


async def test_member_whose_disk_stalls_answers_meanwhile_and_then_opens_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, gate = await brought_to("propose"), asyncio.Event()
    add = bench.history.add

    async def slow(*said: Any) -> None:
        await gate.wait()
        await add(*said)

    monkeypatch.setattr(bench.history, "add", slow)
    deciding = asyncio.create_task(bench.ask(decide(record())))
    await eventually(lambda: bench.part.swapped)
    assert (await bench.ask(prepare(term=1))).vote.record == record()
    with pytest.raises(WrongStep, match="closed meanwhile"):
        await bench.ask(apply(clip=0.5, term=1))
    assert bench.position.open_step == 1
    gate.set()
    await deciding
    assert (bench.position.open_step, bench.history.head, len(bench.part.swapped)) == (2, record(), 1)


async def test_member_that_cannot_keep_a_decided_record_ends_with_the_reason() -> None:
    async def decided(closed: Decision) -> None:
        raise OSError("no space left on device")

    bench = await brought_to("propose", decided=decided)
    waiting = asyncio.create_task(bench.position.wait_open(2))
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="no space"):
        await bench.ask(decide(record()))
    with pytest.raises(RunEnded, match="step 1 is decided and could not be closed here: OSError: no space"):
        await waiting


# --- the genesis -------------------------------------------------------------------------------------------------


def founding() -> Propose:
    return Propose(record=GENESIS)


async def test_member_whose_install_fails_accepts_nothing_and_can_be_asked_again() -> None:
    attempts: list[PeerId] = []

    async def install(genesis: CloseRecord, donor: PeerId) -> None:
        attempts.append(donor)
        if len(attempts) == 1:
            raise StateError("the digest does not match")

    bench = MemberBench(founded=False, install=install)
    with pytest.raises(StateError):
        await bench.ask(founding())
    with pytest.raises(Refused, match="not accepted here"):
        await bench.ask(decide(GENESIS))
    await bench.ask(founding())
    await bench.ask(founding())
    await bench.ask(decide(GENESIS))
    assert attempts == [T, T]
    assert (bench.position.open_step, bench.part.swapped) == (1, [])


async def test_member_whose_founder_hangs_up_while_it_installs_can_be_asked_again() -> None:
    gate = asyncio.Event()

    async def install(genesis: CloseRecord, donor: PeerId) -> None:
        await gate.wait()

    bench = MemberBench(founded=False, install=install)
    await cancel_asking(bench, founding())
    gate.set()
    await bench.ask(founding())
    await bench.ask(decide(GENESIS))
    assert bench.history.head == GENESIS


async def test_member_of_a_run_that_goes_on_with_a_checkpoint_takes_no_other_beginning() -> None:
    rules = dataclasses.replace(RULES, begins_after=(5, "c" * 64))
    begins = GENESIS.model_copy(update={"step": 5, "previous": "c" * 64})
    for other in ({"previous": "d" * 64}, {"step": 4}, {"step": 0, "previous": GENESIS.previous}):
        bench = MemberBench(founded=False, rules=rules)
        with pytest.raises(Refused, match="goes on with another's checkpoint of step 5"):
            await bench.ask(Propose(record=begins.model_copy(update=other)))
    for known in (begins, begins.model_copy(update={"step": 6, "previous": "e" * 64})):  # it was resumed later
        bench = MemberBench(founded=False, rules=rules)
        await bench.ask(Propose(record=known))


async def test_member_begins_no_run_with_a_peer_that_is_barred_from_it() -> None:
    late = GENESIS.model_copy(update={"step": 5, "previous": "c" * 64})
    barred = {A: Barred(times=1, until=7)}
    for begins, why in (
        (GENESIS.model_copy(update={"barred": barred}), "a run that has not begun"),
        (GENESIS.model_copy(update={"trials": {A: Trial(times=1, until=7)}}), "a run that has not begun"),
        (late.model_copy(update={"barred": barred}), f"{A} is to take part: .* barred until step 7"),
    ):
        with pytest.raises(Refused, match=why):
            await MemberBench(founded=False).ask(Propose(record=begins))
    for update in ({"barred": {STRANGER: Barred(times=1, until=7)}}, {"step": 6, "barred": barred}):
        await MemberBench(founded=False).ask(Propose(record=late.model_copy(update=update)))


@pytest.mark.parametrize(
    "more",
    [
        {"lineage": 5},
        {"returns": 1 << 52},
        {"ended": True},
        {"absent": (B,)},
        {"slow": {A: Slow(said_by=(B, T, B, T))}},
        {"late": {A: (1, 1 << 40)}},
        {"paces": {A: 1}},
        {"passed": {"stage-0": 1}},
        {"tokens": 1},
        {"lr": 1.0},
        {"digests": {"ends": "1" * 64}},
        {"digests": {**GENESIS.digests, "stage-1": "1" * 64}},
        {"cursors": {}},
        {"cursors": {T: (0, 0), **{f"gone{number}": (0, 1) for number in range(RULES.max_members)}}},
        {"roster": (*ROSTER.members, listed("Rest", "bootstrap", None, worked=5))},
        {"roster": (*ROSTER.members[:-1], ROSTER.members[-1].model_copy(update={"since": 1 << 40}))},
        {"roster": (*ROSTER.members, listed(A, part=None))},
    ],
)
@pytest.mark.parametrize("step", [0, 5])
async def test_member_begins_no_run_with_a_record_that_says_what_no_step_has_shown(
    more: dict[str, Any], step: int
) -> None:
    begins = GENESIS if not step else GENESIS.model_copy(update={"step": step, "previous": "c" * 64})
    with pytest.raises(Refused, match="the record"):
        await MemberBench(founded=False).ask(Propose(record=begins.model_copy(update=more)))


async def test_member_takes_one_genesis_from_the_founder_only() -> None:
    bench = MemberBench(founded=False)
    for caller in (A, B, STRANGER):
        with pytest.raises(Refused, match="T founds this run"):
            await bench.ask(founding(), caller=caller)
    without = GENESIS.model_copy(update={"roster": ROSTER.members[1:]})
    with pytest.raises(Refused, match="leaves this member out"):
        await bench.ask(Propose(record=without))
    await bench.ask(founding())
    with pytest.raises(Refused, match="another record"):
        await bench.ask(Propose(record=GENESIS.model_copy(update={"cursors": {T: (0, 8)}})))
