"""A member that leads terms only to have records accepted that it made up itself.

inventor = Inventor(membership._run)
await inventor.strike()  # in the open step
assert not any(said["Accepted"] for said in inventor.verdicts.values())
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from swarm.consensus.acceptor import RecordEvidence, SignedPromise, promise_bytes
from swarm.consensus.changes import ChangeRules, Changes, OpenStepFacts, Reassign, reassign_bytes, with_work
from swarm.consensus.majority import majority
from swarm.consensus.proof import Proof
from swarm.consensus.records import voters
from swarm.consensus.roster import Roster, own_term
from swarm.errors import PeerError
from swarm.ids import ENDS, PartName, PeerId
from swarm.membership.run import RunContext
from swarm.security.signing import verify
from swarm.step.decisions import ATTEMPTS_PER_TERM, given_up, gone_back
from swarm.step.messages import PREPARE, PROPOSE, Prepare, Promise, Propose
from swarm.step.observe_messages import NEXT, Decided, NextRequest
from swarm.step.results import ResultSigning, record_inputs

Verdicts = dict[tuple[str, str], Counter[str]]
"""What members said of made-up records, by what was wrong with them and whether an earlier term was claimed."""


class Inventor:
    """A member of a run that leads terms only to have records accepted that it made up itself."""

    FIRST_STEP: ClassVar[int] = 4
    """Before it there are too few records that could be gone back to."""

    def __init__(self, run: RunContext) -> None:
        self.me, self._contact = run.around.endpoint.peer, run.founder
        self._at, self._calls = run.position, run.calls
        self._proof: Proof | None = None
        self._sign = run.around.identity.sign
        self.made: set[str] = set()
        self.verdicts: Verdicts = defaultdict(Counter)

    @property
    def step(self) -> int:
        """Return the open step."""
        return self._at.open_step

    async def wait(self, step: int) -> None:
        """Return when this step, or a later one, is open, and we know what the others do."""
        await self._at.news.wait(lambda: self._at.open_step >= step and not self._at.cut_off)

    async def strike(self) -> None:
        """Take the next term of the open step that is ours, and propose each kind of record to all, as one of this term
        and as one of an earlier one."""
        at = self._at
        roster, step = at.roster, at.open_step
        term = own_term(roster, step, self.me, max(at.term, 1))
        told = {peer: await self._ask(peer, PREPARE, Prepare(step=step, term=term)) for peer in roster.peers}
        before, earlier = [
            await self._ask(self._contact, NEXT, NextRequest(part=None, step=step - back)) for back in (3, 2)
        ]
        if isinstance(before, Decided) and isinstance(earlier, Decided):
            self._proof = Proof.of(earlier.decision(), before.record)
        promises = {peer: one.shown for peer, one in told.items() if isinstance(one, Promise)}
        for kind, make in self._kinds().items():
            for claimed in (term, term - 1, 0):
                proposal = self._with_promises(make(claimed).model_copy(update={"term": term}), promises)
                self.made.add(proposal.record.hash())
                said = await asyncio.gather(
                    *(self._ask(peer, PROPOSE, proposal) for peer in roster.peers if peer != self.me)
                )
                when = "this term" if claimed == term else "an earlier term"
                self.verdicts[kind, when].update(type(one).__name__ for one in said)

    def _kinds(self) -> dict[str, Callable[[int], Propose]]:
        proof = self._proof
        back = {} if proof is None else {"goes back": lambda term: self._goes_back(term, proof)}
        return {
            "numbers": self._numbers,
            "evicts": lambda term: self._numbers(term, absent=self._others(2)),
            "forks": lambda term: self._numbers(term, absent=self._others(4), lineage=self._at.open_step),
            "gives up": self._gives_up,
            **back,
            "ends": lambda term: self._numbers(term, ended=True),
        }

    def _numbers(self, term: int, absent: tuple[str, ...] = (), **more: Any) -> Propose:
        """Return a record like the one before, with digests that nobody has, and our signature under our own."""
        at, head = self._at, self._at.history.head
        roster, step = at.roster, at.open_step
        route = tuple(replicas[0] for replicas in roster.columns(out=absent))
        committed = tuple(one.model_copy(update={"route": route, "loss_sum": 0.0}) for one in head.committed)
        changes, rules = Changes(absent=absent), ChangeRules(at.rules.roster, verify)
        workers = {one.microbatch.trainer for one in committed}
        following = rules.apply(OpenStepFacts(step, roster, at.history.head_hash), changes)
        digests = {part: hashlib.sha256(f"{part}{len(self.made)}".encode()).hexdigest() for part in head.digests}
        record = head.model_copy(
            update={
                **{"step": step, "term": term, "previous": at.history.head_hash, "committed": committed},
                **{"loss_sum": 0.0, "lr": at.rules.lr(step), "digests": digests, "absent": absent},
                **{"roster": with_work(following, step, workers).members, **more},
            }
        )
        signing, attempt = ResultSigning(at.rules.run, step, at.history.head_hash), term * ATTEMPTS_PER_TERM + 1
        part = str(roster[self.me].part)
        ours = self._sign(signing.data(part, attempt, "weights", record_inputs(roster, record), record.digests[part]))
        told = RecordEvidence(
            rows=dict.fromkeys(workers, ours),
            results=dict.fromkeys(roster.peers, ours),
            attempts=dict.fromkeys(roster.parts, attempt),
        )
        return Propose(record=record, changes=changes, evidence=told)

    def _gives_up(self, term: int) -> Propose:
        """Return one that calls all who hold another stage lost, which we take over."""
        at, (part, absent) = self._at, self._stage_of_others()
        signed = reassign_bytes(at.rules.run, at.open_step, at.history.head_hash, self.me, part)
        move = Reassign(step=at.open_step, peer=self.me, part=part, signature=self._sign(signed))
        changes = Changes(absent=absent, reassigns=(move,))
        now = OpenStepFacts(at.open_step, at.roster, at.history.head_hash)
        roster = ChangeRules(at.rules.roster, verify).give_up(now, changes)
        head, most = at.history.head, at.rules.max_members
        record = given_up(head, at.history.head_hash, term, roster, changes, most)
        return Propose(record=record, changes=changes)

    def _goes_back(self, term: int, proof: Proof) -> Propose:
        """Return one that goes back to a step that was really decided, for the same reason."""
        given, at = self._gives_up(term), self._at
        members = Roster(given.record.roster)
        record = gone_back(at.history.head, term, members, given.record.absent, at.rules.max_members, proof.record)
        return Propose(record=record, changes=given.changes.model_copy(update={"back": proof}))

    def _with_promises(self, proposal: Propose, promises: Mapping[PeerId, SignedPromise]) -> Propose:
        """Return it with as few promises of others as make a majority, and ours, which says that we accepted it."""
        at, step = self._at, proposal.record.decides
        electors = voters(at.roster, at.history.head_hash)
        accepted = (max(0, proposal.term - 1), proposal.record.hash())
        signed = promise_bytes((at.rules.run, step, at.history.head_hash), proposal.term, accepted, 0)
        lie = SignedPromise(accepted=accepted, free=0, signature=self._sign(signed))
        others = [peer for peer in electors if peer in promises and peer != self.me][: majority(len(electors)) - 1]
        return proposal.model_copy(update={"promises": {self.me: lie, **{peer: promises[peer] for peer in others}}})

    def _others(self, count: int) -> tuple[str, ...]:
        """Return members that are there, of whom each part keeps one."""
        roster, spared = self._at.roster, {self.me}
        spared |= {next(iter({self.me} & set(group)), group[0]) for group in map(roster.replicas, roster.parts)}
        return tuple([peer for peer in roster.peers if peer not in spared and roster[peer].part][:count])

    def _stage_of_others(self) -> tuple[PartName, tuple[str, ...]]:
        roster = self._at.roster
        part = next(one for one in roster.parts if one != ENDS and one != roster[self.me].part)
        return PartName(part), roster.replicas(PartName(part))

    async def _ask(self, peer: PeerId, rpc: Any, body: Any) -> Any:
        try:
            return await self._calls.ask(peer, rpc, body, timeout_s=20.0)
        except PeerError as error:
            return error
