"""Count the contributions to the open step exactly: quota is leased and microbatches are counted, nothing is estimated.

Pure: no clock, no network. One ledger lives per step, on its leader.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.columns import columns_of, held
from swarm.consensus.records import MAX_ASIDE, Contribution, Quarantined
from swarm.errors import Refused, WrongStep
from swarm.ids import MicrobatchId, PartName, PeerId, StepWork


def fixed_quota(step: int, trainers: Sequence[PeerId], target: int) -> dict[PeerId, int]:
    """Return each trainer's quota of a reproducible step: equal shares, the remainder going round from step to step."""
    share, remainder = divmod(target, len(trainers))
    extra = {trainers[(step + index) % len(trainers)] for index in range(remainder)}
    return {trainer: share + (trainer in extra) for trainer in trainers}


def free_quota(trainers: Sequence[PeerId], target: int, max_share: float) -> dict[PeerId, int]:
    """The most each trainer may feed: ``max_share`` of the step, but never less than an equal share."""
    most = max(math.floor(max_share * target), math.ceil(target / len(trainers)))
    return dict.fromkeys(trainers, min(most, target))


def first_lease(trainers: int, target: int) -> int:
    """Return how many microbatches of a step are leased to each of so many trainers before anybody asks: half of an
    equal share, which is no more than any quota allows."""
    return target // (2 * trainers) if trainers else 0


@dataclass(slots=True)
class _Account:
    """One trainer's: how many are leased to it, and what became of those that it has told of."""

    leased: int = 0
    done: dict[MicrobatchId, Contribution] = field(default_factory=dict)
    aside: dict[MicrobatchId, Quarantined] = field(default_factory=dict)

    @property
    def told(self) -> int:
        """The number of leased microbatches that are completed or set aside."""
        return len(self.done) + len(self.aside)

    @property
    def counted(self) -> int:
        """The number of leased microbatches that may be in the batch."""
        return self.leased - len(self.aside)

    def keep(self, microbatches: frozenset[MicrobatchId]) -> None:
        """Only these count, and no others are leased."""
        self.done = {m: c for m, c in self.done.items() if m in microbatches}
        self.aside = {m: a for m, a in self.aside.items() if m in microbatches}
        self.leased = self.told

    def unbroken(self, cursor: tuple[int, int]) -> tuple[MicrobatchId, ...]:
        """The microbatches completed or set aside from the cursor on, up to the first that is missing: the shard goes
        on behind them, so that nothing is left out. Nothing of the next epoch: only the trainer knows where an epoch
        ends."""
        kept, (epoch, position) = [], cursor
        for microbatch in sorted([*self.done, *self.aside]):
            if (microbatch.epoch, microbatch.position) != (epoch, position):
                break
            kept.append(microbatch)
            position += 1
        return tuple(kept)


