"""One layout of the benchmark ``plan`` as it is: the product's swarm in virtual time, in a process of its own.

Peers, wiring, averaging and records are real. A block takes what it took on this machine, divided by a peer's speed;
links are described; payloads weigh as much as the case says. So what is compared is the plan's model of a step, not how
busy this machine is.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.planning.workload import PartLayout, PartNeeds, PeerClass, Workload

TINY = {"vocab_size": 300, "dim": 64, "heads": 1, "context": 8}
"""What is really computed, of as many layers as the case has."""
WARM_UP = 2
"""Steps in which trainers find out how fast replicas are."""
SPEED = 1e9
"""Operations a second of a peer of speed 1: what a block takes is then its operations."""


def describe(case: dict[str, Any]) -> tuple[Workload, list[PeerClass], PartLayout]:
    """Return a case as a plan has it. Keys of a case: ``stages`` (layers of each), ``hosts`` (the speeds of each
    stage's replicas), ``trainers``, ``microbatches``, ``block_s`` (forward and backward of a microbatch through a
    layer), ``mbit`` and ``rtt_ms`` of every machine, ``activation_mb`` and ``layer_mb`` (what is averaged of a
    layer; of the ends as much)."""
    kinds = sorted({speed for stage in case["hosts"] for speed in stage} | {1.0}, reverse=True)
    rate = case["mbit"] * 125_000.0
    places = [tuple(stage.count(speed) for speed in kinds) for stage in case["hosts"]]
    trainers = tuple(case["trainers"] if speed == 1.0 else 0 for speed in kinds)
    layout = PartLayout(stages=tuple(case["stages"]), places=(*places, trainers), rows=1)
    classes = [
        PeerClass(name=f"{speed:g} x", count=sum(here[kind] for here in layout.places), flops=speed * SPEED,
                  memory=2.0**40, down=rate, up=rate, round_trip_s=case["rtt_ms"] / 1e3)
        for kind, speed in enumerate(kinds)
    ]  # fmt: skip
    layer = PartNeeds(flops=case["block_s"] * SPEED / 3, parameters=case["layer_mb"] * 1e6 / 4)
    work = Workload(
        layers=sum(case["stages"]), layer=layer, embedding=PartNeeds(parameters=layer.parameters), head=PartNeeds(),
        hosted=False, context=1, rows=case["microbatches"], rows_asked=1,
        activation_bytes=case["activation_mb"] * 1e6, gradient_bytes=case["activation_mb"] * 1e6, copies=0,
    )  # fmt: skip
    return work, classes, layout


def play(root: Path, case: dict[str, Any], steps: int) -> dict[str, Any]:
    """Play a case; return the median seconds of its steps behind the warm-up, and all of them."""
    from peers.simulate.sim_swarm import SimSwarm
    from swarm.events import StepClosed
    from swarm.ids import ENDS, stage_part
    from swarm.models.registry import family_of
    from swarm.sim.links import Links
    from swarm.sim.loop import run_world
    from swarm.sim.wires import PayloadWeights

    hosts = [(stage, speed) for stage, speeds in enumerate(case["hosts"]) for speed in speeds]
    machine = {"peer": "*", "up_mbit_per_s": case["mbit"], "down_mbit_per_s": case["mbit"]}
    swarm = SimSwarm(
        root,
        hosts=len(hosts),
        trainers=case["trainers"],
        links=Links.parse({"default": {"latency_ms": case["rtt_ms"] / 2}, "machine": [machine], "seed": 1}),
        stage_s={"forward": case["block_s"] / 3, "backward": 2 * case["block_s"] / 3},
        sites={f"host-{number}": {"stage": stage} for number, (stage, _) in enumerate(hosts)},
        run={"steps": steps, "seed": 1},
        model={**TINY, "layers": sum(case["stages"])},
        split={"stages": len(case["stages"]), "layers_per_stage": tuple(case["stages"])},
        batch={"microbatch_size": 1, "microbatches_per_step": case["microbatches"]},
    )
    family = family_of(swarm.manifest.model)
    parts = {part.name: part for part in family.parts(swarm.manifest.split)}
    real = {name: 4 * family.cost(parts[name], TINY["context"]).parameters for name in (stage_part(0), ENDS)}
    layer_bytes = case["layer_mb"] * 1e6
    swarm.network.weights = PayloadWeights(
        activations=case["activation_mb"] * 1e6 / (4 * TINY["dim"] * TINY["context"]),
        averages={"host-*": case["stages"][0] * layer_bytes / real[stage_part(0)],
                  "trainer-*": layer_bytes / real[ENDS]},
    )  # fmt: skip

    async def live() -> None:
        await swarm.open()
        for number, (stage, speed) in enumerate(hosts):
            swarm.devices[f"host-{number}"].slowness = case["stages"][stage] / speed
        for number in range(case["trainers"]):  # what the ends take is not stated: they have none of the plan's either
            swarm.devices[f"trainer-{number}"].slowness = 1.0
        await swarm.run(timeout_s=1e6)

    run_world(live())
    seconds = [event.seconds for event in swarm.peers["bootstrap"].events.of(StepClosed) if event.step > 0]
    return {"step_s": statistics.median(seconds[min(WARM_UP, steps - 1) :]), "steps_s": seconds}


def main(arguments: Sequence[str]) -> None:
    """Play what the JSON object says; its figures are one line of stdout."""
    import torch

    torch.set_num_threads(1)
    said = json.loads(arguments[0])
    with tempfile.TemporaryDirectory(prefix="plan-") as root:
        print(json.dumps(play(Path(root), said["case"], said["steps"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
