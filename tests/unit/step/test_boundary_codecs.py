"""Which codecs a close record names, from its links and paces alone."""

from __future__ import annotations

import dataclasses

import pytest

from swarm.compression.registry import codec_named
from swarm.consensus.changes import NO_CHANGES
from swarm.consensus.records import NO_RECORD, CloseRecord, CodecPair, MeasuredLink
from swarm.consensus.roster import Roster
from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.models.spec import TensorSpec
from swarm.step.boundary_codecs import FILLED_SHARE, FIXED, CodecRules
from swarm.step.decisions import given_up, paces
from swarm.step.messages import Averaged, Propose
from tests.harness.rigs.step import HELD, RULES, brought_to, listed
from tests.harness.rigs.step import record as proposed

HOSTS = [PeerId(f"H{number}") for number in range(4)]
TRAINERS = [PeerId("T0"), PeerId("T1")]
ROSTER = Roster(
    [
        *(listed(peer, "stage", f"stage-{number // 2}", name=peer) for number, peer in enumerate(HOSTS)),
        *(listed(peer, "trainer", "ends", name=peer) for peer in TRAINERS),
    ]
)
RULES_AUTO = CodecRules(
    activation=TensorSpec((1, 256, 1024), "float32"), stages=2, hosted=False, forward="auto", backward="auto"
)
EXACT, SMALL = ("float32", "float32"), ("int8h", "int8h")
PACE_US = 568_000
"""Of a replica; of two together half as much."""


def record(
    mbit: float | dict[PeerId, float] = 0, *, pace_us: int = PACE_US, codecs: tuple[CodecPair, ...] = ()
) -> CloseRecord:
    each = mbit if isinstance(mbit, dict) else dict.fromkeys([*HOSTS, *TRAINERS], mbit)
    links: dict[str, MeasuredLink] = {peer: (40_000, int(rate * 125_000)) for peer, rate in each.items() if rate}
    return CloseRecord(
        run="0" * 64, step=1, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, clip=1.0, lr=0.0, digests={},
        cursors={}, roster=ROSTER.members, links=links, codecs=codecs, previous=NO_RECORD,
        paces=dict.fromkeys(HOSTS, pace_us) if pace_us else {},
    )  # fmt: skip


def after(mbit: float | dict[PeerId, float], before: CodecPair = EXACT, *, pace_us: int = PACE_US) -> list[CodecPair]:
    known = record(codecs=(before,) * 3)
    return list(RULES_AUTO.following(known, record(mbit, pace_us=pace_us)))


@pytest.mark.parametrize(
    ("mbit", "pace_us", "chosen"),
    [
        (80, PACE_US, SMALL),  # the cells of the benchmark ``wan``
        (200, PACE_US, SMALL),
        (500, PACE_US, EXACT),
        (80, 7_059_000, EXACT),  # it computes for so long that little is gained
        (1000, 66_000, EXACT),  # encoding would take as long as it saves
        (1000, 10_000, SMALL),  # the link is full
    ],
)
def test_smaller_codec_is_chosen_where_links_are_busy_for_long(mbit: float, pace_us: int, chosen: CodecPair) -> None:
    assert after(mbit, pace_us=pace_us) == [chosen] * 3


def test_nothing_changes_near_where_it_changed_last() -> None:
    flips = {before: [mbit for mbit in range(50, 600, 10) if SMALL in after(mbit, before)] for before in (EXACT, SMALL)}
    assert max(flips[EXACT]) < max(flips[SMALL])
    for mbit in range(max(flips[EXACT]) + 10, max(flips[SMALL]), 10):
        assert after(mbit, EXACT) == [EXACT] * 3
        assert after(mbit, SMALL) == [SMALL] * 3


def test_what_nobody_measured_stays_as_it_is() -> None:
    for before in (EXACT, SMALL):
        assert after(0, before) == [before] * 3
        assert after(1, before, pace_us=0) == [before] * 3


def test_boundary_is_as_busy_as_its_busier_side() -> None:
    wide = dict.fromkeys([*HOSTS, *TRAINERS], 1000.0)
    assert after(wide | dict.fromkeys(TRAINERS, 40.0)) == [SMALL, EXACT, SMALL]
    assert after(wide | dict.fromkeys(HOSTS[2:], 40.0)) == [EXACT, SMALL, SMALL]
    assert after({peer: 40.0 for peer in HOSTS[:2]}, SMALL) == [SMALL] * 3, "of the last nothing is known"


