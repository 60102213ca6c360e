"""Fetch the run's manifest and tokenizer from any of its peers, verified by digest.

The one public service: it is reachable before a run is entered, for the run id is the manifest's digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from swarm.errors import BugError, Refused, Violation
from swarm.ids import PeerId, RunId
from swarm.network.protocols import PUBLIC_PREFIX, Answer, AnyMethod, Endpoint, Incoming, Rpc
from swarm.parsing import parse_json
from swarm.schema import DigestField, Message

MAX_MANIFEST_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 32 << 20


class GetManifest(Message):
    """Ask for the manifest; ``run`` when only that one will do."""

    run: DigestField | None = None


class ManifestSizes(Message):
    """Sizes of the payload's two pieces: the manifest's canonical JSON, then ``tokenizer.json``."""

    manifest_bytes: Annotated[int, Field(ge=1, le=MAX_MANIFEST_BYTES)]
    tokenizer_bytes: Annotated[int, Field(ge=0, le=MAX_TOKENIZER_BYTES)]


GET = Rpc(f"{PUBLIC_PREFIX}get", GetManifest, ManifestSizes)


class ManifestService:
    """Serves one run's manifest to whoever asks."""

    def __init__(self, manifest: bytes, tokenizer: bytes, *, named: bool = False) -> None:
        """``manifest`` is canonical JSON; ``named``: only who names the run gets it, and others are not told which it
        is. Raises BugError when either is too large to be fetched."""
        if len(manifest) > MAX_MANIFEST_BYTES or len(tokenizer) > MAX_TOKENIZER_BYTES:
            raise BugError(f"a manifest of {len(manifest)} or a tokenizer of {len(tokenizer)} bytes cannot be served")
        self._named = named
        self._run = hashlib.sha256(manifest).hexdigest()
        self._sizes = ManifestSizes(manifest_bytes=len(manifest), tokenizer_bytes=len(tokenizer))
        self._payload = manifest + tokenizer

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [GET.handled_with_payload(self._get)]

    async def _get(self, caller: PeerId, body: GetManifest, incoming: Incoming) -> Answer[ManifestSizes]:
        if self._named and body.run != self._run:
            raise Refused("this peer's run admits by invite, and this call does not name it")
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
        return str(parse_json(manifest)["tokenizer"]["digest"])
    except (ValueError, LookupError, TypeError) as error:
        raise Violation("a manifest that names no tokenizer", peer=peer) from error
