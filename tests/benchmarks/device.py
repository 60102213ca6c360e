"""What a stage costs on a device, and whether the device keeps the promises the algorithms rely on.

Needs torch, numpy, pydantic and safetensors only, so that it also runs on a bare machine with a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.benchmarks.runner import Cell, Result, Size

if TYPE_CHECKING:
    from tests.benchmarks._stage_costs import Candidate

STAGES = (
    "cpu_small_float32", "cpu_medium_float32", "cuda_small_float32", "cuda_medium_float32", "cuda_large_float32",
    "cuda_large_bfloat16",
)  # fmt: skip
CHECKS = (
    "float32_distance", "float32_parity", "float32_repeats", "float32_repeats_deterministic", "bfloat16_distance",
    "bfloat16_parity", "bfloat16_repeats", "bfloat16_repeats_deterministic", "install_keeps_digest",
    "step_digest_equals_cpu", "prepare_repeats", "swap_holds_what_was_prepared",
)  # fmt: skip
KEYS = (
    "device",
    *(f"{stage}_{figure}" for stage in STAGES for figure in ("tokens_s", "tflop_s")),
    *(f"{where}_{name}" for where in ("cpu", "cuda") for name in CHECKS),
)
ROUNDS = {Size.SMOKE: 1, Size.DEFAULT: 5, Size.FULL: 9}


def run(size: Size) -> Result:
    """Forward, backward and optimizer step of a stage on each device of this machine, and its parity with the CPU."""
    import torch

    from tests.benchmarks._stage_checks import check
    from tests.benchmarks._stage_costs import candidates

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what a peer's device thread has unless told otherwise
    try:
        devices = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()
        found = [candidate for device in devices for candidate in candidates(device)]
        for number in range(ROUNDS[size]):
            for candidate in found:
                candidate.round(10 if candidate.device.type == "cuda" else 1 + 2 * (size is Size.FULL))
            print(f"round {number} done", file=sys.stderr)
        checks = {device.type: check(device) for device in devices}
    finally:
        torch.set_num_threads(threads)
    return _result(found, checks, torch.cuda.get_device_name() if len(devices) > 1 else "cpu")


def _result(found: Sequence[Candidate], checks: Mapping[str, Mapping[str, float | bool]], device: str) -> Result:
    from tests.benchmarks._stage import LARGE, MEDIUM, SMALL
    from tests.benchmarks._stage_costs import MICROBATCH_PHASES, STEP_PHASES

    phases = (*MICROBATCH_PHASES, *STEP_PHASES)
    rows: list[list[Cell]] = []
    summary: dict[str, Any] = dict.fromkeys(KEYS) | {"device": device}  # None: not measured here
    for candidate in found:
        rows.append([candidate.name, *map(candidate.milliseconds, phases)])
        rows[-1] += [candidate.tokens_per_second, candidate.wire_tokens_per_second, candidate.teraflops]
        rows[-1].append(None if candidate.peak_bytes is None else candidate.peak_bytes / 2**30)
        summary[f"{candidate.name}_tokens_s"] = round(candidate.tokens_per_second)
        summary[f"{candidate.name}_tflop_s"] = round(candidate.teraflops, 4)
    for where, answers in checks.items():
        summary |= {f"{where}_{name}": answer for name, answer in answers.items()}
    return Result(
        columns=("stage", *(f"{phase}_ms" for phase in phases), "tokens_s", "wire_tokens_s", "tflop_s", "peak_gib"),
        rows=rows,
        summary=summary,
        notes=(
            f"per microbatch: {', '.join(MICROBATCH_PHASES)}; per step: {', '.join(STEP_PHASES)}",
            "; ".join(map(str, (SMALL, MEDIUM, LARGE))),
            "prepare is adamw, the state's way to the CPU and its digest; one CPU thread; payloads are float32",
            "tokens_s: forward, backward, accumulate; wire_tokens_s: with two payloads decoded and two encoded",
            "peak_gib: GPU memory, one microbatch in flight; a second AdamW state, kept to time it alone, is in it",
            *([] if len(checks) > 1 else ["no GPU here: large, and parity with the CPU, were not measured"]),
        ),
    )
