"""The progress of a local run as a person sees it: colours on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from peers.run_view import RunView, StepView

SETTLE_S = 0.5
"""How long a step's row waits for the other peers' counts before it is printed."""

_ROWS = 24
_HEADER = f"{'step':>6}  {'loss':>7}  {'tok/s':>7}  {'peers':>5}  {'bytes/step':>10}  event"


class Progress:
    """Prints what is new. ``quiet`` prints nothing at all, as ``--json`` needs."""

    def __init__(self, *, steps: int, quiet: bool) -> None:
        self._console = Console(file=sys.stdout, highlight=False, quiet=quiet, soft_wrap=True)
        self._steps = steps
        self._every = max(1, steps // _ROWS)
        self._printed = 0

    def say(self, text: str, style: str | None = None) -> None:
        """One line."""
        self._console.print(Text(text, style=style or ""))

    def done(self, label: str, text: str, seconds: float) -> None:
        """A finished piece of preparation and how long it took."""
        tick = "✓" if _can_print("✓", self._console.encoding) else "+"
        self._console.print(Text.assemble("  ", (tick, "green"), f" {label:<13} {text}  ", (f"{seconds:.1f} s", "dim")))

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """A spinner while something takes its time; nothing where there is no terminal."""
        if self._console.is_terminal and not self._console.quiet:
            with self._console.status(text):
                yield
        else:
            yield

    def update(self, view: RunView, now: float, *, final: bool = False) -> None:
        """Print the rows of steps that are closed and settled. ``now`` is the wall clock of the events."""
        while (step := view.steps.get(self._printed + 1)) is not None:
            settled = final or now - step.closed >= SETTLE_S or step.step + 1 in view.steps
            if not settled:
                return
            self._printed += 1
            if self._shown(step):
                if not self._header_printed:
                    self.say(_HEADER, "bold")
                    self._header_printed = True
                self.say(row(step), "yellow" if step.notes else None)

    _header_printed = False

    def _shown(self, step: StepView) -> bool:
        return step.step in (1, self._steps) or step.step % self._every == 0 or bool(step.notes)


def row(step: StepView) -> str:
    """One line of the table."""
    sent = amount(step.bytes_sent) + "B" if step.bytes_sent else "-"
    cells = f"{step.step:>6}  {step.loss:>7.3f}  {amount(step.tokens_per_s):>7}  {len(step.peers):>5}  {sent:>10}"
    return f"{cells}  {'; '.join(step.notes)}".rstrip()


def amount(value: float) -> str:
    """A number for people: ``950``, ``3.1 k``, ``12 M``; thousands, not 1024."""
    for unit in ("", " k", " M", " G"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f} T"


def _can_print(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
