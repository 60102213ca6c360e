"""What a peer in the foreground tells the person who started it: the same events as everybody else reads, as lines."""

from __future__ import annotations

import shlex
import threading
from dataclasses import dataclass
from pathlib import Path

from peers.voice import Speaker
from peers.words import command_name, count, printable
from swarm.clock import Clock
from swarm.errors import EXIT_DRAINED, EXIT_OK
from swarm.events import (
    AttemptFailed,
    CheckpointFailed,
    CheckpointWritten,
    CopyDropped,
    CopyHeld,
    CutOff,
    DaemonLost,
    DaemonRestarted,
    DigestMismatch,
    DiskRefused,
    DiskTook,
    DonorDropped,
    Draining,
    Event,
    EventSink,
    Invited,
    LineageBegan,
    LineageConfirmed,
    LineageGivenUp,
    PartAssigned,
    PeerBack,
    PeerLost,
    PeerReady,
    PeerStarted,
    PeerStopped,
    PreemptionNotice,
    PreemptionWatch,
    QuorumBack,
    QuorumLost,
    Reachability,
    RosterChanged,
    RunFound,
    RunStarted,
    StateDownloaded,
    StepClosed,
    StepGivenUp,
    SyncProgress,
    TermBegan,
    Waiting,
    WorkExcluded,
    WorkWithdrawn,
)
from swarm.ids import ENDS, PartName

LINE_S = 1.0
"""Steps that close faster are told once in so many seconds."""
WAITING_S = 60.0
"""What is waited for again and again, as with each step, is told once in so many seconds."""
LABEL_WIDTH = 14
_QUARTERS = 4
_AT_ONCE = {"Ctrl-C": "; again leaves at once", "swarm drain": "; Ctrl-C twice leaves at once"}


@dataclass(slots=True)
class _Told:
    """What has been heard and said so far."""

    run: RunFound | None = None
    steps_at: float = float("-inf")
    pending: StepClosed | None = None
    waiting: str = ""
    waiting_at: float = float("-inf")
    quarter: int = 0
    kept: CheckpointWritten | None = None
    syncing: tuple[PartName, int] | None = None
    synced: int = 0


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
            case StateDownloaded():
                self._told.synced = event.step
                self._tell(event)
            case RunStarted() if self._told.synced:
                self._say("joined", f"the run at step {self._told.synced}: {_swarm(event)}")
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
        if words is not None and not (isinstance(event, Waiting) and self._said_lately(event.what)):
            self._say(*words)

    def _say(self, label: str, text: str) -> None:
        self._say_pending()
        self._voice.say(labelled(label, text))

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

    def _said_lately(self, waiting: str) -> bool:
        told, now = self._told, self._clock.monotonic()
        lately = waiting == told.waiting and now - told.waiting_at < WAITING_S
        if not lately:
            told.waiting, told.waiting_at = waiting, now
        return lately

    def _say_pending(self) -> None:
        event, self._told.pending = self._told.pending, None
        if event is None or not event.microbatches:
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
            return "started", _swarm(event)
        case PeerReady():
            return "READY", _ready(event)
        case DaemonLost():
            return "lost", f"our own libp2p daemon (exit code {event.exit_code})"
        case DaemonRestarted():
            return "restored", f"our own libp2p daemon serves again after {event.seconds:.1f} s"
        case PeerStopped():
            return _end(event)
        case _:
            return _describe_place(event) or _describe_others(event)


def _describe_place(event: Event) -> tuple[str, str] | None:
    """How this peer stands."""
    match event:
        case Reachability():
            return "reachability", f"{event.how}{': ' if event.detail else ''}{_said(event.detail)}"
        case Waiting():
            return ("waiting", _said(event.what)) if event.what else None
        case PartAssigned():
            return "assigned", f"{_part(event.part)}, because {_said(event.reason)}"
        case StateDownloaded():
            return "synced", f"{event.part} of step {event.step}: {_came(event)}, digest verified"
        case Draining():
            return "draining", f"leaving in order, asked by {_said(event.reason)}{_AT_ONCE.get(event.reason, '')}"
        case PreemptionWatch() | PreemptionNotice():
            return "preemption", _said(_preemption(event))
        case _:
            return _describe_keeping(event)


