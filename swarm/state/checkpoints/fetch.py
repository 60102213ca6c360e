"""Fetching one part's file of a checkpoint from all who have it: resumed, verified by chunk, renamed into place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.clock import SystemClock
from swarm.disk import alone, make_directory, reserve, sync_directory
from swarm.errors import Busy, PeerError, StateError, WrongStep
from swarm.ids import PartName, RunId
from swarm.state.checkpoints.files import part_path, refused_by_disk
from swarm.state.checkpoints.format import PartFile, opened, write_at
from swarm.state.download import ChunkDonor, Data, Download, DownloadContext, Wanted
from swarm.state.snapshot import HASH_BYTES, is_chunk
from swarm.waiting import TokenBucket

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""How often one donor may fail before it is left out; one that lies is left out at once."""
PAUSE_S, MAX_WAITS = 1.0, 60
"""How long a donor that failed or is busy is left alone, and how often a busy one without anything from it meanwhile
before it is left out."""
OTHERS_LOOK_S = 0.5
"""How often to look whether another process of this machine still fetches the same file."""

Progress = Callable[[PartName, int, int], None]
"""Told (part, bytes that are here, bytes in all)."""


class BegunFile:
    """A part's file while it is fetched: a :class:`~swarm.state.download.Sink`. It lies next to its name until every
    chunk is there and right; what an earlier process left of it is kept as far as it is right.

    Every call opens it anew, and none makes it but :meth:`begin`: a thread of a download that was cancelled may be at
    work still.
    """

    def __init__(self, root: Path, wanted: Wanted, run: RunId) -> None:
        self.wanted, self.path = wanted, part_path(root, wanted.step, wanted.part)
        self.begun = self.path.with_name(f".{self.path.name}.{wanted.digest[:16]}.pull")
        self.is_begun = False
        self._run = run
        self._file = self._with(bytes(HASH_BYTES * wanted.cut.chunks))

    @property
    def whole(self) -> bool:
        """Return whether it is there under its name, as far as its header says."""
        try:
            return PartFile.read(self.path).state.describe() == self.wanted.describe()
        except (StateError, OSError):
            return False

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._file.size

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the disk has to have room for, beside what it has given already."""
        try:
            return max(0, self.size - 512 * self.begun.stat().st_blocks)
        except OSError:  # what is wrong with it is said where it is opened
            return self.size

    def begin(self, hashes: bytes) -> Sequence[int]:
        """See :class:`~swarm.state.download.Sink`. Of other begun files of this part, only the newest is kept."""
        self._file, self.is_begun = (file := self._with(hashes)), True
        make_directory(self.path.parent)
        others = sorted((one for one in self._all_begun() if one != self.begun), key=lambda one: one.stat().st_mtime)
        for other in others[:-1]:
            other.unlink(missing_ok=True)
        with opened(self.begun, os.O_RDWR | os.O_CREAT) as descriptor:
            new = os.fstat(descriptor).st_size == 0
            try:
                reserve(descriptor, file.size)
            except OSError:
                if new:
                    self.forget()
                raise
            os.ftruncate(descriptor, file.size)
            write_at(descriptor, file.header, 0)
            if new:
                return ()
            numbers = range(self.wanted.cut.chunks)
            return [number for number in numbers if is_chunk(hashes, number, file.read_chunk(descriptor, number))]

    def place(self, number: int, data: Data) -> None:
        """See :class:`~swarm.state.download.Sink`."""
        with opened(self.begun, os.O_WRONLY) as descriptor:
            self._file.write_chunk(descriptor, number, data)

    def finish(self) -> Path:
        """See :class:`~swarm.state.download.Sink`. It is on the disk, under its name."""
        with opened(self.begun, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
        os.replace(self.begun, self.path)
        for other in self._all_begun():
            with contextlib.suppress(OSError):
                other.unlink()
        sync_directory(self.path.parent)
        return self.path

    def forget(self) -> None:
        """Nothing of it is worth keeping. Never raises."""
        with contextlib.suppress(OSError):
            self.begun.unlink()

    def _with(self, hashes: bytes) -> PartFile:
        return PartFile(self.wanted, hashes, {"run": self._run})

    def _all_begun(self) -> list[Path]:
        return list(self.path.parent.glob(f".{self.path.name}.*.pull"))


async def fetch_part(
    file: BegunFile, donors: Sequence[ChunkDonor], *, progress: Progress, pace: TokenBucket | None = None
) -> Path:
    """Have a part's file in place, from all donors at once; ``pace`` holds back what is asked for.

    What came before a failure, of this call or an earlier one, stays beside the file's name and is not fetched again.
    Who lies is left out at its first wrong chunk; who fails otherwise is asked again, and who is busy is waited for.
    Of several processes here one fetches it; the others wait until it is there, and go on where that one failed.
    Raises StateError when the disk refuses, or when nobody is left: it says who failed and how. Cancelled, it leaves
    what came.
    """
    waited, directory = False, file.path.parent
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    try:
        await asyncio.to_thread(make_directory, directory)
        while True:
            with alone(file.begun, wait=False) as ours:
                if waited and file.whole:
                    return file.path
                if ours:
                    return await _fetched(file, donors, progress, pace)
            if not waited:
                logger.info("another process of this machine fetches %s: waiting for it", file.path)
            waited = True
            await SystemClock().sleep(OTHERS_LOOK_S)
    except OSError as error:
        raise refused_by_disk(file.path, error) from error
    finally:
        with contextlib.suppress(OSError):  # those that hold something stay
            for one in () if file.is_begun else made:
                one.rmdir()


async def _fetched(file: BegunFile, donors: Sequence[ChunkDonor], progress: Progress, pace: TokenBucket | None) -> Path:
    wanted, failures = file.wanted, dict[ChunkDonor, str]()
    tries, waits = Counter[ChunkDonor](), Counter[ChunkDonor]()
    here: int | None = None

    def told(donor: ChunkDonor, done: int, total: int) -> None:
        nonlocal here
        here = done
        waits.pop(donor, None)
        progress(wanted.part, file.size * done // max(1, total), file.size)

    def dropped(donor: ChunkDonor, error: PeerError) -> float | None:
        level = logging.INFO if isinstance(error, WrongStep) else logging.WARNING  # it merely has none
        logger.log(level, "%s of step %d from %s: %s", wanted.part, wanted.step, donor, error)
        failures[donor] = error.reason
        counted, most = (waits, MAX_WAITS) if isinstance(error, Busy) else (tries, MAX_TRIES)
        counted[donor] += 1
        return PAUSE_S if counted[donor] < most else None

    context = DownloadContext(donor=_itself, clock=SystemClock(), pace=pace, progress=told, dropped=dropped)
    try:
        return await Download(context, wanted, file).fetch(donors)
    except PeerError as error:
        if here == 0:  # it is begun, and that is all
            file.forget()
        said = "; ".join(f"{donor}: {reason}" for donor, reason in failures.items())
        raise StateError(f"nobody has a good {wanted.part} of step {wanted.step}: {said}") from error


def _itself(donor: ChunkDonor) -> ChunkDonor:
    return donor
