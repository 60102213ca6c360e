"""One run of the benchmark ``goodput``: a simulated swarm on machines that are taken back as a trace says."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.chaos.figures import capacity
from peers.chaos.invariants.check import Report, check_run
from peers.chaos.invariants.findings import Limits
from peers.chaos.schedule import spot_trace
from peers.simulate.sim_swarm import SimSwarm
from peers.simulate.spot_market import SpotMarket
from swarm.events import AttemptFailed, HopMoved, RoundDone, StepClosed, TermBegan
from swarm.ids import ENDS
from swarm.sim.links import Links
from swarm.sim.loop import run_world

STAGES, REPLICAS, TRAINERS = 3, 4, 2
STEP_S, FORWARD_S, BACKWARD_S = 5.0, 0.03, 0.06
LINKS = {"default": {"latency_ms": 5, "jitter_ms": 1, "mbit_per_s": 1000}}
MODEL = {"vocab_size": 300, "dim": 16, "layers": STAGES, "heads": 1, "context": 8}
TOO_LATE = "nobody joins with that one"
"""What a peer says that comes in the last step."""
LONGEST_S = 1e5
"""No run takes so long; the trace does."""


def play(root: Path, *, churn: float, seed: int, steps: int, slower: float = 1.0, mode: str = "sync") -> dict[str, Any]:
    """Play one run to its end.

    Args:
        root: An empty directory.
        churn: Expected share of the replicas that is removed in STEP_S.
        seed: Of the trace, the links and the run.
        steps: How many.
        slower: So many times as long takes everything on the devices, and so many times fewer microbatches make a step.
        mode: ``sync`` or ``overlap``, as the manifest has it.

    Returns:
        Its figures, ready for JSON. Equal arguments give equal ones, but for ``cpu_s``.

    Raises:
        Exception: Whatever ends the run earlier.
    """
    began = time.process_time()
    rate = 1.0 / (slower * (FORWARD_S + BACKWARD_S))  # microbatches that one replica takes in a second
    target = round(STEP_S * REPLICAS * rate)  # of a step: what the whole swarm could do in STEP_S
    swarm = SimSwarm(
        root,
        may_fail=True,
        hosts=STAGES * REPLICAS,
        trainers=TRAINERS,
        links=Links.parse(LINKS | {"seed": seed}),
        stage_s={"forward": slower * FORWARD_S, "backward": slower * BACKWARD_S},
        run={"steps": steps, "seed": seed},
        model=MODEL,
        split={"stages": STAGES},
        batch={"microbatch_size": 1, "microbatches_per_step": target},
        speed={"mode": mode},
    )
    places = STAGES * REPLICAS
    trace = spot_trace(places=places, churn=churn, step_s=STEP_S, until_s=LONGEST_S, seed=seed) if churn else ()
    market = SpotMarket(swarm, trace)
    run_world(_both(swarm, market))
    figures = _goodput(swarm, market, rate) | _happened(swarm, market)
    figures |= _judged(check_run([root], Limits(target=target)))
    return {"mode": mode, "churn": churn, "seed": seed, **figures, "cpu_s": round(time.process_time() - began, 1)}


async def _both(swarm: SimSwarm, market: SpotMarket) -> None:
    await swarm.open()
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(market.run())
        await swarm.run(timeout_s=LONGEST_S)
        playing.cancel()


def _goodput(swarm: SimSwarm, market: SpotMarket, rate: float) -> dict[str, Any]:
    """What was committed, beside what could have been. Raises RuntimeError when not every step was closed."""
    records = [record for record in swarm.history() if record["step"] > 0]
    if len(records) != swarm.manifest.run.steps:
        raise RuntimeError(f"only {len(records)} steps were closed: {swarm.peers['bootstrap'].outcome!r}")
    committed = sum(len(record["committed"]) for record in records)
    window = market.began_s, market.ended_s
    could, joining_too = (capacity(market.lives(joining=joining), STAGES, rate, *window) for joining in (False, True))
    return {
        "steps": len(records),
        "committed": committed,
        "could": round(could, 1),
        "could_joining_too": round(joining_too, 1),
        "goodput": round(committed / could, 4),
        "goodput_joining_too": round(committed / joining_too, 4),
        "seconds": round(window[1] - window[0], 3),
        "replicas": round(sum(_seconds(market, window)) / (window[1] - window[0]), 2),
    }


def _seconds(market: SpotMarket, window: tuple[float, float]) -> Iterator[float]:
    """That each machine was there and ready, within the window."""
    for life in market.lives(joining=False):
        yield max(0.0, min(life.to_s, window[1]) - max(life.from_s, window[0]))


def _happened(swarm: SimSwarm, market: SpotMarket) -> dict[str, Any]:
    """What was done to the swarm, and what it did about it."""
    closed = swarm.peers["bootstrap"].events.of(StepClosed)
    ready_s = sum(_seconds(market, (market.began_s, market.ended_s)))
    step_s = (market.ended_s - market.began_s) / len(closed)
    removed = market.counts["killed"] + market.counts["noticed"]
    failed = [peer for peer in swarm.peers.values() if isinstance(peer.outcome, Exception)]
    failed = [peer for peer in failed if TOO_LATE not in repr(peer.outcome)]
    mine = [event for event in swarm.events(RoundDone) if event.part != ENDS]
    return {
        "preempted": removed,
        **{name: market.counts[name] for name in ("killed", "noticed", "cut_short", "spared", "replaced")},
        "churn_per_step": round(removed / (ready_s / step_s), 4),
        "attempts_failed": len(swarm.events(AttemptFailed)),
        "terms_begun": len(swarm.events(TermBegan)),
        "hops_moved": len(swarm.events(HopMoved)),
        "participation": sum(event.participating for event in mine) / sum(event.members for event in mine),
        "join_s": round(statistics.median(market.join_seconds()), 2) if market.join_seconds() else None,
        "step_s": round(statistics.median(event.seconds for event in closed), 3),
        "peers_failed": sorted({f"{peer.settings.name}: {peer.outcome!r}"[:300] for peer in failed}),
    }


def _judged(report: Report) -> dict[str, Any]:
    """What the checkers of the invariants found in what the peers wrote."""
    return {
        "lost": len(report.of("I2")),
        "duplicated": len(report.of("I1")),
        "digest_mismatches": len(report.of("I5")),
        "broken": sorted({str(failure)[:200] for failure in report.failures})[:5],
    }
