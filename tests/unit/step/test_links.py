"""What is believed of links, from what members measured."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from swarm.consensus.records import NO_RECORD, CloseRecord, MeasuredLink
from swarm.consensus.roster import Roster
from swarm.ids import PeerId
from swarm.schema import MAX_BYTES_PER_S, MAX_LATENCY_US
from swarm.step.decisions import measured
from swarm.step.messages import Averaged
from tests.harness.rigs.step import listed

PEERS = [PeerId(f"p{number}") for number in range(4)]
ROSTER = Roster(listed(peer, name=peer, incarnation=1) for peer in PEERS)


def record(links: dict[str, MeasuredLink]) -> CloseRecord:
    return CloseRecord(
        run="0" * 64, step=1, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, clip=1.0, lr=0.0, digests={},
        cursors={}, roster=ROSTER.members, links=links, previous=NO_RECORD,
    )  # fmt: skip


def answers(rates: dict[PeerId, int], latency: int = 1000) -> dict[PeerId, Averaged]:
    """Each heard each other's share of its bandwidth."""
    return {
        peer: Averaged(
            digest="0" * 16,
            sq_norm=0.0,
            cursor=None,
            heard={other: (latency, rates[other]) for other in PEERS if other != peer},
        )
        for peer in PEERS
    }


EVEN = dict.fromkeys(PEERS, 100)


def test_bandwidth_is_that_of_all_receivers_together() -> None:
    assert measured(record({}), answers(EVEN), ROSTER) == dict.fromkeys(PEERS, (1000, 300))
    slow = EVEN | {PEERS[0]: 5}
    assert measured(record({}), answers(slow), ROSTER)[PEERS[0]] == (1000, 15)
    assert measured(record({}), answers(slow), ROSTER)[PEERS[1]] == (1000, 300)


def test_one_that_hears_everybody_slowly_is_slow_itself() -> None:
    said = answers(EVEN)
    said[PEERS[2]] = said[PEERS[2]].model_copy(
        update={"heard": {peer: (1000, 3) for peer in PEERS if peer != PEERS[2]}}
    )
    found = measured(record({}), said, ROSTER)
    assert found[PEERS[2]] == (1000, 9)
    assert found[PEERS[0]] == (1000, 300), "who lies moves nobody else"


@pytest.mark.parametrize("known", [0, 100])
def test_whatever_one_says_makes_a_record_and_nobody_elses_link_slower(known: int) -> None:
    """The others measured nothing, as vectors were small, or the same of all."""
    liar = PEERS[2]
    for lie in (1, MAX_BYTES_PER_S):
        said = answers(dict.fromkeys(PEERS, known))
        heard = {peer: (MAX_LATENCY_US, lie) for peer in PEERS if peer != liar}
        said[liar] = said[liar].model_copy(update={"heard": heard})
        found = measured(record({}), said, ROSTER)
        record(found)
        assert all(found[peer] == (1000, 3 * known) for peer in PEERS if peer != liar)


def test_of_two_that_heard_a_member_the_higher_counts_and_one_of_two_is_not_enough() -> None:
    three = Roster(ROSTER.members[:3])
    a, b, c = PEERS[:3]

    def said(by_b: int, by_c: int) -> dict[PeerId, Averaged]:
        found = answers(dict.fromkeys(PEERS, 0))
        for peer, rate in ((b, by_b), (c, by_c)):
            found[peer] = found[peer].model_copy(update={"heard": {a: (1000, rate)}})
        return found

    assert measured(record({}), said(100, 1), three)[a] == (1000, 200)
    assert measured(record({a: (1000, 77)}), said(0, 1), three)[a] == (1000, 77)


def test_old_measurements_are_moved_and_kept_where_there_is_no_new_one() -> None:
    before = record({PEERS[0]: (2000, 700), "gone": (1, 1)})
    found = measured(before, answers(EVEN), ROSTER)
    assert found[PEERS[0]] == (1750, 600)
    assert "gone" not in found
    quiet = {peer: Averaged(digest="0" * 16, sq_norm=0.0, cursor=None) for peer in PEERS}
    assert measured(before, quiet, ROSTER) == {PEERS[0]: (2000, 700)}
    assert measured(record({}), {}, ROSTER) == {}


@pytest.mark.parametrize("lie", [(-1, 1), (1, -1), (1, 1 << 41), (10**9, 1), (1.5, 1), (1,)])
def test_what_no_link_can_be_is_refused(lie: tuple[int, int]) -> None:
    with pytest.raises(ValidationError):
        Averaged(digest="0" * 16, sq_norm=0.0, cursor=None, heard={PEERS[0]: lie})
    with pytest.raises(ValidationError):
        record({PEERS[0]: lie})
