"""Whether every part of the model is held by somebody who is there: where none is, each member says who must come."""

from __future__ import annotations

from peers.situation import Situation
from swarm.ids import PeerId
from swarm.optimization.acceptor import has_majority
from swarm.optimization.awaited import awaited_holders
from swarm.optimization.member import Member
from swarm.optimization.records import voters
from swarm.pipeline.health import Watch


class Vacancy:
    """One member's view, judged anew whenever somebody is gone or back, and with every decision.

    Only for people: the step's leader decides what is done about it (``optimization.rescuing``), and says so itself,
    for it has asked whether copies are there. ``me`` is this peer, ``copies`` the manifest's.
    """

    def __init__(self, watch: Watch, member: Member, situation: Situation, me: PeerId, copies: int) -> None:
        self._watch, self._member, self._situation = watch, member, situation
        self._me, self._copies = me, copies
        self._said = ""

    async def run(self) -> None:
        """Judge until cancelled."""
        while True:
            self.look()
            await self._watch.changed()

    def look(self) -> None:
        """Judge once, and say what has changed."""
        awaited = self._awaited()
        # What somebody else has this peer wait for meanwhile is not ours to take back.
        if awaited or (self._said and self._situation.waiting_for == self._said):
            self._situation.wait_for(awaited)
        self._said = awaited

    def _awaited(self) -> str:
        member, gone = self._member, self._watch.gone
        if member.head is None or not member.is_member or member.over or member.leader == self._me:
            return ""
        if not has_majority(voters(member.roster, member.head.hash()), gone):
            return ""  # who is cut off judges nobody
        return awaited_holders(member.roster, gone, self._copies)