def test_one_member_that_lies_about_its_link_changes_nothing() -> None:
    wide = dict.fromkeys([*HOSTS, *TRAINERS], 1000.0)
    assert after(wide | {HOSTS[0]: 0.1}) == [EXACT] * 3


def test_only_the_direction_that_is_open_is_chosen() -> None:
    rules = CodecRules(activation=RULES_AUTO.activation, stages=2, hosted=False, forward="bfloat16", backward="auto")
    assert rules.first == ("bfloat16", "float32")
    assert rules.following(record(), record(80)) == (("bfloat16", "int8h"),) * 3


def test_with_hosted_ends_only_boundaries_between_stages_are_chosen() -> None:
    rules = CodecRules(activation=RULES_AUTO.activation, stages=2, hosted=True, forward="auto", backward="auto")
    assert rules.following(record(), record(80)) == (EXACT, SMALL, EXACT)


def test_record_that_names_nothing_means_exact_codecs_and_a_manifest_with_names_needs_none() -> None:
    assert RULES_AUTO.of(record()) == (EXACT,) * 3
    assert FIXED.following(record(), record(1)) == ()
    assert "codecs" not in record().model_dump()


def test_reason_tells_what_exact_payloads_would_cost() -> None:
    before, now = record(codecs=(EXACT,) * 3), record(80, codecs=(SMALL,) * 3)
    assert RULES_AUTO.why(before, now) == "float32 would keep links of 80 Mbit/s busy for 37% of a microbatch's time"
    assert RULES_AUTO.why(now, now) == ""


def test_paces_are_those_of_stages_and_kept_of_who_says_nothing() -> None:
    def told(pace_us: int) -> Averaged:
        return Averaged(digest="0" * 16, sq_norm=0.0, cursor=None, pace_us=pace_us)

    found = paces(record(pace_us=7), {HOSTS[0]: told(5), HOSTS[1]: told(0), TRAINERS[0]: told(3)}, ROSTER)
    assert found == {HOSTS[0]: 5, HOSTS[1]: 7, HOSTS[2]: 7, HOSTS[3]: 7}
    assert "pace_us" not in told(0).model_dump()


def test_step_given_up_keeps_its_codecs() -> None:
    head = record(80, codecs=(SMALL,) * 3)
    assert given_up(head, head.hash(), 1, ROSTER, NO_CHANGES, 100).codecs == head.codecs


# --- what members accept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codecs", [(), (SMALL, EXACT), (EXACT,) * 3])
async def test_record_with_other_codecs_than_those_that_follow_is_refused(codecs: tuple[CodecPair, ...]) -> None:
    rules = CodecRules(activation=RULES_AUTO.activation, stages=1, hosted=False, forward="auto", backward="auto")
    bench = await brought_to("apply", rules=dataclasses.replace(RULES, codecs=rules))
    links = {peer: (40_000, 10_000_000) for peer in HELD}
    told = {"links": links, "paces": {"A": PACE_US, "B": PACE_US}}
    with pytest.raises(Refused, match="the record's codecs are not those"):
        await bench.ask(Propose(record=proposed(**told, codecs=codecs)))
    await bench.ask(Propose(record=proposed(**told, codecs=(SMALL, SMALL))))


async def test_record_names_no_codecs_where_the_manifest_does() -> None:
    bench = await brought_to("apply")
    with pytest.raises(Refused, match="the record's codecs are not those"):
        await bench.ask(Propose(record=proposed(codecs=(SMALL, SMALL))))
    with pytest.raises(Refused, match="links or paces of peers that are not in its roster"):
        await bench.ask(Propose(record=proposed(paces={"X": 1})))


def test_link_seconds_are_of_what_crosses_the_boundaries_of_who_was_measured() -> None:
    exact, small = (codec_named(name).wire_bytes(RULES_AUTO.activation) for name in ("float32", "int8h"))
    measured = {HOSTS[0]: 80.0, TRAINERS[0]: 80.0}
    assert RULES_AUTO.link_seconds(record(measured)) == pytest.approx({HOSTS[0]: 2 * exact / (FILLED_SHARE * 10e6)})
    assert RULES_AUTO.link_seconds(record(measured, codecs=(EXACT, SMALL, SMALL))) == pytest.approx(
        {HOSTS[0]: (exact + small) / (FILLED_SHARE * 10e6)}
    )
    hosted = CodecRules(activation=RULES_AUTO.activation, stages=2, hosted=True, forward="float32", backward="float32")
    assert hosted.link_seconds(record(measured)) == pytest.approx({HOSTS[0]: exact / (FILLED_SHARE * 10e6)}), (
        "no activation comes"
    )
