"""``make gpu-check``: the benchmark ``device`` at its full size on a machine with a GPU, ``tensor`` where there are
two, and a judgement.

Exits 1 where a promise is not kept or a measurement failed, which the benchmark itself does not, and 2 without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.optim import native
from tests.benchmarks import device, tensor
from tests.benchmarks._supervised import supervised
from tests.benchmarks.runner import Size, measure, show

OTHER_INTERPRETER = "make gpu-check GPU_PYTHON=python3"


def gpu_missing() -> str | None:
    """Return what is wrong, and what to do about it, in one line; None where torch sees a GPU."""
    try:
        import torch
    except ImportError as error:
        return (
            f"{sys.executable} has no torch ({error}): name an interpreter that has one with CUDA, {OTHER_INTERPRETER}"
        )
    if torch.cuda.is_available():
        return None
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return (
        f"torch {torch.__version__}, built {built}, sees no GPU: check that nvidia-smi lists one, and that "
        f"{sys.executable} has a torch for CUDA, or name an interpreter that has: {OTHER_INTERPRETER}"
    )


def gpus() -> int:
    """Return how many there are."""
    import torch

    return torch.cuda.device_count()


def broken_by_two(summary: Mapping[str, Any]) -> list[str]:
    """Return the promises of ``tensor`` that two GPUs do not keep."""
    kept = {
        "degrees_equal": summary["degrees_equal"] == 1,
        "max_abs_diff": summary["max_abs_diff"] <= summary["max_abs_diff_bar"],
        "two_gpus_over_one": summary["two_gpus_over_one"] >= summary["two_gpus_over_one_bar"],
    }
    return [f"tensor: {name} {summary[name]}" for name, held in kept.items() if not held]


def verdict(summary: Mapping[str, Any], more: Sequence[str] = ()) -> tuple[int, str]:
    """Return the exit code, and the last line for a person; ``more`` is what else failed."""
    failed = [*summary["failed"], *more]
    if failed:
        return 1, f"gpu-check: {len(failed)} failed on {summary['device']}: {', '.join(failed)}"
    return 0, f"gpu-check: everything that must hold holds on {summary['device']}"


def main() -> int:
    """Measure, print as any benchmark does, judge on stderr; returns the exit code."""
    missing = gpu_missing()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    native.build()  # as set-up does
    measurement = measure("device", device.run, size=Size.FULL, command="make gpu-check")
    show(measurement)
    more: list[str] = []
    if gpus() > 1:
        two = measure("tensor", tensor.run, size=Size.DEFAULT, command="make gpu-check")
        show(two)
        more = broken_by_two(two.result.summary)
    code, said = verdict(measurement.result.summary, more)
    print(said, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(supervised("gpu-check", main))
