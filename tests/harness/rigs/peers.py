"""The rig of ``peers``: what a machine keeps of a run, how its peers decided it, and what its commands print.

run = kept_run()
directory = run.keep(tmp_path, 10)  # whole, and really signed
assert swarm(["ckpt", "verify", str(directory.root)]) == 0
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from syrupy.extensions.amber import AmberSnapshotExtension

from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.checkpoints.writer import keep_run
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest, parse_manifest
from swarm.consensus.history import HistoryLine
from swarm.consensus.proof import Proof
from swarm.consensus.records import CloseRecord, Contribution, Decision, acceptance_bytes
from swarm.consensus.roster import Member, Roster
from swarm.events import Event, StepClosed
from swarm.ids import ENDS, MicrobatchId, PartName, PeerId, RunId, stage_part, variant_of
from swarm.membership.founding_record import Origin, founding_record, genesis
from swarm.models.registry import family_of
from swarm.monitoring.reader import Recorded, RecordedEvent
from swarm.security.signing import PrivateIdentity
from swarm.state.checkpoints.parts import write_manifest, write_part
from swarm.state.checkpoints.proof import manifest_with
from swarm.state.snapshot import Snapshot, digest
from tests.harness.rigs.clocks import FakeClock as FakeClock
from tests.harness.rigs.common import EventList as EventList
from tests.harness.rigs.common import InlineDevice as InlineDevice
from tests.harness.rigs.state import BrokenDisk as BrokenDisk
from tests.harness.rigs.state import PowerCut as PowerCut
from tests.harness.rigs.state import install as install
from tests.harness.settings import checked_settings as checked_settings
from tests.harness.settings import peer_settings as peer_settings

FAKE_PEER = "tests.harness.fake_peer:run"
"""The entry of peers that do one thing a peer may do, by their names."""
SLOW_IMPORT = "tests.harness.slow_import"
"""A module whose import takes longer than a test may take."""
START_S = 300.0
TEXT = "".join(f"Paragraph {n} says that {n} owls saw {n * 7 % 101} mice near the river.\n\n" for n in range(1500))
"""A text that is long enough to train a tokenizer and a small model on."""
HEAVY = ("torch", "hivemind", "transformers", "scipy", "uvloop", "tokenizers")
"""What no command may import before it is needed."""
LOADS = """
import contextlib, io, json, sys
from peers.cli.app import run

found = []
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(words)
    found.append([code, out.getvalue(), err.getvalue(), sorted(set(sys.modules))])
