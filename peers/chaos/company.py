"""Listen to the peers of a world and inflict one fault at a time: the half that processes and containers share.

A fault that lasts ends by a timer; :class:`Holds` knows what another one still holds then.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from peers.chaos import faults
from peers.chaos.cast import twin_of
from peers.chaos.faults import CODES, CannotInflict, Fault
from peers.chaos.liars.orders import as_liar
from peers.chaos.world import PeerSpec, Stamps, SteadyWall
from peers.exit_codes import EXIT_DRAINED
from swarm.monitoring.reader import RawEvent, Recorded, decode_line

Hear = Callable[[str, str, Mapping[str, Any]], None]


class TrackedPeer(Protocol):
    """A peer of a world. ``read`` is how far the output of its newest start is read."""

    spec: PeerSpec
    read: int
    identity: str

    @property
    def name(self) -> str:
        """Its name in the world."""

    @property
    def starts(self) -> list[Any]:
        """The newest last."""


class OnNetworks(Protocol):
    """The networks of each peer."""

    def meant(self, name: str, network: str) -> set[str]:
        """Those of this peer's networks that a fault means by that name: all of them by "". Raises CannotInflict."""

    def disconnect(self, names: Iterable[str], network: str) -> None:
        """These are on that network no more; on none for ""."""

    def reconnect(self, names: Iterable[str], network: str) -> None:
        """They are again; on all of theirs for ""."""


_CUTS = (faults.Partition, faults.SlowLinks, faults.Disconnect)
"""Those that are over after some seconds must find somebody on either side, or they do nothing."""

P = TypeVar("P", bound=TrackedPeer)
T = TypeVar("T", bound=Hashable)
Release = Callable[[list[T]], object]


class Holds(Generic[T]):
    """Two timed faults may overlap on one thing: the one that ends first must not end the other."""

    def __init__(self) -> None:
        self._causes: dict[T, set[object]] = {}

    def hold(self, things: Iterable[T]) -> object:
        """These are held from now on by one cause more, which is returned."""
        cause = object()
        for thing in things:
            self._causes.setdefault(thing, set()).add(cause)
        return cause

    def end(self, cause: object) -> list[T]:
        """This cause is over. Returns what no cause holds any more and what it had held until now."""
        held = [thing for thing, causes in self._causes.items() if cause in causes]
        for thing in held:
            self._causes[thing].discard(cause)
        free = [thing for thing in held if not self._causes[thing]]
        self.forget(free)
        return free

    def forget(self, things: Iterable[T]) -> None:
        """Somebody has let them go by hand, whatever their causes."""
        for thing in things:
            self._causes.pop(thing, None)


class LaterWork:
    """Work that is done later or beside the play, with nobody waiting for it; none once the world is ``over``.
    ``problems`` name what failed."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.problems: list[str] = []
        self._timers: list[threading.Timer] = []

    def end(self) -> None:
        """Nothing is done later any more."""
        for timer in self._timers:
            timer.cancel()

    def after(self, seconds: float | None, act: Callable[[], object]) -> None:
        """Do it so many seconds from now, unless the world has ended; never for None."""
        if seconds is None:
            return
        timer = threading.Timer(seconds, self.unless_over, (act,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def unless_over(self, act: Callable[[], object]) -> None:
        """Do it: when it fails, that is a problem of the play."""
        try:
            if not self.over.is_set():
                act()
        except Exception as error:  # noqa: BLE001 - told in problems
            if not self.over.is_set():
                self.problems.append(f"what was to be done in the background was not: {type(error).__name__}: {error}")


class SpecBook:
    """With what peers are started. ``expected`` may be started later, by their names; ``joiner`` is what a storm's
    joiners are like: the first stage host, if one can be had that names no stage."""

    def __init__(self) -> None:
        self.expected: dict[str, PeerSpec] = {}
        self.joiner: PeerSpec | None = None
        self._shares: dict[str, float | None] = {}

    def started(self, spec: PeerSpec) -> None:
        """A peer is started with this."""
        self._shares.setdefault(spec.name, spec.cpus)
        if spec.role == "stage" and (self.joiner is None or "--stage" in self.joiner.arguments):
            self.joiner = spec

    def share(self, fault: faults.LimitCpu | faults.SlowDevice) -> float | None:
        """Of how many processors the peer may use as much as that, from now on; None: of all. What the scenario gave it
        is what a factor is of, and what is left when the fault's own limit is lifted."""
        given = self._shares.get(fault.peer)
        if isinstance(fault, faults.LimitCpu):
            return fault.cpus if fault.cpus > 0 else given
        return (given or 1.0) / fault.factor if fault.factor > 1 else given


