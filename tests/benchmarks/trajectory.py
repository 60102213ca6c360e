"""Whether a run ends with the same weights, bit for bit, when replicas are killed, and loses nothing when trainers are.

Runs of real processes with the same peers and data: one in peace, one whose stage hosts are killed with -9 in every
phase of their work, one whose trainers are, which are started again; the first two of these with Muon; all three
with steps that overlap, where who is killed dies with two steps open; and one in which hosts move to the stage whose
hosts are killed. Where hosts are killed the run admits by invite, and where trainers are killed those peers that its
issuer has named; in peace anybody: the trajectory is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from peers.chaos.invariants.check import Report, check_run
from peers.home.run_directory import RunDirectory
from peers.local.launch import PeerExit, PeerGroup
from peers.local.run import BOOTSTRAP, RunBroken, peer_names
from peers.manifest_file import write_manifest
from peers.settings import PeerSettings
from swarm.clock import SystemClock
from swarm.config import Manifest, RebalanceConfig, SpeedConfig, check_manifest
from swarm.consensus.admissions import AdmissionConfig
from swarm.models.gpt_config import GptConfig
from swarm.network.libp2p.identity import load_or_create
from swarm.optim.schedules import OptimizerConfig
from swarm.pipeline.batch import BatchConfig
from swarm.security.credentials import Grant, credential_for, sign_grant
from swarm.security.signing import PrivateIdentity
from tests.benchmarks._parity_run import Layout, Scale, build_data, local_run, make_manifest, reuse_identities
from tests.benchmarks.runner import Result, Size

LAYOUT = Layout(name="3 × 3", stages=3, replicas=3, ends="private")
SCALE = Scale(
    model=GptConfig(vocab_size=512, dim=64, layers=3, heads=4, context=64, dropout=0.1),
    batch=BatchConfig(microbatch_size=4, microbatches_per_step=12),
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=5, clip_norm=0.5),
    steps=40,
    characters=200_000,
)
HOST_FATES: Mapping[str, tuple[str, int]] = {
    "stage-0-1": ("queued", 30),
    "stage-1-1": ("forward", 50),
    "stage-2-1": ("backward", 70),
    "stage-0-2": ("retained", 90),
    "stage-1-2": ("mid-all-reduce", 24),
    "stage-2-2": ("averaged", 30),
}
"""Two of three replicas of every stage die, each in another phase, one after the other over the run."""

MUON_FATES: Mapping[str, tuple[str, int]] = {**HOST_FATES, "stage-1-1": ("weights", 50)}
"""In the run with Muon one dies that has handed gradients on and still owes those of the weights."""

OVERLAP_FATES: Mapping[str, tuple[str, int]] = {
    "stage-0-1": ("early forward", 8),
    "stage-1-1": ("early backward", 16),
    "stage-2-1": ("early retained", 24),
    "stage-0-2": ("early retained", 40),
    "stage-1-2": ("mid-all-reduce", 24),
    "stage-2-2": ("averaged", 30),
}
MOVE_FATES: Mapping[str, tuple[str, int]] = {
    "stage-1-1": ("forward", 30),
    "stage-1-2": ("retained", 60),
    "stage-2-1": ("mid-all-reduce", 24),
}
"""Two of three replicas of one stage die, so that hosts move there, and later one that may have moved."""

COPIES = 4
"""Of each part, where hosts move: enough of them are kept by hosts of other stages."""

TRAINER_FATES: Mapping[str, tuple[str, int]] = {"trainer-0": ("completing", 60), "trainer-1": ("averaged", 26)}
END_S = 300.0
FATES, FIRED = "fates.json", "fired.jsonl"
"""Beside the peers' homes: who dies where, and who did."""
MOVING, OVERLAP_TRAINERS = "moves, hosts killed", "overlap, trainers killed"
KEYS = (
    "max_abs_diff", "same_digests_in_every_step", "muon_max_abs_diff", "muon_same_digests_in_every_step",
    "overlap_max_abs_diff", "overlap_same_digests_in_every_step", "overlap_early",
    "moves_max_abs_diff", "moves_same_digests_in_every_step", "moves", "kills", "kills_with_two_steps_open",
    "lost", "duplicated", "digest_mismatches", "other_failures",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """What is played: a run in peace, and the same with ``hosts`` killed, and with ``trainers``; with Muon one in peace
    and one with ``muon`` killed; with overlap one in peace, one with ``overlap`` killed, one with ``overlap_trainers``,
    if any; and one with ``moves`` killed in which hosts move, in a layout of its own: a model of one stage has nowhere
    to move to. What nobody is killed in is not played, nor what it is compared with. Runs of ``short`` are those in
    which nobody has to come back or to move."""

    layout: Layout
    moving: Layout
    scale: Scale
    short: Scale
    hosts: Mapping[str, tuple[str, int]]
    trainers: Mapping[str, tuple[str, int]]
    muon: Mapping[str, tuple[str, int]]
    overlap: Mapping[str, tuple[str, int]]
    overlap_trainers: Mapping[str, tuple[str, int]]
    moves: Mapping[str, tuple[str, int]]


WHOLE = Play(
    layout=LAYOUT,
    moving=LAYOUT,
    scale=SCALE,
    short=SCALE,
    hosts=HOST_FATES,
    trainers=TRAINER_FATES,
    muon=MUON_FATES,
    overlap=OVERLAP_FATES,
    overlap_trainers=TRAINER_FATES,
    moves=MOVE_FATES,
)
_SMALL = replace(
    SCALE,
    model=GptConfig(vocab_size=300, dim=16, layers=2, heads=2, context=16, dropout=0.1),
    batch=BatchConfig(microbatch_size=2, microbatches_per_step=6),
    optimizer=SCALE.optimizer.model_copy(update={"name": "muon"}),
    steps=15,
    characters=20_000,
)
SMOKE = Play(
    layout=Layout(name="1 × 2", stages=1, replicas=2, ends="private"),
    moving=LAYOUT,
    scale=_SMALL,
    short=replace(_SMALL, steps=10),
    hosts={},
    trainers={"trainer-0": ("completing", 2)},
    muon={},
    overlap={"stage-0-1": ("early retained", 4)},
    overlap_trainers={},
    moves={},
)
"""With Muon and overlap at once; ``hf`` and ``lora`` kill hosts of runs in sync, and ``rebalance`` has hosts move. The
trainer dies in the first step, so that it is back before the last, and the host later: before, nobody is spared."""


def run(size: Size) -> Result:
    """How far the weights of a run with kills in every phase are from those of one without: bit for bit, 0.

    There is no fuller version. Not in a thread: the peers live as long as the one they are started from.
    """
    return measure(SMOKE if size is Size.SMOKE else WHOLE)


class StruckGroup(PeerGroup):
    """Peers of all runs, of which some kill themselves; trainers that did are started again, with what is on their
    disk. ``credentials`` and ``restarted`` are of the run that is played."""

    def __init__(self, log: Path) -> None:
        super().__init__(log, entry="tests.benchmarks._trajectory_peer:run")
        self.credentials: Mapping[str, str] = {}
        self._settings: dict[str, PeerSettings] = {}
        self.restarted: list[str] = []

    def start(self, settings: PeerSettings) -> None:
        """See :meth:`peers.local.launch.PeerGroup.start`."""
        settings = settings.model_copy(update={"credential": self.credentials.get(settings.name)})
        self._settings[settings.name] = settings
        super().start(settings)

    def poll(self, timeout_s: float) -> list[PeerExit]:
        """See :meth:`peers.local.launch.PeerGroup.poll`."""
        exits = super().poll(timeout_s)
        again = [one for one in exits if one.code == -9 and one.name.startswith("trainer")]
        for one in again:
            self.restarted.append(one.name)
            self.start(self._settings[one.name])
        return [one for one in exits if one not in again]


@dataclass(slots=True, kw_only=True)
class Trained:
    """One run: what was decided in each step, what the checkers say, and who was killed."""

    name: str
    root: Path
    digests: list[dict[str, str]]
    early: int
    """Microbatches that were computed with the parameters of one record before."""
    moves: int
    """Hosts that a record named at another stage than the one before."""
    report: Report
    fired: list[dict[str, Any]]
    seconds: float
    restarted: list[str] = field(default_factory=list)

    def row(self) -> list[Any]:
        """For the table."""
        kinds = [kind for kind in ("I1", "I2", "I5") if self.report.of(kind)]
        return [
            self.name,
            len(self.fired),
            self.moves,
            len(self.digests) - 1,
            ", ".join(kinds) or "none",
            round(self.seconds, 1),
        ]


def measure(play: Play) -> Result:
    """See :func:`run`."""
    with tempfile.TemporaryDirectory(prefix="trajectory-") as scratch, contextlib.ExitStack() as stack:
        root = Path(scratch)
        group = stack.enter_context(_opened(root / "fork.log"))
        data = build_data(root / "data", play.scale)
        muon = replace(play.short, optimizer=play.short.optimizer.model_copy(update={"name": "muon"}))
        runs: dict[str, Trained] = {}
        first: dict[Layout, RunDirectory] = {}
        sync, overlap, usual = SpeedConfig(), SpeedConfig(mode="overlap", early_share=0.5), play.layout
        still = "in peace" if play.moving == usual else "in peace, as where hosts move"
        beside: Mapping[str, tuple[str, str, Mapping[str, tuple[str, int]]]] = {
            "": ("in peace", "hosts killed", play.hosts),
            "muon_": ("muon in peace", "muon, hosts killed", play.muon),
            "overlap_": ("overlap in peace", "overlap, hosts killed", play.overlap),
            "moves_": (still, MOVING, play.moves),
        }
        compared = {name: (one, other) for name, (one, other, fates) in beside.items() if fates}
        in_peace = {one for one, _ in compared.values()}
        for name, layout, scale, speed, fates in (
            ("in peace", usual, play.short, sync, {}),
            ("hosts killed", usual, play.short, sync, play.hosts),
            ("trainers killed", usual, play.scale, sync, play.trainers),
            ("muon in peace", usual, muon, sync, {}),
            ("muon, hosts killed", usual, muon, sync, play.muon),
            ("overlap in peace", usual, play.short, overlap, {}),
            ("overlap, hosts killed", usual, play.short, overlap, play.overlap),
            (OVERLAP_TRAINERS, usual, play.scale, overlap, play.overlap_trainers),
            (still, play.moving, play.scale, sync, {}),
            (MOVING, play.moving, play.scale, sync, play.moves),
        ):
            if name in runs or not (fates or name in in_peace):
                continue
            made = make_manifest(layout, scale, data, reproducible=True)
            manifest = _moving(made) if name == MOVING else made.model_copy(update={"speed": speed})
            directory = RunDirectory(root / name.replace(" ", "-").replace(",", ""))
            data.copy_to(directory)
            if layout in first:
                reuse_identities(first[layout], directory, manifest)
            first.setdefault(layout, directory)
            if fates:
                manifest = _admitting(manifest, directory, "organisation" if "trainers" in name else "token")
            runs[name] = train(group, (name, directory, manifest), fates)
        if MOVING in runs and not runs[MOVING].moves:
            raise RunBroken(f"nobody moved in {len(runs[MOVING].digests) - 1} steps, {sorted(play.moves)} killed")
        same = {name: _compared(runs[one], runs[other]) for name, (one, other) in compared.items()}
    return to_result(play, runs, same)


def _moving(manifest: Manifest) -> Manifest:
    """The same run, but hosts move to where they are needed, and copies are kept for that."""
    kept = manifest.run.model_copy(update={"copies": COPIES})
    moving = manifest.model_copy(update={"run": kept, "rebalance": RebalanceConfig(mode="auto")})
    check_manifest(moving)
    return moving


def _admitting(manifest: Manifest, directory: RunDirectory, mode: Literal["token", "organisation"]) -> Manifest:
    """The same run, but its founder admits the peers."""
    issuer = load_or_create(directory.home(BOOTSTRAP) / "identity.key").peer
    return manifest.model_copy(update={"admission": AdmissionConfig(mode=mode, issuers=(str(issuer),))})


def _credentials(manifest: Manifest, directory: RunDirectory) -> dict[str, str]:
    """What admits each peer but the founder, where one must be admitted: with a one-time key, or by its id."""
    found: dict[str, str] = {}
    for name in peer_names(manifest)[1:] if manifest.admission.closed else ():
        issuer = load_or_create(directory.home(BOOTSTRAP) / "identity.key").private
        peer = load_or_create(directory.home(name) / "identity.key").peer
        seed = hashlib.sha256(name.encode()).digest() if manifest.admission.mode == "token" else None
        grant = Grant(
            run=manifest.run_id,
            serial=hashlib.sha256(name.encode()).hexdigest()[:16],
            name=name,
            role="stage" if name.startswith("stage") else "trainer",
            until_step=manifest.run.steps,
            key=peer if seed is None else PrivateIdentity(seed).peer,
        )
        found[name] = credential_for(sign_grant(grant, issuer), peer, seed).text()
    return found


def _compared(one: Trained, other: Trained) -> tuple[float, bool]:
    """How far the last weights of two runs are from each other, and whether every digest is the same."""
    return largest_difference(one.root, other.root), one.digests == other.digests


@contextlib.contextmanager
def _opened(log: Path) -> Iterator[StruckGroup]:
    """What starts the peers of all runs, forked from one process that has imported what they need."""
    group = StruckGroup(log)
    try:
        group.open()
        yield group
    finally:
        group.stop()


def train(group: StruckGroup, run: tuple[str, RunDirectory, Manifest], fates: Mapping[str, tuple[str, int]]) -> Trained:
    """One run to its end. Raises RunBroken when it does not get there."""
    name, directory, manifest = run
    write_manifest(manifest, directory.manifest)
    peers = directory.home(BOOTSTRAP).parent
    peers.mkdir(mode=0o700, parents=True, exist_ok=True)
    (peers / FATES).write_text(json.dumps(fates))
    fired, clock = peers / FIRED, SystemClock()
    began = clock.monotonic()
    group.credentials, group.restarted = _credentials(manifest, directory), []
    local_run(group, directory, manifest).train()
    until = clock.monotonic() + END_S
    while group.running:  # the next run's peers have the same names
        group.poll(0.1)
        if clock.monotonic() > until:
            raise RunBroken(f"{', '.join(group.running)} did not end after the last step")
    lines = fired.read_text().splitlines() if fired.exists() else []
    died = [json.loads(line) for line in lines]
    if {one["name"] for one in died} != set(fates):
        raise RunBroken(
            f"of {sorted(fates)} only {[one['name'] for one in died]} were killed: the rest never got there"
        )
    return Trained(
        name=name,
        root=directory.root,
        digests=[record["digests"] for record in decided(directory)],
        early=sum(bool(one.get("early")) for record in decided(directory) for one in record["committed"]),
        moves=_moves(decided(directory)),
        report=check_run([directory.root]),
        fired=died,
        seconds=clock.monotonic() - began,
        restarted=group.restarted,
    )


def _moves(records: Sequence[Mapping[str, Any]]) -> int:
    """How many members of two records, one after the other, hold another part in the latter."""
    parts = [{member["peer"]: member["part"] for member in record["roster"]} for record in records]
    return sum(
        part != before[peer] for before, after in pairwise(parts) for peer, part in after.items() if peer in before
    )


def decided(directory: RunDirectory) -> list[dict[str, Any]]:
    """The record of every step, as the bootstrap's history has it."""
    lines = (directory.home("bootstrap") / "history.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def largest_difference(one: Path, other: Path) -> float:
    """Between any two weights of the newest checkpoints of two runs."""
    from safetensors.torch import load_file

    newest = [max((root / "checkpoints").iterdir(), key=lambda step: step.name) for root in (one, other)]
    worst = 0.0
    for file in newest[0].glob("*.safetensors"):
        first, second = load_file(file), load_file(newest[1] / file.name)
        for tensor, values in first.items():
            worst = max(
                worst, float((values.double() - second[tensor].double()).abs().max()) if values.numel() else 0.0
            )
    return worst


def to_result(play: Play, runs: Mapping[str, Trained], same: Mapping[str, tuple[float, bool]]) -> Result:
    """The table and the figures asked for."""
    reports = [trained.report for trained in runs.values()]
    summary = {
        **dict.fromkeys(KEYS),
        **{f"{name}max_abs_diff": difference for name, (difference, _) in same.items()},
        **{f"{name}same_digests_in_every_step": equal for name, (_, equal) in same.items()},
        "overlap_early": runs["overlap in peace"].early,
        "moves": runs[MOVING].moves if MOVING in runs else None,
        "kills": sum(len(trained.fired) for trained in runs.values()),
        "kills_with_two_steps_open": sum(one["early"] for trained in runs.values() for one in trained.fired),
        "lost": sum(len(report.of("I2")) for report in reports),
        "duplicated": sum(len(report.of("I1")) for report in reports),
        "digest_mismatches": sum(len(report.of("I5")) for report in reports),
        "other_failures": sorted({str(f)[:200] for report in reports for f in report.failures})[:5],
    }
    notes = [
        f"{play.layout.name} stage hosts, 2 trainers, {play.scale.steps} steps, reproducible, dropout on",
        "killed: " + ", ".join(f"{one['name']} ({one['phase']})" for t in runs.values() for one in t.fired),
        "trainers that were killed are started again: "
        + ", ".join(again for t in runs.values() for again in t.restarted),
        "where trainers are killed weights differ from those in peace: who feeds a step depends on which are there",
        "gradients of weights are deferred, as by default, but with overlap; there half of each step may be early",
        "where hosts are killed the run admits by invite, where trainers are those whom its issuer names; else anybody",
        f"moves: {play.moving.name} stage hosts, {COPIES} copies of each part, beside a run without moves or copies",
    ]
    columns = ["run", "kills", "moves", "steps", "broken invariants", "seconds"]
    return Result(columns=columns, rows=[trained.row() for trained in runs.values()], summary=summary, notes=notes)
