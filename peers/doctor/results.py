"""What one check of ``swarm doctor`` found, as a line for people and as data for ``--json``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from peers.console.words import CommandError, listed, printable, with_commands
from peers.exit_codes import EXIT_DOCTOR, EXIT_OK
from swarm.errors import ConfigError, RunEnded, SwarmError

Level = Literal["ok", "warn", "fail", "skipped"]
SCHEMA = 1
LABEL = 12
"""Characters of the widest label."""
_MARKS: Mapping[Level, str] = {"ok": "✓", "warn": "!", "fail": "✗", "skipped": "-"}
_PLAIN: Mapping[Level, str] = {"ok": "+", "warn": "!", "fail": "x", "skipped": "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The outcome of one check: its ``name``, and what was ``found``, in words.

    A ``warn`` does not keep a machine from joining, a ``fail`` does. Either has a ``cause``, unless what was found says
    it, what a person can ``check``, and the ``next`` command. ``facts`` are the numbers, for programs.
    """

    name: str
    found: str
    level: Level = "ok"
    cause: str = ""
    check: str = ""
    next: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def warns(self, cause: str, *, check: str = "", next_: str = "") -> CheckResult:
        """Return it as a warning."""
        return dataclasses.replace(self, level="warn", cause=cause, check=check, next=next_)

    def fails(self, cause: str, *, check: str = "", next_: str = "") -> CheckResult:
        """Return it as failed."""
        return dataclasses.replace(self, level="fail", cause=cause, check=check, next=next_)

    def lines(self, *, plain: bool = False) -> list[str]:
        """Return a line for people, and below it, indented, why and what to do. ``plain``: in ASCII marks."""
        mark = (_PLAIN if plain else _MARKS)[self.level]
        below = {"cause": self.cause, "check": self.check, "next": self.next}
        first = f"{mark} {self.name:<{LABEL}} {'skipped: ' if self.level == 'skipped' else ''}{_flat(self.found)}"
        return [first.rstrip(), *(f"    {label + ':':<6} {_flat(text)}" for label, text in below.items() if text)]

    def document(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {**dataclasses.asdict(self), "facts": dict(self.facts)}


def _flat(text: str) -> str:
    """On one line, and harmless: what another peer said may be part of it."""
    return " ".join(printable(text).split())


def refused(name: str, found: str, error: SwarmError, *, next_: str = "") -> CheckResult:
    """Return the failed check that an error of ours says: its cause, what to check, and what to do."""
    cause, check, remedy = str(error), "", ""
    match error:
        case ConfigError():
            value = "is missing" if error.value is None else f"= {error.value!r} cannot be used"
            cause = f"{error.key} {value}{f': {error.why}' if error.why else ''}"
            check, remedy = f"expected {error.allowed}", error.remedy
        case CommandError():
            cause, check, remedy = error.cause, error.check, error.next
        case RunEnded():
            cause, check, remedy = error.reason, error.check, error.remedy
    base = CheckResult(name=name, found=found)
    return base.fails(
        with_commands(cause, error), check=with_commands(check, error), next_=with_commands(next_ or remedy, error)
    )


class DoctorReport:
    """Collects results, and hands each to ``show`` as it comes. ``unfinished``: something goes on that did not end in
    time."""

    def __init__(self, show: Callable[[CheckResult], None]) -> None:
        self._show, self.unfinished = show, False
        self.results: list[CheckResult] = []

    def add(self, *results: CheckResult) -> None:
        """Take what checks have found."""
        for result in results:
            self.results.append(result)
            self._show(result)

    def passed(self, name: str) -> bool:
        """Return whether a check is there that did not fail."""
        return any(result.name == name and result.level in ("ok", "warn") for result in self.results)

    @property
    def failed(self) -> list[CheckResult]:
        """The checks that keep this machine from joining."""
        return [result for result in self.results if result.level == "fail"]

    @property
    def exit_code(self) -> int:
        """0 where nothing failed."""
        return EXIT_DOCTOR if self.failed else EXIT_OK

    def verdict(self, *, quick: bool, invited: bool) -> str:
        """Return the last line, for people: whether this machine can join, as far as was looked at."""
        warned = [result.name for result in self.results if result.level == "warn"]
        but = f"; for {listed(warned)} see above" if warned else ""
        if self.failed:
            return f"this machine cannot join as it is: for {listed([one.name for one in self.failed])} see above"
        if quick:
            return f"nothing keeps this machine from joining, as far as --quick looks{but}"
        if not invited:
            return f"nothing here keeps this machine from joining{but}. To try a run as well: swarm doctor INVITE"
        if not self.passed("reachable"):
            return f"no check failed, but some did not end in time: add --timeout 60{but}"
        return f"this machine can join{but}"

    def document(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        return {
            "schema": SCHEMA,
            "ok": not self.failed,
            "checks": [result.document() for result in self.results],
        }


def prints_marks() -> bool:
    """Return whether the standard output takes the marks that are not ASCII."""
    try:
        "".join(_MARKS.values()).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def raise_first(results: Sequence[CheckResult]) -> None:
    """Raise CommandError, exit code 5, for the first failed check, if there is any; it names the others."""
    failed = [result for result in results if result.level == "fail"]
    if not failed:
        return
    first, *others = failed
    cause = f"{first.name}: {first.found}{f'; {first.cause}' if first.cause else ''}"
    more = f"; also: {', '.join(result.name for result in others)} (swarm doctor --quick)" if others else ""
    raise CommandError(cause + more, check=first.check, next_=first.next, exit_code=EXIT_DOCTOR)