class BaseWorld(ABC, Generic[P]):
    """Half of a :class:`~peers.chaos.world.PlayWorld`: it listens to its peers in a thread of its own and inflicts what
    is asked for, one thing at a time; the rest says what a peer is. Nothing is inflicted once it is ``over``."""

    LOOK_EVERY_S: ClassVar[float]
    networks: OnNetworks

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stamps = Stamps(SteadyWall())
        self.peers: dict[str, P] = {}
        self.specs, self.later = SpecBook(), LaterWork()
        self._hear: list[Hear] = []
        self._lock = threading.RLock()
        self._watcher = threading.Thread(target=self._watch, name="faults", daemon=True)
        self.pauses: Holds[str] = Holds()
        self.absences: Holds[tuple[str, str]] = Holds()
        self._struck: dict[str, set[int | None]] = {}
        self._unkept: list[str] = []

    @property
    def over(self) -> threading.Event:
        """Set once the world has ended."""
        return self.later.over

    @abstractmethod
    def start(self, spec: PeerSpec) -> None:
        """See :class:`~peers.chaos.world.PlayWorld`."""

    @abstractmethod
    def log(self, name: str) -> Path:
        """See :class:`~peers.chaos.world.PlayWorld`."""

    @abstractmethod
    def alive(self, name: str) -> bool:
        """See :class:`~peers.chaos.world.PlayWorld`."""

    @abstractmethod
    def exit_code(self, name: str) -> int | None:
        """See :class:`~peers.chaos.world.PlayWorld`."""

    @abstractmethod
    def _strike(self, fault: Fault) -> Iterable[str]:
        """Inflict it now; called with the lock held."""

    def _open(self) -> None:
        self._watcher.start()

    def _end(self) -> None:
        """No more is told, nor done later. To be called once, before peers are ended."""
        self.over.set()
        self._watcher.join()
        self.later.end()

    def _enter(self, peer: P, spec: PeerSpec) -> None:
        self.peers[spec.name] = peer
        self.specs.started(spec)

    def expect(self, spec: PeerSpec) -> None:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        self.specs.expected[spec.name] = spec

    def began(self, peer: P, start: Any) -> None:
        """Another start of a peer is the newest, and what it prints is read from its beginning; one with the other, for
        somebody reads meanwhile. What the one before had said last is told first."""
        with self._lock:
            self._look(peer)
            self.pauses.forget((peer.name,))
            self._struck.pop(peer.name, None)
            peer.starts.append(start)
            peer.read = 0

    def lasting(self, holds: Holds[T], things: Iterable[T], seconds: float | None, release: Release[T]) -> None:
        """These are held, and after so long (never for None) those are released that nothing else holds then."""
        cause = holds.hold(things)

        def end() -> None:
            with self.playing():
                if free := holds.end(cause):
                    release(free)

        self.later.after(seconds, end)

    def failed(self, problem: str) -> None:
        """Something did not go as a fault says that it must. From any thread."""
        self.later.problems.append(problem)

    def problems(self) -> Sequence[str]:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        return tuple(self.later.problems)

    def unkept(self) -> Sequence[str]:
        """See :class:`~peers.chaos.world.PlayWorld`."""
        return tuple(self._unkept)

    # --- the seam ------------------------------------------------------------------------------------------------

    def wall(self) -> float:
        """See :class:`~peers.chaos.plan.World`. Steady, whatever becomes of the machine's wall clock meanwhile."""
        return self.stamps.wall()

    def identity(self, name: str) -> str:
        """See :class:`~peers.chaos.plan.World`; "" for a peer that has not said anything yet."""
        return self.peers[name].identity

    def listen(self, hear: Hear) -> None:
        """See :class:`~peers.chaos.plan.World`. What was written before is told too, unless somebody listened."""
        with self._lock:
            self._hear.append(hear)

    def inflict(self, fault: Fault) -> Iterable[str]:
        """See :class:`~peers.chaos.plan.World`. Raises CannotInflict when the world has ended."""
        with self._lock:
            if self.over.is_set():
                raise CannotInflict(f"{fault.name}: the play is over")
            if isinstance(fault, faults.Restart):
                self._check_struck(fault.peer)
                if fault.lie:
                    self.peers[fault.peer].spec = as_liar(self.peers[fault.peer].spec, fault.lie)
            if isinstance(fault, _CUTS) and fault.seconds is not None:
                self._check_sides(fault)
            hit = tuple(self._strike(fault))
            for name in () if isinstance(fault, faults.Restart) else hit:  # what is started is not struck
                self._struck.setdefault(name, set()).update(CODES.get(type(fault), ()))
            return hit

    def _check_sides(self, fault: faults.Partition | faults.SlowLinks | faults.Disconnect) -> None:
        for side in (fault.peers, () if isinstance(fault, faults.Disconnect) else fault.others):
            if side and not any(map(self.alive, side)):
                raise CannotInflict(f"{fault.name}: {', '.join(side)} does not run now, and there is nothing to cut")

    def _check_struck(self, name: str) -> None:
        """Check that a peer to restart has ended as a strike on it explains, or not yet, so that no earlier crash is
        lost. Which of two with one key gives up is theirs to say, and how."""
        if self.alive(name) or twin_of(name) in self.peers:
            return
        code, allowed = self.exit_code(name), self._struck.get(name, set())
        if code not in allowed:
            why = "a strike does not explain that" if allowed else "nobody had struck it"
            self.failed(f"{name} had ended with {code}, and {why}, when it was to be started again")

    def living(self, fault: Fault) -> tuple[str, ...]:
        """The victims of a fault that run now: the others it cannot hit. Raises CannotInflict when none does."""
        found = tuple(name for name in fault.victims if self.alive(name))
        if not found:
            raise CannotInflict(f"{fault.name}: {', '.join(fault.victims) or 'nobody'} does not run now")
        return found

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Alone with the world, for what goes on in the background. Raises CannotInflict when the world has ended."""
        with self._lock:
            if self.over.is_set():
                raise CannotInflict("the play is over")
            yield

    def check_left(self, name: str, code: int | None) -> None:
        """Check that a peer told to leave in order and to come back ended so: with any other code than that of a peer
        that has drained (None: it had to be killed) it did not, which is a problem."""
        if code != EXIT_DRAINED:
            told = "had to be killed" if code is None else f"ended with {code}"
            self.failed(f"{name} was told to leave in order and {told}, where {EXIT_DRAINED} was expected")

    # --- watching ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self.over.wait(self.LOOK_EVERY_S):
            with self._lock:
                for peer in list(self.peers.values()):
                    self._look(peer)

    def _look(self, peer: P) -> None:
        if not self._hear or not peer.starts:
            return
        try:
            with self.log(peer.name).open("rb") as file:
                file.seek(peer.read)
                data = file.read()
        except OSError:
            return  # the one who runs it makes it
        whole = data[: data.rfind(b"\n") + 1]
        peer.read += len(whole)
        for line in whole.splitlines():
            if line.startswith(b"{"):
                self._take(peer, line)

    def _take(self, peer: P, line: bytes) -> None:
        """Tell of one line. One that another version writes so that nobody here can read it is a problem of the play,
        and not the end of listening."""
        try:
            self._tell(peer, decode_line(line))
        except Exception as error:  # noqa: BLE001 - told in problems()
            problem = f"what {peer.name} said was not understood: {type(error).__name__}: {error}"
            if problem not in self.later.problems:
                self.failed(problem)

    def _tell(self, peer: P, recorded: Recorded) -> None:
        peer.identity = recorded.peer or peer.identity
        self.stamps.tell(recorded.monotonic)
        event = recorded.event
        fields = event.fields if isinstance(event, RawEvent) else event.fields()
        for hear in self._hear:
            hear(peer.name, event.kind, fields)
