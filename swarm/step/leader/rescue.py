"""Rescue a part that has lost its last replica, as the leader of a step: see :mod:`swarm.step.member.rescue`.

Where somebody keeps a copy of it, the step is given up and the run goes on from the state before it. Where nobody does,
the run goes back to the newest checkpoint of which every part is at a peer that is there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.consensus.admissions import Admissions
from swarm.consensus.changes import Admission, Changes, PersonsWord, Reassign
from swarm.consensus.copies import copy_holders, to_spare
from swarm.consensus.majority import majority
from swarm.consensus.proof import Proof, proven_among
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import NO_PARTS, Roster, lost_parts, needed
from swarm.errors import Advice, Busy, Ending, PeerError, Refused, RunEnded, Superseded, Violation
from swarm.events import MoveDeclined
from swarm.ids import ENDS, PartName, PeerId
from swarm.step.blocked import awaited_holders, awaited_return
from swarm.step.calls import StepCalls, fell_silent
from swarm.step.context import CloseContext
from swarm.step.decisions import Disagreement, given_up, gone_back
from swarm.step.leader.batch import BatchCollection
from swarm.step.leader.book import StepBook
from swarm.step.leader.exclusion import ExclusionPolicy
from swarm.step.member.rescue import (
    CONSENT,
    JUDGE,
    Consent,
    ConsentRequest,
    Judgement,
    JudgeRequest,
    choose,
)
from swarm.step.messages import Propose
from swarm.step.observe_messages import STANDING, StandingRequest
from swarm.step.results import Asked, ResultSigning
from swarm.step.ties import TIED, TieEvidence
from swarm.step.turnout import REASON_CHARS
from swarm.waiting import ExponentialBackoff, first_done

AGAIN_S = 1.0
"""How often those who hold copies are asked while nobody can take the part over."""
SILENT_PART_S = 300.0
"""How long a part of which nobody keeps a copy is waited for when one of its replicas has only fallen silent: links are
mended in minutes rather than in seconds, and steps that are repeated cost as much as they did."""
LOOK_FOR_S = 5.0
"""How often it is looked which checkpoints there are: each peer lists its disk for it."""
MAX_SPARE = 4
"""How many are asked at a time to move to a part whose copies are with peers that cannot."""
PRESENT_S = 2.0
"""How long a peer that asked to join has to answer, before it is counted on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Offers:
    """Of each lost part what those say who hold a copy; whether somebody who keeps one of them gave no answer yet."""

    said: dict[str, list[Consent]]
    unsure: bool