def _describe_keeping(event: Event) -> tuple[str, str] | None:
    """What it keeps, and what its disk does not let it keep."""
    match event:
        case CopyHeld():
            return "copying", f"{_part(event.part)} of step {event.step}, in case its replicas die: {_came(event)}"
        case CopyDropped():
            return "copying", f"{_part(event.part)} no longer: {_said(event.reason)}"
        case DonorDropped():
            return "syncing", f"{_part(event.part)} no more from {_said(f'{event.donor}: {event.reason}')}"
        case CheckpointFailed():
            kept = "no complete one is here" if event.kept is None else f"that of step {event.kept} stays"
            return "checkpoint", f"of step {event.step} was not written: {_said(event.reason)}; {kept}"
        case DiskRefused():
            return (
                "disk",
                f"does not take {_said(event.what)}: {_said(event.reason)}; tried again while this peer lives",
            )
        case DiskTook():
            return "disk", f"takes {_said(event.what)} again: nothing is missing"
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
        case PeerBack():
            return "back", _said(f"{event.name} ({event.peer}) answers again")
        case DigestMismatch():
            return "mismatch", f"replicas of {event.part} differ after step {event.step}"
        case _:
            return _describe_repair(event)


def _describe_repair(event: Event) -> tuple[str, str] | None:
    """How a step is saved whose members are lost."""
    match event:
        case TermBegan():
            return "leading", _said(f"step {event.step}, in place of those that are gone: {event.reason}")
        case AttemptFailed():
            return "repeated", _said(f"the closing of step {event.step}: {event.reason}")
        case WorkWithdrawn():
            gone = count(len(event.trainers), "trainer")
            return "withdrawn", f"what {gone} did for step {event.step}: the others do as much instead"
        case WorkExcluded():
            lost = f"{len(event.microbatches)} of the microbatches of step {event.step}"
            return "excluded", _said(f"{lost}, the others do as many instead: {event.reason}")
        case StepGivenUp():
            held = ", ".join(f"{peer} holds {part} now" for peer, part in event.holders.items())
            lost = " and ".join(event.lost)
            return "given up", _said(f"step {event.step}, since {lost} had nobody left: {held}; its work is done again")
        case CutOff():
            return "cut off", _said(f"{event.reason}; getting the newest state")
        case _:
            return _describe_partition(event)


def _describe_partition(event: Event) -> tuple[str, str] | None:
    """What a swarm does that is cut in two."""
    match event:
        case QuorumLost():
            some = f"{event.there} of {count(event.voters, 'voter')}"
            return "no quorum", f"{some} can be reached: step {event.step} waits for a majority, nothing is lost"
        case QuorumBack():
            return "quorum", f"a majority is there again after {event.seconds:.0f} s: step {event.step} goes on"
        case LineageBegan():
            some = f"{event.there} of {count(event.voters, 'voter')}"
            return "provisional", f"{some} go on from step {event.step} by themselves: it counts when a majority agrees"
        case LineageConfirmed():
            return "confirmed", f"a majority agrees with all since step {event.step}: {event.microbatches} microbatches"
        case LineageGivenUp():
            return "given up", _said(f"{event.microbatches} microbatches since step {event.step}: {event.reason}")
        case _:
            return None


def _came(event: StateDownloaded | CopyHeld) -> str:
    """How much was downloaded, and how fast."""
    return f"{_megabytes(event.bytes_received)} MB in {event.seconds:.1f} s"


def labelled(label: str, text: str) -> str:
    """A line with its label in a column of its own; nothing in it that a terminal would obey."""
    return printable(f"{label:<{LABEL_WIDTH}}{text}").rstrip()


def _end(event: PeerStopped) -> tuple[str, str]:
    """What goes wrong is said by the error that follows, with what to do: once."""
    if EXIT_OK < event.exit_code < EXIT_DRAINED:
        return "ended", f"with exit code {event.exit_code}; the error says why"
    return ("done" if event.exit_code == EXIT_OK else "ended"), _said(event.reason)


def _swarm(event: RunStarted) -> str:
    return f"{count(len(event.roster), 'peer')}, {event.parameters:,} parameters"


def _ready(event: PeerReady) -> str:
    swarm = command_name()
    holds = f"{_part(event.part)} at step {event.step}, after {event.seconds:.1f} s"
    return f"{holds}\n{' ' * LABEL_WIDTH}look: {swarm} status, {swarm} peers; leave: Ctrl-C, or {swarm} drain"


def _preemption(event: PreemptionWatch | PreemptionNotice) -> str:
    if isinstance(event, PreemptionNotice):
        left = "" if event.deadline_s is None else f" in {event.deadline_s:.0f} s"
        return f"{event.source}: this machine is taken back{left}"
    if not event.source:
        return f"no notices are watched: {event.problem}"
    if event.problem:
        return f"{event.source} cannot be asked for notices: {event.problem}; trying on"
    return f"notices of {event.source} are watched"


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
