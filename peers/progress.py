"""The progress of a local run as a person sees it: colours on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import textwrap

from rich.console import Console
from rich.status import Status
from rich.text import Text

from peers.run_view import RunView
from peers.words import amount
from swarm.monitoring.views import StepBytes, StepRow

SETTLE_S = 0.5
"""How long a step's row waits for the other peers' counts before it is printed."""

_ROWS = 24
_HEADER = f"{'step':>6}  {'loss':>7}  {'tok/s':>7}  {'peers':>5}  {'bytes/step':>10}  event"
_LABEL = 11
_NARROWEST = 40


class Progress:
    """Prints what is new. ``quiet`` prints nothing at all, as ``--json`` needs.

    On a terminal, lines are broken between words and a last line says what is being waited for; anywhere else each
    piece of news is one line, whatever its length. :meth:`close` is due in the end.
    """

    def __init__(self, *, steps: int, quiet: bool) -> None:
        self._console = Console(file=sys.stdout, highlight=False, quiet=quiet, soft_wrap=True)
        # A status line needs a terminal that can move its cursor.
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        self._status: Status | None = None
        self._steps = steps
        self._every = max(1, steps // _ROWS)
        self._printed = 0
        self._header_printed = False

    def say(self, text: str, style: str = "", *, indent: int = 0) -> None:
        """One piece of news; where it is broken, its other lines are indented."""
        self._console.print(Text("\n".join(self._broken(text, indent)), style=style))

    def command(self, text: str) -> None:
        """Something to paste, which is therefore never broken."""
        self._console.print(Text(f"  {text}", style="cyan"))

    def done(self, label: str, text: str, seconds: float) -> None:
        """A finished piece of preparation and how long it took."""
        tick = "✓" if _can_print("✓", self._console.encoding) else "+"
        start = f"  {tick} {seconds:5.1f} s  {label:<{_LABEL}} "
        first, *more = self._broken(start + text, len(start))
        line = Text("\n".join([first, *more]))
        line.stylize("green", 2, 3)
        line.stylize("dim", 4, 11)
        self._console.print(line)

    def waiting(self, text: str | None) -> None:
        """Say on the last line what is being waited for; None: nothing any more. Only where there is a terminal."""
        if not self._live:
            return
        if text is None:
            if self._status is not None:
                self._status.stop()
            self._status = None
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def close(self) -> None:
        """Leave the terminal as it was found. Idempotent."""
        self.waiting(None)
        if self._live:
            # An interrupt may have come between hiding the cursor and noting that.
            self._console.show_cursor(True)

    def update(self, view: RunView, now: float, *, final: bool = False) -> None:
        """Print the rows of steps that are closed and settled. ``now`` is the wall clock of the events."""
        while (number := self._printed + 1) in view.steps:
            step = view.steps[number]
            if not (final or now - step.closed_at >= SETTLE_S or number + 1 in view.steps):
                return
            self._printed = number
            notes = view.notes.get(number, ())
            if notes or number in (1, self._steps) or number % self._every == 0:
                self._print_row(row(step, view.traffic.by_step.get(number), notes), "yellow" if notes else "")

    def _print_row(self, text: str, style: str) -> None:
        if not self._header_printed:
            self._header_printed = True
            self.say(_HEADER, "bold")
        self.say(text, style, indent=8)

    def _broken(self, text: str, indent: int) -> list[str]:
        width = self._console.width
        if not self._console.is_terminal or width < _NARROWEST:
            return [text]
        return textwrap.wrap(
            text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )


def row(step: StepRow, usage: StepBytes | None, notes: tuple[str, ...] = ()) -> str:
    """One line of the table."""
    sent = size(usage.sent) if usage else "-"
    loss = "-" if step.given_up else f"{step.loss:.3f}"
    cells = f"{step.step:>6}  {loss:>7}  {amount(step.tokens_per_s):>7}  {len(step.swapped):>5}  {sent:>10}"
    return f"{cells}  {'; '.join(notes)}".rstrip()


def size(count: int) -> str:
    """Bytes for people: ``950 B``, ``3.1 kB``, ``12 MB``."""
    text = amount(count)
    return f"{text}B" if " " in text else f"{text} B"


def _can_print(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
