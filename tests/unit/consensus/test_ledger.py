"""The ledger counts exactly, whatever is repeated or claimed."""

import pytest

from swarm.consensus.ledger import Ledger, assigned, fed, fixed_quota, free_quota, weights
from swarm.consensus.records import Contribution
from swarm.errors import Refused, WrongStep
from swarm.ids import ENDS, MicrobatchId, PeerId, stage_part

ANN, BEN = PeerId("ann"), PeerId("ben")


def contribution(
    trainer: PeerId, position: int, route: tuple[str, ...] = ("a0", "b0"), tokens: int = 8
) -> Contribution:
    return Contribution(
        microbatch=MicrobatchId(trainer, "0" * 16, 0, position), tokens=tokens, loss_sum=1.5, route=route
    )


def ledger(target: int = 4, share: float = 1.0) -> Ledger:
    return Ledger(7, target, free_quota((ANN, BEN), target, share))


def test_lease_beyond_the_target_grants_only_what_is_left() -> None:
    book = ledger(4)
    assert book.lease(7, ANN, 3)[0] == 3
    assert book.lease(7, BEN, 3)[0] == 1
    total, reason = book.lease(7, BEN, 2)
    assert total == 1
    assert "fully leased" in reason


def test_lease_repeated_leases_nothing_twice() -> None:
    book = ledger(4)
    assert book.lease(7, ANN, 2)[0] == 2
    assert book.lease(7, ANN, 2)[0] == 2
    assert book.lease(7, BEN, 4)[0] == 2


def test_lease_above_the_share_is_refused_with_a_reason() -> None:
    book = ledger(4, share=0.5)
    assert book.lease(7, ANN, 4)[0] == 2
    assert "share" in book.lease(7, ANN, 4)[1]


def test_max_share_below_an_equal_share_still_fills_the_step() -> None:
    assert free_quota((ANN, BEN), 5, 0.01) == {ANN: 3, BEN: 3}


def test_lease_of_another_step_or_by_a_stranger_is_refused() -> None:
    with pytest.raises(WrongStep):
        ledger().lease(6, ANN, 1)
    with pytest.raises(Refused, match="not counted on"):
        ledger().lease(7, PeerId("eve"), 1)


def test_complete_counts_a_microbatch_once() -> None:
    book = ledger(2)
    book.lease(7, ANN, 2)
    assert book.complete(7, ANN, contribution(ANN, 0))
    assert not book.complete(7, ANN, contribution(ANN, 0))
    assert not book.full
    assert book.complete(7, ANN, contribution(ANN, 1))
    assert book.full


def test_complete_of_the_same_microbatch_told_differently_is_refused() -> None:
    book = ledger()
    book.lease(7, ANN, 2)
    book.complete(7, ANN, contribution(ANN, 0))
    with pytest.raises(Refused, match="differently"):
        book.complete(7, ANN, contribution(ANN, 0, tokens=9))


def test_complete_without_a_lease_or_for_another_trainer_is_refused() -> None:
    book = ledger()
    book.lease(7, ANN, 1)
    with pytest.raises(Refused, match="no more were leased"):
        book.complete(7, BEN, contribution(BEN, 0))
    with pytest.raises(Refused, match="its own"):
        book.complete(7, BEN, contribution(ANN, 0))


def test_weights_add_up_to_the_same_tokens_for_every_part() -> None:
    committed = [
        contribution(ANN, 0, ("a0", "b1"), 8),
        contribution(BEN, 0, ("a1", "b1"), 6),
        contribution(BEN, 1, ("a0", "b1"), 5),
    ]
    at_a = weights(committed, (PeerId("a0"), PeerId("a1")), stage_part(0))
    at_b = weights(committed, (PeerId("b0"), PeerId("b1")), stage_part(1))
    ends = weights(committed, (ANN, BEN), ENDS)
    assert at_a == {"a0": 13, "a1": 6}
    assert at_b == {"b0": 0, "b1": 19}
    assert ends == {ANN: 8, BEN: 11}
    assert fed(committed, stage_part(0))
    assert not fed([contribution(ANN, 0, ("a0", "b1"), 0)], stage_part(0))
    routes = {one.microbatch: one.route for one in committed}
    first, second, third = routes
    held = [{work.microbatch: route for work, route in assigned(1, committed, *about).items()} for about in (
        (PeerId("a0"), stage_part(0)), (BEN, ENDS),
    )]  # fmt: skip
    assert held[0] == {first: routes[first], third: routes[third]}
    assert held[1] == {second: routes[second], third: routes[third]}


def test_committed_is_ordered_by_id_whatever_the_order_of_arrival() -> None:
    orders = ([0, 1, 2], [2, 0, 1])
    results = []
    for order in orders:
        book = ledger(3)
        book.lease(7, ANN, 3)
        for position in order:
            book.complete(7, ANN, contribution(ANN, position))
        results.append(book.committed())
    assert results[0] == results[1]


@pytest.mark.parametrize("target", [1, 2, 5, 16])
def test_fixed_quota_covers_the_target_in_every_step(target: int) -> None:
    trainers = (ANN, BEN, PeerId("cay"))
    for step in range(6):
        assert sum(fixed_quota(step, trainers, target).values()) == target


def test_batch_waits_for_those_who_have_not_told_while_others_are_done() -> None:
    book = ledger(4, share=0.5)
    assert book.waits_for() == (), "everybody has something to do"
    book.lease(7, ANN, 2)
    book.complete(7, ANN, contribution(ANN, 0))
    assert (book.done, book.waits_for()) == (1, ())
    book.complete(7, ANN, contribution(ANN, 1))
    assert book.waits_for() == (BEN,), "its share is kept for it"
    book.lease(7, BEN, 2)
    book.complete(7, BEN, contribution(BEN, 0))
    assert (book.done, book.waits_for()) == (3, (BEN,))


def test_batch_that_is_leased_whole_waits_for_who_leased_it() -> None:
    book = ledger(2)
    book.lease(7, ANN, 2)
    assert book.waits_for() == (ANN,)
