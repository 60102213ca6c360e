"""Show a local run while it goes on: its state folded from its peers' events, and the progress table a person sees.

The folds are those of :mod:`swarm.monitoring`; :class:`RunView` has only what a local run's starter asks by name. The
report uses it, too.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status
from rich.text import Text

from peers.console.words import amount, learnt_text
from swarm.disk import size_text
from swarm.events import (
    CheckpointWritten,
    DeviceChosen,
    Event,
    HopMoved,
    Participation,
    PeerLost,
    PeerStarted,
    PeerStopped,
    RunStarted,
    StateDownloaded,
    StepClosed,
    StepGivenUp,
    WentBack,
)
from swarm.monitoring.reader import RawEvent, RecordedEvent
from swarm.monitoring.views import Digests, Microbatches, StepBytes, StepRow, StepTable, TrafficView


@dataclass(frozen=True, slots=True)
class ExitNotice:
    """A peer's last word about itself."""

    wall: float
    reason: str
    exit_code: int


class StepNotes:
    """The notes of each step that closed, ``by_step``; ``names`` are those of peers, by id."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.by_step: dict[int, tuple[str, ...]] = {}
        self._pending: list[str] = []

    def closed(self, step: int) -> None:
        """This step closed, for the first time that it is told."""
        if self._pending:
            self.by_step[step], self._pending = tuple(self._pending), []

    def add(self, event: Event | RawEvent) -> None:
        """Note what this event says for the step that closes next, once."""
        match event:
            case PeerLost(name=name, reason=reason):
                self._note(f"{name} lost: {reason}")
            case StepGivenUp():
                held = ", ".join(f"{self._name(peer)} holds {part} now" for peer, part in event.holders.items())
                self._note(f"given up, {' and '.join(event.lost)} was lost: {held}")
            case WentBack():
                self._note(f"went back to the checkpoint of step {event.step}")
            case HopMoved(late=True):  # late is not lost: nothing is wrong with a busy machine
                old, new = self._name(event.old), self._name(event.new)
                self._note(f"stage {event.stage}: {old} was slow, {new} does some of its work")
            case HopMoved():
                old, new = self._name(event.old), self._name(event.new)
                self._note(f"stage {event.stage}: work of {old} continues on {new} ({event.reason})")
            case Participation(whole=False) if event.live > 1:
                left_out = "; ".join(f"{self._name(peer)}: {why}" for peer, why in sorted(event.why.items()))
                self._note(f"{event.part}: {event.participating} of {event.live} averaged ({left_out})")

    def _name(self, peer: str) -> str:
        return self.names.get(peer, peer[-6:])

    def _note(self, note: str) -> None:
        if note not in self._pending:
            self._pending.append(note)


class RunView:
    """The state of a run. ``add`` takes events in any order between peers, in order within a peer; its cost does not
    grow with the run.

    Public fields: ``steps``, ``traffic``, ``microbatches`` and ``digests``, the general folds; ``addresses`` of peers
    that started, by name; ``devices`` on which they compute, with the reasons; ``stopped``, last words by name;
    ``lost_peers``, names that others reported gone, in order, with the first reason; ``notes``, what happened on the
    way to each step; ``checkpoint_steps``; ``bytes_at_start``, what everybody downloaded of the initial weights.
    """

    def __init__(self) -> None:
        self.steps, self.traffic = StepTable(), TrafficView()
        self.microbatches, self.digests = Microbatches(), Digests()
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.stopped: dict[str, ExitNotice] = {}
        self.lost_peers: dict[str, str] = {}
        self.devices: dict[str, str] = {}
        self.notes = StepNotes()
        self.checkpoint_steps: set[int] = set()
        self.parameters: int | None = None
        self.hops_moved = 0
        self.bytes_at_start = 0

    def add(self, told: RecordedEvent) -> None:
        """Take one event into account."""
        event = told.record.event
        if isinstance(event, StepClosed) and event.step not in self.steps:
            self.notes.closed(event.step)
        for view in (self.steps, self.traffic, self.microbatches, self.digests):
            view.add(told.record)
        self._add_peer(told)
        match event:
            case RunStarted(parameters=parameters):
                self.parameters = parameters
            case CheckpointWritten(step=step):
                self.checkpoint_steps.add(step)
            case StateDownloaded(step=0, bytes_received=received):
                self.bytes_at_start += received
            case HopMoved():
                self.hops_moved += 1
        self._annotate(event)

    def _add_peer(self, told: RecordedEvent) -> None:
        match told.record.event:
            case DeviceChosen(device=device, why=why):
                self.devices[device] = why
            case PeerStarted(addresses=addresses):
                self.addresses[told.name] = addresses
                self.notes.names[told.record.peer] = told.name
            case PeerStopped(reason=reason, exit_code=code):
                self.stopped[told.name] = ExitNotice(told.record.wall, reason, code)
            case PeerLost(name=name, reason=reason):
                self.lost_peers.setdefault(name, reason)

    def _annotate(self, event: Event | RawEvent) -> None:
        """Note it; of a step that was given up, only what is told before its row is there."""
        if not isinstance(event, StepGivenUp) or event.step not in self.steps:
            self.notes.add(event)

    @property
    def tokens_per_s(self) -> float | None:
        """As :meth:`StepTable.tokens_per_s`; with a single step, of that step's own duration."""
        return self.steps[self.steps.last].tokens_per_s if len(self.steps) == 1 else self.steps.tokens_per_s()

    @property
    def bytes_per_step(self) -> float | None:
        """Mean over closed steps of the bytes that all peers sent, without ``bytes_at_start``, which their counts hold
        in step 1; None when no peer has reported."""
        sent = {step: usage.sent for step, usage in self.traffic.by_step.items() if step in self.steps}
        if 1 in sent:
            sent[1] = max(0, sent[1] - self.bytes_at_start)
        return sum(sent.values()) / len(sent) if sent else None


# --- the progress table: colours on a terminal, plain lines anywhere else --------------------------------------------


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

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(file=sys.stdout, highlight=False, quiet=quiet, soft_wrap=True)
        # A status line needs a terminal that can move its cursor.
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        self._status: Status | None = None
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

    def update(self, view: RunView, now: float, steps: int, *, final: bool = False) -> None:
        """Print the rows of steps, of so many, that are closed and settled. ``now`` is the wall clock of the events."""
        while (number := self._printed + 1) in view.steps:
            step = view.steps[number]
            if not (final or now - step.closed_at >= SETTLE_S or number + 1 in view.steps):
                return
            self._printed = number
            notes = view.notes.by_step.get(number, ())
            if notes or number in (1, steps) or number % max(1, steps // _ROWS) == 0:
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
    sent = size_text(usage.sent) if usage else "-"
    loss = "-" if step.given_up else f"{step.loss:.3f}"
    cells = f"{step.step:>6}  {loss:>7}  {amount(step.tokens_per_s):>7}  {len(step.swapped):>5}  {sent:>10}"
    learnt = (learnt_text(step.tokens, step.computed),) if step.computed > step.tokens else ()
    return f"{cells}  {'; '.join((*learnt, *notes))}".rstrip()


def _can_print(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
