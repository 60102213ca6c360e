"""What peers of a whole swarm under a virtual clock say of their memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from peers.simulate.sim_swarm import SimSwarm
from swarm.events import Accumulated, Event, StepClosed
from swarm.membership.memory import KINDS
from swarm.membership.status_types import MemoryReport
from swarm.sim.links import Links
from swarm.sim.loop import run_world


def test_peers_hold_no_more_than_is_predicted_and_say_of_what(tmp_path: Path) -> None:
    swarm = SimSwarm(
        tmp_path,
        hosts=4,
        trainers=2,
        run={"steps": 5, "copies": 2},
        links=Links.parse({"default": {"latency_ms": 20}}),
        stage_s={"forward": 0.1, "backward": 0.2},
    )
    told: dict[str, list[MemoryReport]] = {}

    async def story() -> None:
        await swarm.open()
        for name, peer in swarm.peers.items():

            def look(event: Event, name: str = name) -> None:
                membership = swarm.peers[name].membership
                report = None if membership is None else membership.situation.memory()
                if isinstance(event, Accumulated | StepClosed) and report is not None:
                    told.setdefault(name, []).append(report)

            peer.events.listeners.append(look)
        async with asyncio.timeout(600):
            await swarm.run()

    run_world(story())
    assert told.keys() == swarm.peers.keys()
    for name, reports in told.items():
        newest = reports[-1]
        assert tuple(newest.predicted) == tuple(newest.measured) == KINDS
        assert newest.allocated is None
        assert newest.resident > sum(newest.measured.values())
        for kind in ("weights", "optimizer", "gradients"):
            assert newest.measured[kind] <= 1.02 * newest.predicted[kind], (name, kind)
            assert (newest.predicted[kind] > 0) == (name != "bootstrap")
    hosts = [report for name, reports in told.items() if name.startswith("host") for report in reports]
    assert any(report.measured["graphs"] for report in hosts), "microbatches are under way"
    assert any(report.measured["payloads"] for report in hosts), "what came in is retained"
    assert any(report.measured["copies"] for report in hosts), "copies are kept"
    assert any(report.measured["round"] for report in hosts), "something is averaged"
    for kind in ("graphs", "payloads"):
        assert all(report.measured[kind] <= report.predicted[kind] for report in hosts), kind
