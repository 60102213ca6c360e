"""Which checkpoint to fetch, and from whom: out of what others offer and what lies here. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.ids import PartName
from swarm.state.checkpoint_files import HeldStep

DonorT = TypeVar("DonorT")
Digests = Mapping[PartName, str]


@dataclass(frozen=True, slots=True)
class Offer(Generic[DonorT]):
    """What one donor has of a step: ``digests`` are its record's, ``there`` the bytes of the files it holds."""

    donor: DonorT
    step: int
    digests: Digests
    there: Mapping[PartName, int]


@dataclass(frozen=True, slots=True)
class Plan(Generic[DonorT]):
    """A step of which all parts are to be had. ``here`` are those that need not be fetched, ``donors`` hold the others,
    each with the bytes of its file, in the order of the offers; ``vouched`` are all who say that the step's parts are
    these, ``believed`` whether those are more than half of all who have any checkpoint, or one among them is."""

    step: int
    digests: Digests
    here: tuple[PartName, ...]
    donors: Mapping[PartName, tuple[tuple[DonorT, int], ...]]
    vouched: tuple[DonorT, ...]
    believed: bool


def plans(
    offers: Sequence[Offer[DonorT]],
    held: Collection[HeldStep],
    parts: Collection[PartName],
    *,
    last_step: int | None = None,
    believed: Collection[DonorT] = (),
) -> list[Plan[DonorT]]:
    """Every way to a whole step that is newer than the newest complete one here, the best first: the newest that is
    believed, then what is not, the newest first. Of several accounts of one step that which most donors give.

    ``parts`` are the model's: an account that names others is nobody's checkpoint of this run, nor is one of a step
    beyond ``last_step``. What one donor says who is not ``believed`` can so displace nothing that most say.
    """
    offers = [offer for offer in offers if last_step is None or offer.step <= last_step]
    have = {one.step: one for one in held}
    complete = max((one.step for one in held if one.complete), default=-1)
    accounts: dict[tuple[int, tuple[tuple[PartName, str], ...]], list[Offer[DonorT]]] = {}
    for offer in offers:
        if offer.step > complete and set(offer.digests) == set(parts):
            accounts.setdefault((offer.step, tuple(sorted(offer.digests.items()))), []).append(offer)
    everybody = {offer.donor for offer in offers}

    def trusted(same: Sequence[Offer[DonorT]]) -> bool:
        saying = {offer.donor for offer in same}
        return 2 * len(saying) > len(everybody) or not saying.isdisjoint(believed)

    found = [
        _plan(step, dict(digests), same, have.get(step), believed=trusted(same))
        for (step, digests), same in accounts.items()
    ]
    whole = [plan for plan in found if set(plan.here) | set(plan.donors) == set(parts)]
    return sorted(whole, key=lambda plan: (not plan.believed, -plan.step, -len(plan.vouched)))


def lacking(
    offers: Sequence[Offer[DonorT]], held: Collection[HeldStep], parts: Collection[PartName]
) -> list[tuple[int, tuple[PartName, ...]]]:
    """(step, the parts that nobody has) of every step that anybody has any part of, the newest first."""
    there: dict[int, set[PartName]] = {}
    for offer in offers:
        if offer.there:
            there.setdefault(offer.step, set()).update(offer.there)
    for one in held:
        if one.parts:
            there.setdefault(one.step, set()).update(one.parts)
    return [(step, tuple(sorted(set(parts) - there[step]))) for step in sorted(there, reverse=True)]


def _plan(
    step: int, digests: Digests, offers: Sequence[Offer[DonorT]], have: HeldStep | None, *, believed: bool
) -> Plan[DonorT]:
    same = have is not None and have.record is not None and dict(have.record.parts) == dict(digests)
    here = tuple(sorted(have.parts)) if same and have is not None else ()
    donors: dict[PartName, list[tuple[DonorT, int]]] = {}
    for offer in offers:
        for part, size in offer.there.items():
            if part in digests and part not in here:
                donors.setdefault(part, []).append((offer.donor, size))
    return Plan(
        step=step,
        digests=digests,
        here=here,
        donors={part: tuple(those) for part, those in sorted(donors.items())},
        vouched=tuple(dict.fromkeys(offer.donor for offer in offers)),
        believed=believed,
    )
