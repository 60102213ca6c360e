"""Who keeps copies: no replica, of private ends no stage host; as many as there can be, evenly, and mostly the same."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus.copies import (
    COPY_BYTES_S,
    KEPT_UPDATES,
    MAX_COPIES,
    copies_of,
    copy_duties,
    copy_holders,
    copy_rate,
    fewer_copies,
    on_one_machine,
)
from swarm.consensus.roster import Member, Role, Roster
from swarm.ids import ENDS, PartName, PeerId

PARTS = ("ends", "stage-0", "stage-1", "stage-2", "stage-3")
COPIES = st.integers(0, MAX_COPIES)


def listed(peer: str, part: str | None) -> Member:
    role: Role = "bootstrap" if part is None else "trainer" if part == "ends" else "stage"
    return Member(peer=peer, role=role, name=peer, part=part, addresses=())


NAMES = st.text("abcdefgh", min_size=1, max_size=4)
ROSTERS = st.dictionaries(NAMES, st.sampled_from((*PARTS, None)), max_size=24).map(
    lambda parts: Roster(listed(peer, part) for peer, part in parts.items())
)


def able(roster: Roster, part: str) -> set[str]:
    """Who may keep a copy."""
    others = [member for member in roster.members if member.part != part]
    return {member.peer for member in others if part != "ends" or member.role != "stage"}


def loads(roster: Roster, copies: int) -> Counter[PeerId]:
    return Counter(peer for part in roster.parts for peer in copy_holders(roster, part, copies))


@given(roster=ROSTERS, copies=COPIES)
def test_holders_are_as_many_as_there_can_be_and_never_replicas(roster: Roster, copies: int) -> None:
    for part in roster.parts:
        holders = copy_holders(roster, part, copies)
        others = able(roster, part)
        assert len(set(holders)) == len(holders) == min(copies, len(others))
        assert set(holders) <= others
    few = {part: len(copy_holders(roster, part, copies)) for part in roster.parts}
    assert fewer_copies(roster, copies) == {part: number for part, number in few.items() if number < copies}
    assert copy_holders(roster, PartName("stage-9"), copies) == ()


@given(roster=ROSTERS, copies=COPIES)
def test_copies_of_a_peer_are_those_that_name_it(roster: Roster, copies: int) -> None:
    for peer in roster.peers:
        named = [part for part in roster.parts if peer in copy_holders(roster, part, copies)]
        assert sorted(copies_of(roster, peer, copies)) == named
    assert copies_of(roster, PeerId("nobody"), copies) == ()


@given(roster=ROSTERS, copies=COPIES)
def test_copies_are_spread_so_that_nobody_has_two_more_than_who_could_help(roster: Roster, copies: int) -> None:
    load = loads(roster, copies)
    for peer, most in load.items():
        free = (
            able(roster, part) - set(copy_holders(roster, part, copies)) for part in copies_of(roster, peer, copies)
        )
        assert any(all(load[other] >= most - 1 for other in others) for others in free)


def test_holders_that_could_be_moved_come_first() -> None:
    several = [listed(f"s{index}", "stage-0") for index in range(4)]
    alone = [listed("a", "stage-1"), listed("b", "stage-2")]
    roster = Roster([*several, *alone, listed("t", "ends")])
    for part in ("stage-1", "stage-2"):
        (holder,) = copy_holders(roster, PartName(part), 1)
        assert holder.startswith("s"), "its own part has others"


def test_private_ends_are_copied_to_no_stage_host_not_even_to_one_that_holds_no_stage_yet() -> None:
    hosts = [listed(f"s{index}", f"stage-{index % 2}") for index in range(4)]
    idle = Member(peer="id1e", role="stage", name="idle", part=None, addresses=())
    roster = Roster([*hosts, idle, listed("t", "ends"), listed("founder", None)])
    assert copy_holders(roster, ENDS, 2) == ("founder",)
    assert fewer_copies(roster, 2) == {ENDS: 1}
    without = Roster(member for member in roster.members if member.peer != "founder")
    assert copy_holders(without, ENDS, 2) == ()
    assert fewer_copies(without, 2) == {ENDS: 0}
    assert fewer_copies(roster, 1) == {} == fewer_copies(without, 0)


def test_holders_stay_mostly_the_same_when_one_peer_leaves() -> None:
    """Over many runs: what the one that left kept must move, and little else does."""
    rng = random.Random(7)
    moved = left = kept = 0
    for _ in range(300):
        roster = Roster(
            listed(f"p{rng.randrange(10**9)}", rng.choice([*PARTS, None])) for _ in range(rng.randrange(6, 25))
        )
        gone = rng.choice(roster.peers)
        after = Roster(member for member in roster.members if member.peer != gone)
        for part in after.parts:
            before, now = (set(copy_holders(one, part, 2)) for one in (roster, after))
            moved, left, kept = moved + len(now - before), left + (gone in before), kept + len(now & before)
    assert moved < left + 0.07 * kept, f"{moved} copies moved where {left} had to, and {kept} stayed"


@pytest.mark.parametrize(
    ("total", "step_s", "rate"),
    [
        (1 << 20, None, COPY_BYTES_S),
        (1 << 20, 60.0, COPY_BYTES_S),
        (1 << 30, 4.0, (1 << 30) / (KEPT_UPDATES / 2 * 4.0)),
        (1 << 30, 0.0, COPY_BYTES_S),
    ],
)
def test_copy_rate_is_low_but_as_high_as_it_takes_to_catch_up(total: int, step_s: float | None, rate: float) -> None:
    assert copy_rate(total, step_s) == rate


def drawn(peer: str, part: str) -> bytes:
    return hashlib.sha256(f"{peer}|{part}".encode()).digest()


@given(ROSTERS, COPIES)
def test_duties_are_those_of_all_pairs_in_order(roster: Roster, copies: int) -> None:
    """What is looked at of the pairs of peer and part is no more than it takes, and gives what all of them do."""
    held = Counter(member.part for member in roster.members)
    pairs = sorted(
        (held[member.part] < 2 and member.part is not None, drawn(peer, part), peer, part)
        for part in roster.parts
        for member in roster.members
        if (peer := member.peer) in able(roster, part)
    )
    plain: dict[str, list[str]] = {part: [] for part in roster.parts}
    load: Counter[str] = Counter()
    for most in range(1, len(roster.parts) + 1):
        for _, _, peer, part in pairs:
            if load[peer] < most and len(plain[part]) < copies and peer not in plain[part]:
                plain[part].append(peer)
                load[peer] += 1
    assert {part: list(peers) for part, peers in copy_duties(roster, copies).items()} == plain


def test_duties_are_found_once_for_a_roster_and_anew_for_another() -> None:
    one = [listed(peer, part) for peer, part in zip("abcdef", PARTS * 2, strict=False)]
    roster, other = Roster(one), Roster(one)
    assert copy_duties(roster, 2) is copy_duties(roster, 2)
    assert copy_duties(roster, 1) != copy_duties(roster, 2) == copy_duties(other, 2)


def test_copy_goes_to_another_machine_where_there_is_one() -> None:
    """By their marks: a peer on a holder's machine keeps one only where nobody else may."""
    here, there = "a" * 16, "b" * 16

    def machines(spare: str) -> Roster:
        members = [
            listed("A", "stage-0").model_copy(update={"machine": here}),
            listed("B", "stage-1").model_copy(update={"machine": here}),
            listed("C", "stage-1").model_copy(update={"machine": spare}),
        ]
        return Roster(members)

    assert copy_holders(machines(there), PartName("stage-0"), 1) == (PeerId("C"),)
    assert len(copy_holders(machines(here), PartName("stage-0"), 1)) == 1
    assert on_one_machine(machines(here), 1) == ()  # there is no other
    assert on_one_machine(machines(there), 0) == (PartName("stage-0"),)
