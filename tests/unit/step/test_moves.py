"""Who is planned to move when a step closes: what the manifest, the record before, and who comes and goes say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.columns import UNIT, passed_by
from swarm.consensus.changes import NO_CHANGES, Changes, Reassign
from swarm.consensus.copies import copy_duties, copy_holders
from swarm.consensus.rebalance import NO_RETURN_RECORDS
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import tail
from swarm.errors import Refused
from swarm.ids import PartName, PeerId, stage_part
from swarm.models.spec import SplitConfig, TensorSpec
from swarm.step.boundary_codecs import FILLED_SHARE, CodecRules
from swarm.step.messages import Propose
from swarm.step.moves import MAX_RATIO, MoveRules
from tests.harness.rigs.consensus import COMMITTED, admission, departure, listed, record
from tests.unit.step.test_member import brought_to

STEPS, STAGES = 100, 3
PARTS = tuple(map(stage_part, range(STAGES)))
BOUNDARY_BYTES = 1_000_000
BOUNDARIES = CodecRules(
    activation=TensorSpec((1, 1, BOUNDARY_BYTES // 4), "float32"),
    stages=STAGES,
    hosted=False,
    forward="float32",
    backward="float32",
)
RULES = MoveRules(on=True, copies=2, steps=STEPS, codecs=BOUNDARIES)
PACE_US = 100_000


def closed(hosts: Sequence[int], *, since: int = 0, **more: Any) -> CloseRecord:
    """A record with so many hosts of each stage, called 0a, 0b, 1a …; a trainer holds the ends."""
    members = [
        listed(f"{stage}{chr(97 + number)}", part=stage_part(stage), since=since)
        for stage, count in enumerate(hosts)
        for number in range(count)
    ]
    return record(roster=(*members, listed("T", "trainer", "ends")), **more)


def paces(hosts: Sequence[int], **others: int) -> dict[str, int]:
    return {
        member.peer: others.get(f"s{member.peer}", PACE_US) for member in closed(hosts).roster if member.peer != "T"
    }


def after(before: CloseRecord, changes: Changes, moves: Mapping[PeerId, PartName]) -> Counter[str | None]:
    gone = {*changes.absent, *(leave.peer for leave in changes.leaves)}
    staying = {
        m.peer: moves.get(PeerId(m.peer), m.part) for m in before.roster if m.peer not in gone and m.part != "ends"
    }
    return Counter([*staying.values(), *(join.member.part for join in changes.joins)])


def test_stage_that_loses_hosts_gets_one_with_the_record_that_names_them() -> None:
    before, changes = closed((4, 4, 4)), Changes(absent=(PeerId("2a"), PeerId("2b"), PeerId("2c")))
    moves = RULES.planned(before, changes)
    assert after(before, changes, moves)["stage-2"] >= 2
    assert min(after(before, changes, moves).values()) >= 2
    assert not RULES.planned(before, NO_CHANGES)


def test_variant_that_more_microbatches_pass_gets_more_hosts() -> None:
    few, many = stage_part(1, 0, 2), stage_part(1, 1, 2)
    parts = {"0": stage_part(0), "few": few, "many": many}
    members = [listed(f"{at}{n}", part=part) for at, part in parts.items() for n in range(6 if at == "0" else 3)]
    before = record(roster=(*members, listed("T", "trainer", "ends")), passed={few: UNIT, many: 7 * UNIT})
    rules = replace(RULES, copies=8)
    moved = rules.planned(before, NO_CHANGES)
    assert {(peer[:3], part) for peer, part in moved.items()} == {("few", many)}
    evenly = before.model_copy(update={"passed": {few: UNIT, many: UNIT}})
    assert not rules.planned(evenly, NO_CHANGES)


def lived(shares: Sequence[float], hosts: int, records: int, seed: int) -> list[tuple[int, Counter[str | None]]]:
    """How many moved with each record, and how many hosts each part had then: the second stage has a variant for each
    of these shares of all microbatches, by chance so many of each in a step, and hosts are spread evenly at first."""
    chance, parts = random.Random(seed), SplitConfig(stages=2, variants=(1, len(shares))).parts[:-1]
    held = {f"h{seed}x{at}": listed(f"h{seed}x{at}", part=parts[at % len(parts)]) for at in range(hosts)}
    rules, before, found = replace(RULES, steps=2 * records), record(), list[tuple[int, Counter[str | None]]]()
    for step in range(1, records + 1):
        choices = chance.choices(range(len(shares)), shares, k=2 * hosts)
        done = [COMMITTED[0].model_copy(update={"choice": choice}) for choice in choices]
        passed, dealt = passed_by(before.passed, parts, done), dict(rules.dealt(before, NO_CHANGES))
        before = record(step=step, roster=(*held.values(), listed("T", "trainer", "ends")), passed=passed, dealt=dealt)
        moves = rules.planned(before, NO_CHANGES)
        held |= {p: held[p].model_copy(update={"part": part, "since": step + 2}) for p, part in moves.items()}
        found.append((len(moves), Counter(member.part for member in held.values())))
    return found


def busiest_over_mean(shares: Sequence[float], hosts: Sequence[int]) -> float:
    return max(share / count for share, count in zip(shares, hosts, strict=True)) * sum(hosts)


def best_of(shares: Sequence[float], hosts: int) -> float:
    """With so many hosts, which only whole ones of can be given to a variant."""
    given = [1] * len(shares)
    for _ in range(hosts - len(shares)):
        given[max(range(len(shares)), key=lambda at: shares[at] / given[at])] += 1
    return busiest_over_mean(shares, given)


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.12, 0.08), (0.4, 0.3, 0.2, 0.1), (0.7, 0.1, 0.1, 0.1)])
@pytest.mark.parametrize("hosts", [18, 30])
def test_hosts_of_variants_come_to_be_as_busy_as_each_other_and_then_stay(shares: Sequence[float], hosts: int) -> None:
    records = lived(shares, hosts, 120, seed=0)
    counts = [records[-1][1][part] for part in SplitConfig(stages=2, variants=(1, len(shares))).parts[1:-1]]
    assert busiest_over_mean(shares, counts) <= 1.1 * best_of(shares, sum(counts))
    assert sum(moved for moved, _ in records[60:]) <= 1


def test_copies_that_lead_nowhere_are_dealt_anew_and_those_that_lead_on_stay() -> None:
    few, many = stage_part(1, 0, 2), stage_part(1, 1, 2)
    parts = {"0": stage_part(0), "few": few, "many": many}
    members = [listed(f"{at}{n}", part=part) for at, part in parts.items() for n in range(6 if at == "0" else 3)]
    before = record(step=50, roster=(*members, listed("T", "trainer", "ends")), passed={few: UNIT, many: 7 * UNIT})
    led = replace(RULES, copies=8)
    assert led.plan(before, NO_CHANGES).moves
    assert led.dealt(before, NO_CHANGES) == {}
    stuck = replace(RULES, copies=0)
    assert stuck.dealt(before, NO_CHANGES) == {many: 51}
    lately = before.model_copy(update={"dealt": {many: 51 - NO_RETURN_RECORDS + 1}})
    assert stuck.dealt(lately, NO_CHANGES) == lately.dealt
    anew = before.model_copy(update={"dealt": {many: 51}}).members
    duties, others = copy_duties(before.members, 2), copy_duties(anew, 2)
    assert set(duties[many]) != set(others[many])
    evenly = before.model_copy(update={"passed": {few: UNIT, many: UNIT}})
    assert stuck.dealt(evenly, NO_CHANGES) == {}


def test_copies_of_a_part_to_which_those_that_keep_them_do_not_move_are_dealt_anew() -> None:
    few, many = stage_part(1, 0, 2), stage_part(1, 1, 2)
    parts = {"0": stage_part(0), "few": few, "many": many}
    members = [listed(f"{at}{n}", part=part) for at, part in parts.items() for n in range(6 if at == "0" else 3)]
    before = record(step=49, roster=(*members, listed("T", "trainer", "ends")), passed={few: UNIT, many: 7 * UNIT})
    led = replace(RULES, copies=8)
    (mover, part), *_ = led.planned(before, NO_CHANGES).items()
    assert led.dealt(before, NO_CHANGES) == {part: 50}, "nobody moved"
    move = Reassign(step=50, peer=mover, part=part, signature=bytes(64))
    assert led.dealt(before, Changes(reassigns=(move,))) == {}
    assert led.dealt(before.model_copy(update={"step": 48}), NO_CHANGES) == {}, "it may be late"


@pytest.mark.parametrize("lie_us", [1, 1 << 40])
@pytest.mark.parametrize("beside", [False, True])
def test_host_that_lies_about_its_pace_is_never_left_alone_with_its_part(lie_us: int, beside: bool) -> None:
    for hosts in ((2, 2, 2), (2, 3, 2), (3, 3, 3), (3, 4, 2), (2, 6, 2)):
        for liar in ("0a", "1a", "2a"):
            before = closed(hosts, paces=paces(hosts, **{f"s{liar}": lie_us}))
            if beside:
                near = {"beside": tuple(tail(f"{liar[0]}{other}") for other in "ab")}
                before = before.model_copy(
                    update={
                        "roster": tuple(m.model_copy(update=near) if m.peer[-1] in "ab" else m for m in before.roster)
                    }
                )
            moves = replace(RULES, kept=2).planned(before, NO_CHANGES)
            left = Counter(m.part for m in before.roster if m.peer not in moves)
            assert all(left[before.members.part_of(peer)] >= 2 for peer in moves)
            there = before.members
            for part in PARTS:
                stay = [peer for peer in there.replicas(part) if peer not in moves]
                machines = {there.machines[peer] for peer in stay}
                assert len(machines) >= min(2, there.spread(part)), (hosts, liar, moves)


def test_host_counts_for_few_times_as_much_as_the_middle_one_whatever_it_says() -> None:
    hosts = (3, 3, 3)
    held = {PeerId(m.peer): PartName(str(m.part)) for m in closed(hosts).roster if m.role == "stage"}
    for said, counts in ((1, MAX_RATIO), (1 << 40, 1 / MAX_RATIO)):
        speeds = RULES._speeds(closed(hosts, paces=paces(hosts, s0a=said)), held)
        assert speeds == {peer: counts if peer == "0a" else 1.0 for peer in held}


def test_who_leaves_counts_no_more_and_who_joins_counts_already() -> None:
    before = closed((4, 4, 4))
    left = Changes(leaves=(departure("2a"), departure("2b"), departure("2c")))
    assert RULES.planned(before, left)
    joins = tuple(admission(listed(name, part="stage-2")) for name in ("X", "Y", "Z"))
    assert not RULES.planned(before, left.model_copy(update={"joins": joins}))


@pytest.mark.parametrize("rules", [MoveRules(), MoveRules(on=True, copies=2, steps=2)], ids=["off", "last"])
def test_nobody_moves_where_the_manifest_says_so_nor_with_the_last_step(rules: MoveRules) -> None:
    before, changes = closed((4, 4, 4)), Changes(absent=(PeerId("2a"), PeerId("2b"), PeerId("2c")))
    assert not rules.planned(before, changes)


def test_who_came_lately_stays() -> None:
    changes = Changes(absent=(PeerId("2a"), PeerId("2b"), PeerId("2c")))
    late, settled = (closed((4, 4, 4), step=50, since=since) for since in (50, 51 - NO_RETURN_RECORDS))
    assert (bool(RULES.planned(late, changes)), bool(RULES.planned(settled, changes))) == (False, True)


def test_slow_devices_and_slow_links_count_for_less() -> None:
    hosts, twice = (4, 4, 4), {f"s2{letter}": 4 * PACE_US for letter in "abcd"}
    slow = RULES.planned(closed(hosts, paces=paces(hosts, **twice)), NO_CHANGES)
    rate = int(2 * BOUNDARY_BYTES * 1_000_000 / (FILLED_SHARE * 4 * PACE_US))
    links = {f"2{letter}": (1000, rate) for letter in "abcd"}
    narrow = RULES.planned(closed(hosts, paces=paces(hosts), links=links), NO_CHANGES)
    assert set(slow.values()) == set(narrow.values()) == {"stage-2"}
    assert not RULES.planned(closed(hosts, paces=paces(hosts)), NO_CHANGES)


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(1, 6)] * STAGES), st.data())
def test_whoever_dies_every_stage_keeps_a_host_and_only_copies_move(
    hosts: tuple[int, ...], data: st.DataObject
) -> None:
    before = closed(hosts)
    names = [member.peer for member in before.roster if member.part != "ends"]
    lost = data.draw(st.sets(st.sampled_from(names)))
    left = Counter(member.part for member in before.roster if member.peer not in lost and member.part != "ends")
    changes = Changes(absent=tuple(PeerId(name) for name in sorted(lost)))
    moves = RULES.planned(before, changes)
    assert not set(moves) & lost
    assert all(peer in copy_holders(before.members, part, RULES.copies) for peer, part in moves.items())
    assert all(count > 0 for part, count in after(before, changes, moves).items() if left[part])
    parts = [stage_part(stage) for stage in range(STAGES)]
    assert min(after(before, changes, moves)[part] for part in parts) >= min(left[part] for part in parts)
    assert RULES.planned(before, changes) == moves


async def test_member_accepts_no_move_that_it_does_not_plan() -> None:
    bench = await brought_to("apply")
    move = Reassign(step=1, peer="A", part="stage-1", signature=bytes(64))
    with pytest.raises(Refused, match="not to move to stage-1"):
        await bench.ask(Propose(record=record(), changes=Changes(reassigns=(move,))))
    await bench.ask(Propose(record=record()))


def test_capacities_add_up_what_the_hosts_of_each_stage_have_told() -> None:
    told = {"0a": 100_000, "0b": 200_000, "1a": 50_000}
    before = closed((2, 2, 1), paces=told, links={"1a": (0, 10_000_000)})
    assert RULES.capacities(before) == pytest.approx(
        (10 + 5, 5 * FILLED_SHARE, 0)
    )  # 1a: two megabytes at ten megabytes a second
