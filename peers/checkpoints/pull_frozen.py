"""What ``swarm ckpt pull`` fetches of a run that trains adapters beside its checkpoint: the weights that are frozen."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable, Sequence

from peers.console.words import command_name, listed
from peers.frozen import store_of
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest, load_manifest
from swarm.disk import free_bytes, size_text
from swarm.errors import PeerError, StateError
from swarm.ids import PartName
from swarm.membership.parts import FrozenPart
from swarm.models.registry import family_of, lora_of
from swarm.state.checkpoints.fetch import fetch_part
from swarm.state.download import ChunkDonor, Wanted

logger = logging.getLogger(__name__)


async def pull_frozen(
    manifest: Manifest,
    directory: RunDirectory,
    donors: Sequence[ChunkDonor],
    say: Callable[[str, str], None],
    progress: Callable[[PartName, int, int], None],
) -> tuple[int, tuple[PartName, ...]]:
    """Have the frozen weights of every part that anybody has them of.

    One part after the other, each from all donors that have it. What was begun earlier is continued. Those that follow
    from the run's seed are made.

    Returns:
        How many bytes were fetched, and the parts whose weights nobody has. A run without any: 0 and none.

    Raises:
        StateError: The disk has no room, or those who had the weights failed; what came stays.
    """
    if lora_of(manifest.model) is None:
        return 0, ()
    store, fetched, lacking = store_of(directory), 0, list[PartName]()
    for spec in family_of(manifest.model).parts(manifest.split):
        part = await asyncio.to_thread(FrozenPart, manifest, spec.name, store)
        if await asyncio.to_thread(store.holds, part.wanted) or await _drawn(part, manifest):
            continue
        holders = await _holders(donors, part.wanted)
        if not holders:
            lacking.append(spec.name)
            continue
        begun = part.begun()
        size, free = begun.lacking_bytes, free_bytes(store.root)
        if size > free:
            raise StateError(
                f"{store.root}: the fetch takes {size_text(size)}, and {size_text(free)} is free. Make room."
            )
        say("frozen", f"{spec.name}: {size_text(size)} of weights to fetch into {store.root}")
        await fetch_part(begun, holders, progress=progress)
        fetched += part.layout.bytes
    return fetched, tuple(lacking)


async def _drawn(part: FrozenPart, manifest: Manifest) -> bool:
    """Make the weights of a model that began with random ones: they follow from its seed."""
    return bool(getattr(manifest.model, "scratch", True)) and await asyncio.to_thread(part.make, None)


async def _holders(donors: Sequence[ChunkDonor], wanted: Wanted) -> list[ChunkDonor]:
    """Those that say how the chunks of these weights hash."""

    async def asked(donor: ChunkDonor) -> ChunkDonor | None:
        try:
            await donor.hashes(wanted)
        except PeerError as error:
            logger.info("frozen weights of %s from %s: %s", wanted.part, donor, error)
            return None
        return donor

    return [donor for donor in await asyncio.gather(*map(asked, donors)) if donor is not None]


def where_frozen(directory: RunDirectory, lacking: Sequence[PartName]) -> tuple[str, str]:
    """Return which frozen weights are missing, and how they are made or found, for a person."""
    manifest = load_manifest(directory.manifest)
    source = getattr(manifest.model, "source", "")
    said = f" (the run calls it {source!r})" if source else ""
    cause = f"the adapters are here, but nobody has the frozen weights of {listed(lacking)}, which --merge needs"
    run, swarm = shlex.quote(str(directory.root)), command_name()
    make = f"{swarm} ckpt frozen --run {run} --add DIR, DIR being the model's directory{said}"
    find = f"{swarm} ckpt pull {run} --from HOME, HOME being that of a peer that held the parts"
    return cause, f"make them of the model's files: {make}; or fetch them: {find}"
