"""What replicas sign under their results, and whether signatures bear a record out. Pure.

Replicas sign what they answer, together with all from which they computed it. So who holds no result of a part can tell
a record that its replicas computed from one that somebody made up, in whichever term it is shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swarm.consensus.acceptor import RecordEvidence
from swarm.consensus.records import CloseRecord, Contribution, by_trainer, rows_bytes
from swarm.consensus.roster import Roster
from swarm.ids import PeerId, RunId
from swarm.security.signing import Verify
from swarm.step.decisions import ATTEMPTS_PER_TERM
from swarm.step.messages import Apply, Reconcile

What = Literal["gradient", "weights"]


@dataclass(frozen=True, slots=True)
class ResultSigning:
    """What is signed under a result of the step after the record whose hash is ``previous``."""

    run: RunId
    step: int
    previous: str

    def data(self, part: str, attempt: int, what: What, asked: str, digest: str) -> bytes:
        """Return the bytes that a replica signs; ``asked`` is the hash of what it computed the result from, as far as
        the leader said it (:meth:`Asked.inputs`)."""
        return f"result|{self.run}|{self.step}|{self.previous}|{part}|{attempt}|{what}|{asked}|{digest}".encode()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a leader asked in one attempt. Whom it asked for different things may answer different things."""

    reconcile: Reconcile
    apply: Apply | None = None

    @property
    def attempts(self) -> Mapping[str, int]:
        """The number of each part's attempt."""
        return self.reconcile.attempts

    def inputs(self, what: What) -> str:
        """Return the hash of all on which the results depend."""
        said, apply = self.reconcile, self.apply if what == "weights" else None
        scalars = None if apply is None else _scalars(apply, apply.sq_norms)
        return _inputs(said.committed, said.live, said.provisional, scalars)

    def unsigned(
        self, signing: ResultSigning, what: What, part: str, said: Mapping[PeerId, tuple[str, bytes]], verify: Verify
    ) -> list[PeerId]:
        """Return those that did not sign what they said of a part: by peer the digest and the signature."""
        attempt, inputs = self.attempts[part], self.inputs(what)
        return [
            peer
            for peer, (digest, signature) in said.items()
            if not verify(peer, signing.data(part, attempt, what, inputs, digest), signature)
        ]


def _scalars(said: Apply | CloseRecord, sq_norms: Mapping[str, float]) -> list[Any]:
    left_out = {by: sorted(sums.items()) for by, sums in sorted(said.guarded.items())}
    more = [left_out, sorted(said.lengths.items())] if said.guarded or said.lengths else []
    tested = [sorted(said.words.items())] if said.words else []
    return [said.lr, said.clip, sorted(sq_norms.items()), *more, *tested]


def _inputs(
    committed: Sequence[Contribution], live: Sequence[str], provisional: bool, scalars: list[Any] | None
) -> str:
    asked = [[one.model_dump(mode="json") for one in committed], live, provisional, scalars]
    return hashlib.sha256(json.dumps(asked, separators=(",", ":")).encode()).hexdigest()


def record_inputs(roster: Roster, record: CloseRecord) -> str:
    """Return the hash of all on which the digests of a record depend, as replicas have signed it."""
    live = [peer for peer in roster.peers if peer not in record.absent and peer not in record.late]
    return _inputs(record.committed, live, record.forks, _scalars(record, record.norms))


def unproven(roster: Roster, record: CloseRecord, evidence: RecordEvidence, verify: Verify) -> str:
    """Say what of a record that has results is not signed by those who can know it; "" where all is.

    Each trainer that is there must have signed its rows: one that is absent cannot. Of each part more than half of the
    replicas with which the step was closed must have signed the record's digest of it, as the result of the record's
    own term, and of exactly its microbatches, routes, members and scalars. Nothing here depends on who looks, or when:
    what one member accepted no other finds wanting. Cost: a signature for each trainer and every other replica.
    """
    for trainer, rows in by_trainer(record.committed).items():
        signed = rows_bytes(record.run, record.step, record.previous, rows, record.absent)
        if trainer not in record.absent and not verify(trainer, signed, evidence.rows.get(trainer, b"")):
            return f"the rows of {trainer} are not what it reported"
    inputs, out = record_inputs(roster, record), {*record.absent, *record.late}
    signing = ResultSigning(RunId(record.run), record.step, record.previous)
    for part in roster.parts:
        attempt, replicas = evidence.attempts.get(part, 0), [one for one in roster.replicas(part) if one not in out]
        signed = signing.data(part, attempt, "weights", inputs, record.told_of(part))
        if attempt // ATTEMPTS_PER_TERM != record.term or not _more_than_half(replicas, signed, evidence, verify):
            return f"more than half of the replicas of {part} have not signed that they computed this record"
    return ""


def _more_than_half(replicas: Sequence[PeerId], signed: bytes, evidence: RecordEvidence, verify: Verify) -> bool:
    missing = len(replicas) // 2 + 1
    for peer in replicas:
        missing -= peer in evidence.results and verify(peer, signed, evidence.results[peer])
        if not missing:
            return True
    return False


def evidence_of(asked: Reconcile, rows: Mapping[PeerId, bytes], results: Mapping[PeerId, bytes]) -> RecordEvidence:
    """Return what bears out the record of an attempt; b"" is no signature."""
    return RecordEvidence(
        rows={peer: signed for peer, signed in rows.items() if signed},
        results={peer: signed for peer, signed in results.items() if signed},
        attempts=dict(asked.attempts),
    )
