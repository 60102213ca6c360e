"""The peer through which this one finds the run: the first of the invite's that answers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from multiaddr import Multiaddr

from swarm.clock import Clock
from swarm.config import Manifest, parse_manifest
from swarm.errors import DeadlineMissed, PeerError, Unreachable, Violation
from swarm.ids import PeerId, RunId
from swarm.network.addresses import split_peer
from swarm.network.manifest import fetch_manifest
from swarm.network.protocols import Endpoint
from swarm.optimization.observing import STANDING, RunStanding, StandingRequest

CONTACT_TIMEOUT_S = 10.0
STANDING_TRIES, STANDING_PAUSE_S = 50, 0.2
"""A peer serves the manifest a moment before it takes part in the run."""


async def find_run(
    endpoint: Endpoint, contacts: Sequence[Multiaddr], expected: RunId | None
) -> tuple[PeerId, Manifest, bytes]:
    """(contact, manifest, tokenizer) from the first contact that answers.

    Raises Unreachable, naming every address, when none does, and Violation or Refused when one answers that is not
    what the invite says; ConfigError for a manifest that this version cannot use.
    """
    silent: list[str] = []
    for address in contacts:
        peer = split_peer(address)[1]
        try:
            document, tokenizer = await fetch_manifest(endpoint, peer, expected, timeout_s=CONTACT_TIMEOUT_S)
        except (Unreachable, DeadlineMissed):
            silent.append(str(address))
            continue
        return peer, parse_manifest(json.loads(document), "the manifest that the contact sent"), tokenizer
    raise Unreachable(f"cannot reach {', '.join(silent)}")


async def ask_standing(endpoint: Endpoint, clock: Clock, contact: PeerId) -> RunStanding:
    """Where the run stands as the contact sees it; waits some seconds for a contact that is only starting.

    Raises Unreachable or DeadlineMissed when it is gone, its last error when it never answers.
    """
    for attempt in range(STANDING_TRIES):
        try:
            standing, _ = await endpoint.call(
                contact, STANDING, StandingRequest(), RunStanding, timeout_s=CONTACT_TIMEOUT_S
            )
            return standing
        except (Unreachable, DeadlineMissed, Violation):
            raise
        except PeerError:
            if attempt + 1 == STANDING_TRIES:
                raise
            await clock.sleep(STANDING_PAUSE_S)
    raise AssertionError("unreachable")
