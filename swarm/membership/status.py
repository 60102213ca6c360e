"""Where one peer stands, as it changes: who moves it on writes it, control socket and directory read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarm.columns import count_passed
from swarm.consensus.records import CloseRecord
from swarm.events import DiskRefused, DiskTook, Draining, EventSink, PartAssigned, Reachability, Waiting
from swarm.ids import PartName
from swarm.membership.status_types import DeviceUse, MemoryReport, PartTurnout, Phase
from swarm.pipeline.activity import PipelineActivity

STEPS_SHOWN = 8
"""Of so many steps the early share is kept."""


def _unknown() -> MemoryReport | None:
    return None


def _nobody_asks() -> None:
    return


@dataclass(slots=True)
class PeerStatus:
    """One peer's own view of itself. ``no_majority`` says what it waits for while too few voters are there to decide
    anything, "" while enough are; ``ends_by`` is when it ends, in order or not, in seconds since the epoch, once it was
    told to leave within a time; ``may_go_back`` whether a person here wants the run to go back to a checkpoint.
    ``loss``, ``tokens`` (learnt, and computed) and ``tokens_per_s`` (learnt) are of the
    newest closed step, the last unknown for one that was open before this peer took part; ``codecs`` are those of
    boundaries in the open step, where records name them; ``early`` are the shares of the newest steps' microbatches
    that were fed early, the newest last; ``capacities`` what each stage can take by the newest record, microbatches a
    second; ``passed`` how many of its microbatches each variant was passed by, ``committed`` how many it has;
    ``device_use`` what this peer's device computed of the newest step that it saw whole; ``averaging`` says who
    was in the averaging of each of its parts, and ``unfed`` of which trainers the run takes nothing until which step;
    ``disk`` is what the disk does not take, with the reason; ``mixed`` how often it mixed its weights with others, and
    ``mixed_alone`` how often nobody was there to do so with; ``memory`` counts what its memory holds when it is asked
    for, and ``activity`` says what it does for microbatches; ``placed`` is called when it has chosen its part, which
    others who choose should know soon."""

    events: EventSink
    phase: Phase = "starting"
    waiting_for: str = ""
    no_majority: str = ""
    ends_by: float | None = None
    may_go_back: bool = False
    part: PartName | None = None
    reason: str = ""
    reachability: str = "unknown"
    step: int = 0
    loss: float | None = None
    tokens: tuple[int, int] = (0, 0)
    tokens_per_s: float | None = None
    codecs: tuple[tuple[str, str], ...] = ()
    early: tuple[float, ...] = ()
    capacities: tuple[float, ...] = ()
    passed: Mapping[PartName, int] = field(default_factory=dict)
    committed: int = 0
    device_use: DeviceUse | None = None
    averaging: tuple[PartTurnout, ...] = ()
    unfed: tuple[tuple[str, int], ...] = ()
    disk: dict[str, str] = field(default_factory=dict)
    mixed: int = 0
    mixed_alone: int = 0
    memory: Callable[[], MemoryReport | None] = _unknown
    activity: Callable[[], PipelineActivity] = PipelineActivity
    placed: Callable[[], None] = _nobody_asks

    def wait_for(self, what: str) -> None:
        """Say what this peer waits for; nothing is said twice."""
        if what != self.waiting_for:
            self.events.emit(Waiting(what=what))
        self.waiting_for = what
        if self.phase == "starting":
            self.phase = "waiting"

    def awaited(self) -> str:
        """Return what this peer waits for, for those who ask it."""
        return self.waiting_for

    def disk_refuses(self, what: str, reason: str) -> None:
        """The disk does not take something, and why; "": it takes it again. Nothing is said twice."""
        if bool(reason) != (what in self.disk):
            self.events.emit(DiskRefused(what=what, reason=reason) if reason else DiskTook(what=what))
        if reason:
            self.disk[what] = reason
        else:
            self.disk.pop(what, None)

    def assigned(self, part: PartName | None, reason: str) -> None:
        """It is known what this peer holds."""
        self.phase, self.waiting_for = "syncing", ""
        self.moved(part, reason)
        self.placed()

    def moved(self, part: PartName | None, reason: str) -> None:
        """It holds this from now on, and is what it was: ready, or about to leave."""
        self.part, self.reason = part, reason
        self.events.emit(PartAssigned(part=part, reason=reason))

    def reached(self, how: str, detail: str, addresses: tuple[str, ...]) -> None:
        """It is known how others reach this peer."""
        self.reachability = f"{how} ({detail})" if detail else how
        self.events.emit(Reachability(how=how, detail=detail, addresses=addresses))

    def ready(self) -> None:
        """A member that takes work."""
        self.phase, self.waiting_for = "ready", ""

    def has_mixed(self, averaged: int) -> None:
        """It trains apart, and mixed its weights with others: so many versions, its own counted, went into the mean."""
        self.mixed += 1
        self.mixed_alone += averaged < 2

    def drain(self, reason: str, *, again: bool = False, bound: str = "") -> None:
        """It was asked to leave; ``again``: it was leaving already. See :class:`~swarm.events.Draining`."""
        self.phase = "draining"
        self.events.emit(Draining(reason=reason, again=again, bound=bound))
        if self.no_majority:  # anyone who asks now has to see what that waits for, however often it was said before
            self.waiting_for = ""
            self.wait_for(self.no_majority)

    def closed(self, record: CloseRecord, seconds: float | None, computed: int) -> None:
        """A step was closed, ``seconds`` after it opened; None for one that this peer did not see open. Its
        microbatches have so many tokens ``computed``."""
        self.step, self.codecs = record.step, record.codecs
        if record.committed:
            self.passed = count_passed(record.members.all_parts, record.committed)
            self.committed = len(record.committed)
            share = sum(one.early for one in record.committed) / len(record.committed)
            self.early = (*self.early, share)[-STEPS_SHOWN:]
            self.loss = record.loss
            self.tokens = record.tokens, computed
            self.tokens_per_s = None if seconds is None else record.tokens / max(seconds, 1e-9)
