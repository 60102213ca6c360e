from __future__ import annotations

import pytest
import torch

from swarm.errors import StateError
from swarm.ids import ENDS, PartName, stage_part
from swarm.models.layout import FlatLayout
from swarm.state.snapshot import Snapshot, digest, initial_snapshot
from tests.harness.rigs.state import LAYOUT, changed, snapshot


def with_vector(number: int, vector: torch.Tensor) -> Snapshot:
    vectors = list(snapshot().vectors)
    vectors[number] = vector
    return changed(vectors=tuple(vectors))


def test_digest_sees_every_field_but_the_step() -> None:
    renamed = FlatLayout.from_shapes([("x", (3, 5)), ("b", (7,))])
    reshaped = FlatLayout.from_shapes([("a", (5, 3)), ("b", (7,))])
    others = [
        changed(part=ENDS),
        changed(layout=renamed),
        changed(layout=reshaped),
        *(with_vector(number, snapshot().vectors[number] + 1e-7) for number in range(3)),
        changed(layout=LAYOUT.kept_by(("params", "momentum")), vectors=snapshot().vectors[:2]),
    ]
    assert len({digest(other) for other in [snapshot(), *others]}) == len(others) + 1
    assert digest(snapshot()) == digest(snapshot()) == digest(changed(step=1)), "a step may be given up"


def test_digest_is_what_it_always_was() -> None:
    layout = FlatLayout.from_shapes([("a", (2, 2))])
    weights = {"a": torch.tensor([[1.0, -2.0], [0.5, 3.25]])}
    assert (
        digest(initial_snapshot(stage_part(0), layout, weights))
        == "8bafa7ef87fe7b9c2cec0b43f632e925338aa51b3eb62a1eed6ffc2cb53aa950"
    )


def test_snapshot_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(StateError):
        with_vector(0, torch.zeros(3))
    with pytest.raises(StateError):
        with_vector(0, torch.zeros(LAYOUT.elements, dtype=torch.float64))
    with pytest.raises(StateError, match="2 vectors, expected params, exp_avg, exp_avg_sq"):
        changed(vectors=snapshot().vectors[:2])


def test_initial_snapshot_needs_every_weight() -> None:
    with pytest.raises(StateError, match="b: expected shape"):
        initial_snapshot(PartName("stage-0"), LAYOUT, {"a": torch.zeros(3, 5)})
    assert isinstance(snapshot(), Snapshot)
