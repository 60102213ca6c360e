"""One microbatch on a stage replica, as a state machine. Pure.

    expected → received → queued → computing → sent on → queued back → contributing → turned back → adding → accumulated

is its way where nothing fails. A hosted last stage goes from computing to accumulated, one that defers no weight
gradients from contributing; a replica that takes the hop over goes from expected to queued back. At the closing of a
step what the ledger assigns becomes accumulated whatever it was, and what it does not assign is taken out. A microbatch
leaves the table, with a reason, when it is dropped or its step is closed; what is being computed of it then ends
without effect.
"""

from __future__ import annotations

from asyncio import Event
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import ClassVar, Literal, NamedTuple

from swarm.errors import Busy, Refused
from swarm.ids import JourneyKey, PeerId, StepWork
from swarm.network.protocols import Payload
from swarm.pipeline.compute import Graph, Rest
from swarm.pipeline.messages import Direction, RoutedMessage
from swarm.pipeline.retention import payload_bytes
from swarm.pipeline.seals import NOTHING, Content, Sealed

Work = Direction | Literal["weights"]
"""A piece of work on one microbatch. ``weights`` is what a backward left to do for the gradients of its parameters."""


class Phase(Enum):
    """How far a microbatch has come."""

    EXPECTED = "expected"  # a place is kept for it, or its targets, or its gradient, came first
    RECEIVED = "received"  # its input is here; the hosted last stage still waits for its targets
    QUEUED = "queued"
    COMPUTING = "computing"
    SENT_ON = "sent on"  # its graph, which may have been dropped for want of memory, waits for the gradient
    QUEUED_BACK = "queued back"
    CONTRIBUTING = "contributing"
    TURNED_BACK = "turned back"  # its input's gradient is sent on; those of the weights wait for their turn
    ADDING = "adding"
    ACCUMULATED = "accumulated"  # it is in the sum; what was received is retained
    TAKEN_OUT = "taken out"  # it was in the sum, and is not any more


_TURNED = frozenset({Phase.TURNED_BACK, Phase.ADDING})
_BACK = _TURNED | {Phase.QUEUED_BACK, Phase.CONTRIBUTING}
_BEGUN = _BACK | {Phase.RECEIVED, Phase.QUEUED, Phase.COMPUTING, Phase.SENT_ON}
_FROM = {
    Phase.RECEIVED: frozenset({Phase.EXPECTED, Phase.TAKEN_OUT}),
    Phase.QUEUED: frozenset({Phase.RECEIVED}),
    Phase.COMPUTING: frozenset({Phase.QUEUED}),
    Phase.SENT_ON: frozenset({Phase.COMPUTING}),
    Phase.QUEUED_BACK: frozenset(Phase) - _BACK - {Phase.ACCUMULATED},
    Phase.CONTRIBUTING: frozenset({Phase.QUEUED_BACK}),
    Phase.TURNED_BACK: frozenset({Phase.CONTRIBUTING}),
    Phase.ADDING: frozenset({Phase.TURNED_BACK}),
    Phase.ACCUMULATED: frozenset(Phase),
    Phase.TAKEN_OUT: frozenset(Phase),
}
"""Phase → the phases from which it is reached."""


class Action(Enum):
    """What is to be done about a microbatch."""

    NOTHING = "nothing"
    QUEUE_FORWARD = "queue its forward"
    QUEUE_BACKWARD = "queue its backward"
    FETCH = "fetch what its backward takes"
    SEND_OUTPUT = "send its output"
    TELL_FORWARD = "report its forward and send its output"
    TELL_BACKWARD = "report its backward and send its gradient"
    HURRY = "send its gradient again, and add its weights' gradients next"


class Next(NamedTuple):
    """An action, and why."""

    action: Action
    reason: str


@dataclass(slots=True)
class Tensors:
    """What is held of one microbatch, wire-encoded but for the graph and the rest.

    ``input``, ``targets`` and ``gradient`` (of the output) are what the replica received: from them it can compute
    everything again. ``graph`` and ``output`` spare that between forward and backward, ``rest`` between the gradient of
    the input and those of the weights.
    """

    input: Payload | None = None
    targets: Payload | None = None
    gradient: Payload | None = None
    gradient_sender: PeerId | None = None
    output: Payload | None = None
    graph: Graph | None = None
    rest: Rest | None = None


