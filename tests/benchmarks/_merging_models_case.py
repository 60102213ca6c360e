"""One seed of the benchmark ``merging-models``: a base, two sites that go on from it apart, one run that goes on with
both texts, and what ``swarm merge`` makes of the sites."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from data_shards.build import build_shard
from peers.checkpoints.choose_checkpoint import choose_step
from peers.checkpoints.named import BASE, named_step, weighted_steps
from peers.checkpoints.recut import recut_run
from peers.checkpoints.resume import find_resumable
from peers.checkpoints.writer import keep_run
from peers.commands.export import export
from peers.commands.exported import load_exported
from peers.commands.merge import Merging, calibrate, merge, merging_of
from peers.home.run_directory import RunDirectory
from peers.simulate.sim_swarm import SimSwarm
from swarm.models.layout import install_weights
from swarm.models.merging import STEPS, TextRows, weighed
from swarm.models.registry import family_of
from swarm.sim.loop import run_world
from swarm.state.checkpoints.files import step_directory
from swarm.state.checkpoints.parts import load_weights
from tests.benchmarks._texts import test_rows, texts_of

KINDS = ("code", "tables")
"""What each site has; the base has prose, and a little code."""
CONTEXT = 64
FINE_RATE = 1e-3


def play(root: Path, *, seed: int, steps: Sequence[int], preferences: Sequence[float]) -> dict[str, Any]:
    """Train, merge and measure.

    Args:
        root: An empty directory.
        seed: Of text, runs and their links.
        steps: Of the base, and of each run that goes on from it.
        preferences: Of the site with code; the rest is for that with tables.

    Returns:
        ``losses`` in nats a token by kind of text, by model (with a preference where it has one), and ``unit_equal``.
    """
    before, after = steps
    texts = texts_of(random.Random(seed))
    prose = texts["prose"].train + texts["code"].train[: len(texts["code"].train) // 8]
    base = _trained(root, "base", [prose], seed, before)
    runs = {kind: _goes_on(root, base, kind, [texts[kind].train], seed, steps) for kind in KINDS}
    runs["joint"] = _goes_on(root, base, "joint", [texts[kind].train for kind in KINDS], seed, steps)
    tokenizer = base.tokenizer.read_bytes()
    test = [test_rows(root / f"test-{kind}", texts[kind].test, tokenizer, CONTEXT) for kind in KINDS]
    losses: dict[str, list[float]] = {}

    def measure(name: str, directory: Path) -> None:
        model = load_exported(directory).model
        found = (model.evaluate(rows.inputs, rows.targets) for rows in test)
        losses[name] = [total / count for total, count in found]

    for name, run in {"base": base, **runs}.items():
        export(choose_step(run, before if name == "base" else sum(steps)), root / name / "model", "float32", _quiet)
        measure(name, root / name / "model")
    for kind in KINDS:
        (root / f"{kind}.txt").write_text("\n\n".join(texts[kind].calibrate))
    files = [root / f"{kind}.txt" for kind in KINDS]
    for preference in preferences:
        merging = _merging(base, runs, before, preference, files)
        merge(merging, None, root / f"linear-{preference}", "float32", _quiet)
        measure(f"linear {preference}", root / f"linear-{preference}")
        learnt = calibrate(merging, torch.device("cpu"), lambda *_: None)
        merge(merging, learnt, root / f"learnt-{preference}", "float32", _quiet)
        measure(f"learnt {preference}", root / f"learnt-{preference}")
        rows = [
            test_rows(root / f"fine-{kind}-{preference}", texts[kind].calibrate, tokenizer, CONTEXT) for kind in KINDS
        ]
        losses[f"trained {preference}"] = _trained_on(merging, rows, test)
    equal = [_equal(base, runs, before, kind, root) for kind in KINDS]
    return {"seed": seed, "losses": losses, "unit_equal": all(equal)}


def _quiet(line: str) -> None:
    pass


def _merging(
    base: RunDirectory, runs: Mapping[str, RunDirectory], before: int, preference: float, files: Sequence[Path]
) -> Merging:
    weights = (preference, 1 - preference)
    sites = [f"{runs[kind].root}={weight}" for kind, weight in zip(KINDS, weights, strict=True)]
    return merging_of(named_step(f"{base.root}@{before}", BASE, None), weighted_steps(sites, None), files)


def _equal(base: RunDirectory, runs: Mapping[str, RunDirectory], before: int, kind: str, root: Path) -> bool:
    """Whether all the weight for a site gives the bits of its own export."""
    into = root / f"unit-{kind}"
    merge(_merging(base, runs, before, float(kind == KINDS[0]), ()), None, into, "float32", _quiet)
    found, expected = (
        {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}
        for path in (into, root / kind / "model")
    )
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.int32), one.view(torch.int32)) for name, one in expected.items()
    )


def _trained_on(merging: Merging, rows: Sequence[TextRows], test: Sequence[TextRows]) -> list[float]:
    """Losses of the linear merge after as many steps on the calibration text as shares are learnt in, of all weights:
    what else one could do with that text."""
    family = family_of(merging.base.manifest.model)
    models = [load_weights(one.directory.checkpoints, one.step) for one in merging.models]
    model, chance = family.build(family.whole), torch.Generator().manual_seed(0)
    install_weights(model, weighed(models, merging.linear()), requires_grad=True)
    adam = torch.optim.Adam(model.parameters(), FINE_RATE)
    for step in range(STEPS):
        adam.zero_grad()
        for site, text in zip(merging.sites, rows, strict=True):
            some = text.take(torch.randint(len(text.inputs), (1024 // CONTEXT,), generator=chance))
            (site.weight * some.loss(model)).backward()  # type: ignore[no-untyped-call]
        adam.param_groups[0]["lr"] = FINE_RATE * (1 - step / STEPS)
        adam.step()
    with torch.no_grad():
        return [text.loss(model).item() for text in test]


# --- runs -------------------------------------------------------------------------------------------------------------


def _trained(root: Path, name: str, texts: Sequence[list[str]], seed: int, steps: int) -> RunDirectory:
    """A run of two stages; it ends a step later, so that others can go on from this one."""
    kept = RunDirectory(root / name / "kept")
    swarm = _swarm(root / name, kept, texts, seed, run={"steps": steps + 1}, every=steps)
    run_world(swarm.run(timeout_s=1e6))
    keep_run(kept, swarm.manifest, {"tokenizer.json": swarm.tokenizer})
    return kept


def _goes_on(
    root: Path, base: RunDirectory, name: str, texts: Sequence[list[str]], seed: int, steps: Sequence[int]
) -> RunDirectory:
    """A run of one stage that goes on from the base. One with several trainers feeds as much of each text as a run with
    that alone."""
    before, after = steps
    found = find_resumable(step_directory(base.checkpoints, before), root / name)
    changes = {
        "split.stages": 1,
        "run.name": name,
        "run.steps": before + after,
        "run.start_when.stage_hosts": 1,
        "run.start_when.trainers": len(texts),
        "batch.microbatches_per_step": len(texts) * found.manifest.batch.microbatches_per_step,
    }
    recut = recut_run(found, changes, root / name).resumable
    swarm = _swarm(root / name, recut.directory, texts, seed, split={"stages": 1}, resume=before)
    swarm.manifest = recut.manifest
    for shard, documents in zip(swarm.shards, texts, strict=True):
        shutil.rmtree(shard)
        build_shard(shard, documents, base.tokenizer.read_bytes())
    run_world(swarm.run(timeout_s=1e6))
    return recut.directory


def _swarm(
    root: Path,
    kept: RunDirectory,
    texts: Sequence[list[str]],
    seed: int,
    *,
    every: int = 1000,
    resume: int | None = None,
    **sections: Any,
) -> SimSwarm:
    """All its peers keep the run in one directory."""
    root.mkdir(exist_ok=True)
    hosts = sections.get("split", {}).get("stages", 2)
    names = [*(f"trainer-{number}" for number in range(len(texts))), *(f"host-{number}" for number in range(hosts))]
    sites = {name: {"run_directory": kept.root, "checkpoint_every": every} for name in ("bootstrap", *names)}
    if resume is not None:
        sites["bootstrap"]["resume"] = resume
    fixed: dict[str, dict[str, Any]] = {
        "run": {"seed": seed, "copies": 0, "start_when": {"stage_hosts": hosts, "trainers": len(texts)}},
        "model": {"vocab_size": 300, "dim": 64, "layers": 4, "heads": 2, "context": CONTEXT},
        "split": {"stages": hosts},
        "batch": {"microbatch_size": 8, "microbatches_per_step": 4},
        "optimizer": {"lr": 3e-3, "warmup_steps": 10},
    }
    fixed["run"] |= sections.get("run", {})
    return SimSwarm(root, hosts=hosts, trainers=len(texts), documents=texts, sites=sites, **fixed)
