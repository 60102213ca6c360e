"""The plan that a round's members agree on before it starts, one member's place in it, and the result.

:class:`RoundPlan` comes first; :class:`MemberPlan` derives from it whom a member asks for what.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from swarm.averaging.allreduce.meter import LinkMeasurement
from swarm.averaging.allreduce.partition import BLOCKS, CHUNK_ELEMENTS, ReduceChunk, cut
from swarm.averaging.schedules import SCHEDULES, ScheduleName
from swarm.averaging.schedules.patterns import MAX_PARTS
from swarm.averaging.schedules.routes import Routes
from swarm.compression.codec import Codec, EncodeContext
from swarm.compression.names import FED_BACK, AveragingCodec
from swarm.compression.registry import codec_named
from swarm.errors import BugError
from swarm.ids import PartName, PeerId
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Payload

Gives = Literal["mean", "sum"]
WireType = Literal["float32", "float64"]

MIN_WINDOW, MAX_WINDOW = 2, 16
"""Chunks of a part in flight per pair of members. Two overlap one chunk's link time with the other's reduction; sixteen
(4 MiB) fill a 300 Mbit/s link at 100 ms round trip."""

WINDOW_SHARE = 0.1
"""Memory that the chunks held for one's own part may take, as a share of the vector; the answers being awaited from the
other reducers take at most as much again."""


LEAST_CHECKED, MOST_CHECKED = 3, 64
"""Members without whom nobody could tell which of two is wrong; and those whose commitments fit into one message."""


class RoundKey(NamedTuple):
    """The name of a round within a run. ``attempt`` counts from 0 and grows when a round failed and all of the step's
    rounds are repeated; ``round`` counts the rounds of one attempt. ``after`` is the beginning of the hash of the
    record that the step follows: a member that gives a lineage up comes to the same steps again, in other rounds."""

    step: int
    part: PartName
    attempt: int
    round: int = 0
    after: str = ""

    def __str__(self) -> str:
        return f"{self.part}/{self.step}/{self.attempt}" + (f".{self.round}" if self.round else "")


@dataclass(frozen=True, slots=True)
class ChunkCodec:
    """The encoding of a round's chunks in one direction: vectors of one number type, by a codec of the registry.

    Equal bytes give equal numbers, anywhere. Values that are not finite pass where it is exact: who adds or stores them
    looks.
    """

    codec: Codec
    dtype: WireType
    step: int
    direction: Literal["sum", "result"]

    @property
    def exact(self) -> bool:
        """True if bytes are the numbers' own: then encoding and decoding are views and cost nothing."""
        return self.codec.exact(self.dtype)

    def wire_bytes(self, elements: int) -> int:
        """Return exactly how many bytes so many numbers become."""
        return self.codec.wire_bytes(TensorSpec((elements,), self.dtype))

    def encode(self, values: NDArray[Any], chunk: ReduceChunk) -> memoryview:
        """Return the bytes of a chunk's contiguous numbers. They alias them where the codec is exact."""
        context = EncodeContext(step=self.step, direction=self.direction, place=chunk.start)
        return self.codec.encode(torch.from_numpy(values), context)

    def decode(self, encoded: Payload, elements: int) -> NDArray[Any]:
        """Return the numbers. Raises Violation for a wrong length and for what no encoder makes."""
        values: NDArray[Any] = self.codec.decode(encoded, TensorSpec((elements,), self.dtype)).numpy()
        return values


