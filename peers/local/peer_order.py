"""One start of a peer as plain data, so that it can be handed to a process of its own; :mod:`peers.commands.start` has
who makes one and what runs it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from pydantic import TypeAdapter

from peers.options.foundation import Foundation
from peers.options.model import PeerOptions
from peers.sharing.limit_options import Return

PEER_COMMAND = (sys.executable, "-m", "peers.commands.start")
"""Runs the order that is on its standard input."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """What one of several peers of a machine knows of the others: ``beside`` are the ends of their ids, ``host_bytes``
    is its own share of the machine's memory."""

    beside: tuple[str, ...] = ()
    host_bytes: int | None = None


NO_COMPANY = Company()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerOrder:
    """What a peer is started with: the options, the run that it founds (None: it joins one), the others of its machine,
    who starts it again, whether it shows words, and whether events."""

    options: PeerOptions
    foundation: Foundation | None = None
    company: Company = NO_COMPANY
    back: Return | None = None
    words: bool
    json_lines: bool


_ORDER = TypeAdapter(PeerOrder)


def order_for(order: PeerOrder) -> str:
    """Return an order as text; see :func:`ordered`. Who gave each option is left out."""
    plain: dict[str, Any] = _ORDER.dump_python(order, mode="json")
    del plain["options"]["origins"]
    return json.dumps(plain)


def ordered(text: str) -> PeerOrder:
    """Return what :func:`order_for` wrote."""
    return _ORDER.validate_python(json.loads(text), strict=False)