class Ledger:
    """Leases and completions of one step. Cost of a lease or a report: as many additions as there are trainers.

    Invariants: leased and not put aside ≤ target; completed by a trainer ≤ leased to it; a microbatch counts once
    however often it is reported. What is leased to a trainer only grows, until the trainer is withdrawn or says anew
    what it has begun.
    """

    def __init__(self, step: int, target: int, quota: Mapping[PeerId, int]) -> None:
        self.step, self.target = step, target
        self._quota = dict(quota)
        self._accounts: defaultdict[PeerId, _Account] = defaultdict(_Account)

    @property
    def full(self) -> bool:
        """True if the batch is complete."""
        return self.done >= self.target

    def leased(self, trainer: PeerId) -> int:
        """Return how many are leased to a trainer."""
        return self._accounts[trainer].leased

    @property
    def trainers(self) -> tuple[PeerId, ...]:
        """The trainers that feed this step."""
        return tuple(self._quota)

    def lease(self, step: int, trainer: PeerId, total: int) -> tuple[int, str]:
        """Raise what is leased to a trainer towards ``total`` microbatches; returns (leased in all, reason).

        Asking for a total makes a repeated request harmless.
        """
        self._check(step, trainer)
        account = self._accounts[trainer]
        held = account.leased
        granted = max(0, min(total - held, self._left(), self._room(trainer)))
        account.leased = held + granted
        if granted or total <= held:
            return held + granted, f"{self._left()} of {self.target} left"
        reason = f"your share of {self._quota[trainer]} is used up"
        return held, "the step is fully leased" if self._left() == 0 else reason

    def complete(self, step: int, trainer: PeerId, contribution: Contribution) -> bool:
        """Count a finished microbatch; False when it was counted before. Raises Refused for what was never leased."""
        account = self._own(step, trainer, contribution.microbatch)
        known = account.done.get(contribution.microbatch)
        if known is not None:
            if known != contribution:
                raise Refused("this microbatch was reported before, differently")
            return False
        if contribution.microbatch in account.aside:
            raise Refused("this microbatch was put aside")
        _check_leased(trainer, account)
        account.done[contribution.microbatch] = contribution
        return True

    def put_aside(self, step: int, trainer: PeerId, aside: Quarantined) -> bool:
        """A leased microbatch will not be completed: another may be. False when that is known."""
        account = self._own(step, trainer, aside.microbatch)
        if aside.microbatch in account.aside:
            return False
        if aside.microbatch in account.done:
            raise Refused("this microbatch was completed")
        if self._aside_room(account) <= 0:
            raise Refused(f"{len(account.aside)} microbatches of yours are put aside already: something is wrong there")
        _check_leased(trainer, account)
        account.aside[aside.microbatch] = _in_ascii(aside)
        return True

    def resume(self, step: int, trainer: PeerId, started: Sequence[MicrobatchId], aside: Sequence[Quarantined]) -> int:
        """Take up a trainer's work that began before this ledger was opened, or found again: return how many of
        ``started``, from the first, are leased to it. All that counted for it before must be reported again."""
        self._check(step, trainer)
        account = self._accounts[trainer] = _Account()
        listed = {one.microbatch: one for one in aside}
        room = min(self._left(), self._room(trainer))
        for microbatch in started:
            if microbatch in listed and self._aside_room(account) > 0:
                account.aside[microbatch] = _in_ascii(listed[microbatch])
            elif room == 0:
                break
            else:
                room -= 1
            account.leased += 1
        return account.leased

    def share(self, quota: Mapping[PeerId, int], keep: Mapping[PeerId, tuple[int, int]]) -> None:
        """These feed the step from now on. Of the others nothing counts any more; for trainers in ``keep``, whose
        gradients are all held by others, what they completed without a gap from the cursor given there does."""
        for trainer in [trainer for trainer in self._quota if trainer not in quota]:
            if trainer in keep:
                self._cut(trainer, keep[trainer])
            else:
                self._accounts.pop(trainer, None)
        self._quota = dict(quota)

    def inherit(self, trainer: PeerId, contributions: Iterable[Contribution], cursor: tuple[int, int]) -> None:
        """Count what others bore witness of for a trainer that is not counted on any more: as in :meth:`share`, and as
        far as the step has room: witnesses may know of work that an earlier leader gave to another."""
        account = self._accounts[trainer]
        room = self._left() + account.counted
        account.done |= {c.microbatch: c for c in contributions if c.microbatch.trainer == trainer}
        account.keep(frozenset(account.unbroken(cursor)[:room]))

    def exclude(
        self, microbatches: Collection[MicrobatchId], cursors: Mapping[PeerId, tuple[int, int]]
    ) -> tuple[MicrobatchId, ...]:
        """These are lost: their trainer is gone, and so is what others would need to compute them again. What it did
        after them counts no more either: its shard goes on at the first, from the cursor given (else the beginning),
        and it does them again when it is back. Returns what counted until now."""
        excluded: list[MicrobatchId] = []
        for trainer in sorted({PeerId(one.trainer) for one in microbatches} & self._accounts.keys()):
            account = self._accounts[trainer]
            lost, before = account.done.keys() & set(microbatches), set(account.done)
            if lost:
                account.done = {m: c for m, c in account.done.items() if m not in lost}
                self._cut(trainer, cursors.get(trainer, (0, 0)))
                excluded += sorted(before - account.done.keys())
        return tuple(excluded)

    def _cut(self, trainer: PeerId, cursor: tuple[int, int]) -> None:
        account = self._accounts[trainer]
        account.keep(frozenset(account.unbroken(cursor)))

    @property
    def done(self) -> int:
        """The number of completed microbatches."""
        return sum(len(account.done) for account in self._accounts.values())

    def waits_for(self) -> tuple[PeerId, ...]:
        """The trainers that the batch cannot be complete without as it is: what is missing is leased to them, or kept
        for them by their quota. Empty when all others have something to do, too."""
        left = self._left()
        able = [
            trainer
            for trainer in self._quota
            if self._accounts[trainer].told < self._accounts[trainer].leased or (left and self._room(trainer) > 0)
        ]
        return tuple(sorted(able)) if len(able) < len(self._quota) else ()

    def committed(self) -> tuple[Contribution, ...]:
        """The completed microbatches in the order of their ids: the same wherever it is computed."""
        done = {m: one for account in self._accounts.values() for m, one in account.done.items()}
        return tuple(done[microbatch] for microbatch in sorted(done))

    def aside(self) -> tuple[Quarantined, ...]:
        """The microbatches set aside, in the order of the ids."""
        aside = {m: one for account in self._accounts.values() for m, one in account.aside.items()}
        return tuple(aside[microbatch] for microbatch in sorted(aside))

    def _aside_room(self, account: _Account) -> int:
        """Return how many more a trainer may set aside: its share of what the close record, which travels in one
        message, has room for. Who would put more aside waits, and is a trainer that stalls."""
        share = max(1, MAX_ASIDE // max(1, len(self._quota)))
        left = MAX_ASIDE - sum(len(one.aside) for one in self._accounts.values())
        return min(share - len(account.aside), left)

    def _left(self) -> int:
        return self.target - sum(account.counted for account in self._accounts.values())

    def _room(self, trainer: PeerId) -> int:
        return self._quota[trainer] - self._accounts[trainer].counted

    def _own(self, step: int, trainer: PeerId, microbatch: MicrobatchId) -> _Account:
        self._check(step, trainer)
        if microbatch.trainer != trainer:
            raise Refused("a trainer reports its own microbatches only")
        return self._accounts[trainer]

    def _check(self, step: int, trainer: PeerId) -> None:
        if step != self.step:
            raise WrongStep(f"step {step} is not the open step {self.step}")
        if trainer not in self._quota:
            raise Refused(f"{trainer} is not counted on in this step")


def _in_ascii(aside: Quarantined) -> Quarantined:
    """With a reason that has as many bytes as characters: that many a record has room for."""
    reason = aside.reason.encode("ascii", "backslashreplace").decode()
    return aside if reason == aside.reason else Quarantined(microbatch=aside.microbatch, reason=reason[:200])


def _check_leased(trainer: PeerId, account: _Account) -> None:
    if account.told >= account.leased:
        raise Refused(f"{account.told} microbatches are counted and no more were leased to {trainer}")


def reassigned(
    committed: Sequence[Contribution],
    columns: Sequence[Sequence[PeerId]],
    *,
    computed_again: bool = True,
    able: Callable[[Contribution, PeerId], bool] = lambda one, peer: True,
) -> tuple[Contribution, ...]:
    """The same microbatches, with one of those that are there in each of the ``columns``: what was held by another goes
    to the one that holds least, so that it is computed again by as many as can; or, where nobody computes it again, to
    each in proportion to what it did, so that their weights stay to each other as they were. It goes to those only that
    are ``able``: who did early work may have moved since. Raises Refused when a column is left without."""
    load = [Counter({peer: 0 for peer in replicas}) for replicas in columns]

    def stays(one: Contribution, column: int, peer: str) -> bool:
        return peer in load[column] and (not one.early or able(one, PeerId(peer)))

    for contribution in committed:
        for column, (_, peer) in enumerate(zip(load, contribution.route, strict=True)):
            if stays(contribution, column, peer):
                load[column][PeerId(peer)] += 1
    did = [Counter[PeerId]() if computed_again else Counter(one) for one in load]
    result = []
    for contribution in committed:
        route = []
        for column, peer in enumerate(contribution.route):
            if not stays(contribution, column, peer):
                there = {one: count for one, count in load[column].items() if able(contribution, one)}
                if not there:
                    raise Refused(f"nobody is left at stage {column}")
                peer = _next(there, did[column])
                load[column][peer] += 1
            route.append(peer)
        changed = tuple(route) != contribution.route
        result.append(contribution.model_copy(update={"route": tuple(route)}) if changed else contribution)
    return tuple(result)


def is_reassigned(reported: Contribution, counted: Contribution, columns: Sequence[Collection[PeerId]]) -> bool:
    """Return whether what counts of a microbatch is what its trainer reported, but for those that are not there: that
    is all that :func:`reassigned` changes."""
    ways = zip(reported.route, counted.route, columns, strict=True)
    route = tuple(said if said in there else other for said, other, there in ways)
    return counted == reported.model_copy(update={"route": route})


def _next(load: Mapping[PeerId, int], did: Mapping[PeerId, int]) -> PeerId:
    """Return the trainer with the least to account for beside its work (if that counts), of equals the first."""
    return min(load, key=lambda one: ((load[one] + 1) / (did[one] + 1), one))


def weights(committed: Sequence[Contribution], replicas: Sequence[PeerId], part: PartName) -> dict[PeerId, int]:
    """Integer token weight of each replica of a part: the target tokens of what the ledger assigns to it."""
    totals = dict.fromkeys(replicas, 0)
    for contribution, holder in held(committed, part):
        totals[holder] += contribution.tokens
    return totals


def fed(committed: Sequence[Contribution], part: PartName) -> bool:
    """Return whether a step has target tokens for a part: its mean may be zeros all the same."""
    return any(contribution.tokens for contribution, _ in held(committed, part))


def assigned(
    step: int, committed: Sequence[Contribution], peer: PeerId, part: PartName
) -> dict[StepWork, tuple[PeerId, ...]]:
    """The microbatches of a step whose gradient for a part this replica must hold, each with its route."""
    several = max(1, len(columns_of(part)))
    return {
        contribution.work(step)._replace(hop=number % several): tuple(PeerId(one) for one in contribution.route)
        for number, (contribution, holder) in enumerate(held(committed, part))
        if holder == peer
    }
