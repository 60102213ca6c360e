"""A journey's decisions, without network, device or clock: what follows from each event, and why."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.errors import Busy, DeadlineMissed, PeerError, Refused, Unreachable, Violation
from swarm.ids import PeerId
from swarm.pipeline.messages import Blocked
from swarm.pipeline.trainer.hops import (
    Directive,
    JourneyPhase,
    MoveHop,
    PauseHop,
    Receipt,
    SendHop,
    SuspectReplica,
    Warn,
    WithdrawHop,
)
from swarm.pipeline.trainer.journey_state import JourneyState
from swarm.pipeline.trainer.pace import JourneyDeadlines, ReplicaChoice
from swarm.pipeline.wiring import Wiring
from tests.harness.rigs.pipeline import microbatch

STAGES = [[PeerId(f"{stage}{number}") for number in range(2)] for stage in "abc"]
SIGNED = Receipt(b"signed")
Event = tuple[str, *tuple[Any, ...]]


class InOrder(ReplicaChoice):
    """Chooses the first replica of a stage that may be chosen."""

    def choose(self, stage: int, tried: Any, now: float) -> tuple[PeerId, str] | None:
        """See :class:`ReplicaChoice`."""
        left = [peer for peer in self.wiring.replicas(stage) if peer not in {*tried, *self.gone()}]
        return (left[0], "the first that is left") if left else None


def blocked(hop: int, peer: str, code: str, direction: str = "forward", attempt: int = 0) -> Blocked:
    return Blocked.model_validate(
        dict(step=1, microbatch=microbatch(0), attempt=attempt, hop=hop, peer=peer, direction=direction, code=code)
        | {"reason": "as it says"}
    )


class Case:
    """A journey through three stages of ``replicas`` each, to which things happen at ``now``."""

    def __init__(self, *, hosted: bool = False, replicas: int = 2) -> None:
        self.now, self.gone = 0.0, set[PeerId]()
        stages = [stage[:replicas] for stage in STAGES]
        pace = JourneyDeadlines(floor_s=1.0, ceiling_s=4.0)
        for work in ("forward", "backward") * 64:
            pace.observe(PeerId("z"), work, 0.1)  # type: ignore[arg-type]
        self.choice = InOrder(wiring=Wiring(stages, seed=1), pace=pace, gone=lambda: self.gone)
        self.state = JourneyState(self.choice, 3, hosted=hosted)

    def on(self, event: Event) -> list[Directive]:
        """Have something happen; ``look`` may have a time before it."""
        name, *about = event
        if name == "look":
            self.now += about.pop() if about else 0.0
        if name in ("gone", "heard"):
            self.gone.update(about) if name == "gone" else self.choice.silence.heard(*about)
            return []
        if name == "left":  # the roster
            self.choice.follow([[peer for peer in stage if peer not in about] for stage in STAGES])
            return []
        timeless = name in ("added", "gradient", "poisoned", "abandoned")
        return self.at_once(getattr(self.state, name)(*about, *(() if timeless else (self.now,))))

    def at_once(self, directives: list[Directive]) -> list[Directive]:
        """What follows in the same moment, too: pauses that only let others speak are over."""
        pauses = [one.action.at for one in directives if isinstance(one.action, PauseHop) and not one.action.seconds]
        found = [one for one in directives if not isinstance(one.action, PauseHop) or one.action.seconds]
        for at in pauses:
            found += self.state.paused(at, self.now)
        return found


def told(directives: list[Directive]) -> list[str]:
    """Directives in words."""
    words = []
    for action, reason in directives:
        match action:
            case SendHop():
                words.append(f"{action.verb} {action.at} by {action.peer}: {reason}")
            case PauseHop():
                words.append(f"pause {action.at} {action.seconds:.3f}: {reason}")
            case JourneyPhase():
                words.append(f"{action.name.lower()}: {reason}")
            case Warn():
                words.append(f"warn: {reason}")
            case _:
                words.append(f"{type(action).__name__} {' '.join(map(str, action[:3]))}: {reason}")
    return words


SET_OUT: list[Event] = [("begin",), ("embedded",)]
ON_ITS_WAY: list[Event] = [*SET_OUT, ("sent", 0), ("forwarded", 0, "a0"), ("forwarded", 1, "b0")]
BACK: list[Event] = [*ON_ITS_WAY, ("output", "c0"), ("loss_computed",)]
COMING_HOME: list[Event] = [*BACK, ("sent", 2), ("contributed", 2, "c0", SIGNED), ("contributed", 1, "b0", SIGNED)]
HOME: list[Event] = [*COMING_HOME, ("contributed", 0, "a0", SIGNED), ("gradient",)]
FULL, BROKE = Busy("full", peer="x"), Unreachable("it broke", peer="x")
STRANGER = Refused("a stranger", peer="x")
LATE = "no answer in the time that it has"

TABLE: list[tuple[str, list[Event], Event, list[str]]] = [
    ("begins", [], ("begin",), ["embedding: every stage has a replica"]),
    ("finds nobody", [("gone", "a0", "a1")], ("begin",), ["pause 0 0.005: stage 0 has nobody to choose"]),
    ("waits longer", [("gone", "a0", "a1"), ("begin",)], ("paused", 0),
     ["pause 0 0.010: stage 0 has nobody to choose"]),
    ("sets out", SET_OUT[:1], ("embedded",), ["forward 0 by a0: it sets out"]),
    ("first is busy", SET_OUT, ("not_sent", 0, FULL),
     ["MoveHop 0 a0 a1: busy: full", "forward 0 by a1: the first that is left; a0: busy"]),
    ("first is gone", SET_OUT, ("not_sent", 0, BROKE),
     ["SuspectReplica a0: it broke", "MoveHop 0 a0 a1: unreachable: it broke",
      "forward 0 by a1: the first that is left; a0: unreachable"]),
    ("is told by a neighbour that the next is busy", ON_ITS_WAY[:4], ("blocked", "a0", blocked(1, "b0", "busy")),
     ["MoveHop 1 b0 b1: busy: as it says", "resend 1 by a0: the first that is left; b0: busy"]),
    ("finds that who should send again is gone", [*ON_ITS_WAY[:4], ("blocked", "a0", blocked(1, "b0", "busy"))],
     ("not_sent", 1, BROKE),
     ["SuspectReplica a0: it broke", "MoveHop 0 a0 a1: unreachable: it broke",
      "forward 0 by a1: the first that is left; a0: unreachable"]),
    ("misses a deadline", ON_ITS_WAY[:4], ("look", 1.5),
     ["warn: b0 said nothing in its turn", f"SuspectReplica b0: {LATE}", f"MoveHop 1 b0 b1: deadline: {LATE}",
      "resend 1 by a0: the first that is left; b0: deadline"]),
    ("loses a replica that has it", ON_ITS_WAY, ("lost", "c0", "it broke"),
     ["SuspectReplica c0: it broke", "MoveHop 2 c0 c1: unreachable: it broke",
      "resend 2 by b0: the first that is left; c0: unreachable"]),
    ("loses a replica that handed it on", ON_ITS_WAY, ("lost", "a0", "it broke"), []),
    ("sees that one is gone", [*ON_ITS_WAY, ("gone", "c0")], ("look",),
     ["SuspectReplica c0: it is believed to be gone", "MoveHop 2 c0 c1: unreachable: it is believed to be gone",
      "resend 2 by b0: the first that is left; c0: unreachable"]),
    ("has its output", ON_ITS_WAY, ("output", "c0"), ["loss: c0 sent the output"]),
    ("has its output twice", [*ON_ITS_WAY, ("output", "c0")], ("output", "c0"), []),
    ("hears when it has its output that the first call failed",
     [*SET_OUT, ("forwarded", 0, "a0"), ("forwarded", 1, "b0"), ("output", "c0")], ("not_sent", 0, BROKE), []),
    ("cannot use its output", [*ON_ITS_WAY, ("output", "c0")], ("output_unusable", Violation("NaN", peer="c0")),
     ["MoveHop 2 c0 c1: violation: NaN", "resend 2 by b0: the first that is left; c0: violation"]),
    ("turns back", BACK[:-1], ("loss_computed",), ["backward 2 by c0: the loss is computed"]),
    ("waits for a busy last stage", BACK, ("not_sent", 2, FULL),
     ["pause 2 0.005: c0 is busy, and only it has the graph"]),
    ("asks the busy last stage again", [*BACK, ("not_sent", 2, FULL)], ("paused", 2),
     ["backward 2 by c0: it was busy"]),
    ("loses the last stage on its way back", BACK, ("not_sent", 2, BROKE),
     ["SuspectReplica c0: it broke", "MoveHop 2 c0 c1: unreachable: it broke",
      "backward 2 by c1: the first that is left; c0: unreachable"]),
    ("has a hop taken over", [*BACK, ("sent", 2), ("contributed", 2, "c0", SIGNED)], ("lost", "b0", "it broke"),
     ["SuspectReplica b0: it broke", "MoveHop 1 b0 b1: unreachable: it broke",
      "adopt 1 by b1: the first that is left; b0: unreachable"]),
    ("hears that a neighbour could not hand on", [*BACK, ("sent", 2), ("contributed", 2, "c0", SIGNED)],
     ("blocked", "c0", blocked(1, "b0", "unreachable", "backward")),
     ["SuspectReplica b0: as it says", "MoveHop 1 b0 b1: unreachable: as it says",
      "adopt 1 by b1: the first that is left; b0: unreachable"]),
    ("is refused for a later hop whose replica has left", [*SET_OUT, ("left", "c0")], ("not_sent", 0, STRANGER),
     ["MoveHop 0 a0 a1: refused: a stranger", "MoveHop 2 c0 c1: refused: it takes part no more",
      "forward 0 by a1: the first that is left; a0: refused"]),
    ("is refused on its way back for a hop to come whose replica has left",
     [*BACK, ("sent", 2), ("contributed", 2, "c0", SIGNED), ("left", "a0")],
     ("blocked", "c0", blocked(1, "b0", "refused", "backward")),
     ["MoveHop 1 b0 b1: refused: as it says", "MoveHop 0 a0 a1: refused: it takes part no more",
      "adopt 1 by b1: the first that is left; b0: refused"]),
    ("misses only a report",
     [*BACK, ("sent", 2), ("contributed", 1, "b0", SIGNED), ("contributed", 0, "a0", SIGNED), ("gradient",),
      ("heard", "c0", 1.0)],
     ("look", 1.5), ["adopt 2 by c0: others have gone on from there: only its report is missing"]),
    ("is home", HOME[:-1], ("gradient",), ["adding: every stage has added it"]),
    ("loses a replica when it is home", HOME, ("lost", "a0", "it broke"), []),
    ("is complete", HOME, ("added",), ["complete: every part has added it"]),
    ("fails where another does not exist", [*ON_ITS_WAY, ("output", "c0"),
     ("output_unusable", Violation("NaN", peer="c0")), ("sent", 2), ("output", "c1")],
     ("output_unusable", Violation("NaN", peer="c1")),
     ["DropHop 2 c0: c1 does it", "void: stage 2 failed on it 2 times: violation: NaN"]),
    ("is given up in a call", [*SET_OUT, ("not_sent", 0, FULL)], ("abandoned", "the step is closed"),
     ["WithdrawHop 0: the step is closed", "DropHop 0 a0: a1 does it", "lost: the step is closed"]),
    ("is given up while it is chosen", [("gone", "a0", "a1"), ("begin",)], ("abandoned", "the step is closed"),
     ["WithdrawHop 0: the step is closed", "lost: the step is closed"]),
    ("cannot be embedded", SET_OUT[:1], ("poisoned", "no memory"), ["void: no memory"]),
    ("is given up twice", [*SET_OUT, ("poisoned", "no memory")], ("abandoned", "the step is closed"), []),
]  # fmt: skip


@pytest.mark.parametrize(("before", "event", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_journey_that(before: list[Event], event: Event, expected: list[str]) -> None:
    case = Case()
    for earlier in before:
        case.on(earlier)
    assert told(case.on(event)) == expected


@pytest.mark.parametrize("error", [FULL, STRANGER])
def test_host_that_turns_every_microbatch_away_is_left_out_and_said_to(error: PeerError) -> None:
    cases = [Case() for _ in range(8)]
    wiring = cases[0].choice.wiring
    for number, case in enumerate(cases):
        case.choice.wiring = wiring
        for event in SET_OUT:
            case.on(event)
        case.now = float(number)
        wiring.claimed(0, PeerId("a1"), 0.1, "forward", (number, number + 0.1))
        case.on(("not_sent", 0, error))
    (probation,) = wiring.on_probation(now=7.0)
    assert (probation.peer, probation.reason.split(" each")[0]) == ("a0", error.code)


def test_journey_whose_stage_has_one_replica_pauses_and_asks_it_again() -> None:
    case = Case(replicas=1)
    for event in SET_OUT:
        case.on(event)
    assert told(case.on(("not_sent", 0, FULL))) == ["pause 0 0.005: stage 0: all were tried"]
    again = told(case.on(("paused", 0)))
    assert again == ["MoveHop 0 a0 a0: busy: full", "forward 0 by a0: the first that is left; a0: busy"]


def test_journey_with_hosted_ends_brings_targets_and_ends_without_the_trainers_part() -> None:
    case = Case(hosted=True)
    for event in SET_OUT:
        case.on(event)
    assert told(case.on(("sent", 0))) == ["SupplyTargets c0: it computes the loss with them"]
    case.on(("contributed", 2, "c0", SIGNED))
    assert case.state.phase is JourneyPhase.BACKWARD
    with pytest.raises(Refused, match="computed by its last stage"):
        case.on(("output", "c0"))
    case.on(("contributed", 1, "b0", SIGNED))
    assert told(case.on(("contributed", 0, "a0", SIGNED))) == ["complete: every stage has added it"]
    assert case.state.phase is JourneyPhase.COMPLETE


def test_journey_with_hosted_ends_awaits_the_last_stage_whose_receipt_others_imply() -> None:
    case = Case(hosted=True)
    for event in [*SET_OUT, ("sent", 0)]:
        case.on(event)
    case.on(("contributed", 0, "a0", SIGNED))
    assert case.state.phase is JourneyPhase.FORWARD
    assert [hop.due is not None for hop in case.state.way.hops] == [False, False, True]


def test_journey_chooses_when_it_has_heard_of_all_replicas_that_are_lost_in_the_same_moment() -> None:
    case = Case()
    for event in [*SET_OUT, ("sent", 0)]:
        case.on(event)
    (suspected, pause) = case.state.lost(STAGES[0][0], "it broke", 0.0)
    assert (suspected.action, pause.action) == (SuspectReplica(STAGES[0][0]), PauseHop(0, 0.0))
    case.on(("gone", STAGES[0][1]))
    assert told(case.on(("paused", 0))) == ["pause 0 0.005: stage 0: all were tried"]


def test_turn_of_the_only_replica_began_when_it_was_asked_last_and_each_missed_call_doubles_it() -> None:
    case, within = Case(replicas=1), list[float]()
    for event in SET_OUT:
        found = case.on(event)
    for began in (0.0, 5.0, 25.0):
        within += [one.action.within_s for one in found if isinstance(one.action, SendHop)]
        case.now = 4 * began + 5.0
        case.on(("not_sent", 0, DeadlineMissed("no answer", peer=PeerId("a0"))))
        found = case.on(("paused", 0))
        (moved,) = [one.action for one in found if isinstance(one.action, MoveHop)]
        assert (moved.late, moved.since) == (True, began)
    assert within == [within[0], 2 * within[0], 4 * within[0]]


def test_journey_withdraws_its_call_to_a_silent_replica_and_asks_another() -> None:
    case = Case()
    for event in SET_OUT:
        case.on(event)
    case.choice.silence.lost(STAGES[0][0])
    words = told(case.on(("look",)))
    assert words[0] == "WithdrawHop 0: a0 has fallen silent"
    assert words[-1] == "forward 0 by a1: the first that is left; a0: deadline"


def test_journey_that_waits_for_its_own_call_leaves_the_deadline_to_it() -> None:
    case = Case()
    for event in SET_OUT:
        case.on(event)
    case.choice.silence.heard(STAGES[0][0], 0.9)
    assert told(case.on(("look", 1.0))) == []
    assert case.state.wait_s(1.0) == pytest.approx(0.05)


# --- in any order ----------------------------------------------------------------------------------------------------

ERRORS = [Busy, Refused, Unreachable, DeadlineMissed, Violation, PeerError]
peers = st.sampled_from([peer for stage in STAGES for peer in stage])
hops = st.integers(0, 2)
errors = st.sampled_from(ERRORS)


class JourneyMachine(RuleBasedStateMachine):
    """Anything happens, in any order: there are never two attempts at a hop, an attempt is one call or one pause, the
    journey ends once, something is always awaited until then, and everything has a reason."""

    @initialize(hosted=st.booleans(), seed=st.integers(0, 9))
    def begin(self, hosted: bool, seed: int) -> None:
        self.now, self.gone, self.left = 0.0, set[PeerId](), set[PeerId]()
        choice = self.choice = ReplicaChoice(
            wiring=Wiring(STAGES, seed=seed), pace=JourneyDeadlines(floor_s=1.0, ceiling_s=4.0), gone=lambda: self.gone
        )
        self.state, self.hosted = JourneyState(choice, 3, hosted=hosted), hosted
        self.calls: dict[int, SendHop | PauseHop] = {}
        self.work: JourneyPhase | None = None
        self.ends = 0
        self.do(self.state.begin(self.now))

    def do(self, directives: list[Directive]) -> None:
        """As the driver does."""
        for action, reason in directives:
            assert reason, action
            assert not self.ends, f"{action} after the end"
            match action:
                case SendHop() | PauseHop():
                    assert action.at not in self.calls, f"two attempts at hop {action.at}"
                    self.calls[action.at] = action
                case WithdrawHop():
                    del self.calls[action.at]
                case JourneyPhase.COMPLETE | JourneyPhase.VOID | JourneyPhase.LOST:
                    self.ends += 1
                case JourneyPhase():
                    assert self.work is None, f"{action} beside {self.work}"
                    self.work = action

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 9), error=st.none() | errors)
    def call_ends(self, which: int, error: type[PeerError] | None) -> None:
        at = sorted(self.calls)[which % len(self.calls)]
        action = self.calls.pop(at)
        if isinstance(action, PauseHop):
            self.now += action.seconds
            self.do(self.state.paused(at, self.now))
        elif error is None:
            self.do(self.state.sent(at, self.now))
        else:
            self.do(self.state.not_sent(at, error("as it says", peer=action.peer), self.now))

    @precondition(lambda self: self.work is not None and not self.ends)
    @rule(fine=st.booleans())
    def own_work_ends(self, fine: bool) -> None:
        work, self.work = self.work, None
        if work is JourneyPhase.EMBEDDING:
            self.do(self.state.embedded(self.now))
        elif work is JourneyPhase.ADDING:
            self.do(self.state.added())
        elif fine:
            self.do(self.state.loss_computed(self.now))
        else:
            self.do(self.state.output_unusable(Violation("NaN"), self.now))

    @rule(peer=peers, hop=hops, kind=st.sampled_from(["forwarded", "output", "contributed", "gradient"]))
    def hears(self, peer: PeerId, hop: int, kind: str) -> None:
        state, hop = self.state, {"output": 2, "gradient": 0}.get(kind, hop)
        try:
            state.check_sender(peer, state.way.attempt, hop, self.now)
            if kind == "forwarded":
                self.do(state.forwarded(hop, peer, self.now))
            elif kind == "output":
                self.do(state.output(peer, self.now))
            elif kind == "contributed":
                self.do(state.contributed(hop, peer, SIGNED, self.now))
            else:
                self.do(state.gradient())
        except Refused:
            pass

    @rule(caller=peers, peer=peers, hop=hops, error=errors, back=st.booleans(), old=st.integers(0, 2))
    def is_blocked(self, caller: PeerId, peer: PeerId, hop: int, error: type[PeerError], back: bool, old: int) -> None:
        attempt, direction = max(0, self.state.way.attempt - old), "backward" if back else "forward"
        with contextlib.suppress(Refused):
            self.do(self.state.blocked(caller, blocked(hop, peer, error.code, direction, attempt), self.now))

    @rule(peer=peers)
    def loses(self, peer: PeerId) -> None:
        self.do(self.state.lost(peer, "it broke", self.now))

    @rule(peer=peers)
    def targets_do_not_arrive(self, peer: PeerId) -> None:
        if self.hosted and len(self.state.way.hops) == 3:
            self.do(self.state.not_supplied(peer, Unreachable("it broke"), self.now))

    @rule(peer=peers)
    def is_gone_or_back(self, peer: PeerId) -> None:
        self.gone ^= {peer}

    @rule(peer=peers)
    def leaves_the_roster_or_joins_again(self, peer: PeerId) -> None:
        self.left ^= {peer}
        self.choice.follow([[peer for peer in stage if peer not in self.left] for stage in STAGES])

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    def looks(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.state.look(self.now))

    @precondition(lambda self: self.state.way.attempt > 5)
    @rule(own=st.booleans())
    def is_given_up(self, own: bool) -> None:
        self.do(self.state.poisoned("no memory") if own else self.state.abandoned("the step is closed"))

    @invariant()
    def ends_once(self) -> None:
        assert self.ends == self.state.ended
        if self.ends:
            assert not self.calls
            assert self.state.why

    @invariant()
    def something_is_awaited(self) -> None:
        forward = self.state.phase is JourneyPhase.FORWARD
        if forward:
            assert len(self.calls) <= 1, "on the way out there is one attempt at a time"
        if forward or self.state.phase is JourneyPhase.BACKWARD:
            assert self.calls or self.state.way.next_due() is not None, "nobody is asked and nobody is awaited"


TestJourneyMachine = JourneyMachine.TestCase
TestJourneyMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("story", "again"),
    [
        (HOME, []),
        ([*SET_OUT, ("not_sent", 0, FULL)], [0, 1, 2]),
        ([*ON_ITS_WAY, ("gone", "c0"), ("look",)], [2]),
        ([*BACK, ("sent", 2), ("look", 9.0)], [2]),
        ([*COMING_HOME, ("look", 9.0)], [0]),
    ],
)
def test_journey_knows_of_whom_it_asked_again(story: list[Event], again: list[int]) -> None:
    case = Case()
    for event in story:
        case.on(event)
    assert [at for at, hop in enumerate(case.state.way.hops) if hop.again] == again
