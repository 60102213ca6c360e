from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm.averaging.gossip.versions import Version
from swarm.errors import BugError
from swarm.ids import StepWork
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.adamw import AdamW
from swarm.optim.local_part import LocalPart, LocalRules
from swarm.optim.muon import MATCHED_RMS, Muon
from swarm.optim.outer import Outer, OuterNesterov
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import initial_snapshot
from tests.harness.rigs.optim import MODEL, data, work

SPEC = family_of(MODEL).parts(SplitConfig(stages=1, ends="hosted"))[0]
TOKENS = 32
OPTIMIZER = OptimizerConfig(lr=0.01, warmup_steps=0, clip_norm=0.5)
RULES = LocalRules(
    batch=2,
    tokens=TOKENS,
    mix_after=2,
    inner_steps=4,
    steps=3,
    optimizer=OPTIMIZER,
    inner=AdamW(OPTIMIZER),
    outer=Outer(OuterNesterov(lr=1.0, momentum=0.0)),
)
RULES_WITH_MOMENTUM = replace(RULES, outer=Outer(OuterNesterov()))


CPU = torch.device("cpu")


def local(rules: LocalRules = RULES, devices: int = 1, tensor: int = 1) -> LocalPart:
    part = LocalPart(replace(SPEC, tensor=tensor), MODEL, rules, devices=(CPU,) * devices)
    part.install(initial_snapshot(SPEC.name, part.layout, family_of(MODEL).initial_weights(0)))
    return part


def train(part: TrainedPart, *positions: int) -> None:
    for position in positions:
        _, _, graph = part.forward_loss(*data(position), seed=position)
        part.accumulate(work(position, part.step + 1), part.backward(graph, None)[1])


def close(part: LocalPart, mean: torch.Tensor) -> str:
    found = part.prepare(mean, lr=0.1, clip=1.0, step=part.step + 1)
    part.swap()
    return found


def ids(*positions: int) -> frozenset[StepWork]:
    return frozenset(map(work, positions))


def test_steps_of_its_own_are_those_of_adamw_and_the_contribution_is_how_far_they_led() -> None:
    part, plain = local(), TrainedPart(SPEC, MODEL, AdamW(OPTIMIZER))
    anchor = part.snapshot().params
    plain.install(part.snapshot())
    for step, pair in enumerate([(0, 1), (2, 3)], start=1):
        train(part, *pair)
        train(plain, *pair)
        mean = plain.gradient_sum() / (2 * TOKENS)
        clip = min(1.0, 0.5 / (float(torch.linalg.vector_norm(mean)) + 1e-6))
        lr = OPTIMIZER.lr * (0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 12)).item()))
        plain.prepare(mean, lr=lr, clip=clip, step=step)
        plain.swap()
    assert part.accumulated(part.step + 1) == ids(0, 1, 2, 3)
    moved = part.contribution(part.step + 1, ids(9), tokens=128)
    assert moved is not None
    torch.testing.assert_close(anchor - moved / 128, plain.snapshot().params, rtol=0, atol=1e-6)
    assert torch.equal(part.snapshot().params, anchor), "what others download is where all began"


def test_steps_of_its_own_have_the_same_bits_on_any_number_of_devices() -> None:
    whole, one, two = local(), local(tensor=2), local(tensor=2, devices=2)
    for part in (whole, one, two):
        train(part, 0, 1, 2, 3)
    moved, again, otherwise = (part.contribution(1, ids(), tokens=1) for part in (one, two, whole))
    assert moved is not None
    assert again is not None
    assert otherwise is not None
    assert torch.equal(moved, again)
    torch.testing.assert_close(moved, otherwise, rtol=0, atol=1e-4)


def test_close_puts_everybody_at_the_same_anchor_and_moments_stay() -> None:
    one, other = local(), local()
    train(one, 0, 1, 2, 3)
    train(other, 4, 5)
    sums = [part.contribution(part.step + 1, frozenset(), tokens) for part, tokens in ((one, 96), (other, 32))]
    mean = (sums[0] + sums[1]) / 128
    assert close(one, mean) == close(other, mean)
    assert one.accumulated(one.step + 1) == frozenset()
    train(one, 6, 7)
    train(other, 6, 7)
    assert not torch.equal(
        one.contribution(one.step + 1, frozenset(), 1), other.contribution(other.step + 1, frozenset(), 1)
    )


