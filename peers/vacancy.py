"""Whether every part of the model is held by somebody who is there: where none is, each member says who must come."""

from __future__ import annotations

from peers.roles import Surroundings
from peers.situation import Situation
from swarm.optimization.acceptor import has_majority
from swarm.optimization.awaited import awaited_holders
from swarm.optimization.member import Member
from swarm.optimization.records import voters


class Vacancy:
    """One member's view, judged anew whenever somebody is gone or back, and with every decision.

    Only for people: the step's leader decides what is done about it (``optimization.rescuing``), and says so itself,
    for it has asked whether copies are there.
    """

    def __init__(self, around: Surroundings, member: Member, situation: Situation) -> None:
        self._watch, self._member, self._situation = around.watch, member, situation
        self._me, self._copies, self._how = around.endpoint.peer, around.manifest.run.copies, around.how_to_join
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
        return awaited_holders(member.roster, gone, self._copies, how=self._how)
