"""The frozen weights of parts on this machine's disk, by digest, and handed to peers that lack them: ``frozen/1``.

They are kept as a state of one vector is (:attr:`swarm.models.lora.BaseLayout.flat`): the same file, the same chunks,
the same digest over their hashes. The digest is under the run id and never changes, so one file serves every run that
trains adapters beside the same weights, cut alike.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarm.errors import Refused, StateError
from swarm.ids import PartName, PeerId
from swarm.models.lora import BaseLayout
from swarm.network.protocols import Answer, AnyMethod, Endpoint, Incoming, Rpc
from swarm.schema import Empty
from swarm.state.checkpoints.checkpoint_service import DiskReads
from swarm.state.checkpoints.files import part_path
from swarm.state.checkpoints.format import PartFile, StoredParts
from swarm.state.checkpoints.parts import load_file, write_part
from swarm.state.download import PeerChunks, Wanted
from swarm.state.sharing import MAX_WINDOW
from swarm.state.snapshot import Snapshot, digest
from swarm.state.transfer import ChunkRequest, DescribeRequest, OpenAnswers

DESCRIBE_FROZEN = Rpc("frozen/1/describe", DescribeRequest, Empty)
CHUNK_OF_FROZEN = Rpc("frozen/1/chunk", ChunkRequest, Empty)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNKS, _ALL_CHUNKS, _TOLD, _ALL_TOLD = 4 * MAX_WINDOW, 256, 2, 16
"""Answers on their way to one caller, and from how many in all on each has a few only: as for checkpoints."""


def wanted_frozen(part: PartName, layout: BaseLayout, expected: str) -> Wanted:
    """Return the frozen weights of a part as what is downloaded and read: a state that is never followed by another."""
    return Wanted(part=part, step=0, digest=expected, layout=layout.flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFrozen:
    """Frozen weights on the disk. ``whole``: they are not only begun."""

    digest: str
    part: str
    bytes: int
    used: float
    whole: bool


class FrozenStore:
    """All below one directory. Blocking. Several processes may use it: a file is there whole or not at all, and one of
    them fetches it (:func:`swarm.state.checkpoints.fetch.fetch_part`)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.given = Counter[PeerId]()
        """Bytes that each peer was given by this process."""

    def place(self, expected: str) -> Path:
        """Return the directory of the file with this digest."""
        return self.root / expected

    def holds(self, wanted: Wanted) -> bool:
        """Return whether it is here, as far as its header says."""
        path = part_path(self.place(wanted.digest), wanted.step, wanted.part)
        try:
            return PartFile.read(path).state.describe() == wanted.describe()
        except (StateError, OSError):
            return False

    def load(self, wanted: Wanted) -> Tensor:
        """Return the string of bytes, every one of them checked: a pass over the disk and a hash. Raises StateError for
        a file that is damaged, which is removed then: it is fetched or made anew when it is wanted again."""
        path = part_path(self.place(wanted.digest), wanted.step, wanted.part)
        try:
            snapshot, found = load_file(path)
            if found != wanted.digest or snapshot.layout != wanted.layout:
                raise StateError(f"{path}: it is not what its directory says.")
        except StateError as error:
            path.unlink(missing_ok=True)
            raise StateError(f"{error} It was removed: start again, and it is fetched or made anew.") from None
        return snapshot.vectors[0]

    def keep(self, part: PartName, layout: BaseLayout, vector: Tensor) -> str:
        """Keep these, and return their digest. Raises StateError when the disk refuses."""
        snapshot = Snapshot(part=part, step=0, layout=layout.flat, vectors=(vector,))
        found = digest(snapshot)
        if not self.holds(wanted_frozen(part, layout, found)):
            write_part(self.place(found), snapshot, {}, expected_digest=found)
        return found

    def listing(self) -> list[KeptFrozen]:
        """Return all that is here, begun or whole, what was used last first."""
        found = []
        directories = [one for one in self.root.iterdir() if _DIGEST.fullmatch(one.name)] if self.root.is_dir() else []
        for directory in directories:
            files = [path for path in directory.rglob("*") if path.is_file()]
            if not files:
                continue
            stats = [path.stat() for path in files]
            named = next((path.stem for path in files if not path.name.startswith(".")), "")
            found.append(
                KeptFrozen(
                    digest=directory.name,
                    part=named or files[0].name.lstrip(".").partition(".")[0],
                    bytes=sum(512 * stat.st_blocks for stat in stats),
                    used=max(stat.st_atime for stat in stats),
                    whole=bool(named),
                )
            )
        return sorted(found, key=lambda one: -one.used)

    def remove(self, expected: str) -> None:
        """Remove one. Raises OSError."""
        if not _DIGEST.fullmatch(expected):
            raise StateError(f"{expected!r} is no digest")
        shutil.rmtree(self.place(expected))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What this machine has of a run's model: the ``directory`` of its files, and its frozen weights."""

    directory: Path | None = None
    frozen: FrozenStore | None = None


class FrozenService:
    """A service that hands out the frozen weights of one run, of no other: what else is here is nobody's business."""

    def __init__(self, store: FrozenStore, digests: Mapping[PartName, str]) -> None:
        self._store, self._digests = store, dict(digests)
        self._parts = {part: StoredParts(store.place(found)) for part, found in digests.items()}
        self._disk = DiskReads("those frozen weights are")
        self._chunks, self._told = OpenAnswers(_CHUNKS, _ALL_CHUNKS), OpenAnswers(_TOLD, _ALL_TOLD)

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        chunks, told = self._chunks, self._told
        return (
            DESCRIBE_FROZEN.handled_with_payload(self._describe, admit=told.admit, over=told.over),
            CHUNK_OF_FROZEN.handled_with_payload(self._chunk, admit=chunks.admit, over=chunks.over),
        )

    async def _describe(self, caller: PeerId, asked: DescribeRequest, incoming: Incoming) -> Answer[Empty]:
        parts = self._of(asked)
        return Answer(Empty(), await self._disk.run(lambda: parts.hashes(asked)))

    async def _chunk(self, caller: PeerId, asked: ChunkRequest, incoming: Incoming) -> Answer[Empty]:
        parts = self._of(asked)
        chunk = await self._disk.run(lambda: parts.chunk(asked))
        self._store.given[caller] += len(chunk)
        return Answer(Empty(), chunk)

    def _of(self, asked: DescribeRequest) -> StoredParts:
        part = PartName(asked.part)
        if self._digests.get(part) != asked.digest:
            raise Refused("this run has no such frozen weights")
        return self._parts[part]


def frozen_donor(endpoint: Endpoint, peer: PeerId) -> PeerChunks:
    """Return a peer as a source of frozen weights."""
    return PeerChunks(endpoint, peer, DESCRIBE_FROZEN, CHUNK_OF_FROZEN)
