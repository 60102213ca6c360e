"""Donors of checkpoints, a running peer or a directory of this machine, and which checkpoint to fetch from whom.

No donor is believed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from swarm.errors import Refused, StateError
from swarm.ids import PartName, PeerId
from swarm.network.protocols import Endpoint
from swarm.schema import Message
from swarm.state.checkpoints.checkpoint_service import (
    CHUNK_OF_FILE,
    DESCRIBE_FILE,
    LIST,
    RECORD_OF,
    ListRequest,
    RecordRequest,
)
from swarm.state.checkpoints.files import MAX_RECORD_BYTES, RECORD, HeldStep, held, step_directory, steps
from swarm.state.checkpoints.format import StoredParts
from swarm.state.download import ChunkDonor, Data, PeerChunks, Wanted
from swarm.state.frozen import FrozenStore, frozen_donor
from swarm.state.sharing import DonorT

T = TypeVar("T")


class Donor(ChunkDonor, Protocol):
    """A source of checkpoints that nobody trusts. Every method may raise PeerError. Its text names the source, for
    people."""

    async def offers(self) -> list[Offer[Donor]]:
        """Return the steps that it has."""

    async def record(self, step: int) -> bytes:
        """The bytes of a step's record."""

    @property
    def frozen(self) -> ChunkDonor:
        """The same as a source of frozen weights."""


class PeerDonor(PeerChunks):
    """A running peer. ``timeout_s`` bounds each call for a list or a record."""

    def __init__(self, endpoint: Endpoint, peer: PeerId, *, timeout_s: float) -> None:
        super().__init__(endpoint, peer, DESCRIBE_FILE, CHUNK_OF_FILE)
        self._timeout_s = timeout_s

    async def offers(self) -> list[Offer[Donor]]:
        """See :class:`Donor`."""
        answer, _ = await self._endpoint.call(self._peer, LIST, ListRequest(), timeout_s=self._timeout_s)
        return [_offer(self, one.step, one.parts, one.there) for one in answer.steps]

    async def record(self, step: int) -> bytes:
        """See :class:`Donor`."""
        _, payload = await self._endpoint.call(
            self._peer, RECORD_OF, RecordRequest(step=step), timeout_s=self._timeout_s, max_reply_bytes=MAX_RECORD_BYTES
        )
        return bytes(payload)

    @property
    def frozen(self) -> ChunkDonor:
        """See :class:`Donor`."""
        return frozen_donor(self._endpoint, self._peer)


class DirectoryDonor:
    """Checkpoints of another directory of this machine: another home's, or a copied one. ``frozen`` is where frozen
    weights are that belong to them."""

    def __init__(self, root: Path, frozen: FrozenStore | None = None) -> None:
        self._root, self._parts = root, StoredParts(root)
        self._frozen = frozen or FrozenStore(root / "frozen")

    def __str__(self) -> str:
        return str(self._root)

    async def offers(self) -> list[Offer[Donor]]:
        """See :class:`Donor`."""
        found = await asyncio.to_thread(lambda: [held(self._root, step) for step in steps(self._root)])
        return [_offer(self, one.step, one.record.parts, one.parts) for one in found if one.record is not None]

    async def record(self, step: int) -> bytes:
        """See :class:`Donor`."""
        return await self._read((step_directory(self._root, step) / RECORD).read_bytes)

    async def hashes(self, wanted: Wanted) -> Data:
        """See :class:`~swarm.state.download.ChunkDonor`."""
        return await self._read(self._parts.hashes, wanted.describe())

    async def chunk(self, wanted: Wanted, number: int, timeout_s: float) -> Data:
        """See :class:`~swarm.state.download.ChunkDonor`."""
        return await self._read(self._parts.chunk, wanted.chunk(number))

    @property
    def frozen(self) -> ChunkDonor:
        """See :class:`Donor`."""
        return _FrozenFiles(self._frozen)

    async def _read(self, work: Callable[..., T], *asked: Message) -> T:
        try:
            return await asyncio.to_thread(work, *asked)
        except OSError as error:
            raise Refused(f"{self._root}: {error.strerror}") from error
        except StateError as error:
            raise Refused(str(error)) from error


class _FrozenFiles:
    """The frozen weights of another directory, as a :class:`~swarm.state.download.ChunkDonor`."""

    def __init__(self, store: FrozenStore) -> None:
        self._store = store

    def __str__(self) -> str:
        return str(self._store.root)

    def _donor(self, wanted: Wanted) -> DirectoryDonor:
        return DirectoryDonor(self._store.place(wanted.digest))

    async def hashes(self, wanted: Wanted) -> Data:
        """See :class:`~swarm.state.download.ChunkDonor`."""
        return await self._donor(wanted).hashes(wanted)

    async def chunk(self, wanted: Wanted, number: int, timeout_s: float) -> Data:
        """See :class:`~swarm.state.download.ChunkDonor`."""
        return await self._donor(wanted).chunk(wanted, number, timeout_s)


