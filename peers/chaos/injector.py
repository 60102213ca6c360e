"""Strike: at events through the plan, at times and by draws directly; and bring back who was struck.

:class:`Excuses` tells which ends of peers a strike explains, :class:`Returns` who must come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peers.chaos import faults
from peers.chaos.cast import FOUNDER, STRANGERS, SwarmSpec, twin_of
from peers.chaos.faults import CODES, KILLED, CannotInflict, Fault
from peers.chaos.lives import End
from peers.chaos.plan import FaultPlan, Fired, Strike
from peers.chaos.scenario import Scenario
from peers.chaos.schedule import Draw, choose
from peers.chaos.strikes import NEVER, Planned
from peers.chaos.timeline import Timeline
from peers.chaos.watch import RunWatch
from peers.chaos.world import PlayWorld

BACK, DRAWN = "back:", "drawn:"
"""Begin the labels of what brings a peer back, and of what was drawn; a label of a scenario has no colon."""
STARTING = (faults.Restart, faults.Start, faults.JoinerStorm, faults.Upgrade)
"""After these peers must get ready."""
TRACE_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Timed:
    """Something to do at a moment of the world's wall clock."""

    wall: float
    strike: Strike


class StrikeDraws:
    """The strikes that are drawn, from some steps on after the first that closed."""

    def __init__(self, scenario: Scenario, cast: SwarmSpec) -> None:
        self._scenario, self._cast = scenario, cast
        self.left: list[Draw] = []
        self.struck = 0
        self._begin_s: float | None = None

    def due(self, wall: float, watch: RunWatch) -> bool:
        """Return whether the next draw is due."""
        if not self.left or watch.first_closed is None or watch.step < 1 + self._scenario.baseline_steps:
            return False
        if self._begin_s is None:
            self._begin_s = wall
        return self._begin_s + self.left[0].at_s <= wall

    def faults(self, free: Mapping[str, str]) -> list[Fault]:
        """Return the faults of the next draw for the free peers, by their parts; none when all must be spared."""
        draw = self.left[0]
        return _of(draw, choose(draw, self._among(), free), self._grace())

    def label(self, number: int) -> str:
        """That of one of the faults of the next draw."""
        return f"{DRAWN}{self.left[0].kind}-{self.struck + 1}" + (f"-{number}" if number else "")

    def missing(self) -> str:
        """Return the problem of a play in which no draw has struck; "" when there is none."""
        if self.struck or (self._scenario.schedule is None and self._scenario.trace is None):
            return ""
        return f"nothing that was to be drawn has struck: {len(self.left)} draws are left"

    def _among(self) -> tuple[str, ...]:
        for key, section in (("schedule", self._scenario.schedule), ("trace", self._scenario.trace)):
            if section is not None:
                return self._cast.chosen(section.among, f"{key}.among")
        return ()

    def _grace(self) -> float:
        schedule, trace = self._scenario.schedule, self._scenario.trace
        return schedule.grace_s if schedule is not None else trace.grace_s if trace is not None else TRACE_GRACE_S


