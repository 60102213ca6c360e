"""Check whether a run kept its invariants, from its peers' files: ``python -m peers.chaos.invariants DIR...``.

Prints one line for each invariant and one for each failure; exit code 1 when there is any, 2 when there are no files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from peers.chaos.invariants.check import CHECKERS, Report, check_run, meaning
from peers.chaos.invariants.findings import Limits


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m peers.chaos.invariants", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--target", type=int, help="microbatches per step; by default the most that a step has")
    parser.add_argument("--gap", type=float, default=60.0, help="longest seconds between two closed steps")
    chosen = parser.parse_args(arguments)
    try:
        report = check_run(chosen.directories, Limits(target=chosen.target, gap_s=chosen.gap))
    except FileNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join(lines(report)) + "\n")
    return 1 if report.failures else 0


def lines(report: Report) -> list[str]:
    """One for each invariant, each failure, and the sum."""
    told = []
    for name in CHECKERS:
        verdict = "FAILED" if report.of(name) else "holds" if report.looked[name] else "nothing to look at"
        told.append(f"{name:4} {verdict:18} {report.looked[name]:8} looked at: {meaning(name)}")
    return [*told, *map(str, report.failures), f"{report.steps} steps, {len(report.failures)} failures"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
