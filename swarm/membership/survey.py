"""Ask about a run before taking part in it: the contact through which this peer came, and the members one by one.

:class:`FirstContact` also says what the loss of the contact means; :class:`Survey` helps a peer choose its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from swarm.clock import Clock
from swarm.columns import host_parts, loads
from swarm.consensus.placement import Places, Wish, choose_place
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster, can_be_called
from swarm.errors import Advice, Ending, PeerError, Refused, RunEnded, Unadmitted
from swarm.ids import ENDS, PartName, PeerId
from swarm.membership.announcer import only_calls
from swarm.membership.contact import AWAY_S, GOES_ON, LONGEST_PAUSE_S, ask_standing, not_admitted
from swarm.membership.memory import unfit_parts
from swarm.membership.part_memory import MORE_MEMORY
from swarm.membership.run import RunContext
from swarm.network.discovery.records import PeerRecord, numbers_in
from swarm.network.protocols import Endpoint
from swarm.security.credentials import Credential
from swarm.step.observe_messages import STANDING, RunStanding, StandingRequest
from swarm.waiting import ExponentialBackoff

FIRST_PAUSE_S = 1.0
MAX_CONTACTS = 16
"""So many at most are asked where the run stands; the invite's come first."""


class FirstContact:
    """Whom a peer asks where the run stands until it takes part: ``peer``, the first of ``contacts``, and while that is
    away the next that answers. Who ``returns`` believes nobody who is on the way back itself: each would wait for the
    other.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock, contacts: Sequence[PeerId], *, returns: bool = False) -> None:
        self._endpoint, self._clock, self._returns = endpoint, clock, returns
        self._contacts = tuple(dict.fromkeys(peer for peer in contacts if peer != endpoint.peer))[:MAX_CONTACTS]
        self.peer = contacts[0]
        self._last: RunStanding | None = None

    async def standing(self, waiting: Callable[[str], None]) -> RunStanding:
        """Return where the run stands. While nobody tells it, ``waiting`` is told so, and they are asked again.

        Raises:
            RunEnded: Nobody told it for AWAY_S, or this peer is not let in.
        """
        began, pauses = self._clock.monotonic(), ExponentialBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            problem = await self._ask()
            if not problem and self._last is not None:
                return self._last
            if self._clock.monotonic() - began >= AWAY_S:
                raise self.gone(f"{problem}; no answer for {AWAY_S / 3600:g} hours")
            waiting(f"{self._awaited()} to say where the run stands: {problem}; {GOES_ON}")
            await self._clock.sleep(pauses.pause_s())

    def _awaited(self) -> str:
        others = len(self._contacts) - 1
        return f"the contact ({self.peer})" if others < 1 else f"the contact ({self.peer}), or one of {others} others,"

    async def _ask(self) -> str:
        """Ask the contact, and if that is of no use all others at once; return what is in the way, "" for nothing.
        Raises RunEnded where the contact does not let this peer in."""
        first = await self._told_by(self.peer)
        if not isinstance(first, RunStanding):
            others = [peer for peer in self._contacts if peer != self.peer]
            for peer, told in zip(others, await asyncio.gather(*map(self._told_by, others)), strict=True):
                if isinstance(told, RunStanding):
                    self.peer, first = peer, told
                    break
        if isinstance(first, RunEnded):
            raise first
        if isinstance(first, RunStanding):
            self._last = first
            return ""
        return first

    async def _told_by(self, peer: PeerId) -> RunStanding | RunEnded | str:
        """Return what a peer tells, an error where it does not let us in, else why it is of no use."""
        try:
            standing = await ask_standing(self._endpoint, self._clock, peer)
        except PeerError as error:
            return error.reason
        except RunEnded as refused:
            return refused
        return "it is on its way back itself" if self._returns and standing.returning else standing

    def lost(self, peer: PeerId, reason: str, error: PeerError | None, *, left: bool) -> RunEnded | None:
        """Return the error with which this peer ends as a contact is lost, None where it asks on: who is only silent
        may come back, and so may a relay on the way to it. ``error`` is that of the question that it did not answer,
        ``left`` whether it said itself that it leaves."""
        if isinstance(error, Unadmitted):  # it is there, and answers
            return not_admitted(error)
        return self.gone(reason) if left and peer == self.peer and len(self._contacts) < 2 else None

    def gone(self, reason: str) -> RunEnded:
        """Return the error of a peer that has nobody to begin with any more, whatever the others do meanwhile."""
        last = self._last
        if last is None or last.closed is not None or last.returning:
            return RunEnded(
                f"the contact ({self.peer}) is gone before this peer took part: {reason}",
                Ending.UNREACHABLE,
                check="is that peer running, or is the run over? Can this machine reach it?",
                remedy=Advice.JOIN_ANEW,
            )
        heard = "when it was asked last, the run had not begun"
        if self.peer != last.founder:
            return RunEnded(
                f"the contact ({self.peer}) is gone; {heard}: {reason}",
                Ending.UNREACHABLE,
                check=f"does its founder ({last.founder}) wait for others still? The start needs no other contact.",
                remedy=Advice.JOIN_FOUNDER,
            )
        return RunEnded(
            f"the run's founder ({self.peer}) is gone; {heard}: {reason}",
            Ending.UNREACHABLE,
            check="does its founder mean to start it again? Or has it begun since, with others?",
            remedy=Advice.FOUND_AGAIN,
        )


# --- survey of the members -------------------------------------------------------------------------------------------


STANDING_TIMEOUT_S = 5.0
MAX_ASKED = 4
"""How many others are asked for what any member knows, when the contact does not answer."""
MAX_HOSTS = 16
"""How many stage hosts are asked whether they are about to leave."""


class Survey:
    """What this peer asks about a ``run`` before it takes part, and the place that it chooses by the answers. Who does
    not answer says nothing: no PeerError is raised."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._around, self._endpoint = run, run.around, run.around.endpoint
        self._lacking: tuple[tuple[str, str], ...] = ()

    async def choose(self, head: CloseRecord, lost: Collection[str]) -> PartName | None:
        """Choose what this peer holds when it joins after the record ``head``, and say so in an event; of a part that
        is ``lost`` see :meth:`lost`. Raises RunEnded when the run has no such place, or none that fits."""
        parts = self._own_parts(head)
        settings, me = self._run.settings, self._endpoint.peer
        free = settings.role == "stage" and not settings.wish
        leaving, arriving = await asyncio.gather(self._leaving(head.members), self._arriving()) if free else ((), {})
        home = self._home(head.members, me, self._around.credential)
        arriving = {p: one for p, one in arriving.items() if self._home(head.members, p, one.credential) == home}
        unfit = await asyncio.to_thread(unfit_parts, self._around, parts, settings)
        places = Places(
            parts=parts,
            lost={*lost, *(part for at, part in self._lacking if at == home)},
            leaving=leaving,
            arriving={peer: _heads_for(record, parts) for peer, record in arriving.items()},
            cannot={peer: host_parts(parts, numbers_in(record.unfit)) for peer, record in arriving.items()},
            barred=self._barred(head.members),
            beside=head.members.parts_beside(me, settings.beside),
            unfit=unfit,
            chosen=self._run.situation.part,
            load=loads(parts, head.passed) if settings.wish else {},
            home=home,
        )
        try:
            part, reason = choose_place(head.members, me, settings.role, settings.wish, places)
        except Refused as refused:
            raise RunEnded(refused.reason, Ending.MISUSED) from refused
        if part in unfit:
            none = "no stage fits: " if free else ""
            raise RunEnded(f"{none}{unfit[part]}", Ending.MISUSED, remedy=MORE_MEMORY)
        if (part, reason) != (self._run.situation.part, self._run.situation.reason):
            self._run.assigned(part, reason, head)
        return part

    def _own_parts(self, head: CloseRecord) -> tuple[PartName, ...]:
        """Return the run's parts without those that another organisation keeps to itself. Raises RunEnded where none is
        left of those that a host wishes for."""
        parts, settings = self._around.manifest.cut_with(head.members.parts), self._run.settings
        wish = settings.wish if settings.role == "stage" else Wish()
        kept = dict[PartName, str]()
        for part in parts:
            try:
                if head.admissions is not None:
                    head.admissions.check_own(part, self._endpoint.peer, self._around.credential)
            except Refused as refused:
                kept[part] = refused.reason
        if (wished := wish.among(parts)) and kept.keys() >= set(wished):
            raise RunEnded(kept[wished[0]], Ending.MISUSED, remedy=Advice.NEW_GRANT)
        return tuple(part for part in parts if part not in kept)

    @staticmethod
    def _home(roster: Roster, peer: PeerId, credential: Credential | None) -> str | None:
        """Return the organisation of a peer that may be no member yet; None where microbatches pass anybody."""
        if not roster.borders.drawn:
            return None
        return roster.borders.home(peer) or ("" if credential is None else credential.grant.organisation)

    async def lost(self, roster: Roster, contact: PeerId | None) -> tuple[str, ...]:
        """The parts that nobody holds any more, and for :meth:`choose` those that an organisation lacks, as the
        contact sees it, or the first member that answers."""
        others = [peer for peer in roster.peers if peer not in (self._endpoint.peer, contact)]
        for peer in [*filter(None, [contact]), *others[:MAX_ASKED]]:
            standing = await self._ask(peer)
            if standing is not None and not standing.returning:
                self._lacking = standing.lacking
                return standing.lost
        return ()

    async def _leaving(self, roster: Roster) -> set[PeerId]:
        """The stage hosts that have been asked to leave and are in the run yet, as each says itself: those of the
        stages with the fewest replicas, where it matters most. Cost: one question to each, all at once."""
        stages = sorted((roster.replicas(part) for part in roster.parts if part != ENDS), key=len)
        asked = [peer for held in stages for peer in held if peer != self._endpoint.peer][:MAX_HOSTS]
        standings = zip(asked, await asyncio.gather(*map(self._ask, asked)), strict=True)
        return {peer for peer, standing in standings if standing is not None and standing.leaving}

    async def _arriving(self) -> dict[PeerId, PeerRecord]:
        """The stage hosts on their way into the run, each with the stage that it has chosen or will, or none, and those
        that it cannot hold: as each says itself in the directory, within the last two minutes. Cost: one look into the
        directory."""
        try:
            records = await self._run.directory.lookup(PeerRecord)
        except PeerError:
            return {}
        coming = {peer: record for peer, record in records.items() if record.status == "waiting"}
        return {peer: record for peer, record in sorted(coming.items()) if record.role == "stage"}

    def _barred(self, roster: Roster) -> tuple[PartName, ...]:
        """The parts whose replicas need one that others can call, which this peer is not."""
        served = self._around.manifest.averaging.strategy == "server"
        if not served or not only_calls(self._run.settings, self._endpoint.addresses):
            return ()
        return tuple(part for part in roster.parts if not can_be_called(roster, part))

    async def _ask(self, peer: PeerId) -> RunStanding | None:
        try:
            standing, _ = await self._endpoint.call(peer, STANDING, StandingRequest(), timeout_s=STANDING_TIMEOUT_S)
        except PeerError:
            return None
        return standing


def _heads_for(record: PeerRecord, parts: Sequence[PartName]) -> PartName | None:
    """The part that a waiting peer has chosen, else that of its wish, where this is one."""
    if record.part is not None:
        return PartName(record.part)
    wished = Wish(record.stage, record.choice).among(parts)
    return wished[0] if len(wished) == 1 else None
