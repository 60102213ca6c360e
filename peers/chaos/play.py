"""Play a scenario: found the run, start everybody, wait for the first step, strike as planned, end in order.

The page to read first. What is decided here is only when: what a strike does is decided by the world, who is struck by
:mod:`peers.chaos.schedule`, what came of it by :mod:`peers.chaos.figures`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.chaos.cast import FOUNDER, SwarmSpec, admits_by_invite
from peers.chaos.faults import CannotInflict
from peers.chaos.injector import FaultInjector
from peers.chaos.lives import End
from peers.chaos.plan import FaultPlan
from peers.chaos.scenario import Scenario
from peers.chaos.schedule import Draw
from peers.chaos.strikes import Planned
from peers.chaos.timeline import Timeline
from peers.chaos.watch import RunWatch
from peers.chaos.world import PeerSpec, PlayWorld
from peers.console.interrupt import Interrupted, check
from swarm.errors import SwarmError

LOOK_S, LOOK_AT_PEERS_S = 0.05, 0.5
FOUND_S = 120.0
"""How long the founder may take until it has an invite: it makes a tokenizer."""
START_S, START_EACH_S = 120.0, 20.0
"""How long the first step may take, and how much more for each peer: all of them load the same libraries at once."""
STEP_S = 15.0
"""How long a step may take on average, of runs that end by steps."""
SPARE_S = 180.0
"""What a play may take beyond what its scenario says, and beyond the last strike: draws begin only after a baseline,
and who is struck needs time to come back."""
AFTER_STEPS = 2
"""Steps that are closed after the last strike and return, before a play ends by the clock."""
GRACE_S, END_S = 10.0, 60.0
TAIL_LINES = 15


class PlayFailed(SwarmError):
    """A play did not get where it should within its time, or a peer ended as no strike explains."""


@dataclass(slots=True)
class PlayOutcome:
    """A play's data for its report: the ``started`` peers, their ends, counts of events that ``happened`` (including
    those that a full disk did not take), and its ``problems``. Departures do not count: the play ``ended`` when all
    began to leave, at the end of the run or, ``by_clock``, because its time was up. For an ``interrupted`` play
    ``to_come`` names in words the strikes that were still due."""

    began: float = 0.0
    ended: float = 0.0
    by_clock: bool = False
    started: set[str] = field(default_factory=set)
    ends: list[End] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False
    to_come: str = ""


class Play:
    """Runs once. ``planned`` are strikes at events and times, ``draws`` those that begin after the baseline."""

    def __init__(
        self, scenario: Scenario, cast: SwarmSpec, world: PlayWorld, planned: Sequence[Planned], draws: Sequence[Draw]
    ) -> None:
        self._scenario, self._cast, self._world = scenario, cast, world
        self._planned, self._draws = planned, draws
        self.watch = RunWatch(world.stamps)
        self.outcome = PlayOutcome()
        self._up: set[str] = set()
        self._suspects: set[str] = set()
        self._look_at = 0.0
        self._never = threading.Event()

    def run(self, say: Callable[[str], None]) -> PlayOutcome:
        """Play it; never leaves anybody running. What goes wrong is among the outcome's problems; Ctrl-C ends the play
        as if its time were up, and passes."""
        timeline = Timeline(say, self._name)
        injector: FaultInjector | None = None
        self.watch.on_heard.append(timeline.heard)
        self._world.listen(self.watch.hear)
        self.outcome.began = self._world.wall()
        try:
            self._start(timeline)
            plan = FaultPlan(*(one.strike for one in self._planned), world=self._world)
            injector = FaultInjector(self._scenario, self._cast, self._world, plan, self.watch, timeline)
            self._strike(injector, timeline)
            self.outcome.problems += injector.problems()
        except (PlayFailed, CannotInflict) as error:
            self.outcome.problems.append(str(error))
        except Interrupted:
            self.outcome.interrupted = True
            self.outcome.to_come = "" if injector is None else injector.waiting()
            raise
        except Exception as error:
            self.outcome.problems.append(f"the play itself broke: {error!r}")
            raise
        finally:
            timeline.leaving(self._world.wall())
            if injector is not None:
                injector.rest()
            self._end()
            self._world.stop([name for name in self._up if self._world.alive(name)], GRACE_S)
            if injector is not None:
                injector.note()  # a strike may have been under way
                self.outcome.ends += injector.take_overtaken()
                self.outcome.problems += injector.broken()
        return self.outcome

    # --- the way to the first step -------------------------------------------------------------------------------

    def _start(self, timeline: Timeline) -> None:
        now = [member for member in self._cast.members if not member.later]
        self._open(FOUNDER)
        timeline.tell(self._world.wall(), f"founded: 1 of {len(now)} peers is started")
        self._until(lambda: bool(self.watch.invite), FOUND_S, "founded the run", (FOUNDER,))
        for member in self._cast.members:
            if member.name == FOUNDER:
                continue
            if member.later:
                self._world.expect(self._invited(member.spec))
            else:
                self._open(member.name)
        names = tuple(member.name for member in now)
        deadline = START_S + START_EACH_S * len(names)
        self._until(lambda: self.watch.first_closed is not None, deadline, "closed the first step", names)
        timeline.tell(self._world.wall(), f"the first step is closed; {len(names)} peers")

    def _open(self, name: str) -> None:
        member = next(one for one in self._cast.members if one.name == name)
        self._world.start(self._invited(member.spec))
        self._up.add(name)
        self.outcome.started.add(name)

    def _invited(self, spec: PeerSpec) -> PeerSpec:
        """Return the peer with the founder's invite in its words, or one of its own where the run admits by invite."""
        invite = self.watch.invite
        if spec.role != "bootstrap" and admits_by_invite(self._scenario):
            wanted = ("--for", spec.name, "--role", spec.role)
            invite = self._world.order(FOUNDER, ("invite", *wanted, "--peer", FOUNDER))
        return spec.with_invite(invite)

    def _until(self, done: Callable[[], bool], seconds: float, what: str, who: Sequence[str]) -> None:
        ends = time.monotonic() + seconds
        while not done():
            for name in who:
                if name in self._up and not self._world.alive(name):
                    raise PlayFailed(f"{name} ended before it {what}:\n{self._tail(name)}")
            if time.monotonic() > ends:
                late = [name for name in who if name not in self.watch.ever_ready] or list(who)
                raise PlayFailed(f"nobody {what} within {seconds:.0f} s; {late[0]} says:\n{self._tail(late[0])}")
            self._wait()

    # --- striking ------------------------------------------------------------------------------------------------

    def _strike(self, injector: FaultInjector, timeline: Timeline) -> None:
        said = False
        began, until = self.watch.first_closed or self._world.wall(), self._scenario.until
        minutes = until.minutes
        said_s = (minutes * 60 if minutes else 0.0) + (until.steps * STEP_S if until.steps else 0.0)
        injector.arm(self._planned, self._draws)
        while True:
            wall = self._world.wall()
            injector.look(wall)
            self._look(injector)
            if until.steps and self.watch.step >= until.steps:
                injector.rest()
                self._leave()
                return
            over = minutes is not None and wall - began >= minutes * 60
            left_s = max(began + said_s, injector.last_wall) + SPARE_S - wall
            late = left_s < 0
            if over and injector.settled(self.watch.step, AFTER_STEPS) and (late or self._has_happened()):
                self.outcome.by_clock = True
                for _ in range(2):  # who has ended since, and whom nothing explains
                    self._see(injector)
                return
            if over and not said:
                said = True
                waits = injector.waiting() or "more steps, or what is expected to happen"
                timeline.tell(wall, f"the time is over; {left_s:.0f} s at most for {waits}")
            if late:
                waits = injector.waiting() or "more steps"
                raise PlayFailed(f"not over after {wall - began:.0f} s, at step {self.watch.step}: waits for {waits}")
            self._stalled(wall)
            self._wait()

    def _has_happened(self) -> bool:
        """Return whether what the scenario expects has, and so many steps are closed: on a busy machine, or one that is
        three times slower, it takes its time."""
        happened, expect = self.watch.so_far(), self._scenario.expect
        if self.watch.step < expect.at_least.get("steps", 0):
            return False
        return all(happened[kind] >= times for kind, times in expect.happened.items())

    def _look(self, injector: FaultInjector) -> None:
        """Some twice a second: a world may ask an engine."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AT_PEERS_S
            self._see(injector)

    def _see(self, injector: FaultInjector) -> None:
        """Record the peers that have ended, and those that are here anew, since the last look. Raises PlayFailed for
        one that nothing explains, at the second look."""
        self.outcome.ends += injector.take_overtaken()
        self._suspects = {name for name in self._suspects if not self._world.alive(name)}
        self._up |= {name for name in injector.returns.started if self._world.alive(name)}
        self.outcome.started |= injector.returns.started
        for name in [name for name in sorted(self._up) if not self._world.alive(name)]:
            code = self._world.exit_code(name)
            struck = injector.excuses.explain(name, code)
            if not struck and name not in self._suspects:
                self._suspects.add(name)  # a strike is known a moment after it hits
                continue
            self._up.discard(name)
            self._suspects.discard(name)
            forced = injector.excuses.forced(name, code)
            injector.ended(name, self._world.wall(), code)
            self.outcome.ends.append(End(self._world.wall(), name, code, struck, forced))
            if not struck and not self._over():
                raise PlayFailed(f"{name} ended with {code}, which no strike explains:\n{self._tail(name)}")

    def _over(self) -> bool:
        return bool(self._scenario.until.steps and self.watch.step >= self._scenario.until.steps)

    def _stalled(self, wall: float) -> None:
        newest = max(self.watch.closed.values(), default=wall)
        longest = 2 * self._scenario.expect.gap_s + 30.0
        if wall - newest > longest:
            some = sorted(self.watch.holding) or [FOUNDER]
            raise PlayFailed(f"no step was closed for {wall - newest:.0f} s; {some[0]} says:\n{self._tail(some[0])}")

    def _leave(self) -> None:
        """The run is over: all end by themselves."""
        self._end()
        ends = time.monotonic() + END_S
        while any(self._world.alive(name) for name in self._up) and time.monotonic() < ends:
            self._wait()

    def _end(self) -> None:
        """Stop measuring. Idempotent."""
        if not self.outcome.ended:
            self.outcome.ended = self._world.wall()
            self.outcome.problems += self._world.problems()
            self.outcome.happened = self.watch.so_far()

    def _wait(self) -> None:
        self._never.wait(LOOK_S)
        check()  # it may have come inside a destructor, where it is only remembered

    # --- words ---------------------------------------------------------------------------------------------------

    def _name(self, identity: str) -> str:
        for name in sorted(self._up | set(self._cast.names)):
            try:
                if self._world.identity(name) == identity:
                    return name
            except KeyError:
                continue
        return identity[-8:]

    def _tail(self, name: str) -> str:
        try:
            lines = Path(self._world.log(name)).read_text(errors="replace").splitlines()
        except (OSError, KeyError) as error:
            return f"    (no log: {error})"
        said = [line for line in lines if not line.startswith("{")] or lines
        return "\n".join(f"    {line[:300]}" for line in said[-TAIL_LINES:])
