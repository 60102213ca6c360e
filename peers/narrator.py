"""What a peer in the foreground tells the person who started it: the same events as everybody else reads, as lines."""

from __future__ import annotations

import shlex
import threading
from dataclasses import dataclass
from pathlib import Path

from peers.voice import Speaker
from peers.words import command_name, count, printable
from swarm.clock import Clock
from swarm.events import (
    CheckpointWritten,
    DaemonLost,
    DigestMismatch,
    Draining,
    Event,
    EventSink,
    Invited,
    PartAssigned,
    PeerLost,
    PeerReady,
    PeerStarted,
    PeerStopped,
    Reachability,
    RosterChanged,
    RunFound,
    RunStarted,
    StateDownloaded,
    StepClosed,
    SyncProgress,
    Waiting,
)
from swarm.ids import ENDS, PartName

LINE_S = 1.0
"""Steps that close faster are told once in so many seconds."""
LABEL_WIDTH = 14
_QUARTERS = 4


@dataclass(slots=True)
class _Told:
    """What has been heard and said so far."""

    run: RunFound | None = None
    steps_at: float = float("-inf")
    pending: StepClosed | None = None
    quarter: int = 0
    kept: CheckpointWritten | None = None
    syncing: tuple[PartName, int] | None = None


class Narrator:
    """Passes every event on, and says some of them. Safe from any thread.

    ``founder`` has told already which run it is. The last event, PeerStopped, also closes ``voice``.
    """

    def __init__(self, sink: EventSink, voice: Speaker, clock: Clock, *, founder: bool = False) -> None:
        self._sink, self._voice, self._clock, self._founder = sink, voice, clock, founder
        self._told = _Told()
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`."""
        self._sink.emit(event)
        with self._lock:
            self._hear(event)

    def _hear(self, event: Event) -> None:
        match event:
            case StepClosed():
                self._step(event)
            case SyncProgress():
                self._progress(event)
            case RunFound():
                self._told.run = event
                if not self._founder:
                    self._tell(event)
            case Invited():
                self._invite(event.invite)
            case CheckpointWritten():
                self._told.kept = event
            case PeerStopped():
                self._say_pending()
                self._say_kept()
                self._tell(event)
                self._voice.close()
            case _:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        words = describe(event)
        if words is not None:
            self._say_pending()
            self._voice.say(labelled(*words))

    def _say_kept(self) -> None:
        kept = self._told.kept
        if kept is not None:
            run = Path(kept.path).parents[2]
            self._voice.say(labelled("kept", f"{kept.part} of step {kept.step} in {run}"))
            command = f"{command_name()} sample {shlex.quote(str(run))}"
            self._voice.say(labelled("", f'with all parts of a step there: {command} --prompt "The"'))

    # --- events that need memory ---------------------------------------------------------------------------------

    def _invite(self, invite: str) -> None:
        join = f"{command_name()} join {invite}"
        self._voice.say(f"{labelled('invite', 'for whoever shall take part:')}\n{invite}")
        self._voice.say(f"To hold a stage, in another terminal or on another machine:\n{join} --role stage")
        self._voice.say(
            "To train, with your own text (without --data: on what comes with Python):\n"
            f"{join} --role trainer --data TEXT"
        )

    def _step(self, event: StepClosed) -> None:
        """At most one line in a second; the newest is kept and said before whatever is said next."""
        last = self._told.run is not None and event.step >= self._told.run.steps
        self._told.pending = event
        if last or self._clock.monotonic() - self._told.steps_at >= LINE_S:
            self._say_pending()

    def _say_pending(self) -> None:
        event, self._told.pending = self._told.pending, None
        if event is None:
            return
        self._told.steps_at = self._clock.monotonic()
        of = f"/{self._told.run.steps}" if self._told.run is not None else ""
        rate = event.tokens / max(event.seconds, 1e-9)
        text = f"loss {event.loss:.3f}, {event.tokens:,} tokens in {event.seconds:.1f} s ({rate:,.0f} a second)"
        self._voice.say(labelled(f"step {event.step}{of}", text))

    def _progress(self, event: SyncProgress) -> None:
        """One line that moves on a terminal, elsewhere one per quarter."""
        told, this = self._told, (event.part, event.step)
        if told.syncing != this:
            told.syncing, told.quarter = this, 0
        share = event.bytes_received / max(event.bytes_total, 1)
        text = f"{event.part} of step {event.step}: {_megabytes(event.bytes_received)} of "
        text += f"{_megabytes(event.bytes_total)} MB ({share:.0%})"
        if self._voice.terminal:
            self._voice.update(labelled("syncing", text))
        elif int(share * _QUARTERS) > told.quarter:
            told.quarter = int(share * _QUARTERS)
            self._voice.say(labelled("syncing", text))


def describe(event: Event) -> tuple[str, str] | None:
    """(label, text) of an event that needs nothing else to be understood; None: it is not told."""
    match event:
        case PeerStarted():
            return "listening", _list(event.addresses) or "nowhere that could be found out"
        case RunFound():
            made_of = f"{count(event.stages, 'stage')}, {count(event.steps, 'step')}, wire version {event.wire}"
            return "run", f"{event.name}, {event.run[:12]}: {made_of}; from {event.source}"
        case RunStarted():
            return "started", f"{count(len(event.roster), 'peer')}, {event.parameters:,} parameters"
        case PeerReady():
            return "READY", _ready(event)
        case DaemonLost():
            return "lost", f"our own libp2p daemon (exit code {event.exit_code})"
        case PeerStopped():
            return ("done" if event.exit_code == 0 else "ended"), _said(event.reason)
        case _:
            return _describe_place(event) or _describe_others(event)


def _describe_place(event: Event) -> tuple[str, str] | None:
    """How this peer stands."""
    match event:
        case Reachability():
            return "reachability", f"{event.how}{': ' if event.detail else ''}{_said(event.detail)}"
        case Waiting():
            return "waiting", _said(event.what)
        case PartAssigned():
            return "assigned", f"{_part(event.part)}, because {_said(event.reason)}"
        case StateDownloaded():
            amount = f"{_megabytes(event.bytes_received)} MB in {event.seconds:.1f} s"
            return "synced", f"{event.part} of step {event.step}: {amount}, digest verified"
        case Draining():
            return "draining", f"leaving in order, asked by {_said(event.reason)}"
        case _:
            return None


def _describe_others(event: Event) -> tuple[str, str] | None:
    """What happens to the others."""
    match event:
        case RosterChanged():
            joined = ", ".join(_who(one) for one in event.joined)
            left = ", ".join(_who(one) for one in event.left)
            changes = [f"{joined} joined" if joined else "", f"{left} left" if left else ""]
            return "roster", f"step {event.step}: {'; '.join(filter(None, changes)) or 'unchanged'}"
        case PeerLost():
            return "lost", _said(f"{event.name} ({event.peer}): {event.reason}")
        case DigestMismatch():
            return "mismatch", f"replicas of {event.part} differ after step {event.step}"
        case _:
            return None


def labelled(label: str, text: str) -> str:
    """A line with its label in a column of its own; nothing in it that a terminal would obey."""
    return printable(f"{label:<{LABEL_WIDTH}}{text}").rstrip()


def _ready(event: PeerReady) -> str:
    swarm = command_name()
    holds = f"{_part(event.part)} at step {event.step}, after {event.seconds:.1f} s"
    return f"{holds}\n{' ' * LABEL_WIDTH}look: {swarm} status, {swarm} peers; leave: Ctrl-C, or {swarm} drain"


def _part(part: PartName | None) -> str:
    if part is None:
        return "no part of the model"
    return "the ends (embedding and head)" if part == ENDS else part.replace("stage-", "stage ")


def _who(member: dict[str, object]) -> str:
    part = member.get("part") or member.get("role")
    return _said(f"{member.get('name', 'a peer')}{f' ({part})' if part else ''}")


def _said(text: str) -> str:
    """What others may have written, as one line: no line of theirs may look like one of ours."""
    return " ".join(printable(text).split())


def _list(addresses: tuple[str, ...]) -> str:
    return ("\n" + " " * LABEL_WIDTH).join(addresses)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"
