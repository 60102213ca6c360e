"""Whether a quickstart's report tells of a run that went well: ``python -m tests.harness.report FILE --steps 3 …``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NUMBERS = (
    "steps",
    "loss_first",
    "loss_last",
    "eval_first",
    "eval_last",
    "tokens_per_s",
    "seconds_to_first_step",
    "microbatches_committed",
    "microbatches_lost",
    "microbatches_duplicated",
    "bytes_per_step",
    "peers",
    "stages",
    "replicas_digest_mismatches",
)
POSITIVE = (
    "loss_first",
    "loss_last",
    "eval_first",
    "eval_last",
    "tokens_per_s",
    "microbatches_committed",
    "bytes_per_step",
)
NONE_OF = ("microbatches_lost", "microbatches_duplicated", "replicas_digest_mismatches")


def faults(report: Mapping[str, Any], expected: Mapping[str, int]) -> list[str]:
    """One line for each key that is missing, no finite number, or not what a run without failures gives."""
    found = [f"{key} is missing" for key in (*NUMBERS, "exit_reason") if key not in report]
    found += [f"{key} = {report[key]!r} is no number" for key in NUMBERS if key in report and not _finite(report[key])]
    if found:
        return found
    found += [f"{key} = {report[key]} where more than 0 is expected" for key in POSITIVE if report[key] <= 0]
    found += [f"{key} = {report[key]} where 0 is expected" for key in NONE_OF if report[key] != 0]
    found += [
        f"{key} = {report[key]} where {value} is expected" for key, value in expected.items() if report[key] != value
    ]
    reason = report["exit_reason"]
    return found + ([] if reason == "completed" else [f"exit_reason = {reason!r} where 'completed' is expected"])


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def main(arguments: Sequence[str]) -> int:
    """Prints the faults; 0 when there are none, 1 when there are or the file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.report")
    parser.add_argument("file", type=Path)
    for key in ("steps", "peers", "stages"):
        parser.add_argument(f"--{key}", type=int)
    chosen = vars(parser.parse_args(arguments))
    path = chosen.pop("file")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"report: {path}: {error}", file=sys.stderr)
        return 1
    found = faults(report, {key: value for key, value in chosen.items() if value is not None})
    for line in found:
        print(f"report: {line}", file=sys.stderr)
    if not found:
        print("report: " + ", ".join(f"{key} {report[key]}" for key in (*NUMBERS, "exit_reason")))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
