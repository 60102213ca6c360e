"""One case of the benchmark ``delink``: a run from scratch, or one whose stages share their layers for some steps; and
what parting changes, beside a run that goes on sharing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from data_shards.build import build_shard
from data_shards.documents import rows_of
from data_shards.shard import Shard
from peers.checkpoints.writer import keep_run
from peers.commands.evaluate import load_checkpoint
from peers.data.text import built_in_corpus
from peers.home.run_directory import RunDirectory
from peers.simulate.sim_swarm import SimSwarm
from swarm.columns import becomes
from swarm.ids import shared_part
from swarm.sim.loop import run_world
from swarm.state.checkpoints.files import read_manifest
from swarm.state.checkpoints.parts import load_part

STAGES, HOSTS, TRAINERS = 2, 3, 2
CONTEXT, TEST_ROWS = 64, 256


def play(root: Path, *, seed: int, steps: int, at: int) -> dict[str, Any]:
    """Train and measure.

    Args:
        root: An empty directory.
        seed: Of text, run and links.
        steps: Of the run.
        at: The step with whose close stages part; 0: they never shared anything.

    Returns:
        ``loss`` in nats a token on text that the run has not seen; where stages shared, ``difference``: the largest of
        any number of any stage's state from that of a run which goes on sharing, right after they have parted.
    """
    texts, held_out = texts_of(seed, TRAINERS)
    model = {"share": "stages", "delink_at": at} if at else {}
    run = trained(root / "run", texts, seed, steps, model=model)
    found: dict[str, Any] = {"seed": seed, "at": at, "loss": loss_of(run, steps, held_out, root / "test")}
    if at:
        parted = trained(root / "parted", texts, seed, at + 1, at, model=model)
        shared = trained(root / "shared", texts, seed, at + 1, at, model={"share": "stages"})
        found["difference"] = _difference(parted, shared, at)
    return found


def _difference(parted: RunDirectory, shared: RunDirectory, step: int) -> float:
    together = shared_part(STAGES)
    (one,) = _states(shared, step, (together,))
    stages = _states(parted, step, becomes(together))
    pairs = (pair for stage in stages for pair in zip(stage, one, strict=True))
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def _states(run: RunDirectory, step: int, parts: tuple[Any, ...]) -> list[tuple[torch.Tensor, ...]]:
    said = read_manifest(run.checkpoints, step).parts
    return [load_part(run.checkpoints, step, part, expected_digest=said[part]).vectors for part in parts]


def texts_of(seed: int, trainers: int) -> tuple[list[list[str]], list[str]]:
    """Return each trainer's documents, and those that none learns from."""
    documents = list(built_in_corpus().documents)
    random.Random(seed).shuffle(documents)
    held_out = documents[: len(documents) // 10]
    return [documents[len(held_out) + number :: trainers] for number in range(trainers)], held_out


def trained(
    root: Path, texts: list[list[str]], seed: int, steps: int, every: int = 0, **sections: dict[str, Any]
) -> RunDirectory:
    """A run of which every peer keeps its part, each so many steps, in one directory; ``sections`` of its manifest are
    beside what all have."""
    kept = RunDirectory(root / "kept")
    root.mkdir()
    names = ("bootstrap", *(f"trainer-{n}" for n in range(len(texts))), *(f"host-{n}" for n in range(HOSTS)))
    model = {"vocab_size": 300, "dim": 64, "layers": 4, "heads": 2, "context": CONTEXT, **sections.get("model", {})}
    swarm = SimSwarm(
        root,
        hosts=HOSTS,
        trainers=len(texts),
        documents=texts,
        sites={name: {"run_directory": kept.root, "checkpoint_every": every or steps} for name in names},
        run={"seed": seed, "steps": steps, "copies": 0, "reproducible": True},
        model=model,
        split={"stages": STAGES},
        batch={"microbatch_size": 8, "microbatches_per_step": 4},
        optimizer={"lr": 3e-3, "warmup_steps": 10, **sections.get("optimizer", {})},
    )
    run_world(swarm.run(timeout_s=1e6))
    keep_run(kept, swarm.manifest, {"tokenizer.json": swarm.tokenizer})
    return kept


def loss_of(run: RunDirectory, step: int, held_out: list[str], at: Path) -> float:
    """Return the nats a token of a checkpoint on text that no trainer had."""
    model = load_checkpoint(run, step)
    build_shard(at, held_out, run.tokenizer.read_bytes())
    rows = rows_of(Shard.open(at), CONTEXT)
    read = rows.read(torch.linspace(0, rows.count - 1, min(rows.count, TEST_ROWS)).long().tolist())
    total, tokens = model.model.evaluate(torch.from_numpy(read.inputs), torch.from_numpy(read.targets))
    return float(total / tokens)
