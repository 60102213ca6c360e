from __future__ import annotations

import pytest
import torch

from swarm.compression.codec import EncodeContext
from swarm.compression.registry import CODECS, codec_named
from swarm.errors import BugError, ConfigError, Violation
from swarm.models.spec import TensorSpec

CONTEXT = EncodeContext(step=1, direction="forward")

FLOATS = ("float32", "bfloat16", "float16")
BOUND = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("shape", [(2, 3, 5), (1,), (0, 4)])
def test_codec_round_trip_stays_within_its_bound(name: str, shape: tuple[int, ...]) -> None:
    codec, tensor, spec = codec_named(name), sample(shape), TensorSpec(shape, "float32")
    wire = codec.encode(tensor, CONTEXT)
    assert len(wire) == wire.nbytes == codec.wire_bytes(spec)
    decoded = codec.decode(bytearray(wire), spec, check_finite=True)
    assert decoded.dtype == torch.float32
    assert decoded.shape == shape
    assert ((decoded - tensor).abs() <= BOUND[name] * tensor.abs()).all()


@pytest.mark.parametrize("name", FLOATS)
def test_codec_of_its_own_dtype_is_exact_and_copies_nothing(name: str) -> None:
    codec, dtype = codec_named(name), getattr(torch, name)
    tensor = sample((4, 4), dtype)
    buffer = bytearray(codec.encode(tensor, CONTEXT))
    decoded = codec.decode(buffer, TensorSpec((4, 4), name))
    assert torch.equal(decoded, tensor)
    buffer[:] = bytes(len(buffer))
    assert decoded.abs().max() == 0


def test_codec_encode_aliases_a_contiguous_tensor_and_copies_others() -> None:
    tensor = sample((4, 4))
    wire, transposed = (
        codec_named("float32").encode(tensor, CONTEXT),
        codec_named("float32").encode(tensor.t(), CONTEXT),
    )
    expected = tensor.t().clone()
    tensor.zero_()
    assert not any(wire)
    assert torch.equal(codec_named("float32").decode(transposed, TensorSpec((4, 4), "float32")), expected)


def test_codec_bytes_are_little_endian() -> None:
    assert bytes(codec_named("float32").encode(torch.tensor([1.0]), CONTEXT)).hex() == "0000803f"
    assert bytes(codec_named("bfloat16").encode(torch.tensor([1.0]), CONTEXT)).hex() == "803f"
    assert bytes(codec_named("float16").encode(torch.tensor([1.0]), CONTEXT)).hex() == "003c"
    assert bytes(codec_named("int32").encode(torch.tensor([-1, 258]), CONTEXT)).hex() == "ffffffff02010000"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("change", [-1, 1, -24])
def test_codec_wrong_length_is_a_violation(name: str, change: int) -> None:
    codec = codec_named(name)
    spec = TensorSpec((2, 3), "int64" if name == "int32" else "float32")
    with pytest.raises(Violation, match="bytes"):
        codec.decode(bytes(max(0, codec.wire_bytes(spec) + change)), spec)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FLOATS)
def test_codec_value_that_is_not_finite_is_a_violation(name: str, bad: float) -> None:
    codec, spec = codec_named(name), TensorSpec((8,), "float32")
    tensor = torch.ones(8)
    tensor[3] = bad
    wire = codec.encode(tensor, CONTEXT)
    with pytest.raises(Violation, match="finite"):
        codec.decode(wire, spec, check_finite=True)
    assert not codec.decode(wire, spec).isfinite().all()


def test_codec_finite_values_whose_sum_overflows_pass() -> None:
    tensor = torch.full((8,), 3e38)
    wire = codec_named("float32").encode(tensor, CONTEXT)
    assert torch.equal(codec_named("float32").decode(wire, TensorSpec((8,), "float32"), check_finite=True), tensor)


def test_codec_float16_saturates_finite_values_only() -> None:
    tensor = torch.tensor([1e6, -1e6, 65504.0, 3e-8, float("inf")])
    wire = codec_named("float16").encode(tensor, CONTEXT)
    decoded = codec_named("float16").decode(wire, TensorSpec((5,), "float32"))
    assert decoded[:3].tolist() == [65504.0, -65504.0, 65504.0]
    assert abs(decoded[3] - 3e-8) <= 2.0**-25
    assert decoded[4].isinf()


def test_codec_bfloat16_saturates_finite_values_only() -> None:
    largest = torch.finfo(torch.bfloat16).max
    tensor = torch.tensor([3.4e38, -3.4e38, 1.0, float("inf")])
    decoded = codec_named("bfloat16").decode(
        codec_named("bfloat16").encode(tensor, CONTEXT), TensorSpec((4,), "float32")
    )
    assert decoded[:3].tolist() == [largest, -largest, 1.0]
    assert decoded[3].isinf()


@pytest.mark.parametrize(("target", "value"), [("bfloat16", 3.4e38), ("float16", 1e5)])
def test_codec_value_that_is_not_finite_in_what_it_is_read_as_is_a_violation(target: str, value: float) -> None:
    wire = codec_named("float32").encode(torch.tensor([1.0, value]), CONTEXT)
    with pytest.raises(Violation, match=f"not finite in {target}"):
        codec_named("float32").decode(wire, TensorSpec((2,), target), check_finite=True)


def test_codec_tokens_round_trip_and_refuse_floats() -> None:
    tokens = torch.tensor([[0, 5], [-100, 1 << 20]])
    codec, spec = codec_named("int32"), TensorSpec((2, 2), "int64")
    assert torch.equal(codec.decode(codec.encode(tokens, CONTEXT), spec), tokens)
    with pytest.raises(BugError):
        codec.encode(torch.ones(2), CONTEXT)
    with pytest.raises(BugError):
        codec.encode(torch.tensor([1 << 40]), CONTEXT)
    with pytest.raises(BugError):
        codec_named("float32").encode(tokens, CONTEXT)
    with pytest.raises(BugError):
        codec.decode(bytes(16), TensorSpec((2, 2), "float32"))


def test_codec_unknown_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, int8, int8h, int4h, float64, int32"):
        codec_named("int4")
