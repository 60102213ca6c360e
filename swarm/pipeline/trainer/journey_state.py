"""One journey as a state machine: what happened goes in, what to do comes out, each action with its reason. Pure.

    choosing → embedding → forward ⇄ loss → backward → adding → complete
         └──────────┴─────────┴───────┴────────┴─────────┴────→ void, lost

Hosted ends have neither loss nor adding. Every method named for an event returns the directives that follow from it,
in order; ``hops.py`` decides how a hop gets done. ``now`` is monotonic seconds.
"""

from __future__ import annotations

from swarm.errors import DeadlineMissed, PeerError, Refused, Unreachable
from swarm.ids import PeerId
from swarm.pipeline.messages import Blocked
from swarm.pipeline.trainer.hops import (
    GONE,
    POISON,
    Directive,
    DropHop,
    HopAttempts,
    JourneyAction,
    JourneyPhase,
    PauseHop,
    Receipt,
    RouteState,
    SupplyTargets,
    WithdrawHop,
)
from swarm.pipeline.trainer.pace import ReplicaChoice, Work
from swarm.waiting import ExponentialBackoff

LOOK_EVERY_S = 1.0
"""How often a journey asks who is believed to be gone, when nothing else happens."""
POSTPONE_S = 0.05


_ENDS = frozenset({JourneyPhase.COMPLETE, JourneyPhase.VOID, JourneyPhase.LOST})
_UNDER_WAY = frozenset({JourneyPhase.FORWARD, JourneyPhase.LOSS, JourneyPhase.BACKWARD})


