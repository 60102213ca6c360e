"""A chain of close records, really signed, as the peers of a small run would have decided it; and as none would."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swarm.consensus.history import HistoryLine
from swarm.consensus.records import CloseRecord, Contribution, acceptance_bytes
from swarm.consensus.roster import Member, Roster
from swarm.ids import ENDS, MicrobatchId, RunId, stage_part
from swarm.membership.founding_record import Origin, founding_record, genesis
from swarm.security.signing import PrivateIdentity

RUN = RunId("5a" * 32)
NAMES = ("otter", "mole", "heron", "tern", "vole")
KEYS = {name: PrivateIdentity(bytes([number]) * 32) for number, name in enumerate(NAMES, 1)}
PEERS = {name: key.peer for name, key in KEYS.items()}
TRAINER = PEERS["heron"]


def roster(*names: str) -> Roster:
    """Stage hosts, and the heron, which trains."""
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
    """A record, accepted by these."""
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
        """The newest record."""
        return self.lines[-1].record

    def found(self) -> DecidedChain:
        """The genesis."""
        self.lines.append(signed(genesis(RUN, roster(*self.names), {ENDS: "e" * 64}), self.names))
        return self

    def resume(self, record: CloseRecord) -> DecidedChain:
        """The record with which the run goes on after this one."""
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
        """One more step of two microbatches; ``after`` take part in the one that follows, ``changes`` are of the
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
    """Six steps: a peer joins, one is lost while a successor leads, one leaves, and a majority is enough throughout."""
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
    """A history file, made with the directories it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line.encode() for line in lines) + torn)
    return path


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a command has printed: one line of JSON and nothing else."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return dict(json.loads(out))
