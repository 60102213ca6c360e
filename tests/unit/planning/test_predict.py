from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from swarm.planning.alternatives import HOST_LINK, alone, carried, mfu, slices, tensors
from swarm.planning.costs import palm_flops_per_token, training_flops_per_token
from swarm.planning.predict import HOP_S, UPDATE_S, expected_pace, predict, whole_microbatches_s
from swarm.planning.workload import PartLayout, PartNeeds, PeerClass, Workload

GIB = float(2**30)
LAYER = PartNeeds(flops=1e6, parameters=1e6, held=24e6, apart=8e6, graph=4e6, thrifty=1e5)
ENDS = PartNeeds(flops=5e5, parameters=5e5, held=12e6, apart=4e6, graph=1e5, thrifty=1e5)
WORK = Workload(
    layers=4, layer=LAYER, embedding=ENDS, head=PartNeeds(), hosted=False, context=100, rows=64, rows_asked=4,
    activation_bytes=1e5, gradient_bytes=1e5, copies=0,
)  # fmt: skip
PEER = PeerClass(name="a", count=9, flops=1e9, memory=8 * GIB, down=1e9, up=1e9, round_trip_s=0.01)
LAYOUT = PartLayout(stages=(2, 2), places=((2,), (2,), (1,)), rows=4)


def test_predict_of_a_compute_bound_layout_adds_up() -> None:
    found = predict(WORK, [PEER], LAYOUT)
    each = 3 * 2e6 * 400 / 1e9 + HOP_S
    assert found.parts[0].rate == pytest.approx(2 / each)
    assert found.microbatches == 16
    assert found.feeding_s == pytest.approx(8 * each)
    assert found.limits[0].name == "computing of stage-0 and 1 more"
    ends_s, carried_s = 3 * 5e5 * 400 / 1e9 + HOP_S, 4 * 2e5 / 1e9
    journey = 2 * each + ends_s + 3 * (carried_s + 0.01)
    assert found.journey_s == pytest.approx(journey)
    assert found.filling_s == pytest.approx(each / 3 + ends_s + 4 * (carried_s + 0.01) / 2)
    assert found.averaging_s == pytest.approx(8 * 2e6 / 2 / 1e9)
    assert found.step_s == pytest.approx(
        found.filling_s + found.feeding_s + found.averaging_s + 5 * 0.01 + UPDATE_S * 2e6
    )
    assert not found.problems
    assert found.tokens_s == pytest.approx(6400 / found.step_s)


def test_variants_are_as_fast_as_their_load_lets_them_be() -> None:
    """Two of the second stage, of which one has three quarters of the text, and three of its four hosts."""
    work = replace(WORK, loads=((1.0,), (0.75, 0.25)))
    found = predict(work, [PEER], replace(LAYOUT, places=((4,), (3,), (1,), (1,))))
    each = 3 * 2e6 * 400 / 1e9 + HOP_S
    assert [one.name for one in found.parts] == ["stage-0", "stage-1.v0of2", "stage-1.v1of2", "trainers"]
    assert [one.rate for one in found.parts[:3]] == pytest.approx([4 / each] * 3)
    plain = predict(WORK, [PEER], replace(LAYOUT, places=((4,), (4,), (1,))))
    assert found.journey_s == pytest.approx(plain.journey_s), "a microbatch passes one of them"
    assert found.feeding_s == pytest.approx(plain.feeding_s)
    assert carried(work, found).over_plain == pytest.approx((64 * 2e5 * 3 + 8 * 2e6 * 5) / (64 * 2e5 * 3 + 8 * 2e6 * 6))
    uneven = predict(work, [PEER], replace(LAYOUT, places=((4,), (2,), (2,), (1,))))
    assert uneven.rate == pytest.approx(2 / each / 0.75)


def test_stages_that_share_a_part_are_served_by_all_hosts() -> None:
    work = replace(WORK, alike=1, shared=True)
    found = predict(work, [PEER], replace(LAYOUT, places=((3,), (1,))))
    each = 3 * 2e6 * 400 / 1e9 + HOP_S
    assert [one.name for one in found.parts] == ["shared-2", "trainers"]
    assert found.parts[0].rate == pytest.approx(3 / each / 2), "each microbatch passes twice"
    apart = predict(WORK, [PEER], replace(LAYOUT, places=((2,), (1,), (1,))))
    assert found.rate > apart.rate, "two stages cannot have one and a half each"
    assert found.journey_s == pytest.approx(apart.journey_s)
    assert found.parts[0].memory.state == apart.parts[0].memory.state
    assert carried(work, found).over_plain > 1.0, "three average what two and one alone would"


def test_predict_names_links_where_they_are_slower() -> None:
    thin = replace(PEER, up=1e5)
    found = predict(WORK, [thin], LAYOUT)
    assert found.limits[0].name == "links of trainers"
    assert found.rate == pytest.approx(1e5 / (4 * 2e5))
    assert found.limits[1].name == "links of stage-0 and 1 more"


def test_predict_counts_journeys_in_flight_and_shared_processors() -> None:
    few = predict(replace(WORK, retention_bytes=1.0), [replace(PEER, round_trip_s=9.0)], LAYOUT)
    assert few.limits[0].name == "journeys that trainers have in flight"
    shared = predict(WORK, [replace(PEER, together_flops=1e9)], LAYOUT)
    assert shared.limits[0].name == "the processors that a share"
    assert shared.rate < predict(WORK, [PEER], LAYOUT).rate / 2


