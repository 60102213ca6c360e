"""Delete checkpoints when new ones come, and set aside those that do not count any more.

A checkpoint does not count when the run went on from an older step than its own. Those lie below ``aside/``, where
nobody lists, fetches or resumes them, and go when the run has passed their step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from swarm.disk import make_directory, sync_directory
from swarm.state.checkpoints.files import HeldStep, held, step_directory, steps

OLD = ".old-"
ABANDONED_S = 600.0
"""Nobody takes so long to replace a directory."""


def aside_directory(root: Path) -> Path:
    """Return their directory under a checkpoint root, laid out as the root is."""
    return root / "aside"


def set_aside(root: Path, gone: Iterable[int]) -> list[int]:
    """Move these steps' directories aside; returns those that this call moved. One of the same step that lies there is
    replaced. Others may do the same at the same time. Blocking; raises OSError when the disk refuses."""
    moved = []
    for step in gone:
        target = step_directory(aside_directory(root), step)
        make_directory(target.parent)
        with contextlib.suppress(FileNotFoundError):  # another peer of this machine was faster
            _replace(step_directory(root, step), target)
            moved.append(step)
    if moved:
        sync_directory(aside_directory(root))
        sync_directory(root)
    return moved


def _replace(directory: Path, target: Path) -> None:
    """Rename a directory. One of that name goes only when this one is about to take its place: what another peer has
    moved there a moment ago is the same, and all there is of it. Raises FileNotFoundError when it is not there."""
    try:
        os.rename(directory, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not directory.is_dir():
            raise
        old = Path(tempfile.mkdtemp(prefix=OLD, dir=target.parent))
        try:
            os.rename(target, old)
            os.rename(directory, target)
        except FileNotFoundError:  # the other was faster, and what lay there was what it has moved
            with contextlib.suppress(OSError):  # or has moved there by now
                os.rename(old, target)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def drop_passed(root: Path, step: int) -> None:
    """Delete what was set aside of steps up to this one, which the run has reached. Never raises."""
    for one in steps(aside_directory(root)):
        if one <= step:
            shutil.rmtree(step_directory(aside_directory(root), one), ignore_errors=True)
    with contextlib.suppress(OSError):
        for name in os.listdir(aside_directory(root)):
            _drop_abandoned(aside_directory(root) / name, root.stat().st_mtime)
        aside_directory(root).rmdir()  # when it is empty


def _drop_abandoned(path: Path, newest: float) -> None:
    """Remove files of a process that was killed as it replaced a directory, long before the ``newest`` step was
    written. Raises OSError when it is gone meanwhile."""
    if path.name.startswith(OLD) and newest - path.stat().st_ctime > ABANDONED_S:
        shutil.rmtree(path, ignore_errors=True)


# --- which checkpoints go when new ones come -------------------------------------------------------------------------


KEPT_SHARED = 2
"""Of the steps that all machines of a run keep: the newest, and the one before it until all have written that."""


def superseded(
    there: Sequence[HeldStep],
    kept: int | None,
    upto: int,
    shared: int | None = None,
    due: Callable[[int], bool] | None = None,
) -> list[int]:
    """The steps whose directories may go, when the run has come to step ``upto``. Pure.

    Kept are the newest ``kept`` complete ones, the newest ``kept`` of which any part is good (a machine may hold one
    part only, and others the rest), of the multiples of ``shared`` the newest KEPT_SHARED good ones (other machines may
    keep these alone), the genesis, and whatever is newer than the newest good one: it is being written. The good ones
    that are not ``due`` count apart: a peer writes them as it leaves, and other machines may have none of them, so
    however many they are, none that is due goes for them.
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
    regular = [step for step in good if due is None or due(step)]
    between = [step for step in good if step not in regular]
    everywhere = [] if shared is None else [step for step in good if step % shared == 0]
    stay = {0, *complete[-kept:], *regular[-kept:], *between[-kept:], *everywhere[-KEPT_SHARED:]}
    return [one.step for one in ordered if one.step < good[-1] and one.step not in stay]


def rotate(
    root: Path,
    kept: int | None,
    upto: int,
    shared: int | None = None,
    due: Callable[[int], bool] | None = None,
) -> list[int]:
    """Delete what is superseded now that step ``upto`` is written (:func:`superseded`); returns those steps. What was
    set aside of steps up to there goes, too. A directory that cannot be deleted stays. Blocking; others may do the
    same at the same time."""
    if kept is None:
        return []
    gone = superseded([held(root, step) for step in steps(root)], kept, upto, shared, due)
    for step in gone:
        shutil.rmtree(step_directory(root, step), ignore_errors=True)
    drop_passed(root, upto)
    return gone
