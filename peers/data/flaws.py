"""What of a text cannot be used, counted: up to a hundredth is left out and said, for more somebody must allow it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from peers.console.words import another_path, count
from peers.data.files import other_files
from peers.data.keys import KeyCount
from swarm.errors import ConfigError

FLAWS_SHOWN = 5
OTHERS_SHOWN = 8
NO_UTF8, NULS = "it is no UTF-8", "it holds NUL bytes"
MOST = 0.01
"""So large a part of a text's records, and of its bytes, may be left out."""


class Flaw(NamedTuple):
    """What cannot be used: its line (of tables, the row), why, its size in bytes, unpacked, and how many records (of
    text, lines) it is; 0 where nothing is lost by it: there is no text in it."""

    line: int
    why: str
    size: int = 0
    records: int = 1


@dataclass(slots=True)
class FlawCount:
    """How many records and bytes of a part of a file cannot be used, of how many, and the first of them; how many are
    ``empty`` beside those, and the first one."""

    of_records: int = 0
    of_size: int = 0
    records: int = 0
    size: int = 0
    empty: int = 0
    flaws: list[Flaw] = field(default_factory=list)
    first_empty: Flaw | None = None

    def note(self, flaw: Flaw) -> None:
        """Count one."""
        if not flaw.records:
            self.empty += 1
            self.first_empty = self.first_empty or flaw
            return
        self.records += flaw.records
        self.size += flaw.size
        if len(self.flaws) < FLAWS_SHOWN:
            self.flaws.append(flaw)

    def add(self, other: FlawCount) -> None:
        """Count those of another part."""
        self.of_records += other.of_records
        self.of_size += other.of_size
        self.records += other.records
        self.size += other.size
        self.empty += other.empty
        self.flaws += other.flaws[: FLAWS_SHOWN - len(self.flaws)]
        self.first_empty = self.first_empty or other.first_empty

    @property
    def too_many(self) -> bool:
        """Return whether they are more than :data:`MOST`."""
        return self.records > MOST * self.of_records or self.size > MOST * self.of_size

    def shown(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)

    @classmethod
    def of(cls, shown: Mapping[str, Any]) -> FlawCount:
        """The reverse of :meth:`shown`."""
        flaws, empty = shown["flaws"], shown["first_empty"]
        parsed = {"flaws": [Flaw(*flaw) for flaw in flaws], "first_empty": empty and Flaw(*empty)}
        return cls(**{**shown, **parsed})


