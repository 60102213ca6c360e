"""What counts of a step, as it travels: each peer's id once, and routes as places in that table, two bytes a hop.

With 32 stages a microbatch takes some 95 bytes of a record in place of 1,853, and a record of 1,024 peers fits a
message. A table of its own makes a record readable by itself: no reader needs the roster before it, nor what has become
of a replica that left. All numbers are one string of bytes: as elements of a body, short routes would be more of them
than its bytes may have (:mod:`swarm.network.rpc.bodies`). In files, and in what is hashed, routes stay in full: people
read them, and hashes stay as they were.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import ConfigDict, Field, TypeAdapter

from swarm.columns import MAX_VARIANTS, Routed
from swarm.ids import MicrobatchId, PeerId
from swarm.schema import MAX_COUNT, MAX_LISTED, MicrobatchField, PeerIdField, ShardField

MAX_HOPS, MAX_PEERS = 1024, 20_000
"""Of a route, and of a table: fewer than two bytes can count."""


class CommittedRow(Routed, Protocol):
    """One committed microbatch: see :class:`swarm.consensus.records.Contribution`."""

    @property
    def tokens(self) -> int:
        """Its target tokens."""

    @property
    def loss_sum(self) -> float:
        """Nats."""

    @property
    def early(self) -> bool:
        """Return whether it was computed with older parameters."""


class UnpackedRow(NamedTuple):
    """What was read of one, checked."""

    microbatch: MicrobatchId
    tokens: int
    loss_sum: float
    route: tuple[str, ...]
    early: bool
    choice: int


_Packed = tuple[
    Annotated[tuple[PeerIdField, ...], Field(max_length=MAX_PEERS)],
    Annotated[tuple[ShardField, ...], Field(max_length=MAX_PEERS)],
    bytes,
]
_packed: TypeAdapter[Any] = TypeAdapter(_Packed, config=ConfigDict(strict=True))
_microbatch: TypeAdapter[MicrobatchId] = TypeAdapter(MicrobatchField, config=ConfigDict(strict=True))

_STRETCH = struct.Struct(">HHQQBHI")
"""Microbatches that follow each other in a shard: trainer, shard, epoch, first position, whether early and twice their
choice, hops of each route, how many. Each follows with its tokens, its loss and its route."""


def _row(hops: int) -> struct.Struct:
    return struct.Struct(f">Qd{hops}H")


def pack(rows: Sequence[CommittedRow]) -> tuple[Any, ...]:
    """Return plain data for msgpack, in the rows' order: the peers, the shards, and all numbers. O(hops)."""
    if not rows:
        return ()
    peers = sorted({peer for row in rows for peer in row.route} | {str(row.microbatch.trainer) for row in rows})
    shards = sorted({row.microbatch.shard for row in rows})
    place, shard = ({name: number for number, name in enumerate(names)} for names in (peers, shards))
    data = []
    for first, stretch in _stretches(rows):
        one, hops = first.microbatch, len(first.route)
        begin = place[one.trainer], shard[one.shard], one.epoch, one.position
        data.append(_STRETCH.pack(*begin, first.early + 2 * first.choice, hops, len(stretch)))
        form = _row(hops)
        data += [form.pack(row.tokens, row.loss_sum, *(place[peer] for peer in row.route)) for row in stretch]
    return tuple(peers), tuple(shards), b"".join(data)


def _stretches(rows: Sequence[CommittedRow]) -> Iterator[tuple[CommittedRow, list[CommittedRow]]]:
    """Yield the first of those that follow each other, and all of them."""
    stretch: list[CommittedRow] = []
    for row in rows:
        if stretch:
            first, last = stretch[0], stretch[-1].microbatch
            alike = (row.early, row.choice, len(row.route)) == (first.early, first.choice, len(first.route))
            if alike and row.microbatch == last._replace(position=last.position + 1):
                stretch.append(row)
                continue
            yield first, stretch
        stretch = [row]
    yield stretch[0], stretch


def unpack(plain: Any, make: Callable[[UnpackedRow], Any]) -> tuple[Any, ...]:
    """The inverse, with what ``make`` makes of each row. ``plain`` is another peer's: lengths, numbers and ids are
    checked, each once, before anything is made of them; a hop takes the eight bytes of a reference. Raises ValueError,
    of which pydantic's ValidationError is one."""
    peers, shards, data = _packed.validate_python(plain)
    found, offset, count = [], 0, 0
    while offset < len(data):
        if len(data) - offset < _STRETCH.size:
            raise ValueError("half a stretch")
        begin = _STRETCH.unpack_from(data, offset)
        hops, number = begin[-2:]
        form, offset, count = _row(hops), offset + _STRETCH.size, count + number
        if count > MAX_LISTED:
            raise ValueError(f"more than {MAX_LISTED} microbatches")
        if not number or hops > MAX_HOPS or number * form.size > len(data) - offset:
            raise ValueError("a stretch that is not what it says")
        found.append((begin, data[offset : offset + number * form.size]))
        offset += number * form.size
    return tuple(make(row) for begin, rows in found for row in _rows(peers, shards, begin, rows))


def _rows(peers: Sequence[str], shards: Sequence[str], begin: tuple[Any, ...], data: bytes) -> Iterable[UnpackedRow]:
    trainer, shard, epoch, position, marks, hops, count = begin
    if trainer >= len(peers) or shard >= len(shards):
        raise ValueError("a trainer or a shard that the tables have not")
    choice, early = divmod(marks, 2)
    if choice >= MAX_VARIANTS:
        raise ValueError("a choice that there is not")
    first = MicrobatchId(PeerId(peers[trainer]), shards[shard], epoch, position)
    _microbatch.validate_python(first)
    _microbatch.validate_python(first._replace(position=position + count - 1))
    for number, (tokens, loss_sum, *route) in enumerate(_row(hops).iter_unpack(data)):
        if tokens > MAX_COUNT or not math.isfinite(loss_sum):
            raise ValueError("tokens or a loss that cannot be")
        if route and max(route) >= len(peers):
            raise ValueError("a hop that the table has not")
        microbatch = first._replace(position=position + number)
        yield UnpackedRow(microbatch, tokens, loss_sum, tuple(peers[hop] for hop in route), bool(early), choice)
