"""Compressed files as bytes: all that can be had of one that is cut short or damaged.

Damage costs what is behind it up to the next member of gzip or frame of zstd. Everything before it comes out, to the
byte (of zstd, to the block): the libraries' own readers keep back what they unpacked in the same call.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_IN_AT_ONCE, _OUT_AT_ONCE = 1 << 16, 1 << 20
_GZIP = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]", re.DOTALL)
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class Damage:
    """Where bytes are missing: why, and how many on disk could not be unpacked. Of a checksum that differs, how many
    unpacked ones it is of: they came, and nobody knows which of them are wrong."""

    why: str
    size: int = 0


class _Source:
    """A file in which one can look ahead."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._ahead = raw, b""

    def take(self, most: int = _IN_AT_ONCE) -> bytes:
        """The next bytes, fewer at the end."""
        taken, self._ahead = self._ahead[:most], self._ahead[most:]
        return taken + self._raw.read(most - len(taken))

    def exactly(self, size: int) -> bytes:
        """The next bytes. Raises EOFError with their number where there are fewer."""
        taken = self.take(size)
        if len(taken) < size:
            raise EOFError(len(taken))
        return taken

    def give_back(self, data: bytes) -> None:
        """Take them again next."""
        self._ahead = data + self._ahead

    def skip_to(self, begin: re.Pattern[bytes], damaged: bytes) -> int:
        """Go on at the next place that looks like a beginning, behind the first of the bytes that were taken last.
        Returns how many are left out."""
        skipped, data = 1, damaged[1:]
        while not (found := begin.search(data)):
            if not (more := self.take()):
                return skipped + len(data)
            skipped += max(0, len(data) - 3)
            data = data[-3:] + more
        self.give_back(data[found.start() :])
        return skipped + found.start()


def unpacked_gzip(raw: BinaryIO) -> Iterator[bytes | Damage]:
    """The bytes of a file of gzip, of all its members."""
    source = _Source(raw)
    while taken := source.take():
        if data := taken.lstrip(b"\x00"):  # members may be padded
            yield from _member(source, data)


def _member(source: _Source, data: bytes) -> Iterator[bytes | Damage]:
    member, size = zlib.decompressobj(wbits=31), 0
    while not member.eof:
        before = member.copy()
        try:
            out = member.decompress(data, _OUT_AT_ONCE)
        except zlib.error as error:
            why, at = str(error).rpartition(": ")[2], 0
            with contextlib.suppress(zlib.error):
                for at in range(len(data)):
                    out = before.decompress(data[at : at + 1])
                    size += len(out)
                    yield out
            skipped = source.skip_to(_GZIP, data[at:])
            yield Damage(why, max(skipped, size) if why.endswith("check") else skipped)
            return
        size += len(out)
        yield out
        data = member.unconsumed_tail
        if not data and len(out) < _OUT_AT_ONCE and not member.eof and not (data := source.take()):
            yield Damage("the file is cut short here")
            return
    source.give_back(member.unused_data)


def unpacked_zstd(raw: BinaryIO) -> Iterator[bytes | Damage]:
    """The bytes of a file of zstd, of all its frames. Raises ImportError without the package."""
    import zstandard

    source = _Source(raw)
    while start := source.take(4):
        unpack, size, part = zstandard.ZstdDecompressor().decompressobj().decompress, 0, start
        try:
            for part in _parts_of_frame(source, start):
                out = unpack(part)
                size += len(out)
                yield out
        except EOFError as ended:
            yield Damage("the file is cut short here", *ended.args)
        except zstandard.ZstdError as error:
            why = str(error).rpartition(": ")[2]
            skipped = source.skip_to(_ZSTD, part)
            yield Damage(why.lower(), max(skipped, size) if why.endswith("checksum") else skipped)


def _parts_of_frame(source: _Source, start: bytes) -> Iterator[bytes]:
    """A frame's header, its blocks, and its checksum if it has one (RFC 8878, 3.1.1).

    Raises EOFError where it is cut short, with the number of bytes in the part that is.
    """
    if start[1:] == b"\x2a\x4d\x18" and start[0] >> 4 == 5:  # a frame for others, to be skipped
        rest = int.from_bytes(source.exactly(4), "little")
        while rest:
            rest -= len(source.exactly(min(rest, _IN_AT_ONCE)))
        return
    if len(start) == 4 and not _ZSTD.match(start):
        yield start  # an error
    described = source.exactly(1)
    single, of_size = described[0] >> 5 & 1, described[0] >> 6
    more = (1 - single) + (0, 1, 2, 4)[described[0] & 3] + (single, 2, 4, 8)[of_size]
    yield start + described + source.exactly(more)
    last = 0
    while not last:
        header = source.exactly(3)
        said = int.from_bytes(header, "little")
        last, kind, size = said & 1, said >> 1 & 3, 1 if said >> 1 & 3 == 1 else said >> 3
        block = header + source.take(size)
        yield block
        if len(block) < 3 + size:
            raise EOFError(len(block) if kind else 0)  # what is stored as it is came
    if described[0] & 4:
        yield source.exactly(4)
