"""The rows of CSV and TSV. What is no row costs the line in which it begins, and what belongs to that."""

from __future__ import annotations

import csv
from codecs import BOM_UTF8 as BYTE_ORDER_MARK
from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple

from peers.data.flaws import Flaw
from peers.data.unpacking import Damage

LONGEST_FIELD = 16 << 20

Row = tuple[int, list[str] | Flaw, int]
"""The number of its first line, its fields or why it is none, and its size in bytes."""


class _Broken(NamedTuple):
    """Why lines are no row, and how many of those that were taken are lost. ``size`` is what is lost beside them,
    ``anew`` says that this is no part of a broken row before it, ``open`` that lines behind it may be part of it."""

    why: str
    lines: int = 1
    size: int = 0
    anew: bool = False
    open: bool = True


class _Damaged(Exception):
    def __init__(self, damage: Damage) -> None:
        self.damage = damage


class DelimitedRows:
    """The rows of a table, the header before others, as the csv module reads them.

    Behind a row that is none, as where a quote is not closed, it goes on at the next line that is a row with as many
    columns as the header, and begins and ends with a quote if all did: what is between belongs to the broken one.
    Fields keep bytes that are no UTF-8 as surrogates.

    Args:
        pieces: The bytes of the file.
        delimiter: Between fields.
    """

    def __init__(self, pieces: Iterator[bytes | Damage], delimiter: str) -> None:
        csv.field_size_limit(LONGEST_FIELD)
        self._lines, self._delimiter = _lines(pieces), delimiter
        self._taken: list[bytes] = []
        self._again: deque[bytes] = deque()
        self._number, self._width = 1, 0
        self._flaw: Flaw | None = None  # it may not be at its end
        self._open = False
        self._quoted: set[tuple[bool, bool]] = set()  # how rows begin and end

    def __iter__(self) -> Iterator[Row]:
        """Each once."""
        while broken := (yield from self._sound()):
            yield from self._lost(broken)
        if self._flaw:
            yield self._flaw.line, self._flaw, self._flaw.size

    def _sound(self) -> Generator[Row, None, _Broken | None]:
        taken = self._taken
        try:
            for row in csv.reader(self._texts(), delimiter=self._delimiter, strict=True):
                if broken := self._wrong(row):
                    return broken
                if row:
                    if self._flaw:
                        yield self._flaw.line, self._flaw, self._flaw.size
                    if self._width:
                        self._quoted.add(_quoted(taken))
                    self._flaw, self._width = None, self._width or len(row)
                    yield self._number, row, sum(map(len, taken))
                self._number += len(taken)
                taken.clear()
        except csv.Error as error:
            has_columns = taken[0].count(self._delimiter.encode()) + 1 >= self._width
            return _Broken(f"it is no row: {error}", anew=has_columns)
        except _Damaged as error:
            return _Broken(error.damage.why, len(taken), error.damage.size, anew=True)
        return None

    def _texts(self) -> Iterator[str]:
        again, taken, lines = self._again, self._taken, self._lines
        while True:
            line = again.popleft() if again else next(lines, None)
            if line is None:
                return
            if isinstance(line, Damage):
                raise _Damaged(line)
            taken.append(line)
            yield line.decode("utf-8", "surrogateescape")

    def _wrong(self, row: list[str]) -> _Broken | None:
        if row and self._width and len(row) != self._width:
            columns = f"{len(row)} column{'' if len(row) == 1 else 's'}"
            return _Broken(f"it has {columns}, the first line {self._width}", open=len(self._taken) > 1)
        if row and self._flaw and self._open and not self._like_others():
            return _Broken(self._flaw.why)
        return None

    def _like_others(self) -> bool:
        odd = sum(line.count(b'"') for line in self._taken) % 2
        return not odd and (not self._quoted or _quoted(self._taken) in self._quoted)

    def _lost(self, broken: _Broken) -> Iterator[Row]:
        size = broken.size + sum(map(len, self._taken[: broken.lines]))
        if self._flaw and self._open and not broken.anew:
            self._flaw = self._flaw._replace(size=self._flaw.size + size)
        else:
            if self._flaw:
                yield self._flaw.line, self._flaw, self._flaw.size
            self._flaw, self._open = Flaw(self._number, broken.why, size), broken.open
        self._again.extendleft(reversed(self._taken[broken.lines :]))
        self._number += broken.lines
        self._taken.clear()


def _quoted(row: list[bytes]) -> tuple[bool, bool]:
    return row[0][:1] == b'"', row[-1].rstrip(b"\r\n")[-1:] == b'"'


def _lines(pieces: Iterator[bytes | Damage]) -> Iterator[bytes | Damage]:
    """The lines of a file with their ends, one that is too long in parts."""
    rest, first = b"", True
    for piece in pieces:
        if isinstance(piece, Damage):
            if rest:
                yield rest
            yield piece
            rest = b""
            continue
        rest += piece.removeprefix(BYTE_ORDER_MARK) if first else piece
        first = False
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r", 0, -1)) + 1
        if len(rest) - end > LONGEST_FIELD:
            end = len(rest)
        yield from rest[:end].splitlines(keepends=True)
        rest = rest[end:]
    if rest:
        yield rest
