"""Tell the person who started a peer in the foreground what it does: the events that everybody else reads, as lines.

:class:`EventPrinter` picks the events; :class:`Waits` keeps words about waiting from being repeated.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
from dataclasses import dataclass, field
from pathlib import Path

from peers.console.event_words import describe, harmless, labelled, swarm_of
from peers.console.voice import Speaker
from peers.console.words import command_name, command_to_invite, gathering, learnt_text, listed, named
from swarm.clock import Clock
from swarm.disk import size_text
from swarm.events import (
    CheckpointWritten,
    Draining,
    Event,
    EventSink,
    Invited,
    PartAssigned,
    Participation,
    PeerBack,
    PeerLost,
    PeerReady,
    PeerStopped,
    QuorumBack,
    QuorumLost,
    RosterChanged,
    RunFound,
    RunStarted,
    StateDownloaded,
    StepClosed,
    StepGivenUp,
    SyncProgress,
    Waiting,
    WentBack,
)
from swarm.ids import PartName, distinct_names
from swarm.state.checkpoints.files import held, steps

# --- words about waiting (pure) --------------------------------------------------------------------------------------
# The same ones, as with each step, are not said again and again.


AGAIN_S = 60.0
"""The same words are said once in so many seconds, unless there was news of the others meanwhile."""


@dataclass(slots=True)
class Waits:
    """The last reported waits, and waits held back because they were reported lately: a lasting wait is reported in the
    end."""

    said: str = ""
    until: float = float("-inf")
    held: str = ""

    def begin(self, what: str, now: float) -> bool:
        """Return whether to say that this is waited for."""
        lately = what == self.said and now < self.until
        self.held = what if lately else ""
        if not lately:
            self.said, self.until = what, now + AGAIN_S
        return not lately

    def end(self) -> None:
        """Nothing is waited for any more."""
        self.held = ""

    def news(self) -> None:
        """Something was said after which the same words tell something new."""
        self.said = ""

    def due(self, now: float) -> str:
        """Return the wait that was held back long enough and still lasts; empty for none."""
        if not self.held or now < self.until:
            return ""
        what, self.held = self.held, ""
        self.said, self.until = what, now + AGAIN_S
        return what


# --- narrator --------------------------------------------------------------------------------------------------------


LINE_S = 1.0
"""Steps that close faster are told once in so many seconds."""
_QUARTERS = 4
_NEWS = (Draining, PeerLost, PeerBack, QuorumLost, QuorumBack, RosterChanged, StepGivenUp, WentBack)
"""Who is there has changed, or this peer was asked to leave: what is waited for after that is worth a line, whatever
was said before."""
_OVER = (PartAssigned, PeerReady)
"""What ends a wait without saying so."""


@dataclass(slots=True)
class _Told:
    """The events heard and the lines said so far."""

    run: RunFound | None = None
    steps_at: float = float("-inf")
    pending: StepClosed | None = None
    waits: Waits = field(default_factory=Waits)
    quarter: int = 0
    kept: list[CheckpointWritten] = field(default_factory=list)
    syncing: tuple[PartName, int] | None = None
    synced: int = 0
    names: dict[str, str] = field(default_factory=dict)
    left_out: tuple[object, ...] = ()


class EventPrinter:
    """Passes every event on, and says some of them. Safe from any thread.

    ``founder`` has told already which run it is. What it holds back of a wait that goes on is said with the first event
    after its time, and some event comes every few seconds. The last one, PeerStopped, also closes ``voice``.
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
        self._learn(event)
        self._say_due(event)
        match event:
            case Waiting():
                self._wait(event)
            case StepClosed():
                self._step(event)
            case SyncProgress():
                self._progress(event)
            case RunFound():
                self._told.run = event
                if not self._founder:
                    self._tell(event)
            case Invited():
                self._invite(event)
            case StateDownloaded():
                self._told.synced = event.step
                self._tell(event)
            case RunStarted() if self._told.synced:
                self._say("joined", f"the run at step {self._told.synced}: {swarm_of(event)}")
            case PeerStopped():
                self._say_pending()
                self._say_kept()
                self._tell(event)
                self._voice.close()
            case _:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        words = describe(event)
        if words is not None and not (isinstance(event, Participation) and self._is_as_before(event)):
            self._say(*words)

    def _say(self, label: str, text: str) -> None:
        self._say_pending()
        self._voice.say(labelled(label, named(text, distinct_names(self._told.names))))

    def _say_kept(self) -> None:
        kept = self._told.kept
        if not kept:
            return
        checkpoints, step = Path(kept[0].path).parents[1], kept[0].step
        run = checkpoints.parent
        self._voice.say(labelled("kept", f"{listed([one.part for one in kept])} of step {step} in {run}"))
        whole = earlier = False
        with contextlib.suppress(OSError):  # what cannot be looked at any more is said to be elsewhere
            whole = held(checkpoints, step).complete
            earlier = not whole and any(held(checkpoints, one).complete for one in steps(checkpoints))
        if not whole:
            self._voice.say(labelled("", f"its other parts are elsewhere, or being written: {gathering(run)}"))
        when = "" if whole else "until then, from an earlier step: " if earlier else "once all of them are here: "
        self._voice.say(labelled("", f'{when}{command_name()} sample {shlex.quote(str(run))} --prompt "The"'))

    # --- events that need memory ---------------------------------------------------------------------------------

    def _learn(self, event: Event) -> None:
        """Learn the names of peers for later lines, and what was kept."""
        if isinstance(event, CheckpointWritten):
            same = [one for one in self._told.kept if one.step == event.step and one.part != event.part]
            self._told.kept = [*same, event]
        if isinstance(event, (RunStarted, RosterChanged)):
            members = event.roster if isinstance(event, RunStarted) else event.joined
            self._told.names |= {str(one.get("peer")): harmless(str(one["name"])) for one in members if one.get("name")}

    def _invite(self, event: Invited) -> None:
        invite, join = event.invite, f"{command_name()} join {event.invite}"
        if event.admission != "open":
            self._voice.say(labelled("invite", "this run admits by invite, one for each peer. In another terminal:"))
            for role in ("stage", "trainer"):
                self._voice.say(command_to_invite(event.admission, role))
            return
        self._voice.say(f"{labelled('invite', 'for those who shall take part:')}\n{invite}")
        self._voice.say(f"To hold a stage, in another terminal or on another machine:\n{join} --role stage")
        self._voice.say(
            "To train, with your own text (without --data: on what comes with Python):\n"
            f"{join} --role trainer --data TEXT"
        )

    def _is_as_before(self, event: Participation) -> bool:
        """A lonely replica, or one that is left out, is told once."""
        before = self._told.left_out
        self._told.left_out = () if event.whole else (event.participating == 1, *sorted(event.why))
        return self._told.left_out == before

    def _step(self, event: StepClosed) -> None:
        """At most one line in a second; the newest is kept and said before whatever is said next."""
        last = self._told.run is not None and event.step >= self._told.run.steps
        self._told.pending = event
        if last or self._clock.monotonic() - self._told.steps_at >= LINE_S:
            self._say_pending()

    def _wait(self, event: Waiting) -> None:
        if not event.what:
            self._told.waits.end()
        elif self._told.waits.begin(event.what, self._clock.monotonic()):
            self._tell(event)

    def _say_due(self, event: Event) -> None:
        """A wait that was held back and goes on, unless this very event says how it stands."""
        waits = self._told.waits
        if isinstance(event, (*_OVER, PeerStopped)):
            waits.end()
        if isinstance(event, _NEWS):
            waits.news()
        if not isinstance(event, Waiting) and (what := waits.due(self._clock.monotonic())):
            self._tell(Waiting(what=what))

    def _say_pending(self) -> None:
        event, self._told.pending = self._told.pending, None
        if event is None or not event.microbatches:
            return
        self._told.steps_at = self._clock.monotonic()
        of = f"/{self._told.run.steps}" if self._told.run is not None else ""
        text = f"loss {event.loss:.3f}, {learnt_text(event.tokens, event.computed)}"
        if event.whole:  # else it was open before this peer took part, and nobody here knows for how long
            learnt = "learnt " if event.computed > event.tokens else ""
            text += f" in {event.seconds:.1f} s ({event.tokens / max(event.seconds, 1e-9):,.0f} {learnt}a second)"
        self._voice.say(labelled(f"step {event.step}{of}", text))

    def _progress(self, event: SyncProgress) -> None:
        """One line that moves on a terminal, elsewhere one per quarter."""
        told, this = self._told, (event.part, event.step)
        if told.syncing != this:
            told.syncing, told.quarter = this, 0
        share = event.bytes_received / max(event.bytes_total, 1)
        text = f"{event.part} of step {event.step}: {size_text(event.bytes_received)} of "
        text += f"{size_text(event.bytes_total)} ({share:.0%})"
        if self._voice.terminal:
            self._voice.update(labelled("syncing", text))
        elif int(share * _QUARTERS) > told.quarter:
            told.quarter = int(share * _QUARTERS)
            self._voice.say(labelled("syncing", text))
