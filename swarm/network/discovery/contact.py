"""Find a run through the first of the invite's contacts that answers, and fetch its manifest and tokenizer.

Any peer of the run serves both, verified by digest: :func:`find_run` is the asking side, :class:`ManifestService` the
serving one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

from multiaddr import Multiaddr
from pydantic import Field

from swarm.clock import Clock
from swarm.errors import (
    Advice,
    BugError,
    DeadlineMissed,
    Ending,
    Incompatible,
    PeerError,
    Refused,
    RunEnded,
    SpeaksOtherWire,
    SwarmError,
    Unreachable,
    Violation,
)
from swarm.ids import PeerId, RunId
from swarm.network.addresses import split_peer
from swarm.network.protocols import PUBLIC_PREFIX, Answer, AnyMethod, Endpoint, Incoming, Rpc
from swarm.schema import DigestField, Message
from swarm.step.observe_messages import STANDING, RunStanding, StandingRequest

ManifestT = TypeVar("ManifestT")

CONTACT_TIMEOUT_S = 10.0
CONTACT_TRIES, CONTACT_PAUSE_S = 3, 1.0
"""A machine that has just come up may have no network yet, and a busy one misses its own deadlines."""
NO_CONTACT = "failed to connect to bootstrap peers"
"""What the libp2p daemon says of contacts that do not answer while it starts."""
STANDING_TRIES, STANDING_PAUSE_S = 50, 0.2
"""A peer serves the manifest a moment before it takes part in the run."""


async def find_run(
    endpoint: Endpoint, contacts: Sequence[Multiaddr], expected: RunId | None, parse: Callable[[bytes], ManifestT]
) -> tuple[PeerId, ManifestT, bytes]:
    """(contact, manifest, tokenizer) from the first contact that has the run; each is asked once, whatever the number
    of its addresses, for at most CONTACT_TIMEOUT_S.

    When none has it, the error is that of one that answered, if any did: RunEnded, incompatible, when it is not what
    the invite says, Incompatible, which ``parse`` raises for a
    manifest that this version cannot use. Else RunEnded, unreachable, naming every address.
    """
    told: SwarmError | None = None
    for peer, addresses in by_peer(contacts).items():
        try:
            document, tokenizer = await fetch_manifest(endpoint, peer, expected, timeout_s=CONTACT_TIMEOUT_S)
            return peer, parse(document), tokenizer
        except SpeaksOtherWire as error:
            told = told or _another_wire(addresses, error)
        except (Refused, Violation) as error:
            told = told or _another_run(addresses, expected, error)
        except Incompatible as error:
            told = told or error
        except PeerError:
            continue
    raise told or cannot_reach([str(address) for address in contacts])


def by_peer(contacts: Iterable[Multiaddr]) -> dict[PeerId, list[str]]:
    """The addresses of each peer, in the order in which they were given."""
    found: dict[PeerId, list[str]] = {}
    for address in contacts:
        found.setdefault(split_peer(address)[1], []).append(str(address))
    return found


def cannot_reach(addresses: Sequence[str]) -> RunEnded:
    """The error for contacts of which none answers."""
    return RunEnded(
        f"cannot reach {', '.join(addresses)}",
        Ending.UNREACHABLE,
        check="is that peer running, or is the run over? Can this machine reach it?",
        remedy=Advice.NEW_INVITE,
    )


def _another_wire(addresses: Sequence[str], error: PeerError) -> RunEnded:
    return RunEnded(
        f"{', '.join(addresses)} cannot be understood: {error.reason}",
        Ending.INCOMPATIBLE,
        check=Advice.WHICH_VERSION,
        remedy=Advice.SAME_VERSION,
    )


def _another_run(addresses: Sequence[str], expected: RunId | None, error: PeerError) -> RunEnded:
    wanted = f"the invite is to run {expected[:12]}" if expected is not None else "no run was asked for"
    return RunEnded(
        f"{', '.join(addresses)} does not serve the run: {error.reason}",
        Ending.INCOMPATIBLE,
        check=f"{wanted}; is it the right invite?",
        remedy=Advice.NEW_INVITE,
    )


async def ask_standing(endpoint: Endpoint, clock: Clock, contact: PeerId) -> RunStanding:
    """Where the run stands as the contact sees it; waits some seconds for a contact that is only starting.

    Asks once more when the stream breaks: a contact with too many ends those of peers that it does not know. Raises
    Unreachable or DeadlineMissed when it is gone, its last error when it never answers.
    """
    left, broke = STANDING_TRIES, False
    while True:
        left -= 1
        try:
            standing, _ = await endpoint.call(contact, STANDING, StandingRequest(), timeout_s=CONTACT_TIMEOUT_S)
            return standing
        except Unreachable:
            if broke:
                raise
            broke = True
        except (DeadlineMissed, Violation):
            raise
        except PeerError:
            if left <= 0:
                raise
            await clock.sleep(STANDING_PAUSE_S)


# --- the manifest service --------------------------------------------------------------------------------------------
# The one public service: it is reachable before a run is entered, for the run id is the manifest's digest.


MAX_MANIFEST_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 32 << 20


class GetManifest(Message):
    """Ask for the manifest; ``run`` when only that one will do."""

    run: DigestField | None = None


class ManifestSizes(Message):
    """How the payload is cut: the manifest's canonical JSON, then ``tokenizer.json``."""

    manifest_bytes: Annotated[int, Field(ge=1, le=MAX_MANIFEST_BYTES)]
    tokenizer_bytes: Annotated[int, Field(ge=0, le=MAX_TOKENIZER_BYTES)]


