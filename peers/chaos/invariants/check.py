"""Check a run by everything that every run must keep, from the files that its peers left.

The numbers name them for good; those that are missing here are what files cannot show (memory, leaks, private bytes,
loss parity, crash points) and have tests of their own. ``python -m peers.chaos.invariants DIR`` prints each with its
meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peers.chaos.invariants import microbatches, steps
from peers.chaos.invariants.evidence import Evidence, gather
from peers.chaos.invariants.findings import Checker, Failure, Findings, Limits

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
        if told:
            raise AssertionError("\n  ".join(["the run did not keep its invariants:", *told]))


def meaning(invariant: str) -> str:
    """Return the invariant in one sentence."""
    return " ".join(str(CHECKERS[invariant].__doc__).split(":", 1)[1].split("\n\n")[0].split())


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
