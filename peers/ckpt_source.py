"""Where checkpoints can be had: running peers of a run, found through an invite or a peer of this machine, or another
directory. A source knows the run and its donors."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.ckpt_verify import check_tokenizer_file
from peers.contact import CONTACT_TIMEOUT_S, NO_CONTACT, cannot_reach, find_run
from peers.invite import Contacts
from peers.run_directory import RunDirectory
from swarm.clock import SystemClock
from swarm.config import Manifest, load_manifest
from swarm.errors import DeadlineMissed, PeerError, RunEnded, Unreachable
from swarm.ids import PeerId
from swarm.network.addresses import parse_address
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.identity import load_or_create
from swarm.optimization.observation import START, Decided, StartRequest
from swarm.optimization.records import CloseRecord
from swarm.state.checkpoint_donors import DirectoryDonor, Donor, PeerDonor

CALL_TIMEOUT_S = 30.0
MAX_DONORS = 64
"""Members that are asked what they have: more have nothing that these lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A run, its tokenizer's bytes, and who may have its checkpoints. With ``head``, the newest record that the contact
    knows, the donors are strangers but for the contact, the first of them: they must prove what they say."""

    manifest: Manifest
    tokenizer: bytes
    donors: Sequence[Donor]
    head: CloseRecord | None = None


def directory_source(directory: RunDirectory) -> Source:
    """Another directory of this machine. Raises ConfigError and StateError for one that holds no whole run."""
    manifest = load_manifest(directory.manifest)
    tokenizer = check_tokenizer_file(directory, manifest)
    donor = DirectoryDonor(directory.checkpoints)
    return Source(manifest=manifest, tokenizer=tokenizer, donors=(donor,))


@contextlib.asynccontextmanager
async def peer_source(contacts: Contacts) -> AsyncIterator[Source]:
    """The peers of a run, as a guest: with an identity made for this, announced nowhere, gone afterwards.

    Believed is the contact, about who takes part. Raises RunEnded (exit code 3 or 4) when no contact answers, is of
    that run, or has seen it start.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-pull-") as scratch:
        endpoint = await _open(Path(scratch), contacts)
        try:
            at = [parse_address(text, key="--from") for text in contacts.addresses]
            contact, manifest, tokenizer = await find_run(endpoint, at, contacts.run)
            await endpoint.enter(manifest.run_id)
            head = await _head(endpoint, contact)
            members = [peer for peer in head.members.peers if peer != contact]
            asked = [contact, *members[: MAX_DONORS - 1]]
            donors = [PeerDonor(endpoint, peer, timeout_s=CALL_TIMEOUT_S) for peer in asked]
            yield Source(manifest=manifest, tokenizer=tokenizer, donors=donors, head=head)
        finally:
            await asyncio.shield(endpoint.close())


async def _open(scratch: Path, contacts: Contacts) -> LibP2PEndpoint:
    config = EndpointConfig(
        run_dir=scratch,
        bootstrap=tuple(parse_address(text, key="--from") for text in contacts.addresses),
        relay="off",
    )
    try:
        return await LibP2PEndpoint.open(config, load_or_create(scratch / "identity.key"), SystemClock())
    except Unreachable as error:
        if NO_CONTACT in error.reason:
            raise cannot_reach(contacts.addresses) from error
        raise


async def _head(endpoint: LibP2PEndpoint, contact: PeerId) -> CloseRecord:
    """The newest record, as the contact knows it; its members' addresses are known from then on."""
    try:
        answer, _ = await endpoint.call(contact, START, StartRequest(part=None), Decided, timeout_s=CONTACT_TIMEOUT_S)
    except (Unreachable, DeadlineMissed) as error:
        raise cannot_reach([str(contact)]) from error
    except PeerError as error:
        raise RunEnded(f"{contact} cannot say who takes part: {error.reason}", error.exit_code) from error
    for member in answer.record.roster:
        endpoint.learn(PeerId(member.peer), member.addresses)
    return answer.record
