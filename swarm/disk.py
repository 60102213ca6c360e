"""Files that are whole or not there: written next to their name, synced, renamed, and their directory synced as well.

Every call to the file system goes through ``os`` here, so that a test can end the world at each of them. Blocking.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

Piece = bytes | memoryview


def size_text(size: float) -> str:
    """Return bytes for people: ``950 B``, ``3.14 kB``, ``16 GB``; thousands, not 1024."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


_STREAM = re.compile(r"/dev/(stdout|stderr)|(?:/dev|/proc/self)/fd/([0-9]+)")
_NUMBERS: dict[str | None, str] = {"stdout": "1", "stderr": "2"}
"""Names of what a process has open: also where that is a file, others write into it."""
_NOT_HERE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""What a file system says that cannot reserve space."""
_MOST_AT_ONCE = 1 << 30
"""The kernel writes less than 2 GiB in one call."""


def write_whole(path: Path, pieces: Sequence[Piece], *, mode: int | None = None) -> None:
    """Have ``path`` hold these bytes, and be on the disk, when this returns; makes the directories it lies in.

    Whenever the process dies, or the power fails, ``path`` holds what it held before or all of this. Raises OSError
    (no space, a failing disk) with what was there untouched and nothing left behind; space is reserved first, so that
    a disk without enough says so before hours of writing. Cost: one pass over the disk and three syncs.
    """
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write(temporary, pieces, 0o644 if mode is None else mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def read_named(path: Path) -> str:
    """Return the text of a file that a person has written: in UTF-8, or in UTF-16 where it begins with its mark, as
    editors of Windows write. Raises OSError, and UnicodeDecodeError for what is neither."""
    data = path.read_bytes()
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if utf16 else "utf-8-sig").replace("\r\n", "\n")


def older(path: Path) -> Path:
    """Return where what a growing file held is, since it was begun anew: ``events.older.jsonl`` beside
    ``events.jsonl``."""
    return path.with_suffix(f".older{path.suffix}")


def write_named(path: Path, pieces: Sequence[Piece], *, mode: int | None = None) -> None:
    """Write a file that a person has named, as :func:`write_whole`, but write *into* what is there and is no regular
    file: a pipe, a terminal, a device, or what ``/dev/stdout`` stands for. A link is followed, not replaced.

    ``mode`` are the permissions of a regular file. Raises OSError, also for a link of another user's, and for a pipe
    that nobody reads.
    """
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        regular = True
    stream = _STREAM.fullmatch(os.path.abspath(path))
    if stream is not None or not regular:
        # A stream of ours has a place in its file, which another opening of it would not share.
        own = None if stream is None else _NUMBERS.get(stream[1], stream[2])
        descriptor = os.dup(int(own)) if own is not None else _opened(path)
        with open(descriptor, "wb") as file:
            file.writelines(pieces)
        return
    if os.path.islink(path) and os.lstat(path).st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, "a link of another user's", str(path))
    write_whole(Path(os.path.realpath(path)), pieces, mode=mode)


def _opened(path: Path) -> int:
    """A descriptor to write to what is no regular file. Without waiting: a signal could not end that."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_APPEND | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads this pipe", str(path)) from None
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def make_directory(path: Path) -> None:
    """Make a directory and those above it; each is on the disk when this returns. Raises OSError."""
    missing = [path]
    while not missing[-1].parent.is_dir() and missing[-1].parent != missing[-1]:
        missing.append(missing[-1].parent)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not directory.is_dir():
                raise
        else:
            sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(path: Path) -> None:
    """Take away what a killed process left half written of ``path``. For who alone writes it; never raises."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            os.unlink(left)


@contextlib.contextmanager
def alone(path: Path, *, wait: bool) -> Iterator[bool]:
    """Whether ``path`` is ours to write while this is open; with ``wait`` it is in the end, no matter who has it now.

    The claim is a lock of the kernel's and ends with its owner, however that dies: what its owner left half written is
    swept here. Raises OSError when the disk refuses.
    """
    make_directory(path.parent)
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _locked(lock, wait)
    try:
        if descriptor is not None:
            sweep(path)
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(lock)
            os.close(descriptor)


def _locked(path: Path, wait: bool) -> int | None:
    """A descriptor that holds the lock, None when another has it. The one who had it took the file away when he was
    done: a lock on a file without that name keeps nobody out, so then it is taken anew."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _write(path: Path, pieces: Sequence[Piece], mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        reserve(descriptor, sum(len(piece) for piece in pieces))
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest[:_MOST_AT_ONCE]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Return how many bytes the disk of this path, which need not be there yet, has for us. Raises OSError."""
    return shutil.disk_usage(_there(path)).free


def reserved_bytes(path: Path) -> int:
    """Return how many bytes of that disk stay free by what can be done without: a twentieth, 1 GiB at least. Raises
    OSError."""
    return max(1 << 30, shutil.disk_usage(_there(path)).total // 20)


def _there(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def reserve(descriptor: int, size: int) -> None:
    """Have room on the disk for so many bytes of a file, where the file system can say so. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, 0, max(1, size))
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
