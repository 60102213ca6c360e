"""What the search of ``swarm plan`` misses: small cases beside everything that could be tried, and memory counted anew.

Memory is counted for every peer of a plan as the product does at a peer, from a manifest with the plan's cut and a
roster with its places: who keeps which copies is the roster's own answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peers.plan.work import workload_of
from swarm.compression.registry import codec_named
from swarm.config import Manifest, parse_manifest
from swarm.consensus.copies import copies_of
from swarm.consensus.roster import Member, Roster
from swarm.ids import ENDS, PeerId, stage_part
from swarm.membership.part_memory import part_bytes
from swarm.membership.rules import spec_of
from swarm.models.registry import family_of
from swarm.pipeline.retention import RETENTION_BYTES
from swarm.planning.alternatives import mfu
from swarm.planning.costs import USUAL_IN_FLIGHT, copy_bytes, graph_bytes, graphs_under_way, most_in_flight
from swarm.planning.predict import PROCESS_BYTES, StepForecast, predict
from swarm.planning.search import search
from swarm.planning.workload import PartLayout, PeerClass, Workload

STAGES, ROWS = (1, 2, 3), (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCase:
    """A manifest and its peers, so few that all layouts can be tried."""

    manifest: Manifest
    classes: list[PeerClass]

    @property
    def work(self) -> Workload:
        """Of a step."""
        return workload_of(self.manifest)


def drawn(seed: int, *, large: bool = False) -> SmallCase:
    """Return a case whose peers differ in speed, in link, and in memory, which some parts do not fit into."""
    draw = random.Random(seed)
    layers = draw.randint(12, 32) if large else draw.randint(2, 4)
    model = {"vocab_size": 2048, "dim": 128 * draw.randint(2, 4), "layers": layers, "heads": 4, "context": 128}
    document: dict[str, Any] = {
        "model": model,
        "run": {"copies": draw.choice([0, 1, 2])},
        "batch": {"microbatch_size": 4, "microbatches_per_step": 16},
        "tokenizer": {"digest": "0" * 64},
    }
    manifest = parse_manifest(document, "the benchmark plan")
    layer = workload_of(manifest).layer
    classes = [
        PeerClass(
            name=name,
            count=draw.randint(4, 30) if large else draw.randint(2, 3),
            flops=10 ** draw.uniform(10, 12),
            memory=PROCESS_BYTES + draw.uniform(1.5, 8.0) * (layers if large else 1) * (layer.held + 8 * layer.graph),
            down=(rate := 10 ** draw.uniform(6.5, 8.5)),
            up=rate,
            round_trip_s=draw.uniform(0.001, 0.1),
        )
        for name in (("a", "b", "c", "d") if large else ("a", "b"))
    ]
    return SmallCase(manifest=manifest, classes=classes)


def best_of_all(case: SmallCase) -> StepForecast | None:
    """Return the fastest of all layouts that fit, None where none does."""
    work = case.work
    tried = (predict(work, case.classes, layout) for layout in _layouts(work, case.classes))
    return max((one for one in tried if not one.problems), key=lambda one: one.tokens_s, default=None)


def found_by_search(case: SmallCase, *, anything: bool = False) -> StepForecast | None:
    """Return what the search finds among the same layouts, or ``anything``."""
    chosen = {} if anything else {"stages": STAGES, "rows": ROWS}
    return next(iter(search(case.work, case.classes, **chosen)), None)


def points_below(case: SmallCase, best: StepForecast, found: StepForecast) -> float:
    """Return MFU points, of what all peers attain together, between two plans."""
    work = case.work
    everybody = sum(one.count * one.flops for one in case.classes)
    return 100 * work.palm_flops * (best.tokens_s - found.tokens_s) / everybody


def share_used(case: SmallCase, found: StepForecast) -> float:
    """Return MFU of a plan, of what its own peers attain."""
    return mfu(case.work, case.classes, found, case.work.palm_flops)[0]


def peers_without_memory(case: SmallCase, plan: StepForecast) -> int:
    """Return how many peers of a plan need more than they have, counted anew."""
    layout, manifest = plan.layout, _with_cut(case.manifest, plan.layout)
    members = list(_members(layout))
    roster = Roster(tuple(member for member, _ in members))
    return sum(_bytes_at(manifest, layout, roster, member) > case.classes[kind].memory for member, kind in members)


def _with_cut(manifest: Manifest, layout: PartLayout) -> Manifest:
    document = manifest.model_dump(mode="json")
    rows = manifest.batch.microbatch_size * manifest.batch.microbatches_per_step
    document["split"] |= {"stages": len(layout.stages), "layers_per_stage": list(layout.stages)}
    document["batch"] |= {"microbatch_size": layout.rows, "microbatches_per_step": rows // layout.rows}
    hosts = layout.peers - layout.trainers
    document["run"]["start_when"] = {"stage_hosts": hosts, "trainers": layout.trainers}
    return parse_manifest(document, "the benchmark plan")


def _members(layout: PartLayout) -> Iterator[tuple[Member, int]]:
    numbers = itertools.count(10_000)
    for at, here in enumerate(layout.places):
        trains = at == len(layout.stages)
        for kind, number in enumerate(here):
            for _ in range(number):
                name = f"peer{next(numbers)}"
                part = ENDS if trains else stage_part(at)
                yield Member(
                    peer=name, role="trainer" if trains else "stage", name=name, part=part, addresses=()
                ), kind  # fmt: skip


def _bytes_at(manifest: Manifest, layout: PartLayout, roster: Roster, member: Member) -> float:
    part = spec_of(manifest, member.part)  # type: ignore[arg-type]
    count, trainers, rows = manifest.step_microbatches, len(roster.trainers), layout.rows
    replicas, trains = len(roster.replicas(part.name)), member.role == "trainer"
    each = graph_bytes(manifest.model, part, rows, checkpointing=layout.recompute)
    crossing = codec_named(manifest.codecs.activations).wire_bytes(
        family_of(manifest.model).boundary(rows, manifest.model.context)
    )
    journeys = most_in_flight(2 * crossing, RETENTION_BYTES)
    graphs = (
        min(count, journeys) if trains else graphs_under_way(count, replicas, min(USUAL_IN_FLIGHT, journeys) * trainers)
    )
    share = min(count, -(-count // replicas) + trainers - 1)
    copied = copies_of(roster, PeerId(member.peer), manifest.run.copies)
    copies = sum(copy_bytes(manifest.model, spec_of(manifest, one)) for one in copied)
    payloads = min(RETENTION_BYTES, 2 * share * crossing)
    return sum(part_bytes(manifest, part).values()) + graphs * each + payloads + copies + PROCESS_BYTES


def _layouts(work: Workload, classes: Sequence[PeerClass]) -> Iterator[PartLayout]:
    for stages, rows, again in itertools.product(STAGES, ROWS, (False, True)):
        for sizes in itertools.combinations_with_replacement(range(work.layers, 0, -1), stages):
            if sum(sizes) != work.layers:
                continue
            ways = [
                [counts for counts in itertools.product(range(one.count + 1), repeat=stages + 1)
                 if sum(counts) <= one.count]
                for one in classes
            ]  # fmt: skip
            for chosen in itertools.product(*ways):
                places = tuple(zip(*chosen, strict=True))
                if all(map(any, places)):
                    yield PartLayout(stages=sizes, places=places, rows=rows, recompute=again)