GET = Rpc(f"{PUBLIC_PREFIX}get", GetManifest, ManifestSizes)


class ManifestService:
    """Serves one run's manifest to whoever asks."""

    def __init__(self, manifest: bytes, tokenizer: bytes) -> None:
        """``manifest`` is canonical JSON. Raises BugError when either is too large to be fetched."""
        if len(manifest) > MAX_MANIFEST_BYTES or len(tokenizer) > MAX_TOKENIZER_BYTES:
            raise BugError(f"a manifest of {len(manifest)} or a tokenizer of {len(tokenizer)} bytes cannot be served")
        self._run = hashlib.sha256(manifest).hexdigest()
        self._sizes = ManifestSizes(manifest_bytes=len(manifest), tokenizer_bytes=len(tokenizer))
        self._payload = manifest + tokenizer

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [GET.handled_with_payload(self._get)]

    async def _get(self, caller: PeerId, body: GetManifest, incoming: Incoming) -> Answer[ManifestSizes]:
        if body.run not in (None, self._run):
            raise Refused(f"this is a peer of run {self._run[:16]}…")
        return Answer(self._sizes, self._payload)


async def fetch_manifest(
    endpoint: Endpoint, peer: PeerId, expected_run_id: RunId | None = None, *, timeout_s: float = 30.0
) -> tuple[bytes, bytes]:
    """(manifest, tokenizer) as ``peer`` has them; the manifest's sha256 is the run id.

    Raises Refused when it is a peer of another run, Violation when the bytes are not what the digests say, Unreachable,
    DeadlineMissed. Without ``expected_run_id`` the peer is believed about *which* run it is, and about nothing else.
    """
    limit = MAX_MANIFEST_BYTES + MAX_TOKENIZER_BYTES
    sizes, payload = await endpoint.call(
        peer, GET, GetManifest(run=expected_run_id), timeout_s=timeout_s, max_reply_bytes=limit
    )
    if len(payload) != sizes.manifest_bytes + sizes.tokenizer_bytes:
        raise Violation("a manifest of another size than announced", peer=peer)
    manifest, tokenizer = bytes(payload[: sizes.manifest_bytes]), bytes(payload[sizes.manifest_bytes :])
    if expected_run_id is not None and hashlib.sha256(manifest).hexdigest() != expected_run_id:
        raise Violation("a manifest whose digest is not the run id", peer=peer)
    if hashlib.sha256(tokenizer).hexdigest() != _tokenizer_digest(manifest, peer):
        raise Violation("a tokenizer whose digest is not the manifest's", peer=peer)
    return manifest, tokenizer


def _tokenizer_digest(manifest: bytes, peer: PeerId) -> str:
    try:
        return str(json.loads(manifest)["tokenizer"]["digest"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Violation("a manifest that names no tokenizer", peer=peer) from error