class Rescuing:
    """What the leader of a term does when parts have lost their last replica."""

    def __init__(
        self, context: CloseContext, book: StepBook, term: int, policy: ExclusionPolicy, batch: BatchCollection
    ) -> None:
        self._context, self._book, self._term, self._policy, self._batch = context, book, term, policy, batch
        self._roster = book.roster
        self._found: Proof | str = ""
        self._wanted: PersonsWord | None = None
        self._looked, self._asked = -math.inf, set[str]()
        self._in_the_way, self._asked_for = "", False
        self._ties = TieEvidence(ResultSigning(context.rules.run, book.step, book.now.previous), context.verify)

    @property
    def _lost(self) -> dict[PeerId, str]:
        """Return who counts as lost by now."""
        return self._policy.lost(self._context.liveness.gone)

    def check_lost(self) -> None:
        """Raises Superseded when somebody is back, and nobody need give the step up: in another term."""
        if not lost_parts(self._roster, self._lost):
            raise Superseded("a replica came back before the step was given up")

    async def break_tie(self, found: Disagreement, asked: Asked, signed: Mapping[PeerId, bytes]) -> list[PeerId]:
        """Have a part count as lost whose replicas are tied for the second time, where others keep a copy of it, having
        told the members, who judge for themselves. Returns replicas that did not sign, beside others that did: they
        are to be left out."""
        unsigned = self._ties.unsigned(found, asked, signed)
        if unsigned:
            return unsigned if len(unsigned) < len(found.digests) else []
        tied, lost = self._ties.second(self._term, found, asked, signed), self._lost
        holders = copy_holders(self._roster, found.part, self._context.copies)
        if tied is not None and found.part != ENDS and any(peer not in lost for peer in holders):
            there = [peer for peer in self._roster.peers if peer not in lost]
            await self._batch.calls.gather(there, TIED, tied, timeout_s=self._context.timeout_s())
            self._policy.tie(found.digests, str(found)[:REASON_CHARS])
        return []

    async def run(self) -> Propose | None:
        """The record that gives the step up, once every part is held again, or with which the run goes back; None when
        every part is held because somebody came back, and when no majority is left, which could judge that.

        Raises RunEnded, which the others are told, when all others were asked to leave, and when nobody came for as
        long as the manifest says; Superseded and WrongStep as they come. Waits, and says so. Cancel freely.
        """
        context = self._context
        if self._book.lost_since is None:
            self._book.lost_since = context.clock.monotonic()
        began = self._book.lost_since
        try:
            while (lost := lost_parts(self._roster, self._lost)) and await self._batch.can_decide():
                waited_s = context.clock.monotonic() - began
                offers = await self._offers(lost)
                if all(offers.said.values()):
                    self._in_the_way = "nobody else feeds the run" if not offers.said else self._in_the_way
                    proposal = await self._proposal(offers.said)
                else:
                    proposal = await self._going_back(lost, offers, waited_s)
                if proposal is not None:
                    return proposal
                await self._wait(lost, offers, context.clock.monotonic() - began)
            if not lost:
                self._book.lost_since = None
            return None
        finally:
            context.waiting("")

    async def _offers(self, lost: Sequence[str]) -> _Offers:
        """Return what those say who hold a copy: who lies about its copy has none for us."""
        offers, unsure = dict[str, list[Consent]](), False
        for part in lost:
            if part in NO_PARTS or part in self._roster.owners:
                continue
            holders = copy_holders(self._roster, PartName(part), self._context.copies)
            if part in self._context.rules.frozen:
                holders = self._roster.peers
            there = [peer for peer in holders if peer not in self._lost]
            answers = await asyncio.gather(*(self._ask(peer, part) for peer in there))
            offers[part] = [answer for answer in answers if isinstance(answer, Consent)]
            told = all(isinstance(answer, (Consent, Refused, Violation)) for answer in answers)
            unsure = unsure or not told
            able = any(one.reassign is not None for one in offers[part])
            if offers[part] and not able:  # who keeps it cannot be spared: who can gets it from there
                spare = to_spare(self._roster, self._lost, part)[:MAX_SPARE]
                answers = await asyncio.gather(*(self._ask(peer, part, fetches=True) for peer in spare))
                offers[part] += [answer for answer in answers if isinstance(answer, Consent)]
                able = any(one.reassign is not None for one in offers[part])
            if not able and not any(isinstance(one, Busy) for one in answers):
                self._policy.untie(PartName(part))  # nobody can take it over, but its replicas are there: asked again
        return _Offers(offers, unsure)

    def _may_come_back(self, part: str, anew: Collection[str] = ()) -> bool:
        """Return whether a replica may be cut off only, and come back as it was; not one that was started ``anew``."""
        tied, liveness = self._policy.lost({}), self._context.liveness
        silent = (peer for peer in needed(self._roster, [part]) if peer not in tied and peer not in anew)
        return any(fell_silent(liveness, peer) for peer in silent)

    async def _ask(self, peer: PeerId, part: str, *, fetches: bool = False) -> Consent | PeerError:
        body = ConsentRequest(step=self._book.step, term=self._term, part=part, fetches=fetches)
        try:
            said = await self._batch.calls.ask(peer, CONSENT, body, timeout_s=self._context.timeout_s())
            if said.reassign is not None:
                self._book.requests.check_reassign(peer, part, said.reassign)
            return said
        except PeerError as error:
            logger.info("step %d: %s", self._book.step, error)
            return error

    async def _given_up_for_good(self, lost: Sequence[str], offers: _Offers, waited_s: float) -> list[str]:
        """Return the lost parts that nobody will hold again: all others were asked to leave, none of them can take it
        over, nobody who asked to join is there, and nobody is expected back, or has been for long enough."""
        requests = self._book.requests
        if offers.unsure or not requests.all_want_the_end(self._lost):
            return []
        if await self._present(requests.joining(self._lost)) or not requests.all_want_the_end(self._lost):
            return []
        gone = self._lost
        moves = choose(self._roster, gone, {part: _of_those_there(said, gone) for part, said in offers.said.items()})
        stuck = [part for part in lost if part not in {move.part for move in moves}]
        return [part for part in stuck if waited_s >= SILENT_PART_S or not self._may_come_back(part)]

    async def _end(self, part: str, why: str) -> None:
        await self._batch.end(part, lambda: self._lost, why)

    async def _proposal(self, offers: Mapping[str, Sequence[Consent]]) -> Propose | None:
        joins = await self._present(self._book.requests.joining(self._lost))
        granted = self._granted(joins, offers)
        if granted is None:
            return None
        changes, roster, said = granted
        history, rules = self._context.history, self._context.rules
        record = given_up(history.head, history.head_hash, self._term, roster, changes, rules.max_members)
        return self._proposed(record, changes, said)

    def _granted(
        self, joins: Sequence[Admission], offers: Mapping[str, Sequence[Consent]]
    ) -> tuple[Changes, Roster, Admissions | None] | None:
        """The changes with which every part is held again, the roster that they give, and what the record says of
        admission then; None while there are none."""
        # Beside members others may be believed gone; and who is may have come back meanwhile.
        gone = {peer: why for peer, why in self._lost.items() if peer in self._roster}
        if not lost_parts(self._roster, gone):
            return None
        offered = {part: _of_those_there(said, gone) for part, said in offers.items()}
        try:
            changes, roster = self._book.requests.give_up(choose(self._roster, gone, offered), joins, gone)
            changes, said = self._book.requests.admitted(changes, roster)
        except (Refused, Violation) as refused:
            logger.info("step %d is not given up yet: %s", self._book.step, refused.reason)
            return None
        return changes, roster, said

    def _proposed(self, record: CloseRecord, changes: Changes, said: Admissions | None) -> Propose:
        if said is not None:
            record = record.model_copy(update={"admissions": said})
        return Propose(record=record, changes=changes, term=self._term)

    # --- nobody keeps a copy -------------------------------------------------------------------------------------

    async def _going_back(self, lost: Sequence[str], offers: _Offers, waited_s: float) -> Propose | None:
        """The record with which the run goes back to a checkpoint, once somebody asks to hold each lost part, and none
        of its replicas may still come back as it was; None until then, with what is in the way noted."""
        context, head = self._context, self._context.history.head
        asking = self._book.requests.joining(self._lost)
        if context.rules.rewind == "never" or head.provisional:
            self._in_the_way = "the run goes back to no checkpoint, as its manifest says"
            if head.provisional:
                self._in_the_way = "what was closed without a majority goes back to no checkpoint"
            return None
        anew = {join.member.peer for join in asking}
        if waited_s - self._looked >= LOOK_FOR_S or not anew <= self._asked:
            there = [peer for peer in self._roster.peers if peer not in self._lost]
            self._found = await context.checkpoint([*there, *(PeerId(join.member.peer) for join in asking)])
            self._looked, self._asked = waited_s, anew
        bare = [part for part in lost if part not in NO_PARTS and not offers.said.get(part)]
        granted = self._granted(await self._present(asking), offers.said)
        self._asked_for = granted is not None
        if isinstance(proof := self._found, str):
            self._in_the_way = proof
        elif offers.unsure or (waited_s < SILENT_PART_S and any(self._may_come_back(one, anew) for one in bare)):
            self._in_the_way = f"else the run goes back to step {proof.record.step}, once nobody is expected back"
            self._in_the_way += f" and that is wanted: {Advice.SAY_SO}" if context.rules.rewind == "ask" else ""
        elif granted is None:
            self._in_the_way = f"the run then goes back to step {proof.record.step}"
            self._in_the_way += f" once that is wanted: {Advice.SAY_SO}" if context.rules.rewind == "ask" else ""
        elif (said_no := await self._judged(proof, asking)) is not None:
            self._in_the_way = said_no
        else:
            changes, roster, said = granted
            most = context.rules.max_members
            try:
                record = gone_back(head, self._term, roster, changes.absent, most, proof.record)
            except Refused as refused:
                self._in_the_way = f"the run then goes back to step {proof.record.step}, but {refused.reason}"
                return None
            return self._proposed(record, changes.model_copy(update={"back": proof, "wanted": self._wanted}), said)
        return None

    async def _judged(self, proof: Proof, asking: Sequence[Admission]) -> str | None:
        """Return why those that vote would not accept that the run goes back to this record, or a person has to agree;
        None where nothing is in the way. Those that ask to join are asked for a person's word, too: they may be
        members."""
        there = [peer for peer in self._roster.peers if peer not in self._lost]
        there += [PeerId(join.member.peer) for join in asking if join.member.peer not in there]
        step, previous = proof.record.step, self._context.history.head_hash
        body = JudgeRequest(step=step, record=proof.record.hash(), previous=previous)
        answers = await asyncio.gather(*(self._judges(peer, body) for peer in there))
        said = {peer: answer for peer, answer in zip(there, answers, strict=True) if answer is not None}
        electors = self._batch.electors()
        known = sum(said[peer].known for peer in electors if peer in said)
        if not proven_among(proof, self._context.history.head.members) and known < majority(len(electors)):
            return f"too few of those that vote know that step {step} was so decided"
        if self._context.rules.rewind == "ask":
            words = (self._book.requests.checked(one.wanted, body.record) for one in said.values())
            self._wanted = next((word for word in words if word is not None), None)
            if self._wanted is None:
                return f"the run goes back to step {step} once that is wanted: {Advice.SAY_SO}"
        return None

    async def _judges(self, peer: PeerId, body: JudgeRequest) -> Judgement | None:
        """Return who was started anew is asked as well, under the name of a life that is gone."""
        try:
            return await self._context.calls.ask(peer, JUDGE, body, timeout_s=PRESENT_S)
        except PeerError:
            return None

    async def _present(self, joins: Sequence[Admission]) -> tuple[Admission, ...]:
        """Those that still answer: who is named in the record is counted on."""
        asking = (is_there(self._context.calls, PeerId(join.member.peer), PRESENT_S) for join in joins)
        answers = await asyncio.gather(*asking)
        return tuple(join for join, answered in zip(joins, answers, strict=True) if answered)

    async def _wait(self, lost: Sequence[str], offers: _Offers, waited_s: float) -> None:
        """A moment, for somebody to join or to come back. Raises RunEnded when nobody did for as long as the manifest
        says."""
        context, names = self._context, " and ".join(lost)
        for part in await self._given_up_for_good(lost, offers, waited_s):
            await self._end(part, "all others were asked to leave")
        if waited_s > context.rules.wait_for_lost_s:
            for part in lost:
                await self._end(part, f"nobody took it over for {waited_s:.0f} s")
            raise RunEnded(
                f"nobody is left of {names}, and nobody joined for {waited_s:.0f} s",
                Ending.UNREACHABLE,
                check=Advice.WHAT_IS_KEPT,
                remedy=Advice.RESUME,
            )
        kept = [part for part, said in offers.said.items() if said]
        how, gone = context.rules.how_to_join, self._lost
        awaited = awaited_holders(self._roster, gone, context.copies, kept, how)
        if self._asked_for:  # nobody else need be started
            awaited = f"{names}, of which nobody keeps a copy: somebody asks to hold it again"
        if any(part not in NO_PARTS and part not in kept for part in lost):
            until = context.clock.wall() + context.rules.wait_for_lost_s - waited_s
            awaited = f"{awaited}; {awaited_return(self._in_the_way, until)}"
        context.waiting(awaited)
        await first_done(context.clock.sleep(AGAIN_S), context.liveness.changed())