print(json.dumps(found))
"""


def loaded_after(*lines: str, cwd: Path) -> list[tuple[Said, set[str]]]:
    """Type these lines one after the other in a new process; each with the modules that are loaded once it is done."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
    ended = subprocess.run(
        [sys.executable, "-c", LOADS], input=json.dumps([line.split() for line in lines]), capture_output=True,
        text=True, timeout=300, cwd=cwd, env=os.environ | {"PYTHONPATH": path, "COLUMNS": "80"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = zip(lines, json.loads(ended.stdout), strict=True)
    return [(Said(line, code, out, err), set(modules)) for line, (code, out, err, modules) in found]


# --- what was decided -------------------------------------------------------------------------------------------------

RUN = RunId("5a" * 32)
"""The run of the decided chain."""
NAMES = ("otter", "mole", "heron", "tern", "vole")
KEYS = {name: PrivateIdentity(bytes([number]) * 32) for number, name in enumerate(NAMES, 1)}
PEERS = {name: key.peer for name, key in KEYS.items()}
TRAINER = PEERS["heron"]


def roster(*names: str) -> Roster:
    """Return the stage hosts, and the heron, which trains."""
    return Roster(
        Member(
            peer=PEERS[name],
            role="trainer" if name == "heron" else "stage",
            name=name,
            part=ENDS if name == "heron" else stage_part(0),
            addresses=(),
        )
        for name in names
    )


def signed(record: CloseRecord, signers: Collection[str], term: int = 0) -> HistoryLine:
    """Return a record that these accepted."""
    data = acceptance_bytes(record, term)
    return HistoryLine(record, {PEERS[name]: KEYS[name].sign(data) for name in signers}, term)


@dataclass(slots=True)
class DecidedChain:
    """Grows step by step; ``names`` take part in the next one."""

    names: tuple[str, ...] = ("otter", "mole", "heron")
    lines: list[HistoryLine] = field(default_factory=list)
    fed: int = 0

    @property
    def head(self) -> CloseRecord:
        """Return the newest record."""
        return self.lines[-1].record

    def found(self) -> DecidedChain:
        """Add the genesis."""
        self.lines.append(signed(genesis(RUN, roster(*self.names), {ENDS: "e" * 64}), self.names))
        return self

    def resume(self, record: CloseRecord) -> DecidedChain:
        """Add the record with which the run goes on after this one."""
        self.lines.append(signed(founding_record(RUN, roster(*self.names), Origin.after(record)), self.names))
        return self

    def close(
        self,
        *,
        after: tuple[str, ...] | None = None,
        term: int = 0,
        signers: Collection[str] | None = None,
        sign_term: int | None = None,
        **changes: Any,
    ) -> DecidedChain:
        """Add a step of two microbatches; ``after`` take part in the one that follows, ``changes`` are of the
        record."""
        before = self.names
        self.names = before if after is None else after
        committed = tuple(
            Contribution(
                microbatch=MicrobatchId(TRAINER, "c0" * 8, 0, self.fed + number),
                tokens=10 + number,
                loss_sum=1.1 * (self.fed + number + 1),
                route=(PEERS["otter"],),
            )
            for number in range(2)
        )
        self.fed += 2
        fields: Mapping[str, Any] = {
            "run": RUN,
            "step": self.head.step + 1,
            "term": term,
            "committed": committed,
            "tokens": 21,
            "loss_sum": math.fsum(one.loss_sum for one in committed),
            "grad_norm": 1.0,
            "clip": 1.0,
            "lr": 0.1,
            "digests": {ENDS: "e" * 64},
            "cursors": {TRAINER: (0, self.fed)},
            "roster": roster(*self.names).members,
            "previous": self.head.hash(),
        } | changes
        decided_in = term if sign_term is None else sign_term
        self.lines.append(signed(CloseRecord(**fields), before if signers is None else signers, decided_in))
        return self


def eventful() -> DecidedChain:
    """Return six steps: one joins, one is lost while a successor leads, one leaves, and a majority is always enough."""
    chain = DecidedChain().found().close().close(after=("otter", "mole", "heron", "tern", "vole"))
    chain.close(
        after=("otter", "heron", "tern", "vole"),
        absent=(PEERS["mole"],),
        term=1,
        sign_term=2,
        signers=("otter", "heron", "tern"),
    )
    return chain.close(after=("otter", "heron", "tern")).close(signers=("otter", "heron")).close()


def write(path: Path, lines: Sequence[HistoryLine], torn: bytes = b"") -> Path:
    """Write a history file and the directories it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line.encode() for line in lines) + torn)
    return path


# --- what is kept of it -----------------------------------------------------------------------------------------------

PARTS = (ENDS, stage_part(0), stage_part(1))
WORDS = "Some words, and some more words that make a tokenizer. " * 30


@dataclass(slots=True)
class KeptRun:
    """A run of 100 steps, its peers' keys, and what was decided so far; with what its model came with, if it did."""

    manifest: Manifest
    tokenizer: bytes
    keys: Sequence[PrivateIdentity]
    decisions: list[Decision] = field(default_factory=list)
    beside: Mapping[str, bytes] = field(default_factory=dict)
    model_files: Path | None = None

    @property
    def roster(self) -> Roster:
        """Return the members: two stage hosts and a trainer."""
        parts = dict(zip(self.keys, (stage_part(0), stage_part(1), ENDS), strict=True))
        return Roster(
            Member(
                peer=key.peer, role="trainer" if part == ENDS else "stage", name=f"peer-{part}", part=part, addresses=()
            )
            for key, part in parts.items()
        )

    @property
    def files(self) -> dict[str, bytes]:
        """Return those that travel with the manifest."""
        return {"tokenizer.json": self.tokenizer, **self.beside}

    def states(self, step: int, seed: int = 0) -> dict[PartName, Snapshot]:
        """Return every part after a step, made of some numbers."""
        model, found = self.manifest.model, {}
        for spec in family_of(model).parts(self.manifest.split):
            number = (seed or step) + variant_of(spec.name)[0]
            weights = family_of(model).initial_weights(seed=number, files=self.model_files)
            layout = family_of(model).layout(family_of(model).build(spec))
            params = layout.flatten(weights)
            found[spec.name] = Snapshot(
                part=spec.name, step=step, layout=layout, vectors=(params, params * 0.5, params * 0.25)
            )
        return found

    def decide(self, step: int, *, term: int = 0, seed: int = 0, ended: bool = False) -> Decision:
        """Decide, by everybody, the step after the newest decision; step 0 is the genesis."""
        digests = {part: digest(state) for part, state in self.states(step, seed).items()}
        record = genesis(self.manifest.run_id, self.roster, digests)
        if step:
            trainer = self.keys[2].peer
            microbatch = MicrobatchId(PeerId(trainer), "0" * 16, 0, step)
            route = (self.keys[0].peer, self.keys[1].peer)
            changes = {
                "step": step,
                "committed": (Contribution(microbatch=microbatch, tokens=8, loss_sum=1.25, route=route),),
                "tokens": 8,
                "loss_sum": 1.25,
                "cursors": {trainer: (0, step + 1)},
                "previous": self.decisions[-1].record.hash(),
                "ended": ended,
            }
            record = record.model_copy(update=changes)
        self.decisions.append(self.signed(record, term))
        return self.decisions[-1]

    def signed(self, record: CloseRecord, term: int = 0) -> Decision:
        """Return a record with everybody's acceptance."""
        data = acceptance_bytes(record, term)
        return Decision(record, {key.peer: key.sign(data) for key in self.keys}, term=term)

    def keep(self, root: Path, step: int, parts: Collection[PartName] = PARTS, *, seed: int = 0) -> RunDirectory:
        """Write these parts of a step, with its record and what proves it, below ``root``."""
        directory = RunDirectory(root)
        keep_run(directory, self.manifest, self.files)
        if not self.decisions:
            self.decide(0)
        known = next((one for one in self.decisions if one.record.step == step), None)
        if known is None or seed:
            if step > self.decisions[-1].record.step + 1:
                self.decide(step - 1)
            known = self.decide(step, seed=seed)
        before = next((one.record for one in self.decisions if one.record.hash() == known.record.previous), None)
        write_manifest(directory.checkpoints, manifest_with(Proof.of(known, before)))
        for part, state in self.states(step, seed).items():
            if part in parts:
                write_part(directory.checkpoints, state, {"run": self.manifest.run_id})
        return directory


@cache
def _tokenizer() -> bytes:
    return train_tokenizer([WORDS], 300)


def kept_run(*, name: str = "kept", nonce: str = "00000000deadbeef", **model: Any) -> KeptRun:
    """Return a run of which nothing is kept yet."""
    tokenizer = _tokenizer()
    manifest = parse_manifest(
        {
            "run": {"name": name, "nonce": nonce, "steps": 100, "start_when": {"stage_hosts": 2, "trainers": 1}},
            "model": {"vocab_size": 300, "dim": 32, "layers": 2, "heads": 2, "context": 16, **model},
            "split": {"stages": 2},
            "tokenizer": {"digest": tokenizer_digest(tokenizer)},
            "batch": {"microbatch_size": 2, "microbatches_per_step": 6},
        },
        "the test",
    )
    keys = [PrivateIdentity(bytes([number]) * 32) for number in (1, 2, 3)]
    return KeptRun(manifest, tokenizer, keys)


# --- what commands say ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """What a command printed, and how it ended."""

    words: str
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Return it as one sees it, for a snapshot."""
        return f"$ swarm {self.words}\n{self.out}{self.err}-> {self.code}"

    @property
    def complaint(self) -> str:
        """Return what it told on the error stream alone."""
        return f"$ swarm {self.words}\n{self.err}-> {self.code}"

    @property
    def json(self) -> dict[str, Any]:
        """Return what was printed, which is one line of JSON and nothing else."""
        assert self.out.count("\n") == 1
        return dict(json.loads(self.out))


Typed = Callable[..., Said]
"""Type words after ``swarm``, in this process."""

PLACES = (
    (r"[^\s'\"(=]*/pytest-of-[^/\s]+/pytest-\d+/(popen-gw\d+/)?[^/\s'\":,;)]+", "TMP"),
    (r"[^\s'\"(=]*/h-\w{8}\b", "HOME"),
    (r"[^\s'\"(=;]*bin/swarm\b|[^\s'\"(=;]*python[\d.]* -m peers\.cli", "swarm"),
    (r"[^\s'\"(=;]*/bin/python[\d.]*", "python"),
    (r"sessions/\d{8}-\d{6}-\w+", "sessions/SESSION"),
    (r"\btaken by \S+", "taken by PROGRAM"),
    (r"\bpid \d+", "pid PID"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?( (UTC|[A-Z]{3,4}|[+-]\d\d(:?\d\d)?)\b)?", "DATE"),
    (r"\b\d\d:\d\d:\d\d (UTC|[A-Z]{3,4}|[+-]\d\d(:?\d\d)?)(?=\W|$)", "TIME"),
)
"""What differs between machines and moments, and how it stands in snapshots."""


def everywhere(text: str) -> str:
    """Return a text as it is on every machine: without its paths, processes and times."""
    for pattern, name in PLACES:
        text = re.sub(pattern, name, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


class Wording(AmberSnapshotExtension):
    """Keeps texts as they are on every machine, a file for each test module."""

    def serialize(self, data: Any, **kwargs: Any) -> str:
        """See :meth:`everywhere`; several texts stand below each other."""
        lines = [data] if isinstance(data, str | Said) else data
        texts = [one.text if isinstance(one, Said) else str(one) for one in lines]
        return str(super().serialize(everywhere("\n".join(texts)), **kwargs))


# --- processes and what they tell -------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what a command has printed, which is one line of JSON and nothing else."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return dict(json.loads(out))


def gone(pid: int) -> bool:
    """Return whether no process runs under this number."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def told(event: Event, name: str = "a", wall: float = 0.0) -> RecordedEvent:
    """Return an event as it is read from a peer's file."""
    return RecordedEvent(name, Recorded(wall, wall, PeerId(f"peer{name.replace('-', '')}"), event))


def closed(step: int, name: str = "a", wall: float = 0.0, **changes: Any) -> RecordedEvent:
    """Return what a peer's file says of a closed step."""
    fields: dict[str, Any] = {
        "step": step, "loss": 5.0, "tokens": 100, "microbatches": 1, "grad_norm": 1.0, "clip": 1.0, "lr": 0.1,
        "digests": {"stage-0": "x"}, "leader": PeerId("L"), "record": "r", "seconds": 0.5,
    }  # fmt: skip
    return told(StepClosed(**(fields | changes)), name, wall)


def batch(position: int) -> MicrobatchId:
    """Return a microbatch of the only trainer."""
    return MicrobatchId(PeerId("t"), "s", 0, position)
