"""The benchmark ``codecs`` tells an error beyond a stated bound from one within."""

from __future__ import annotations

import pytest

from swarm.compression.codec import EncodeContext
from swarm.compression.registry import codec_named
from swarm.models.spec import TensorSpec
from tests.benchmarks.codecs import OURS, activation, worst_over_bound

SHAPE = (2, 8, 256)


@pytest.mark.parametrize("name", OURS)
def test_error_of_each_codec_is_within_its_bound_and_a_larger_one_is_told(name: str) -> None:
    values, codec = activation(SHAPE), codec_named(name)
    wire = codec.encode(values, EncodeContext(step=1, direction="forward"))
    found = worst_over_bound(name, values, codec.decode(wire, TensorSpec(SHAPE, "float32")))
    assert found is not None
    assert found <= 1
    wrong = worst_over_bound(name, values, values * 3)
    assert wrong is not None
    assert wrong > 1


def test_codec_that_states_no_bound_has_none() -> None:
    assert worst_over_bound("hivemind_uniform8", activation(SHAPE), activation(SHAPE)) is None