class FaultInjector:
    """Called from the play's loop only. ``excuses`` are what strikes explain, ``returns`` who must come back."""

    def __init__(
        self,
        scenario: Scenario,
        cast: SwarmSpec,
        world: PlayWorld,
        plan: FaultPlan,
        watch: RunWatch,
        timeline: Timeline,
    ) -> None:
        self._world, self._plan, self._watch, self._timeline = world, plan, watch, timeline
        self._drawing = StrikeDraws(scenario, cast)
        self.excuses, self.returns = Excuses(), Returns()
        self._planned: dict[str, Planned] = {}
        self._timed: list[_Timed] = []
        self._known: set[str] = set()
        self._overtaken: list[End] = []
        self._last_step = 0
        plan.about = self._about

    def arm(self, planned: Sequence[Planned], draws: Sequence[Draw]) -> None:
        """From now on it strikes. Those with a time count it from the first closed step."""
        first = self._watch.first_closed or self._world.wall()
        self._planned = {one.strike.label: one for one in planned}
        self._timed = [_Timed(first + one.at_s, one.strike) for one in planned if one.at_s is not None]
        self._drawing.left = list(draws)

    def look(self, wall: float) -> None:
        """Strike what is due, note what has struck."""
        self.returns.look(wall, ())
        for timed in [timed for timed in self._timed if timed.wall <= wall]:
            self._timed.remove(timed)
            self._plan.strike(timed.strike)
        while self._drawing.due(wall, self._watch):
            if not self._strike_drawn():
                break  # everybody is spared now, or has just died: as soon as somebody can be struck
            self._drawing.left.pop(0)
        self.note()
        self.returns.look(wall, self._watch.ever_ready)
        for name in self._watch.ever_ready & set(self._watch.holding) - self.excuses.leaving:
            self.excuses.forget(name)

    def take_overtaken(self) -> list[End]:
        """Those since the last time that were told to leave and started again before anybody had seen them end."""
        taken, self._overtaken = self._overtaken, []
        return taken

    def _about(self, fault: Fault, wall: float) -> None:
        if isinstance(fault, faults.Restart) and fault.peer in self.excuses.leaving:
            self.excuses.leaving.discard(fault.peer)
            code = self._world.exit_code(fault.peer)
            struck = code is None or code in CODES[faults.Stop]
            self._overtaken.append(End(wall, fault.peer, code, struck, code is None or code in KILLED))

    def rest(self) -> None:
        """Nothing strikes any more: what is said from now on are departures."""
        self._plan.over = True

    def note(self) -> None:
        """Take note of what has struck since."""
        for label in [label for label in list(self._plan.fired) if label not in self._known]:
            self._known.add(label)
            self._fired(self._plan.fired[label])

    @property
    def last_wall(self) -> float:
        """The time of the newest strike or return; 0 before the first."""
        return max((fired.wall for fired in list(self._plan.fired.values())), default=0.0)

    def ended(self, name: str, wall: float, code: int | None) -> None:
        """Note that a peer has ended; one that was killed for its memory is brought back from then on."""
        self.excuses.ended(name, code)
        if name not in self.excuses.to_end or code not in KILLED:
            return
        one = self.excuses.to_end.pop(name)
        self._watch.gone(name)
        if one is not None and one.back_s is not None:
            strike = Strike(f"{BACK}{one.strike.label}:{name}", NEVER, faults.Restart(name, one.keep_disk))
            self._timed.append(_Timed(wall + one.back_s, strike))

    def settled(self, step: int, steps: int) -> bool:
        """Return whether nothing is to come any more, everybody that was brought back is ready, and so many steps were
        closed since."""
        if self.waiting():
            self._last_step = step
        return not self.waiting() and step >= self._last_step + steps

    def waiting(self) -> str:
        """Return the pending strikes and returns in words; "" when there are none."""
        told = [f"{one.strike.label} to strike" for one in self._timed]
        known = {*self._plan.fired, *self._plan.never}
        told += [
            f"{label} to strike at {one.strike.on.described}" if one.strike.on is not NEVER else f"{label} to strike"
            for label, one in self._planned.items()
            if label not in known
        ]
        told += [f"{len(self._drawing.left)} more draws"] if self._drawing.left else []
        told += [f"{name} to be killed for its memory" for name in sorted(self.excuses.to_end)]
        told += [f"{name} to leave" for name in sorted(self.excuses.leaving)]
        told += [f"what struck {name} to be over" for name in self.returns.held()]
        told += [f"{name} to end" for name in self._strangers()]
        told += [f"{name} to be ready" for name in sorted(self.returns.awaited)]
        return ", ".join(dict.fromkeys(told))

    def _strangers(self) -> list[str]:
        """Return the processes of strangers that still attack, or prepare to."""
        started = [name for fired in list(self._plan.fired.values()) for name in fired.peers]
        return [name for name in started if name.startswith(STRANGERS) and self._world.alive(name)]

    def broken(self) -> list[str]:
        """Return the errors of strikes."""
        return [f"a fault broke: {one}" for one in self._plan.broken()]

    def problems(self) -> list[str]:
        """Return the deviations of a finished play from its plan."""
        told = [f"a fault did not happen as planned: {one}" for one in self._plan.missing()]
        told += filter(None, [self._drawing.missing()])
        told += [f"{name} was not killed for its memory" for name in sorted(self.excuses.to_end)]
        told += [f"{name} was started again and never got ready" for name in sorted(self.returns.awaited)]
        return told

    # --- draws ---------------------------------------------------------------------------------------------------

    def _strike_drawn(self) -> bool:
        """Return whether the next draw hit at least one of those that are free."""
        draw = self._drawing.left[0]
        back = draw.seconds if draw.kind in ("kill", "stop") else None
        hit = False
        for number, fault in enumerate(self._drawing.faults(self._free())):
            label = self._drawing.label(number)
            strike = Strike(label, NEVER, fault)
            try:
                self._plan.strike_or_raise(strike)
            except CannotInflict:
                continue
            except Exception as error:  # noqa: BLE001 - the world is broken: told in problems()
                self._plan.errors.append((label, error))
            self._planned[label] = Planned(strike, None, back, not draw.new_disk)
            hit = True
        self._drawing.struck += hit
        return hit

    def _free(self) -> dict[str, str]:
        away = {*self.returns.held(), *self.excuses.to_end}
        ready = self._watch.ready()
        return {name: part for name, part in ready.items() if name not in away and self._world.alive(name)}

    # --- what follows --------------------------------------------------------------------------------------------

    def _fired(self, fired: Fired) -> None:
        fault, label, victims = fired.strike.fault, fired.strike.label, fired.victims
        lasts = getattr(fault, "seconds", None)
        self._timeline.struck(fired.wall, f"{describe(fault, victims)}{f' for {lasts:.1f} s' if lasts else ''}")
        for name in victims:
            if lasts:
                self.returns.hold(name, fired.wall + lasts + 2.0)
            twin_alive = isinstance(fault, faults.Restart) and self._world.alive(twin_of(name))
            if self.excuses.struck(name, fault, twin_alive=twin_alive):
                self._watch.gone(name)
            if isinstance(fault, faults.Twin):
                self.returns.started.add(twin_of(name))
        if isinstance(fault, STARTING):
            self.returns.start(fired.peers)
            self.excuses.started(fired.peers, in_order=isinstance(fault, faults.Upgrade))
        self._bring_back(fired, label, victims)

    def _bring_back(self, fired: Fired, label: str, victims: Sequence[str]) -> None:
        one = self._planned.get(label)
        if isinstance(fired.strike.fault, faults.LimitMemory):
            self.excuses.to_end |= dict.fromkeys(victims, one)
            return
        if one is None or one.back_s is None:
            return
        for name in victims:
            keep = one.keep_disk or name == FOUNDER  # without its disk it would found another run
            strike = Strike(f"{BACK}{label}:{name}", NEVER, faults.Restart(name, keep))
            self._timed.append(_Timed(fired.wall + one.back_s, strike))