def test_outer_momentum_is_in_the_state_that_others_copy() -> None:
    part = local(RULES_WITH_MOMENTUM)
    train(part, 0, 1)
    delta = part.contribution(part.step + 1, frozenset(), 1)
    assert delta is not None
    close(part, delta)
    state = part.snapshot()
    assert torch.equal(state.vectors[1], delta)
    assert state.vectors[2].abs().max() == 0


def test_what_was_rounded_off_a_delta_goes_into_the_next_one_and_survives_a_void_step() -> None:
    part = local()
    train(part, 0, 1)
    delta = part.contribution(part.step + 1, frozenset(), 10)
    assert delta is not None
    owed = torch.full_like(delta, 0.25)
    part.prepare(delta / 10, lr=0.1, clip=1.0, step=part.step + 1, left=owed)
    part.give_up()
    assert part.contribution(part.step + 1, frozenset(), 10).abs().max() == 0, "a void step owes nothing new"
    part.prepare(delta / 10, lr=0.1, clip=1.0, step=part.step + 1, left=owed)
    part.swap()
    assert torch.equal(part.contribution(part.step + 1, frozenset(), 10), owed)
    train(part, 2, 3)
    first, again = (part.contribution(part.step + 1, frozenset(), 10) for _ in range(2))
    assert torch.equal(first, again), "it is added once an attempt"
    part.prepare(delta / 10, lr=0.1, clip=1.0, step=part.step + 1, left=2 * owed)
    part.give_up()
    assert torch.equal(part.contribution(part.step + 1, frozenset(), 10), owed), "void: what is owed stays"
    part.install(part.snapshot())
    assert part.contribution(part.step + 1, frozenset(), 10).abs().max() == 0, "another state owes nothing"


def test_muons_momentum_stays_with_the_replica_and_the_state_that_others_copy_has_the_outer_alone() -> None:
    optimizer = OPTIMIZER.model_copy(update={"name": "muon"})
    part = local(replace(RULES_WITH_MOMENTUM, optimizer=optimizer, inner=Muon(optimizer)))
    matrices = [
        (slot.offset, slot.offset + slot.elements) for slot in part.layout.slots if slot.name in part.layout.matrices
    ]
    assert matrices
    train(part, 0, 1, 2, 3)
    delta = part.contribution(part.step + 1, frozenset(), 1)
    assert delta is not None
    momentum = part.tensors()["optimizer"][-2].clone()
    for start, stop in matrices:
        assert momentum[start:stop].abs().max() > 0
        assert part.tensors()["optimizer"][-1][start:stop].abs().max() == 0, "a matrix has no second moment"
        most = 2 * OPTIMIZER.lr * MATCHED_RMS * 1.3
        assert 0 < float(delta[start:stop].square().mean().sqrt()) < most + OPTIMIZER.lr * OPTIMIZER.weight_decay
    close(part, delta)
    state = part.snapshot()
    assert torch.equal(state.vectors[1], delta), "not Muon's momentum"
    assert torch.equal(part.tensors()["optimizer"][-2], momentum), "it outlives the close"


def test_part_of_a_batch_is_a_smaller_step_and_contributing_again_gives_the_same() -> None:
    part = local()
    train(part, 0)
    first, again = part.contribution(part.step + 1, ids(0), 10), part.contribution(part.step + 1, ids(0), 10)
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)
    whole = local()
    train(whole, 0, 1)
    full = whole.contribution(whole.step + 1, ids(0, 1), 10)
    assert 0 < float(first.norm()) < 0.8 * float(full.norm())


def test_what_is_reversed_counts_no_more_and_leaves_the_batch_if_it_is_still_in_it() -> None:
    part = local()
    train(part, 0, 1)
    weights = part.contribution(part.step + 1, ids(0, 1), 1)
    gradients = [(name, torch.zeros_like(view)) for name, view in part.layout.views(part.snapshot().params).items()]
    part.reverse(work(0), gradients)
    assert part.accumulated(part.step + 1) == ids(1)
    assert torch.equal(part.contribution(part.step + 1, ids(1), 1), weights)
    with pytest.raises(BugError, match="counted already"):
        train(part, 1)


def test_share_of_a_batch_follows_how_many_replicas_there_are() -> None:
    part = local()
    part.replicas = 2
    train(part, 0)
    assert part.contribution(part.step + 1, frozenset(), 1).abs().max() > 0


