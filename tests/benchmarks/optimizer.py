"""What a step of AdamW costs a parameter on the CPU: in C in place, in torch's separate operations into new vectors, as
it was before, and in torch.optim.

All take the same state and gradient, in turns, on one thread. The first two must give the same bits. A part takes its
step twice, once for the digest that is agreed on and once in place (``closing``), and hashes 12 bytes a parameter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.models.layout import FlatLayout
    from swarm.optim.adamw import AdamWState

KEYS = (
    "parameters", "fused_ns", "closing_ns", "separate_ns", "foreach_ns", "separate_over_fused",
    "separate_over_fused_bar", "foreach_over_fused", "same_bits",
)  # fmt: skip
COLUMNS = ("step", "median_ns_a_parameter", "least", "most")
WIDTHS = {Size.SMOKE: 64, Size.DEFAULT: 1000, Size.FULL: 3000}
ROUNDS = {Size.SMOKE: 2, Size.DEFAULT: 15, Size.FULL: 15}
BAR = 4.0


def run(size: Size) -> Result:
    """Nanoseconds a parameter of an AdamW step in C beside torch's separate operations and its own optimizer."""
    import torch

    from swarm.device import keep_freed_memory

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what a peer's device thread has
    try:
        keep_freed_memory()  # as a peer does: the vectors of one step are those of the next
        return _measured(WIDTHS[size], ROUNDS[size])
    finally:
        torch.set_num_threads(threads)


def _measured(width: int, rounds: int) -> Result:
    import torch

    from swarm.models.layout import FlatLayout
    from swarm.optim import adamw, update
    from swarm.optim.schedules import OptimizerConfig

    layout = FlatLayout.from_shapes(
        [
            ("norm.weight", (width,)),
            ("a.weight", (2 * width, width)),
            ("b.bias", (777,)),
            ("c.weight", (width, 2 * width)),
        ]
    )
    generator = torch.Generator().manual_seed(0)
    params, mean, square, gradient = (torch.randn(layout.elements, generator=generator) for _ in range(4))
    state = adamw.AdamWState(params, mean * 1e-2, square.square() * 1e-4)
    numbers, config = update.StepNumbers(step=7, lr=1e-3, clip=0.7), OptimizerConfig()
    own = adamw.AdamWState(*(vector.clone() for vector in state))
    plan = adamw.AdamW(config).plan(own, gradient, layout, numbers)

    def closing() -> None:
        update.hashes_after(plan, own)
        update.take_step(plan, own, own)

    candidates: dict[str, Callable[[], object]] = {
        "separate": lambda: adamw.adamw_step(state, gradient, layout, config, numbers, in_c=False),
        "foreach": _torch_step(layout, params, gradient),
    }
    fused = adamw.trusted_kernel() is not None
    if fused:
        candidates["fused"] = lambda: update.take_step(plan, own, own)
        candidates["closing"] = closing
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, step in candidates.items():
            began = time.perf_counter()
            step()
            if number:  # the first finds no memory yet
                times[name].append((time.perf_counter() - began) * 1e9 / layout.elements)
    one, other = (adamw.adamw_step(state, gradient, layout, config, numbers, in_c=in_c) for in_c in (True, False))
    return _result(layout, times, _same(one, other) if fused else None)


def _torch_step(layout: FlatLayout, params: Tensor, gradient: Tensor) -> Callable[[], object]:
    """A step of torch.optim over as many tensors as the layout has."""
    import torch

    own = [torch.nn.Parameter(view.clone()) for view in layout.views(params).values()]
    for parameter, view in zip(own, layout.views(gradient).values(), strict=True):
        parameter.grad = view.clone()
    return torch.optim.AdamW(own, lr=1e-3, foreach=True).step


def _same(one: AdamWState, other: AdamWState) -> bool:
    import torch

    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, other, strict=True))


def _result(layout: FlatLayout, times: dict[str, list[float]], same: bool | None) -> Result:
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows: list[tuple[Cell, ...]] = [
        (name, round(medians[name], 2), round(min(found), 2), round(max(found), 2)) for name, found in times.items()
    ]
    fused = medians.get("fused")
    ratio = {name: None if fused is None else round(medians[name] / fused, 2) for name in ("separate", "foreach")}
    return Result(
        columns=COLUMNS,
        rows=rows,
        summary={
            "parameters": layout.elements,
            "fused_ns": None if fused is None else round(fused, 2),
            "closing_ns": round(medians["closing"], 2) if "closing" in medians else None,
            "separate_ns": round(medians["separate"], 2),
            "foreach_ns": round(medians["foreach"], 2),
            "separate_over_fused": ratio["separate"],
            "separate_over_fused_bar": BAR,
            "foreach_over_fused": ratio["foreach"],
            "same_bits": same,
        },
        notes=("closing: step and hash of each chunk, then the step in place; separate: into three new vectors",)
        + (("there is no C compiler: nothing is fused here",) if fused is None else ()),
    )
