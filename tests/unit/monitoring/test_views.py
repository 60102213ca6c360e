"""Folds over events."""

from __future__ import annotations

import random
from typing import Any

from swarm.events import (
    Committed,
    DigestMismatch,
    Event,
    JourneyCompleted,
    JourneyStarted,
    LinkUsage,
    StepClosed,
)
from swarm.ids import MicrobatchId, PeerId, stage_part
from swarm.monitoring.reader import RawEvent, Recorded
from swarm.monitoring.views import (
    Digests,
    MicrobatchAccount,
    Microbatches,
    Mismatch,
    StepBytes,
    StepTable,
    TrafficView,
    fold,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def at(wall: float, peer: PeerId, event: Event | RawEvent) -> Recorded:
    return Recorded(wall, wall, peer, event)


def closed(step: int, **changes: Any) -> StepClosed:
    fields: dict[str, Any] = {
        "step": step,
        "loss": 5.0 - step,
        "tokens": 100,
        "microbatches": 2,
        "grad_norm": 1.0,
        "clip": 1.0,
        "lr": 0.1,
        "digests": {"stage-0": "d0"},
        "leader": A,
        "record": "r",
        "seconds": 1.0,
    }
    return StepClosed(**fields | changes)


def microbatch(position: int) -> MicrobatchId:
    return MicrobatchId(A, "0" * 16, 0, position)


def started(step: int, position: int) -> JourneyStarted:
    return JourneyStarted(step=step, microbatch=microbatch(position), route=(B,))


def committed(step: int, *positions: int) -> Committed:
    return Committed(step=step, microbatches=tuple(microbatch(position) for position in positions))


def account(events: list[Recorded]) -> MicrobatchAccount:
    return fold(Microbatches(), events).account()


def test_steps_closed_by_several_peers_are_one_row_in_any_order() -> None:
    events = [
        at(11, A, closed(1)),
        at(10, B, closed(1, seconds=2.0)),
        at(20, A, closed(2)),
        at(5, C, RawEvent("x", {})),
    ]
    table = fold(StepTable(), events)
    random.Random(0).shuffle(events)
    assert fold(StepTable(), events).rows() == table.rows()
    assert [row.step for row in table.rows()] == [1, 2]
    assert (len(table), table.last, 2 in table, 3 in table) == (2, 2, True, False)
    assert (table[1].closed_at, table[1].seconds, table[1].swapped) == (10, 2.0, {A, B})


def test_tokens_per_s_leaves_out_what_began_before_the_window() -> None:
    events = [at(10, A, closed(1)), at(15, A, closed(2)), at(30, A, closed(3))]
    assert fold(StepTable(), events).tokens_per_s() == 10.0
    assert fold(StepTable(), events[:1]).tokens_per_s() is None
    assert StepTable().tokens_per_s() is None


def test_microbatch_account_says_where_each_one_went() -> None:
    events = [at(1, A, started(1, position)) for position in range(4)]
    events += [at(2, A, started(2, 3)), at(2, A, started(2, 4))]
    done = JourneyCompleted(step=1, microbatch=microbatch(0), tokens=10, loss_sum=1.0, route=(B,), seconds=0.1)
    events += [at(3, A, done), at(4, B, committed(1, 0, 1)), at(4, B, closed(1))]
    told = account(events)
    random.Random(0).shuffle(events)
    assert account(events) == told
    assert len(told.issued) == 5
    assert told.completed == {microbatch(0)}
    assert told.committed == {microbatch(0), microbatch(1)}
    assert told.lost == {microbatch(2)}
    assert told.open == {microbatch(3), microbatch(4)}
    assert not told.unlisted | told.duplicated | told.unknown


def test_microbatch_account_of_a_step_that_nobody_lists_knows_no_end() -> None:
    told = account([at(1, A, started(1, 0)), at(2, A, started(2, 1)), at(3, B, closed(2)), at(4, A, started(3, 2))])
    assert told.unlisted == {microbatch(0), microbatch(1)}
    assert told.open == {microbatch(2)}
    assert not told.lost


def test_microbatch_account_of_a_microbatch_committed_in_two_steps_or_twice_in_one_is_duplicated() -> None:
    events = [at(1, B, committed(1, 0, 1, 1)), at(2, B, committed(2, 0, 2))]
    told = account(events)
    assert told.duplicated == {microbatch(0), microbatch(1)}
    assert told.unknown == {microbatch(0), microbatch(1), microbatch(2)}


def test_microbatch_account_of_a_step_written_by_two_leaders_counts_it_once() -> None:
    assert not account([at(1, B, committed(1, 0, 1)), at(1, C, committed(1, 1, 0))]).duplicated


def test_bytes_by_step_add_up_over_peers_with_each_ones_last_word() -> None:
    events = [
        at(1, A, LinkUsage(step=1, bytes_sent=5, bytes_received=6)),
        at(2, A, LinkUsage(step=1, bytes_sent=10, bytes_received=20)),
        at(2, B, LinkUsage(step=1, bytes_sent=1, bytes_received=2)),
    ]
    assert fold(TrafficView(), events).by_step == {1: StepBytes(sent=11, received=22, peers=2)}


def test_digest_mismatches_are_found_though_nobody_reported_them() -> None:
    part = stage_part(0)
    events = [
        at(1, A, closed(1)),
        at(1, B, closed(1)),
        at(2, A, closed(2)),
        at(2, B, closed(2, digests={"stage-0": "d1"})),
        at(3, A, DigestMismatch(step=3, part=part, digests={A: "x", B: "y", C: "y"})),
    ]
    assert fold(Digests(), events).mismatches() == [
        Mismatch(step=2, part=part, digests={"d0": frozenset({A}), "d1": frozenset({B})}),
        Mismatch(step=3, part=part, digests={"x": frozenset({A}), "y": frozenset({B, C})}),
    ]