class JourneyState:
    """One journey, from the choice of its route to its one end, of which ``why`` is the reason. One that was begun anew
    has a first ``attempt`` above those before, and goes ``without`` some where others are there."""

    def __init__(
        self,
        replicas: ReplicaChoice,
        stages: int,
        *,
        hosted: bool,
        attempt: int = 0,
        without: frozenset[PeerId] = frozenset(),
    ) -> None:
        self.way, self.phase, self.why = RouteState(()), JourneyPhase.CHOOSING, ""
        self.way.attempt = self.way.began = attempt
        self._without = without
        self.way.home = hosted  # token ids have no gradient
        self._replicas, self._stages, self._hosted = replicas, stages, hosted
        self._asked: list[Directive] = []
        self._attempts = HopAttempts(self.way, replicas, self._asked, hosted=hosted)
        self._blocked: dict[tuple[PeerId, int], Blocked] = {}
        self._supplied: set[PeerId] = set()
        self._choosing: ExponentialBackoff | None = None

    @property
    def ended(self) -> bool:
        """Return whether the journey is over, however it ended."""
        return self.phase in _ENDS

    def wait_s(self, now: float) -> float:
        """Seconds until :meth:`look` is due, if nothing happens before."""
        due = self.way.next_due()
        return LOOK_EVERY_S if due is None else min(LOOK_EVERY_S, max(0.0, due - now))

    # --- from the trainer ----------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Directive]:
        """Choose a route; pauses while a stage has nobody."""
        while (stage := self.way.last + 1) < self._stages:
            chosen = self._replicas.choose(stage, self._without, now) or self._replicas.choose(stage, (), now)
            if chosen is None:
                typical_s = self._replicas.wiring.typical_seconds(stage)
                self._choosing = self._choosing or ExponentialBackoff(typical_s)
                self._decide(PauseHop(stage, self._choosing.pause_s()), f"stage {stage} has nobody to choose")
                return self._decided()
            self.way.extend(chosen[0])
            self.way.hops[-1].tried |= self._without
            self._choosing = None
        self._enter(JourneyPhase.EMBEDDING, "every stage has a replica")
        return self._decided()

    def embedded(self, now: float) -> list[Directive]:
        """Return what the first stage gets is made: the microbatch sets out."""
        if self.phase is JourneyPhase.EMBEDDING:
            self.phase = JourneyPhase.FORWARD
            self._attempts.start(0, None, "it sets out", now)
        return self._decided()

    def loss_computed(self, now: float) -> list[Directive]:
        """There is a loss, and a gradient for the last stage."""
        if self.phase is JourneyPhase.LOSS:
            self._attempts.answered(self.way.last, now)
            self._turn_back(now)
        return self._decided()

    def output_unusable(self, error: PeerError, now: float) -> list[Directive]:
        """No finite loss can be had of the output: another replica computes it."""
        if self.phase is JourneyPhase.LOSS:
            self.phase = JourneyPhase.FORWARD
            self._undo(self.way.last, error, now)
        return self._decided()

    def added(self) -> list[Directive]:
        """The trainer's own ends have added the microbatch."""
        if self.phase is JourneyPhase.ADDING:
            self._end(JourneyPhase.COMPLETE, "every part has added it")
        return self._decided()

    def poisoned(self, why: str) -> list[Directive]:
        """The trainer's own part cannot compute it."""
        self._end(JourneyPhase.VOID, why)
        return self._decided()

    def abandoned(self, why: str) -> list[Directive]:
        """Nobody wants it any more. Changes nothing once the journey has ended."""
        self._end(JourneyPhase.LOST, why)
        return self._decided()

    # --- of calls, and of time -----------------------------------------------------------------------------------

    def sent(self, at: int, now: float) -> list[Directive]:
        """The call for hop ``at`` was answered."""
        if at in self._attempts:
            last = self.way.hops[-1].replica
            if self._hosted and not self.way.back and last not in self._supplied:
                self._supplied.add(last)
                self._decide(SupplyTargets(last), "it computes the loss with them")
            self._attempts.over(at, now)
        return self._decided()

    def not_sent(self, at: int, error: PeerError, now: float) -> list[Directive]:
        """The call for hop ``at`` failed, for whatever reason. Once the output is here, nothing depends on it."""
        if at in self._attempts and self.phase is JourneyPhase.LOSS:
            self._attempts.over(at, now)
        elif at in self._attempts:
            self._end_if(self._attempts.not_sent(at, error, now))
        return self._decided()

    def paused(self, at: int, now: float) -> list[Directive]:
        """The pause at hop ``at`` is over."""
        if self.phase is JourneyPhase.CHOOSING:
            return self.begin(now)
        if at in self._attempts:
            self._attempts.paused(at, now)
        return self._decided()

    def not_supplied(self, peer: PeerId, error: PeerError, now: float) -> list[Directive]:
        """The targets did not get there. Unless it is gone, the last stage will miss its deadline for that."""
        self._supplied.discard(peer)
        if error.code == "unreachable" and peer == self.way.hops[-1].replica and self.way.hops[-1].due is not None:
            self._lose(peer, error.reason, now)
        return self._decided()

    def lost(self, peer: PeerId, reason: str, now: float) -> list[Directive]:
        """A replica is gone. Of what is complete its receipt counts: the step's closing makes up for what died."""
        self._lose(peer, reason, now)
        return self._decided()

    def look(self, now: float) -> list[Directive]:
        """Time has passed, or something has happened: who is gone, and whose turn has passed?"""
        if self.phase not in _UNDER_WAY:
            return []
        for peer in set(self.way.route) & set(self._replicas.gone()):
            self._lose(peer, "it is believed to be gone", now)
        if self._blocked and self.way.back:
            waiting, self._blocked = self._blocked, {}
            for (caller, _), body in waiting.items():
                self._on_blocked(caller, body, now)
        for at in self.way.overdue(now, self._replicas.silence) if self.phase in _UNDER_WAY else ():
            self._on_overdue(at, now)
        return self._decided()

    # --- from replicas -------------------------------------------------------------------------------------------

    def check_sender(self, caller: PeerId, attempt: int, at: int, now: float) -> None:
        """Raises Refused for mail about a hop that its sender was never asked to do, or of an attempt to come."""
        if self.phase in (JourneyPhase.CHOOSING, JourneyPhase.EMBEDDING) or not self.way.ever_named(at, caller):
            raise Refused(f"{caller} is not on the route of this microbatch")
        if not self.way.began <= attempt <= self.way.attempt:
            raise Refused(f"attempt {attempt}: attempt {self.way.attempt} is awaited")
        self._replicas.silence.heard(caller, now)

    def forwarded(self, at: int, peer: PeerId, now: float) -> list[Directive]:
        """A replica reported its forward. Of the last stage's what counts is its output."""
        if at < self.way.last and self.phase in _UNDER_WAY:
            self._observe(at, peer, now)
            if self.way.forwarded(at, peer):
                self._attempts.answered(at, now)
                self._await(at + 1, "forward", now)
        return self._decided()

    def output(self, peer: PeerId, now: float) -> list[Directive]:
        """The last stage's output arrived; one is enough, no matter who of those that were asked sends it. Raises
        Refused where that stage computes the loss."""
        if self._hosted:
            raise Refused("the loss of this microbatch is computed by its last stage")
        if self.phase is JourneyPhase.FORWARD:
            self._observe(self.way.last, peer, now)
            if self.way.forwarded(self.way.last, peer):
                self._enter(JourneyPhase.LOSS, f"{peer} sent the output")
        return self._decided()

    def contributed(self, at: int, peer: PeerId, receipt: Receipt, now: float) -> list[Directive]:
        """A replica added the microbatch; its receipt is in order. Raises Refused where there is no gradient yet."""
        self._check_gradient()
        if self.phase not in _UNDER_WAY:
            return []
        turns = at == self.way.last and not self.way.back
        self._observe(at, peer, now)
        if self.way.contributed(at, peer, receipt):
            self._attempts.answered(at, now)
            if turns:
                self._turn_back(now)
            if at > 0 and self.way.back and self.way.hops[at - 1].due is None:
                self._await(at - 1, "backward", now)
            if not self.way.back and self.way.next_due() is None:  # so the last stage has added it, and did not say so
                self._await(self.way.last, "forward", now)
        return self._decided()

    def turned_back(self, at: int, peer: PeerId, now: float) -> list[Directive]:
        """A replica handed the gradient on: the hop before has its turn, and this one another for its receipt. Raises
        Refused where there is no gradient yet."""
        self._check_gradient()
        if self.phase in _UNDER_WAY:
            self._observe(at, peer, now)
            if self.way.turned_back(at, peer, now) and self.way.back:
                self._attempts.begin_turn(at, "weights", now)
                if at > 0 and self.way.hops[at - 1].due is None:
                    self._await(at - 1, "backward", now)
        return self._decided()

    def _check_gradient(self) -> None:
        if not self._hosted and not self.way.back:
            raise Refused("there is no gradient yet of which this could be a contribution")

    def gradient(self) -> list[Directive]:
        """The first stage's input gradient arrived."""
        if self.phase is JourneyPhase.BACKWARD and not self.way.home:
            self.way.home = True
            if self.way.done(0):
                self.way.hops[0].due = None
        return self._decided()

    def blocked(self, caller: PeerId, body: Blocked, now: float) -> list[Directive]:
        """A replica could not compute the microbatch, or not hand it on. Raises Refused from one that was never asked
        about that hop or one next to it."""
        if body.hop > self.way.last or not self.way.began <= body.attempt <= self.way.attempt:
            raise Refused("no such hop, or attempt, of this microbatch")
        near = next((at for at in (body.hop, body.hop - 1, body.hop + 1) if self.way.ever_named(at, caller)), None)
        if near is None:
            raise Refused("not on the route of this microbatch")
        self.check_sender(caller, body.attempt, near, now)
        if body.code in POISON and body.peer == caller and near != body.hop:
            raise Refused("a replica speaks for its own stage")
        if body.direction == "backward" and not self.way.back:
            self._blocked[caller, body.hop] = body  # hosted: the last stage's receipt is still to come
        else:
            self._on_blocked(caller, body, now)
        return self._decided()

    def _on_blocked(self, caller: PeerId, body: Blocked, now: float) -> None:
        at, peer, back = body.hop, PeerId(body.peer), body.direction == "backward"
        if self.phase not in _UNDER_WAY or back != self.way.back:
            return
        stale = body.attempt < self.way.attempt and body.code not in (*GONE, *POISON)
        needed = back or not self.way.done(at)
        if peer == self.way.hops[at].replica and needed and not stale:
            if caller == peer:  # it has forgotten the microbatch, and the targets that came with it
                self._supplied.discard(peer)
            self._undo(at, PeerError.from_code(body.code, body.reason, body.peer), now)
        mine = next((hop for hop in (at - 1, at + 1) if self._waits(hop, caller)), None)
        if back and mine is not None and self.phase in _UNDER_WAY:  # when its neighbour is replaced, it goes on
            self._attempts.after(at, mine, now)

    def _waits(self, at: int, caller: PeerId) -> bool:
        if not 0 <= at <= self.way.last:
            return False
        hop = self.way.hops[at]
        return hop.replica == caller and not hop.contributed

    # --- turns ---------------------------------------------------------------------------------------------------

    def _await(self, at: int, work: Work, now: float) -> None:
        """The hop's turn begins, without anything to be sent by us."""
        called = self.way.back and at in self._attempts
        if not called and not self.way.done(at):
            self._attempts.begin_turn(at, work, now)

    def _observe(self, at: int, peer: PeerId, now: float) -> None:
        """How long the hop took, also where another was asked meanwhile: that was too short a time, then."""
        heard = self.way.heard_of(at, peer, now)
        if heard is not None:
            self._replicas.pace.observe(peer, *heard)

    def _turn_back(self, now: float) -> None:
        """Every stage has computed it: the way back begins."""
        self._attempts.close("every stage has computed it")
        self.phase, self.way.back = JourneyPhase.BACKWARD, True
        for hop in self.way.hops:
            hop.due, hop.misses = None, 0
        if not self._hosted:
            self._attempts.start(self.way.last, None, "the loss is computed", now)

    def _on_overdue(self, at: int, now: float) -> None:
        """A turn has passed. Where others have gone on from there, only the news of it is missing: it is asked for once
        before the replica is replaced."""
        hop, silence = self.way.hops[at], self._replicas.silence
        if self._attempts.busy_at(at):
            own = at in self._attempts and (self.way.back or at == 0)  # else the call is to another replica
            if hop.replica not in silence or not own:
                hop.due = now + POSTPONE_S  # its own call ends at about this time, and says why
                return
            self._attempts.withdraw(at, f"{hop.replica} has fallen silent")
        late = hop.due is not None and hop.due <= now
        if late:
            self._attempts.turn_passed(at)
        if late and self._attempts.fills_its_time(hop, now):
            self._attempts.begin_turn(at, "weights", now)
            return
        hop.due, hop.misses = None, hop.misses + late
        if late and self._attempts.has_only_begun(hop):
            self._attempts.begin_turn(at, self.way.turn_of(hop), now)
            return
        passed_on = hop.contributed or hop.turned is not None or any(other.contributed for other in self.way.hops[:at])
        if self.way.back and passed_on and not hop.nudged and hop.replica not in silence:
            hop.nudged = True
            self._attempts.start(at, None, "others have gone on from there: only its report is missing", now)
            return
        error = DeadlineMissed("no answer in the time that it has", peer=hop.replica)
        self._attempts.suspect(at, hop.replica, error.reason, now)
        self._attempts.start(at, error, error.reason, now)

    # --- what is lost, and the end -------------------------------------------------------------------------------

    def _lose(self, peer: PeerId, reason: str, now: float) -> None:
        """A replica is gone, with what it held."""
        if self.phase not in _UNDER_WAY:
            return
        for at in self.way.lost(peer):
            self._attempts.suspect(at, peer, reason, now)
            self._attempts.start(at, Unreachable(reason, peer=peer), reason, now)

    def _undo(self, at: int, error: PeerError, now: float) -> None:
        """What the replica did is of no use: another does it again."""
        hop = self.way.hops[at]
        poison = self._attempts.blame(at, hop.replica, error, now)
        if not poison:
            hop.receipts.pop(hop.replica, None)
            hop.forwarded = False
            self._attempts.start(at, error, error.reason, now)
        self._end_if(poison)

    def _end_if(self, poison: str) -> None:
        if poison:
            self._end(JourneyPhase.VOID, poison)

    def _end(self, phase: JourneyPhase, why: str) -> None:
        """End once: nobody is called any more, and those whose work is not needed are told."""
        if self.ended:
            return
        if self._choosing is not None:
            self._decide(WithdrawHop(self.way.last + 1), why)
        self._attempts.close(why)
        self.why, gone = why, set(self._replicas.gone())
        for at, hop in enumerate(self.way.hops):
            for peer in hop.named - {hop.replica} - set(hop.receipts) - gone:
                self._decide(DropHop(at, peer), f"{hop.replica} does it")
        self._enter(phase, why)

    def _enter(self, phase: JourneyPhase, why: str) -> None:
        self.phase = phase
        self._decide(phase, why)

    def _decide(self, action: JourneyAction, reason: str) -> None:
        self._asked.append(Directive(action, reason))

    def _decided(self) -> list[Directive]:
        if self.phase is JourneyPhase.BACKWARD and self.way.complete:
            why = "every stage has added it"
            if self._hosted:
                self._end(JourneyPhase.COMPLETE, why)
            else:  # no late answer changes the route any more
                self._attempts.close(why)
                self._enter(JourneyPhase.ADDING, why)
        decided = self._asked[:]
        self._asked.clear()
        return decided
