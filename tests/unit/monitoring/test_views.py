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
    PeerLost,
    PeerReady,
    PeerStarted,
    PeerStopped,
    StepClosed,
)
from swarm.ids import MicrobatchId, PeerId, stage_part
from swarm.monitoring import views
from swarm.monitoring.reader import RawEvent, Recorded

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


def test_steps_closed_by_several_peers_are_one_row_in_any_order() -> None:
    events = [
        at(11, A, closed(1)),
        at(10, B, closed(1, seconds=2.0)),
        at(20, A, closed(2)),
        at(5, C, RawEvent("x", {})),
    ]
    table = views.steps(events)
    random.Random(0).shuffle(events)
    assert views.steps(events) == table
    assert list(table) == [1, 2]
    assert (table[1].closed_at, table[1].seconds, table[1].swapped) == (10, 2.0, {A, B})


def test_tokens_per_s_leaves_out_what_began_before_the_window() -> None:
    assert views.tokens_per_s([at(10, A, closed(1)), at(15, A, closed(2)), at(30, A, closed(3))]) == 10.0
    assert views.tokens_per_s([at(10, A, closed(1))]) is None
    assert views.tokens_per_s([]) is None


def test_microbatch_account_says_where_each_one_went() -> None:
    events = [at(1, A, started(1, position)) for position in range(4)]
    events += [at(2, A, started(2, 3)), at(2, A, started(2, 4))]
    done = JourneyCompleted(step=1, microbatch=microbatch(0), tokens=10, loss_sum=1.0, route=(B,), seconds=0.1)
    events += [at(3, A, done), at(4, B, committed(1, 0, 1)), at(4, B, closed(1))]
    account = views.microbatch_account(events)
    assert len(account.issued) == 5
    assert account.completed == {microbatch(0)}
    assert account.committed == {microbatch(0), microbatch(1)}
    assert account.lost == {microbatch(2)}
    assert account.open == {microbatch(3), microbatch(4)}
    assert not account.duplicated
    assert not account.unknown


def test_microbatch_account_of_a_microbatch_committed_in_two_steps_or_twice_in_one_is_duplicated() -> None:
    events = [at(1, B, committed(1, 0, 1, 1)), at(2, B, committed(2, 0, 2))]
    account = views.microbatch_account(events)
    assert account.duplicated == {microbatch(0), microbatch(1)}
    assert account.unknown == {microbatch(0), microbatch(1), microbatch(2)}


def test_microbatch_account_of_a_step_written_by_two_leaders_counts_it_once() -> None:
    account = views.microbatch_account([at(1, B, committed(1, 0, 1)), at(1, C, committed(1, 1, 0))])
    assert not account.duplicated


def test_bytes_by_step_add_up_over_peers_with_each_ones_last_word() -> None:
    events = [
        at(1, A, LinkUsage(step=1, bytes_sent=5, bytes_received=6)),
        at(2, A, LinkUsage(step=1, bytes_sent=10, bytes_received=20)),
        at(2, B, LinkUsage(step=1, bytes_sent=1, bytes_received=2)),
    ]
    assert views.bytes_by_step(events) == {1: views.StepBytes(sent=11, received=22, peers=2)}


def test_digest_mismatches_are_found_though_nobody_reported_them() -> None:
    part = stage_part(0)
    events = [
        at(1, A, closed(1)),
        at(1, B, closed(1)),
        at(2, A, closed(2)),
        at(2, B, closed(2, digests={"stage-0": "d1"})),
        at(3, A, DigestMismatch(step=3, part=part, digests={A: "x", B: "y", C: "y"})),
    ]
    assert views.digest_mismatches(events) == [
        views.Mismatch(step=2, part=part, digests={"d0": frozenset({A}), "d1": frozenset({B})}),
        views.Mismatch(step=3, part=part, digests={"x": frozenset({A}), "y": frozenset({B, C})}),
    ]


def test_roster_tells_each_peers_latest_state_and_why() -> None:
    def begin(name: str) -> PeerStarted:
        return PeerStarted(role="stage", name=name, pid=1, addresses=(), seconds=0.1)

    events = [
        at(5, A, PeerLost(peer=B, name="stage-b", reason="no answer")),
        at(1, B, begin("stage-b")),
        at(2, B, PeerReady(part=stage_part(0), step=0, reason="genesis", seconds=0.1)),
        at(1, A, begin("stage-a")),
        at(6, A, PeerStopped(reason="done", exit_code=0)),
        at(7, B, PeerLost(peer=A, name="stage-a", reason="no answer")),
    ]
    rows = views.roster(events)
    assert (rows[A].state, rows[A].reason) == ("stopped", "done")
    assert (rows[B].state, rows[B].reason, rows[B].part, rows[B].role) == ("lost", "no answer", "stage-0", "stage")
