"""What does cutting layers across devices of one peer change in its numbers, cost on one device, and give on two?

Stages in one process, through the product's own part (:mod:`swarm.models.strips`). Needs torch, numpy, pydantic and
safetensors only; models of transformers are tried where that is. ``make gpu-check`` runs it where there are two GPUs.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    import torch

    from swarm.models.gpt_config import GptConfig
    from swarm.optim.part import TrainedPart

KEYS = ("degrees_equal", "max_abs_diff", "max_abs_diff_bar", "contract_over_plain", "contract_over_plain_bar",
        "two_gpus_over_one", "two_gpus_over_one_bar")  # fmt: skip
COLUMNS = ("stage", "devices", "strips", "ms a microbatch", "÷ one, whole", "MB a device")
STRIPS, DEGREES = 4, (1, 2, 4)
ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 9, Size.FULL: 15}
WIDTH = {Size.SMOKE: 64, Size.DEFAULT: 1024, Size.FULL: 1024}
GPU_SHAPE = {Size.SMOKE: (256, 128), Size.DEFAULT: (4096, 2048), Size.FULL: (4096, 4096)}
"""Width and tokens of a row on GPUs: where a layer keeps two of them busy."""


def run(size: Size) -> Result:
    """Bits and time of a stage in strips, beside the whole one, on one device and on several."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cpu, gpus = torch.device("cpu"), [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
        model = _model(WIDTH[size], 256 if size is not Size.SMOKE else 16, "float32")
        cases = [(1, (cpu,)), *((STRIPS, (cpu,) * degree) for degree in DEGREES)]
        contract, rows = _paired(model, cases, ROUNDS[size], rows=1)
        two: float | None = None
        if len(gpus) > 1:
            model = _model(*GPU_SHAPE[size], "bfloat16")
            two, on_gpus = _paired(model, [(2, tuple(gpus[:2])), (1, (gpus[0],))], ROUNDS[size], rows=4)
            rows += on_gpus
    finally:
        torch.set_num_threads(threads)
    summary: dict[str, Any] = {
        "degrees_equal": int(all(_degrees_equal(device) for device in _kinds(gpus))),
        "max_abs_diff": _differences(size),
        "max_abs_diff_bar": 1.2e-6,
        "contract_over_plain": round(contract, 4),
        "contract_over_plain_bar": 1.08,
        "two_gpus_over_one": None if two is None else round(two, 3),
        "two_gpus_over_one_bar": 1.6,
    }
    return Result(columns=COLUMNS, rows=rows, summary=summary, notes=_notes(size, len(gpus)))


def _model(width: int, tokens: int, compute: str) -> GptConfig:
    from swarm.models.gpt_config import GptConfig

    return GptConfig(vocab_size=257, dim=width, layers=2, heads=16, context=tokens, compute=compute)  # type: ignore[arg-type]


def _kinds(gpus: Sequence[torch.device]) -> list[list[torch.device]]:
    """For each kind of device, as many as there are degrees of."""
    import torch

    cpus = [torch.device("cpu")] * max(DEGREES)
    return [cpus, *([list(gpus)] if len(gpus) > 1 else [])]


def _degrees_equal(devices: Sequence[torch.device]) -> bool:
    """Whether a step on 1, 2 and 4 devices, as far as there are so many, has the same bits."""
    import torch

    from swarm.device import compute_reproducibly
    from tests.harness.rigs.strips import passed, stage_of

    compute_reproducibly(devices[0])
    model = _model(64, 16, "float32")
    found = []
    for degree in (one for one in DEGREES if one <= len(devices)):
        part = stage_of(model, STRIPS, tuple(devices[:degree]))
        outcome = passed(part, model)
        digest = part.prepare((outcome.sums / 24).float(), lr=0.01, clip=0.9, step=1)
        found.append(([one.cpu() for one in outcome], digest))
    (first, digest), *others = found
    return all(digest == other and all(map(torch.equal, first, each)) for each, other in others)


def _differences(size: Size) -> float:
    """The largest difference from the whole stage of our model's and, where transformers is, of foreign ones."""
    from tests.harness.rigs.strips import difference, passed, stage_of

    models: list[Any] = [_model(64, 16, "float32")]
    if importlib.util.find_spec("transformers"):
        from tests.harness.rigs.foreign import ALL, LEAKING, foreign_model

        names = ("llama", "qwen3") if size is Size.SMOKE else tuple(ALL | LEAKING)
        models += [foreign_model(name) for name in names]
    found = []
    for model in models:
        cut = stage_of(model, 2)
        if cut.strips is not None:
            found.append(difference(passed(cut, model), passed(stage_of(model), model)))
    return max(found)


def _paired(
    model: GptConfig, cases: Sequence[tuple[int, tuple[torch.device, ...]]], rounds: int, *, rows: int
) -> tuple[float, list[list[Cell]]]:
    """The time of the second case over the first's, the median of pairs that follow each other; and a row for each."""
    from tests.harness.rigs.strips import stage_of

    parts = [stage_of(model, number, devices, "float32") for number, devices in cases]
    passes = [_pass(part, model, devices[0], rows) for part, (_, devices) in zip(parts, cases, strict=True)]
    for one in passes:
        one()
    times = [[one() for one in passes] for _ in range(rounds)]
    ratio = median(second / first for first, second, *_ in times)
    table: list[list[Cell]] = []
    base = next(at for at, (number, _) in enumerate(cases) if number == 1)
    for at, (number, devices) in enumerate(cases):
        over = median(pair[at] / pair[base] for pair in times)
        strips, each = parts[at].strips, 6 if model.compute == "bfloat16" else 8
        elements = [parts[at].layout.elements] if strips is None else [one.elements for one in strips.layouts]
        held = ", ".join(f"{each * one / 1e6:.1f}" for one in elements)
        table.append([f"2 layers of {model.dim} in {model.compute}", "+".join(map(str, devices)), number,
                      1000 * median(pair[at] for pair in times), over, held])  # fmt: skip
    return ratio, table


def _pass(part: TrainedPart, model: GptConfig, device: torch.device, rows: int) -> Callable[[], float]:
    """Return what takes one microbatch there and back, and answers in which time."""
    import torch

    from swarm.models.registry import family_of
    from tests.benchmarks._stage import finish

    spec = family_of(model).boundary(rows, model.context)
    x, gradient = (torch.randn(spec.shape).to(device, getattr(torch, spec.dtype)) for _ in range(2))

    def once() -> float:
        finish(device)
        began = time.perf_counter()
        _, graph = part.forward(x, seed=None)
        assert graph is not None
        _, rest = part.backward_input(graph, gradient)
        for _, one in part.backward_weights(rest):
            finish(one.device)
        finish(device)
        return time.perf_counter() - began

    return once


def _notes(size: Size, gpus: int) -> tuple[str, ...]:
    return (
        f"degrees: a step of {STRIPS} strips on {', '.join(map(str, DEGREES))} devices, as far as there are so many: "
        "output, gradients, sum and digest",
        "max_abs_diff: output, input's gradient and weights' gradients of a stage in 2 strips and of the whole one, "
        "each in units of its largest number; our model and every small foreign one of which something is cut"
        + (" (smoke: two of them)" if size is Size.SMOKE else ""),
        f"contract_over_plain: {STRIPS} strips on one CPU over the whole, one thread, forward and backward, in turns",
        "MB a device: weights that are computed with, and the sum of gradients",
        *([] if gpus > 1 else [f"{gpus} GPUs here: two_gpus_over_one was not measured"]),
        "cut by layers, two devices take half as long each as one: try that first, as published layouts do",
    )
