"""The product's swarm in one cell of the benchmark ``wan``, and where its stage hosts' device time goes.

Product and numbers are real; payloads stand for larger ones (:class:`swarm.sim.wires.PayloadWeights`). What happens
when is observed: events with the world's clock, devices at work, and the leader's questions.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from peers.chaos.invariants.check import check_run
from peers.chaos.invariants.findings import Limits
from peers.simulate.sim_swarm import SimSwarm
from swarm.consensus.records import CloseRecord, CodecPair
from swarm.events import AttemptFailed, HopMoved, RoundDone, StepClosed, SumTaken
from swarm.ids import ENDS, PeerId, stage_part
from swarm.membership.rules import rules_of
from swarm.models.registry import family_of
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Rpc
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.sim.network import SimEndpoint
from swarm.sim.wires import PayloadWeights
from swarm.step.boundary_codecs import CodecRules
from swarm.step.messages import PROPOSE, RECONCILE
from swarm.step.rules import StepRules
from tests.benchmarks._wan_cells import MICROBATCHES, REPLICAS, STAGES, TRAINERS, Cell
from tests.benchmarks._wan_timeline import HostStep, Interval, marked

MODEL = {"vocab_size": 300, "dim": 64, "layers": STAGES, "heads": 1, "context": 8}
ACTIVATION_BYTES = 4 * MODEL["dim"] * MODEL["context"]
"""Of one microbatch's real activation, in float32."""
FORWARD_SHARE = 1 / 3
"""Of a microbatch's compute: a backward costs two forwards."""
LONGEST_S = 1e6
"""No run takes so long."""


class WanSwarm:
    """One run of one cell.

    Args:
        root: An empty directory.
        cell: The links, compute and sizes.
        steps: How many.
        seed: Of the run and its links.
        overrides: Sections of the manifest, as the mode wants them.
    """

    kind: type[SimSwarm] = SimSwarm
    hosts, trainers = STAGES * REPLICAS, TRAINERS

    def __init__(
        self, root: Path, cell: Cell, *, steps: int, seed: int, overrides: Mapping[str, Mapping[str, Any]]
    ) -> None:
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": steps, "seed": seed},
            "model": MODEL,
            "split": {"stages": STAGES},
            "batch": {"microbatch_size": 1, "microbatches_per_step": MICROBATCHES},
        }
        for section, keys in overrides.items():
            sections[section] = {**sections.get(section, {}), **keys}
        self.root, self.cell, self.steps = root, cell, steps
        forward_s = FORWARD_SHARE * cell.compute_s
        self.swarm = self.kind(
            root,
            hosts=self.hosts,
            trainers=self.trainers,
            links=Links.parse(cell.links | {"seed": seed}),
            stage_s={"forward": forward_s, "backward": cell.compute_s - forward_s},
            **sections,
        )
        self._weights = self.swarm.network.weights = weights(cell, self.swarm.manifest)
        self._opened: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._summed: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._averaged: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._asked: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._busy: defaultdict[str, list[Interval]] = defaultdict(list)
        self.swarm.on_added.append(self._observe)

    def play(self) -> None:
        """Play it to its end."""
        call = SimEndpoint.call

        async def told(endpoint: SimEndpoint, target: Any, rpc: Rpc[Any, Any], body: Any, **more: Any) -> Any:
            self._hear_question(rpc, body)
            return await call(endpoint, target, rpc, body, **more)

        def as_heavy(manifest: Any) -> StepRules:
            return replace(rules := rules_of(manifest), codecs=weighed(rules.codecs, self.cell, self._weights))

        with mock.patch.object(SimEndpoint, "call", told), mock.patch("swarm.membership.run.rules_of", as_heavy):
            run_world(self.swarm.run(timeout_s=LONGEST_S))

    def seconds(self) -> dict[int, float]:
        """Return how long each step took, from one closing to the next."""
        closed = self.swarm.peers["bootstrap"].events.of(StepClosed)
        return {event.step: event.seconds for event in closed if event.step > 0}

    def host_steps(self, steps: range) -> list[HostStep]:
        """Return these steps as each stage host had them, as far as they were seen whole."""
        found = []
        for name in (name for name in self.swarm.peers if name.startswith("host-")):
            marks = {
                "full": self._asked[RECONCILE.name],
                "summed": self._summed[name],
                "averaged": self._averaged[name],
                "proposed": self._asked[PROPOSE.name],
            }
            found += [marked(self._opened[name], marks, self._busy[name], step) for step in steps]
        return [one for one in found if one is not None]

    def early(self, steps: range) -> float:
        """Return the share of these steps' microbatches that were computed with older parameters."""
        committed = [one for record in self.swarm.history() if record["step"] in steps for one in record["committed"]]
        return sum(one.get("early", False) for one in committed) / len(committed)

    def judged(self) -> dict[str, int]:
        """Return what the checkers of the invariants found, and how often work or an attempt was repeated."""
        report = check_run([self.root], Limits(target=MICROBATCHES))
        return {
            "lost": len(report.of("I2")),
            "duplicated": len(report.of("I1")),
            "digest_mismatches": len(report.of("I5")),
            "attempts_failed": len(self.swarm.events(AttemptFailed)),
            "hops_moved": len(self.swarm.events(HopMoved)),
        }

    def _observe(self, name: str) -> None:
        if not name.startswith("host-") or name not in self.swarm.devices:  # on another's
            return
        self.swarm.devices[name].on_busy.append(lambda began, ended: self._busy[name].append((began, ended)))
        self.swarm.peers[name].events.listeners.append(lambda event: self._hear(name, event))

    def _hear(self, name: str, event: Any) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(event, StepClosed):
            self._opened[name][event.step + 1] = now
        elif isinstance(event, SumTaken):
            self._summed[name][event.step] = now
        elif isinstance(event, RoundDone):
            self._averaged[name][event.step] = now

    def _hear_question(self, rpc: Rpc[Any, Any], body: Any) -> None:
        """The first of its kind in a step counts."""
        if rpc.name == RECONCILE.name:
            self._asked[rpc.name].setdefault(body.step, asyncio.get_running_loop().time())
        elif rpc.name == PROPOSE.name:
            self._asked[rpc.name].setdefault(body.record.step, asyncio.get_running_loop().time())


