"""One run of the benchmark ``liars``: a simulated swarm of which one member lies, or nobody."""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from data_shards.build import build_shard
from peers.chaos.liars.lies import Liar, lying
from peers.data.text import built_in_corpus
from peers.data.trainer_data import open_source
from peers.options.foundation import STRANGERS
from peers.simulate.sim_swarm import SimSwarm
from swarm.config import Manifest
from swarm.consensus.roster import owner
from swarm.events import (
    Accumulated,
    AttemptFailed,
    ClosedWithout,
    DigestMismatch,
    Event,
    GradientsFarOut,
    HopAudited,
    HopDiffers,
    HopMoved,
    JourneyCompleted,
    JourneySetAside,
    LeftOutAsSlow,
    LossesFarOut,
    PartsCapped,
    PeerLost,
    ProvenWrong,
    QuotaTaken,
    RecordRefused,
    RoundVoid,
    StepClosed,
    StepHeldUp,
    SumLeftOut,
    TermBegan,
    WorkExcluded,
    WorkWithdrawn,
)
from swarm.ids import PeerId
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.sim.loop import PEER, run_world
from tests.harness.crashes import part_of

STAGES, REPLICAS = 2, 3
SHAPE: dict[str, Any] = {
    "hosts": STAGES * REPLICAS,
    "model": {"layers": 2, "dim": 16, "context": 16},
    "batch": {"microbatch_size": 4, "microbatches_per_step": 12},
    "optimizer": {"lr": 2e-2, "warmup_steps": 0},
    "stage_s": {"forward": 0.05, "backward": 0.1},
}
CHARACTERS, HELD_OUT = 40_000, 16
"""Of each trainer's text, and of the rows that nobody learns from; microbatches of those."""
LONGEST_S = 7200.0
"""Of the clock in the run. One that takes longer has been stopped."""
_PEER = re.compile(r"\b[1-9A-HJ-NP-Za-km-z]{46,60}\b")
_OF = re.compile(r" of ([1-9A-HJ-NP-Za-km-z]{46,60}):")
"""Of whom one says that a round broke on it."""


def _peer(event: Any) -> list[str]:
    return [event.peer]


def _said(text: str) -> Iterator[str]:
    return map(str, _PEER.findall(text))


NAMES: Mapping[type[Event], Callable[[Any], Iterable[str]]] = {
    **dict.fromkeys((GradientsFarOut, HopDiffers, LeftOutAsSlow, PeerLost, ProvenWrong, RecordRefused), _peer),
    **dict.fromkeys((QuotaTaken, StepHeldUp, SumLeftOut), _peer),
    HopAudited: lambda event: [event.peer] if event.outcome == "failed" else [],
    LossesFarOut: lambda event: [event.peer] if event.peer else [],
    RoundVoid: lambda event: [event.culprit] if event.culprit else [],
    DigestMismatch: lambda event: _rare(event.digests),
    HopMoved: lambda event: [] if event.refused else [event.old],
    ClosedWithout: lambda event: event.late,
    WorkWithdrawn: lambda event: event.trainers,
    WorkExcluded: lambda event: _said(event.reason),
    JourneySetAside: lambda event: _said(event.reason),
    AttemptFailed: lambda event: map(str, _OF.findall(event.reason)),
    PartsCapped: lambda event: [],
}
"""Events that tell of something wrong, and whom each names; of :class:`TermBegan` that is who led before."""


def _rare(digests: Mapping[PeerId, str]) -> list[PeerId]:
    said = [*digests.values()]
    most = max(map(said.count, said))
    return [peer for peer, digest in digests.items() if said.count(digest) < most]


def play(
    root: Path, *, lie: str, liar: str, rate: float, seed: int, steps: int, trainers: int, defended: bool
) -> dict[str, Any]:
    """Play one run to its end.

    Args:
        root: An empty directory.
        lie: A key of LIES; "" for none.
        liar: The name of the member that lies.
        rate: The share of its microbatches, or of the steps, about which it lies.
        seed: Of the run, and of what is lied about.
        steps: How many.
        trainers: How many there are.
        defended: Whether the run has what ``swarm new --strangers`` sets.

    Returns:
        Its figures, ready for JSON. Equal arguments give equal ones, but for ``cpu_s``.

    Raises:
        RuntimeError: The lie was never told.
    """
    began = time.process_time()
    swarm, held_out = swarm_of(root, seed, steps, trainers, STRANGERS if defended else {})
    watch, told = Watch(swarm, liar if lie else ""), Liar(lie, rate, seed, lambda: PEER.get() == liar)
    stopped = ""
    with lying(told) if lie else contextlib.nullcontext():
        try:
            run_world(swarm.run(timeout_s=LONGEST_S))
        except TimeoutError:
            stopped = "it took too long"
    if lie and not told.fired:
        raise RuntimeError(f"{liar} never lied: what {lie} replaces is not called any more")
    closed = [event for event in swarm.peers["bootstrap"].events.of(StepClosed) if event.step > 0]
    ended = [f"{name}: {peer.outcome!r}" for name, peer in swarm.peers.items() if isinstance(peer.outcome, Exception)]
    if len(closed) < steps:
        stopped = stopped or "; ".join(ended) or "it ended early"
    seconds = [event.seconds for event in closed]
    return {
        "lie": lie,
        "liar": liar if lie else "",
        "rate": rate,
        "seed": seed,
        "trainers": trainers,
        "defended": defended,
        "fired": told.fired,
        "loss": round(_loss(swarm, held_out, liar if lie else ""), 5),
        "step_s": round(median(seconds), 3) if seconds else None,
        "worst_s": round(max(seconds), 3) if seconds else None,
        "stopped": stopped[:300],
        **watch.figures(),
        "cpu_s": round(time.process_time() - began, 1),
    }


