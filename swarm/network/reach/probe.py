"""Measure a link before anything depends on it: bytes there and back, within bounds that hold for strangers.

One that decides whether to take part at all is no member yet, and costs nothing to make up: so one caller may probe a
few times a minute, and all together for so many bytes that a flood of probes is less than one peer's averaging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm.clock import Clock
from swarm.errors import Busy, DeadlineMissed, PeerError, Violation
from swarm.ids import PeerId
from swarm.network.protocols import Answer, AnyMethod, Endpoint, Incoming, Rpc
from swarm.network.reach.reach_service import Turns
from swarm.schema import Message
from swarm.waiting import TokenBucket

MAX_PROBE_BYTES = 1 << 20
"""Each way, of one call."""
PROBES_A_MINUTE = 6
"""Of one caller; a measurement takes four."""
ALL_BYTES_S, ALL_BYTES_AT_ONCE = 128 << 10, 12 << 20
"""Of all callers together, both ways: five measurements at once, and no more than 1 Mbit/s of them for long."""
_SMALL_BYTES = 64 << 10
_QUICK_S = 0.5
"""A link that takes longer for the small probe is not asked for the large one: it has told enough."""


class Probe(Message):
    """Take the bytes beside this, and answer with so many."""

    answer_bytes: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)]


class Probed(Message):
    """So many came."""

    received: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)]


PROBE = Rpc("reach/1/probe", Probe, Probed)


class ProbeService:
    """Answers probes, of anybody."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turns = Turns(times=PROBES_A_MINUTE)
        self._all = TokenBucket(ALL_BYTES_S, ALL_BYTES_AT_ONCE)

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [PROBE.handled_with_payload(self._answer, admit=self._admit)]

    def _admit(self, caller: PeerId, body: Probe, payload_bytes: int) -> None:
        """Before a buffer for the payload exists."""
        if payload_bytes > MAX_PROBE_BYTES:
            raise Violation(f"a probe of {payload_bytes} bytes", peer=caller)
        now, cost = self._clock.monotonic(), payload_bytes + body.answer_bytes
        if self._all.pause_s(cost, now):
            raise Busy("too many links are being measured")
        if not self._turns.take(caller, now):
            raise Busy("this peer measured its link a moment ago")
        self._all.take(cost, now)

    async def _answer(self, caller: PeerId, body: Probe, incoming: Incoming) -> Answer[Probed]:
        return Answer(Probed(received=len(incoming.payload)), bytes(body.answer_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLink:
    """Bytes a second to and from a peer, 0.0 where that was not measured, each with what it was measured with. What
    the link can carry is that at least: a probe is short, and shares the link with the run."""

    up: float
    down: float
    up_bytes: int
    down_bytes: int
    problem: str = ""


async def probe_link(endpoint: Endpoint, peer: PeerId, clock: Clock, *, within_s: float) -> ProbedLink:
    """Measure the link with a peer: 64 KiB each way and, where that is quick, 1 MiB. Never raises a PeerError.

    Args:
        endpoint: Ours; it has entered the run.
        peer: Whom to ask.
        clock: Ours.
        within_s: For all calls together.
    """
    ends = clock.monotonic() + within_s
    best = {True: (0.0, 0), False: (0.0, 0)}
    try:
        for upload in (True, False):
            for amount in (_SMALL_BYTES, MAX_PROBE_BYTES):
                began = clock.monotonic()
                await _probe(endpoint, peer, amount, upload=upload, timeout_s=max(ends - began, 0.05))
                took = max(clock.monotonic() - began, 1e-6)
                best[upload] = max(best[upload], (amount / took, amount))
                if took > _QUICK_S:
                    break
    except DeadlineMissed as error:
        return _linked(best, f"not all in {within_s:g} s: {error.reason}")
    except PeerError as error:
        return _linked(best, error.reason)
    return _linked(best)


async def _probe(endpoint: Endpoint, peer: PeerId, amount: int, *, upload: bool, timeout_s: float) -> None:
    there, back = (amount, 0) if upload else (0, amount)
    answer, payload = await endpoint.call(
        peer, PROBE, Probe(answer_bytes=back), timeout_s=timeout_s, payload=bytes(there), max_reply_bytes=back
    )
    if (answer.received, len(payload)) != (there, back):
        raise Violation("it measured another amount than it was asked for", peer=peer)


def _linked(best: dict[bool, tuple[float, int]], problem: str = "") -> ProbedLink:
    (up, up_bytes), (down, down_bytes) = best[True], best[False]
    return ProbedLink(up=up, down=down, up_bytes=up_bytes, down_bytes=down_bytes, problem=problem)