def _of_those_there(said: Sequence[Consent], gone: Collection[str]) -> list[Reassign]:
    return [one.reassign for one in said if one.reassign is not None and one.reassign.peer not in gone]


# --- would those who are to move, move? ------------------------------------------------------------------------------


@contextmanager
def moving(
    context: CloseContext, book: StepBook, term: int, movers: Mapping[PeerId, PartName]
) -> Iterator[Sequence[Reassign]]:
    """What those of ``movers`` say that would hold the part: what is returned grows while the body runs. Nobody waits
    for it: who has not said so when the step is proposed stays. Leaves no task behind that goes on asking."""
    said: list[Reassign] = []

    async def ask(peer: PeerId, part: PartName) -> None:
        body, patience = ConsentRequest(step=book.step, term=term, part=part), ExponentialBackoff(0.1)
        try:
            while True:
                try:
                    move = (await context.calls.ask(peer, CONSENT, body, timeout_s=context.timeout_s())).reassign
                    break
                except Busy:  # its copy has yet to take the update of the step before
                    await context.clock.sleep(patience.pause_s())
            if move is not None:
                book.requests.check_reassign(peer, part, move)
                said.append(move)
        except PeerError as error:
            why = error.reason[:REASON_CHARS]
            context.events.emit(MoveDeclined(step=book.step, peer=peer, part=part, reason=why))

    asking = [asyncio.create_task(ask(peer, part)) for peer, part in movers.items()]
    try:
        yield said
    finally:
        for task in asking:
            task.cancel()


# --- are those who asked to join still there when the step closes? ---------------------------------------------------
# A peer that is named in a record is counted on. Nobody waits for the answer. It has the time that the members take to
# average; who asked before that and has not answered after it is not named in this record, and may ask again.


JOINER_PRESENT_S = 10.0


@contextmanager
def absent(calls: StepCalls, asked: Iterable[PeerId]) -> Iterator[set[PeerId]]:
    """Those of ``asked`` that have not answered so far: the set shrinks while the body runs. Leaves no task behind that
    goes on asking."""
    missing = set(asked)

    async def ask(peer: PeerId) -> None:
        if await is_there(calls, peer, JOINER_PRESENT_S):
            missing.discard(peer)

    asking = [asyncio.create_task(ask(peer)) for peer in missing]
    try:
        yield missing
    finally:
        for task in asking:
            task.cancel()


async def is_there(calls: StepCalls, peer: PeerId, timeout_s: float) -> bool:
    """Return whether a peer answers the simplest question in time. Raises no PeerError."""
    try:
        await calls.ask(peer, STANDING, StandingRequest(), timeout_s=timeout_s)
    except PeerError:
        return False
    return True
