"""Attempts to have a hop done: sending is the first action of one, trying another replica the next. Pure.

On the way out there is one attempt at a time: the replica before the hop sends its output again; where that is gone as
well, it is replaced first, and so on back to the trainer. On the way back each hop has its own: a replacement fetches
its input and its gradient from its neighbours and goes on. An attempt is over when its call was answered: what the
replica then does is reported, or missed at its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.errors import Busy, DeadlineMissed, PeerError, Refused
from swarm.ids import PeerId
from swarm.pipeline.trainer.directives import (
    Directive,
    MoveHop,
    PauseHop,
    SendHop,
    SuspectReplica,
    Warn,
    WithdrawHop,
)
from swarm.pipeline.trainer.pace import ReplicaChoice, Work
from swarm.pipeline.trainer.route import Hop, RouteState
from swarm.waiting import ExponentialBackoff, doubled

FETCH_SHARE = 0.5
"""Part of the time of a takeover that fetching may take: so a stalled neighbour is named before the deadline."""
MAX_DOUBLINGS = 6
EXTRA_TURNS = 2

GONE = ("unreachable", "deadline")
"""Codes that say something about a peer or its link."""
POISON = ("violation", "failed")
"""Codes that say something about the microbatch, or about what is wrong with one replica."""


@dataclass(slots=True)
class _Attempt:
    """A call or a pause, until the hop was asked for. ``error`` is why the replica before did not do it."""

    why: str
    error: PeerError | None = None
    first: bool = False  # the last stage's gradient, which nobody has had yet
    send: SendHop | None = None
    until: float = 0.0  # so long a busy replica is asked again, where no other can do it
    busy: ExponentialBackoff | None = None
    replacing: bool = False
    rested: bool = False  # all were tried, and left alone for a while
    then: list[int] = field(default_factory=list)  # hops to be asked once more after it


class HopAttempts:
    """The attempts of one journey, never two at a hop; what they ask for is added to ``asked``."""

    def __init__(self, way: RouteState, replicas: ReplicaChoice, asked: list[Directive], *, hosted: bool) -> None:
        self._way, self._replicas, self._asked, self._hosted = way, replicas, asked, hosted
        self._open: dict[int, _Attempt] = {}
        self._later: dict[int, tuple[PeerId, PeerError | None]] = {}

    def __contains__(self, at: object) -> bool:
        return at in self._open

    def busy_at(self, at: int) -> bool:
        """Whether a hop cannot be tried now: on the way out an attempt may be about an earlier one."""
        return at in self._open if self._way.back else bool(self._open)

    # --- from first to last --------------------------------------------------------------------------------------

    def start(self, at: int, error: PeerError | None, why: str, now: float) -> None:
        """Have a hop done: by another replica where there is an ``error``. While it cannot be tried that is kept."""
        hop = self._way.hops[at]
        if self.busy_at(at):
            peer, known = self._later.get(at, (hop.replica, None))
            self._later[at] = (hop.replica, error if known is None or peer != hop.replica else known)
            return
        attempt = self._open[at] = _Attempt(why, error)
        if error is not None:  # what is told in the same moment, of other replicas, is heard before one is chosen
            self._ask_for(PauseHop(at, 0.0), why)
            return
        unasked = not hop.receipts and not hop.nudged and hop.misses == 0
        attempt.first = self._way.back and at == self._way.last and unasked
        self._ask(at, attempt, now)

    def after(self, at: int, again: int, now: float) -> None:
        """When the attempt at a hop is over, ask for the one beside it once more."""
        attempt = self._open.get(at)
        if attempt is None:
            self.start(again, None, f"stage {at} was asked again", now)
        elif again not in attempt.then:
            attempt.then.append(again)

    def over(self, at: int, now: float) -> None:
        """The call was answered, or is not needed: look at what was kept meanwhile."""
        for other in self._open.pop(at).then:
            self.start(other, None, f"stage {at} was replaced", now)
        later, self._later = self._later, {}
        for other, (peer, error) in later.items():
            if self._way.hops[other].replica == peer and not self._way.done(other):
                self.start(other, error, "it was kept until now", now)

    def not_sent(self, at: int, error: PeerError, now: float) -> str:
        """The call failed. Busy is waited for where only this replica can do it, else another is tried; on the way out
        whoever was to send again is replaced itself. Returns why the journey cannot go on, else nothing."""
        attempt = self._open[at]
        assert attempt.send is not None  # noqa: S101 - it was performed
        if isinstance(error, Busy) and attempt.send.verb == "backward":
            attempt.busy = attempt.busy or ExponentialBackoff()
            pause_s = attempt.busy.pause_s()
            if now + pause_s <= attempt.until:
                self._ask_for(PauseHop(at, pause_s), f"{attempt.send.peer} is busy, and only it has the graph")
                return ""
        if isinstance(error, DeadlineMissed) and error.peer == self._way.hops[at].replica:
            self.turn_passed(at)
        del self._open[at]
        self._way.hops[at].due = None
        if not self._way.back:
            at = max(0, at - 1)
            self._way.hops[at].forwarded = False
        poison = self.blame(at, attempt.send.peer, error, now)
        if not poison:
            self._open[at], attempt.first, attempt.error = attempt, False, error
            self._replace(at, attempt, now)
        return poison

    def paused(self, at: int, now: float) -> None:
        """The pause is over."""
        attempt = self._open[at]
        if attempt.send is not None:
            self._ask_for(attempt.send, "it was busy")
        elif attempt.replacing:
            self._choose(at, attempt, now)
        else:
            self._replace(at, attempt, now)

    def withdraw(self, at: int, why: str) -> None:
        """Give up an attempt."""
        del self._open[at]
        self._ask_for(WithdrawHop(at), why)

    def close(self, why: str) -> None:
        """Give up all attempts, and what was kept."""
        for at in list(self._open):
            self.withdraw(at, why)
        self._later.clear()

    def _ask(self, at: int, attempt: _Attempt, now: float) -> None:
        way = self._way
        self._leave_out_departed(at, now)
        if not way.back:
            within_s = self.begin_turn(at, "forward", now)
            peer = way.hops[max(0, at - 1)].replica
            attempt.send = SendHop(at, "resend" if at else "forward", peer, within_s, way.route, way.attempt)
        else:
            within_s, peer = self.begin_turn(at, "backward" if attempt.first else "adopt", now), way.hops[at].replica
            if at == way.last and not self._hosted and (attempt.first or attempt.error is not None):
                attempt.send = SendHop(at, "backward", peer, within_s, way.route, way.attempt)
            else:
                pass_on = not way.handed_on(at)
                attempt.send = SendHop(at, "adopt", peer, FETCH_SHARE * within_s, way.route, way.attempt, pass_on)
        attempt.until, attempt.busy = now + within_s, None
        self._ask_for(attempt.send, attempt.why)

    def _replace(self, at: int, attempt: _Attempt, now: float) -> None:
        hop = self._way.hops[at]
        attempt.send, attempt.replacing, attempt.rested, hop.due = None, True, False, None
        hop.tried.add(hop.replica)
        self._choose(at, attempt, now)

    def _choose(self, at: int, attempt: _Attempt, now: float) -> None:
        """Choose another replica; when all were tried, pause (longer each time) and start over. The hop may have been
        done meanwhile, by one that was thought to be lost."""
        hop, replicas = self._way.hops[at], self._replicas
        all_tried = not attempt.rested and hop.tried >= replicas.present(at)
        if not all_tried:
            if self._way.done(at) and hop.replica not in replicas.gone():
                self.over(at, now)
                return
            chosen = replicas.choose(at, hop.tried | set(hop.failed), now) or replicas.choose(at, hop.tried, now)
            if chosen is not None:
                self._move(at, attempt, *chosen)
                self._ask(at, attempt, now)
                return
        hop.tried.clear()
        attempt.rested = all_tried
        hop.backoff = hop.backoff or ExponentialBackoff(replicas.wiring.typical_seconds(at))
        why = "all were tried" if all_tried else "nobody may be chosen now"
        self._ask_for(PauseHop(at, hop.backoff.pause_s()), f"stage {at}: {why}")

    def _move(self, at: int, attempt: _Attempt, new: PeerId, why: str) -> None:
        old, error = self._way.hops[at].replica, attempt.error
        assert error is not None  # noqa: S101 - the old one is replaced for it
        self._way.move(at, new)
        moved = MoveHop(at, old, new, "backward" if self._way.back else "forward", isinstance(error, DeadlineMissed))
        self._ask_for(moved, f"{error.code}: {error.reason}")
        attempt.why = f"{why}; {old}: {error.code}"

    def _leave_out_departed(self, at: int, now: float) -> None:
        """Give those hops to others whose replica takes part no more, and that are still to be done: work that was
        begun early outlives a change of the roster, and no replica takes a route that names a stranger, wherever."""
        way, replicas = self._way, self._replicas
        for other in range(0 if way.back else at + 1, way.last + 1):
            hop = way.hops[other]
            if other == at or other in self._open or hop.contributed or replicas.takes_part(other, hop.replica):
                continue
            if (chosen := replicas.choose(other, hop.tried, now)) is not None:
                left = Refused("it takes part no more", peer=hop.replica)
                self._move(other, _Attempt(chosen[1], left), *chosen)

    # --- turns, and whose fault it is when one fails --------------------------------------------------------------

    def begin_turn(self, at: int, work: Work, now: float) -> float:
        """The replica's turn begins. Returns how many seconds it has: twice as many each time that the hop was late."""
        hop, pace = self._way.hops[at], self._replicas.pace
        seconds = doubled(pace.seconds(hop.replica, work), min(hop.misses, MAX_DOUBLINGS), pace.ceiling_s)
        self._way.begin_turn(at, now, seconds, work)
        return seconds

    def fills_its_time(self, hop: Hop, now: float) -> bool:
        """Whether the replica handed the gradient on and told of other microbatches in its turn: it will add this one
        when there is nothing else to do."""
        if hop.turned is None or hop.nudged or now >= hop.turned + self._replicas.pace.ceiling_s:
            return False
        return hop.replica not in self._replicas.silence

    def has_only_begun(self, hop: Hop) -> bool:
        """Whether the run has, so that its queues still grow: then a replica that is late, and meanwhile told of other
        microbatches, is given another turn or two, twice as long each."""
        young = self._replicas.pace.young(self._way.turn_of(hop))
        return young and hop.misses <= EXTRA_TURNS and hop.replica not in self._replicas.silence

    def turn_passed(self, at: int) -> None:
        """When the replica has said nothing meanwhile, that is news for other journeys, too."""
        hop = self._way.hops[at]
        asked = hop.asked.get(hop.replica)
        if asked is not None and self._replicas.silence.passed(hop.replica, asked[0]):
            self._ask_for(Warn(), f"{hop.replica} said nothing in its turn")

    def suspect(self, at: int, peer: PeerId, reason: str, now: float) -> None:
        """It does not answer, or not in time: it is left out for a while, and the health watch looks at it."""
        self._ask_for(SuspectReplica(peer), reason)
        self._replicas.wiring.fail(at, peer, now=now, reason=reason)

    def blame(self, at: int, peer: PeerId, error: PeerError, now: float) -> str:
        """A replica failed. Being busy, or a step ahead or behind, is no fault. Returns why the microbatch cannot be
        computed when two different ones, or twice the only one, failed on the data; else nothing."""
        if error.code in GONE:
            self.suspect(at, peer, error.reason, now)
        if error.code not in POISON:
            return ""
        failed = self._way.hops[at].failed
        failed.append(peer)
        others = self._replicas.present(at) - set(failed)
        if len(set(failed)) < 2 and (others or len(failed) < 2):
            return ""
        return f"stage {at} failed on {', '.join(dict.fromkeys(failed))}: {error.code}: {error.reason}"

    def answered(self, at: int, now: float) -> None:
        """The hop was done: whoever failed on it before is left out for a while, unlike with poison."""
        hop = self._way.hops[at]
        for other in set(hop.failed) - {hop.replica}:
            why = "it failed on a microbatch that another replica computed"
            self._replicas.wiring.fail(at, other, now=now, reason=why)
        hop.failed.clear()

    def _ask_for(self, action: SendHop | PauseHop | WithdrawHop | MoveHop | SuspectReplica | Warn, why: str) -> None:
        self._asked.append(Directive(action, why))
