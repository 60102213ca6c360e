"""What the others lose of their speed while a peer joins: the same run's steps with and without one on its way in.

Real processes on loopback, 2 stages × 2 replicas, 2 trainers and a bootstrap, on simulated devices, so that on shared
cores only what serving a joiner costs is seen. Time and again a third replica is started for one stage or the other,
downloads its part, catches up and is let in; then it leaves in order. A step counts as *joining* when it closed after
the joiner's start, and up to the one whose record names it; as *quiet* when nobody came, was there or left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

from peers.chaos.invariants.evidence import Evidence, gather
from peers.home.run_directory import RunDirectory
from peers.local.run import RunBroken
from peers.manifest_file import write_manifest
from swarm.ids import PeerId
from swarm.models.gpt_config import GptConfig
from tests.benchmarks._forked_run import ForkedRun, endless
from tests.benchmarks._parity_run import Layout, build_data, make_manifest
from tests.benchmarks._recovery_figures import closings

LAYOUT = Layout(name="2 × 2", stages=2, replicas=2, ends="private")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """How many peers join and leave, one after the other, about 25 s each; the width of the model, the microbatches of
    a step, and how many steps pass before the first and between two of them."""

    joins: int
    dim: int = 384
    microbatches: int = 24
    warm_steps: int = 4
    quiet_steps: int = 3


@dataclass(frozen=True, slots=True)
class Stay:
    """Who joined, the last step closed before, and the first one without it again."""

    peer: str
    before: int
    gone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Seconds of every step without and with a peer on its way in, and the bytes of each state that was handed over."""

    quiet_s: tuple[float, ...]
    joining_s: tuple[float, ...]
    state_bytes: tuple[int, ...]

    @property
    def kept(self) -> float:
        """The others' speed while somebody joins, as a share of their speed without. The mean of the joining steps, for
        a slow one among them is what is looked for; the median of the quiet ones, which a stray one shall not flatter.
        """
        return median(self.quiet_s) / mean(self.joining_s)

    @property
    def error(self) -> float | None:
        """Standard error of :attr:`kept`, from the joining steps' own scatter: there are few of them. None of one."""
        if len(self.joining_s) < 2:
            return None
        return self.kept * stdev(self.joining_s) / mean(self.joining_s) / len(self.joining_s) ** 0.5


def measure(root: Path, visits: Visits) -> Others:
    """Let them join and leave. Raises RunBroken when one cannot."""
    model = GptConfig(vocab_size=512, dim=visits.dim, layers=2, heads=6, context=32)
    scale = endless(model, visits.microbatches)
    data = build_data(root, scale)
    directory = RunDirectory(root)
    manifest = make_manifest(LAYOUT, scale, data, reproducible=False)
    write_manifest(manifest, directory.manifest)
    run = ForkedRun(directory, manifest, LAYOUT)
    try:
        run.begin(visits.warm_steps)
        stays = [
            _let_in(run, visits, f"stage-{number % LAYOUT.stages}-joiner{number}") for number in range(visits.joins)
        ]
        run.pass_steps(visits.quiet_steps + 1)
    finally:
        run.world.stop()
    return others(gather([root]), visits, stays)


def _let_in(run: ForkedRun, visits: Visits, name: str) -> Stay:
    """Let one in and out again."""
    run.pass_steps(visits.quiet_steps + 1)
    before = run.seen.closed
    run.start(name)
    run.until(lambda: name in run.seen.ready, f"{name} to be let in")
    run.pass_steps(1)
    run.world.leave(name)
    run.until(lambda: name not in run.world.group.running, f"{name} to leave")
    run.pass_steps(1)
    return Stay(run.world.identity(name), before, run.seen.closed)


def others(evidence: Evidence, visits: Visits, stays: Sequence[Stay]) -> Others:
    """Sort the steps of a run. Raises RunBroken when a joiner had no state from the others."""
    closed = closings(evidence)
    took = {
        step: wall - closed[step - 1]
        for step, wall in closed.items()
        if step - 1 in closed and step > visits.warm_steps
    }
    first = {fact.peer: fact.step for fact in evidence.of("PeerReady")}
    states = {fact.peer: int(fact.fields["bytes_received"]) for fact in evidence.of("StateDownloaded")}
    if missing := [stay.peer for stay in stays if stay.peer not in states]:
        raise RunBroken(f"{', '.join(missing)} joined without a state from the others")
    joining = [took[step] for stay in stays for step in range(stay.before + 1, first[PeerId(stay.peer)] + 1)]
    away = {step for stay in stays for step in range(stay.before + 1, stay.gone + 1)}
    quiet = tuple(seconds for step, seconds in took.items() if step not in away)
    return Others(
        quiet_s=quiet, joining_s=tuple(joining), state_bytes=tuple(states[PeerId(stay.peer)] for stay in stays)
    )