class Watch:
    """Listens to the honest members of a run: whom they name, and how much the liar has worked by then."""

    def __init__(self, swarm: SimSwarm, liar: str) -> None:
        self._swarm, self._liar = swarm, liar
        self._worked, self._wrongly = 0, 0
        self._events = Counter[str]()
        self._named: dict[str, Counter[str]] = defaultdict(Counter)
        self._caught: dict[str, int] = {}
        swarm.on_added.append(self._listen)

    def _listen(self, name: str) -> None:
        hear = self._hear_liar if name == self._liar else self._hear
        self._swarm.peers[name].events.listeners.append(hear)

    def _hear_liar(self, event: Event) -> None:
        self._worked += isinstance(event, Accumulated | JourneyCompleted)

    def _hear(self, event: Event) -> None:
        if isinstance(event, TermBegan):
            names: Iterable[str] = [self._leader(event.step, event.term - 1)]
        elif type(event) in NAMES:
            names = NAMES[type(event)](event)
        else:
            return
        known = {peer.endpoint.peer: name for name, peer in self._swarm.peers.items()}
        named = {known[PeerId(one)] for one in names if one in known}
        if isinstance(event, HopAudited) and event.outcome == "passed":
            return
        self._events[event.kind] += 1
        for name in named:
            self._named[name][event.kind] += 1
        if self._liar in named:
            self._caught.setdefault(event.kind, self._worked)
        self._wrongly += bool(named - {self._liar})

    def _leader(self, step: int, term: int) -> PeerId:
        at = self._swarm.peers["bootstrap"].membership
        assert at is not None
        return owner(at._run.position.roster, step, term)

    def figures(self) -> dict[str, Any]:
        """Return who was named how often by which events; ``caught``: after how many of the liar's microbatches each
        first named it."""
        return {
            "caught": self._caught,
            "named": {name: dict(sorted(kinds.items())) for name, kinds in sorted(self._named.items())},
            "named_wrongly": self._wrongly,
            "told": dict(sorted(self._events.items())),
        }


def swarm_of(root: Path, seed: int, steps: int, trainers: int, keys: Mapping[str, Any]) -> tuple[SimSwarm, Path]:
    """Return a swarm with these ``keys`` of the manifest beside SHAPE, and the rows that nobody learns from."""
    shape = copy.deepcopy(SHAPE)
    if trainers > 2:  # each feeds as much as any other, and each replica can hold microbatches of all
        shape["batch"] |= {"max_share": 1 / trainers, "microbatches_per_step": REPLICAS * trainers}
    for key, value in keys.items():
        section, name = key.split(".")
        shape.setdefault(section, {})[name] = value
    text = "\n\n".join(built_in_corpus().documents)
    texts = [text[at * CHARACTERS : (at + 1) * CHARACTERS] for at in range(trainers + 1)]
    swarm = SimSwarm(
        root,
        **shape,
        may_fail=True,
        trainers=trainers,
        documents=[[one] for one in texts[1:]],
        run={"steps": steps, "seed": seed},
        split={"stages": STAGES},
    )
    build_shard(root / "held-out", [texts[0]], swarm.tokenizer)
    return swarm, root / "held-out"


def _loss(swarm: SimSwarm, held_out: Path, liar: str) -> float:
    """Of the rows that nobody learns from, by the newest parameters that honest members hold."""
    manifest: Manifest = swarm.manifest
    family = family_of(manifest.model)
    weights: dict[str, torch.Tensor] = {}
    newest: dict[str, int] = {}
    for name, peer in swarm.peers.items():
        part = part_of(peer)
        if part is not None and name != liar and part.step > newest.get(part.spec.name, -1):
            newest[part.spec.name] = part.step
            weights |= part.layout.views(part.snapshot().vectors[0])
    model = family.build(family.whole)
    install_weights(model, weights)
    source, total, tokens = open_source(manifest, held_out, PeerId("nobody")), 0.0, 0
    for _ in range(min(HELD_OUT, source.microbatches_per_epoch)):
        batch = source.take()
        loss_sum, counted = model.evaluate(batch.inputs, batch.targets)
        total, tokens = total + loss_sum, tokens + counted
    return total / tokens
