"""Find a run through the first of the invite's contacts that answers, and ask it where the run stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from swarm.clock import Clock
from swarm.errors import (
    Advice,
    DeadlineMissed,
    Ending,
    Incompatible,
    PeerError,
    Refused,
    RunEnded,
    SpeaksOtherWire,
    SwarmError,
    Unadmitted,
    Unreachable,
    Violation,
)
from swarm.ids import PeerId, RunId
from swarm.network.addresses import some_of
from swarm.network.discovery.manifest import fetch_manifest
from swarm.network.protocols import Endpoint
from swarm.step.observe_messages import STANDING, RunStanding, StandingRequest

ManifestT = TypeVar("ManifestT")

CONTACT_TIMEOUT_S = 10.0
CONTACT_TRIES, CONTACT_PAUSE_S = 3, 1.0
"""A machine that has just come up may have no network yet, and a busy one misses its own deadlines."""
NO_CONTACT = "failed to connect to bootstrap peers"
"""What the libp2p daemon says of contacts that do not answer while it starts."""
STANDING_TRIES, STANDING_PAUSE_S = 50, 0.2
"""A peer serves the manifest a moment before it takes part in the run."""
AWAY_S = 6 * 3600.0
"""How long a peer that is on its way into a run waits for others that are away: a relay, a link or a machine comes back
within hours, and until then nobody is worse off."""
GOES_ON = "this peer goes on by itself once one does; next: start again, where it was, what has stopped there"
LONGEST_PAUSE_S = 30.0
"""They are asked again after longer and longer pauses, of so much at most."""
UNADMITTED_TRIES, UNADMITTED_PAUSE_S = 3, 1.0
"""How often a contact must say that our invite does not count: it may not have heard yet of what admits us."""


async def find_run(
    endpoint: Endpoint,
    contacts: Mapping[PeerId, Sequence[str]],
    expected: RunId | None,
    parse: Callable[[bytes], ManifestT],
) -> tuple[PeerId, ManifestT, dict[str, bytes]]:
    """Return (contact, manifest, the files that it names) from the first contact that has the run.

    ``contacts`` are peers and the addresses under which the endpoint knows them. Each is asked once, in their order,
    for at most CONTACT_TIMEOUT_S.

    When none has it, the error is that of one that answered, if any did: RunEnded, incompatible, when it is not what
    the invite says, Incompatible, which ``parse`` raises for a manifest that this version cannot use. Else RunEnded,
    unreachable, naming every address.
    """
    told: SwarmError | None = None
    for peer, addresses in contacts.items():
        try:
            document, files = await fetch_manifest(endpoint, peer, expected, timeout_s=CONTACT_TIMEOUT_S)
            return peer, parse(document), files
        except SpeaksOtherWire as error:
            told = told or _another_wire(addresses, error)
        except (Refused, Violation) as error:
            told = told or _another_run(addresses, expected, error)
        except Incompatible as error:
            told = told or error
        except PeerError:
            continue
    raise told or cannot_reach([address for addresses in contacts.values() for address in addresses])


def cannot_reach(addresses: Sequence[str]) -> RunEnded:
    """The error for contacts of which none answers."""
    return RunEnded(
        f"cannot reach {some_of(addresses)}",
        Ending.UNREACHABLE,
        check="is that peer running, or is the run over? Can this machine reach it?",
        remedy=Advice.NEW_INVITE,
    )


def _another_wire(addresses: Sequence[str], error: PeerError) -> RunEnded:
    return RunEnded(
        f"{some_of(addresses)} cannot be understood: {error.reason}",
        Ending.INCOMPATIBLE,
        check=Advice.WHICH_VERSION,
        remedy=Advice.SAME_VERSION,
    )


def _another_run(addresses: Sequence[str], expected: RunId | None, error: PeerError) -> RunEnded:
    wanted = f"the invite is to run {expected[:12]}" if expected is not None else "no run was asked for"
    return RunEnded(
        f"{some_of(addresses)} does not serve the run: {error.reason}",
        Ending.INCOMPATIBLE,
        check=f"{wanted}; is it the right invite?",
        remedy=Advice.NEW_INVITE,
    )


def not_admitted(error: Unadmitted) -> RunEnded:
    """The error of a peer whose invite does not count."""
    return RunEnded(
        f"the run does not let this peer in: {error.reason}",
        Ending.MISUSED,
        check="is it the newest invite, and for this peer? Each is for one, and for a time.",
        remedy=Advice.NEW_GRANT,
    )


async def ask_standing(endpoint: Endpoint, clock: Clock, contact: PeerId) -> RunStanding:
    """Return where the run stands as the contact sees it; waits some seconds for a contact that is only starting.

    Asks once more when the stream breaks: a contact with too many ends those of peers that it does not know. Raises
    Unreachable or DeadlineMissed when it is gone, its last error when it never answers; RunEnded when it does not let
    us in.
    """
    left, broke, refused = STANDING_TRIES, False, 0
    while True:
        left -= 1
        try:
            standing, _ = await endpoint.call(contact, STANDING, StandingRequest(), timeout_s=CONTACT_TIMEOUT_S)
            return standing
        except Unreachable:
            if broke:
                raise
            broke = True
        except Unadmitted as error:
            refused += 1
            if refused == UNADMITTED_TRIES:  # it may be a record or two behind
                raise not_admitted(error) from error
            await clock.sleep(UNADMITTED_PAUSE_S)
        except (DeadlineMissed, Violation):
            raise
        except PeerError:
            if left <= 0:
                raise
            await clock.sleep(STANDING_PAUSE_S)
