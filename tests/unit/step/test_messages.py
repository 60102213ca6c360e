"""What the step's messages let through, and that they survive the wire unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from swarm.consensus.acceptor import Vote
from swarm.consensus.admissions import Admissions
from swarm.consensus.records import CloseRecord, Confirmation, Contribution, Quarantined
from swarm.consensus.slowness import Barred, Slow
from swarm.consensus.trials import Trial
from swarm.errors import Violation
from swarm.ids import MicrobatchId
from swarm.network.rpc.bodies import decode, pack, unpack
from swarm.schema import Message
from swarm.step.messages import (
    Accepted,
    Averaged,
    Complete,
    Decide,
    Feed,
    Lease,
    Leased,
    Prepare,
    Prepared,
    Promise,
    Propose,
    Quarantine,
    ResumeTrainer,
    SignedReceipt,
    TrainerResumed,
)
from tests.harness.rigs.step import (
    COMMITTED,
    FAULTY,
    GENESIS,
    A,
    T,
    apply,
    decide,
    microbatch,
    prepare,
    reconcile,
    record,
)

RECEIPT = bytes(range(64))
SIGNED = SignedReceipt(digest=bytes(32), signature=RECEIPT)
ODD: list[tuple[Any, ...]] = [
    (T, "x" * 3_900_000, 0, 0),
    (T, "00" * 7, 0, 0),
    (T, "00" * 8 + "\n", 0, 0),
    ("no peer!", "00" * 8, 0, 0),
    (f"{T}\n", "00" * 8, 0, 0),
    (T, "00" * 8, -1, 0),
    (T, "00" * 8, 0, -5),
    (T, "00" * 8, 2**53 - 1, 0),
    (T, "00" * 8, 0, 2**53 - 1),
]
"""Microbatches that no shard has, or that a record cannot go on behind."""
SAMPLES: list[Message] = [
    Lease(step=1, term=2, total=4),
    Leased(total=4, reason="2 of 6 left"),
    Complete(step=1, term=0, contribution=COMMITTED[0], receipts=(SignedReceipt(digest=bytes(32), signature=RECEIPT),)),
    Quarantine(step=1, term=1, aside=Quarantined(microbatch=microbatch(3), reason="it gives no number anywhere")),
    ResumeTrainer(step=1, term=1, started=(microbatch(0), microbatch(1)), aside=()),
    TrainerResumed(kept=1),
    Feed(step=1, term=1),
    prepare(),
    Promise(vote=None, free=3),
    Promise(vote=Vote(term=2, record=record(loss_sum=0.1 + 0.2)), free=0),
    reconcile(),
    Averaged(digest="", sq_norm=0.0, cursor=None, failure="it failed", culprit=A, missing=(microbatch(0),)),
    Averaged(digest="a" * 64, sq_norm=0.1 + 0.2, cursor=(3, 7)),
    Averaged(digest="", sq_norm=0.0, cursor=None),
    apply(lr=1e-3 / 3, clip=0.1 + 0.7),
    Prepared(digest=""),
    Propose(record=record(loss_sum=0.1 + 0.2)),
    Propose(record=GENESIS),
    Accepted(signature=RECEIPT),
    decide(record(), term=3),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_message_survives_the_wire_to_the_last_bit(message: Message) -> None:
    arrived = decode(type(message), unpack(pack(message.to_wire())))
    assert arrived == message
    if isinstance(message, Propose):
        assert arrived.record.hash() == message.record.hash()  # type: ignore[attr-defined]


def test_record_hash_depends_on_every_field() -> None:
    changes: dict[str, Any] = {
        "run": "cd" * 32,
        "step": 2,
        "term": 1,
        "aside": (Quarantined(microbatch=microbatch(3), reason="it gives no number"),),
        "absent": (A,),
        "committed": COMMITTED[:1],
        "tokens": 1,
        "loss_sum": 0.5,
        "grad_norm": 0.5,
        "clip": 0.5,
        "lr": 0.25,
        "digests": {},
        "cursors": {T: (1, 0)},
        "roster": record().roster[:1],
        "void": True,
        "ended": True,
        "repeats": 2,
        "returns": 1,
        "resumed": 3,
        "links": {A: (1, 2)},
        "paces": {A: 3},
        "codecs": (("int8h", "float32"),),
        "norms": {"stage-0": 0.5},
        "caps": {"stage-0": 0.5},
        "guarded": {A: {T: 3}},
        "lengths": {A: (1.0, 2.0)},
        "usual": {"stage-0": (1.0, 2.0)},
        "late": {A: (1, 8)},
        "spread_ms": 5,
        "slow": {A: Slow(said_by=(T,))},
        "faults": (FAULTY,),
        "barred": {A: Barred(times=1, until=300)},
        "words": {A: (1, -2, 3)},
        "trials": {T: Trial(times=1)},
        "passed": {"stage-0": 64},
        "dealt": {"stage-0": 7},
        "admissions": Admissions(issuers=(A,)),
        "lineage": 1,
        "confirmation": Confirmation(term=1, acceptances={}),
        "previous": "1" * 64,
    }
    assert set(changes) == set(CloseRecord.model_fields)
    hashes = {record().model_copy(update={field: value}).hash() for field, value in changes.items()}
    assert len(hashes | {record().hash()}) == len(changes) + 1


def test_record_hash_does_not_depend_on_the_order_of_its_tables() -> None:
    turned = dict(reversed(record().digests.items()))
    assert record(digests=turned).hash() == record().hash()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Lease, {"step": -1, "term": 0, "total": 1}),
        (Lease, {"step": 1, "term": 0, "total": 2.0}),
        (Lease, {"step": 1, "term": 0, "total": 1 << 53}),
        (Lease, {"step": 1, "term": 0, "total": 1, "more": 1}),
        (Lease, {"step": 1, "total": 1}),
        (Prepare, {"step": 1, "term": -1}),
        (Promise, {"vote": {"term": 1}, "free": 0}),
        (TrainerResumed, {"kept": -1}),
        (Quarantine, {"step": 1, "term": 0, "aside": {"microbatch": ["T", "00" * 8, 0, 0], "reason": "x" * 201}}),
        *(
            (Quarantine, {"step": 1, "term": 0, "aside": {"microbatch": MicrobatchId(*odd), "reason": ""}})
            for odd in ODD
        ),
        *((ResumeTrainer, {"step": 1, "term": 0, "started": (MicrobatchId(*odd),), "aside": ()}) for odd in ODD),
        (Averaged, {"digest": "", "sq_norm": 0.0, "cursor": None, "failure": "x" * 401}),
        (Averaged, {"digest": "", "sq_norm": 0.0, "cursor": None, "culprit": "no peer!"}),
        (Leased, {"total": 1, "reason": "x" * 201}),
        (Accepted, {"signature": bytes(63)}),
        (Accepted, {"signature": "x" * 64}),
        (Averaged, {"digest": "a" * 15, "sq_norm": 1.0, "cursor": None}),
        (Averaged, {"digest": "A" * 64, "sq_norm": 1.0, "cursor": None}),
        (Averaged, {"digest": "", "sq_norm": float("nan"), "cursor": None}),
        (Averaged, {"digest": "", "sq_norm": float("inf"), "cursor": None}),
        (Averaged, {"digest": "", "sq_norm": -1.0, "cursor": None}),
        (Averaged, {"digest": "", "sq_norm": 1e101, "cursor": None}),
        (Averaged, {"digest": "", "sq_norm": 1.0, "cursor": (1,)}),
        (Prepared, {"digest": "not hex at all....."}),
        (Decide, {"step": 1, "record": "a" * 64, "acceptances": {"no peer!": RECEIPT}}),
        (Decide, {"step": 1, "record": "a" * 64, "acceptances": {"A": b""}}),
        (Decide, {"step": 1, "record": "a" * 64, "acceptances": {f"A{n}": RECEIPT for n in range(1, 20_002)}}),
    ],
)
def test_message_that_no_honest_peer_sends_is_a_violation(kind: type[Message], fields: dict[str, Any]) -> None:
    with pytest.raises(Violation):
        decode(kind, unpack(pack(fields)))


@pytest.mark.parametrize(
    "changes", [{"tokens": -1}, {"loss_sum": float("nan")}, {"route": ("bad peer",)}, {"route": ("a",) * 1025}]
)
def test_contribution_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    fields = {"microbatch": COMMITTED[0].microbatch, "tokens": 1, "loss_sum": 1.0, "route": ("a",)} | changes
    with pytest.raises(ValidationError):
        Contribution(**fields)
