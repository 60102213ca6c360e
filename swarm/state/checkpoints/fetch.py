"""Fetching one part's file of a checkpoint from whoever has it: resumed, verified, renamed into place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.disk import make_directory, sync_directory
from swarm.errors import Busy, PeerError, StateError
from swarm.ids import PartName
from swarm.state.checkpoints.donors import Donor, WantedFile
from swarm.state.checkpoints.files import part_path, refused_by_disk
from swarm.state.checkpoints.parts import load_file
from swarm.state.checkpoints.shelf import PIECE_BYTES

logger = logging.getLogger(__name__)

WINDOW = 4
"""Pieces asked for at once."""
MAX_TRIES = 3
"""How often one donor may fail before it is left out."""
BUSY_PAUSE_S, MAX_WAITS = 1.0, 60
"""How long a busy donor is left alone, and how often without anything from it meanwhile before it is left out."""

Progress = Callable[[PartName, int, int], None]
"""Told (part, bytes that are here, bytes in all)."""


async def fetch_part(
    root: Path, wanted: WantedFile, donors: Sequence[tuple[Donor, int]], *, max_bytes: int, progress: Progress
) -> Path:
    """Have a part's file in place; ``donors`` are asked in turn, each with the bytes that it says the file has.

    What came before a failure, of this call or an earlier one, stays beside the file's name and is not fetched again;
    what those send who say that it has another size is kept apart, two such files at most. The file gets its name when
    every byte is verified: one that fails is thrown away, and so is who alone sent it. Who is busy is waited for.
    Raises StateError when the disk refuses, or when nobody has a good one: it says who failed and how. Cancelled, it
    leaves what came.
    """
    path = part_path(root, wanted.step, wanted.part)
    failures: dict[str, str] = {}
    tries, waits = Counter[str](), Counter[str]()
    wrote: dict[int, set[str]] = {}
    left = [(donor, size) for donor, size in donors if size <= max_bytes]
    while left:
        donor, size = left[0]
        begun, authors = begun_file(path, wanted.digest, size), wrote.setdefault(size, {"an earlier call"})
        try:
            if not (here := await asyncio.to_thread(_begin, path, begun)):
                authors.clear()
            authors.add(donor.name)
            await _fill(begun, wanted, donor, size, progress)
            await asyncio.to_thread(_finish, begun, path, wanted)
        except Busy as busy:
            if await asyncio.to_thread(_length, begun) > here:
                waits.pop(donor.name, None)
            failures[donor.name], left = busy.reason, _after(left, donor, waits, MAX_WAITS)
            await asyncio.sleep(BUSY_PAUSE_S)
        except PeerError as error:
            logger.warning("%s of step %d from %s: %s", wanted.part, wanted.step, donor.name, error)
            failures[donor.name], left = error.reason, _after(left, donor, tries, MAX_TRIES)
        except _Rotten as error:
            logger.warning("%s of step %d from %s: %s", wanted.part, wanted.step, donor.name, error)
            failures[donor.name] = str(error)
            left = left[1:] if authors == {donor.name} else left
        except OSError as error:
            raise refused_by_disk(path, error) from error
        else:
            return path
    told = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    raise StateError(
        f"nobody has a good {wanted.part} of step {wanted.step}: {told or 'all are larger than the model'}"
    )


class _Rotten(Exception):
    """What came is not what was wanted."""


def _after(left: list[tuple[Donor, int]], donor: Donor, tries: Counter[str], most: int) -> list[tuple[Donor, int]]:
    """The others first; a donor that failed so often is left out."""
    tries[donor.name] += 1
    return [*left[1:], *(left[:1] if tries[donor.name] < most else [])]


def begun_file(path: Path, digest: str, size: int) -> Path:
    """Where a part's file lies while it is fetched: one for each digest and size, for donors may lie about the size."""
    return path.with_name(f".{path.name}.{digest[:16]}.{size}.pull")


def _begin(path: Path, begun: Path) -> int:
    """Have the file that is filled; how many bytes are in it. Of others only that with the most is kept: whoever claims
    one size after the other fills no disk."""
    make_directory(path.parent)
    with begun.open("ab") as file:
        others = sorted((one for one in _all_begun(path) if one != begun), key=_length)
        for other in others[:-1]:
            other.unlink(missing_ok=True)
        return file.tell()


def _all_begun(path: Path) -> list[Path]:
    return list(path.parent.glob(f".{path.name}.*.pull"))


def _length(begun: Path) -> int:
    try:
        return begun.stat().st_size
    except OSError:  # what is wrong with it is said where it is opened
        return 0


async def _fill(begun: Path, wanted: WantedFile, donor: Donor, size: int, progress: Progress) -> None:
    """Append what is missing, piece by piece, in order; a few are under way at once."""
    with begun.open("ab") as file:
        asked = done = file.tell()
        progress(wanted.part, done, size)
        under_way: list[asyncio.Task[bytes | memoryview]] = []
        try:
            while done < size:
                while asked < size and len(under_way) < WINDOW:
                    length = min(PIECE_BYTES, size - asked)
                    under_way.append(asyncio.create_task(_piece(donor, wanted, asked, length)))
                    asked += length
                data = await under_way[0]
                del under_way[0]
                await asyncio.to_thread(file.write, data)
                done += len(data)
                progress(wanted.part, done, size)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


async def _piece(donor: Donor, wanted: WantedFile, offset: int, length: int) -> bytes | memoryview:
    return await donor.read(wanted, offset, length)


def _finish(begun: Path, path: Path, wanted: WantedFile) -> None:
    """Verify, sync, rename; others of the name are swept. Raises _Rotten, with the file gone, when it is not what was
    wanted; OSError when it cannot be read, which says nothing of it. Whatever else goes wrong with a file that others
    made, it is not kept, or the next call would go on with it."""
    try:
        snapshot, digest = load_file(begun)
        if (snapshot.part, snapshot.step, digest) != (wanted.part, wanted.step, wanted.digest):
            raise StateError(f"it is {snapshot.part} after step {snapshot.step} with another digest")
    except StateError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from error
        with contextlib.suppress(OSError):
            begun.unlink()
        raise _Rotten(f"what came fails verification ({error})") from error
    except Exception:
        with contextlib.suppress(OSError):
            begun.unlink()
        raise
    descriptor = os.open(begun, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(begun, path)
    for other in _all_begun(path):
        with contextlib.suppress(OSError):
            other.unlink()
    sync_directory(path.parent)
