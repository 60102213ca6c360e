"""Services of admission: taking credentials, and spreading orders about who belongs to a run.

An order (:class:`~swarm.security.credentials.Order`) reaches every member within a round trip or two: who hears of it
first tells all. It counts at once, and for good with the next record that is decided.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, runtime_checkable

from swarm.config import Manifest
from swarm.errors import ConfigError, Ending, PeerError, RunEnded
from swarm.health.watch import HealthWatch
from swarm.ids import PeerId
from swarm.membership.gate import CallGate
from swarm.membership.rules import admission_policy
from swarm.network.protocols import AnyMethod, Endpoint, Rpc
from swarm.schema import Empty
from swarm.security.credentials import Credential, Order
from swarm.security.signing import verify
from swarm.waiting import ended

logger = logging.getLogger(__name__)

PRESENT = Rpc("admit/1/present", Credential, Empty)
ORDER = Rpc("admit/1/order", Order, Empty)
TELL_S = 5.0


@runtime_checkable
class _Cutting(Protocol):
    """An endpoint that can end another's streams."""

    def cut(self, peer: PeerId) -> None: ...


class AdmissionService:
    """``admit/1`` of one peer."""

    def __init__(self, gate: CallGate, endpoint: Endpoint) -> None:
        self.gate, self._endpoint = gate, endpoint
        self._telling: set[asyncio.Task[None]] = set()
        self._expelled: asyncio.Event | None = None
        self._watch: HealthWatch | None = None
        self._reason = ""
        gate.expel = self._expel

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [PRESENT.handled(self._on_present), ORDER.handled(self._on_order)]

    async def _on_present(self, caller: PeerId, body: Credential) -> Empty:
        self.gate.show(caller, body)
        return Empty()

    async def _on_order(self, caller: PeerId, body: Order) -> Empty:
        self.give(body)
        return Empty()

    def watch(self, watch: HealthWatch) -> None:
        """Have who was revoked counted as lost there, so that the next record is without it."""
        self._watch = watch

    def give(self, order: Order) -> None:
        """Take an order, and tell the members and whom it is about. Raises as :meth:`CallGate.take`."""
        held = self.gate.state.by_serial.get(order.serial)  # before it counts: it is told why it is out
        news = self.gate.take(order)
        if news is None:
            return
        told = dict.fromkeys((*self.gate.members, *(() if held is None else (PeerId(held.peer),))))
        for peer in told:
            if peer != self._endpoint.peer:
                task = asyncio.get_running_loop().create_task(self._tell(peer, news))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def _tell(self, peer: PeerId, order: Order) -> None:
        try:
            await self._endpoint.call(peer, ORDER, order, timeout_s=TELL_S)
        except PeerError as error:
            logger.info("%s was not told to %s %s: %s", peer, order.verb, order.name, error)

    def _expel(self, peer: PeerId, reason: str) -> None:
        """Cut it off at once. The next record is without it."""
        if peer == self._endpoint.peer:
            self._reason = reason
            if self._expelled is not None:
                self._expelled.set()
            return
        if self._watch is not None:
            self._watch.expel(peer, reason)
        if isinstance(self._endpoint, _Cutting):
            self._endpoint.cut(peer)

    async def end_expelled(self) -> None:
        """Raise RunEnded once this peer was revoked; else wait until cancelled."""
        self._expelled = self._expelled or asyncio.Event()
        if not self._reason:
            await self._expelled.wait()
        raise RunEnded(
            f"this peer was removed from the run: {self._reason}",
            Ending.MISUSED,
            check="did an issuer mean this peer? Ask the one who invited it.",
            remedy="With a new invite it can join again.",
        )

    async def close(self) -> None:
        """Tell nobody more."""
        await ended(self._telling)


def open_gate(manifest: Manifest, endpoint: Endpoint, credential: Credential | None) -> AdmissionService | None:
    """Close the gate of this endpoint, and have it show ``credential`` to anyone who asks for one; None, with all open,
    for a run that anybody may join. Raises ConfigError for a run that names no issuer."""
    rules = admission_policy(manifest)
    if not rules.closed:
        return None
    if not manifest.admission.issuers:
        raise ConfigError("admission.issuers", [], "the peer ids of those who may invite",
                          "Name at least one in the manifest.")  # fmt: skip
    gate = CallGate(rules, endpoint.peer, credential, verify)
    endpoint.allow_calls(gate.may)
    if credential is not None:
        endpoint.introduce(PRESENT, credential)
    service = AdmissionService(gate, endpoint)
    endpoint.mount(service)
    return service