def weights(cell: Cell, manifest: Any) -> PayloadWeights:
    """Return what payloads stand for: each part weighs as much as the cell says, whatever it really has."""
    family, context = family_of(manifest.model), manifest.model.context
    parts = {part.name: part for part in family.parts(manifest.split)}
    real = {name: 4 * family.cost(parts[name], context).parameters for name in (ENDS, stage_part(0))}
    part_bytes = cell.part_mb * 1e6
    return PayloadWeights(
        activations=cell.activation_mb * 1e6 / ACTIVATION_BYTES,
        averages={"host-*": part_bytes / real[stage_part(0)], "trainer-*": part_bytes / real[ENDS]},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCodecRules(CodecRules):
    """Rules for codecs that see links as they are: rates are measured in real bytes of averaging, each of which weighs
    as much as ``weights`` say for its sender's role."""

    weights: Mapping[str, float]

    def following(self, before: CloseRecord, record: CloseRecord) -> tuple[CodecPair, ...]:
        """See :meth:`CodecRules.following`."""
        roster, told = record.members, record.links.items()
        links = {peer: (late, round(rate * self.weights[roster[PeerId(peer)].role])) for peer, (late, rate) in told}
        return CodecRules.following(self, before, record.model_copy(update={"links": links}))


def weighed(rules: CodecRules, cell: Cell, weights: PayloadWeights) -> CodecRules:
    """Return the rules of a run whose payloads weigh what the cell says."""
    width, by_role = MODEL["dim"], {"stage": "host-*", "trainer": "trainer-*"}
    return WeighedCodecRules(
        activation=TensorSpec((1, round(cell.activation_mb * 1e6 / (4 * width)), width), "float32"),
        stages=rules.stages,
        hosted=rules.hosted,
        forward=rules.forward,
        backward=rules.backward,
        weights={role: weights.averages[pattern] for role, pattern in by_role.items()},
    )