class LeftOut:
    """What of the files that an option names cannot be used.

    Args:
        key: What errors call the option.
        allow_bad: Go on without it, however much it is.
    """

    def __init__(self, key: str, *, allow_bad: bool = False) -> None:
        self._key, self._allow_bad = key, allow_bad
        self._file, self._of_file = "", FlawCount()
        self._begins_in, self._empty = "", ""
        self.total = FlawCount()
        self._others: Counter[str] = Counter()
        self.first: list[str] = []
        """The first of them, as ``FILE:LINE: why``."""

    def add(self, file: str, found: FlawCount, *, text: bool) -> None:
        """Count what was found in the next part of the files.

        Raises ConfigError where it begins another, and the one before is a file of ``text`` that is none.
        """
        if file != self._file:
            self._check_text()
            self._file, self._of_file = file, FlawCount()
        if text:
            self._of_file.add(found)
        if found.flaws and not self.first:
            self._begins_in = file
        room = FLAWS_SHOWN - len(self.first)
        self.first += [f"{file}:{flaw.line}: {flaw.why}" for flaw in found.flaws][:room]
        if found.first_empty:
            self._empty = self._empty or f"{file}:{found.first_empty.line}: {found.first_empty.why}"
        self.total.add(found)

    def pass_by(self, path: Path) -> None:
        """Count the files below a directory that are not read."""
        self._others.update(other_files(path))

    def check(self, given: Path, *, some: bool, keys: KeyCount | None = None) -> None:
        """Raise ConfigError where it is too much, or all: there is not ``some`` document in what was ``given``, perhaps
        because of ``keys`` alone."""
        self._allow_bad = self._allow_bad and some
        self._check_text()
        if not some:
            unused = [] if keys is None else keys.lines()
            raise nothing_in(given, self._key, next(filter(None, [*self.first, self._empty, *unused]), ""))
        if self.total.too_many and not self._allow_bad:
            raise ConfigError(
                self._key,
                self._begins_in,
                "at most 1 % of the records, and of the bytes, that cannot be used",
                f"Correct what is named, or go on without it: type the same command with {self._allowing}.",
                why=f"{self._amount} are bad: {'; '.join(self.first)}",
            )

    def _check_text(self) -> None:
        bad = self._of_file
        if not bad.too_many or self._allow_bad or bad.flaws[0].why not in (NO_UTF8, NULS):  # else it is damaged
            return
        line, why, *_ = bad.flaws[0]
        raise ConfigError(
            self._key,
            self._file,
            "UTF-8 text",
            "If it is text, convert it: iconv -f ENCODING -t UTF-8 FILE > NEW; else choose another file, or leave its "
            f"bad lines out: {self._allowing}.",
            why=f"{bad.records:,} of {bad.of_records:,} lines are binary or in another encoding: of line {line}, {why}",
        )

    @property
    def _amount(self) -> str:
        total = self.total
        return f"{total.records:,} of {total.of_records:,} records ({total.size:,} of {total.of_size:,} bytes)"

    @property
    def _allowing(self) -> str:
        return "--data-allow-bad" if self._key == "--data" else "--allow-bad"

    @property
    def words(self) -> str:
        """For behind what is said of the rest; "" where there is nothing."""
        lines = self.lines()
        return "; " + "; ".join(lines) if lines else ""

    def facts(self) -> dict[str, Any]:
        """Return how many records and bytes are left out, of how many, how many are empty, and what is not read."""
        total = asdict(self.total)
        counted = {name: total[name] for name in ("records", "of_records", "size", "of_size", "empty")}
        return counted | {"first": self.first, "files_not_read": dict(self._others)}

    def lines(self) -> list[str]:
        """Return what is left out, and what is empty, in words."""
        said = []
        if self.total.records:
            more = ", …" if self.total.records > len(self.first) else ""
            said.append(f"{self._amount} left out: {', '.join(self.first)}{more}")
        if self.total.empty:
            said.append(f"{count(self.total.empty, 'record')} without text: {self._empty}")
        if self._others:
            kinds = ", ".join(f"{ending[:16]} {number:,}" for ending, number in self._others.most_common(OTHERS_SHOWN))
            more = ", …" if len(self._others) > OTHERS_SHOWN else ""
            said.append(f"{count(self._others.total(), 'file')} of other kinds not read ({kinds}{more})")
        return said


def nothing_in(path: Path, key: str, flaw: str = "") -> ConfigError:
    """The error for a path without any document. ``flaw`` is what is wrong with the first record, if there is one."""
    why = flaw or ("every one of them is empty" if path.is_dir() else "it is empty")
    remedy = another_path(path)
    if flaw and path.suffix.lower() == ".json":
        remedy = f"If it is one list, write its elements as lines: jq -c '.[]' {shlex.quote(str(path))} > NEW.jsonl"
    elif ": it has no " in flaw or ": its " in flaw:  # another key may have it
        option = {"TEXT": "--field", "--data": "--data-field"}.get(key)
        remedy = "Correct the file: the text is read at the key text."
        if option:
            remedy = f"Name the key or column of the text with {option}, or correct the file."
    elif "the chat template" in flaw:
        remedy = "Correct the template, or give the one of the model that is trained."
    elif flaw:
        remedy = "Correct the file, or get it again: nothing of it can be used."
    return ConfigError(key, str(path), "a file with text in it", remedy, why=why)
