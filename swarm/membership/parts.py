"""Make a part of the run's model on this peer; and where a run trains adapters, have the weights beside them, which are
frozen: from this machine's disk, from the model's files, or from peers that have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.config import Manifest
from swarm.device import compute_reproducibly
from swarm.disk import free_bytes, reserved_bytes, size_text
from swarm.errors import ConfigError, StateError
from swarm.events import FrozenFetching, FrozenReady, SyncProgress
from swarm.ids import PartName, PeerId
from swarm.membership.roles import PeerContext
from swarm.membership.rules import local_rules_of, parting_of, spec_of, update_of
from swarm.models.lora import BaseLayout, LoraFamily, Stored
from swarm.models.passes import rehearse
from swarm.models.registry import family_of, lora_of
from swarm.models.spec import PartSpec
from swarm.optim.accumulate import AccumulatorDType
from swarm.optim.local_part import LocalPart
from swarm.optim.part import TrainedPart
from swarm.optim.swapped_part import Home, SwappedPart
from swarm.state.checkpoints.fetch import BegunFile, fetch_part
from swarm.state.download import Wanted
from swarm.state.frozen import FrozenStore, frozen_donor, wanted_frozen
from swarm.state.snapshot import Snapshot
from swarm.waiting import TokenBucket

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.3


async def build_empty(around: PeerContext, name: PartName, donors: Sequence[PeerId] = ()) -> TrainedPart:
    """The part, without what is trained of it; ``donors`` may have what is frozen, where that is not here.

    Raises StateError for a part that the model does not have, ConfigError for a device that cannot compute as the run
    does, and as :func:`ensure_frozen`.
    """
    manifest, devices = around.manifest, around.device.torch_devices
    spec = spec_of(manifest, name)
    frozen = await ensure_frozen(around, name, donors)
    stored = None if frozen is None else await asyncio.to_thread(frozen.load)

    def build() -> TrainedPart:
        try:
            part = _plain(manifest, spec, devices, around.home)
        except ConfigError as error:
            if error.key != "split.tensor" or manifest.split.tensor > 1:
                raise
            allowed = f"as many devices as {error.allowed}"
            raise ConfigError("device", _joined(devices), allowed, "Name fewer.", why=error.why) from None
        if len(devices) > 1 and part.strips is None:
            why = f"nothing of {name} can be cut across devices"
            raise ConfigError("device", _joined(devices), "one device", "Name one.", why=why)
        part.parting = parting_of(manifest, name)
        if stored is not None:
            part.install_base(stored)
        if manifest.optimizer.trainer_test:
            part.see_trainers(_secret(around, name))
        return part

    if manifest.run.reproducible:
        compute_reproducibly(devices[0])
    await around.device.run(rehearse)
    return await around.device.run(build)


def _plain(manifest: Manifest, spec: PartSpec, devices: Sequence[torch.device], home: Home | None) -> TrainedPart:
    """The part, before anything special of the run."""
    if manifest.averaging.mode == "local":
        return LocalPart(spec, manifest.model, local_rules_of(manifest), devices=devices)
    accumulator: AccumulatorDType = "float64" if manifest.run.reproducible else "float32"
    if home is not None:
        update = update_of(manifest)
        return SwappedPart(spec, manifest.model, update, devices=devices, accumulator=accumulator, home=home)
    return TrainedPart(
        spec,
        manifest.model,
        update_of(manifest),
        devices=devices,
        accumulator=accumulator,
        window=2 if manifest.speed.overlaps else 1,
    )


def check_takes_turns(manifest: Manifest) -> None:
    """Check whether the stages of a run can take turns on one device. Pure. Raises ConfigError."""
    why = ""
    if manifest.averaging.mode == "local":
        why = "in mode local replicas train apart, each with a state of its own for many steps"
    elif manifest.speed.overlaps:
        why = "in mode overlap stages hold the parameters of two steps"
    elif lora_of(manifest.model) is not None:
        why = "the frozen weights of adapters stay on the device"
    elif manifest.optimizer.trainer_test or manifest.split.tensor > 1:
        why = "it compares trainers, or cuts layers across devices"
    if why:
        remedy = "Hold all parts in memory (device cpu), or some of them; or found a run with mode sync."
        raise ConfigError("role", "all", "a run whose stages can take turns on a device", remedy, why=why)


def check_strips(manifest: Manifest, devices: Sequence[torch.device]) -> None:
    """Check whether these can compute a part of the run together. Pure. Raises ConfigError."""
    named, number = _joined(devices), manifest.split.tensor
    if manifest.run.reproducible and devices[0].type == "mps":
        why = "this run is reproducible: it sums gradients in float64, which Apple's GPU does not have"
        raise ConfigError("device", named, "cpu or cuda", "Use cpu.", why=why)
    if manifest.run.reproducible and number == 1 < len(devices):
        why = "this run is reproducible, and strips of layers add up to other bits than whole ones"
        remedy = f"Name one; or found the run with split.tensor = {len(devices)}."
        raise ConfigError("device", named, "one device with split.tensor = 1", remedy, why=why)
    if number > 1 and number % len(devices):
        fits = ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)
        why = f"every peer of this run computes {number} strips of each layer (split.tensor)"
        raise ConfigError("device", named, f"so many devices: {fits}", "Name as many.", why=why)


def _joined(devices: Sequence[torch.device]) -> str:
    return "+".join(map(str, devices))


def _secret(around: PeerContext, name: PartName) -> int:
    """Return a number that nobody else can know, and that is another one for each run and part."""
    return int.from_bytes(around.identity.sign(f"sketch|{around.manifest.run_id}|{name}".encode())[:7], "big")


def blank(manifest: Manifest, name: PartName, step: int) -> Snapshot:
    """The state of a part of which nothing is trained, after a step."""
    family = family_of(manifest.model)
    layout = family.layout(family.build(spec_of(manifest, name))).kept_by(update_of(manifest).vectors)
    return Snapshot.blank(name, step, layout)


# --- frozen weights --------------------------------------------------------------------------------------------------


class FrozenPart:
    """The frozen weights of one part of a run. Made without reading any."""

    def __init__(self, manifest: Manifest, name: PartName, store: FrozenStore) -> None:
        """Raises StateError for a part that the model does not have, or of which the run says no digest. Builds the
        part without weights: some milliseconds, a second for the first of a large model."""
        family = family_of(manifest.model)
        assert isinstance(family, LoraFamily)  # noqa: S101 - only such runs have any
        self.spec, self._family, self._store, self._manifest = spec_of(manifest, name), family, store, manifest
        if name not in family.lora.digests:
            raise StateError(f"the run names no frozen weights for {name}: its founder has to found it anew")
        self.layout: BaseLayout = family.base(self.spec)
        self.wanted: Wanted = wanted_frozen(name, self.layout, family.lora.digests[name])

    @property
    def here(self) -> bool:
        """Return whether they are on the disk."""
        return self._store.holds(self.wanted)

    def load(self) -> Mapping[str, Stored]:
        """Return them by name, verified. Raises StateError. Blocking: a pass over the disk, and a hash."""
        return self.layout.views(self._store.load(self.wanted))

    def make(self, files: Path | None) -> bool:
        """Make them of the model's files, or of the run's seed, and keep them; whether they are the run's. Raises
        StateError. Blocking: minutes for a large part."""
        weights = self._family.base_weights(self._manifest.run.seed, self.spec, files)
        return self._store.keep(self.spec.name, self.layout, self.layout.pack(weights)) == self.wanted.digest

    def begun(self) -> BegunFile:
        """Return their file while it is fetched."""
        return BegunFile(self._store.place(self.wanted.digest), self.wanted, self._manifest.run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparing:
    """How to fetch what a peer keeps for others only: at a ``pace``, and leaving some of the disk free; ``refuses`` is
    told where that is too full."""

    pace: TokenBucket
    refuses: Callable[[str], None]


async def ensure_frozen(
    around: PeerContext, name: PartName, donors: Sequence[PeerId], sparing: Sparing | None = None
) -> FrozenPart | None:
    """Have the frozen weights of a part on this machine's disk; None in a run that trains all its weights.

    What was fetched before this peer was killed is not fetched again. Raises StateError when nobody has them, or the
    disk has no room for them; what came stays. Cancelled, it leaves that too.
    """
    if lora_of(around.manifest.model) is None:
        return None
    if (store := around.files.frozen) is None:
        raise StateError(f"this peer has nowhere to keep the frozen weights of {name}")
    began, part = around.clock.monotonic(), await asyncio.to_thread(FrozenPart, around.manifest, name, store)
    if await asyncio.to_thread(lambda: part.here):
        return part
    source = "peers"
    if around.files.directory is not None and await _made(part, around.files.directory):
        source = "files"
    else:
        await _fetched(around, part, donors, store, sparing)
    seconds = around.clock.monotonic() - began
    around.events.emit(FrozenReady(part=name, bytes=part.layout.bytes, seconds=seconds, source=source))
    return part


async def _made(part: FrozenPart, files: Path) -> bool:
    """Return whether the model's files on this machine gave the run's frozen weights."""
    try:
        same = await asyncio.to_thread(part.make, files)
    except StateError as error:
        logger.warning("the frozen weights of %s are fetched: %s", part.spec.name, error)
        return False
    if not same:
        logger.warning("the frozen weights of %s are fetched: the files in %s have others", part.spec.name, files)
    return same


async def _fetched(
    around: PeerContext, part: FrozenPart, donors: Sequence[PeerId], store: FrozenStore, sparing: Sparing | None
) -> None:
    begun, me, name = part.begun(), around.endpoint.peer, part.spec.name
    free = await asyncio.to_thread(free_bytes, store.root)
    if sparing is not None:
        _check_reserve(begun.lacking_bytes, free, await asyncio.to_thread(reserved_bytes, store.root), store, sparing)
    around.events.emit(
        FrozenFetching(part=name, bytes_total=begun.lacking_bytes, bytes_free=free, directory=str(store.root))
    )
    if begun.lacking_bytes > free:
        lacking = f"{size_text(begun.lacking_bytes)} of frozen weights are to come, and {size_text(free)} are free"
        raise StateError(f"{name}: {lacking} in {store.root}. Free some space there.")
    told = around.clock.monotonic()

    def progress(_: PartName, done: int, total: int) -> None:
        nonlocal told
        if around.clock.monotonic() - told >= PROGRESS_EVERY_S or done == total:
            told = around.clock.monotonic()
            around.events.emit(SyncProgress(part=name, step=0, donor=me, bytes_received=done, bytes_total=total))

    sources = [frozen_donor(around.endpoint, peer) for peer in donors if peer != me]
    try:
        await fetch_part(begun, sources, progress=progress, pace=None if sparing is None else sparing.pace)
    except StateError:
        if not await asyncio.to_thread(lambda: part.here):  # another process of this machine may have been faster
            raise


def _check_reserve(lacking: int, free: int, reserved: int, store: FrozenStore, sparing: Sparing) -> None:
    if lacking + reserved <= free:
        return
    to_come = f"{size_text(lacking)} are to come into {store.root}"
    reason = f"{to_come}, {size_text(free)} are free there, and {size_text(reserved)} of them stay free"
    sparing.refuses(reason)
    raise StateError(reason)
