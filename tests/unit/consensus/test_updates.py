"""What is kept for those who follow a part: no more than they lack, and never many."""

from __future__ import annotations

import torch

from swarm.consensus.copies import KEPT_UPDATES, Updates
from swarm.ids import ENDS, stage_part

STAGE = stage_part(0)


def kept(*steps: int) -> Updates:
    updates = Updates()
    for step in steps:
        updates.add(STAGE, step, torch.tensor([float(step)]))
    return updates


def test_updates_of_a_part_are_kept_by_step_until_all_have_them() -> None:
    updates = kept(3, 4, 5)
    assert (updates.reached(STAGE), updates.steps(STAGE)) == (5, [3, 4, 5])
    updates.trim(STAGE, 3)
    assert updates.steps(STAGE) == [4, 5]
    found = updates.at(STAGE, 4)
    assert found is not None
    assert found.item() == 4.0
    assert updates.at(STAGE, 3) is None is updates.at(ENDS, 4)
    updates.trim(STAGE, None)
    assert (updates.reached(STAGE), updates.steps(STAGE)) == (5, [])


def test_updates_are_never_more_than_a_few() -> None:
    assert kept(*range(20)).steps(STAGE) == list(range(20 - KEPT_UPDATES, 20))


def test_updates_that_nobody_needs_or_knows_leave_a_gap() -> None:
    updates = kept(3)
    updates.add(STAGE, 4, None)
    assert (updates.reached(STAGE), updates.at(STAGE, 4), updates.steps(STAGE)) == (4, None, [3])


def test_updates_of_a_part_that_is_not_held_any_more_are_gone() -> None:
    updates = kept(3)
    updates.add(ENDS, 3, None)
    updates.forget(STAGE)
    assert (updates.reached(STAGE), updates.steps(STAGE), updates.reached(ENDS)) == (None, [], 3)
    updates.forget(STAGE)
