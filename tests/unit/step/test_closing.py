"""What a leader decides from the members' answers."""

import math

import pytest

from swarm.consensus.records import MAX_SQ_NORM, Contribution
from swarm.consensus.roster import Roster
from swarm.consensus.trials import Tally, Trial
from swarm.errors import OutOfSync
from swarm.ids import MicrobatchId, PartName, PeerId
from swarm.membership.founding_record import genesis
from swarm.optim.clipping import clip_factor, clip_parts
from swarm.step.decisions import Disagreement, agreed, cursors, gone_back, part_norms
from swarm.step.messages import Averaged
from tests.harness.rigs.step import RUN, listed

ROSTER = Roster([listed("a"), listed("b"), listed("t", "trainer", "ends"), listed("z", "bootstrap", None)])


def averaged(digest: str, sq_norm: float, cursor: tuple[int, int] | None = None) -> Averaged:
    return Averaged(digest=digest, sq_norm=sq_norm, cursor=cursor)


def counted(trainer: str, epoch: int, position: int) -> Contribution:
    microbatch = MicrobatchId(PeerId(trainer), "00" * 8, epoch, position)
    return Contribution(microbatch=microbatch, tokens=1, loss_sum=1.0, route=("a",))


def answers(b_digest: str = "a" * 16, b_norm: float = 9.0) -> dict[PeerId, Averaged]:
    return {
        PeerId("a"): averaged("a" * 16, 9.0),
        PeerId("b"): averaged(b_digest, b_norm),
        PeerId("t"): averaged("c" * 16, 16.0, (0, 5)),
        PeerId("z"): averaged("", 0.0),
    }


def global_norm(roster: Roster, said: dict[PeerId, Averaged]) -> float:
    return clip_parts(part_norms(roster, said), 1.0).norm


def test_global_norm_counts_every_part_once() -> None:
    assert global_norm(ROSTER, answers()) == 5.0


@pytest.mark.parametrize("claim", [0.0, 1e99])
@pytest.mark.parametrize("liar", "abd")
def test_global_norm_is_not_what_one_of_three_replicas_claims(liar: str, claim: float) -> None:
    three = Roster([*ROSTER.members, listed("d")])
    said = {**answers(), PeerId("d"): averaged("a" * 16, 9.0)}
    assert global_norm(three, said) == 5.0
    with pytest.raises(Disagreement) as caught:
        global_norm(three, {**said, PeerId(liar): averaged("a" * 16, claim)})
    assert caught.value.dissenters == (liar,)


def test_of_two_replicas_that_claim_two_norms_neither_is_believed_and_the_order_of_summation_is_no_claim() -> None:
    said = answers()
    near, far = (averaged("a" * 16, 9.0 * factor) for factor in (1 + 1e-12, 0.99))
    assert global_norm(ROSTER, {**said, PeerId("b"): near}) == 5.0
    with pytest.raises(Disagreement, match=r"squared norm 9.*squared norm 8\.91") as caught:
        global_norm(ROSTER, {**said, PeerId("b"): far})
    assert caught.value.dissenters == ()


def test_global_norm_is_a_number_whatever_members_may_claim() -> None:
    parts = range(1000)
    many = Roster(listed(f"p{n}", part=f"stage-{n}", name=f"p{n}") for n in parts)
    assert math.isfinite(global_norm(many, {peer: averaged("a" * 16, MAX_SQ_NORM) for peer in many.peers}))


def test_global_norm_with_a_replica_that_differs_names_part_and_digests() -> None:
    with pytest.raises(Disagreement, match="stage-0") as caught:
        global_norm(ROSTER, answers(b_digest="b" * 16))
    assert set(caught.value.digests) == {"a", "b"}


def test_agreed_refuses_a_replica_without_a_digest() -> None:
    with pytest.raises(OutOfSync):
        agreed("weights", ROSTER, {PeerId(p): "" for p in "abtz"})


def test_clip_factor_never_enlarges() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-5)


def test_cursors_keep_what_nobody_mentions() -> None:
    before = genesis(RUN, ROSTER, {}).model_copy(update={"cursors": {"t": (0, 1), "u": (1, 2)}})  # type: ignore[arg-type]
    assert cursors(before, (), answers(), ROSTER, 9) == {"t": (0, 5), "u": (1, 2)}


def test_cursors_of_a_lost_trainer_go_on_behind_what_was_committed_of_it() -> None:
    before = genesis(RUN, ROSTER, {}).model_copy(update={"cursors": {"t": (0, 1), "u": (0, 8), "v": (3, 3)}})  # type: ignore[arg-type]
    committed = [counted("u", 0, 8), counted("u", 1, 0), counted("u", 1, 1), counted("t", 0, 1)]
    assert cursors(before, committed, answers(), ROSTER, 9) == {"t": (0, 5), "u": (1, 2), "v": (3, 3)}


def test_cursors_beyond_the_room_forget_the_absent_that_got_least_far() -> None:
    before = genesis(RUN, ROSTER, {}).model_copy(update={"cursors": {"u": (1, 0), "v": (0, 9)}})  # type: ignore[arg-type]
    assert cursors(before, (), answers(), ROSTER, 2) == {"t": (0, 5), "u": (1, 0)}


def test_run_that_goes_back_gives_no_trainer_its_quota_back() -> None:
    tallies = {"stage-0": Tally(microbatches=9, words=3, total=-200, squares=20_000)}
    to = genesis(RUN, ROSTER, {}).model_copy(update={
        "trials": {"t": Trial(tallies=tallies), "u": Trial(tallies=tallies), "v": Trial(times=1, until=2)}
    })  # fmt: skip
    head = to.model_copy(update={"step": 40, "trials": {
        "t": Trial(tallies=tallies, times=1, until=291), "u": Trial(), "v": Trial(times=2, until=550), "w": Trial()
    }})  # fmt: skip
    assert gone_back(head, 0, ROSTER, (), 9, to).trials == {
        "t": Trial(times=1, until=291), "u": Trial(tallies=tallies), "v": Trial(times=2, until=550)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "unlike"),
    [("aab", "C"), ("ab", ""), ("abc", ""), ("aabb", ""), ("aabc", "CD"), ("a-", "B"), ("--", ""), ("--a", "AB")],
)
def test_replicas_unlike_most_others_are_named_and_on_a_tie_nobody(answers: str, unlike: str) -> None:
    digests = {PeerId(peer): each.strip("-") for peer, each in zip("ABCD", answers, strict=False)}
    assert Disagreement("it", PartName("stage-0"), digests).dissenters == tuple(unlike)
