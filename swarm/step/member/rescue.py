"""All that hold a part of the model are lost: the step is given up, and who holds a copy of the part takes it over.

    every replica of stage-1 is lost     nothing of the step can be finished: what it computed is dropped everywhere
    others hold copies of it             one that can be spared moves to stage-1
    those that do cannot be spared       another that can moves there, or a peer joins, and gets it from them
    the void record                      weights and cursors as they were, and a roster in which every part is held

So no more is lost than the open step, and its microbatches are fed again. Where nobody holds a copy, the run goes back
to a checkpoint, once a person agrees if the manifest asks for that, whose signed word every member that votes checks.
Who holds copies: ``swarm.consensus.copies``; the leader's side: ``swarm.step.leader.rescue``.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from swarm.consensus.changes import PersonsWord, Reassign, reassign_bytes, wanted_bytes
from swarm.consensus.history import History
from swarm.consensus.records import NO_RECORD
from swarm.consensus.roster import Roster, lost_parts
from swarm.errors import Busy, Refused
from swarm.ids import ENDS, PartName, PeerId, RunId
from swarm.network.protocols import AnyMethod, Rpc
from swarm.schema import Count, DigestField, Message, PartField
from swarm.step.member.member_service import MemberService


class ConsentRequest(Message):
    """Every replica of this part is lost, or the record before the step moves you to it. Do you hold its state after
    the step before, and would you take it over? ``fetches``: those that hold it cannot; would you, and get it from
    them?"""

    step: Count
    term: Count
    part: PartField
    fetches: Annotated[bool, Field(exclude_if=operator.not_)] = False


class Consent(Message):
    """Say that the copy is there. ``reassign`` is None for a peer that cannot leave what it does, and gives the copy
    to others."""

    reassign: Reassign | None


class JudgeRequest(Message):
    """Do you know this record, of a step to which the run may go back from the record with the hash ``previous``, and
    has a person where you are said that it may?"""

    step: Count
    record: DigestField
    previous: DigestField


class Judgement(Message):
    """Whether the record is known, and the word of a person who agrees; None where nobody has said so."""

    known: bool
    wanted: PersonsWord | None = None


JUDGE = Rpc("rescue/1/judge", JudgeRequest, Judgement)
CONSENT = Rpc("rescue/1/consent", ConsentRequest, Consent)


# --- who holds a copy ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueService:
    """The ``rescue/1`` service. ``holds`` says whether a copy of a part is here, just as it was after a step; ``takes``
    whether it is just being brought there. ``stays`` is why this peer will not move where others hold the part, too; ""
    when it will. ``knows`` says whether the record of a step, by its hash, was decided here or lies with a checkpoint
    here, ``agreed`` whether a person here wants the run to go back to one."""

    run: RunId
    me: PeerId
    member: MemberService
    history: History
    sign: Callable[[bytes], bytes]
    holds: Callable[[PartName, int], bool]
    takes: Callable[[PartName, int], bool]
    gone: Callable[[], Collection[PeerId]]
    stays: Callable[[PartName], Awaitable[str]]
    knows: Callable[[int, str], Awaitable[bool]]
    agreed: Callable[[], bool] = lambda: False

    def methods(self) -> list[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [CONSENT.handled(self._on_consent), JUDGE.handled(self._on_judge)]

    async def _on_judge(self, caller: PeerId, body: JudgeRequest) -> Judgement:
        known, wanted = await self.knows(body.step, body.record), None
        here = self.history.head_hash in (NO_RECORD, body.previous)  # who was started anew knows no newest record
        if self.agreed() and known and here:
            signature = self.sign(wanted_bytes(self.run, body.previous, body.record))
            wanted = PersonsWord(peer=self.me, signature=signature)
        return Judgement(known=known, wanted=wanted)

    async def _on_consent(self, caller: PeerId, body: ConsentRequest) -> Consent:
        await self.member.from_leader(caller, body.step, body.term)
        roster, part = self.member.position.roster, PartName(body.part)
        planned = part not in lost_parts(roster, self.gone())
        if planned and not self.member.position.rules.moves.on:
            raise Busy(f"a replica of {part} is there, as far as is known here")
        if (planned or body.fetches) and (why := await self.stays(part)):
            raise Refused(why)
        if body.fetches and not planned:
            return Consent(reassign=self._reassign(roster, part, body.step))
        if not self.holds(part, body.step - 1):  # asked last: the step may close, or the copy go, while one waits
            if self.takes(part, body.step - 1):
                raise Busy(f"the copy of {part} here is just taking the update of step {body.step - 1}")
            raise Refused(f"there is no copy of {part} after step {body.step - 1} here")
        return Consent(reassign=self._reassign(roster, part, body.step))

    def _reassign(self, roster: Roster, part: PartName, step: int) -> Reassign | None:
        own = roster[self.me]
        if own.role != "stage" or part == ENDS:
            return None
        signature = self.sign(reassign_bytes(self.run, step, self.history.head_hash, self.me, part))
        return Reassign(step=step, peer=self.me, part=part, signature=signature)


# --- who leads -------------------------------------------------------------------------------------------------------


def choose(roster: Roster, gone: Collection[str], offers: Mapping[str, Sequence[Reassign]]) -> tuple[Reassign, ...]:
    """Return who moves to which lost part: those whose own part keeps the most replicas, and at least one. A part that
    nobody can move to is left out. Pure."""
    left = Counter(member.part for member in roster.members if member.peer not in gone)
    chosen: dict[str, Reassign] = {}
    for part in sorted(offers):
        able = [one for one in offers[part] if one.peer not in chosen and left[roster[one.peer].part] > 1]
        if able:
            best = min(able, key=lambda one: (-left[roster[one.peer].part], one.peer))
            chosen[best.peer] = best
            left[roster[best.peer].part] -= 1
    return tuple(chosen[peer] for peer in sorted(chosen))
