"""Which checkpoints are of the history that counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from peers.ckpt_proof import proof_in
from swarm.errors import StateError
from swarm.ids import RunId
from swarm.optimization.records import CloseRecord
from swarm.state.checkpoint_files import HeldStep


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
