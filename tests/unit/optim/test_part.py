from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.errors import BugError, StateError, Violation
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.adamw import AdamW
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig
from swarm.state.snapshot import digest, initial_snapshot
from tests.harness.rigs.optim import MODEL, data, work

SCALARS = {"lr": 0.01, "clip": 0.9}


def parts(model: GptConfig = MODEL, ends: str = "private", accumulator: str = "float32") -> Any:
    weights, found = family_of(model).initial_weights(0), []
    for spec in family_of(model).parts(SplitConfig(stages=2, ends=ends)):
        part = TrainedPart(spec, model, AdamW(OptimizerConfig()), accumulator=accumulator)
        part.install(initial_snapshot(spec.name, part.layout, weights))
        found.append(part)
    return found


def journey(first: TrainedPart, second: TrainedPart, ends: TrainedPart, position: int) -> tuple[float, int]:
    """One microbatch through private ends and two stages, forward and backward."""
    inputs, targets = data(position)
    hidden, embedded = ends.embed(inputs, seed=position)
    hidden, graph = first.forward(hidden, seed=position)
    hidden, last_graph = second.forward(hidden, seed=position)
    loss_sum, tokens, grad, head_gradients = ends.loss(hidden, targets)
    grad, gradients = second.backward(last_graph, grad)
    second.accumulate(work(position, second.step + 1), gradients)
    grad, gradients = first.backward(graph, grad)
    first.accumulate(work(position, first.step + 1), gradients)
    ends.accumulate(work(position, ends.step + 1), [*ends.embed_backward(embedded, grad), *head_gradients])
    return loss_sum, tokens


def close(part: TrainedPart, tokens: int) -> str:
    found = part.prepare((part.gradient_sum() / tokens).float(), step=part.step + 1, **SCALARS)
    part.swap()
    return found


def test_part_steps_equal_the_whole_model_bit_for_bit() -> None:
    """Three steps of two microbatches: parts against one hosted part that is the whole model."""
    spec = family_of(MODEL).parts(SplitConfig(stages=1, ends="hosted"))[0]
    whole = TrainedPart(spec, MODEL, AdamW(OptimizerConfig()))
    whole.install(initial_snapshot(spec.name, whole.layout, family_of(MODEL).initial_weights(0)))
    cut = parts()
    for step in range(3):
        counted = 0
        for position in (2 * step, 2 * step + 1):
            loss_sum, tokens = journey(*cut, position=position)
            expected, _, graph = whole.forward_loss(*data(position), seed=position)
            assert loss_sum == expected
            whole.accumulate(work(position, whole.step + 1), whole.backward(graph, None)[1])
            counted += tokens
        for part in (*cut, whole):
            close(part, counted)
    weights = {name: view for part in cut for name, view in part.snapshot().weights.items()}
    expected_weights = whole.snapshot().weights
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def test_part_that_nobody_fed_keeps_its_state_to_the_bit() -> None:
    cut = parts()
    _, tokens = journey(*cut, position=0)
    first, second, _ = cut
    before = [close(part, tokens) for part in (first, second)]
    _, tokens = journey(*cut, position=1)
    nothing = torch.zeros(first.layout.elements)
    assert first.prepare(nothing, step=2, fed=False, **SCALARS) == before[0]
    first.swap()
    assert close(second, tokens) != before[1]
    assert (first.step, digest(first.snapshot())) == (2, before[0])
    first.prepare(nothing, step=3, fed=False, **SCALARS)
    with pytest.raises(BugError):
        first.prepare(nothing[1:], step=3, fed=False, **SCALARS)
    owed = first.prepare(nothing + 1.0, step=3, fed=False, **SCALARS)
    assert owed == first.prepare(nothing + 1.0, step=3, **SCALARS), "of an earlier step"


def test_part_that_was_fed_takes_its_step_when_the_mean_is_zeros() -> None:
    cut = parts()
    _, tokens = journey(*cut, position=0)
    first, _, _ = cut
    before = close(first, tokens)
    kept = first.snapshot()
    found = first.prepare(torch.zeros(first.layout.elements), step=2, **SCALARS)
    first.swap()
    assert found == digest(first.snapshot()) != before
    old, new = kept.vectors[1], first.snapshot().vectors[1]
    assert bool(new.any()), "moments move as of any step"
    assert float(new.abs().sum()) < float(old.abs().sum())


def test_part_learns_one_microbatch_by_heart() -> None:
    cut = parts()
    losses = []
    for _ in range(25):
        loss_sum, tokens = journey(*cut, position=0)
        losses.append(loss_sum / tokens)
        for part in cut:
            close(part, tokens)
    assert losses[-1] < 0.3 * losses[0]


def test_part_hosted_first_stage_gives_no_input_gradient() -> None:
    first, last = parts(ends="hosted")
    inputs, targets = data(0)
    hidden, graph = first.forward(inputs, seed=0)
    _, _, last_graph = last.forward_loss(hidden, targets, seed=0)
    grad, _ = last.backward(last_graph, None)
    assert grad.shape == hidden.shape
    assert first.backward(graph, grad)[0] is None


