"""The proof of a checkpoint's step, in the ``detail`` of its ``record.json``.

:func:`stray` names the checkpoints that are not of a history.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from swarm.consensus.proof import Proof
from swarm.consensus.records import CloseRecord
from swarm.errors import StateError
from swarm.ids import PartName, RunId
from swarm.state.checkpoints.files import CheckpointManifest, HeldStep


def manifest_with(proof: Proof) -> CheckpointManifest:
    """Return the manifest to write next to the parts of the step that is proven."""
    record = proof.record
    return CheckpointManifest(
        run=record.run, step=record.step, parts=dict(record.digests), detail=proof.model_dump(mode="json")
    )


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
