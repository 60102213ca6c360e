"""Whether a run kept what every run must keep, from the files that its peers left.

``python -m tests.harness.invariants DIR...`` prints one line for each invariant and one for each failure; exit code 1
when there is any. Numbers are those of the project's list of invariants; those that files cannot show (memory, leaks,
private bytes, loss parity, crash points) have tests of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness import invariants_microbatches as microbatches
from tests.harness import invariants_steps as steps
from tests.harness.invariants_evidence import Evidence, gather
from tests.harness.invariants_findings import Checker, Failure, Findings, Limits

CHECKERS: Mapping[str, Checker] = {
    "I1": microbatches.committed_once,
    "I2": microbatches.none_lost,
    "I3": microbatches.same_set_everywhere,
    "I4": steps.denominators,
    "I5": steps.replicas_agree,
    "I7": steps.steps_in_order,
    "I8": steps.whole_batches,
    "I10": microbatches.cursors_are_prefixes,
    "I13": steps.steps_keep_coming,
    "I14": steps.faults_are_noticed,
    "I15": steps.the_slow_are_not_evicted,
    "I17": steps.downloads_are_decided,
    "I20": steps.one_history,
    "I21": steps.stale_starts_are_fenced,
    "I26": steps.all_finite,
}
USUAL = ("I1", "I2", "I3", "I4", "I5", "I7", "I8", "I10", "I20", "I26")
"""Those that every run of more than one step has something to look at for."""
FILES = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``looked`` says for each invariant how many comparisons were made."""

    failures: tuple[Failure, ...]
    looked: Mapping[str, int]
    steps: int

    def of(self, invariant: str) -> tuple[Failure, ...]:
        """The failures of one."""
        return tuple(failure for failure in self.failures if failure.invariant == invariant)

    def assert_sound(self, looked_at: Iterable[str] = USUAL) -> None:
        """Raises AssertionError naming every failure (at most 20 of each invariant), or an invariant of ``looked_at``
        for which there was nothing to compare."""
        told: list[str] = []
        for invariant in dict.fromkeys(failure.invariant for failure in self.failures):
            failures = self.of(invariant)
            told += [str(failure) for failure in failures[:20]]
            told += [f"{invariant}: {len(failures) - 20} more"] if len(failures) > 20 else []
        told += [f"{one}: nothing to look at" for one in looked_at if not self.looked.get(one)]
        assert not told, "\n  ".join(["the run did not keep its invariants:", *told])


def check(evidence: Evidence, limits: Limits | None = None) -> Report:
    """Every checker over the evidence. Cost: a few passes over all events."""
    found = [Findings(name) for name in CHECKERS]
    for findings, checker in zip(found, CHECKERS.values(), strict=True):
        checker(evidence, limits or Limits(), findings)
    unreadable = tuple(Failure(FILES, complaint) for complaint in evidence.unreadable)
    return Report(
        failures=unreadable + tuple(failure for findings in found for failure in findings.failures),
        looked={findings.invariant: findings.looked for findings in found},
        steps=max(evidence.records, default=0),
    )


def check_run(homes: Iterable[Path], limits: Limits | None = None) -> Report:
    """As :func:`check`, over the homes at or below these directories, all of one run. Raises FileNotFoundError naming a
    directory that holds none."""
    return check(gather(homes), limits)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.invariants", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--target", type=int, help="microbatches per step; by default the most that a step has")
    parser.add_argument("--gap", type=float, default=60.0, help="longest seconds between two closed steps")
    chosen = parser.parse_args(arguments)
    try:
        report = check_run(chosen.directories, Limits(target=chosen.target, gap_s=chosen.gap))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    for name, checker in CHECKERS.items():
        verdict = "FAILED" if report.of(name) else "holds" if report.looked[name] else "nothing to look at"
        about = str(checker.__doc__).split(":", 1)[1].split("\n\n")[0]
        print(f"{name:4} {verdict:18} {report.looked[name]:8} looked at: {' '.join(about.split())}")
    for failure in report.failures:
        print(failure)
    print(f"{report.steps} steps, {len(report.failures)} failures")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
