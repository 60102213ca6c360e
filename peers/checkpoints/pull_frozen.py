"""What ``swarm ckpt pull`` fetches of a run that trains adapters beside its checkpoint: the weights that are frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from peers.frozen import store_of
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest
from swarm.disk import free_bytes, size_text
from swarm.errors import StateError
from swarm.ids import PartName
from swarm.membership.parts import FrozenPart
from swarm.models.registry import family_of, lora_of
from swarm.state.checkpoints.fetch import fetch_part
from swarm.state.download import ChunkDonor


async def pull_frozen(
    manifest: Manifest,
    directory: RunDirectory,
    donors: Sequence[ChunkDonor],
    say: Callable[[str, str], None],
    progress: Callable[[PartName, int, int], None],
) -> int:
    """Have the frozen weights of every part; returns how many bytes were fetched, 0 for a run that has none.

    One part after the other, each from all donors. What was begun earlier is continued. Raises StateError when nobody
    has one of them, or the disk has no room; what came stays.
    """
    if lora_of(manifest.model) is None:
        return 0
    store, fetched = store_of(directory), 0
    for spec in family_of(manifest.model).parts(manifest.split):
        part = await asyncio.to_thread(FrozenPart, manifest, spec.name, store)
        if await asyncio.to_thread(store.holds, part.wanted):
            continue
        begun = part.begun()
        lacking, free = begun.lacking_bytes, free_bytes(store.root)
        if lacking > free:
            raise StateError(f"{store.root}: {size_text(lacking)} to fetch, {size_text(free)} free. Free some space.")
        say("frozen", f"{spec.name}: {size_text(lacking)} of weights to fetch into {store.root}")
        await fetch_part(begun, donors, progress=progress)
        fetched += part.layout.bytes
    return fetched
