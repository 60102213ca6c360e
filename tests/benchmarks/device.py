"""What a stage costs on a device, and whether the device keeps the promises the algorithms rely on.

Needs torch, numpy, pydantic and safetensors only, so that it also runs on a bare machine with a GPU; where transformers
is, too, a Llama's parts are tried. ``make gpu-check`` runs it and judges.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    import torch

    from swarm.compression.codec import Codec
    from swarm.models.spec import DType
    from tests.benchmarks._stage import Size as Stage
    from tests.benchmarks._stage_step import WholeStep

T = TypeVar("T")

STEPS = (
    "cpu_small_float32", "cuda_large_float32", "cuda_large_bfloat16", "cuda_large_bfloat16_bfloat16_payloads",
)  # fmt: skip
GOAL = 0.97
"""Of ``step_over_bare``."""
REPORTED = (
    "float32_repeats", "float32_repeats_deterministic", "bfloat16_repeats", "bfloat16_repeats_deterministic",
)  # fmt: skip
"""What is told and not judged: on a GPU some kernels add in any order."""
PROMISES = (
    *(
        f"{part}{compute}_parity"
        for part in ("", "ends_", "hf_stage_", "hf_ends_")
        for compute in ("float32", "bfloat16")
    ),
    "install_keeps_digest", "step_digest_equals_cpu", "prepare_repeats", "swap_holds_what_was_prepared",
    "lanes_give_the_same_bytes", "lanes_give_the_same_sum", "deferred_gradients_give_the_same_bytes",
    "deferred_gradients_give_the_same_sum", "two_open_steps_give_the_same_bytes", "two_open_steps_give_the_same_sums",
    "two_open_steps_swap_the_same", "free_memory_tells_what_is_taken", "out_of_memory_is_told",
    *(
        f"codec_{codec}_from_{dtype}"
        for codec in ("float32", "bfloat16", "float16", "int8", "int8h", "int4h", "float64")
        for dtype in ("float32", "bfloat16")
    ),
    "codec_int32_from_int64",
)  # fmt: skip
"""What must hold on every device."""
DISTANCES = tuple(name.replace("_parity", "_distance") for name in PROMISES if name.endswith("_parity"))
CHECKS = (*DISTANCES, *PROMISES, *REPORTED)
FIGURES = ("step_over_bare", "step_over_bare_least", "step_over_bare_most", "step_with_closing_over_bare", "tokens_s")
MEMORY = ("at_rest", "in_step", "closing")
KEYS = (
    "device", "failed", "step_over_bare_goal",
    *(f"{step}_{figure}" for step in STEPS for figure in FIGURES),
    *(f"{step}_{when}_bytes_per_parameter" for step in STEPS if step.startswith("cuda") for when in MEMORY),
    *(f"{where}_{name}" for where in ("cpu", "cuda") for name in CHECKS),
)  # fmt: skip
ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 5, Size.FULL: 7}
BUDGET_S = 75.0
"""After so long no further round of the same candidates begins: a GPU's time is scarce. Not reached on a usual host."""


