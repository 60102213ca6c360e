"""Codecs of each step at one holder's boundaries: what comes, what goes, and what is admitted ahead of its step."""

from __future__ import annotations

import pytest
import torch

from swarm.compression.codec import EncodeContext
from swarm.compression.registry import CODECS
from swarm.errors import Violation, WrongStep
from swarm.models.spec import TensorSpec
from swarm.pipeline.boundary import BoundarySpecs, StepCodecs

EXACT, SMALL = (CODECS["float32"],) * 2, (CODECS["int8h"],) * 2
MIXED = CODECS["int8h"], CODECS["float32"]
SPEC, CPU = TensorSpec((2, 64), "float32"), torch.device("cpu")
BYTES = {"float32": 512, "int8h": 132}


def steps_at(behind: int, ahead: int) -> StepCodecs:
    steps = StepCodecs(behind, ahead, (EXACT, SMALL))
    steps.open_step(1, [EXACT, MIXED, SMALL])
    return steps


def test_each_boundary_has_its_codecs_seen_from_both_sides() -> None:
    stages, ends = (steps_at(0, 1), steps_at(1, 2)), steps_at(2, 0)
    way = [ends, *stages, ends]
    for boundary, codecs in enumerate((EXACT, MIXED, SMALL)):
        before, after = way[boundary], way[boundary + 1]
        assert before.leaving(1, "forward") is after.arriving(1, "forward") is codecs[0]
        assert after.leaving(1, "backward") is before.arriving(1, "backward") is codecs[1]


def test_step_that_is_to_open_admits_what_any_step_may_have_and_only_the_right_one_is_decoded() -> None:
    steps = steps_at(0, 1)
    specs = BoundarySpecs(
        activation=SPEC, tokens=TensorSpec((2, 64), "int64"), codec=EXACT[0], hosted=False, steps=steps
    )
    assert specs.arriving_bytes(1, "forward") == (BYTES["float32"],)
    assert specs.arriving_bytes(1, "backward") == (BYTES["float32"],)
    assert specs.arriving_bytes(2, "forward") == (BYTES["float32"], BYTES["int8h"])
    early = SMALL[0].encode(torch.ones(SPEC.shape), EncodeContext(step=2, direction="forward"))
    with pytest.raises(WrongStep, match="step 2 is not open here"):
        specs.arrive(early, CPU, "forward", 2)
    steps.open_step(2, [SMALL] * 3)
    assert specs.arrive(early, CPU, "forward", 2).shape == SPEC.shape
    assert specs.arriving_bytes(2, "forward") == (BYTES["int8h"],)
    wrong = EXACT[0].encode(torch.ones(SPEC.shape), EncodeContext(step=2, direction="forward"))
    with pytest.raises(Violation):
        specs.arrive(wrong, CPU, "forward", 2)


def test_step_before_is_known_until_its_work_is_done() -> None:
    steps = steps_at(0, 1)
    steps.open_step(2, [SMALL] * 3)
    assert steps.leaving(1, "backward") is EXACT[1]
    steps.open_step(3, [SMALL] * 3)
    with pytest.raises(WrongStep):
        steps.leaving(1, "backward")
    steps.open_step(2, [EXACT] * 3)  # a lineage was given up, and its steps come again
    assert steps.arriving(2, "forward") is EXACT[0]
    with pytest.raises(WrongStep):
        steps.arriving(3, "forward")
