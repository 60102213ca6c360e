"""Everybody computes the same first roster, and those who join take the places where they are missed most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus import placement
from swarm.consensus.placement import (
    MAX_FORESEEN,
    Candidate,
    Places,
    Wish,
    assign_stages,
    choose_place,
    without_memory,
)
from swarm.consensus.roster import Roster
from swarm.errors import Refused
from swarm.ids import ENDS, PartName, PeerId, shared_part, stage_of, stage_part
from swarm.models.spec import SplitConfig
from tests.harness.rigs.consensus import listed

TWO_STAGES = SplitConfig(stages=2).parts


def candidate(peer: str, role: str = "stage", stage: int | None = None) -> Candidate:
    return Candidate(peer=peer, role=role, name=peer, stage=stage, addresses=())  # type: ignore[arg-type]


def test_assign_without_wishes_balances_the_stages() -> None:
    roster, reasons = assign_stages([candidate(f"h{i}") for i in range(5)], TWO_STAGES)
    assert sorted(map(len, roster.columns())) == [2, 3]
    assert all("fewest replicas" in reason for reason in reasons.values())


def test_assign_hears_wishes_first_and_fills_the_gaps() -> None:
    hosts = [candidate("a", stage=1), candidate("b", stage=1), candidate("c"), candidate("d", stage=9)]
    roster, reasons = assign_stages(hosts, TWO_STAGES)
    assert roster.replicas(stage_part(1)) == ("a", "b")
    assert roster.replicas(stage_part(0)) == ("c", "d")
    assert reasons[PeerId("a")] == "asked for"


def host(peer: str, *fits: int, of: int, stage: int | None = None) -> Candidate:
    """A stage host whose memory holds these stages alone."""
    return candidate(peer, stage=stage).model_copy(update={"unfit": tuple(s for s in range(of) if s not in fits)})


def test_assign_leaves_large_stages_to_those_that_can_hold_them() -> None:
    for large in "abc":  # in whichever order they come
        hosts = [host(name, *((0, 1, 2) if name == large else (1, 2)), of=3) for name in "abc"]
        roster, reasons = assign_stages(hosts, SplitConfig(stages=3, ends="hosted").parts)
        assert roster.replicas(stage_part(0)) == (large,)
        assert all(roster.replicas(stage_part(stage)) for stage in (1, 2))
        small = next(name for name in "abc" if name != large)
        assert reasons[PeerId(small)].startswith("fewest replicas of those that fit")


def test_assign_hears_no_wish_that_takes_the_last_place_of_another() -> None:
    hosts = [host("a", 0, 1, of=2, stage=1), host("b", 1, of=2, stage=0), host("c", 1, of=2)]
    roster, reasons = assign_stages(hosts, SplitConfig(stages=2, ends="hosted").parts)
    assert roster.replicas(stage_part(0)) == ("a",), "it alone can hold it"
    assert roster.replicas(stage_part(1)) == ("b", "c")
    assert "asked for" not in reasons.values()


def test_assign_says_for_which_stage_nobody_has_the_memory() -> None:
    hosts = [host("a", 1, of=2), host("b", 1, of=2)]
    with pytest.raises(Refused, match="no stage host is left with the memory for stage-0"):
        assign_stages(hosts, SplitConfig(stages=2, ends="hosted").parts)
    assert without_memory(hosts, TWO_STAGES) == "no stage host is left with the memory for stage-0"
    assert without_memory([*hosts, host("c", 0, 1, of=2)], TWO_STAGES) == ""
    nowhere = host("n", of=2)  # it says that it can hold none: it gets one, and refuses it itself
    assert nowhere.fitting(TWO_STAGES[:2]) == list(TWO_STAGES[:2])


@given(st.lists(st.integers(min_value=1, max_value=4), min_size=4, max_size=12))
def test_assign_holds_every_stage_whenever_that_can_be(depths: list[int]) -> None:
    """Stages that need more and more memory: a host of depth d holds the d smallest. Hall's theorem says when all of
    them can be held."""
    hosts = [host(f"h{number}", *range(depth), of=4) for number, depth in enumerate(depths)]
    possible = all(sum(depth > stage for depth in depths) >= 4 - stage for stage in range(4))
    assert (without_memory(hosts, SplitConfig(stages=4).parts) == "") is possible
    if possible:
        roster, _ = assign_stages(hosts, SplitConfig(stages=4, ends="hosted").parts)
        for stage, held in enumerate(roster.columns()):
            assert held
            assert all(depths[int(peer[1:])] > stage for peer in held)


def test_assign_gives_trainers_the_ends_only_when_they_are_private() -> None:
    peers = [candidate("h"), candidate("t", role="trainer"), candidate("z", role="bootstrap")]
    assert assign_stages(peers, SplitConfig(stages=1).parts)[0]["t"].part == "ends"
    hosted = assign_stages(peers, SplitConfig(stages=1, ends="hosted").parts)[0]
    assert hosted["t"].part is None
    assert hosted.parts == ("stage-0",)
    assert hosted.trainers == ("t",)


def test_joiner_does_not_count_replicas_that_are_about_to_leave() -> None:
    roster = Roster(listed(f"p{i}", part=f"stage-{i}", name="x") for i in range(2))
    for stage in range(2):
        leaving = {roster.replicas(stage_part(stage))[0]}
        places = Places(parts=TWO_STAGES, leaving=leaving)
        for joiner in map(PeerId, "abcdef"):
            part, why = choose_place(roster, joiner, "stage", Wish(), places)
            assert (part, why) == (stage_part(stage), "it has the fewest replicas (0, and 1 about to leave)")
    assert choose_place(roster, PeerId("a"), "stage", Wish(0), places)[0] == "stage-0", "a wish is a wish"


# --- peers on their way ----------------------------------------------------------------------------------------------


def holding(*counts: int) -> Roster:
    """A roster with so many replicas of each stage."""
    members = [(stage, number) for stage, count in enumerate(counts) for number in range(count)]
    return Roster(listed(f"m{stage}x{number}", part=stage_part(stage)) for stage, number in members)


def chosen(
    roster: Roster,
    peer: str,
    arriving: Mapping[PeerId, PartName | None],
    stages: int,
    *,
    lost: Sequence[str] = (),
    now: PartName | None = None,
) -> tuple[int, str]:
    """The stage that a peer takes, and why."""
    places = Places(parts=SplitConfig(stages=stages).parts, arriving=arriving, lost=lost, chosen=now)
    part, why = choose_place(roster, PeerId(peer), "stage", Wish(), places)
    assert part is not None
    stage = stage_of(part)
    assert stage is not None
    return stage, why


def test_newcomer_does_not_expect_others_where_their_memory_does_not_reach() -> None:
    """Two before it, in the order of ids, cannot hold the stage with the fewest replicas."""
    roster, joiner = holding(1, 2), PeerId("z")
    arriving: dict[PeerId, PartName | None] = {PeerId("a"): None, PeerId("b"): None}
    places = Places(parts=TWO_STAGES, arriving=arriving)
    assert choose_place(roster, joiner, "stage", Wish(), places)[0] != stage_part(0)
    places = Places(
        parts=TWO_STAGES, arriving=arriving, cannot={PeerId("a"): TWO_STAGES[:1], PeerId("b"): TWO_STAGES[:2]}
    )
    assert choose_place(roster, joiner, "stage", Wish(), places)[0] == stage_part(0)


def test_joiner_counts_neither_itself_nor_members_nor_what_is_no_stage_of_the_run() -> None:
    arriving: dict[PeerId, PartName | None] = {
        PeerId("p"): stage_part(0),
        PeerId("m0x0"): stage_part(0),
        PeerId("x"): stage_part(7),
        PeerId("y"): PartName("ends"),
    }
    assert chosen(holding(2, 3), "p", arriving, 2) == (0, "it has the fewest replicas (2)")


def test_of_two_that_chose_the_same_stage_one_moves_when_both_choose_again() -> None:
    both = {PeerId("a"): stage_part(0), PeerId("b"): stage_part(0)}
    assert [chosen(holding(3, 3), peer, both, 2, now=stage_part(0))[0] for peer in "ab"] == [0, 1]
    assert chosen(holding(4, 3), "a", both, 2, now=stage_part(0))[0] == 1, "another one is better"
    assert chosen(holding(3, 3), "a", both, 2, lost=("stage-1",), now=stage_part(0))[0] == 1


claims = st.dictionaries(
    st.text("abcxyz", min_size=1, max_size=3).map(PeerId),
    st.one_of(st.none(), st.integers(0, 9).map(stage_part), st.just(PartName("ends"))),
    max_size=3 * MAX_FORESEEN,
)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), claims, st.text("abcxyz", min_size=1, max_size=3))
def test_lies_in_the_directory_steer_a_joiner_within_bounds(
    counts: list[int], arriving: dict[PeerId, PartName | None], peer: str
) -> None:
    stage, why = chosen(holding(*counts), peer, arriving, len(counts))
    fewest = min(counts)
    assert counts[stage] <= fewest + max(2, fewest // 2)
    assert why


@pytest.mark.parametrize("liars", [1, 100, 2000])
def test_stage_to_which_many_claim_to_be_on_their_way_is_filled_all_the_same(liars: int) -> None:
    """Nobody ever arrives, and the claims stay in the directory for as long as others join."""
    arriving = {PeerId(f"liar{i}"): stage_part(0) for i in range(liars)}
    counts = [4, 4, 4]
    for number in range(12):
        counts[chosen(holding(*counts), f"joiner{number}", arriving, 3)[0]] += 1
    assert min(counts) >= 2 * max(counts) // 3 - 1, counts
    assert counts[0] > 4


def test_roster_holds_whatever_a_state_is_cut_into_whether_stages_part_or_come_together_again() -> None:
    together, apart = (shared_part(2), ENDS), (*TWO_STAGES[:2], ENDS)
    hosts = [listed(f"h{i}", part=shared_part(2)) for i in range(3)]
    shared = Roster([*hosts, listed("t", "trainer", ENDS)])
    assert placement.holding(shared, together) is shared
    parted = placement.holding(shared, apart)
    assert [len(parted.replicas(part)) for part in apart] == [2, 1, 1]
    assert placement.holding(parted, together).members == shared.members
    with pytest.raises(Refused, match="1 stage hosts cannot hold 2"):
        placement.holding(Roster([hosts[0], listed("t", "trainer", ENDS)]), apart)