def test_legs_give_versions_and_mixing_keeps_what_was_learnt_since() -> None:
    part, told = local(), []
    part.leg_over = lambda: told.append(part.version.leg)
    assert (part.version.step, part.version.leg) == (1, 0)
    train(part, 0, 1, 2, 3)
    assert told == [1]
    mine = part.version
    train(part, 4, 5)
    before = part.snapshot().params - part.contribution(part.step + 1, frozenset(), 1)
    assert part.mix(mine, mine.params + 0.5)
    after = part.snapshot().params - part.contribution(part.step + 1, frozenset(), 1)
    torch.testing.assert_close(after, before + 0.5, rtol=0, atol=1e-5)


def test_version_that_was_published_while_others_were_taken_gets_the_same_shift() -> None:
    part = local()
    train(part, 0, 1, 2, 3)
    mine = part.version
    train(part, 4, 5, 6, 7)
    second = part.version
    assert part.mix(mine, mine.params + 0.5)
    assert part.version.leg == second.leg == 2
    torch.testing.assert_close(part.version.params, second.params + 0.5, rtol=0, atol=1e-6)
    own = part.snapshot().params - part.contribution(part.step + 1, frozenset(), 1)
    torch.testing.assert_close(part.version.params, own, rtol=0, atol=1e-5)


def test_version_of_a_closed_step_is_not_mixed_in() -> None:
    part = local()
    train(part, 0, 1, 2, 3)
    mine = part.version
    close(part, part.contribution(part.step + 1, frozenset(), 1))
    assert not part.mix(mine, mine.params + 0.5)
    assert part.contribution(part.step + 1, frozenset(), 1).abs().max() == 0
    assert (part.version.step, part.version.leg) == (2, 0)


def test_step_that_is_given_up_takes_what_was_learnt_in_it() -> None:
    part = local()
    anchor = part.snapshot().params
    train(part, 0, 1)
    part.give_up()
    assert torch.equal(part.snapshot().params, anchor)
    assert part.contribution(part.step + 1, frozenset(), 1).abs().max() == 0
    assert isinstance(part.version, Version)


# --- fragments -------------------------------------------------------------------------------------------------------

PLAIN = OuterNesterov(lr=1.0, momentum=0.0)
IN_TWO = replace(RULES, outer=Outer(PLAIN, fragments=2))


def own(part: LocalPart) -> torch.Tensor:
    """Its own weights, as its passes see them."""
    held = dict(part._module.named_parameters())
    return part.layout.flatten({slot.name: held[slot.name].detach() for slot in part.layout.slots})


def test_close_of_a_fragment_puts_all_at_the_same_anchor_and_each_goes_on_from_its_own_weights_elsewhere() -> None:
    one, other = local(IN_TWO), local(IN_TWO)
    anchor = one.snapshot().params.clone()
    train(one, 0, 1, 2, 3)
    train(other, 4, 5)
    before, part = (own(one), own(other)), one.averaged(1)
    sums = [each.contribution(1, frozenset(), tokens) for each, tokens in ((one, 96), (other, 32))]
    assert sums[0].shape == sums[1].shape == (part.stop - part.start,)
    mean = (sums[0] + sums[1]) / 128
    assert close(one, mean) == close(other, mean)
    new = one.snapshot().params
    assert torch.equal(new[part], anchor[part] - mean)
    rest = one.averaged(2)
    assert (rest.start, part.stop) == (0, one.layout.elements)
    assert torch.equal(new[rest], anchor[rest]), "its turn is the next"
    for each, its in zip((one, other), before, strict=True):
        assert torch.equal(own(each)[part], new[part])
        assert torch.equal(own(each)[rest], its[rest])
    moved = one.contribution(2, frozenset(), 1)
    assert torch.equal(moved, (anchor - before[0])[rest]), "what was learnt in the step before is in the next one"


def test_mixing_weight_says_how_far_a_replica_goes_to_the_new_anchor() -> None:
    part = local(replace(IN_TWO, mixing_weight=0.25))
    train(part, 0, 1)
    before, averaged = own(part), part.averaged(1)
    close(part, torch.full((averaged.stop - averaged.start,), 0.5))
    anchor = part.snapshot().params
    torch.testing.assert_close(own(part)[averaged], 0.75 * before[averaged] + 0.25 * anchor[averaged])


