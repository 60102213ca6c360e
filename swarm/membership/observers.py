"""The peers that follow the run with this member's help; :mod:`swarm.membership.observer_service` serves them.

A peer that leaves reads it too: as long as it helps somebody, the run does not end for want of others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.consensus.records import CloseRecord
from swarm.errors import Busy, Refused
from swarm.ids import PartName, PeerId
from swarm.state.transfer import StateDonor

MAX_OBSERVERS, MAX_STRANGERS = 8, 64
LEASE_S, RECENT_S = 60.0, 15.0
"""An observer that has not asked, and neither downloads nor waits for an answer, for so long is forgotten; and is taken
for gone where nothing is lost if it is not."""


@dataclass(slots=True)
class _Observer:
    """``had``: it has the updates to this step; ``follows``: and the state that they led to, as it has asked for what
    comes after. ``asked``: it wanted something since the step before closed, so it has
    not got all of it from being a member. ``late``: it is a member that was late for a close, and no more than that."""

    had: int
    expires: float = 0.0
    waiting: int = 0
    asked: bool = True
    late: bool = False
    follows: bool = False


class Observers:
    """The peers that follow a part, each by (peer, part), and those that only asked where the run stands."""

    def __init__(self, donor: StateDonor, clock: Clock) -> None:
        self._donor, self._clock = donor, clock
        self._known: dict[tuple[PeerId, PartName], _Observer] = {}
        self._strangers: OrderedDict[PeerId, float] = OrderedDict()

    def beside(self, members: Collection[PeerId]) -> bool:
        """Return whether a peer that is none of these has just asked here where the run stands, fetches a part, or
        follows one."""
        recent = self._clock.monotonic() + LEASE_S - RECENT_S
        helped = {
            peer
            for (peer, part), seen in self._known.items()
            if seen.waiting or seen.expires > recent or self._donor.heard(peer, part, within_s=RECENT_S)
        }
        asked = {peer for peer, at in self._strangers.items() if at > self._clock.monotonic() - RECENT_S}
        return not (helped | asked) <= set(members)

    def asked_standing(self, peer: PeerId) -> None:
        """It asks where the run stands, and may be about to come."""
        self._strangers[peer] = self._clock.monotonic()
        self._strangers.move_to_end(peer)
        while len(self._strangers) > MAX_STRANGERS:
            self._strangers.popitem(last=False)

    def knows(self, peer: PeerId, part: PartName) -> bool:
        """Return whether it follows this part."""
        return (peer, part) in self._known

    def note(self, peer: PeerId, part: PartName, had: int) -> None:
        """It follows ``part`` from the state after step ``had`` on. Raises Busy when too many do."""
        key = peer, part
        known = self._known.get(key)
        if (known is None or known.late) and sum(not one.late for one in self._known.values()) >= MAX_OBSERVERS:
            raise Busy(f"{MAX_OBSERVERS} peers are joining with this one's help")
        observer = self._known.setdefault(key, _Observer(had))
        observer.had, observer.expires, observer.asked = had, self._clock.monotonic() + LEASE_S, True
        observer.late = observer.follows = False

    def behind(self, peer: PeerId, part: PartName, step: int) -> None:
        """A member was late for the close of ``step``: it has the updates before, and comes for this one. However many
        there are, each is owed it: the record names no more than the run has members."""
        known = self._known.setdefault((peer, part), _Observer(step - 1, late=True))
        known.expires, known.asked = self._clock.monotonic() + LEASE_S, True

    @contextmanager
    def waits(self, peer: PeerId, part: PartName, step: int) -> Iterator[None]:
        """While it waits for what comes of ``step``. Raises Refused for a peer that does not follow the part."""
        observer = self._known.get((peer, part))
        if observer is None:
            raise Refused("not an observer of this part: start first")
        self._donor.release(peer, part)  # it asks for what comes after that state: so it has it
        observer.had = step - 1
        observer.waiting, observer.asked, observer.follows = observer.waiting + 1, True, True
        try:
            yield
        finally:
            observer.waiting -= 1
            observer.expires = self._clock.monotonic() + LEASE_S

    def forget(self, peer: PeerId, part: PartName, *, unless_waiting: bool = False) -> None:
        """It follows the part no longer; ``unless_waiting``: but where it waits for an answer."""
        observer = self._known.get((peer, part))
        if observer is not None and not (unless_waiting and observer.waiting):
            del self._known[peer, part]

    def steps(self, part: PartName) -> list[int]:
        """Return how far the followers of a part have come, by what they asked for."""
        return [observer.had for (_, name), observer in self._known.items() if name == part]

    def followers(self, part: PartName) -> dict[PeerId, int]:
        """Return how far those have come, by their own word, that have a state of a part and lead it on."""
        return {peer: seen.had for (peer, name), seen in self._known.items() if name == part and seen.follows}

    def step_closed(self, before: CloseRecord | None, record: CloseRecord) -> None:
        """``record`` was decided after ``before``. Forget members that took part with the part that they observed and
        asked for nothing meanwhile: they have had what they needed. So have those that leave with this record."""
        for member in before.roster if before is not None else ():
            key = PeerId(member.peer), PartName(member.part or "")
            if key in self._known and not self._known[key].asked:
                del self._known[key]
        for observer in self._known.values():
            observer.asked = False
        stayed = before.members.peers if before is not None and record.follows(before) else ()
        gone = {peer for peer in stayed if peer not in record.members and peer not in record.absent}
        self._known = {key: seen for key, seen in self._known.items() if key[0] not in gone}

    def expire(self) -> None:
        """Forget those of whom nothing was heard for LEASE_S."""
        now = self._clock.monotonic()
        self._known = {
            key: seen
            for key, seen in self._known.items()
            if seen.waiting or seen.expires > now or self._donor.serves(*key)
        }
