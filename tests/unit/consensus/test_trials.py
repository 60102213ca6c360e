"""When nothing more is taken of a trainer that pulls against the others, and for how long."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.consensus.records import Contribution, record_bytes
from swarm.consensus.roster import Roster
from swarm.consensus.trials import (
    FEWEST,
    FIRST_REST,
    FORGET,
    MAX_AWAY,
    MOST,
    Tally,
    Trial,
    checked_words,
    failed,
    following,
    judged,
    resting,
)
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId, stage_part
from swarm.network.rpc.bodies import pack
from swarm.schema import FEWEST_TRAINERS, WHOLE_WORD
from tests.harness.rigs.consensus import listed

TRAINERS = "EFGHJ"
Say = Callable[[int, str, str], int]
"""By step, replica and trainer."""
Known = Mapping[str, Trial]


def roster(stages: int = 2, trainers: str = TRAINERS) -> Roster:
    """Three replicas of each stage."""
    hosts = [listed(f"{stage}{one}", part=f"stage-{stage}") for stage in range(stages) for one in "abc"]
    return Roster([*hosts, *(listed(one, "trainer", "ends") for one in trainers)])


def rows(drawn: random.Random, stages: int = 2, trainers: str = TRAINERS) -> tuple[Contribution, ...]:
    """Three microbatches of each trainer, by any ways that have no replica in common."""
    ways = {one: [drawn.sample("abc", 3) for _ in range(stages)] for one in trainers}
    return tuple(
        Contribution(
            microbatch=MicrobatchId(PeerId(one), "00" * 8, 0, at),
            tokens=8,
            loss_sum=1.0,
            route=tuple(f"{stage}{way[at]}" for stage, way in enumerate(ways[one])),
        )
        for one in trainers
        for at in range(3)
    )


def steps(say: Say, stages: int = 2, trainers: str = TRAINERS, seed: int = 0) -> Iterator[tuple[int, Known]]:
    """What records say, step by step, with what each replica says of each trainer."""
    drawn, members, known = random.Random(seed), roster(stages, trainers), dict[str, Trial]()
    for step in range(1, 400):
        out = resting(known, step)
        committed = tuple(one for one in rows(drawn, stages, trainers) if one.microbatch.trainer not in out)
        said = {
            peer: tuple(say(step, peer, of) for of in of_whom)
            for peer in members.peers
            if (part := members[peer].part) is not None
            and len(of_whom := judged(committed, peer, PartName(part))) >= FEWEST_TRAINERS
        }
        known = following(known, step, members, committed, checked_words(members, committed, said))
        yield step, known


def first_failure(say: Say, most: int = 200, **more: int | str) -> tuple[int, set[str]]:
    for step, known in steps(say, **more):  # type: ignore[arg-type]
        if found := failed(known, step):
            return step, set(found)
        if step == most:
            return 0, set()
    raise AssertionError


def noisy(means: Mapping[str, float], noise: float = 0.2, seed: int = 1) -> Say:
    drawn = random.Random(seed)
    return lambda step, by, of: round(WHOLE_WORD * max(-1.0, min(1.0, means[of] + drawn.gauss(0, noise))))


@given(st.integers(0, 20))
def test_trainer_that_pulls_against_all_others_fails_as_soon_as_it_may_and_nobody_else(seed: int) -> None:
    step, found = first_failure(noisy({"E": -0.4, "F": 0.5, "G": 0.4, "H": 0.3, "J": 0.5}, seed=seed), seed=seed)
    assert found == {"E"}
    assert 8 <= step <= 40, "24 microbatches are judged after eight steps at the earliest"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weakest", [-0.15, 0.05, 0.2])
def test_trainer_that_is_only_unlike_the_others_never_fails(weakest: float, seed: int) -> None:
    say = noisy({"E": weakest, "F": 0.5, "G": 0.5, "H": 0.5, "J": 0.5}, seed=seed)
    assert first_failure(say, seed=seed) == (0, set())


def test_one_replica_of_three_fails_nobody_whatever_it_says() -> None:
    honest = noisy({one: 0.1 for one in TRAINERS}, noise=0.05)
    for stages in (1, 2, 3):
        lie: Say = lambda step, by, of: -WHOLE_WORD if by == "0a" else honest(step, by, of)  # noqa: E731
        assert first_failure(lie, stages=stages) == (0, set())


def test_all_replicas_of_one_stage_fail_nobody_where_there_are_others() -> None:
    honest = noisy({one: 0.5 for one in TRAINERS})
    for stages, expected in ((1, True), (2, False), (3, False)):
        lie: Say = lambda step, by, of: -WHOLE_WORD if by[0] == "0" and of == "E" else honest(step, by, of)  # noqa: E731
        assert (first_failure(lie, stages=stages)[1] == {"E"}) is expected


def test_nobody_fails_where_most_others_pull_against_each_other_too() -> None:
    assert first_failure(noisy({"E": -0.4, "F": -0.4, "G": -0.4, "H": 0.4, "J": 0.4})) == (0, set())


@pytest.mark.parametrize("trainers", ["EF", "EFGH"])
def test_of_four_trainers_nobody_is_judged(trainers: str) -> None:
    assert all(not known for _, known in steps(noisy({"E": -0.4} | dict.fromkeys("FGH", 0.4)), trainers=trainers))


def test_trainer_that_leaves_each_time_before_it_is_judged_goes_on_from_there() -> None:
    say, drawn, known = noisy({"E": -0.4, "F": 0.5, "G": 0.5, "H": 0.5, "J": 0.5}), random.Random(0), dict[str, Trial]()
    for step in range(1, 40):
        there = "FGHJ" if step % 8 == 7 else TRAINERS
        members, committed = roster(trainers=there), rows(drawn, trainers=there)
        said = {
            peer: tuple(say(step, peer, of) for of in of_whom)
            for peer in members.peers
            if len(of_whom := judged(committed, peer, PartName(members[peer].part or "ends"))) >= FEWEST_TRAINERS
        }
        known = following(known, step, members, committed, checked_words(members, committed, said))
        if failed(known, step):
            break
    assert set(failed(known, step)) == {"E"}
    assert 8 < step < 16


def test_of_those_that_are_away_few_are_remembered_and_not_for_ever() -> None:
    against = Trial(tallies={"stage-0": Tally(microbatches=9, words=9, total=-900, squares=90_000)})
    with_others = Trial(tallies={"stage-0": Tally(microbatches=9, words=9, total=900, squares=90_000)})
    left = {f"T{number:03}": against for number in range(100)} | {"U": with_others}
    known = following(left, 7, roster(), (), {})
    assert len(known) == MAX_AWAY
    assert {one.until for one in known.values()} == {7}
    assert not resting(known, 8)
    last = 7 + FORGET * FIRST_REST
    assert following(known, last - 1, roster(), (), {}) == known
    assert not following(known, last, roster(), (), {})


def test_each_time_it_rests_for_twice_as_long_and_that_is_forgotten_after_a_while() -> None:
    say, known, step = noisy({"E": -0.4, "F": 0.5, "G": 0.5, "H": 0.5, "J": 0.5}), dict[str, Trial](), 0
    found: list[tuple[int, Trial]] = []
    for step, known in steps(say):
        found += [(step, one) for one in failed(known, step).values()]
    (first, one), (second, again) = found
    assert (one.until, again.until) == (first + 1 + FIRST_REST, second + 1 + 2 * FIRST_REST)
    assert first + FIRST_REST + FEWEST // 3 <= second, "it is judged anew"
    assert one.against
    assert again.against
    gone = roster(trainers="FGHJ")
    assert known["E"].until == again.until
    assert "E" in following(known, step + 1, gone, (), {})
    assert "E" not in following(known, again.until + FORGET * 2 * FIRST_REST, gone, (), {})


def test_what_is_old_counts_less_so_who_changes_is_judged_by_what_it_does_now() -> None:
    turned = dict.fromkeys(TRAINERS, 0.5)
    good, bad = noisy(turned), noisy(turned | {"E": -0.4})
    step, found = first_failure(lambda step, by, of: (good if step < 100 else bad)(step, by, of))
    assert found == {"E"}
    assert 100 < step < 100 + 2 * MOST


def test_words_are_of_replicas_of_stages_about_all_whose_microbatches_they_hold() -> None:
    members, committed = roster(stages=1), rows(random.Random(3), stages=1)
    about = judged(committed, "0a", stage_part(0))
    assert about == tuple(sorted({one.microbatch.trainer for one in committed if one.route == ("0a",)}))
    assert len(about) == 5
    good = {"0a": (1, -2, 0, 4, 5)}
    assert checked_words(members, committed, good) == good
    for bad in ({"0a": good["0a"][1:]}, {"E": (1, 2, 3, 4, 5)}, {"X": (1, 2, 3, 4, 5)}, {"0a": ()}):
        assert checked_words(members, committed, bad) == {}
    assert judged(committed, "E", ENDS) == ()


@pytest.mark.parametrize("stages", [1, 32, 256])
def test_records_have_room_for_what_they_say_of_a_trainer(stages: int) -> None:
    tally = Tally(microbatches=2 * MOST, words=2 * MOST, total=-19_200, squares=1_920_000)
    trial = Trial(tallies={f"stage-{stage}": tally for stage in range(stages)}, times=7, until=1 << 24)
    taken = len(pack({"x" * 64: trial.model_dump()}))
    assert taken + 600 < record_bytes(0, stages, 1) - record_bytes(0, stages, 0)