def _offer(donor: Donor, step: int, digests: Mapping[str, str], there: Iterable[str]) -> Offer[Donor]:
    return Offer(donor, step, {PartName(p): d for p, d in digests.items()}, tuple(map(PartName, there)))


# --- the plan: out of what others offer and what lies here (pure) ----------------------------------------------------


Digests = Mapping[PartName, str]


@dataclass(frozen=True, slots=True)
class Offer(Generic[DonorT]):
    """One donor's holdings of a step: ``digests`` are its record's, ``there`` the parts that it holds."""

    donor: DonorT
    step: int
    digests: Digests
    there: Collection[PartName]


@dataclass(frozen=True, slots=True)
class Plan(Generic[DonorT]):
    """A step of which all parts are to be had. ``here`` are those that need not be fetched, ``donors`` hold the others,
    in the order of the offers; ``attested`` are all who say that the step's parts are
    these, ``believed`` whether those are more than half of all who have any checkpoint, or one among them is."""

    step: int
    digests: Digests
    here: tuple[PartName, ...]
    donors: Mapping[PartName, tuple[DonorT, ...]]
    attested: tuple[DonorT, ...]
    believed: bool


def plans(
    offers: Sequence[Offer[DonorT]],
    held: Collection[HeldStep],
    cuts: Sequence[Collection[PartName]],
    *,
    last_step: int | None = None,
    believed: Collection[DonorT] = (),
    without: Collection[PartName] = (),
) -> list[Plan[DonorT]]:
    """Every way to a whole step that is newer than the newest complete one here, the best first: the newest that is
    believed, then what is not, the newest first. Of several accounts of one step that which most donors give.

    ``cuts`` say into which parts a state of the run may be cut: an account that names others is nobody's checkpoint of
    it, nor is one of a step beyond ``last_step``. What one donor says who is not ``believed`` can so displace nothing
    that most say. A step is whole ``without`` these parts, too.
    """
    offers = [offer for offer in offers if last_step is None or offer.step <= last_step]
    have = {one.step: one for one in held}
    complete = max((one.step for one in held if one.complete_but(without)), default=-1)
    accounts: dict[tuple[int, tuple[tuple[PartName, str], ...]], list[Offer[DonorT]]] = {}
    for offer in offers:
        if offer.step > complete and set(offer.digests) in map(set, cuts):
            accounts.setdefault((offer.step, tuple(sorted(offer.digests.items()))), []).append(offer)
    everybody = {offer.donor for offer in offers}

    def trusted(same: Sequence[Offer[DonorT]]) -> bool:
        saying = {offer.donor for offer in same}
        return 2 * len(saying) > len(everybody) or not saying.isdisjoint(believed)

    found = [
        _plan(step, dict(digests), same, have.get(step), believed=trusted(same))
        for (step, digests), same in accounts.items()
    ]
    whole = [plan for plan in found if {*plan.here, *plan.donors, *without} >= set(plan.digests)]
    return sorted(whole, key=lambda plan: (not plan.believed, -plan.step, -len(plan.attested)))


def lacking(
    offers: Sequence[Offer[DonorT]],
    held: Collection[HeldStep],
    cuts: Sequence[Collection[PartName]],
    without: Collection[PartName] = (),
) -> list[tuple[int, tuple[PartName, ...]]]:
    """(step, the parts that nobody has) of every step that anybody has any part of, the newest first; of a step that
    may be cut in several ways (:func:`plans`), in the first that fits. Those ``without`` which it is whole, too, are
    not named."""
    there: dict[int, set[PartName]] = {}
    for offer in offers:
        if offer.there:
            there.setdefault(offer.step, set()).update(offer.there)
    for one in held:
        if one.parts:
            there.setdefault(one.step, set()).update(one.parts)

    def of(found: set[PartName]) -> Collection[PartName]:
        return next((cut for cut in cuts if found.issubset(cut)), cuts[0])

    return [
        (step, tuple(sorted(set(of(there[step])) - there[step] - set(without)))) for step in sorted(there, reverse=True)
    ]


def _plan(
    step: int, digests: Digests, offers: Sequence[Offer[DonorT]], have: HeldStep | None, *, believed: bool
) -> Plan[DonorT]:
    same = have is not None and have.record is not None and dict(have.record.parts) == dict(digests)
    here = tuple(sorted(have.parts)) if same and have is not None else ()
    donors: dict[PartName, list[DonorT]] = {}
    for offer in offers:
        for part in offer.there:
            if part in digests and part not in here:
                donors.setdefault(part, []).append(offer.donor)
    return Plan(
        step=step,
        digests=digests,
        here=here,
        donors={part: tuple(those) for part, those in sorted(donors.items())},
        attested=tuple(dict.fromkeys(offer.donor for offer in offers)),
        believed=believed,
    )