def describe(fault: Fault, hit: Sequence[str]) -> str:
    """A strike for people; ``hit`` are those it was meant for and has hit."""
    names = ", ".join(hit)
    if isinstance(fault, faults.Partition):
        arrow = "to" if fault.one_way else "and"
        return f"cut between {names} {arrow} {', '.join(fault.others)}"
    if isinstance(fault, faults.Restart):
        return f"start {names} again, {'with' if fault.keep_disk else 'without'} its disk"
    if isinstance(fault, faults.SlowLinks):
        return f"slow links between {names} and {', '.join(fault.others)}"
    return f"{fault.name.replace('_', ' ')} {names}".rstrip()


def _of(draw: Draw, chosen: tuple[str, ...], grace_s: float) -> list[Fault]:
    if not chosen:
        return []
    if draw.kind == "pause":
        return [faults.Pause(chosen, draw.seconds)]
    if draw.kind == "stop":
        return [faults.Stop(chosen, min(grace_s, max(1.0, draw.seconds)))]
    if draw.kind == "kill_daemon":
        return [faults.KillDaemon(name) for name in chosen]
    return [faults.Kill(chosen)]


class Excuses:
    """The ends of peers that strikes explain. ``leaving`` were told to leave; ``to_end`` have limited memory, each with
    what was planned for it: the kernel says when they end."""

    def __init__(self) -> None:
        self.leaving: set[str] = set()
        self.to_end: dict[str, Planned | None] = {}
        self._codes: dict[str, set[int]] = {}
        self._forgiven: set[str] = set()

    def struck(self, name: str, fault: Fault, *, twin_alive: bool) -> bool:
        """Return whether the fault, which hit this peer, ends it at once, as far as is known. ``twin_alive``: it starts
        again beside another with its key."""
        ends = type(fault) in CODES and not isinstance(fault, faults.LimitMemory)
        if ends:
            self._codes.setdefault(name, set()).update(CODES[type(fault)])
        if isinstance(fault, faults.Stop):
            self.leaving.add(name)
        if isinstance(fault, faults.Twin) or twin_alive:  # which of the two goes on is theirs to say
            self._forgiven |= {name, twin_of(name)}
        return ends

    def started(self, names: Iterable[str], *, in_order: bool) -> None:
        """These were started again; ``in_order``: having left as they were told to."""
        for name in names:
            self.leaving.discard(name)
            if not in_order:
                self.forget(name)

    def forget(self, name: str) -> None:
        """Let what ended it before explain nothing any more."""
        self._codes.pop(name, None)

    def explain(self, name: str, code: int | None) -> bool:
        """Return whether a strike is to blame that this peer ended with this code."""
        allowed = self._codes.get(name, set()) | (set(KILLED) if name in self.to_end else set())
        return name in self._forgiven or code in allowed

    def forced(self, name: str, code: int | None) -> bool:
        """Return whether it was told to leave, and killed because its time was up."""
        return name in self.leaving and code in KILLED

    def ended(self, name: str, code: int | None) -> None:
        """It was seen to have ended. Of two with one key the one that gave up is excused, and the other goes on."""
        self.leaving.discard(name)
        if name in self._forgiven and code not in self._codes.get(name, set()):
            self._forgiven -= {name, twin_of(name)}


class Returns:
    """The peers that strikes ``started``, ``awaited`` until they are ready, and those that a strike holds."""

    def __init__(self) -> None:
        self.started: set[str] = set()
        self.awaited: set[str] = set()
        self._held: dict[str, float] = {}
        self._now = 0.0

    def look(self, wall: float, ready: Iterable[str]) -> None:
        """It is so late now, and these have been ready."""
        self._now = wall
        self.awaited.difference_update(ready)

    def start(self, names: Iterable[str]) -> None:
        """These were started by a strike."""
        names = set(names)
        self.started |= names
        self.awaited |= names

    def hold(self, name: str, until: float) -> None:
        """A strike lasts for this peer until then."""
        self._held[name] = until

    def held(self) -> tuple[str, ...]:
        """For whom a strike lasts now, sorted."""
        return tuple(sorted(name for name, until in self._held.items() if until > self._now))
