"""A step's microbatches as they travel: as many bytes as they need, what was written, and nothing that nobody wrote."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.columns import MAX_VARIANTS
from swarm.consensus import committed as packed_form
from swarm.consensus.committed import MAX_HOPS, MAX_PEERS, pack
from swarm.consensus.records import CloseRecord, Contribution
from swarm.errors import Violation
from swarm.ids import MicrobatchId, PeerId
from swarm.network.rpc import bodies
from swarm.step.messages import Reconcile
from tests.harness.rigs.consensus import COMMITTED, record

NAMES = st.sampled_from([f"p{number}" for number in range(6)])
ROWS = st.builds(
    lambda trainer, shard, epoch, position, tokens, loss, route, early, choice: Contribution(
        microbatch=MicrobatchId(PeerId(trainer), shard * 8, epoch, position),
        tokens=tokens,
        loss_sum=loss,
        route=tuple(route),
        early=early,
        choice=choice,
    ),
    NAMES,
    st.sampled_from(("00", "ab")),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 2**53 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(NAMES, max_size=4),
    st.booleans(),
    st.sampled_from([0, 0, 1, MAX_VARIANTS - 1]),
)


def sent(one: CloseRecord) -> CloseRecord:
    return bodies.decode(CloseRecord, bodies.unpack(bodies.pack(one.to_wire())))


@given(st.lists(ROWS, max_size=12))
def test_record_arrives_as_it_was_sent_with_the_same_hash_and_reads_from_a_file_in_full(
    rows: list[Contribution],
) -> None:
    one = record(committed=tuple(rows))
    assert sent(one) == one
    assert sent(one).hash() == one.hash()
    assert CloseRecord.model_validate_json(one.model_dump_json()) == one
    assert [row["route"] for row in one.model_dump(mode="json")["committed"]] == [list(row.route) for row in rows]


def test_question_of_a_step_carries_them_in_the_same_way() -> None:
    asked = Reconcile(step=1, term=0, committed=COMMITTED, live=("A",), attempts={})
    assert bodies.decode(Reconcile, bodies.unpack(bodies.pack(asked.to_wire()))) == asked
    assert asked.to_wire()["committed"] == pack(COMMITTED)


def test_microbatches_that_follow_each_other_share_all_but_what_is_their_own() -> None:
    peers = tuple(f"p{number}" * 10 for number in range(32))
    rows = [
        Contribution(microbatch=MicrobatchId(PeerId("T"), "0" * 16, 0, n), tokens=2048, loss_sum=1.5, route=peers)
        for n in range(1_000)
    ]
    one, none = (len(bodies.pack(record(committed=tuple(some)).to_wire())) for some in (rows, rows[:1]))
    assert (one - none) / 999 == pytest.approx(2 * 32 + 8 + 8, abs=0.1)


@pytest.mark.parametrize("hops", [1, 2, 9])
def test_large_step_of_short_routes_is_a_body_that_arrives(hops: int) -> None:
    """A body may have an element for eight of its bytes; a sender of one must not be taken for a peer that floods."""
    rows = [
        Contribution(
            microbatch=MicrobatchId(PeerId("T"), "0" * 16, n % 2, n), tokens=8, loss_sum=1.5, route=("A",) * hops
        )
        for n in range(2_000)
    ]
    assert len(sent(record(committed=tuple(rows))).committed) == 2_000


ROW = struct.pack(">QdH", 8, 1.5, 0)
STRETCH = (1, 0, 0, 7, 0, 1, 1)
"""Trainer, shard, epoch, position, early, hops, rows."""


def said(rows: bytes = ROW, peers: Any = ("A", "T"), shards: Any = ("0" * 16,), **changes: int) -> tuple[Any, ...]:
    names = ("trainer", "shard", "epoch", "position", "marks", "hops", "count")
    begin = (changes.get(name, value) for name, value in zip(names, STRETCH, strict=True))
    return peers, shards, struct.pack(">HHQQBHI", *begin) + rows


GOOD = said()


@pytest.mark.parametrize(
    "lie",
    [
        said(trainer=2),
        said(shard=1),
        said(shards=("0" * 17,)),
        said(shards=("xyz",)),
        said(epoch=2**53),
        said(position=2**53 - 1),
        said(position=2**53 - 3, count=4, rows=ROW * 4),
        said(marks=2 * MAX_VARIANTS),
        said(count=0, rows=b""),
        said(count=2),
        said(count=2**32 - 1),
        said(hops=2),
        said(hops=MAX_HOPS + 1, rows=ROW + bytes(2 * MAX_HOPS)),
        said(rows=ROW[:-1]),
        said(rows=ROW + b"x"),
        said(rows=struct.pack(">QdH", 8, 1.5, 2)),
        said(rows=struct.pack(">QdH", 8, float("nan"), 0)),
        said(rows=struct.pack(">QdH", 2**53, 1.5, 0)),
        said(peers=("A", "not an id")),
        said(peers=("A",) * (MAX_PEERS + 1)),
        (*GOOD, b""),
        GOOD[:2],
        (("A", "T"), ("0" * 16,), "text"),
        (("A", "T"), ((),)),
        ({}, ()),
        ((), {}),
    ],
)
def test_bytes_that_no_peer_writes_are_refused(lie: Any) -> None:
    plain = record().to_wire()
    assert bodies.decode(CloseRecord, plain | {"committed": GOOD}).committed[0].route == ("A",)
    with pytest.raises(Violation, match="committed"):
        bodies.decode(CloseRecord, plain | {"committed": lie})


def test_more_microbatches_than_may_be_listed_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_form, "MAX_LISTED", 3)
    made: list[Any] = []
    with pytest.raises(ValueError, match="more than 3"):
        packed_form.unpack((*GOOD[:2], GOOD[2] + said(count=3, rows=ROW * 3)[2]), made.append)
    assert made == []


# --- losses that are far out -----------------------------------------------------------------------------------------


def closed(*rows: tuple[str, str, float]) -> CloseRecord:
    """The record of a step with these microbatches, of ten tokens each: trainer, replica, nats a token."""
    committed = tuple(
        Contribution(
            microbatch=MicrobatchId(PeerId(trainer), "00" * 8, 0, at), tokens=10, loss_sum=10 * nats, route=(by,)
        )
        for at, (trainer, by, nats) in enumerate(rows)
    )
    return record(committed=committed, tokens=10 * len(rows), loss_sum=sum(one.loss_sum for one in committed))


@pytest.mark.parametrize(
    ("rows", "suspect"),
    [
        ((("t", "a", 82.0), ("u", "a", 3.0), ("u", "b", 3.0), ("t", "b", 90.0)), "t"),
        ((("t", "a", 82.0), ("u", "a", 90.0), ("u", "b", 3.0), ("t", "b", 3.0), ("t", "c", 3.0)), "a"),
        ((("t", "a", 82.0), ("u", "b", 3.0), ("u", "b", 3.0)), None),
        ((("t", "a", 82.0), ("u", "b", 90.0), ("v", "c", 3.0), ("v", "c", 3.0), ("v", "c", 3.0)), None),
        ((("t", "a", 82.0), ("t", "a", 3.0), ("t", "b", 3.0), ("u", "a", 3.0)), None),
        ((("t", "a", 0.0), ("t", "b", 0.3), ("u", "a", 3.0), ("u", "b", 3.0), ("u", "b", 3.0)), "t"),
        ((("t", "a", 0.3), ("u", "b", 3.0), ("u", "b", 3.0)), None),
    ],
)
def test_loss_is_that_of_the_others_where_some_are_far_out_and_names_who_alone_can_have_made_them_so(
    rows: tuple[tuple[str, str, float], ...], suspect: str | None
) -> None:
    one = closed(*rows)
    assert one.loss == pytest.approx(3.0)
    assert one.suspect == suspect


def test_loss_is_all_of_it_where_nothing_is_far_out_however_high_or_low() -> None:
    low = [("t", "a", 0.4), ("u", "b", 3.0), ("u", "b", 3.0)]
    for rows in (low, [("t", "a", 0.1), ("u", "b", 7.9)], [("t", "a", 82.0), ("u", "b", 90.0)], [("t", "a", 82.0)]):
        one = closed(*rows)
        assert (one.loss, one.far_out, one.suspect) == (one.loss_sum / one.tokens, (), None)
