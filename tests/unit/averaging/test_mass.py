"""Push-sum with acknowledgements: who owns a parcel when, and that values still meet."""

from __future__ import annotations

import pytest
import torch

from swarm.averaging.gossip.mass import Parcel, ParcelTaken, ParcelTransferred, PushSumNode, PushSumState
from swarm.errors import Violation
from swarm.ids import PeerId

A, B = PeerId("a"), PeerId("b")


def node(value: float, weight: float = 1.0) -> PushSumNode:
    return PushSumNode(PushSumState(torch.tensor([value]), weight), most_weight=8.0)


def put_aside(one: PushSumNode) -> dict[PeerId, int]:
    return {peer: parcel.number for peer, parcel in one._aside.items()}


def held(one: PushSumNode) -> tuple[float, float]:
    return one.held.sum.item(), one.held.weight


def sent(sender: PushSumNode, target: PeerId) -> Parcel:
    parcel = sender.push(target)
    assert parcel is not None
    return parcel


def test_parcel_moves_half_in_three_messages() -> None:
    a, b = node(8.0), node(0.0)
    parcel = sent(a, B)
    assert held(a) == (4.0, 0.5)
    answer = b.take(A, parcel)
    assert answer == ParcelTaken(1)
    assert held(b) == (0.0, 1.0), "the sender may still take it back"
    assert a.taken(B, answer) == ParcelTransferred(1)
    b.yielded(A, ParcelTransferred(1))
    assert held(b) == (4.0, 1.5)
    assert put_aside(b) == {}
    assert sent(a, B).number == 2, "it owes no answer"


def test_target_that_owes_an_answer_gets_nothing_more() -> None:
    a = node(8.0)
    parcel = sent(a, B)
    assert a.push(B) is None
    assert held(a) == (4.0, 0.5)
    assert a.unanswered_by(B) is parcel


def test_change_moves_the_value_whatever_the_weight() -> None:
    a = node(8.0, weight=2.0)
    a.change(torch.tensor([0.5]))
    assert a.held.value.item() == 4.5


@pytest.mark.parametrize(
    ("mass", "what"),
    [
        (PushSumState(torch.tensor([1.0, 2.0]), 1.0), "mass of"),
        (PushSumState(torch.tensor([1.0], dtype=torch.float64), 1.0), "mass of"),
        (PushSumState(torch.tensor([float("nan")]), 1.0), "not finite"),
        (PushSumState(torch.tensor([1.0]), 0.0), "weight"),
        (PushSumState(torch.tensor([1.0]), 9.0), "weight"),
        (PushSumState(torch.tensor([1.0]), float("nan")), "weight"),
    ],
)
def test_mass_that_no_honest_peer_sends_is_refused(mass: PushSumState, what: str) -> None:
    b = node(1.0)
    with pytest.raises(Violation, match=what):
        b.take(A, Parcel(1, mass))
    assert held(b) == (1.0, 1.0)
    assert put_aside(b) == {}


def test_numbers_out_of_turn_are_refused() -> None:
    b = node(1.0)
    with pytest.raises(Violation, match="out of turn"):
        b.take(A, Parcel(2, PushSumState(torch.tensor([1.0]), 1.0)))
    with pytest.raises(Violation, match="never sent"):
        b.taken(A, ParcelTaken(1))
