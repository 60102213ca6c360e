"""The hops of one journey: who computed what, whose turn it is, and what is tried to have each done. Pure.

A hop's turn begins when the hop before it (on the way back: the one after it) reported; from then on its deadline runs.
Every replica that was ever named at a hop may still answer: the first answer counts, and names its sender.

What is asked for is a :class:`Directive`: an action, and why. A :class:`JourneyPhase` is one too: the journey goes on
with what is done in it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Violation
from swarm.ids import PeerId
from swarm.pipeline.messages import Direction
from swarm.pipeline.seals import Content, Shown, told_digest
from swarm.pipeline.trainer.pace import ReplicaChoice, Work
from swarm.waiting import LONGEST_TURN_S, MAX_DOUBLINGS, ExponentialBackoff, doubled


class JourneyPhase(Enum):
    """How far a microbatch has come."""

    CHOOSING = "choosing"  # its replicas, one a stage
    EMBEDDING = "embedding"  # what the first stage gets is being made
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    ADDING = "adding"  # every stage has added it; the trainer's own ends do so now
    COMPLETE = "complete"
    VOID = "void"  # it cannot be computed, no matter who tries
    LOST = "lost"  # nobody wants it any more


class Warn(NamedTuple):
    """Have all journeys look again: a replica has fallen silent."""


class SendHop(NamedTuple):
    """Call ``peer`` so that hop ``at`` is done: ``forward`` and ``backward`` give it the tensor, ``resend`` has the
    replica before it send its output again, ``adopt`` has it taken over on the way back, and the gradient passed on
    once more if ``pass_on``."""

    at: int
    verb: Literal["forward", "resend", "backward", "adopt"]
    peer: PeerId
    within_s: float
    route: tuple[PeerId, ...]
    attempt: int
    pass_on: bool = True


class PauseHop(NamedTuple):
    """Wait before hop ``at`` is tried again."""

    at: int
    seconds: float


class WithdrawHop(NamedTuple):
    """Give up the call, or the pause, at hop ``at``."""

    at: int


class SupplyTargets(NamedTuple):
    """Hosted ends: bring the targets to the last stage."""

    peer: PeerId


class MoveHop(NamedTuple):
    """Another replica has the hop from now on, or the same one again. ``since`` when the turn of the old one began, of
    which it has told nothing."""

    stage: int
    old: PeerId
    new: PeerId
    direction: Direction
    late: bool
    refused: bool
    since: float | None


class SuspectReplica(NamedTuple):
    """Have the health watch look at a peer."""

    peer: PeerId


class DropHop(NamedTuple):
    """Tell a replica that another does its work; whether that arrives matters little."""

    at: int
    peer: PeerId


JourneyAction = (
    JourneyPhase | Warn | SendHop | PauseHop | WithdrawHop | SupplyTargets | MoveHop | SuspectReplica | DropHop
)


class Directive(NamedTuple):
    """An action, and why."""

    action: JourneyAction
    reason: str


# --- the route --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receipt:
    """A replica's signature that it added the microbatch, with what it got and sent for that and the signatures under
    what it got; with hosted ends the last stage's loss."""

    signature: bytes
    content: Content = Content()
    seals: tuple[bytes, bytes] = (b"", b"")
    loss_sum: float = 0.0
    tokens: int = 0

    @property
    def digest(self) -> bytes:
        """Return what the signature is of, which is all that others are shown."""
        return told_digest(self.content.to_wire(), self.seals)


@dataclass(slots=True)
class Hop:
    """One stage of the way."""

    replica: PeerId
    named: set[PeerId]
    """Everybody who was ever given the hop."""
    forwarded: bool = False
    receipts: dict[PeerId, Receipt] = field(default_factory=dict)
    asked: dict[PeerId, tuple[float, Work]] = field(default_factory=dict)
    """When each replica's turn began and for what, until it is heard of."""
    due: float | None = None
    """The end of the present turn; None while it is nobody's turn."""
    misses: int = 0
    """Turns that passed."""
    tried: set[PeerId] = field(default_factory=set)
    """Who is not chosen again before all others were."""
    failed: list[PeerId] = field(default_factory=list)
    """Who failed on the microbatch itself, in order."""
    turned: float | None = None
    """When the present replica handed the gradient on, so that only its receipt is missing; None before."""
    again: bool = False
    """Whether what it gets or sends was asked for again, and may have been computed anew."""
    nudged: bool = False
    """Whether the present replica was asked for news that only did not arrive."""
    backoff: ExponentialBackoff | None = None
    """Pauses after all replicas were tried; None before that happened."""

    @property
    def contributed(self) -> bool:
        """Return whether the replica that the route names has added the microbatch."""
        return self.replica in self.receipts


