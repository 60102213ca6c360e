"""A peer that joins, and donors that lie, die or fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.consensus.copies import KEPT_UPDATES
from swarm.consensus.records import Contribution, Decision
from swarm.errors import PeerError, StateError, Unreachable, Violation, WrongStep
from swarm.membership.observer import take_update
from swarm.membership.observer_sources import PATIENCE_S
from swarm.network.protocols import Answer
from swarm.optim.outer import Outer, OuterNesterov
from swarm.schema import Message
from swarm.state.snapshot import digest
from swarm.step.observe_messages import NEXT, STANDING, START, Decided
from tests.harness.rigs.membership import (
    CONTACT,
    DONOR,
    JOINER,
    OBSERVED,
    OTHER,
    STAGE,
    ObserverBench,
    Run,
    fresh_part,
    microbatch,
    signed,
    turns,
)

Twist = Callable[[Message, Answer], Answer]


async def opened(steps: int = 2) -> ObserverBench:
    """A bench at which so many steps are closed."""
    bench = ObserverBench(Run(steps))
    await bench.open()
    return bench


async def following(steps: int = 2) -> tuple[ObserverBench, Any, Any]:
    """A bench with an observer that has the state after ``steps``."""
    bench = await opened(steps)
    observer = bench.observer()
    return bench, observer, await bench.installed(observer)


def told(decision: Decision) -> Decided:
    return Decided.of(decision)


async def test_observer_holds_bit_for_bit_what_the_members_hold_after_every_step() -> None:
    bench, observer, part = await following()
    for step in range(3, 8):
        await bench.close()
        assert (await observer.follow()).step == step
        assert digest(part.snapshot()) == digest(bench.run.part.snapshot())
    assert bench.told == [2, 3, 4, 5, 6, 7]


async def test_observer_of_a_step_in_which_its_part_was_capped_holds_what_the_members_hold() -> None:
    bench, observer, part = await following()
    assert (await bench.close(cap=0.25)).record.caps == {STAGE: 0.25}
    assert (await observer.follow()).step == 3
    assert digest(part.snapshot()) == digest(bench.run.part.snapshot())


def test_update_of_zeros_is_a_step_where_the_record_has_tokens_for_the_part_and_none_elsewhere() -> None:
    head, row = Run(1).head, Contribution(microbatch=microbatch(0), tokens=8, loss_sum=1.0, route=(DONOR, OTHER))
    zeros, found = torch.zeros(fresh_part().layout.elements), list[str]()
    for committed in ((row,), ()):
        scalars = {"lr": head.lr, "clip": head.clip, "step": 1, "fed": bool(committed)}
        digests = head.digests | {STAGE: fresh_part().prepare(zeros, **scalars)}
        part = fresh_part()
        take_update(part, head.model_copy(update={"committed": committed, "digests": digests}), zeros)
        found.append(digest(part.snapshot()))
    assert found[1] == digest(fresh_part().snapshot()) != found[0]


async def test_observer_of_steps_that_average_a_fragment_gets_its_bytes_alone() -> None:
    bench = ObserverBench(Run(2, Outer(OuterNesterov(), fragments=4)))
    await bench.open()
    observer = bench.observer()
    part = await bench.installed(observer)
    elements = []
    for step in range(3, 7):
        mean = (await bench.close()).mean
        assert mean is not None
        elements.append(len(mean))
        assert (await observer.follow()).step == step
        assert digest(part.snapshot()) == digest(bench.run.part.snapshot())
    assert sum(elements) == part.layout.elements
    assert max(elements) < part.layout.elements / 2
    waiting = asyncio.create_task(observer.ahead())
    mean = (await bench.close()).mean
    assert mean is not None
    assert torch.equal(await waiting, mean)


# --- lies --------------------------------------------------------------------------------------------------------


def with_record(**changes: Any) -> Twist:
    """Another record, which all signed that a liar can make sign."""

    def twist(body: Message, answer: Answer) -> Answer:
        assert isinstance(answer.body, Decided)
        changed = answer.body.record.model_copy(update=changes)
        return Answer(told(signed(changed)), answer.payload)

    return twist


def unsigned(by: str | None) -> Twist:
    """The acceptance of one member is missing, or that of the step before."""

    def twist(body: Message, answer: Answer) -> Answer:
        assert isinstance(answer.body, Decided)
        kept = {peer: made for peer, made in answer.body.acceptances.items() if peer != by}
        return Answer(Decided(record=answer.body.record, acceptances=kept if by else {}), answer.payload)

    return twist


def with_payload(change: Callable[[torch.Tensor], torch.Tensor]) -> Twist:
    def twist(body: Message, answer: Answer) -> Answer:
        mean = torch.frombuffer(bytearray(answer.payload), dtype=torch.float32)
        return Answer(answer.body, change(mean).numpy().tobytes())

    return twist


def poisoned(value: float) -> Twist:
    def poison(mean: torch.Tensor) -> torch.Tensor:
        mean[7] = value
        return mean

    return with_payload(poison)


LIES: list[tuple[str, Twist, type[Exception], str]] = [
    ("one acceptance missing", unsigned(OTHER), Violation, "acceptance of E is missing"),
    ("all acceptances missing", unsigned(None), Violation, "missing or forged"),
    ("a record that follows another", with_record(previous="f" * 64), Violation, "does not follow"),
    ("the record of another step", with_record(step=9), Violation, "does not follow"),
    ("a record of another run", with_record(run="cd" * 32), Violation, "does not follow"),
    ("an update that is too short", with_payload(lambda mean: mean[:-1]), Violation, "instead of"),
    ("no update", lambda body, answer: Answer(answer.body), Violation, "an update of 0 bytes"),
    ("another update", with_payload(lambda mean: mean * 1.0001), StateError, "which the record does not name"),
    ("a bit of it", with_payload(lambda mean: mean.index_fill(0, torch.tensor([3]), 0.0)), StateError, "not applied"),
    ("NaN", poisoned(float("nan")), Violation, "not finite"),
    ("infinity", poisoned(float("inf")), Violation, "not finite"),
]


@pytest.mark.parametrize(("twist", "error", "words"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
async def test_observer_takes_no_lie_and_keeps_what_it_has(twist: Twist, error: type[Exception], words: str) -> None:
    bench, observer, part = await following()
    before = digest(part.snapshot())
    await bench.close()
    bench.twists[NEXT] = twist
    with pytest.raises(error, match=words):
        await observer.follow()
    assert digest(part.snapshot()) == before
    assert (part.step, bench.told) == (2, [2])
    bench.twists.clear()
    again = bench.observer()
    again.go_on(observer.head, part)
    await again.follow()
    assert digest(part.snapshot()) == digest(bench.run.part.snapshot())


@pytest.mark.parametrize("change", [{"tokens": 9}, {"roster": OBSERVED.members[:1]}, {"digests": {STAGE: "f" * 64}}])
async def test_observer_that_is_shown_another_history_than_its_contact_knows_starts_nothing(
    change: dict[str, Any],
) -> None:
    bench = await opened()
    bench.twists[START] = with_record(**change)
    with pytest.raises(Violation, match="another record of step 2 than C has"):
        await bench.observer().start(CONTACT)
    assert bench.told == []


async def test_observer_of_a_donor_far_ahead_of_its_contact_tries_another() -> None:
    bench = await opened()
    for _ in range(3):
        await bench.publish(bench.run.close(), DONOR)
    with pytest.raises(WrongStep, match="far from closed"):
        await bench.observer().start(CONTACT)


async def test_observer_whose_state_is_not_the_records_installs_nothing() -> None:
    bench = await opened()
    observer = bench.observer()
    decision = await observer.start(CONTACT)
    forged = decision.record.model_copy(update={"digests": decision.record.digests | {STAGE: "e" * 64}})
    with pytest.raises(PeerError, match="not held here"):
        await bench.fetch(forged)


# --- the contact has gone ----------------------------------------------------------------------------------------


async def test_observer_without_its_contact_believes_more_than_half_of_the_roster_it_knows() -> None:
    bench = await opened()
    known = bench.run.head
    decision = await bench.close()
    bench.network.kill(CONTACT)
    assert (await bench.observer().start(CONTACT, known)).record == decision.record
    with pytest.raises(Unreachable):
        await bench.observer().start(CONTACT)


@pytest.mark.parametrize("signers", [[], [DONOR], ["X", "Y", "Z"]])
async def test_observer_without_its_contact_does_not_believe_a_few(signers: list[Any]) -> None:
    bench = await opened()
    known = bench.run.head
    decision = await bench.close()
    bench.network.kill(CONTACT)
    bench.twists[START] = lambda body, answer: Answer(told(signed(decision.record, signers)))
    with pytest.raises(Unreachable):
        await bench.observer().start(CONTACT, known)


async def test_observer_that_comes_back_believes_those_who_decided_the_next_step() -> None:
    bench = await opened()
    known = bench.run.head
    decision = await bench.close()
    bench.network.kill(CONTACT)
    assert (await bench.observer().start(None, known)).record == decision.record
    assert (await bench.observer().start(None, decision.record)).record == decision.record


@pytest.mark.parametrize("signers", [[], [DONOR], ["X", "Y", "Z"]])
async def test_observer_that_comes_back_believes_no_member_alone(signers: list[Any]) -> None:
    bench = await opened()
    known = bench.run.head
    far = known.model_copy(update={"step": 500, "previous": "9" * 64})
    bench.twists[START] = lambda body, answer: Answer(told(signed(far, signers)))
    with pytest.raises(Violation, match="that too few attest"):
        await bench.observer().start(None, known)


async def test_observer_without_its_contact_takes_no_older_record() -> None:
    bench = await opened()
    older = bench.run.head
    known = (await bench.close()).record
    bench.network.kill(CONTACT)
    bench.twists[START] = lambda body, answer: Answer(told(signed(older)))
    with pytest.raises(Unreachable):
        await bench.observer().start(CONTACT, known)


# --- death and silence -------------------------------------------------------------------------------------------


async def test_observer_leaves_a_donor_that_closed_so_many_steps_without_the_update_of_one() -> None:
    bench, observer, part = await following()
    size = 4 * part.layout.elements
    bench.network.delay = lambda source, target, sent: 1e6 if sent > size else 0.0
    await bench.close()
    waiting = asyncio.create_task(observer.follow())
    await turns()
    bench.twists[STANDING] = lambda body, answer: _closed(answer, 3 + KEPT_UPDATES)
    await bench.clock.advance(PATIENCE_S + 1)
    await turns()
    assert isinstance(waiting.exception(), WrongStep)


async def test_observer_leaves_a_donor_that_stands_still_while_the_run_is_known_to_go_on() -> None:
    bench, observer, _ = await following()
    observer._context = replace(observer._context, newest=lambda: 3)
    waiting = asyncio.create_task(observer.follow())
    await turns()
    await bench.clock.advance(PATIENCE_S + 1)
    await turns()
    assert not waiting.done()  # it may be about to hear of it
    await bench.clock.advance(PATIENCE_S + 1)
    await turns()
    assert isinstance(waiting.exception(), WrongStep)


def _closed(answer: Answer, step: int) -> Answer:
    return Answer(answer.body.model_copy(update={"closed": step}))


@pytest.mark.parametrize("decided", [True, False])
async def test_observer_on_a_thin_link_gives_a_large_update_the_time_it_takes(decided: bool) -> None:
    """Of a step that is closed, or before it is decided here."""
    bench, observer, part = await following()
    size = 4 * part.layout.elements
    bench.network.delay = lambda source, target, sent: 100.0 if sent > size else 0.0
    decision = await bench.close()
    waiting: asyncio.Task[Any] = asyncio.create_task(observer.follow() if decided else observer.ahead())
    for _ in range(60):
        await turns()
        bench.endpoints[JOINER].meter.received[DONOR] += size // 10  # piece by piece
        await bench.clock.advance(10.0)
    assert waiting.done()
    found = await waiting
    assert found == decision.record if decided else torch.equal(found, decision.mean)