@dataclass(slots=True)
class Hashes:
    """What came, and what was made of it, for the receipt; it outlives the tensors. All four are of one computing: what
    comes anew takes with it what was made of what came before."""

    input: Sealed = Sealed()
    gradient: Sealed = Sealed()
    output: bytes = NOTHING
    sent: bytes = NOTHING

    def of_input(self, sealed: Sealed) -> None:
        """An input came."""
        self.input, self.output, self.sent = sealed, NOTHING, NOTHING

    def of_gradient(self, sealed: Sealed) -> None:
        """A gradient of the output came, or targets."""
        self.gradient, self.sent = sealed, NOTHING

    @property
    def came(self) -> tuple[bytes, bytes]:
        """Return the hashes of what came."""
        return self.input.hash, self.gradient.hash

    @property
    def content(self) -> Content:
        """Return what a receipt signs."""
        return Content(self.input.hash, self.output, self.gradient.hash, self.sent)


@dataclass(slots=True, eq=False)
class MicrobatchState:
    """One microbatch at one replica. Implements :class:`~swarm.pipeline.retention.Retained`."""

    key: JourneyKey
    route: tuple[PeerId, ...]
    early: bool = False
    hop: int = 0
    chosen: bytes = b""  # its trainer's signature that this attempt takes this route
    tensors: Tensors = field(default_factory=Tensors)
    hashes: Hashes = field(default_factory=Hashes)
    phase: Phase = Phase.EXPECTED
    forward_attempt: int = -1  # that of the admitted forward
    expires: float = 0.0  # until then the payload of an admitted forward or gradient may still come
    arrived: float = 0.0  # when it was queued last
    adopting: bool = False  # what its backward takes is being fetched
    in_use: int = 0  # contributions that are being computed from it
    loss: tuple[float, int] = (0.0, 0)  # hosted last stage: its sum over the targets, and how many those are
    took: tuple[float, float] = (0.0, 0.0)  # seconds that it waited and was computed until it turned back
    hashing: Event | None = None  # set when the hash of what is handed back is there; None where nothing was
    undone: bool = False  # its trainer begins it anew: what it takes to add it again stays until its step is closed
    dropped: str = ""  # why it left the table

    _moving: ClassVar[Lock] = Lock()

    @property
    def work(self) -> StepWork:
        """Return what it is found by."""
        return StepWork(self.key.step, self.key.microbatch, self.early, self.hop)

    @property
    def begun(self) -> bool:
        """Return whether its work began, and is not in the sum."""
        return self.phase in _BEGUN

    @property
    def accumulated(self) -> bool:
        """Return whether it is in the sum."""
        return self.phase is Phase.ACCUMULATED

    @property
    def counted(self) -> bool:
        """Return whether it is in the sum, or was."""
        return self.phase in (Phase.ACCUMULATED, Phase.TAKEN_OUT)

    @property
    def whole(self) -> bool:
        """Return whether all that it takes to add it is held."""
        return self.tensors.input is not None and self.received is not None

    @property
    def received(self) -> Payload | None:
        """Return what came on the way back, or instead of that, as it is held: the gradient or the targets."""
        held = self.tensors
        return held.targets if held.gradient is None else held.gradient

    @property
    def here(self) -> bool:
        """Return whether nothing more is wanted of the stage before."""
        return self.adopting or self.begun or self.accumulated

    @property
    def retained_bytes(self) -> int:
        """See :class:`~swarm.pipeline.retention.Retained`."""
        return payload_bytes(self.tensors.input, self.tensors.targets, self.tensors.gradient)

    @property
    def complete(self) -> bool:
        """See :class:`~swarm.pipeline.retention.Retained`."""
        over = self.accumulated or (self.phase is Phase.TAKEN_OUT and not (self.adopting or self.in_use))
        return over and not self.undone

    @property
    def ahead(self) -> bool:
        """Return whether only its targets are here."""
        return self.tensors.targets is not None and self.forward_attempt < 0 and not (self.here or self.in_use)

    def under_way(self, now: float) -> bool:
        """Return whether it takes up one of the replica's places: it is worked on, holds a tensor or may soon. Targets
        that came ahead are counted apart, and what only waits for its weights' gradients is bounded by its bytes."""
        brought = self.tensors.input is not None or self.tensors.gradient is not None
        waits = (brought and self.phase is Phase.EXPECTED) or now < self.expires
        over = self.accumulated or self.phase is Phase.TURNED_BACK
        return not over and (self.begun or self.adopting or waits)

    def idle(self, before: float) -> bool:
        """Return whether nothing is done with it, and nothing of it came since then."""
        waits = not (self.accumulated or self.phase in _BACK or self.adopting or self.in_use)
        return waits and max(self.arrived, self.expires) < before

    def clear(self) -> None:
        """See :class:`~swarm.pipeline.retention.Retained`."""
        self.tensors = Tensors()

    def check(self, body: RoutedMessage, route: tuple[PeerId, ...]) -> None:
        """Raise Refused for an attempt that was superseded, or that leads elsewhere than it did: only a new one changes
        the route. Raise Busy where this came ahead of its step, which will show whose lineage that is."""
        if body.after != self.key.after:
            raise Busy("not open yet")
        if body.attempt < self.key.attempt:
            raise Refused(f"attempt {body.attempt} was superseded by {self.key.attempt}")
        if body.attempt == self.key.attempt and route != self.route:
            raise Refused("this attempt leads elsewhere than it did before")

    def follow(self, body: RoutedMessage, route: tuple[PeerId, ...]) -> bool:
        """Go on as this attempt, along its route. Return whether it is a newer one. Raises as :meth:`check`."""
        self.check(body, route)
        newer = body.attempt > self.key.attempt
        if newer:
            self.key, self.route = body.key, route
        self.chosen = body.chosen
        return newer

    def take_input(self, attempt: int, payload: Payload, sealed: Sealed) -> None:
        """Its forward came. Raises Refused when another was admitted meanwhile."""
        if self.forward_attempt != attempt:
            raise Refused("this forward is not awaited any more")
        self.fetched_input(payload, sealed)
        self._move(Phase.RECEIVED)

    def fetched_input(self, payload: Payload, sealed: Sealed) -> None:
        """Its input is here. What was added keeps what it was computed from, and nothing else."""
        if not self.accumulated:
            self.hashes.of_input(sealed)
        if sealed.hash == self.hashes.input.hash:
            self.tensors.input = payload

    def take_targets(self, payload: Payload, sealed: Sealed) -> bool:
        """Its targets came. Return whether they are news: a trainer that comes back to a replica brings them again."""
        if self.accumulated or self.tensors.targets is not None:
            return False
        self.fetched_targets(payload, sealed)
        return True

    def fetched_targets(self, payload: Payload, sealed: Sealed) -> None:
        """Its targets are here; as :meth:`fetched_input`."""
        if not self.accumulated:
            self.hashes.of_gradient(sealed)
        if sealed.hash == self.hashes.gradient.hash:
            self.tensors.targets = payload

    def take_gradient(self, payload: Payload, sender: PeerId, sealed: Sealed) -> bool:
        """The gradient of its output came. Return whether it is news."""
        if self.accumulated or self.tensors.gradient is not None:
            return False
        self.fetched_gradient(payload, sender, sealed)
        return True

    def fetched_gradient(self, payload: Payload, sender: PeerId, sealed: Sealed) -> None:
        """The gradient of its output is here; as :meth:`fetched_input`."""
        if not self.accumulated:
            self.hashes.of_gradient(sealed)
        if sealed.hash == self.hashes.gradient.hash:
            self.tensors.gradient, self.tensors.gradient_sender = payload, sender

    def after_input(self, needs_targets: bool) -> Next:
        """Decide what follows when its input or, where the loss is computed, its targets have come."""
        if self.phase is not Phase.RECEIVED:
            return Next(Action.NOTHING, "its targets wait for its input")
        if needs_targets and self.tensors.targets is None:
            return Next(Action.NOTHING, "its input waits for its targets")
        return Next(Action.QUEUE_FORWARD, "all that its forward takes is here")

    def after_gradient(self, asked_anew: bool) -> Next:
        """Decide what follows when a gradient has come. ``asked_anew``: by its trainer, with a new attempt."""
        if self.accumulated:
            if asked_anew:
                return Next(Action.TELL_BACKWARD, "its trainer asks again for what was added before")
            return Next(Action.NOTHING, "it was added before")
        if asked_anew and self.phase in _TURNED:
            return Next(Action.HURRY, "its trainer asks again for what was sent on before")
        can = self.tensors.graph is not None or self.phase is Phase.SENT_ON  # one that was dropped is computed again
        if can or (self.tensors.input is not None and not self.begun):
            return Next(Action.QUEUE_BACKWARD, "all that its backward takes is here")
        if not (self.begun or self.adopting):
            return Next(Action.FETCH, "its gradient came and nothing else")
        return Next(Action.NOTHING, "what is under way finds the gradient when it has come so far")

    def after_forward_again(self, newer: bool, *, hosted: bool) -> Next:
        """Decide what follows when a forward comes again: what was told and handed on before may be lost. Unless the
        ends are hosted, who asks for it after the gradient was here begins the microbatch anew and has no use for what
        was added: that is told when the gradient comes again."""
        if newer and (self.phase is Phase.SENT_ON or (not hosted and (self.accumulated or self.phase in _BACK))):
            return Next(Action.TELL_FORWARD, "its trainer asks again for what was sent on before")
        if newer and self.accumulated:
            return Next(Action.TELL_BACKWARD, "its trainer asks again for what was added before")
        return Next(Action.NOTHING, "it is here already")

    def after_resend(self) -> Next:
        """Decide what follows when its output is wanted elsewhere."""
        if self.begun and self.tensors.graph is None and self.tensors.output is None:
            return Next(Action.NOTHING, "it is sent along the new route when it is computed")
        return Next(Action.SEND_OUTPUT, "its output is wanted elsewhere")

    def after_adopt(self) -> Next:
        """Decide what follows when this replica is to take the hop over."""
        if self.accumulated:
            return Next(Action.TELL_BACKWARD, "it was added before")
        if self.phase in _TURNED:
            return Next(Action.HURRY, "its gradient was sent on before")
        if self.adopting or self.phase in _BACK:
            return Next(Action.NOTHING, "its backward is under way")
        return Next(Action.FETCH, "its trainer gave the hop to this replica")

    def queue(self, direction: Direction, now: float) -> bool:
        """It waits for the device from now on. Return whether that is news: either direction is queued once."""
        if news := self._move(Phase.QUEUED if direction == "forward" else Phase.QUEUED_BACK):
            self.arrived = now
        return news

    def start(self) -> Work | None:
        """Its turn on the device came. Return what is to be computed, None when another lane does, or did."""
        if self._move(Phase.CONTRIBUTING):
            return "backward"
        if self._move(Phase.ADDING):
            return "weights"
        return "forward" if self._move(Phase.COMPUTING) else None

    def computed(self, output: Payload, graph: Graph) -> Next:
        """Its forward was computed. Nothing is kept of what went back meanwhile."""
        if self.phase not in (Phase.COMPUTING, Phase.QUEUED_BACK):
            return Next(Action.NOTHING, "its backward went ahead without it")
        self.tensors.graph, self.tensors.output = graph, output
        self._move(Phase.SENT_ON)
        if self.tensors.gradient is not None:
            return Next(Action.QUEUE_BACKWARD, "its gradient came meanwhile: the next stage was sent it by others")
        return Next(Action.TELL_FORWARD, "its forward was computed")

    def take_graph(self) -> Graph | None:
        """Return what backward needs, and hold neither that nor the output any more."""
        graph = self.tensors.graph
        self.tensors.graph = self.tensors.output = None
        return graph

    def turn_back(self, rest: Rest, now: float) -> bool:
        """The gradient of its input is there, and ``rest`` to be done. Return False for one that was added at the
        step's closing meanwhile."""
        if moved := self._move(Phase.TURNED_BACK):
            self.tensors.rest, self.arrived = rest, now
        return moved

    def take_rest(self) -> Rest | None:
        """Return what is left to do, None where that was dropped for want of memory, and do not hold it any more."""
        rest, self.tensors.rest = self.tensors.rest, None
        return rest

    def accumulate(self, loss_sum: float, tokens: int) -> None:
        """It was added to the sum. On the device thread, so that it is true no matter who was cancelled meanwhile."""
        self.loss = loss_sum, tokens
        self._move(Phase.ACCUMULATED)

    def take_out(self) -> None:
        """It was taken out of the sum. On the device thread, as :meth:`accumulate`."""
        self._move(Phase.TAKEN_OUT)
        self.expires = 0.0

    def _move(self, phase: Phase) -> bool:
        """Go over to a phase, if it is reached from the present one. Both the event loop and the device thread do."""
        with self._moving:
            if reached := self.phase in _FROM[phase]:
                self.phase = phase
        return reached