class RouteState:
    """Where one journey stands. ``back`` is set when the loss was computed and the way back began."""

    def __init__(self, route: Sequence[PeerId]) -> None:
        self.hops = [Hop(peer, {peer}) for peer in route]
        self.attempt = self.began = 0
        """The newest attempt, and the first: mail of those before is of a way that was given up."""
        self.turned: int | None = None
        """The attempt with which the last stage was given its gradient."""
        self.back = False
        self.home = False
        """Whether the first stage's gradient is here, or none is awaited."""

    def shown(self) -> list[Shown]:
        """Return what the replicas of the route say that they got and sent, of a microbatch that all have added."""
        added = [(hop, hop.receipts[hop.replica]) for hop in self.hops]
        return [Shown(hop.replica, frozenset(hop.named), said.content, said.seals, hop.again) for hop, said in added]

    def note_asked(self, at: int, verb: str) -> None:
        """Have it known of whom something was asked again: on the way out those behind the hop send again, too. A
        repeated attempt makes nobody compute anew."""
        if verb == "backward" and self.turned is None:
            self.turned = self.attempt
        if verb == "adopt" or self.attempt > (self.turned if self.turned is not None else self.began):
            for hop in self.hops[at : at + 1 if self.back else None]:
                hop.again = True

    def extend(self, peer: PeerId) -> None:
        """Choose the replica of the next stage."""
        self.hops.append(Hop(peer, {peer}))

    @property
    def route(self) -> tuple[PeerId, ...]:
        """One replica per stage."""
        return tuple(hop.replica for hop in self.hops)

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.hops) - 1

    @property
    def complete(self) -> bool:
        """Return whether every stage has added the microbatch, and the gradient is home."""
        return self.home and all(hop.contributed for hop in self.hops)

    @property
    def returned(self) -> bool:
        """Return whether the gradient has come all the way, so that only receipts may be missing."""
        return self.back and self.home and (self.hops[0].turned is not None or self.hops[0].contributed)

    def handed_on(self, at: int) -> bool:
        """Return whether the gradient that a hop hands on has arrived: before it something was done with it, or it is
        here."""
        return self.home if at == 0 else self.hops[at - 1].turned is not None or self.hops[at - 1].contributed

    def turn_of(self, hop: Hop) -> Work:
        """Return what a hop whose turn it is does."""
        if not self.back:
            return "forward"
        return "backward" if hop.turned is None else "weights"

    def done(self, at: int) -> bool:
        """Return whether nothing more is awaited of a hop in this direction."""
        hop = self.hops[at]
        if not self.back:
            return hop.forwarded
        return hop.contributed and (at > 0 or self.home)

    def ever_named(self, at: int, peer: PeerId) -> bool:
        """Return whether the trainer ever gave this hop to this replica."""
        return 0 <= at <= self.last and peer in self.hops[at].named

    def begin_turn(self, at: int, now: float, seconds: float, work: Work) -> None:
        """From now on the hop's replica has so long."""
        hop = self.hops[at]
        hop.due = now + seconds
        hop.asked.setdefault(hop.replica, (now, work))

    def asked_at(self, at: int, peer: PeerId) -> float | None:
        """Return when the replica's turn began, of which it has told nothing yet; None where that is unknown."""
        asked = self.hops[at].asked.get(peer)
        return None if asked is None else asked[0]

    def heard_of(self, at: int, peer: PeerId, now: float) -> tuple[Work, float] | None:
        """A replica reported: what it did and how long it took since its turn began; None where that is unknown."""
        asked = self.hops[at].asked.pop(peer, None)
        return None if asked is None else (asked[1], now - asked[0])

    def forwarded(self, at: int, peer: PeerId) -> bool:
        """``peer`` computed the hop on the way out, and so did all before it. False when that is no news. Who answers
        first takes the hop."""
        hop = self.hops[at]
        if self.back or hop.forwarded:
            return False
        self._name(at, peer)
        for earlier in self.hops[: at + 1]:
            earlier.forwarded, earlier.due = True, None
        return True

    def turned_back(self, at: int, peer: PeerId, now: float) -> bool:
        """``peer`` handed the gradient on. False when that is no news, or of one that was replaced."""
        hop = self.hops[at]
        if hop.replica != peer or hop.contributed or hop.turned is not None:
            return False
        hop.turned = now
        return True

    def contributed(self, at: int, peer: PeerId, receipt: Receipt) -> bool:
        """``peer`` added the microbatch. False when that is no news, or another's counts already."""
        hop = self.hops[at]
        hop.receipts.setdefault(peer, receipt)
        if hop.contributed and peer != hop.replica:
            return False
        self._name(at, peer)
        hop.forwarded = True
        if self.done(at):
            hop.due = None
        return True

    def move(self, at: int, new: PeerId) -> None:
        """Another replica takes the hop; a new attempt. On the way out, what is after it has to be done, too."""
        hop = self.hops[at]
        hop.replica, hop.due, hop.nudged, hop.turned = new, None, False, None
        hop.named.add(new)
        hop.asked.pop(new, None)
        self.attempt += 1
        if not self.back:
            for later in self.hops[at:]:
                later.forwarded, later.due = False, None

    def lost(self, peer: PeerId) -> list[int]:
        """A replica is gone with what it held. Returns the hops that have to be done again, or whose turn it has: a hop
        that it handed on is not missed before the way back. Where the receipt of another stands in the route changes,
        and so does the attempt: neighbours refuse one that leads elsewhere than it did."""
        found = []
        for at, hop in enumerate(self.hops):
            had = hop.receipts.pop(peer, None) is not None
            if hop.replica != peer:
                continue
            standing_in = next(iter(hop.receipts), None)
            if had and standing_in is not None:
                self._name(at, standing_in)
            elif had or hop.due is not None:
                found.append(at)
        return found

    def overdue(self, now: float, silent: Container[PeerId] = ()) -> list[int]:
        """Hops whose turn has passed, or is one of somebody who has fallen silent."""
        hops = enumerate(self.hops)
        return [at for at, hop in hops if hop.due is not None and (hop.due <= now or hop.replica in silent)]

    def next_due(self) -> float | None:
        """Return when the first turn ends; None while nothing is awaited."""
        return min((hop.due for hop in self.hops if hop.due is not None), default=None)

    def _name(self, at: int, peer: PeerId) -> None:
        """The replica that answered is the one on the route."""
        if self.hops[at].replica != peer:
            self.hops[at].replica = peer
            self.attempt += 1


