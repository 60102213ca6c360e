"""What a step's leader takes from a trainer, and what not."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.consensus.records import NO_RECORD, Contribution
from swarm.consensus.roster import Roster
from swarm.errors import Refused, Superseded, Violation, WrongStep
from swarm.ids import JourneyKey, MicrobatchId, PeerId
from swarm.optim.schedules import OptimizerConfig
from swarm.schema import AFTER_CHARS
from swarm.security.signing import PrivateIdentity, receipt_bytes, verify
from swarm.step.leader.lead_service import LeadService
from swarm.step.messages import Complete, Lease, SignedReceipt
from swarm.step.rules import StepRules
from tests.harness.rigs.step import RUN, asked, listed

HOSTS = [PrivateIdentity(bytes([i]) * 32) for i in range(3)]
TRAINER, OTHER = (PrivateIdentity(bytes([i]) * 32) for i in (11, 12))
ROSTER = Roster(
    [listed(h.peer, part=f"stage-{i % 2}", name="h") for i, h in enumerate(HOSTS)]
    + [listed(t.peer, "trainer", "ends", name="t") for t in (TRAINER, OTHER)]
)
RULES = StepRules(
    run=RUN,
    steps=9,
    target=2,
    max_share=1.0,
    max_tokens=32,
    max_members=7,
    reproducible=False,
    optimizer=OptimizerConfig(),
)
MICROBATCH = MicrobatchId(TRAINER.peer, "0" * 16, 0, 0)


async def _open(step: int) -> None:
    return None


DIGEST = bytes(range(32))


def lead_service(me: PeerId) -> LeadService:
    opened = LeadService(RULES, me, _open, verify)
    opened.open_step(1, ROSTER)
    return opened


def complete(*, signers: list[PrivateIdentity] | None = None, term: int = 0, **fields: Any) -> Complete:
    values = {"microbatch": MICROBATCH, "tokens": 30, "loss_sum": 2.0, "route": (HOSTS[0].peer, HOSTS[1].peer)} | fields
    receipts = tuple(
        SignedReceipt(
            digest=DIGEST,
            signature=signer.sign(
                receipt_bytes(RUN, JourneyKey(1, values["microbatch"], 0, NO_RECORD[:AFTER_CHARS]), stage, DIGEST)
            ),
        )
        for stage, signer in enumerate(signers or HOSTS[:2])
    )
    return Complete(step=1, term=term, contribution=Contribution(**values), receipts=receipts)


async def tell(opened: LeadService, body: Any, caller: PeerId = TRAINER.peer) -> Any:
    return await asked(opened, body, caller)


async def lead() -> LeadService:
    opened = lead_service(ROSTER.succession(1)[0])
    await tell(opened, Lease(step=1, term=0, total=2))
    return opened


async def test_lead_service_full_gives_the_committed_set() -> None:
    opened = await lead()
    second = MICROBATCH._replace(position=1)
    for body in (complete(), complete(), complete(microbatch=second)):
        await tell(opened, body)
    assert [c.microbatch for c in await opened.book.wait_full()] == [MICROBATCH, second]


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (complete(tokens=33), Violation, "33 target tokens"),
        (complete(tokens=0), Violation, "0 target tokens"),
        (complete(loss_sum=-1.0), Violation, "loss"),
        (complete(loss_sum=1.7e308), Violation, "a loss sum of 1.7e"),
        (complete(route=(HOSTS[1].peer, HOSTS[0].peer)), Refused, "not a replica"),
        (complete(route=(HOSTS[0].peer,)), Violation, "1 replicas through 2 stages"),
        (complete(signers=[HOSTS[2], HOSTS[1]]), Violation, "stage 0 is forged"),
        (complete(signers=[HOSTS[0], TRAINER]), Violation, "stage 1 is forged"),
        (complete(microbatch=MICROBATCH._replace(trainer=OTHER.peer)), Refused, "its own"),
        (complete().model_copy(update={"step": 0}), WrongStep, "step 0"),
    ],
)
async def test_leader_refuses_what_no_honest_trainer_reports(
    body: Complete, error: type[Exception], words: str
) -> None:
    opened = await lead()
    with pytest.raises(error, match=words):
        await tell(opened, body)


async def test_lead_service_of_a_bystander_leases_and_counts_nothing() -> None:
    bystander = lead_service(ROSTER.succession(1)[3])
    with pytest.raises(Superseded, match="leads step 1 in term 0"):
        await tell(bystander, Lease(step=1, term=0, total=1))
    with pytest.raises(Superseded, match="leads step 1 in term 0"):
        await tell(bystander, complete())


async def test_lead_service_of_the_successor_witnesses() -> None:
    await tell(lead_service(ROSTER.succession(1)[1]), complete())
