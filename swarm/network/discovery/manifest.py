"""Fetch the run's manifest and the files that it names from any of its peers, verified by digest.

The one public service: it is reachable before a run is entered, for the run id is the manifest's digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from swarm.errors import BugError, Refused, Violation
from swarm.ids import PeerId, RunId
from swarm.network.protocols import PUBLIC_PREFIX, Answer, AnyMethod, Endpoint, Incoming, Rpc
from swarm.schema import MAX_FILES, MAX_FILES_BYTES, TOKENIZER_FILE, DigestField, Message

MAX_MANIFEST_BYTES = 1 << 20


class GetManifest(Message):
    """Ask for the manifest; ``run`` when only that one will do."""

    run: DigestField | None = None


class ManifestSizes(Message):
    """Sizes of the payload's pieces: the manifest's canonical JSON, then the files that it names, ordered by name."""

    manifest_bytes: Annotated[int, Field(ge=1, le=MAX_MANIFEST_BYTES)]
    file_bytes: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_FILES_BYTES)], ...], Field(min_length=1, max_length=MAX_FILES + 1)
    ]


GET = Rpc(f"{PUBLIC_PREFIX}get", GetManifest, ManifestSizes)


class ManifestService:
    """Serves one run's manifest to anyone who asks."""

    def __init__(self, manifest: bytes, files: Mapping[str, bytes], *, named: bool = False) -> None:
        """Make it ready.

        Args:
            manifest: Canonical JSON.
            files: Those that it names, the tokenizer among them.
            named: Only who names the run gets it, and others are not told which it is.

        Raises:
            BugError: They are too large to be fetched.
        """
        sizes = tuple(len(files[name]) for name in sorted(files))
        if len(manifest) > MAX_MANIFEST_BYTES or sum(sizes) > MAX_FILES_BYTES:
            raise BugError(f"a manifest of {len(manifest)} or files of {sum(sizes)} bytes cannot be served")
        self._named = named
        self._run = hashlib.sha256(manifest).hexdigest()
        self._sizes = ManifestSizes(manifest_bytes=len(manifest), file_bytes=sizes)
        self._payload = b"".join((manifest, *(files[name] for name in sorted(files))))

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
) -> tuple[bytes, dict[str, bytes]]:
    """(manifest, the files that it names) as ``peer`` has them; the manifest's sha256 is the run id. What the files are
    called is as unchecked as the rest of the manifest.

    Raises Refused when it is a peer of another run, Violation when the bytes are not what the digests say, Unreachable,
    DeadlineMissed. Without ``expected_run_id`` the peer is believed about *which* run it is, and about nothing else.
    """
    limit = MAX_MANIFEST_BYTES + MAX_FILES_BYTES
    sizes, payload = await endpoint.call(
        peer, GET, GetManifest(run=expected_run_id), timeout_s=timeout_s, max_reply_bytes=limit
    )
    if len(payload) != sizes.manifest_bytes + sum(sizes.file_bytes):
        raise Violation("a manifest of another size than announced", peer=peer)
    manifest, at = bytes(payload[: sizes.manifest_bytes]), sizes.manifest_bytes
    if expected_run_id is not None and hashlib.sha256(manifest).hexdigest() != expected_run_id:
        raise Violation("a manifest whose digest is not the run id", peer=peer)
    named, files = _named_files(manifest, peer), dict[str, bytes]()
    if len(named) != len(sizes.file_bytes):
        raise Violation("a manifest with other files than it names", peer=peer)
    for name, size in zip(sorted(named), sizes.file_bytes, strict=True):
        files[name] = bytes(payload[at : at + size])
        if hashlib.sha256(files[name]).hexdigest() != named[name]:
            raise Violation(f"a {name[:80]} whose digest is not the manifest's", peer=peer)
        at += size
    return manifest, files


class _Tokenizer(BaseModel):
    digest: str


class _Naming(BaseModel):
    """As much of a manifest as it takes to check what came with it."""

    tokenizer: _Tokenizer
    files: Annotated[dict[str, str], Field(max_length=MAX_FILES)] = {}


def _named_files(manifest: bytes, peer: PeerId) -> dict[str, str]:
    try:
        said = _Naming.model_validate_json(manifest)
    except ValidationError as error:
        raise Violation("a manifest that names no tokenizer", peer=peer) from error
    return said.files | {TOKENIZER_FILE: said.tokenizer.digest}