class Attempts:
    """Does one thing after another. With ``go_on`` one that raises is told on stderr and kept in ``errors``, and the
    next is tried all the same; without, the error passes through."""

    def __init__(self, *, go_on: bool) -> None:
        self._go_on = go_on
        self.errors: dict[str, str] = {}

    def __call__(self, name: str, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns, None where it raised."""
        try:
            return work()
        except Exception as error:
            if not self._go_on:
                raise
            text = " ".join(str(error).split())[:300]
            self.errors[name] = f"{type(error).__name__}: {text}"
            print(f"{name} FAILED: {self.errors[name]}", file=sys.stderr, flush=True)
            return None


def run(size: Size) -> Result:
    """The whole step of a stage on each device of this machine beside its module alone, and its parity with the CPU."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what a peer's device thread has unless told otherwise
    try:
        devices = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()
        attempts = Attempts(go_on=len(devices) > 1)
        answers: dict[str, float | bool] = {}
        for device in devices:
            answers |= checked(device, attempts)
        steps = _steps(devices, size, attempts)
        name = "cpu" if len(devices) == 1 else attempts("name", torch.cuda.get_device_name) or "unknown"
    finally:
        torch.set_num_threads(threads)
    return _result(name, answers, steps, attempts.errors)


def checked(device: torch.device, attempts: Attempts) -> dict[str, float | bool]:
    """Every answer of every check by its key in the summary; those of a check that raised are False."""
    from tests.benchmarks._stage import SMALL, TINY
    from tests.benchmarks._stage_checks import checks
    from tests.benchmarks._stage_codecs import codec_checks
    from tests.benchmarks._stage_lanes import lane_checks

    found: dict[str, float | bool] = {}
    lanes = lane_checks(device, TINY if device.type == "cpu" else SMALL)
    for one in (*checks(device), *codec_checks(device), *lanes):
        keys = [f"{device.type}_{name}" for name in one.names]
        answers = attempts(next(key for key in keys if not key.endswith("_distance")), one.work)
        if answers is None:
            found |= {key: False for key in keys if not key.endswith("_distance")}
        else:
            found |= {f"{device.type}_{name}": answer for name, answer in answers.items() if math.isfinite(answer)}
    print(", ".join(f"{key} {answer}" for key, answer in found.items()), file=sys.stderr, flush=True)
    return found


def _steps(devices: Sequence[torch.device], size: Size, attempts: Attempts) -> list[WholeStep]:
    from swarm.compression.dense import BFLOAT16, FLOAT32
    from tests.benchmarks._stage import LARGE, SMALL
    from tests.benchmarks._stage_step import step_name

    found: list[WholeStep] = []
    for device in devices:
        cases: list[tuple[Stage, DType, Codec]] = [(SMALL, "float32", FLOAT32)]
        if device.type == "cuda":
            cases = [(LARGE, "float32", FLOAT32), (LARGE, "bfloat16", FLOAT32), (LARGE, "bfloat16", BFLOAT16)]
        for case in cases:
            name = f"{step_name(*case, device)}_step"
            one = attempts(name, partial(_measured_step, case, device, size))
            if one is not None:
                found.append(one)
                ratios, memory = one.ratios(), one.memory
                print(f"{name}: {min(ratios):.3f} to {max(ratios):.3f}, {memory}", file=sys.stderr, flush=True)
    return found


def _measured_step(case: tuple[Stage, DType, Codec], device: torch.device, size: Size) -> WholeStep:
    from tests.benchmarks._stage_step import WholeStep

    one = WholeStep(*case, device)
    _rounds(ROUNDS[size], partial(one.round, 32 if device.type == "cuda" else 2))
    one.close()
    return one


def _rounds(count: int, work: Callable[[], None]) -> None:
    """Do it so many times, fewer where that takes longer than :data:`BUDGET_S`."""
    began = time.monotonic()
    for number in range(count):
        work()
        print(f"round {number} done", file=sys.stderr, flush=True)
        if time.monotonic() - began > BUDGET_S:
            break


# --- what came of it -------------------------------------------------------------------------------------------------


def failures(answers: Mapping[str, float | bool | None], errors: Mapping[str, str]) -> list[str]:
    """Return the promises that a device does not keep, and what raised an error; nothing that was not tried."""
    broken = {key for key, answer in answers.items() if answer is False and key.partition("_")[2] in PROMISES}
    return sorted(broken | errors.keys())


def _result(
    device: str,
    answers: Mapping[str, float | bool | None],
    steps: Sequence[WholeStep],
    errors: Mapping[str, str],
) -> Result:
    rows: list[list[Cell]] = []
    summary: dict[str, Any] = dict.fromkeys(KEYS)  # None: not measured here
    summary |= {"device": device, "failed": failures(answers, errors), "step_over_bare_goal": GOAL} | dict(answers)
    for step in steps:
        bare_s, whole_s = (median(times) for times in zip(*step.rounds, strict=True))
        rows.append([step.name, *(1000 * seconds for seconds in (bare_s, whole_s, step.closing_s))])
        rows[-1] += [step.tokens_per_second, None if step.memory is None else step.memory.in_step]
        summary |= {f"{step.name}_{figure}": value for figure, value in step_figures(step).items()}
    return Result(
        columns=("step", "module_alone_ms", "whole_ms", "closing_ms", "tokens_s", "gpu_bytes_per_parameter"),
        rows=rows,
        summary=summary,
        notes=_notes(steps, errors),
    )


def step_figures(step: WholeStep) -> dict[str, float]:
    """What the summary says of a whole step: medians and the rounds' extremes of its ratio, and bytes a parameter."""
    ratios, memory = step.ratios(), step.memory
    figures = (median(ratios), min(ratios), max(ratios), step.ratio_with_closing(), step.tokens_per_second)
    found = {name: round(value, 3) for name, value in zip(FIGURES, figures, strict=True)}
    if memory is not None:
        found |= {f"{when}_bytes_per_parameter": round(getattr(memory, when), 2) for when in MEMORY}
    return found


def _notes(steps: Sequence[WholeStep], errors: Mapping[str, str]) -> tuple[str, ...]:
    from tests.benchmarks._stage import LARGE, SMALL
    from tests.benchmarks._stage_checks import TOLERANCE
    from tests.benchmarks._stage_step import MICROBATCHES_A_STEP

    on_gpu = any(step.device.type == "cuda" for step in steps)
    return (
        "; ".join(map(str, (SMALL, LARGE))),
        "closing: the sum's way to the CPU, AdamW, the state's way to the CPU and its digest; one CPU thread",
        "step_over_bare: time of the module alone ÷ time of a microbatch from payload to payload, in turns; median, "
        f"least and most of the rounds; with closing: plus a {MICROBATCHES_A_STEP}th of a step's closing",
        *(f"{step.name}: module alone and whole step, ms: {_milliseconds(step)}" for step in steps),
        "bytes_per_parameter: GPU memory at rest (state and sum), at most in one microbatch, at most in closing a step",
        f"parity: relative L2 distance from the CPU of every result, at most {TOLERANCE}",
        f"told and not judged: {', '.join(REPORTED)}",
        *(f"FAILED: {name}: {text}" for name, text in errors.items()),
        *([] if on_gpu or errors else ["no GPU here: large, and parity with the CPU, were not measured"]),
        *([] if importlib.util.find_spec("transformers") else ["no transformers here: hf_ was not tried"]),
    )


def _milliseconds(step: WholeStep) -> str:
    pairs = ", ".join(f"{1000 * bare:.4g} and {1000 * whole:.4g}" for bare, whole in step.rounds)
    return f"{pairs}; closing {1000 * step.closing_s:.4g}"
