"""Strike: at events through the plan, at times and by draws directly; and bring back who was struck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.chaos import faults
from peers.chaos.cast import FOUNDER, SwarmSpec, twin_of
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


class FaultInjector:
    """Called from the play's loop only. ``started`` are those whom a strike started."""

    def __init__(
        self,
        scenario: Scenario,
        cast: SwarmSpec,
        world: PlayWorld,
        plan: FaultPlan,
        watch: RunWatch,
        timeline: Timeline,
    ) -> None:
        self._scenario, self._cast, self._world = scenario, cast, world
        self._plan, self._watch, self._timeline = plan, watch, timeline
        self._planned: dict[str, Planned] = {}
        self._timed: list[_Timed] = []
        self._draws: list[Draw] = []
        self._begin_s: float | None = None
        self._known: set[str] = set()
        self._excused: dict[str, set[int]] = {}
        self._leaving: set[str] = set()
        self._now = 0.0
        self._awaited: set[str] = set()
        self._forgiven: set[str] = set()
        self.started: set[str] = set()
        self._overtaken: list[End] = []
        plan.about = self._about
        self._away: dict[str, float] = {}
        self._to_end: dict[str, Planned | None] = {}
        self._drawn = 0
        self._last_step = 0

    def arm(self, planned: Sequence[Planned], draws: Sequence[Draw]) -> None:
        """From now on it strikes. Those with a time count it from the first closed step."""
        first = self._watch.first_closed or self._world.wall()
        self._planned = {one.strike.label: one for one in planned}
        self._timed = [_Timed(first + one.at_s, one.strike) for one in planned if one.at_s is not None]
        self._draws = list(draws)

    def look(self, wall: float) -> None:
        """Strike what is due, note what has struck."""
        self._now = wall
        for timed in [timed for timed in self._timed if timed.wall <= wall]:
            self._timed.remove(timed)
            self._plan.strike(timed.strike)
        self._draw(wall)
        self.note()
        self._awaited -= self._watch.ever_ready
        for name in self._watch.ever_ready & set(self._watch.holding) - self._leaving:
            self._excused.pop(name, None)

    def take_overtaken(self) -> list[End]:
        """Those since the last time that were told to leave and started again before anybody had seen them end."""
        taken, self._overtaken = self._overtaken, []
        return taken

    def _about(self, fault: Fault, wall: float) -> None:
        if isinstance(fault, faults.Restart) and fault.peer in self._leaving:
            self._leaving.discard(fault.peer)
            code = self._world.exit_code(fault.peer)
            struck = code is None or code in CODES[faults.Stop]
            self._overtaken.append(End(wall, fault.peer, code, struck, code is None or code in KILLED))

    def rest(self) -> None:
        """Nothing strikes any more: what is said from now on are farewells."""
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

    def excuses(self, name: str, code: int | None) -> bool:
        """Return whether a strike is to blame that this peer ended with this code."""
        allowed = self._excused.get(name, set()) | (set(KILLED) if name in self._to_end else set())
        return name in self._forgiven or code in allowed

    def forced(self, name: str, code: int | None) -> bool:
        """Return whether it was told to leave, and killed because its time was up."""
        return name in self._leaving and code in KILLED

    def ended(self, name: str, wall: float, code: int | None) -> None:
        """A peer was seen to have ended: who was killed for its memory is brought back from then on."""
        self._leaving.discard(name)
        if name in self._forgiven and code not in self._excused.get(name, set()):  # it gave up: the other goes on
            self._forgiven -= {name, twin_of(name)}
        if name not in self._to_end or code not in KILLED:
            return
        one = self._to_end.pop(name)
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
        told += [f"{len(self._draws)} more draws"] if self._draws else []
        told += [f"{name} to be killed for its memory" for name in sorted(self._to_end)]
        told += [f"{name} to leave" for name in sorted(self._leaving)]
        told += [f"what struck {name} to be over" for name, until in sorted(self._away.items()) if until > self._now]
        told += [f"{name} to be ready" for name in sorted(self._awaited)]
        return ", ".join(dict.fromkeys(told))

    def broken(self) -> list[str]:
        """Return the errors of strikes."""
        return [f"a fault broke: {one}" for one in self._plan.broken()]

    def problems(self) -> list[str]:
        """Return the deviations of a finished play from its plan."""
        told = [f"a fault did not happen as planned: {one}" for one in self._plan.missing()]
        if not self._drawn and (self._scenario.schedule is not None or self._scenario.trace is not None):
            told.append(f"nothing that was to be drawn has struck: {len(self._draws)} draws are left")
        told += [f"{name} was not killed for its memory" for name in sorted(self._to_end)]
        told += [f"{name} was started again and never got ready" for name in sorted(self._awaited)]
        return told

    # --- draws ---------------------------------------------------------------------------------------------------

    def _draw(self, wall: float) -> None:
        first = self._watch.first_closed
        if not self._draws or first is None or self._watch.step < 1 + self._scenario.baseline_steps:
            return
        if self._begin_s is None:
            self._begin_s = wall
        while self._draws and self._begin_s + self._draws[0].at_s <= wall:
            chosen = choose(self._draws[0], self._among(), self._free(wall))
            if not self._struck(self._draws[0], chosen):
                return  # everybody is spared now, or has just died: as soon as somebody can be struck
            self._draws.pop(0)

    def _struck(self, draw: Draw, chosen: tuple[str, ...]) -> bool:
        """Return whether at least one of them was hit by what was drawn."""
        back = draw.seconds if draw.kind in ("kill", "stop") else None
        hit = False
        for number, fault in enumerate(_of(draw, chosen, self._grace())):
            label = f"{DRAWN}{draw.kind}-{self._drawn + 1}" + (f"-{number}" if number else "")
            strike = Strike(label, NEVER, fault)
            try:
                self._plan.strike_or_raise(strike)
            except CannotInflict:
                continue
            except Exception as error:  # noqa: BLE001 - the world is broken: told in problems()
                self._plan.errors.append((label, error))
            self._planned[label] = Planned(strike, None, back, not draw.new_disk)
            hit = True
        self._drawn += hit
        return hit

    def _among(self) -> tuple[str, ...]:
        for key, section in (("schedule", self._scenario.schedule), ("trace", self._scenario.trace)):
            if section is not None:
                return self._cast.chosen(section.among, f"{key}.among")
        return ()

    def _grace(self) -> float:
        schedule, trace = self._scenario.schedule, self._scenario.trace
        return schedule.grace_s if schedule is not None else trace.grace_s if trace is not None else TRACE_GRACE_S

    def _free(self, wall: float) -> dict[str, str]:
        away = {name for name, until in self._away.items() if until > wall} | set(self._to_end)
        ready = self._watch.ready()
        return {name: part for name, part in ready.items() if name not in away and self._world.alive(name)}

    # --- what follows --------------------------------------------------------------------------------------------

    def _fired(self, fired: Fired) -> None:
        fault, label = fired.strike.fault, fired.strike.label
        lasts = getattr(fault, "seconds", None)
        self._timeline.struck(fired.wall, f"{describe(fault, fired.victims)}{f' for {lasts:.1f} s' if lasts else ''}")
        victims = fired.victims
        for name in victims:
            if lasts:
                self._away[name] = fired.wall + lasts + 2.0
            if type(fault) in CODES and not isinstance(fault, faults.LimitMemory):  # the kernel says when
                self._excused.setdefault(name, set()).update(CODES[type(fault)])
                self._watch.gone(name)
            if isinstance(fault, faults.Stop):
                self._leaving.add(name)
            if isinstance(fault, faults.Twin):  # which of the two goes on is theirs to say
                self._forgiven |= {name, twin_of(name)}
                self.started.add(twin_of(name))
            if isinstance(fault, faults.Restart) and self._world.alive(twin_of(name)):
                self._forgiven |= {name, twin_of(name)}
        if isinstance(fault, STARTING):
            self.started |= set(fired.peers)
            self._awaited |= set(fired.peers)
            self._leaving -= set(fired.peers)
            if not isinstance(fault, faults.Upgrade):
                for name in fired.peers:
                    self._excused.pop(name, None)
        self._bring_back(fired, label, victims)

    def _bring_back(self, fired: Fired, label: str, victims: Sequence[str]) -> None:
        one = self._planned.get(label)
        if isinstance(fired.strike.fault, faults.LimitMemory):
            self._to_end |= dict.fromkeys(victims, one)
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