# --- attempts to have a hop done: sending is the first action of one, trying another replica the next -----------------
# On the way out there is one attempt at a time: the replica before the hop sends its output again; where that is gone
# as well, it is replaced first, and so on back to the trainer. On the way back each hop has its own: a replacement
# fetches its input and its gradient from its neighbours and goes on. An attempt is over when its call was answered:
# what the replica then does is reported, or missed at its deadline.


FETCH_SHARE = 0.5
"""Part of the time of a takeover that fetching may take: so a stalled neighbour is named before the deadline."""
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
        """Return whether a hop cannot be tried now: on the way out an attempt may be about an earlier one."""
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
        """When the attempt at a hop is over, ask for the one next to it once more."""
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
        the one who was to send again is replaced itself. Returns why the journey cannot go on, else nothing."""
        attempt = self._open[at]
        assert attempt.send is not None  # noqa: S101 - it was performed
        if isinstance(error, Busy) and attempt.send.verb == "backward":
            attempt.busy = attempt.busy or ExponentialBackoff()
            pause_s = attempt.busy.pause_s()
            if now + pause_s <= attempt.until:
                self._ask_for(PauseHop(at, pause_s), f"{attempt.send.peer} is busy, and only it has the graph")
                return ""
        if isinstance(error, DeadlineMissed):
            self._way.hops[at].misses += 1
            if error.peer == self._way.hops[at].replica:
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
        way.note_asked(at, attempt.send.verb)
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
        late, refused = isinstance(error, DeadlineMissed), isinstance(error, Violation)
        since = self._way.asked_at(at, old)
        self._way.move(at, new)
        moved = MoveHop(at, old, new, "backward" if self._way.back else "forward", late, refused, since)
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
        """The replica's turn begins. Returns how many seconds it has: twice as many each time that the hop was late,
        also beyond what anybody gets at first: a full link carries no tensor twice in the time that was too short."""
        hop, pace = self._way.hops[at], self._replicas.pace
        times = min(hop.misses, MAX_DOUBLINGS)
        seconds = doubled(pace.seconds(hop.replica, work), times, doubled(pace.ceiling_s, times, LONGEST_TURN_S))
        self._way.begin_turn(at, now, seconds, work)
        return seconds

    def fills_its_time(self, hop: Hop, now: float) -> bool:
        """Return whether the replica handed the gradient on and told of other microbatches in its turn: it will add
        this one when there is nothing else to do."""
        if hop.turned is None or hop.nudged or now >= hop.turned + self._replicas.pace.ceiling_s:
            return False
        return hop.replica not in self._replicas.silence

    def has_only_begun(self, hop: Hop) -> bool:
        """Return whether the run has, so that its queues still grow: then a replica that is late, and meanwhile told of
        other microbatches, is given another turn or two, twice as long each, but for no longer than the others let
        anybody be waited for."""
        pace, work = self._replicas.pace, self._way.turn_of(hop)
        young = pace.young(work) and hop.misses <= EXTRA_TURNS and hop.replica not in self._replicas.silence
        return young and pace.seconds(hop.replica, work) * (2**hop.misses - 1) < pace.most(hop.replica, work)

    def turn_passed(self, at: int) -> None:
        """When the replica has said nothing meanwhile, that is news for other journeys, too."""
        hop = self._way.hops[at]
        asked = hop.asked.get(hop.replica)
        if asked is not None and self._replicas.silence.passed(hop.replica, asked[0]):
            self._ask_for(Warn(), f"{hop.replica} said nothing in its turn")

    def suspect(self, at: int, peer: PeerId, reason: str, now: float) -> None:
        """It does not answer, or not in time: it is left out for a while, and the health watch looks at it."""
        self._ask_for(SuspectReplica(peer), reason)
        asked = self._way.asked_at(at, peer)
        waited_s = 0.0 if asked is None else now - asked
        self._replicas.wiring.fail(at, peer, now=now, reason=reason, waited_s=waited_s)

    def blame(self, at: int, peer: PeerId, error: PeerError, now: float) -> str:
        """A replica failed. Being busy, refusing, or a step ahead or behind, is no fault, but doing nothing else is.
        Returns why the microbatch cannot be computed when two different ones, or twice the only one, failed on the
        data; else nothing."""
        if isinstance(error, (Busy, Refused)):
            self._replicas.wiring.turned_away(at, peer, now=now, verb=error.code)
        if error.code in GONE:
            self.suspect(at, peer, error.reason, now)
        if error.code not in POISON:
            return ""
        failed = self._way.hops[at].failed
        failed.append(peer)
        others = self._replicas.present(at) - set(failed)
        if len(set(failed)) < 2 and (others or len(failed) < 2):
            return ""
        return f"stage {at} failed on it {len(failed)} times: {error.code}: {error.reason}"

    def answered(self, at: int, now: float) -> None:
        """The hop was done: the one who failed on it before is left out for a while, unlike with poison."""
        hop = self._way.hops[at]
        for other in set(hop.failed) - {hop.replica}:
            why = "it failed on a microbatch that another replica computed"
            self._replicas.wiring.fail(at, other, now=now, reason=why)
        hop.failed.clear()

    def _ask_for(self, action: SendHop | PauseHop | WithdrawHop | MoveHop | SuspectReplica | Warn, why: str) -> None:
        self._asked.append(Directive(action, why))
