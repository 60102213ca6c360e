"""Everybody computes the same roster, leader and places."""

from collections import Counter

from swarm.consensus.roster import Candidate, Places, Roster, assign_stages, choose_place
from swarm.ids import PeerId, stage_part
from tests.harness.rigs.consensus import listed


def candidate(peer: str, role: str = "stage", stage: int | None = None) -> Candidate:
    return Candidate(peer=peer, role=role, name=peer, stage=stage, addresses=())  # type: ignore[arg-type]


def test_assign_without_wishes_balances_the_stages() -> None:
    roster, reasons = assign_stages([candidate(f"h{i}") for i in range(5)], 2, private_ends=True)
    assert sorted(map(len, roster.stages())) == [2, 3]
    assert all("fewest replicas" in reason for reason in reasons.values())


def test_assign_hears_wishes_first_and_fills_the_gaps() -> None:
    hosts = [candidate("a", stage=1), candidate("b", stage=1), candidate("c"), candidate("d", stage=9)]
    roster, reasons = assign_stages(hosts, 2, private_ends=True)
    assert roster.replicas(stage_part(1)) == ("a", "b")
    assert roster.replicas(stage_part(0)) == ("c", "d")
    assert reasons[PeerId("a")] == "asked for"


def test_assign_gives_trainers_the_ends_only_when_they_are_private() -> None:
    peers = [candidate("h"), candidate("t", role="trainer"), candidate("z", role="bootstrap")]
    assert assign_stages(peers, 1, private_ends=True)[0]["t"].part == "ends"
    hosted = assign_stages(peers, 1, private_ends=False)[0]
    assert hosted["t"].part is None
    assert hosted.parts == ("stage-0",)
    assert hosted.trainers == ("t",)


def test_succession_is_the_same_in_any_order_and_spreads_the_duty() -> None:
    members = [listed(f"p{i}", name="x") for i in range(6)]
    roster, shuffled = Roster(members), Roster(reversed(members))
    leaders = Counter(roster.succession(step)[0] for step in range(600))
    assert [roster.succession(s) for s in range(20)] == [shuffled.succession(s) for s in range(20)]
    assert set(leaders) == set(roster.peers)
    assert max(leaders.values()) < 150


def test_stages_are_in_numerical_order_beyond_ten() -> None:
    members = [listed(f"p{i:02}", part=f"stage-{i}", name="x") for i in reversed(range(12))]
    assert [replicas[0] for replicas in Roster(members).stages()] == [f"p{i:02}" for i in range(12)]


def test_joiner_does_not_count_replicas_that_are_about_to_leave() -> None:
    roster = Roster(listed(f"p{i}", part=f"stage-{i}", name="x") for i in range(2))
    for stage in range(2):
        leaving = {roster.replicas(stage_part(stage))[0]}
        places = Places(stages=2, private_ends=True, leaving=leaving)
        for joiner in map(PeerId, "abcdef"):
            part, why = choose_place(roster, joiner, "stage", None, places)
            assert (part, why) == (stage_part(stage), "it has the fewest replicas (0, and 1 about to leave)")
    assert choose_place(roster, PeerId("a"), "stage", 0, places)[0] == "stage-0", "a wish is a wish"