def _codec(name: AveragingCodec, dtype: WireType) -> Codec:
    """Return the codec of that name; float32 stands for numbers as they are, whatever their type.

    Raises BugError for a codec that does not carry them.
    """
    if name == "float32":
        return codec_named(dtype)
    if dtype != "float32":
        raise BugError(f"codec {name} carries float32, not {dtype}")
    return codec_named(name)


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """One round as all its members must see it; two members whose plans differ do not exchange anything.

    ``members`` are in rank order, the order of addition. ``weights`` are the ledger's token counts; a member of
    weight 0 sends nothing and receives everything, and of a round that nobody fed nothing is exchanged. ``shares`` say
    how much of the vector each member reduces (0 or absent: none); without any, the members with weight > 0 reduce
    equal parts, so that an observer, whom nobody has reason to trust yet, computes nothing for others. ``dtype`` is
    that of the sums. It ``gives`` their weighted mean in float32, or their sum in ``dtype`` for another round to go on
    with. ``divide_by`` is what a mean divides the sum of all by where that is not Σ weights: microbatches may be in the
    sums of several members. ``codec`` says how both travel: float32 as they are, whatever the type; int8 rounded to 8
    bits, once, so that only ``direct`` will do. ``schedule`` is the way that sums travel, for a ``reason`` in words.
    ``aligned`` cuts parts between chunks, so that groups of other sizes name the same result by the same digest and
    norm. ``outgoing`` members call the others and are called by nobody: they reduce nothing, and hear of each other
    from those they call. In a ``signed`` round all tell each other what they hold before anybody returns; in others who
    uses the results compares them. In a ``guarded`` round a sum that is far from the others' is left out of a chunk's
    mean. In a ``checked`` one each member computes this share of others' means again
    (:mod:`swarm.averaging.allreduce.check`). ``timeout_s`` counts from the local start and need not be the same
    everywhere.
    Raises BugError for a plan that cannot be carried out.
    """

    key: RoundKey
    members: tuple[PeerId, ...]
    weights: Mapping[PeerId, int]
    elements: int
    timeout_s: float
    dtype: WireType = "float32"
    codec: AveragingCodec = "float32"
    shares: Mapping[PeerId, int] = field(default_factory=dict)
    chunk_elements: int = CHUNK_ELEMENTS
    gives: Gives = "mean"
    aligned: bool = False
    schedule: ScheduleName = "direct"
    reason: str = ""
    outgoing: frozenset[PeerId] = frozenset()
    signed: bool = True
    guarded: bool = False
    checked: float = 0.0
    divide_by: int = 0

    def __post_init__(self) -> None:
        self._check_members()
        if self.elements < 0 or self.chunk_elements < 1 or not self.timeout_s > 0:
            raise BugError(f"round {self.key}: elements, chunk size and time-out must be positive")
        if not self.sums.exact and self.schedule != "direct":
            raise BugError(f"round {self.key}: {self.codec} would be rounded again at each hop of {self.schedule}")
        several = self.gives == "sum" or self.key.round > 0
        if self.feeds_back and several:
            raise BugError(f"round {self.key}: what {self.codec} rounds off a sum of several members is nobody's")
        if self.guarded and (several or self.schedule != "direct" or self.feeds_back):
            raise BugError(f"round {self.key}: what is left out has to be one member's, and owed to nobody")
        if self.checked and not (self.can_be_checked and self.signed and not several):
            raise BugError(f"round {self.key}: only means of a few members that call each other can be checked")
        if self.divide_by and (self.divide_by < 0 or self.gives == "sum" or self.guarded):
            raise BugError(f"round {self.key}: only a mean of all sums is divided by another number than their weights")
        if not self.signed and (self.schedule != "direct" or self.outgoing):
            raise BugError(f"round {self.key}: results that others pass on have to be signed")
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))
        object.__setattr__(self, "shares", MappingProxyType(dict(self.shares)))

    def _check_members(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise BugError(f"round {self.key}: members must be distinct and at least one")
        if set(self.weights) != set(self.members) or min(self.weights.values()) < 0:
            raise BugError(f"round {self.key}: every member needs a weight of at least 0")
        if not set(self.shares) <= set(self.members) or any(share < 0 for share in self.shares.values()):
            raise BugError(f"round {self.key}: shares are at least 0 and belong to members")
        if self.shares and not sum(self.shares.values()):
            raise BugError(f"round {self.key}: no member reduces anything")
        if any(self._share(peer) for peer in self.outgoing if len(self.members) > 1):
            raise BugError(f"round {self.key}: nobody can call those that are to reduce")

    @property
    def can_be_checked(self) -> bool:
        """Return whether members can reduce again what others reduced, and more than one of them does."""
        few = LEAST_CHECKED <= len(self.members) <= MOST_CHECKED
        return few and self.schedule == "direct" and not self.outgoing

    @cached_property
    def total_weight(self) -> int:
        """Σ weights."""
        return sum(self.weights.values())

    @property
    def divisor(self) -> int:
        """The divisor of the sum of all sums."""
        return self.divide_by or self.total_weight if self.gives == "mean" else 1

    @property
    def result_dtype(self) -> WireType:
        """The dtype of the result."""
        return "float32" if self.gives == "mean" else self.dtype

    @cached_property
    def sums(self) -> ChunkCodec:
        """The encoding of a sum on its way to its reducer."""
        return ChunkCodec(_codec(self.codec, self.dtype), self.dtype, self.key.step, "sum")

    @cached_property
    def results(self) -> ChunkCodec:
        """The encoding of a result on its way to all members."""
        return ChunkCodec(_codec(self.codec, self.result_dtype), self.result_dtype, self.key.step, "result")

    @property
    def feeds_back(self) -> bool:
        """Return whether each member keeps what is rounded off for its next contribution: :attr:`RoundResult.left`."""
        return self.codec in FED_BACK

    @cached_property
    def contributors(self) -> tuple[PeerId, ...]:
        """Members with weight > 0, in rank order: the one contributor set of all parts."""
        return tuple(peer for peer in self.members if self.weights[peer] > 0)

    @cached_property
    def chunks(self) -> tuple[ReduceChunk, ...]:
        """All chunks of the vector, in its order; a chunk's ``rank`` is its reducer's place in ``members``."""
        shares = [self.routes.roots.get(peer, 0) for peer in self.members]
        return cut(self.elements, shares, self.chunk_elements, aligned=self.aligned)

    @cached_property
    def routes(self) -> Routes:
        """The routes of sums and results."""
        shares = {peer: self._share(peer) for peer in self.members}
        return Routes(SCHEDULES[self.schedule], self.members, self.weights, shares, self.key.step)

    @cached_property
    def window(self) -> int:
        """The number of chunks of a part that each pair of members may have in flight, so that memory stays a fraction
        of the vector, and a pair's calls within what may be open."""
        held_bytes = len(self.members) * self.chunk_elements * self.item_bytes
        room = int(WINDOW_SHARE * self.elements * self.item_bytes / held_bytes)
        most = MAX_WINDOW if self.schedule == "direct" else 2 * MAX_PARTS // len(self.routes.roots)
        return max(MIN_WINDOW, min(MAX_WINDOW, most, room))

    @property
    def blocks(self) -> int:
        """Return in how many blocks each chunk of a checked round is committed to: in one where no part of its bytes is
        that of some of its numbers."""
        return BLOCKS if self.sums.exact else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of a sum."""
        return np.dtype(self.dtype).itemsize

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of all that members must agree on: everything but the time-out and the reason."""
        agreed = [
            self.key,
            self.members,
            [self.weights[peer] for peer in self.members],
            self.elements,
            self.dtype,
            self.codec,
            [self._share(peer) for peer in self.members],
            self.chunk_elements,
            self.gives,
            self.aligned,
            self.schedule,
            sorted(self.outgoing),
            self.signed,
            *(["guarded"] if self.guarded else []),
            *([f"checked {self.checked}"] if self.checked else []),
            *([f"divided by {self.divide_by}"] if self.divide_by else []),
        ]
        return hashlib.sha256(json.dumps(agreed, separators=(",", ":")).encode()).hexdigest()

    def lasting(self, timeout_s: float) -> RoundPlan:
        """The same but for its time, with all that has been worked out about it."""
        plan = copy.copy(self)
        object.__setattr__(plan, "timeout_s", timeout_s)
        return plan

    def called_by(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Return the members that a member calls: all others that can be called."""
        return tuple(other for other in self.members if other != peer and other not in self.outgoing)

    def reducer(self, chunk: ReduceChunk) -> PeerId:
        """The root of a chunk's tree: who reduces it."""
        return self.members[chunk.rank]

    def chunks_of(self, peer: PeerId) -> tuple[ReduceChunk, ...]:
        """The chunks a member reduces, in order."""
        rank = self.members.index(peer)
        return tuple(chunk for chunk in self.chunks if chunk.rank == rank)

    def _share(self, peer: PeerId) -> int:
        return self.shares.get(peer, 0) if self.shares else int(self.weights[peer] > 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundResult:
    """What a round gives, bit for bit the same at every member but for ``bytes_sent``, ``heard``, ``waited``, seconds,
    ``left`` and ``left_out``.

    ``tensor`` is what the plan gives, (elements,) on the CPU, to be read only: the last answers to others may still be
    on their way. ``squared_norm`` is its squared L2 norm in float64, ``digest`` names its content (hex; comparable
    between members of one plan, and of aligned ones). ``bytes_sent`` counts payload this member put on the wire,
    ``contributors`` are those whose sums were given, ``heard`` is what was measured of the links to the others. All
    members were in ``formed_s`` after this one had begun; it ``waited`` so many seconds for each that came after it.
    ``left_out`` are the elements of whose mean this member, as their reducer, left another's sum out.
    ``left`` is what the round did not bring to all of this member's sum, float32 (elements,), where the codec feeds
    that back: see :class:`~swarm.averaging.allreduce.output.Leftover`.
    """

    tensor: torch.Tensor
    squared_norm: float
    digest: str
    contributors: tuple[PeerId, ...]
    bytes_sent: int
    seconds: float
    formed_s: float = 0.0
    heard: Mapping[PeerId, LinkMeasurement] = field(default_factory=dict)
    waited: Mapping[PeerId, float] = field(default_factory=dict)
    left_out: Mapping[PeerId, int] = field(default_factory=dict)
    left: torch.Tensor | None = None


# --- one member's place in a round: who asks it for what, and what that must weigh -----------------------------------


@dataclass(frozen=True, slots=True)
class Station:
    """At which others hand us their sums of one part: level 0 are those below us in its tree, the levels above trades
    with one member each. ``weights`` are by who may come, ``due`` who of them brings something."""

    weights: Mapping[PeerId, int]
    due: frozenset[PeerId]

    @staticmethod
    def of(weights: Mapping[PeerId, int]) -> Station:
        """Return the station of these members."""
        return Station(weights, frozenset(peer for peer, weight in weights.items() if weight))


NOBODY = Station.of({})


class MemberPlan:
    """A plan from the view of one of its members. Pure."""

    def __init__(self, plan: RoundPlan, me: PeerId) -> None:
        self._routes, self._roots = plan.routes, plan.members
        self.me = me
        self.levels = plan.routes.levels if me in plan.routes.core else 0
        """How often we trade for each chunk."""
        self._stations = {(root, 0): self._below(root) for root in plan.routes.roots}
        for level in range(self.levels):
            (root,) = plan.routes.roots
            partner = plan.routes.partner(me, level)
            self._stations[root, level + 1] = Station.of({partner: plan.routes.traded_weight(partner, level)})

    def station(self, chunk: ReduceChunk, level: int) -> Station:
        """Return the station at which sums of a chunk arrive; an empty one for a level that does not exist."""
        return self._stations.get((self._roots[chunk.rank], level), NOBODY)

    def askers(self, chunk: ReduceChunk) -> Collection[PeerId]:
        """Return those that ask us for a chunk's result."""
        return self.station(chunk, 0).weights.keys()

    def blamed(self, chunk: ReduceChunk) -> frozenset[PeerId]:
        """Return the members that owe us a sum for which they need not wait for others."""
        root = self._roots[chunk.rank]
        return frozenset(peer for peer in self.station(chunk, 0).due if not self._routes.children(peer, root))

    def parent(self, root: PeerId) -> PeerId | None:
        """Return the member that we ask for a root's part; None when we compute it."""
        return self._routes.parent(self.me, root)

    def asks(self, root: PeerId) -> tuple[PeerId, ...]:
        """All to whom we send something for a root's part."""
        parent = self.parent(root)
        if parent is not None:
            return (parent,)
        return tuple(self._routes.partner(self.me, level) for level in range(self.levels))

    def weight(self, root: PeerId, level: int) -> int:
        """Return the weight of our sums."""
        return self._routes.traded_weight(self.me, level - 1) if level else self._routes.weight(self.me, root)

    def _below(self, root: PeerId) -> Station:
        return Station.of({peer: self._routes.weight(peer, root) for peer in self._routes.children(self.me, root)})
