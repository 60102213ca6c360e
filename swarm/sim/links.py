"""Links between named peers: how slow, how lossy, how broken. One description for every world; pure and seeded.

    seed = 7
    [default]                        # of every link that nothing else describes
    latency_ms = 20
    mbit_per_s = 100
    [[link]]                         # the last that fits decides; names are patterns as for files
    from = "trainer-*"
    to = "host-1"
    both = true
    latency_ms = 80
    jitter_ms = 10
    loss = 0.01
    [[machine]]                      # what all links of a machine share
    peer = "host-1"
    up_mbit_per_s = 20

:class:`Links` is the description, :class:`Traffic` what becomes of it while messages travel and commands change it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, ValidationError

from swarm.errors import ConfigError
from swarm.schema import Section

PACKET_BYTES = 1460
MATHIS = 1.22
"""TCP's rate over a path that loses a share p of its packets is about MATHIS · packet ÷ (round trip · √p) (Mathis et
al., "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997)."""
SHORTEST_TIMEOUT_S = 0.2
"""Linux's smallest retransmission time-out: what it costs when a message's last packets are lost."""
FAST_RETRANSMIT_PACKETS = 4
"""With three packets behind it a lost one is noticed after a round trip, else by time-out (RFC 5681)."""
OVERTAKING_BYTES = 64 << 10
"""A message up to this size does not wait for larger ones: they travel in chunks, on another stream."""

