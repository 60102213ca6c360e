"""One model of one seed of the benchmark ``variants``: experts by kinds of text that are learnt, what has none, or a
model for each of the same kinds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data_shards.documents import rows_of
from data_shards.draft import Documents, ShardDraft
from data_shards.histogram import pieces_of
from data_shards.router import Points, Router, Whole, described, learn
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer
from peers.checkpoints.writer import keep_run
from peers.commands.evaluate import LanguageModel, load_checkpoint
from peers.home.run_directory import RunDirectory
from peers.simulate.sim_swarm import SimSwarm
from swarm.ids import ENDS, variant_of
from swarm.models.merging import TextRows
from swarm.sim.loop import run_world
from swarm.sim.network import SimEndpoint
from tests.benchmarks._texts import test_rows, texts_of

CONTEXT, ROWS, MICROBATCHES, LAYERS, VARIANTS = 64, 16, 8, 4, 4
LONGEST_DOCUMENT = 20_000
PIPELINE = ("stage/", "trainer/")
"""What methods are called that carry microbatches."""
SPARSE = {"dim": 16, "layers": 2, "heads": 1}
DEVICE_S = dict.fromkeys(("forward", "backward"), 0.01)
"""Of a run that is about who computes how much: hosts that take no time are not told apart, and one gets all."""


def play(root: Path, *, model: str, seed: int, steps: int, hosts: int, characters: dict[str, int]) -> dict[str, Any]:
    """Train and measure.

    Args:
        root: An empty directory.
        model: ``dense``; ``variants``, of which each token passes as many layers; ``large``, with as many parameters as
            these in all; ``apart``, a dense model for each of the same kinds, of its rows alone; or ``load``, a small
            model with variants on many hosts.
        seed: Of text, runs and kinds.
        steps: Of the run; those apart share them, as they share the rows.
        hosts: Of ``load``; the others have one for each part.
        characters: To train on, by kind of text; nobody says which text is of which.

    Returns:
        ``losses`` by kind of text in nats a token, of whole rows and of their second halves where each is routed by the
        first; the ``bytes`` that a microbatch took; and how many microbatches each host of the last stage computed in
        the second half of the run, the most over the mean: ``load``, with the ``best`` that so many hosts allow, of
        whom each variant has a whole number, and how many moved in that half: ``moved``.
    """
    texts = texts_of(random.Random(seed))
    documents = [one[:LONGEST_DOCUMENT] for kind, most in characters.items() for one in _first(texts[kind].train, most)]
    random.Random(seed).shuffle(documents)
    run = _Run(root, documents, seed)
    first = run.swarm("text", {})
    centres = _centres(first.tokenizer, documents, seed)
    split = {"stages": 2, "variants": (1, VARIANTS), "route_by": "text", "centres": centres}
    figures: dict[str, Any] = {"model": model, "seed": seed}
    if model == "load":
        batch = {"microbatch_size": 2, "microbatches_per_step": 2 * hosts}
        sections = {"split": split, "model": SPARSE, "batch": batch, "rebalance": {"mode": "auto"}}
        swarm = run.swarm("load", sections, steps, hosts, stage_s=DEVICE_S)
        run_world(swarm.run(timeout_s=1e6))
        return figures | _load(swarm)
    router = Router(centres)
    if model == "apart":
        shards = _rows_apart(first, router, root)
        packed = {"batch": {"packing": "documents"}}
        trained = [run.trained(f"{model}-{kind}", packed, max(1, round(steps * share)), shard)
                   for kind, (shard, share) in enumerate(shards)]  # fmt: skip
        models = [_model(one) for one in trained]
    elif model == "variants":
        trained = [run.trained(model, {"split": split}, steps)]
        models = [_model(trained[0], str(choice)) for choice in range(VARIANTS)]
    else:
        layers = LAYERS // 2 * (1 + VARIANTS) if model == "large" else LAYERS
        trained = [run.trained(model, {"model": {"layers": layers}}, steps)]
        models = [_model(trained[0])] * VARIANTS
    tests = {kind: test_rows(root / f"test-{kind}", texts[kind].test, first.tokenizer, CONTEXT) for kind in characters}
    return figures | {
        "losses": {kind: _losses(models, router, rows) for kind, rows in tests.items()},
        "bytes": _bytes(trained[0].swarm),
    }


@dataclass(frozen=True)
class _Trained:
    swarm: SimSwarm
    kept: RunDirectory
    steps: int


@dataclass(frozen=True)
class _Run:
    """What all runs of a case have in common."""

    root: Path
    documents: Sequence[str]
    seed: int

    def swarm(self, name: str, sections: Mapping[str, Any], steps: int = 1, hosts: int = 0, **more: Any) -> SimSwarm:
        """One with a trainer, and a host for each part or more. All peers keep the run in one directory."""
        (root := self.root / name).mkdir()
        hosts = hosts or sum(sections.get("split", {}).get("variants", (1, 1)))
        names = ("bootstrap", "trainer-0", *(f"host-{number}" for number in range(hosts)))
        fixed: dict[str, dict[str, Any]] = {
            "run": {
                "seed": self.seed,
                "copies": 0,
                "steps": steps,
                "start_when": {"stage_hosts": hosts, "trainers": 1},
            },
            "model": {"vocab_size": 300, "dim": 64, "layers": LAYERS, "heads": 2, "context": CONTEXT},
            "split": {"stages": 2},
            "batch": {"microbatch_size": ROWS, "microbatches_per_step": MICROBATCHES},
            "optimizer": {"lr": 3e-3, "warmup_steps": 10},
        }
        if "rebalance" in sections:
            fixed["run"]["copies"] = 2
        overrides = {key: fixed.get(key, {}) | sections.get(key, {}) for key in (*fixed, *sections)}
        sites = {one: {"run_directory": root / "kept", "checkpoint_every": steps} for one in names}
        return SimSwarm(root, hosts=hosts, trainers=1, documents=[self.documents], sites=sites, **overrides, **more)

    def trained(self, name: str, sections: Mapping[str, Any], steps: int, shard: Path | None = None) -> _Trained:
        """A run that is over; one with a ``shard`` of its own has rows of the others' text."""
        swarm = self.swarm(name, sections, steps)
        if shard is not None:
            swarm.shards = [shard]
        kept = RunDirectory(self.root / name / "kept")
        run_world(swarm.run(timeout_s=1e6))
        keep_run(kept, swarm.manifest, {"tokenizer.json": swarm.tokenizer})
        return _Trained(swarm, kept, steps)