@pytest.mark.parametrize("rules", [RULES, IN_TWO], ids=["whole", "turns"])
def test_who_was_late_moves_as_the_anchor_does_and_brings_all_it_learnt_to_its_next_contribution(
    rules: LocalRules,
) -> None:
    late, other = local(rules), local(rules)
    train(late, 0, 1, 2)
    train(other, 4, 5)
    anchor, turn = late.snapshot().params, late.averaged(1)
    mean = other.contribution(1, frozenset(), 1)
    assert mean is not None
    found = late.prepare_late(mean, lr=0.1, clip=1.0, step=1)
    before = own(late)
    late.swap()
    assert found == close(other, mean), "anchor and momentum are those of all"
    moved = late.snapshot().params - anchor
    assert moved.any()
    torch.testing.assert_close(own(late), before + moved, rtol=0, atol=1e-6)
    if rules is IN_TWO:  # the other fragment has its turn first
        close(late, torch.zeros_like(late.contribution(2, frozenset(), 1)))
    brought = late.contribution(late.step + 1, frozenset(), 1)
    assert late.averaged(late.step + 1) == turn
    torch.testing.assert_close(brought, (anchor - before)[turn], rtol=0, atol=1e-6)


def test_who_was_late_and_has_not_trained_is_at_the_anchor() -> None:
    late = local()
    late.prepare_late(torch.full_like(late.snapshot().params, 0.1), lr=0.1, clip=1.0, step=1)
    late.swap()
    assert torch.equal(own(late), late.snapshot().params)


@pytest.mark.parametrize("how", ["given up", "installed"])
def test_step_that_is_given_up_or_a_state_of_others_puts_all_fragments_at_the_anchor(how: str) -> None:
    part, giver = local(IN_TWO), local(IN_TWO)
    train(part, 0, 1)
    close(part, part.contribution(1, frozenset(), 1))
    train(part, 2, 3)
    assert not torch.equal(own(part), part.snapshot().params)
    if how == "given up":
        part.give_up()
    else:
        part.install(giver.snapshot())
    assert torch.equal(own(part), part.snapshot().params)
    assert part.contribution(part.step + 1, frozenset(), 1).abs().max() == 0


def test_state_that_was_lent_stays_while_a_replica_goes_on_from_its_own_weights() -> None:
    part = local(IN_TWO)
    close(part, part.contribution(1, frozenset(), 1))
    lent = part.snapshot()
    kept = lent.params.clone()
    train(part, 0, 1)
    close(part, part.contribution(2, frozenset(), 1))
    assert torch.equal(lent.params, kept)
    assert not torch.equal(part.snapshot().params, kept)


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_who_follows_without_training_stays_at_the_anchor_and_contributes_nothing(weight: float) -> None:
    part = local(replace(RULES, outer=Outer(RULES.outer.nesterov, fragments=2), mixing_weight=weight))
    for _ in range(3):
        close(part, torch.full((part.averaged(part.step + 1).stop - part.averaged(part.step + 1).start,), 0.1))
    contributed = part.contribution(part.step + 1, frozenset(), TOKENS)
    assert not contributed.any()
    assert torch.equal(own(part), part.snapshot().params)


def test_gradients_whose_sum_is_not_finite_leave_weights_and_moments_finite() -> None:
    part = local()
    before = part.snapshot().params
    huge = {
        name: torch.full(tensor.shape, 2e38)
        for name, tensor in part.backward(part.forward_loss(*data(0), seed=0)[2], None)[1]
    }
    for position in (0, 1):
        part.accumulate(work(position), list(huge.items()))
    torch.testing.assert_close(own(part), before, atol=1e-3, rtol=0.0)  # it decays, and nothing else
    part.give_up()
    train(part, 2, 3)
    assert own(part).isfinite().all()
    assert not torch.equal(own(part), before)


@pytest.mark.parametrize("forgets", ["discard", "prepare"])
def test_part_that_did_not_catch_up_is_late_no_more(forgets: str) -> None:
    part = local()
    train(part, 0, 1)
    mean = part.contribution(1, frozenset(), 1)
    assert mean is not None
    part.prepare_late(mean, lr=0.1, clip=1.0, step=1)
    if forgets == "discard":
        part.discard()
    close(part, mean)
    assert torch.equal(own(part), part.snapshot().params), "it goes on from the anchor, as who was in the averaging"
    assert part.since == 2


def test_part_says_from_which_step_on_it_holds_what_it_did() -> None:
    part = local()
    assert part.since == 1
    for step in (1, 2):
        train(part, 2 * step, 2 * step + 1)
        part.prepare_late(torch.zeros_like(part.snapshot().params), lr=0.1, clip=1.0, step=step)
        part.swap()
    assert part.since == 1
    part.give_up()
    assert part.since == part.step + 1
