"""Asking a service without a network."""

from __future__ import annotations

from typing import Any

from swarm.ids import PeerId
from swarm.network.protocols import Incoming, Service
from swarm.schema import Message

NOTHING_BESIDE = Incoming(memoryview(b""), 1e9)
"""No payload, and all the time there is."""


async def asked(service: Service, body: Message, caller: PeerId) -> Any:
    """What the service answers to this body; its kind says which of the methods is meant."""
    method = next(each for each in service.methods() if each.rpc.request is type(body))
    return (await method.handle(caller, body, NOTHING_BESIDE)).body
