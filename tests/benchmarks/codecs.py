"""What each codec of boundaries costs: bytes, error beside its stated bound, and seconds, beside a plain copy and the
8-bit codecs of hivemind.

All take the same activation, in turns, on one thread, as a peer's device thread has. The activation is of normal values
of which one channel in 97 is thirty times as large: what outlying channels of language models look like. A rate is
that of the float32 bytes that an encoding and a decoding together carry.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.compression.codec import Codec

OURS = ("float32", "bfloat16", "float16", "int8", "int8h", "int4h")
THEIRS = ("hivemind_uniform8", "hivemind_quantile8")
KEYS = (
    "elements", "copy_gb_s", "int8_speed_ratio", "int8_speed_ratio_bar", "errors_within_bounds",
    *(f"{name}_{figure}" for name in OURS for figure in ("bytes", "error", "gb_s")),
    *(f"{name}_{figure}" for name in THEIRS for figure in ("bytes", "error", "gb_s")),
)  # fmt: skip
COLUMNS = ("codec", "bytes_an_element", "relative_error", "worst_over_bound", "encode_gb_s", "decode_gb_s", "gb_s")
SHAPES = {Size.SMOKE: (1, 16, 256), Size.DEFAULT: (4, 256, 1024), Size.FULL: (8, 512, 2048)}
ROUNDS = {Size.SMOKE: 2, Size.DEFAULT: 15, Size.FULL: 15}
BAR = 2.0
EVERY, OUTLIER = 97, 30.0


def run(size: Size) -> Result:
    """Bytes, error and speed of each codec for activations, beside a plain copy and hivemind's 8-bit codecs."""
    import torch

    from swarm.device import keep_freed_memory

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what a peer's device thread has
    try:
        keep_freed_memory()  # as a peer does
        return _measured(SHAPES[size], ROUNDS[size])
    finally:
        torch.set_num_threads(threads)


def activation(shape: tuple[int, ...]) -> Tensor:
    """Return what is sent: float32, a function of the shape."""
    import torch

    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values[..., ::EVERY] *= OUTLIER
    return values


Pair = tuple[Callable[[], Any], Callable[[Any], Any]]


def _measured(shape: tuple[int, ...], rounds: int) -> Result:
    import torch

    from swarm.compression.registry import codec_named

    values = activation(shape)
    pairs: dict[str, Pair] = {name: _ours(codec_named(name), values) for name in OURS} | _theirs(values)
    into = torch.empty_like(values)
    pairs["copy"] = (lambda: into.copy_(values), lambda wire: into.copy_(wire))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    sizes: dict[str, int] = {}
    backs: dict[str, Tensor] = {}
    for number in range(rounds + 1):
        for name, (encode, decode) in pairs.items():
            began = time.perf_counter()
            wire = encode()
            between = time.perf_counter()
            backs[name] = decode(wire)
            if number:  # the first finds no memory yet
                seconds[name].append((between - began, time.perf_counter() - between))
            sizes[name] = _bytes(wire)
    return _result(values, sizes, backs, seconds)


def _ours(codec: Codec, values: Tensor) -> Pair:
    from swarm.compression.codec import EncodeContext
    from swarm.models.spec import TensorSpec

    context, spec = EncodeContext(step=1, direction="forward"), TensorSpec(tuple(values.shape), "float32")
    return (
        lambda: bytearray(codec.encode(values, context)),  # as the network gives it to a receiver: writable
        lambda wire: codec.decode(wire, spec, check_finite=True),
    )


def _theirs(values: Tensor) -> dict[str, Pair]:
    from hivemind.compression import CompressionInfo, Quantile8BitQuantization, Uniform8BitQuantization

    about = CompressionInfo.from_tensor(values)
    kinds = dict(zip(THEIRS, (Uniform8BitQuantization(), Quantile8BitQuantization()), strict=True))
    return {name: (lambda kind=kind: kind.compress(values, about), kind.extract) for name, kind in kinds.items()}  # type: ignore[misc]


def _bytes(wire: Any) -> int:
    if isinstance(wire, bytearray):
        return len(wire)
    return int(wire.nbytes if hasattr(wire, "nbytes") else wire.ByteSize())


# --- what came of it -------------------------------------------------------------------------------------------------


def worst_over_bound(name: str, values: Tensor, back: Tensor) -> float | None:
    """Return the largest error ÷ the bound that the codec's docstring states for it: 1 at most. None where it states
    none."""
    import torch

    error = (back.double() - values.double()).abs()
    magnitude = values.double().abs()
    if name == "float32":
        return float(error.amax())
    if name in ("bfloat16", "float16"):
        relative = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[name]
        return float((error / (magnitude * relative).clamp(min=2.0**-25)).amax())
    if name == "int8":
        largest = magnitude.view(-1, 256).amax(1, keepdim=True)
        return float((error.view(-1, 256) / (largest * (1 / 254 + 2.0**-22))).amax())
    if name not in ("int8h", "int4h"):
        return None
    tiles, errors = (_tiles(tensor.double()) for tensor in (values, back - values))
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < tiles.shape[1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    most = (tiles @ (matrix / 8)).abs().amax(1)
    bound = 8 * most / {"int8h": 252.0, "int4h": 13.8}[name]
    return float((errors.norm(dim=1) / bound).amax())


def _tiles(tensor: Tensor) -> Tensor:
    """(tiles, 64): the elements of a token that are D/64 apart."""
    rows = tensor.reshape(-1, 64, tensor.shape[-1] // 64)
    return rows.transpose(1, 2).reshape(-1, 64)


def _result(
    values: Tensor,
    sizes: dict[str, int],
    backs: dict[str, Tensor],
    seconds: dict[str, list[tuple[float, float]]],
) -> Result:
    carried = 4 * values.numel() / 1e9
    rows: list[tuple[Cell, ...]] = []
    rates: dict[str, float] = {}
    summary: dict[str, Any] = dict.fromkeys(KEYS)
    within = True
    for name, times in seconds.items():
        encode_s, decode_s = (statistics.median(each) for each in zip(*times, strict=True))
        rates[name] = carried / (encode_s + decode_s)
        error = float((backs[name].float() - values).norm() / values.norm())
        worst = worst_over_bound(name, values, backs[name])
        within = within and (worst is None or worst <= 1.0)
        each = sizes[name] / values.numel()
        ratio = None if worst is None else round(worst, 3)
        speeds = (round(carried / encode_s, 3), round(carried / decode_s, 3), round(rates[name], 3))
        rows.append((name, round(each, 3), float(f"{error:.3g}"), ratio, *speeds))
        if name != "copy":
            summary |= {f"{name}_bytes": round(each, 3), f"{name}_error": float(f"{error:.3g}")}
            summary[f"{name}_gb_s"] = round(rates[name], 3)
    summary |= {
        "elements": values.numel(),
        "copy_gb_s": round(rates["copy"], 3),
        "int8_speed_ratio": round(rates["int8"] / max(rates[name] for name in THEIRS), 2),
        "int8_speed_ratio_bar": BAR,
        "errors_within_bounds": within,
    }
    return Result(
        columns=COLUMNS,
        rows=rows,
        summary=summary,
        notes=(
            f"{tuple(values.shape)} float32, one channel in {EVERY} is {OUTLIER:g} times as large; one thread",
            "gb_s: float32 bytes ÷ (encode + decode), medians; worst_over_bound: error ÷ the stated bound, at most 1; "
            "ours look for Inf and NaN when they decode, hivemind's do not",
            "int8_speed_ratio: int8 ÷ the faster of hivemind's two",
        ),
    )