def test_part_prepare_shows_nothing_before_swap() -> None:
    cut = parts()
    journey(*cut, position=0)
    stage = cut[0]
    before, x = stage.snapshot(), torch.ones((1, 4, 32))
    output = stage.forward(x, seed=None, graph=False)[0]
    found = stage.prepare(stage.gradient_sum() / 32, step=1, **SCALARS)
    assert stage.step == 0
    assert torch.equal(stage.forward(x, seed=None, graph=False)[0], output)
    assert stage.accumulated(stage.step + 1) == {work(0)}
    stage.discard()
    with pytest.raises(BugError, match="without prepare"):
        stage.swap()
    assert stage.prepare(stage.gradient_sum() / 32, step=1, **SCALARS) == found
    stage.swap()
    after = stage.snapshot()
    assert stage.step == after.step == 1
    assert digest(after) == found
    assert stage.accumulated(stage.step + 1) == frozenset()
    assert not torch.equal(stage.forward(x, seed=None, graph=False)[0], output)
    assert digest(before) == digest(
        initial_snapshot(stage.spec.name, stage.layout, family_of(MODEL).initial_weights(0))
    )


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_part_graph_from_before_a_swap_is_refused(compute: str) -> None:
    cut = parts(MODEL.model_copy(update={"compute": compute}))
    x = torch.linspace(-1, 1, 128).view(1, 4, 32)
    _, graph = cut[0].forward(x, seed=None)
    journey(*cut, position=0)
    close(cut[0], 32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cut[0].backward(graph, x)


def storage(part: TrainedPart) -> list[int]:
    return [vector.data_ptr() for vector in part.snapshot().vectors]


def test_part_steps_in_place_while_nobody_holds_a_snapshot_of_it() -> None:
    cut = parts()
    stage, before = cut[0], storage(cut[0])
    journey(*cut, position=0)
    close(stage, 32)
    assert storage(stage) == before
    held, first = stage.snapshot(), digest(stage.snapshot())
    assert stage.snapshot() is held
    journey(*cut, position=1)
    close(stage, 32)
    assert storage(stage) != before
    assert (held.step, digest(held)) == (1, first)
    moved = storage(stage)
    del held
    journey(*cut, position=2)
    close(stage, 32)
    assert storage(stage) == moved


def test_part_that_took_a_snapshot_over_leaves_those_that_hold_it_what_it_was() -> None:
    stage, other = parts()[0], parts()[0]
    lent = stage.snapshot()
    before = digest(lent)
    other.install(lent)
    assert other.snapshot() is lent
    other.prepare(torch.ones(other.layout.elements), step=1, **SCALARS)
    other.swap()
    assert (other.step, digest(lent)) == (1, before)
    assert digest(stage.snapshot()) == before


def test_part_given_up_lends_its_state_to_both_steps() -> None:
    stage = parts()[0]
    first = stage.snapshot()
    stage.give_up()
    second = stage.snapshot()
    assert (first.step, second.step) == (0, 1)
    before, place = digest(first), second.params.data_ptr()
    del second
    stage.prepare(torch.ones(stage.layout.elements), step=2, **SCALARS)
    stage.swap()
    assert digest(first) == before
    assert stage.snapshot().params.data_ptr() != place


def test_part_reverse_leaves_the_others_exactly_in_float64() -> None:
    with_more, without = parts(accumulator="float64"), parts(accumulator="float64")
    for position in range(3):
        journey(*with_more, position=position)
    for position in (2, 0):
        journey(*without, position=position)
    stage, ends = with_more[1], with_more[2]
    hidden, _ = with_more[0].forward(ends.embed(data(1)[0], seed=1)[0], seed=1, graph=False)
    output, graph = stage.forward(hidden, seed=1)
    stage.reverse(work(1), stage.backward(graph, ends.loss(output, data(1)[1])[2])[1])
    assert stage.gradient_sum().dtype == torch.float64
    assert torch.equal(stage.gradient_sum(), without[1].gradient_sum())


def test_part_misuse_is_a_bug() -> None:
    spec = family_of(MODEL).parts(SplitConfig(stages=2))[0]
    empty = TrainedPart(spec, MODEL, AdamW(OptimizerConfig()))
    with pytest.raises(BugError, match="no weights"):
        empty.forward(torch.ones((1, 4, 32)), seed=None)
    with pytest.raises(BugError, match="no weights"):
        _ = empty.step
    stage, _, ends = parts()
    with pytest.raises(BugError, match="no layers"):
        ends.forward(torch.ones((1, 4, 32)), seed=None)
    with pytest.raises(BugError, match="step 2"):
        stage.prepare(stage.gradient_sum(), step=2, **SCALARS)


def test_part_install_of_another_part_or_model_is_refused() -> None:
    first, second, _ = parts()
    other = parts(MODEL.model_copy(update={"dim": 64}))[0]
    for wrong in (second.snapshot(), other.snapshot()):
        with pytest.raises(StateError, match="does not fit"):
            first.install(wrong)
    assert first.step == 0


def test_part_gradient_not_finite_is_refused_whole() -> None:
    stage = parts()[0]
    _, graph = stage.forward(torch.ones((1, 4, 32)), seed=None)
    _, gradients = stage.backward(graph, torch.full((1, 4, 32), float("inf")))
    with pytest.raises(Violation, match="not finite"):
        stage.accumulate(work(0), gradients)
    assert stage.gradient_sum().abs().max() == 0


def test_part_in_bfloat16_keeps_float32_masters_and_refreshes_its_copies() -> None:
    model = MODEL.model_copy(update={"compute": "bfloat16"})
    cut = parts(model)
    x = torch.ones((1, 4, 32), dtype=torch.bfloat16)
    before = cut[0].forward(x, seed=None, graph=False)[0]
    assert before.dtype == torch.bfloat16
    for _ in range(3):
        loss_sum, tokens = journey(*cut, position=0)
        for part in cut:
            close(part, tokens)
    assert all(view.dtype == torch.float32 for view in cut[0].snapshot().weights.values())
    assert not torch.equal(cut[0].forward(x, seed=None, graph=False)[0], before)
    full = family_of(model).build(family_of(model).whole)
    install_weights(full, {name: view for part in cut for name, view in part.snapshot().weights.items()})
    assert full.evaluate(*data(0))[0] < loss_sum