@pytest.mark.parametrize("problem", ["more peers", "no one", "layers", "memory", "host"])
def test_predict_says_why_a_layout_cannot_be_used(problem: str) -> None:
    peer, layout = PEER, LAYOUT
    match problem:
        case "more peers":
            layout = replace(LAYOUT, places=((8,), (8,), (1,)))
        case "no one":
            layout = replace(LAYOUT, places=((4,), (0,), (1,)))
        case "layers":
            layout = replace(LAYOUT, stages=(2, 1))
        case "memory":
            peer = replace(PEER, memory=0.5 * GIB)
        case "host":
            peer = replace(PEER, host_memory=0.1 * GIB)
    assert predict(WORK, [peer], layout).problems


def test_checkpointing_takes_less_memory_and_more_time() -> None:
    kept, again = predict(WORK, [PEER], LAYOUT), predict(WORK, [PEER], replace(LAYOUT, recompute=True))
    assert again.parts[0].memory.total < kept.parts[0].memory.total
    assert again.step_s > kept.step_s
    assert again.parts[-1].rate == kept.parts[-1].rate, "trainers compute nothing again"


def test_whole_microbatches_are_done_by_whoever_is_free() -> None:
    assert whole_microbatches_s(16, [(2, 1.0)]) == 8.0
    assert whole_microbatches_s(17, [(2, 1.0)]) == 9.0
    assert whole_microbatches_s(7, [(1, 1.0), (1, 3.0)]) == pytest.approx(6.0), "six of the fast one, two of the other"


def test_expected_pace_is_that_of_the_part_with_fewest() -> None:
    assert expected_pace([(1.0, 1, 0.1)]) == pytest.approx(0.9)
    assert expected_pace([(1.0, 1, 0.1), (1.0, 1, 0.1)]) == pytest.approx(0.81)
    assert expected_pace([(1.0, 2, 0.5)]) == pytest.approx(0.5)
    assert expected_pace([(2.0, 2, 0.5), (1.0, 1, 0.0)]) == pytest.approx(0.75), "one of two is enough"
    assert expected_pace([(1.0, 400, 0.05)]) == pytest.approx(0.95)
    assert expected_pace([(1.0, 3, 0.0)]) == 1.0


def test_mfu_of_the_published_13b_row() -> None:
    model = GptConfig(vocab_size=128_000, dim=5120, layers=40, heads=40, ffn_dim=13_824, context=2048)
    palm, causal = palm_flops_per_token(model, 2048), training_flops_per_token(model, family_of(model).whole, 2048)
    tokens_s, peak = 2048 * 2048 / 26.54, 64 * 312e12
    assert tokens_s * palm / peak == pytest.approx(0.7057, abs=0.002)
    assert tokens_s * causal / peak == pytest.approx(0.654, abs=0.002)


def test_mfu_is_of_peak_only_where_all_peaks_are_known() -> None:
    found = predict(WORK, [PEER], LAYOUT)
    share, of_peak = mfu(WORK, [PEER], found, 1e6)
    assert not of_peak
    assert share == pytest.approx(found.tokens_s * 1e6 / 5e9)
    assert mfu(WORK, [replace(PEER, peak_flops=2e9)], found, 1e6) == (pytest.approx(share / 2), True)


def test_alone_says_in_which_way_and_how_long() -> None:
    plan = predict(WORK, [PEER], LAYOUT)
    assert alone(WORK, PEER, plan).way == "whole"
    assert alone(WORK, PEER, plan).step_s == pytest.approx(3 * 6400 * 4.5e6 / 1e9 + UPDATE_S * 4.5e6)
    assert alone(WORK, replace(PEER, memory=0.1 * GIB), plan).step_s == math.inf
    assert alone(WORK, replace(PEER, memory=0.03 * GIB, host_memory=8 * GIB), plan).way == "swap"
    assert not alone(WORK, PEER, plan).worth_it, "computing takes longer than carrying"
    thin = replace(PEER, up=1e4)
    assert alone(WORK, thin, plan).worth_it


def test_slices_pay_below_four_microbatches_a_stage() -> None:
    assert not slices(predict(WORK, [PEER], LAYOUT)).worth_it
    few = slices(predict(replace(WORK, rows=16), [PEER], LAYOUT))
    assert (few.under_way, few.enough, few.worth_it) == (2, 8, True)


def test_tensors_pay_where_no_layers_are_left_to_cut_between() -> None:
    gpu = replace(PEER, host_memory=8 * GIB)
    assert tensors(WORK, [PEER], predict(WORK, [PEER], LAYOUT)) is None, "it has no device of its own"
    found = tensors(WORK, [gpu], predict(WORK, [gpu], LAYOUT))
    assert found is not None
    assert found.whole_s == pytest.approx(3 * 2e6 * 400 / 1e9)
    assert found.between_s == pytest.approx(2 * 4 * 2 * 4 * 1e5 / HOST_LINK)
    assert found.tensor_s == pytest.approx(found.whole_s / 2 + found.between_s)
    assert not found.worth_it, "layers go first"
    single = PartLayout(stages=(1, 1, 1, 1), places=((1,), (1,), (1,), (1,), (1,)), rows=4)
    finest = tensors(WORK, [gpu], predict(WORK, [gpu], single))
    assert finest is not None
    assert finest.worth_it
    quick = replace(gpu, flops=1e15)
    sent = tensors(WORK, [quick], predict(WORK, [quick], single))
    assert sent is not None
    assert not sent.worth_it, "what goes between devices takes longer than a device computes"
    work = replace(WORK, loads=((1.0,), (0.25, 0.75)))
    busy = tensors(work, [gpu], predict(work, [gpu], replace(LAYOUT, places=((2,), (1,), (1,), (1,)))))
    assert busy is not None
    assert (busy.stage, busy.whole_s) == ("stage-1.v1of2", found.whole_s), "of variants the one with the most text"
