"""A leader's service whose peer takes over, is taken over from, and loses and finds trainers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from swarm.consensus.records import Contribution, Quarantined
from swarm.consensus.roster import Member, Roster, owner
from swarm.errors import Busy, PeerError, Refused, Superseded, Violation
from swarm.ids import MicrobatchId, PeerId
from swarm.step.leader.lead_service import LeadService
from swarm.step.messages import Complete, Lease, Quarantine, ResumeTrainer, SignedReceipt
from tests.harness.rigs.step import RULES, A, B, T, asked

U = PeerId("U")
ROSTER = Roster(
    [
        Member(peer=peer, role="stage" if peer in (A, B) else "trainer", name="n", part=part, addresses=())
        for peer, part in [(A, "stage-0"), (B, "stage-0"), (T, "ends"), (U, "ends")]
    ]
)
LEADER, SUCCESSOR = ROSTER.succession(1)[:2]


class Lead:
    """A service that believes every receipt, of the peer that owns ``term``."""

    def __init__(self, *, hosted: bool = False, me: PeerId = LEADER, cursors: dict[str, tuple[int, int]] | None = None):
        self.known = 0
        self.service = LeadService(
            RULES, me, self._opened, lambda peer, data, signature: True, term_of=lambda: self.known, hosted=hosted
        )
        self.service.open_step(1, ROSTER, "ab" * 32, cursors or {})

    async def _opened(self, step: int) -> None:
        return None

    def begin(self, term: int, *gone: PeerId) -> None:
        self.known = term
        self.service.book.begin_term(term, gone)

    async def ask(self, body: Any, caller: PeerId = T) -> Any:
        return await asked(self.service, body, caller)

    async def lease(self, trainer: PeerId, total: int, term: int = 0) -> int:
        return (await self.ask(Lease(step=1, term=term, total=total), trainer)).total

    async def complete(self, trainer: PeerId, *positions: int, term: int = 0) -> None:
        for position in positions:
            await self.ask(report(trainer, position, term), trainer)

    async def resume(self, trainer: PeerId, *positions: int, term: int) -> int:
        started = tuple(microbatch(trainer, position) for position in positions)
        return (await self.ask(ResumeTrainer(step=1, term=term, started=started, aside=()), trainer)).kept

    @property
    async def committed(self) -> list[MicrobatchId]:
        return [one.microbatch for one in await asyncio.wait_for(self.service.book.wait_full(), 120)]


RECEIPT = SignedReceipt(digest=bytes(32), signature=bytes(64))


def microbatch(trainer: PeerId, position: int) -> MicrobatchId:
    return MicrobatchId(trainer, "00" * 8, 0, position)


def report(trainer: PeerId, position: int, term: int = 0) -> Complete:
    contribution = Contribution(microbatch=microbatch(trainer, position), tokens=8, loss_sum=1.0, route=(A,))
    return Complete(step=1, term=term, contribution=contribution, receipts=(RECEIPT,))


# --- terms -----------------------------------------------------------------------------------------------------------


async def test_lead_that_takes_over_leases_nothing_before_all_have_said_what_they_have_begun() -> None:
    lead = Lead(me=SUCCESSOR)
    lead.begin(1)
    for body in (Lease(step=1, term=1, total=1), report(T, 0, 1)):
        with pytest.raises(Superseded, match="resume"):
            await lead.ask(body)
    assert await lead.resume(T, 0, term=1) == 1
    with pytest.raises(Busy, match="1 trainers have yet to say"):
        await lead.lease(T, 2, term=1)
    await lead.complete(T, 0, term=1)
    assert await lead.resume(U, 0, 1, term=1) == 1  # the batch has room for two
    await lead.complete(U, 0, term=1)
    assert await lead.committed == [microbatch(T, 0), microbatch(U, 0)]


async def test_batch_waits_for_trainers_that_have_yet_to_say_what_they_have_begun() -> None:
    lead = Lead(me=SUCCESSOR)
    lead.begin(1)
    assert lead.service.book.waits_for() == (), "none has said anything: it is not for one of them"
    await lead.resume(T, 0, 1, term=1)
    assert lead.service.book.waits_for() == (U,), "nothing is leased before"
    await lead.complete(T, 0, 1, term=1)
    assert lead.service.book.waits_for() == (U,), "nor is a batch closed that is complete"
    await lead.resume(U, term=1)
    assert lead.service.book.waits_for() == ()


@pytest.mark.parametrize("term", [0, 1, 3])
async def test_lead_of_another_term_than_the_trainer_knows_says_who_leads(term: int) -> None:
    lead = Lead(me=owner(ROSTER, 1, 2))
    lead.begin(2)
    aside = Quarantined(microbatch=microbatch(T, 0), reason="no number")
    asked = [
        Lease(step=1, term=term, total=1),
        Quarantine(step=1, term=term, aside=aside),
        ResumeTrainer(step=1, term=term, started=(), aside=()),
    ]
    for body in asked:
        with pytest.raises(Superseded, match=f"{owner(ROSTER, 1, 2)} leads step 1 in term 2"):
            await lead.ask(body)


async def test_lead_that_is_taken_over_from_leases_and_counts_nothing_more() -> None:
    lead = Lead()
    await lead.lease(T, 1)
    lead.known = 1
    lead.service.book.end_term()
    for body in (Lease(step=1, term=0, total=1), report(T, 0)):
        with pytest.raises(Superseded, match=f"{SUCCESSOR} leads step 1 in term 1"):
            await lead.ask(body)
    assert not lead.service.book.full
    assert lead.service.book.aside() == ()


async def test_lead_that_leads_again_begins_anew() -> None:
    lead = Lead()
    await lead.lease(T, 2)
    await lead.complete(T, 0, 1)
    assert lead.service.book.full
    lead.service.book.end_term()
    lead.begin(len(ROSTER))
    assert not lead.service.book.full
    await lead.resume(T, 0, 1, term=len(ROSTER))
    await lead.resume(U, term=len(ROSTER))
    await lead.complete(T, 0, 1, term=len(ROSTER))
    assert len(await lead.committed) == 2


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (ResumeTrainer(step=1, term=1, started=(microbatch(U, 0),), aside=()), Refused, "its own"),
        (ResumeTrainer(step=1, term=1, started=(microbatch(T, 0),) * 2, aside=()), Violation, "twice"),
        (
            ResumeTrainer(step=1, term=1, started=tuple(microbatch(T, p) for p in range(5)), aside=()),
            Violation,
            "5 microbatches",
        ),
    ],
)
async def test_lead_takes_no_word_that_no_honest_trainer_says(body: Any, error: type[PeerError], words: str) -> None:
    lead = Lead(me=SUCCESSOR)
    lead.begin(1)
    with pytest.raises(error, match=words):
        await lead.ask(body)
    with pytest.raises(Refused, match="not a trainer"):
        await lead.ask(ResumeTrainer(step=1, term=1, started=(), aside=()), A)


# --- witnesses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosted", [True, False])
async def test_witness_that_takes_over_counts_a_lost_trainers_work_when_others_hold_it(hosted: bool) -> None:
    lead = Lead(me=SUCCESSOR, hosted=hosted, cursors={T: (0, 4)})
    for position in (4, 6, 5, 9):
        await lead.complete(T, position)
    with pytest.raises(Superseded):
        await lead.ask(report(T, 7, term=1))  # its witness is another
    lead.begin(1, T)
    assert await lead.resume(U, term=1) == 0
    assert await lead.lease(U, 9, term=1) == (0 if hosted else 2)
    if hosted:
        assert await lead.committed == [microbatch(T, 4), microbatch(T, 5)]


async def test_witness_keeps_no_more_of_a_trainer_than_replicas_take_of_it() -> None:
    lead, most = Lead(me=SUCCESSOR, hosted=True), 2 * RULES.target
    await lead.complete(T, *range(most))
    with pytest.raises(Refused, match=f"{most} microbatches of {T}"):
        await lead.complete(T, most)
    await lead.complete(T, 0)
    await lead.complete(U, 0)
    assert len(lead.service.book.witness.completed) == most + 1


async def test_one_trainer_does_not_make_the_batch_look_complete_to_a_witness() -> None:
    lead, rules = Lead(me=SUCCESSOR), replace(RULES, max_share=0.5)
    lead.service.book._rules = rules
    await lead.complete(T, *range(2 * RULES.target))
    assert len(lead.service.book.witness.completed) == 2 * RULES.target
    share = rules.quota(1, [T, U])[T]
    assert lead.service.book.witnessed(()) == share < RULES.target
    await lead.complete(U, *range(RULES.target - share))
    assert lead.service.book.witnessed(()) == RULES.target


async def test_witness_forgets_with_the_step_what_it_witnessed() -> None:
    lead = Lead(me=SUCCESSOR, hosted=True)
    await lead.complete(T, 0, 1)
    lead.service.open_step(1, ROSTER, "cd" * 32, {})
    lead.begin(1, T)
    assert not lead.service.book.full


# --- trainers that go and come back ----------------------------------------------------------------------------------


async def test_lead_without_a_trainer_has_quota_again_for_the_others() -> None:
    lead = Lead()
    assert await lead.lease(U, 2) == 2
    assert await lead.lease(T, 1) == 0
    await lead.complete(U, 0)
    assert lead.service.book.count_on({U})
    assert not lead.service.book.count_on({U})
    assert await lead.lease(T, 2) == 2
    for body in (Lease(step=1, term=0, total=2), report(U, 1)):
        with pytest.raises(Superseded, match="resume"):
            await lead.ask(body, U)
    with pytest.raises(Busy, match="yet to count on it"):
        await lead.resume(U, 0, term=0)
    assert lead.service.book.count_on(set())
    assert await lead.resume(U, 0, term=0) == 0
    await lead.complete(T, 0, 1)
    assert await lead.committed == [microbatch(T, 0), microbatch(T, 1)]


async def test_lead_that_is_full_without_a_lost_trainer_waits_for_none_of_it() -> None:
    lead = Lead(hosted=True)
    await lead.lease(U, 1)
    await lead.complete(U, 0)
    await lead.lease(T, 1)
    await lead.complete(T, 0)
    assert lead.service.book.count_on({U})
    assert await lead.committed == [microbatch(T, 0), microbatch(U, 0)]
    lead.service.book.exclude([microbatch(U, 0)])
    assert not lead.service.book.full
    assert await lead.lease(T, 9) == 2


async def test_lead_without_any_trainer_waits() -> None:
    lead = Lead()
    assert lead.service.book.count_on({T, U})
    assert not lead.service.book.full
    assert lead.service.book.count_on({U})
    await lead.resume(T, term=0)
    assert await lead.lease(T, 2) == 2


def test_lead_of_a_bystander_counts_on_nobody() -> None:
    lead = Lead(me=SUCCESSOR)
    assert not lead.service.book.count_on({T})
    lead.service.book.exclude([microbatch(T, 0)])
    assert not lead.service.book.full
