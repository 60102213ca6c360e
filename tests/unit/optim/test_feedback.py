"""What a part owes its next contribution: from averaging to swap, through void steps, copies and other replicas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarm.errors import Refused
from swarm.membership.memory import storage_bytes
from swarm.optim.part import TrainedPart
from swarm.planning.costs import RESIDUAL_BYTES
from swarm.state.snapshot import Snapshot
from tests.harness.rigs.optim import work
from tests.unit.optim.test_part import SCALARS, parts


@pytest.fixture
def part() -> TrainedPart:
    found: TrainedPart = parts()[0]
    return found


def vector(part: TrainedPart, value: float) -> Tensor:
    return torch.full((part.layout.elements,), value)


def contributed(part: TrainedPart) -> Tensor:
    found = part.contribution(part.step + 1, frozenset(), 0)
    assert found is not None
    return found


def average(part: TrainedPart, left: Tensor | None) -> None:
    part.prepare(torch.zeros(part.layout.elements), step=part.step + 1, left=left, **SCALARS)


def close(part: TrainedPart, left: Tensor | None) -> None:
    average(part, left)
    part.swap()


def test_what_is_left_is_added_to_the_next_contribution_and_to_no_earlier_one(part: TrainedPart) -> None:
    average(part, vector(part, 2.0))
    assert not contributed(part).any(), "nothing is decided"
    average(part, vector(part, 3.0))  # another attempt at the same step
    part.swap()
    assert torch.equal(contributed(part), vector(part, 3.0))
    assert torch.equal(contributed(part), vector(part, 3.0)), "every attempt sends the same"
    assert part.contribution(part.step + 1, frozenset({work(0, part.step + 1)}), 1) is None, "as without it"
    assert not part.gradient_sum().any(), "the accumulator has gradients alone"
    close(part, vector(part, 4.0))
    assert torch.equal(contributed(part), vector(part, 4.0)), "what was sent is not owed any more"


def test_void_step_changes_nothing(part: TrainedPart) -> None:
    close(part, vector(part, 2.0))
    average(part, vector(part, 3.0))
    part.give_up()
    assert torch.equal(contributed(part), vector(part, 2.0))
    close(part, None)
    assert part.feedback.residual is None, "the pending one was given up"


@pytest.mark.parametrize(
    "come_back",
    [
        lambda part: close(part, None),
        lambda part: part.install(Snapshot.blank(part.spec.name, 5, part.layout)),
    ],
    ids=["a step that others averaged", "another state"],
)
def test_replica_that_was_cut_off_owes_nothing(part: TrainedPart, come_back: Callable[[TrainedPart], None]) -> None:
    close(part, vector(part, 2.0))
    average(part, vector(part, 3.0))
    part.feedback.inherit(vector(part, 1.0))
    come_back(part)
    assert part.feedback.tensors() == ([], [])
    assert not contributed(part).any()


@pytest.mark.parametrize("close_it", [lambda part: close(part, vector(part, 2.0)), lambda part: part.give_up()])
def test_what_another_hands_over_counts_from_the_next_step_on(
    part: TrainedPart, close_it: Callable[[TrainedPart], None]
) -> None:
    close(part, vector(part, 2.0))
    part.feedback.inherit(vector(part, 1.0))
    part.feedback.inherit(vector(part, -4.0))
    assert torch.equal(contributed(part), vector(part, 2.0)), "attempts at this step send the same"
    close_it(part)
    assert torch.equal(contributed(part), vector(part, -1.0))
    close(part, vector(part, 0.5))
    assert torch.equal(contributed(part), vector(part, 0.5)), "it is taken over once"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 129.0, -129.0])
def test_what_is_far_longer_than_our_own_is_refused(part: TrainedPart, value: float) -> None:
    with pytest.raises(Refused, match="averaged no step"):
        part.feedback.inherit(vector(part, 0.0))
    close(part, vector(part, 2.0))
    with pytest.raises(Refused, match="norm"):
        part.feedback.inherit(vector(part, value))
    close(part, vector(part, 2.0))
    assert torch.equal(contributed(part), vector(part, 2.0))


def test_part_holds_what_is_predicted_of_what_it_owes(part: TrainedPart) -> None:
    before = storage_bytes(part.tensors())
    close(part, vector(part, 1.0))
    average(part, vector(part, 2.0))
    grown = {kind: size - before[kind] for kind, size in storage_bytes(part.tensors()).items()}
    each = RESIDUAL_BYTES * part.layout.elements
    assert grown["gradients"] == each
    assert grown["round"] == 4 * part.layout.elements + each, "the mean, and what it left"
