"""Which checkpoints go when new ones come."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from swarm.state.checkpoint_aside import drop_passed
from swarm.state.checkpoint_files import HeldStep, held, step_directory, steps


def superseded(there: Sequence[HeldStep], kept: int | None, upto: int) -> list[int]:
    """The steps whose directories may go, when the run has come to step ``upto``. Pure.

    Kept are the newest ``kept`` complete ones, the newest ``kept`` of which any part is good (a machine may hold one
    part only, and others the rest), the genesis, and whatever is newer than the newest good one: it is being written.
    A step beyond ``upto`` stays and counts for nothing: it is of a peer that is ahead, or of a history that does not
    count any more. With ``kept`` None nothing goes.
    """
    if kept is None:
        return []
    ordered = sorted((one for one in there if one.step <= upto), key=lambda one: one.step)
    complete = [one.step for one in ordered if one.complete]
    good = [one.step for one in ordered if one.parts]
    if not good:
        return []
    stay = {0, *complete[-kept:], *good[-kept:]}
    return [one.step for one in ordered if one.step < good[-1] and one.step not in stay]


def rotate(root: Path, kept: int | None, upto: int) -> list[int]:
    """Delete what is superseded now that step ``upto`` is written; returns those steps. What was set aside of steps up
    to there goes, too. A directory that cannot be deleted stays. Blocking; others may do the same at the same time."""
    if kept is None:
        return []
    gone = superseded([held(root, step) for step in steps(root)], kept, upto)
    for step in gone:
        shutil.rmtree(step_directory(root, step), ignore_errors=True)
    drop_passed(root, upto)
    return gone
