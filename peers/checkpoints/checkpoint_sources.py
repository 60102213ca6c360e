"""Sources of checkpoints: running peers of a run, found through an invite or a peer of this machine, and other
directories. A source knows the run and its donors."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers.checkpoints.pull_progress import waiting
from peers.checkpoints.verify import named_files
from peers.console.words import count
from peers.frozen import store_of
from peers.home.run_directory import RunDirectory
from peers.invites.invite import Contacts
from peers.invites.showing import show
from peers.manifest_file import manifest_sent
from swarm.clock import SystemClock
from swarm.config import Manifest, load_manifest
from swarm.consensus.records import CloseRecord
from swarm.errors import DeadlineMissed, Incompatible, PeerError, RunEnded, Unreachable
from swarm.ids import PartName, PeerId
from swarm.membership.contact import CONTACT_TIMEOUT_S, NO_CONTACT, cannot_reach, find_run
from swarm.network.addresses import by_peer, parse_address
from swarm.network.endpoint import EndpointConfig, LibP2PEndpoint
from swarm.network.libp2p.identity import load_or_create
from swarm.security.credentials import Grant
from swarm.state.checkpoints.donors import DirectoryDonor, Donor, PeerDonor
from swarm.step.observe_messages import START, StartRequest

CALL_TIMEOUT_S = 30.0
MAX_DONORS = 64
"""Members that are asked what they have: more have nothing that these lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A run, the files that its manifest names, and who may have its checkpoints. ``believed`` of them, about which
    step is newest, are those whom the user named. With ``head``, the newest record that the contact knows, donors must
    prove what they say."""

    manifest: Manifest
    files: Mapping[str, bytes]
    donors: Sequence[Donor] = ()
    believed: Sequence[Donor] = ()
    head: CloseRecord | None = None
    grant: Grant | None = None
    """What the invite grants that the peers were found with, by whose role they give parts; None: all of them."""

    @property
    def kept(self) -> tuple[PartName, ...]:
        """Return the parts without which a checkpoint will do: of those that organisations keep to themselves what
        peers refuse to who comes with that invite, and without one all."""
        return tuple(part for part in self.manifest.split.owners if self.grant is None or self.withholds(part))

    def withholds(self, part: PartName) -> bool:
        """Return whether peers refuse this part to who comes with that invite."""
        if self.grant is None:
            return False
        owner = self.manifest.split.owners.get(part, self.grant.organisation)
        return not self.grant.gives(part) or self.grant.organisation != owner


def directory_source(directories: Sequence[RunDirectory]) -> Source:
    """Other directories of this machine, at least one. Raises Incompatible when they hold several runs, ConfigError and
    StateError for one that holds none."""
    first = directories[0]
    manifest = load_manifest(first.manifest)
    return beside(Source(manifest=manifest, files=named_files(first, manifest)), directories)


def beside(source: Source, directories: Sequence[RunDirectory]) -> Source:
    """Return a source that adds these directories to another source. Raises as :func:`directory_source`."""
    run = source.manifest.run_id
    for directory in directories:
        there = load_manifest(directory.manifest).run_id
        if there != run:
            raise Incompatible("--from", str(directory.root), f"a directory of run {run[:12]}, as the one before it",
                               f"It holds run {there[:12]}: pull that by itself.")  # fmt: skip
    added = tuple(DirectoryDonor(directory.checkpoints, store_of(directory)) for directory in directories)
    return replace(source, donors=(*source.donors, *added), believed=(*source.believed, *added))


@contextlib.asynccontextmanager
async def peer_source(contacts: Contacts, say: Callable[[str, str], None]) -> AsyncIterator[Source]:
    """The peers of a run, as a guest: with an identity made for this, announced nowhere, gone afterwards.

    ``say`` is told how long the contacts do not answer. Believed is the contact, about who takes part. Raises RunEnded
    (exit code 3 or 4) when no contact answers, is of that run, or has seen it start.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-pull-") as scratch:
        at = by_peer(parse_address(text, key="--from") for text in contacts.addresses)
        answer = f"an answer of {count(len(at), 'contact')}"
        async with waiting(say, SystemClock(), lambda: answer):
            endpoint = await _open(Path(scratch), contacts)
        try:
            async with waiting(say, SystemClock(), lambda: answer):
                contact, manifest, files = await find_run(endpoint, at, contacts.run, manifest_sent)
                show(endpoint, contacts)
                await endpoint.enter(manifest.run_id)
                head = await _head(endpoint, contact)
            members = [peer for peer in head.members.peers if peer != contact]
            asked = [contact, *members[: MAX_DONORS - 1]]
            donors = [PeerDonor(endpoint, peer, timeout_s=CALL_TIMEOUT_S) for peer in asked]
            yield Source(manifest=manifest, files=files, donors=donors, believed=donors[:1], head=head,
                         grant=None if contacts.granted is None else contacts.granted.grant.grant)  # fmt: skip
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
        answer, _ = await endpoint.call(contact, START, StartRequest(part=None), timeout_s=CONTACT_TIMEOUT_S)
    except (Unreachable, DeadlineMissed) as error:
        raise cannot_reach([str(contact)]) from error
    except PeerError as error:
        raise RunEnded(f"{contact} did not list the members of the run: {error.reason}", error.ending) from error
    for member in answer.record.roster:
        endpoint.learn(PeerId(member.peer), member.addresses)
    return answer.record