def _first(documents: Sequence[str], most: int) -> list[str]:
    """Documents from the first on, of about so many characters."""
    found, size = list[str](), 0
    for one in documents:
        if size >= most:
            break
        found.append(one)
        size += min(len(one), LONGEST_DOCUMENT)
    return found


def _centres(tokenizer: bytes, documents: Sequence[str], seed: int) -> tuple[tuple[int, ...], ...]:
    """What a founder learns of a third of this text."""
    encoder = Tokenizer(tokenizer)
    pieces, _ = pieces_of((np.array(encoder.encode(one)) for one in documents[::3]), CONTEXT)
    return learn(Points(pieces, np.ones(len(pieces), np.int64)), VARIANTS, seed)


def _choices(router: Router, inputs: Whole) -> Whole:
    return router.choices(described(inputs))


def _rows_apart(first: SimSwarm, router: Router, root: Path) -> list[tuple[Path, float]]:
    """A shard of the rows of each kind, each row a document, and the share of all rows that it has."""
    rows = rows_of(Shard.open(first.shards[0]), CONTEXT)
    read = rows.read(list(range(rows.count)))
    choices, manifest, found = _choices(router, read.inputs), Shard.open(first.shards[0]).manifest, []
    for kind in range(len(router)):
        of = np.flatnonzero(choices == kind)
        tokens = np.concatenate([read.inputs[of], read.targets[of, -1:]], axis=1).astype(np.uint32)
        (path := root / f"kind-{kind}").mkdir()
        draft = ShardDraft(path, tokenizer=manifest.tokenizer, vocab_size=manifest.vocab_size)
        draft.add(Documents(tokens.ravel(), tuple(range(0, tokens.size, CONTEXT + 1)), None))
        draft.finish()
        found.append((path, len(of) / rows.count))
    return found


# --- measuring --------------------------------------------------------------------------------------------------------


def _model(trained: _Trained, path: str | None = None) -> LanguageModel:
    return load_checkpoint(trained.kept, trained.steps, path=path).model


def _losses(models: Sequence[LanguageModel], router: Router, rows: TextRows) -> tuple[float, float]:
    """Of whole rows, each routed by all of it as in training; and of second halves, routed by the first."""
    half, late = CONTEXT // 2, rows.targets.clone()
    late[:, :half] = -1
    found = []
    for seen, targets in ((rows.inputs, rows.targets), (rows.inputs[:, :half], late)):
        choices, nats, tokens = _choices(router, seen.numpy()), 0.0, 0
        for choice, model in enumerate(models):
            if len(of := np.flatnonzero(choices == choice)):
                loss, counted = model.evaluate(rows.inputs[of], targets[of])
                nats, tokens = nats + loss, tokens + counted
        found.append(nats / tokens)
    return found[0], found[1]


def _closed(swarm: SimSwarm) -> list[dict[str, Any]]:
    """The records of steps with microbatches."""
    return [record for record in swarm.history() if record["committed"]]


def _bytes(swarm: SimSwarm) -> float:
    """Sent by all for a microbatch."""
    sent = Counter[str]()
    for endpoint in (peer.endpoint for peer in swarm.peers.values()):
        if isinstance(endpoint, SimEndpoint):
            for method, by_peer in endpoint.meter.sent_by.items():
                sent[method] += sum(by_peer.values())
    carried = sum(size for method, size in sent.items() if method.startswith(PIPELINE))
    return carried / sum(len(record["committed"]) for record in _closed(swarm))


def _load(swarm: SimSwarm) -> dict[str, Any]:
    """A host that nobody asks counts too."""
    closed = _closed(swarm)
    late = closed[len(closed) // 2 :]
    done = Counter(one["route"][-1] for record in late for one in record["committed"])
    places = [{member["peer"]: member["part"] for member in record["roster"]} for record in late]
    hosts = {peer for place in places for peer, part in place.items() if variant_of(part or ENDS)[1] > 1}
    moved = sum(now[peer] != part for was, now in pairwise(places) for peer, part in was.items())
    kinds = Counter(one.get("choice", 0) for record in late for one in record["committed"])
    given = dict.fromkeys(kinds, 1)
    for _ in range(len(hosts) - len(kinds)):
        given[max(kinds, key=lambda kind: kinds[kind] / given[kind])] += 1
    mean = sum(done.values()) / len(hosts | done.keys())
    best = max(count / given[kind] for kind, count in kinds.items()) / mean
    return {"load": max(done.values()) / mean, "best": best, "moved": moved}