Milliseconds = Annotated[float, Field(ge=0, le=600_000)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""Infinite: no limit."""
Share = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1, max_length=100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """One direction of a link. ``jitter_s`` is the most that is added to the latency, evenly spread; ``loss`` the share
    of packets lost, which TCP shows as delay; ``reset`` the share of messages whose connection breaks."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = math.inf
    loss: float = 0.0
    reset: float = 0.0

    @property
    def tcp_bytes_per_s(self) -> float:
        """Return what TCP gets out of it."""
        round_trip = 2 * self.latency_s + self.jitter_s
        if not self.loss or not round_trip:
            return self.bytes_per_s
        return min(self.bytes_per_s, MATHIS * PACKET_BYTES / (round_trip * math.sqrt(self.loss)))

    def recovery_s(self, size: int, rng: random.Random) -> float:
        """Seconds that lost packets cost a message of ``size`` bytes beyond its rate: 0 when none of them decides."""
        packets = max(1, math.ceil(size / PACKET_BYTES))
        if not self.loss or rng.random() < (1 - self.loss) ** min(packets, FAST_RETRANSMIT_PACKETS):
            return 0.0
        round_trip = 2 * self.latency_s + self.jitter_s
        return round_trip if packets >= FAST_RETRANSMIT_PACKETS else max(SHORTEST_TIMEOUT_S, 2 * round_trip)


PERFECT = LinkShape()


class _Shape(Section):
    latency_ms: Milliseconds = 0.0
    jitter_ms: Milliseconds = 0.0
    mbit_per_s: Rate = math.inf
    loss: Share = 0.0
    reset: Share = 0.0

    def shape(self) -> LinkShape:
        return LinkShape(
            latency_s=self.latency_ms / 1e3,
            jitter_s=self.jitter_ms / 1e3,
            bytes_per_s=self.mbit_per_s * 1e6 / 8,
            loss=self.loss,
            reset=self.reset,
        )


class _Link(_Shape):
    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    both: bool = False


class _Machine(Section):
    peer: Name
    up_mbit_per_s: Rate = math.inf
    down_mbit_per_s: Rate = math.inf


class _Description(Section):
    seed: int = 0
    default: _Shape = _Shape()
    link: tuple[_Link, ...] = ()
    machine: tuple[_Machine, ...] = ()


@dataclass(frozen=True, slots=True)
class Links:
    """A description of all links. ``rules`` are (from, to, shape), of which the last that fits decides; ``machines``
    are (name, bytes a second up, down)."""

    default: LinkShape = PERFECT
    rules: tuple[tuple[str, str, LinkShape], ...] = ()
    machines: tuple[tuple[str, float, float], ...] = ()
    seed: int = 0

    @staticmethod
    def parse(description: Mapping[str, Any]) -> Links:
        """From plain data, as in the module's docstring. Raises ConfigError naming the key that cannot be used."""
        try:
            told = _Description.model_validate_json(_json(description))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            what = str(first["msg"]).lower()
            raise ConfigError(f"links: {key}", first["input"], what, "See swarm/sim/links.py for the form.") from None
        rules: list[tuple[str, str, LinkShape]] = []
        for link in told.link:
            ways = [(link.source, link.target), (link.target, link.source)]
            rules += [(*way, link.shape()) for way in ways[: 1 + link.both]]
        machines = [(one.peer, one.up_mbit_per_s * 1e6 / 8, one.down_mbit_per_s * 1e6 / 8) for one in told.machine]
        return Links(told.default.shape(), tuple(rules), tuple(machines), told.seed)

    def shape(self, source: str, target: str) -> LinkShape:
        """Of the direction from one named peer to another."""
        for one, other, shape in reversed(self.rules):
            if fnmatchcase(source, one) and fnmatchcase(target, other):
                return shape
        return self.default

    def machine(self, name: str) -> tuple[float, float]:
        """(up, down) bytes a second of a named peer's machine."""
        for pattern, up, down in reversed(self.machines):
            if fnmatchcase(name, pattern):
                return up, down
        return math.inf, math.inf


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one message: it arrives after so many seconds, or its connection breaks then."""

    seconds: float
    reset: bool = False


V = TypeVar("V")
Pair = tuple[str, str]
Cause = Hashable
"""Why a link is not as described: what is so for two causes is so until both are over."""


class PerCause(Generic[V]):
    """What is so of directions of links, for each cause by itself; the newest of several decides."""

    def __init__(self) -> None:
        self._found: dict[Pair, dict[Cause, V]] = {}

    def put(self, pair: Pair, value: V, cause: Cause) -> None:
        """It is so for this cause now, in place of what was so for it before."""
        causes = self._found.setdefault(pair, {})
        causes.pop(cause, None)
        causes[cause] = value

    def get(self, pair: Pair) -> V | None:
        """Return what is so, None where nothing is."""
        return next(reversed(self._found[pair].values())) if pair in self._found else None

    def items(self) -> list[tuple[Pair, V]]:
        """All directions of which something is so, in order."""
        return [(pair, next(reversed(self._found[pair].values()))) for pair in sorted(self._found)]

    def end(self, pairs: Collection[Pair], *, only: Cause = None, but: Cause = None) -> None:
        """What was so of these (of all, where none is named) is over: for one cause alone, for all but one, or for
        all."""
        for pair in [pair for pair in self._found if not pairs or pair in pairs]:
            causes = self._found[pair]
            kept = {
                cause: value
                for cause, value in causes.items()
                if (only is not None and cause != only) or (but is not None and cause == but)
            }
            self._found[pair] = kept
            if not kept:
                del self._found[pair]


class Traffic:
    """The links at work: who waits for whom, what is cut, what is slower than described. One per world.

    Every decision comes from the description's seed and the order of calls, so that a world repeats itself.
    """

    def __init__(self, links: Links | None = None) -> None:
        self.links = links or Links()
        self._rng = random.Random(self.links.seed)
        self._free_at: dict[tuple[str, ...], float] = {}
        self._cuts: PerCause[bool] = PerCause()
        self._overrides: PerCause[LinkShape] = PerCause()

    def shape(self, source: str, target: str) -> LinkShape:
        """Of a direction as it is now."""
        return self._overrides.get((source, target)) or self.links.shape(source, target)

    def cut(self, sources: Iterable[str], targets: Sequence[str], *, both: bool = True, cause: Cause = "") -> None:
        """From now on nothing passes from one group to the other."""
        for source in sources:
            for target in targets:
                self._cuts.put((source, target), True, cause)
                if both:
                    self._cuts.put((target, source), True, cause)

    def heal(
        self, sources: Iterable[str] = (), targets: Sequence[str] = (), *, only: Cause = None, but: Cause = None
    ) -> None:
        """Undo cuts and slowness between two groups, in both directions; everywhere when none are named. Those of one
        cause alone or, with ``but``, of all others."""
        pairs = {pair for one in sources for other in targets for pair in ((one, other), (other, one))}
        self._cuts.end(pairs, only=only, but=but)
        self._overrides.end(pairs, only=only, but=but)

    def slow(self, source: str, target: str, shape: LinkShape, *, both: bool = False, cause: Cause = "") -> None:
        """This direction (both, when asked) has another shape from now on."""
        self._overrides.put((source, target), shape, cause)
        if both:
            self._overrides.put((target, source), shape, cause)

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether nothing passes in this direction."""
        return bool(self._cuts.get((source, target)))

    def fate(self, source: str, target: str, size: int, now: float, *, in_line: bool | None = None) -> Fate:
        """Return what becomes of a message of ``size`` bytes that is sent ``now``, on any clock; cuts are the caller's
        affair.

        Large messages of a link, and of a machine, pass one after the other; so do all that are ``in_line``, as pieces
        of one stream. Cost: O(rules), no waiting.
        """
        waits = size > OVERTAKING_BYTES if in_line is None else in_line
        shape = self.shape(source, target)
        if shape is PERFECT and not self.links.machines:
            return Fate(0.0)
        sent = max(now, *self._sent_at((source, target), shape, size, now, waits))
        jitter = self._rng.random() * shape.jitter_s if shape.jitter_s else 0.0
        seconds = sent - now + shape.latency_s + jitter + shape.recovery_s(size, self._rng)
        return Fate(seconds, bool(shape.reset) and self._rng.random() < shape.reset)

    def _sent_at(self, pair: tuple[str, str], shape: LinkShape, size: int, now: float, waits: bool) -> Iterator[float]:
        """When the last byte has left each of the ways that it takes at once; takes its place in their lines."""
        rates = {
            ("link", *pair): shape.tcp_bytes_per_s,
            ("up", pair[0]): self.links.machine(pair[0])[0],
            ("down", pair[1]): self.links.machine(pair[1])[1],
        }
        yield now
        for way, rate in rates.items():
            begin = max(now, self._free_at.get(way, now)) if waits else now
            end = begin + size / rate
            if waits and rate < math.inf:
                self._free_at[way] = end
            yield end


def _json(description: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(description))
    except (TypeError, ValueError):
        raise ConfigError("links", description, "plain data", "See swarm/sim/links.py for the form.") from None
