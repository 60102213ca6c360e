"""Codecs behind a Hadamard transform: error within the stated bound, the same bytes always, hostile bytes refused."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.compression import hadamard
from swarm.compression.blockwise import INT8
from swarm.compression.codec import EncodeContext
from swarm.compression.hadamard import INT4H, INT8H, TILE, HadamardCodec
from swarm.errors import BugError, Violation
from swarm.models.spec import TensorSpec

CONTEXT = EncodeContext(step=1, direction="forward")
BOUND = {"int8h": 252.0, "int4h": 13.8}
both = pytest.mark.parametrize("codec", [INT8H, INT4H], ids=lambda codec: codec.name)


def spec_of(tensor: Tensor, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), dtype)


def there_and_back(codec: HadamardCodec, tensor: Tensor) -> Tensor:
    wire = codec.encode(tensor, CONTEXT)
    assert wire.nbytes == codec.wire_bytes(spec_of(tensor))
    return codec.decode(wire, spec_of(tensor))


def tiles(tensor: Tensor) -> Tensor:
    """(tiles, 64): the elements of a token that are D/64 apart."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    count = -(-rows.shape[1] // TILE)
    padded = torch.nn.functional.pad(rows, (0, count * TILE - rows.shape[1]))
    return padded.view(len(rows), TILE, count).transpose(1, 2).reshape(-1, TILE)


def hadamard_matrix() -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < TILE:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found / 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@both
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 3), width=st.integers(1, 200), seed=st.integers(0, 99), power=st.integers(-100, 100))
def test_error_of_each_tile_is_within_the_stated_bound(
    codec: HadamardCodec, rows: int, width: int, seed: int, power: int
) -> None:
    tensor = normal(rows, width, seed=seed) * 2.0**power
    tensor[:, 0] *= 50
    error = (tiles(there_and_back(codec, tensor)).double() - tiles(tensor).double()).norm(dim=1)
    most = (tiles(tensor).double() @ hadamard_matrix()).abs().amax(1)
    assert bool((error <= 8 * most / BOUND[codec.name] * (1 + 1e-5)).all())


@both
def test_outliers_cost_less_than_with_blocks_that_share_a_scale(codec: HadamardCodec) -> None:
    tensor = normal(64, 512)
    tensor[:, 7::64] *= 40
    error = float((there_and_back(codec, tensor) - tensor).norm() / tensor.norm())
    plain = float((INT8.decode(INT8.encode(tensor, CONTEXT), spec_of(tensor)) - tensor).norm() / tensor.norm())
    assert error < {"int8h": 0.5, "int4h": 8.0}[codec.name] * plain


@both
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 64), (3, 0), (1, 64), (2, 3, 65), (70, 129)])
def test_every_shape_has_its_bytes_and_comes_back(codec: HadamardCodec, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 0.5)
    back = there_and_back(codec, tensor)
    assert back.shape == tensor.shape
    assert float((back - tensor).norm()) <= 8 / BOUND[codec.name] * float(tensor.norm())


@both
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 3e38, -3e38])
def test_smallest_and_largest_values_stay_in_their_format(codec: HadamardCodec, value: float) -> None:
    back = there_and_back(codec, torch.full((2, 64), value))
    assert bool(back.isfinite().all())
    assert float(back.abs().amax()) <= max(abs(value), 1e-37)


@both
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_every_receiver(codec: HadamardCodec, value: float) -> None:
    tensor = normal(2, 128)
    tensor[1, 5] = value
    with pytest.raises(Violation, match="scale"):
        there_and_back(codec, tensor)


@both
def test_bytes_depend_on_nothing_but_the_values(codec: HadamardCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = normal(5, 7, 96)
    wire = bytes(codec.encode(tensor, CONTEXT))
    assert bytes(codec.encode(tensor.transpose(0, 1).contiguous().transpose(0, 1), CONTEXT)) == wire
    monkeypatch.setattr(hadamard, "_PIECE", 1)
    assert bytes(codec.encode(tensor, CONTEXT)) == wire
    assert torch.equal(codec.decode(wire, spec_of(tensor)), codec.decode(bytearray(wire), spec_of(tensor)))
    narrow = tensor.bfloat16()
    assert bytes(codec.encode(narrow, CONTEXT)) == bytes(codec.encode(narrow.float(), CONTEXT))
    assert codec.decode(codec.encode(narrow, CONTEXT), spec_of(narrow, "bfloat16")).dtype == torch.bfloat16


def test_bytes_are_those_of_every_machine() -> None:
    tensor = (torch.arange(4 * 96, dtype=torch.float32).view(4, 96) * 37 % 101 - 50) / 7
    found = {codec.name: hashlib.sha256(codec.encode(tensor, CONTEXT)).hexdigest()[:16] for codec in (INT8H, INT4H)}
    assert found == {"int8h": "263749bc421c3538", "int4h": "3dba04c342a115e0"}


@both
def test_bytes_that_no_encoder_makes_are_refused(codec: HadamardCodec) -> None:
    tensor = normal(2, 64)
    wire, spec = bytearray(codec.encode(tensor, CONTEXT)), spec_of(tensor)
    for bits in (0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xBF80, 0x0001, 0x7F00, 0x7701):
        wrong = bytearray(wire)
        wrong[2:4] = bits.to_bytes(2, "little")
        with pytest.raises(Violation, match="scale"):
            codec.decode(wrong, spec)
    wrong = bytearray(wire)
    wrong[-1] = {8: 0x80, 4: 0x01}[codec.bits]
    with pytest.raises(Violation, match="step"):
        codec.decode(wrong, spec)
    for length in (0, len(wire) - 1, len(wire) + 1):
        with pytest.raises(Violation, match="expected"):
            codec.decode(bytes(length), spec)
    with pytest.raises(BugError):
        codec.encode(torch.ones(3, dtype=torch.int64), CONTEXT)
    with pytest.raises(BugError):
        codec.decode(wire, spec_of(tensor, "int64"))


@both
def test_whatever_a_stranger_sends_is_finite_or_refused(codec: HadamardCodec) -> None:
    spec = TensorSpec((1, 64), "float32")
    worst = (0x7700).to_bytes(2, "little") + bytes([{8: 0x7F, 4: 0xFF}[codec.bits]]) * (codec.wire_bytes(spec) - 2)
    assert bool(codec.decode(worst, spec).isfinite().all())
    with pytest.raises(Violation, match="not finite"):
        codec.decode(worst, TensorSpec((1, 64), "float16"), check_finite=True)
