"""Plans of moves: the same everywhere, they raise the lowest stage, and never empty one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus.rebalance import (
    MAX_MOVES,
    MAX_PATH,
    NO_RETURN_RECORDS,
    NOTHING_MOVED,
    RISE,
    RULES,
    Balance,
    Copied,
    Move,
    MovePlan,
    RecentMoves,
    RuleName,
    plan,
)
from swarm.consensus.roster import Roster
from swarm.ids import PartName, PeerId, stage_part
from tests.harness.rigs.consensus import listed

A, B, C = (stage_part(stage) for stage in range(3))


def balance(*held: str, **more: Any) -> Balance:
    """Peers of each stage, one letter each."""
    stages = tuple(stage_part(stage) for stage in range(len(held)))
    peers = {PeerId(peer): stages[stage] for stage, names in enumerate(held) for peer in names}
    return Balance(**({"step": 50, "stages": stages, "held": peers} | more))


def copies(**of: PartName) -> Copied:
    """By peer the stage of which it keeps a copy."""
    return {PeerId(peer): (part,) for peer, part in of.items()}


def test_peer_with_a_copy_moves_from_the_strongest_stage_to_the_weakest() -> None:
    found = plan(balance("abcd", "ef"), copies(b=B, f=A))
    assert found.moves == (Move(PeerId("b"), A, B),)
    assert found.reasons == ("stage-1 computes 2, stage-0 4: b from stage-0 to stage-1",)


def test_where_no_copy_leads_there_directly_a_third_stage_passes_a_peer_on() -> None:
    found = plan(balance("abcd", "ef", "ghi"), copies(a=C, g=B))
    assert found.moves == (Move(PeerId("a"), A, C), Move(PeerId("g"), C, B))


def test_nobody_moves_without_a_copy_or_for_too_small_a_gain() -> None:
    assert plan(balance("abcd", "ef"), {}).moves == ()
    assert plan(balance("abc", "ef"), copies(a=B)).moves == (), "the two would only change places"
    assert "no copies lead" in plan(balance("abcd", "ef"), {}).reasons[0]
    fast = {PeerId("e"): 1.0, PeerId("f"): 1.0, PeerId("a"): 0.05}
    assert plan(balance("abcd", "ef", speed=fast), copies(a=B)).moves == (), f"less than {RISE}"


def test_chain_is_no_longer_than_three() -> None:
    held = ("abcd", "efg", "hij", "klm", "no")
    chain = {"a": 1, "e": 2, "h": 3, "k": 4}
    there = {PeerId(peer): (stage_part(stage),) for peer, stage in chain.items()}
    assert plan(balance(*held), there).moves == ()
    shorter = {PeerId("a"): (B,), PeerId("h"): (C,), PeerId("k"): (stage_part(3),)}
    assert len(plan(balance("abcd", *held[2:]), shorter).moves) == MAX_PATH


def test_mover_does_not_come_back_unless_that_stage_lost_somebody() -> None:
    before = Roster([listed("a", part=B), listed("x", part=B)])
    moved = Roster([listed("a", part=A), listed("x", part=B)])
    recent = NOTHING_MOVED.after(45, before, moved)
    there, who = copies(a=B), ("abcd", "ef")
    assert plan(balance(*who, recent=recent), there).moves == ()
    assert plan(balance(*who, recent=recent, step=45 + NO_RETURN_RECORDS), there).moves
    lost = recent.after(46, moved, Roster([listed("a", part=A)]))
    assert plan(balance(*who, recent=lost), there).moves
    assert recent.after(45 + NO_RETURN_RECORDS, moved, moved) == RecentMoves(), "long ago is forgotten"


def test_who_goes_does_not_move_and_who_joins_counts() -> None:
    assert plan(balance("abcd", "ef", going=[PeerId("a")]), copies(a=B)).moves == ()
    joining = {PeerId("z"): B}
    assert plan(balance("abcd", "ef", joining=joining), copies(a=B)).moves == ()
    assert plan(balance("abcde", "fg", joining=joining), copies(a=B, z=A)).moves == (Move(PeerId("a"), A, B),)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_nobody_moves_with_the_last_step(rule: RuleName) -> None:
    found = plan(balance("abcd", "ef", last=True), copies(a=B), rule)
    assert found == MovePlan(reasons=("nobody moves with the last step",))


def test_published_rule_moves_one_peer_from_the_shortest_queues_to_the_longest() -> None:
    queues = {PeerId(peer): load for peer, load in {"a": 1.0, "b": 0.0, "c": 5.0, "d": 4.0}.items()}
    assert plan(balance("ab", "cd", queues=queues), {}, "swarm").moves == (Move(PeerId("b"), A, B),)
    assert plan(balance("a", "cd", queues=queues), {}, "swarm").moves == (), "its only replica stays"
    assert plan(balance("ab", "cd"), {}, "swarm").moves == ()
    assert plan(balance("ab", "cd", queues=queues), copies(a=B), "none").moves == ()


@st.composite
def situations(draw: st.DrawFn) -> tuple[Balance, Copied]:
    """Any swarm: half of it may be gone, stages empty, speeds unlike, and everybody may keep copies of all."""
    stages = tuple(stage_part(stage) for stage in range(draw(st.integers(1, 6))))
    peers = [PeerId(f"p{number}") for number in range(draw(st.integers(0, 24)))]
    held = {peer: draw(st.sampled_from(stages)) for peer in peers}
    some = st.lists(st.sampled_from(peers), unique=True) if peers else st.just([])
    keeps = {peer: tuple(draw(st.lists(st.sampled_from(stages), max_size=3, unique=True))) for peer in peers}
    speeds = draw(st.sampled_from([(1.0,), (1.0, 2.0, 4.0), (0.1, 1.0, 3.3)]))
    left = {peer: ((draw(st.sampled_from(stages)), draw(st.integers(35, 49))),) for peer in draw(some)}
    found = Balance(
        step=50,
        stages=stages,
        held=held,
        joining={PeerId(f"j{i}"): draw(st.sampled_from(stages)) for i in range(draw(st.integers(0, 3)))},
        going=draw(some),
        speed={peer: draw(st.sampled_from(speeds)) for peer in peers},
        queues={peer: float(draw(st.integers(0, 9))) for peer in peers},
        recent=RecentMoves(left),
    )
    return found, keeps


@given(situations(), st.sampled_from(sorted(RULES)))
def test_no_rule_empties_a_stage_whoever_moves_and_whoever_is_gone(
    situation: tuple[Balance, Copied], rule: RuleName
) -> None:
    now, keeps = situation
    moves = plan(now, keeps, rule).moves
    movers = {move.peer for move in moves}
    assert len(movers) == len(moves) <= MAX_MOVES
    assert not movers & set(now.going)
    stay = Counter(part for peer, part in now.staying() if peer not in movers)
    for move in moves:
        assert now.held[move.peer] == move.origin != move.target
        assert stay[move.origin] >= 1
    again = Balance(**{name: getattr(now, name) for name in now.__slots__} | {"held": dict(reversed(now.held.items()))})
    assert plan(again, dict(reversed(keeps.items())), rule).moves == moves, "the same everywhere"


@given(situations())
def test_ours_raises_the_lowest_over_copies_alone(situation: tuple[Balance, Copied]) -> None:
    now, keeps = situation
    found = plan(now, keeps)
    before, after = now.capacities(), now.capacities()
    for move in found.moves:
        assert move.target in keeps[move.peer]
        assert not now.recent.bars(move.peer, move.target, now.step)
        after[move.origin] -= now.speed[move.peer]
        after[move.target] += now.speed[move.peer]
    assert all(count == 1 for count in Counter(move.origin for move in found.moves).values())
    assert all(count == 1 for count in Counter(move.target for move in found.moves).values())
    assert len(found.moves) <= MAX_PATH * len(found.reasons)
    low, high = sorted(before.values()), sorted(after.values())
    assert found.reasons
    assert not found.moves or [round(one, 6) for one in high] > [round(one, 6) for one in low], "leximin"
