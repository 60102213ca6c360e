"""A run of up to 2,000 peers, journey by journey, on one heap: who chooses the way is the product's own
:class:`~swarm.pipeline.wiring.Wiring`, how many journeys are under way its
:class:`~swarm.pipeline.trainer.flight.InFlight`, what a replica does first its queue, and who comes, goes and moves
:class:`~swarm.sim.turnover.Turnover`. Nothing is computed, and a step's closing takes what ``swarm plan`` reckons.

A replica that dies is known to be gone at once. What waits there goes to another one; what had passed it is taken over
on its way back, which costs a forward more; and what it had added is done again at the close. Deadlines, overclaims and
codecs are not in it.

Read :class:`JourneysPlay` first.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.columns import columns_of
from swarm.ids import PartName, PeerId, StepWork
from swarm.pipeline.trainer.flight import InFlight
from swarm.pipeline.trainer.pace import ReplicaChoice
from swarm.pipeline.wiring import Wiring
from swarm.planning.workload import PeerClass
from swarm.sim.machines import (
    FORWARD_SHARE,
    Heap,
    LinkedMachine,
    PieceOfWork,
    SimReplica,
    WorkName,
    microbatch,
    send,
)
from swarm.sim.simulation import RETRY_S, HopSizes, SimulatedStep, SimulationCase, SimulationResult, StepCosts, shares
from swarm.sim.turnover import Turnover, machine_changes
from swarm.step.boundary_codecs import FILLED_SHARE


@dataclass(slots=True, kw_only=True, eq=False)
class SimTrainer(LinkedMachine):
    """One trainer: its choice of replicas and of how many journeys; ``own`` is its first lease, which nobody else has.
    Its device does the loss of one microbatch after the other, ``loss_s`` each."""

    peer: PeerId
    replicas: ReplicaChoice
    flight: InFlight
    loss_s: float
    own: int = 0
    begun: int = 0
    under_way: int = 0
    device_until: float = 0.0


@dataclass(slots=True, eq=False)
class Trip:
    """One microbatch on its way: the replicas of its ``choice`` of variants, where it is, and what its trainer was
    told."""

    trainer: SimTrainer
    work: StepWork
    choice: int
    route: list[SimReplica]
    began: float
    turn: float
    hop: int = 0
    backward: bool = False
    taken_over: set[int] = field(default_factory=set)
    waited: float = 0.0
    computed: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class JourneysPlay:
    """Plays a simulation, journey by journey. Cost: some 20 microseconds an event, ten or so a hop."""

    def __init__(self, case: SimulationCase) -> None:
        self._case, self._costs, self._there = case, StepCosts(case), Turnover(case.turnover)
        self._changes, self._heap = machine_changes(case.trace), Heap()
        self._replicas: dict[PeerId, SimReplica] = {}
        self._trainers = [self._trainer(number, kind) for number, kind in enumerate(case.trainers)]
        self._step = _JourneysStep(1, 0.0)
        self._steps: list[SimulatedStep] = []
        self._hops = HopSizes(case)
        self._chance, self._kinds = random.Random(f"kinds {case.seed}"), Counter[int]()
        self._journeys = [0, 0.0]
        """Of all that came home: how many, and how many were under way then."""

    def run(self) -> SimulationResult:
        """Play to the end: so many steps, or so many seconds."""
        case, heap = self._case, self._heap
        self._open()
        while not case.over(len(self._steps), heap.now):
            change_s = self._changes[0][0] if self._changes else math.inf
            if min(change_s, heap.next_s) >= case.until_s:
                heap.now = case.until_s
            elif change_s <= heap.next_s:
                heap.now = change_s
                self._change()
            else:
                heap.turn()
        home, under_way = self._journeys
        more = {"journeys under way": under_way / home} if home else {}
        kinds, there = shares(self._kinds, len(case.kinds)), self._there
        return SimulationResult("journeys", tuple(self._steps), heap.now, there.counts, there.hosts, kinds, more)

    # --- who is there ------------------------------------------------------------------------------------------------

    def _trainer(self, number: int, kind: int) -> SimTrainer:
        stages = len(self._case.stages)
        nobody: list[list[PeerId]] = [[] for _ in range(stages)]
        up, down, part_s = _link(self._case.classes[kind])
        wiring = Wiring(nobody, seed=self._case.seed * 10_007 + number)
        most = self._case.work.in_flight(self._case.rows)
        return SimTrainer(
            up=up,
            down=down,
            part_s=part_s,
            peer=PeerId(f"T{number}"),
            replicas=ReplicaChoice(wiring=wiring),
            flight=InFlight(wiring, len(self._case.trainers), most=most),
            loss_s=self._costs.seconds(kind, stages),
        )

    def _replica(self, peer: PeerId, part: PartName) -> SimReplica:
        kind = self._there.machine(peer).kind
        up, down, part_s = _link(self._case.classes[kind])
        whole_s = self._costs.seconds(kind, columns_of(part)[0])
        return SimReplica(up=up, down=down, part_s=part_s, heap=self._heap, peer=peer, part=part, whole_s=whole_s)

    def _follow(self) -> None:
        """Everybody knows the roster of the record."""
        before, self._replicas = self._replicas, {}
        for member in self._there.roster.members:
            if member.part is None:
                continue
            peer, part = PeerId(member.peer), PartName(member.part)
            kept = before.get(peer)
            known = kept if kept is not None and kept.part == part and not kept.gone else self._replica(peer, part)
            known.added, known.gone = 0, peer in self._there.gone
            self._replicas[peer] = known
        links = {
            peer: self._case.rows
            * self._case.work.crossing(self._costs.stages, columns_of(one.part)[0])
            / (FILLED_SHARE * min(one.up, one.down))
            for peer, one in self._replicas.items()
        }
        for trainer in self._trainers:
            trainer.replicas.wiring.know_variants(self._there.roster.variants)
            trainer.replicas.follow(self._there.roster.columns())
            trainer.replicas.wiring.know_links(links)

    def _change(self) -> None:
        """A machine comes or goes."""
        _, _, place, removal = heapq.heappop(self._changes)
        there = self._there
        gone = there.comes(place, self._heap.now) if removal is None else there.goes(place, removal)
        replica = None if gone is None else self._replicas.get(gone)
        if replica is None:
            return
        replica.gone = True
        self._step.lost[replica.part] += replica.added
        for trainer in self._trainers:
            for column in columns_of(replica.part):
                trainer.replicas.wiring.remove(column, replica.peer)
        for trip in [
            trip for trip in self._step.trips if trip.route[trip.hop] is replica and trip not in self._step.sent
        ]:
            self._elsewhere(trip)
        self._drained()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the next step: each trainer has half of its equal share by rule, the rest goes to the one that asks
        first."""
        self._follow()
        step, target = self._step, self._case.microbatches
        first = target // (2 * len(self._trainers))
        step.left = target - first * len(self._trainers)
        for replica in self._replicas.values():
            stalled_s = self._there.stalls_s(replica.peer, self._heap.now)
            if stalled_s > 0:
                replica.stand_still(step.number, stalled_s)
        for trainer in self._trainers:
            trainer.own, trainer.begun, trainer.under_way = first, 0, 0
        for trainer in self._trainers:
            self._feed(trainer)

    def _drained(self) -> None:
        """Close the step once all of it is complete, and every replica has added what it has."""
        step = self._step
        if not self._is_drained():
            return
        if any(step.lost.values()):
            self._again()
            return
        if not step.closing:
            step.closing = True
            found = self._costs.forecast(self._there)
            closing_s = found.averaging_s + found.update_s + found.closing_s
            self._after(closing_s, self._close)

    def _is_drained(self) -> bool:
        if self._step.home < self._case.microbatches:
            return False
        return not any(one.waits and not one.gone for one in self._replicas.values())

    def _again(self) -> None:
        """What replicas that died had added is done again, by the others of their part, in equal shares."""
        lost, self._step.lost = self._step.lost, defaultdict(int)
        for part, count in lost.items():
            others = [one for one in self._replicas.values() if one.part == part and not one.gone]
            for number in range(count if others else 0):
                self._work(others[number % len(others)], self._step.work(number), "again", lambda *_: self._drained())
        if self._there.lost:
            self._stuck()

    def _close(self) -> None:
        there, step, now = self._there, self._step, self._heap.now
        if not self._is_drained():  # somebody died meanwhile: what it had added is being done again
            step.closing = False
            return
        if there.close(step.number, now).outcome == "closed":
            self._steps.append(self._costs.step(step.number, step.began_s, now, there))
            self._begin(step.number + 1)
        else:
            self._stuck()

    def _stuck(self) -> None:
        """A stage is lost: look again and again whether the step can be given up."""
        if not self._step.stuck:
            self._step.stuck = True
            self._after(RETRY_S, self._give_up)

    def _give_up(self) -> None:
        self._step.stuck = False
        closing = self._there.close(self._step.number, self._heap.now)
        if closing.outcome == "open":
            self._stuck()
        else:
            self._begin(self._step.number)

    def _begin(self, number: int) -> None:
        """Nothing of the step before is under way any more."""
        self._heap.clear()
        for replica in self._replicas.values():
            replica.queue.clear()
            replica.busy, replica.waits = False, 0
        self._step = _JourneysStep(number, self._heap.now)
        self._open()

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._heap.at(self._heap.now + seconds, happens)

    # --- trainers ----------------------------------------------------------------------------------------------------

    def _feed(self, trainer: SimTrainer) -> None:
        step, stages = self._step, len(self._case.stages)
        while trainer.own + step.left > 0 and trainer.under_way < trainer.flight.limit():
            trainer.begun += 1
            trainer.flight.begins(self._case.microbatches, trainer.begun)
            route = []
            (choice,) = self._chance.choices(range(len(self._case.kinds)), self._case.kinds)
            replicas = trainer.replicas.of(None, choice)
            for stage in range(stages):
                chosen = replicas.choose(stage, (), self._heap.now)
                if chosen is None:
                    self._stuck()
                    return
                route.append(self._replicas[chosen[0]])
            trainer.own, step.left = (trainer.own - 1, step.left) if trainer.own else (0, step.left - 1)
            work = step.work(step.begun, trainer.peer)
            step.begun += 1
            trip = Trip(trainer, work, choice, route, self._heap.now, self._heap.now)
            step.trips[trip] = None
            trainer.under_way += 1
            self._forth(trip, trainer, 0)

    def _loss(self, trip: Trip) -> None:
        """The last stage's output is there: its loss is computed when those before it are."""
        trainer = trip.trainer
        trainer.device_until = max(self._heap.now, trainer.device_until) + trainer.loss_s
        self._heap.at(trainer.device_until, lambda: self._back(trip, trainer, self._hops.stages - 1))

    def _home(self, trip: Trip) -> None:
        trainer, step = trip.trainer, self._step
        trainer.under_way -= 1
        self._kinds[trip.choice] += 1
        trainer.flight.observe(self._heap.now - trip.began - trip.waited, trip.computed)
        del step.trips[trip]
        step.home += 1
        self._journeys[0] += 1
        self._journeys[1] += len(step.trips) + 1
        self._feed(trainer)
        self._drained()

    def _told(self, trip: Trip, replica: SimReplica, hop: int, seconds: float, direction: str) -> None:
        """The trainer hears what a hop took."""
        turn, trip.turn = (trip.turn, self._heap.now), self._heap.now
        wiring = trip.trainer.replicas.wiring
        wiring.in_time(hop, replica.peer)
        wiring.claimed(hop, replica.peer, seconds, direction, turn)

    # --- hops --------------------------------------------------------------------------------------------------------

    def _forth(self, trip: Trip, sender: LinkedMachine, hop: int) -> None:
        trip.hop, trip.backward = hop, False
        self._carry(trip, sender, self._hops.forth(hop))

    def _back(self, trip: Trip, sender: LinkedMachine, hop: int) -> None:
        trip.hop, trip.backward = hop, True
        if trip.route[hop].gone:
            self._elsewhere(trip)
        else:
            self._carry(trip, sender, self._hops.back(hop + 1))

    def _carry(self, trip: Trip, sender: LinkedMachine, size: float) -> None:
        self._step.sent.add(trip)
        send(self._heap, sender, trip.route[trip.hop], size, lambda: self._arrived(trip))

    def _elsewhere(self, trip: Trip) -> None:
        """Its replica is gone: another one takes the hop, on the way back with a forward more, from one that has what
        it needs."""
        chosen = trip.trainer.replicas.of(None, trip.choice).choose(trip.hop, (), self._heap.now)
        if chosen is None:
            self._stuck()
            return
        trip.route[trip.hop] = self._replicas[chosen[0]]
        trip.taken_over |= {trip.hop} if trip.backward else set()
        onwards = trip.hop + (1 if trip.backward else -1)
        sender = trip.route[onwards] if 0 <= onwards < self._hops.stages else trip.trainer
        self._carry(trip, sender, self._hops.back(trip.hop + 1) if trip.backward else self._hops.forth(trip.hop))

    def _arrived(self, trip: Trip) -> None:
        self._step.sent.discard(trip)
        replica = trip.route[trip.hop]
        if replica.gone:
            self._elsewhere(trip)
            return
        kind: WorkName = "backward" if trip.backward else "forward"
        extra = FORWARD_SHARE * replica.whole_s if trip.backward and trip.hop in trip.taken_over else 0.0
        self._work(replica, trip.work, kind, lambda took, waited: self._done(trip, replica, took, waited), extra)

    def _work(
        self,
        replica: SimReplica,
        work: StepWork,
        kind: WorkName,
        then: Callable[[float, float], None],
        extra_s: float = 0.0,
    ) -> None:
        replica.push(work, PieceOfWork(kind, self._heap.now, then, extra_s))

    def _done(self, trip: Trip, replica: SimReplica, took: float, waited: float) -> None:
        """A replica has done its hop one way: it tells the trainer, and hands on."""
        trip.waited += waited
        trip.computed[trip.hop] += took
        hop, direction = trip.hop, "backward" if trip.backward else "forward"
        send(self._heap, replica, trip.trainer, 0, lambda: self._told(trip, replica, hop, took, direction))
        if trip.backward:
            replica.added += 1
            self._work(replica, trip.work, "weights", lambda *_: self._drained())
            if trip.hop:
                self._back(trip, replica, trip.hop - 1)
            else:
                self._step.sent.add(trip)
                send(self._heap, replica, trip.trainer, self._hops.back(0), lambda: self._home(trip))
        elif trip.hop + 1 < self._hops.stages:
            self._forth(trip, replica, trip.hop + 1)
        else:
            self._step.sent.add(trip)
            send(self._heap, replica, trip.trainer, self._hops.forth(trip.hop + 1), lambda: self._loss(trip))


@dataclass(slots=True)
class _JourneysStep:
    """The open step: what nobody has begun yet, what is under way (``sent``: between two machines, or at the trainer),
    what is complete, and what replicas that died had added, by part."""

    number: int
    began_s: float
    left: int = 0
    begun: int = 0
    home: int = 0
    trips: dict[Trip, None] = field(default_factory=dict)
    sent: set[Trip] = field(default_factory=set)
    lost: defaultdict[PartName, int] = field(default_factory=lambda: defaultdict(int))
    closing: bool = False
    stuck: bool = False

    def work(self, number: int, trainer: str = "T") -> StepWork:
        """A name for a microbatch."""
        return StepWork(self.number, microbatch(PeerId(trainer), number))


def _link(one: PeerClass) -> tuple[float, float, float]:
    """(bytes a second up, down, its part of the way to another machine in seconds)."""
    return one.up, one.down, one.round_trip_s / 4
