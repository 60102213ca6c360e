"""Real swarms of processes, and what they decided.

A run goes through what ``swarm quickstart`` goes through (:class:`peers.local.run.LocalRun`), with a model, text and
layout of our choice. No torch in here: the processes that train bring their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_shards.build import build_shard, split_documents
from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.data.text import built_in_corpus
from peers.home.run_directory import RunDirectory
from peers.local.launch import PeerGroup
from peers.local.progress import RunView
from peers.local.run import BOOTSTRAP, LocalRun, peer_names
from swarm.clock import SystemClock
from swarm.config import Manifest, RunConfig, StartWhen, TokenizerConfig, check_manifest, load_manifest
from swarm.consensus.history import History, HistoryReader
from swarm.consensus.records import CloseRecord
from swarm.models.registry import AnyModel
from swarm.models.spec import SplitConfig
from swarm.monitoring.reader import EventTail
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig

TRAINERS = 2


class Incoherent(AssertionError):
    """A swarm's own account of its run contradicts itself, so there is nothing to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is spread: ``stages`` × ``replicas`` stage hosts, and :data:`TRAINERS` trainers."""

    name: str
    stages: int
    replicas: int
    ends: Literal["private", "hosted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is. ``characters`` of text are dealt to the trainers; None is all there is."""

    model: AnyModel
    batch: BatchConfig
    optimizer: OptimizerConfig
    steps: int
    characters: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A tokenizer and one private shard per trainer on disk, which all runs of one measurement share."""

    root: Path
    tokenizer: str

    def copy_to(self, directory: RunDirectory) -> None:
        """Give a run its own copy: peers own what they read."""
        shutil.copytree(self.root, directory.root, dirs_exist_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A run that closed its last step: where it lies, and what was decided (``records``, the genesis first)."""

    manifest: Manifest
    directory: RunDirectory
    records: tuple[CloseRecord, ...]

    @staticmethod
    def linked(root: Path, manifest: Manifest, records: tuple[CloseRecord, ...], shards: Sequence[Path]) -> TrainedRun:
        """Return a run whose trainers' ``shards`` lie elsewhere, as a replay reads it: linked below ``root``."""
        directory = RunDirectory(root)
        for number, shard in enumerate(shards):
            directory.shard(number).parent.mkdir(parents=True, exist_ok=True)
            directory.shard(number).symlink_to(shard)
        return TrainedRun(manifest=manifest, directory=directory, records=records)

    @staticmethod
    def in_home(home: Path, root: Path, trainers: int) -> TrainedRun:
        """Return the one run in a home whose trainers had the places ``t0``, ``t1`` …, by the longest history there:
        :meth:`linked`."""
        records = read_history(max(home.rglob("history.jsonl"), key=lambda path: path.stat().st_size))
        there, shards = list(home.rglob("shard")), list[Path]()
        for number in range(trainers):
            (shard,) = (path for path in there if f"t{number}" in path.parts)
            shards.append(shard)
        return TrainedRun.linked(root, load_manifest(next(home.rglob("run.toml"))), records, shards)


def build_data(root: Path, scale: Scale) -> Data:
    """Train a tokenizer on the built-in text and cut that into shards. Costs a second or two."""
    documents = _first(built_in_corpus().documents, scale.characters)
    tokenizer_json = train_tokenizer(documents, scale.model.vocab_size)
    directory = RunDirectory(root)
    root.mkdir()
    directory.tokenizer.write_bytes(tokenizer_json)
    for trainer, texts in enumerate(split_documents(documents, TRAINERS, 0.0, seed=0).shards):
        build_shard(directory.shard(trainer), texts, tokenizer_json)
    return Data(root=root, tokenizer=tokenizer_digest(tokenizer_json))


def make_manifest(layout: Layout, scale: Scale, data: Data, *, reproducible: bool) -> Manifest:
    """The run's manifest: ``sync``, dense float32 on the wire, the project's defaults for the rest."""
    manifest = Manifest(
        run=RunConfig(
            name="parity",
            steps=scale.steps,
            reproducible=reproducible,
            start_when=StartWhen(stage_hosts=layout.stages * layout.replicas, trainers=TRAINERS),
            copies=0,
        ),
        model=scale.model,
        split=SplitConfig(stages=layout.stages, ends=layout.ends),
        tokenizer=TokenizerConfig(digest=data.tokenizer),
        batch=scale.batch,
        optimizer=scale.optimizer,
    )
    check_manifest(manifest)
    return manifest


def local_run(group: PeerGroup, directory: RunDirectory, manifest: Manifest, files: Path | None = None) -> LocalRun:
    """What ``swarm quickstart`` trains with, without its table."""
    return LocalRun(
        manifest=manifest,
        model_files=files,
        directory=directory,
        device="cpu",
        group=group,
        tail=EventTail({name: directory.events(name) for name in peer_names(manifest)}),
        view=RunView(),
        clock=SystemClock(),
        on_change=lambda: None,
    )


def read_records(directory: RunDirectory, manifest: Manifest, dead: Collection[str] = ()) -> tuple[CloseRecord, ...]:
    """The close records of a finished run, genesis first.

    Raises Incoherent unless every peer that is not ``dead`` decided the very same chain, every step is full, and no
    microbatch counts twice.
    """
    files = {path.parent.name: path for path in directory.root.glob("peers/*/history.jsonl")}
    chains = {name: read_history(path) for name, path in files.items() if name not in dead}
    records = chains[BOOTSTRAP]
    expected = {member.name for member in records[0].roster} - set(dead)
    if set(chains) != expected:
        raise Incoherent(f"histories of {sorted(chains)} where {sorted(expected)} took part")
    heads = {name: chain[-1].hash() for name, chain in chains.items()}
    if len(set(heads.values())) != 1:
        raise Incoherent(f"peers decided different histories: {heads}")
    sizes = [len(record.committed) for record in records[1:]]
    if sizes != [manifest.batch.microbatches_per_step] * manifest.run.steps:
        raise Incoherent(f"{len(sizes)} steps with {sizes} microbatches")
    committed = [contribution.microbatch for record in records for contribution in record.committed]
    if len(set(committed)) != len(committed):
        raise Incoherent("a microbatch was committed twice")
    return records


def read_history(path: Path) -> tuple[CloseRecord, ...]:
    """One peer's chain of close records, verified link by link. Raises OutOfSync where it breaks."""
    chain = History()
    records = []
    for line in HistoryReader(path):
        chain.append(line.record)
        records.append(line.record)
    return tuple(records)


def reuse_identities(old: RunDirectory, new: RunDirectory, manifest: Manifest) -> None:
    """Give the peers of a new run the keys of an old one's."""
    for name in peer_names(manifest):
        new.home(name).mkdir(mode=0o700, parents=True)
        shutil.copy2(old.home(name) / "identity.key", new.home(name) / "identity.key")


def _first(documents: Sequence[str], characters: int | None) -> list[str]:
    """Documents up to so many characters, the last one cut."""
    if characters is None:
        return list(documents)
    chosen: list[str] = []
    left = characters
    for document in documents:
        if left <= 0:
            break
        chosen.append(document[:left])
        left -= len(document)
    return chosen
