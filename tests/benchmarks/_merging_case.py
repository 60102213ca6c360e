"""One run of the benchmark ``merging``: replicas that train apart, one of which is late at each close.

``python -m tests.benchmarks._merging_case '{"paused_s": 4, "quorum": 0.75, "steps": 10, "replicas": 8, "inner": 8}'``
prints its figures as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.chaos.invariants.check import check_run
from peers.chaos.invariants.findings import Limits
from peers.simulate.sim_swarm import SimSwarm
from swarm.events import ClosedWithout, JourneyCompleted, StepClosed
from swarm.models.registry import family_of
from swarm.sim.links import Links
from swarm.sim.loop import run_world
from swarm.sim.wires import PayloadWeights

BATCH = 8
FORWARD_S, BACKWARD_S = 0.3, 0.6
MBIT_PER_S, PART_BYTES = 100.0, 10_000_000
MODEL: dict[str, Any] = {"vocab_size": 300, "dim": 128, "layers": 1, "heads": 1, "context": 8}
LONGEST_S = 1e5
WARM_UP = 1
"""Steps that are not counted: nothing was measured of links, and trainers find out how fast each replica is."""


class Merging:
    """One run of so many ``replicas``, in which a step has ``inner`` batches. The last replica stands still for
    ``paused_s`` as soon as a step's last loss is known, or has a link that is ``thinner``."""

    def __init__(
        self, root: Path, *, quorum: float, steps: int, replicas: int, inner: int, paused_s: float = 0.0,
        thinner: float = 1.0,
    ) -> None:  # fmt: skip
        self.root, self.paused_s, self.steps, self.target = root, paused_s, steps, BATCH * inner
        self.late, self.quorum = f"host-{replicas - 1}", quorum
        machines = [
            {"peer": name, "up_mbit_per_s": rate, "down_mbit_per_s": rate}
            for name, rate in [("host-*", MBIT_PER_S), (self.late, MBIT_PER_S / thinner)]
        ]
        self.swarm = SimSwarm(
            root,
            hosts=replicas,
            trainers=1,
            links=Links.parse({"default": {"latency_ms": 10}, "machine": machines}),
            stage_s={"forward": FORWARD_S, "backward": BACKWARD_S},
            run={"steps": steps, "seed": 1},
            model=MODEL,
            split={"stages": 1},
            batch={"microbatch_size": 1, "microbatches_per_step": BATCH},
            averaging={"mode": "local", "local": {"steps": inner, "quorum": quorum}},
            optimizer={"warmup_steps": 0},
        )
        manifest = self.swarm.manifest
        family = family_of(manifest.model)
        stage = next(part for part in family.parts(manifest.split) if part.name == "stage-0")
        factor = PART_BYTES / (4 * family.cost(stage, MODEL["context"]).parameters)
        self.swarm.network.weights = PayloadWeights(averages={"host-*": factor})
        self.pauses: list[int] = []
        self._completed: dict[int, int] = {}
        self.swarm.on_added.append(self._observe)

    def _observe(self, name: str) -> None:
        if name.startswith("trainer-") and self.paused_s:
            self.swarm.peers[name].events.listeners.append(self._hear)

    def _hear(self, event: Any) -> None:
        if not isinstance(event, JourneyCompleted):
            return
        self._completed[event.step] = self._completed.get(event.step, 0) + 1
        if self._completed[event.step] == self.target and event.step < self.steps:
            self.pauses.append(event.step)
            self.swarm.pause(self.late)
            asyncio.get_running_loop().call_later(self.paused_s, self.swarm.resume, self.late)

    def play(self) -> dict[str, Any]:
        """Play it to its end; its figures."""
        run_world(self.swarm.run(timeout_s=LONGEST_S))
        closed = self.swarm.peers["bootstrap"].events.of(StepClosed)
        seconds = [event.seconds for event in closed if WARM_UP < event.step < self.steps]
        history = self.swarm.history()
        late = self.swarm.peers[self.late].endpoint.peer
        by_late = [one["route"][0] == late for record in history for one in record["committed"]]
        report = check_run([self.root], Limits(target=self.target))
        tokens = statistics.fmean(record["tokens"] for record in history if record["step"] > 0)
        return {
            "step_s": round(statistics.fmean(seconds), 3),
            "tokens_per_s": round(tokens / statistics.fmean(seconds), 2),
            "late_share": round(sum(by_late) / len(by_late), 4),
            "loss": round(history[-1]["loss_sum"] / history[-1]["tokens"], 4),
            "quorum": self.quorum,
            "pauses": len(self.pauses),
            "left_out": len(self.swarm.events(ClosedWithout)),
            "absent": sum(len(record["absent"]) for record in history),
            "lost": len(report.of("I2")),
            "duplicated": len(report.of("I1")),
            "digest_mismatches": len(report.of("I5")),
            "broken": sorted({str(failure)[:200] for failure in report.failures})[:5],
        }


def main(argument: str) -> None:
    """Play what the JSON object says; its figures are one line of stdout."""
    import torch

    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="merging-") as root:
        figures = Merging(Path(root), **json.loads(argument)).play()
    print(json.dumps({**figures, "cpu_s": round(time.process_time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
