"""The close record of a checkpoint's step with what proves it: who accepted it, and the record that named who may.

It lies in the ``detail`` of ``record.json``. What it proves: more than half of those whom the record before named have
accepted this one. Whether that chain is the run's own is another matter, which the peers of the run know. :func:`stray`
names the checkpoints that are not of a history.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from swarm.consensus.records import MAX_VOTERS, CloseRecord, Decision, acceptance_bytes, check_acceptances
from swarm.consensus.roster import Roster
from swarm.errors import Refused, StateError
from swarm.ids import PartName, RunId
from swarm.schema import Count, Message, PeerIdField
from swarm.security.signing import verify
from swarm.state.checkpoints.files import CheckpointManifest, HeldStep

Standing = Literal["decided", "unproven"]
_Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]


class Proof(Message):
    """A record, the signatures of those who accepted it in ``term``, and the record before it (None for a founding
    record, and where it is not known)."""

    record: CloseRecord
    term: Count = 0
    acceptances: Annotated[dict[PeerIdField, _Signature], Field(max_length=20_000)] = {}
    before: CloseRecord | None = None

    @staticmethod
    def of(decision: Decision, before: CloseRecord | None) -> Proof:
        """The proof of a decision; ``before`` is the newest record known before it, whichever that is."""
        record = decision.record
        follows = before is not None and not record.founding and before.hash() == record.previous
        return Proof(
            record=record,
            term=decision.term,
            acceptances={peer: signature.hex() for peer, signature in decision.acceptances.items()},
            before=before if follows else None,
        )

    def manifest(self) -> CheckpointManifest:
        """Return the manifest to write beside the step's parts."""
        record = self.record
        return CheckpointManifest(
            run=record.run, step=record.step, parts=dict(record.digests), detail=self.model_dump(mode="json")
        )

    def standing(self) -> Standing:
        """Return whether its signatures show that the record was decided, or there is too little here to tell. Raises
        StateError when they show that it was not."""
        record = self.record
        if self.before is not None and self.before.hash() != record.previous:
            raise StateError(f"the record of step {record.step} does not follow the one that lies with it")
        if self.before is not None and record.founding:
            raise StateError(f"the record of step {record.step} commits nothing: a run does not begin in its middle")
        electorate = self.before.members if self.before is not None else record.members if record.founding else None
        if electorate is None or not self.acceptances:
            return "unproven"
        signatures = {peer: bytes.fromhex(one) for peer, one in self.acceptances.items()}
        try:
            check_acceptances(record, electorate, signatures, verify, self.term)
        except Refused as refused:
            raise StateError(f"the record of step {record.step} was not decided: {refused.reason}") from refused
        return "decided"

    def accepted_among(self, known: Roster) -> bool:
        """Return whether so many of those known to take part accepted it as it takes to decide a step: what lies with a
        record may name any electorate. False also where too many of them have come since."""
        signed = acceptance_bytes(self.record, self.term)
        signers = [peer for peer in known.peers if peer in self.acceptances]
        right = sum(verify(peer, signed, bytes.fromhex(self.acceptances[peer])) for peer in signers)
        return 2 * right > min(len(known), MAX_VOTERS)


def proof_in(manifest: CheckpointManifest, run: RunId) -> Proof:
    """Return the proof in a checkpoint's record, if it is of this run and agrees with the rest of the file. Raises
    StateError; the signatures are another question (:meth:`Proof.standing`)."""
    where = f"the record of step {manifest.step}"
    if manifest.run != run:
        raise StateError(f"{where} is of run {manifest.run[:12]}, not {run[:12]}")
    try:
        proof = Proof.model_validate_json(_text(manifest.detail))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise StateError(f"{where} cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    record = proof.record
    said = (record.run, record.step, record.digests)
    if said != (manifest.run, manifest.step, {PartName(part): digest for part, digest in manifest.parts.items()}):
        raise StateError(f"{where} names other parts than the file that it lies in")
    return proof


def _text(detail: dict[str, Any]) -> bytes:
    return json.dumps(detail).encode()


# --- which checkpoints are of the history that counts (pure) ---------------------------------------------------------


def stray(there: Iterable[HeldStep], newest: CloseRecord) -> list[int]:
    """The steps that are not of the history that has come to this record: later ones, but for the very next when it
    follows, and another state of the same step. Of earlier ones nothing can be said."""
    return [one.step for one in there if not _counts(one, newest)]


def _counts(one: HeldStep, newest: CloseRecord) -> bool:
    if one.step <= newest.step or one.record is None:
        same = one.record is None or dict(one.record.parts) == newest.digests
        return one.step < newest.step or (one.step == newest.step and same)
    try:
        return proof_in(one.record, RunId(newest.run)).record.follows(newest)
    except StateError:
        return False
