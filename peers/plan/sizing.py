"""``swarm new --peers FILE``: a run whose stages have the sizes that suit the peers that are to hold them.

The search is that of ``swarm plan``, with the manifest's own microbatches. What it finds goes into the manifest as
``layers_per_stage``, with the numbers of peers with which the run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.console.lasting import Told, tells_nobody
from peers.console.words import CommandError, command_name, count, listed
from peers.plan.peers_file import read_peers
from swarm.config import Manifest
from swarm.models.spec import even_stages
from swarm.planning.predict import StepForecast, lacking, layers_of, part_memory
from swarm.planning.search import is_small, search
from swarm.planning.workload import PartLayout, PeerClass, Workload

GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedStages:
    """The cut that suits some classes of peers best, with the reasons."""

    work: Workload
    classes: Sequence[PeerClass]
    best: StepForecast
    origin: str

    def changes(self) -> dict[str, Any]:
        """Return the values of a manifest that is cut so and starts when those with a place are there, by dotted
        key."""
        layout = self.best.layout
        return {
            "split.stages": len(layout.stages),
            "split.layers_per_stage": list(layout.stages),
            "run.start_when.stage_hosts": layout.peers - layout.trainers,
            "run.start_when.trainers": layout.trainers,
        }

    @property
    def _exact(self) -> bool:
        """Hosted ends make the outer stages unlike the others, which the exact search does not take; nor does it take
        variants, or stages that must be alike."""
        unlike = self.work.hosted and len(self.best.layout.stages) > 1
        return is_small(self.work, self.classes) and not (unlike or self.work.loads or self.work.alike)

    def said(self) -> list[tuple[str, str]]:
        """Return the sizes and why, as (label, text): what each stage takes, and which class has the memory."""
        best, searched = self.best, "exactly" if self._exact else "step by step"
        cut = f"{', '.join(map(str, best.layout.stages))} layers, searched {searched}"
        cut += ", activations computed again" if best.layout.recompute else ""
        pace = f"{best.tokens_s:,.0f} tokens/s, bound by {best.limits[0].name}"
        return [("sized for", f"the peers in {self.origin}: {cut}: {pace}"), *self._parts()]

    def _parts(self) -> Iterator[tuple[str, str]]:
        layout = self.best.layout
        for at, part in enumerate(self.best.parts):
            here = [
                f"{number} {one.name}" for one, number in zip(self.classes, layout.places[at], strict=True) if number
            ]
            refused = [
                f"{one.name} cannot, {lacks}"
                for one in self.classes
                if (lacks := lacking(part.memory, one, recompute=layout.recompute))
            ]
            memory = f"{part.memory.total / GIB:.2f} GiB"
            what = f"{count(part.layers, 'layer')}, {memory}" if part.layers else f"what they hold, {memory}"
            yield part.name, "; ".join([f"{what}: for {listed(here)}", *refused])


def stages_for(manifest: Manifest, peers: Path, stages: int | None, told: Told = tells_nobody) -> SizedStages:
    """Return the cut of a manifest's model that suits the peers of a file best: ``stages``, or any number of them.

    Exact for up to 3 classes of 8 peers each and 16 layers, one way of recomputing, and private ends or one stage; the
    pace is found to 1 in 16,000. Cost: seconds for a hundred peers; ``told`` is told how far it is. Raises ConfigError
    as :func:`~peers.plan.peers_file.read_peers`, CommandError where no cut fits.
    """
    known = read_peers(peers, manifest)
    from peers.plan.work import workload_of  # torch: after the file is known to be right

    work, classes = workload_of(manifest, known.kinds), known.classes
    number, rows = () if stages is None else (stages,), (manifest.batch.microbatch_size,)
    found = search(work, classes, stages=number, rows=rows, told=told)
    if not found:
        raise _does_not_fit(manifest, work, classes, stages)
    return SizedStages(work=work, classes=classes, best=found[0], origin=str(peers))


def _does_not_fit(manifest: Manifest, work: Workload, classes: Sequence[PeerClass], stages: int | None) -> CommandError:
    """The error that names a layout that would fit, where one does."""
    others = search(work, classes)
    if not others:
        return nothing_fits(work, classes)
    rows, other = manifest.batch.microbatch_size, others[0].layout
    asked = f"{count(stages, 'stage')} and microbatches" if stages else "microbatches"
    return CommandError(
        f"no layout with {asked} of {count(rows, 'row')} fits these {sum(one.count for one in classes)} peers",
        check="memory_gib and count of the classes in the file",
        next_=f"{count(len(other.stages), 'stage')} with batch.microbatch_size = {other.rows} fit: leave --stages out, "
        "or write that into the RUN.toml",
    )


def nothing_fits(work: Workload, classes: Sequence[PeerClass]) -> CommandError:
    """Return the error that says what is missing: peers, or memory for the smallest parts that there are."""
    peers, plan = sum(one.count for one in classes), f"{command_name()} plan"
    if peers < 2:
        return CommandError(
            "no layout: a swarm takes a stage host and a trainer, and there is 1 peer",
            check="count in the file",
            next_=f"train on one machine: {command_name()} quickstart; or with more peers: {plan} MODEL --peers FILE",
        )
    if not (cuts := work.cuts(range(1, work.layers + 1), peers)):
        return _too_few(work, peers)
    stages = max(cuts)
    parts = work.parts(stages)
    sizes = even_stages(work.layers, stages) if work.alike else (*[1] * (stages - 1), work.layers - stages + 1)
    layout = PartLayout(stages=sizes, places=((1,),) * len(parts), rows=1, recompute=True)
    largest = {at: part_memory(work, layout, at) for at in (0, len(parts) - 2, len(parts) - 1)}
    names = {0: "one layer", len(parts) - 2: count(layers_of(layout, parts[-2]), "layer"),
             len(parts) - 1: "what a trainer holds"}  # fmt: skip
    missing = [
        f"{names[at]} at {one.name}: {lacks}"
        for at, memory in largest.items()
        for one in classes
        if (lacks := lacking(memory, one, recompute=True))
    ]
    return CommandError(
        f"no layout fits into the memory of these {peers} peers, even with microbatches of one row"
        f"{f' ({missing[0]})' if missing else ''}",
        check="memory_gib and count of the classes; run.copies of the manifest, each of which takes memory, too",
        next_=f"more peers, or larger ones: {plan} MODEL --peers FILE",
    )


def _too_few(work: Workload, peers: int) -> CommandError:
    """Return the error that names how many peers it takes where stages have variants, or share their layers."""
    plan = f"{command_name()} plan"
    if work.loads:
        parts = len(work.parts(len(work.loads))) - 1
        what = f"{count(parts, 'stage host')}, one for each variant of each stage,"
        next_ = f"fewer split.variants in the RUN.toml, or more peers: {plan} MODEL --peers FILE"
    else:
        fewest = min(work.cuts(range(2, work.layers + 1), work.layers + 1))
        what = f"{count(fewest, 'stage host')}, one for each of stages with as many layers,"
        next_ = f"other model.layers, of which stages can have as many each, or more peers: {plan} MODEL --peers FILE"
    return CommandError(f"no layout: this takes {what} and a trainer, and there are {peers} peers",
                        check="count of the classes in the file", next_=next_)  # fmt: skip
