"""Have hops of a trainer's journeys computed again by other replicas of their stage, before anything is told of them.

Which hops is drawn in secret; who judges is not the trainer's choice, nor that of who did it. One that finds a hop
right is enough; where one finds it wrong all that judge it are asked.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from swarm.clock import Clock
from swarm.columns import standing_at
from swarm.errors import DeadlineMissed, PeerError, Unreachable, Violation
from swarm.events import AuditOutcome
from swarm.ids import JourneyKey, PeerId, RunId
from swarm.network.protocols import Endpoint
from swarm.pipeline.activity import AuditCounts
from swarm.pipeline.messages import AUDIT, Audit, Audited, Verdict
from swarm.pipeline.seals import Check
from swarm.pipeline.trainer.hops import Receipt
from swarm.security.signing import audit_bytes
from swarm.security.statements import AuditStatement, found_wrong
from swarm.waiting import retry_while_busy

NEWCOMER_SHARE, STANDING = 0.25, 8
"""Drawn of the hops of a replica of which the trainer had none found right, and with how many it is drawn no more often
than must be."""
PATIENCE, AT_LEAST_S, SILENT_S = 8.0, 5.0, 300.0
"""A judge has so many times as long as the others took, and seconds more; who misses that is not asked for so long."""
LOSS_TOLERANCE = 2e-2
"""How far a reported loss may be from what another computes, relative to it: what is shown depends on it alone."""


class HopClaim(NamedTuple):
    """What a replica signed that it did: the stage ``hop`` of a journey along a route."""

    key: JourneyKey
    route: tuple[PeerId, ...]
    hop: int
    receipt: Receipt

    @property
    def accused(self) -> PeerId:
        """Return whose it is."""
        return standing_at(self.route, self.hop, self.key.microbatch.trainer)


@dataclass(frozen=True, slots=True)
class HopOutcome:
    """What came of an audit. ``proof`` is what the step's leader is to be shown: enough of those that judge the hop
    agree against one. Else, where it does not count: who is ``against`` it."""

    claim: HopClaim
    outcome: AuditOutcome
    reason: str = ""
    by: tuple[PeerId, ...] = ()
    proof: tuple[AuditStatement, ...] = ()
    against: tuple[PeerId, ...] = ()

    @property
    def counts(self) -> bool:
        """Return whether the hop counts."""
        return self.outcome in ("passed", "unjudged")


def share_of(least: float, checked: int) -> float:
    """Return the share that is drawn of the hops of a replica of which so many were found right: with each a little
    less, from NEWCOMER_SHARE to ``least``, which is drawn of all."""
    return least + max(0.0, NEWCOMER_SHARE - least) * max(0, STANDING - checked) / STANDING


@dataclass(slots=True, kw_only=True)
class Audits:
    """One trainer's audits, of a ``share`` of hops. ``judges`` are who may compute again what a peer did in a stage;
    those are passed over that are believed to be ``gone``. ``chance`` draws from 0 to 1 what is audited and who is
    asked first, and nobody else may know what; ``counts`` what came of them. ``checked`` is how many hops of each
    replica were found right since one last did not count: the trainer's own count, so no other's word makes a replica
    known to it. Only those with which the run began are ``known`` without, each until a hop of it does not count: else
    most of a run's first steps would be computed twice."""

    run: RunId
    endpoint: Endpoint
    clock: Clock
    verify: Check
    judges: Callable[[JourneyKey, int, PeerId], Sequence[PeerId]]
    share: float
    gone: Callable[[], Collection[PeerId]] = tuple
    chance: Callable[[], float] = random.SystemRandom().random
    within_s: float = 30.0
    counts: Counter[AuditOutcome] = field(default_factory=Counter)
    checked: Counter[PeerId] = field(default_factory=Counter)
    known: set[PeerId] = field(default_factory=set)
    _wrong: dict[PeerId, int] = field(default_factory=dict)  # in which step; that is closed without them
    _took: dict[PeerId, float] = field(default_factory=dict)  # seconds, to answer last
    _silent: dict[PeerId, float] = field(default_factory=dict)  # until when nobody waits for their word

    @property
    def counted(self) -> AuditCounts:
        """Return how many there were, by what came of them."""
        doubtful = self.counts["disputed"] + self.counts["withheld"]
        return AuditCounts(self.counts.total(), self.counts["failed"], doubtful, self.counts["unjudged"])

    def draws(self, peer: PeerId) -> bool:
        """Draw whether what a replica did is to be computed again."""
        return self.chance() < share_of(self.share, STANDING if peer in self.known else self.checked[peer])

    async def judge(self, claim: HopClaim) -> HopOutcome:
        """Have a claim judged. Takes as long as those asked may take, one after the other; who is asked and does not
        answer in time is passed over. Raises nothing."""
        found = await self._judged(claim)
        self.counts[found.outcome] += 1
        if found.outcome == "failed":
            self._wrong[claim.accused] = claim.key.step
        if found.outcome == "passed":
            self.checked[claim.accused] += 1
        elif not found.counts:
            self.checked[claim.accused] = 0
            self.known.discard(claim.accused)
        return found

    async def _judged(self, claim: HopClaim) -> HopOutcome:
        out, judging = self._passed_over(claim.key.step), self.judges(claim.key, claim.hop, claim.accused)
        # Who did it knows who judges: not who is the first, and might be its friend.
        asked = sorted((peer for peer in judging if peer not in out), key=lambda _: self.chance())
        other_loss, withheld, unjudged = dict[PeerId, str](), dict[PeerId, str](), list[str]()
        for at, peer in enumerate(asked):
            verdict, said = await self._ask(peer, claim)
            if verdict == "right":
                if not (why := _other_loss(claim.receipt, said)):
                    return HopOutcome(claim, "passed", by=(peer,))
                other_loss[peer] = f"{why} as {peer} computes it"  # nobody signs that: one alone may make it up
            elif verdict == "wrong":
                return await self._all(claim, peer, said, judging, asked[at + 1 :])
            elif verdict == "withheld":
                withheld[peer] = said.reason
            else:
                unjudged.append(f"{peer}: {said.reason}")
        doubts: tuple[tuple[AuditOutcome, dict[PeerId, str]], ...] = ("disputed", other_loss), ("withheld", withheld)
        for outcome, why_by in doubts:
            if by := tuple(why_by):
                return HopOutcome(claim, outcome, why_by[by[0]], by, against=by)
        return HopOutcome(
            claim, "unjudged", "; ".join(unjudged)[:400] or "the stage has no other replica that is there"
        )

    def _passed_over(self, step: int) -> set[PeerId]:
        """Return whose word does not count in a step, or is not waited for."""
        now = self.clock.monotonic()
        silent = {peer for peer, until in self._silent.items() if until > now}
        return {*silent, *(peer for peer, found in self._wrong.items() if found == step), *self.gone()}

    def _patience_s(self, peer: PeerId) -> float:
        """Return for how long to wait for a judge: by how long the others took, not by its own word."""
        others = [took for other, took in self._took.items() if other != peer]
        return min(self.within_s, AT_LEAST_S + PATIENCE * median_low(others)) if others else self.within_s

    async def _all(
        self, claim: HopClaim, first: PeerId, said: Audited, judges: Sequence[PeerId], others: Sequence[PeerId]
    ) -> HopOutcome:
        """One says that it is wrong: ask the others that judge it."""
        answers = await asyncio.gather(*(self._ask(peer, claim) for peer in others))
        said_by = [(first, "wrong", said), *((peer, *answer) for peer, answer in zip(others, answers, strict=True))]
        found = tuple(
            AuditStatement(auditor=peer, wrong=verdict == "wrong", signature=one.signature)
            for peer, verdict, one in said_by
            if verdict in ("right", "wrong")
        )
        by = tuple(PeerId(one.auditor) for one in found)
        against = tuple(PeerId(one.auditor) for one in found if one.wrong)
        wrong = found_wrong(len(against), len(by) - len(against), len(judges))
        if wrong is None:
            why = f"{len(against)} of {len(judges)} say: {said.reason}"
            return HopOutcome(claim, "disputed", why, by, against=against)
        if wrong:
            return HopOutcome(claim, "failed", said.reason, by, found)
        return HopOutcome(claim, "passed", f"all but {', '.join(sorted(against))} find it right", by, found)

    async def _ask(self, peer: PeerId, claim: HopClaim) -> tuple[Verdict, Audited]:
        receipt = claim.receipt
        body = Audit(
            **claim.key._asdict(),
            route=claim.route,
            hop=claim.hop,
            content=receipt.content.to_wire(),
            seals=receipt.seals,
            receipt=receipt.signature,
            tokens=receipt.tokens,
        )

        within_s = self._patience_s(peer)

        async def call() -> Audited:
            began = self.clock.monotonic()
            said, _ = await self.endpoint.call(peer, AUDIT, body, timeout_s=within_s)
            self._took[peer] = self.clock.monotonic() - began
            self._check(peer, claim, said)
            return said

        try:
            said = await retry_while_busy(call, self.clock, within_s=within_s)
        except PeerError as error:
            if isinstance(error, (DeadlineMissed, Unreachable)):
                self._silent[peer] = self.clock.monotonic() + SILENT_S
            said = Audited(verdict="unjudged", reason=str(error)[:400])
        return said.verdict, said

    def _check(self, peer: PeerId, claim: HopClaim, said: Audited) -> None:
        """Raises Violation where nobody else could be shown what was said."""
        if said.verdict not in ("right", "wrong"):
            return
        wrong = said.verdict == "wrong"
        signed = audit_bytes(self.run, claim.key, claim.hop, claim.accused, claim.receipt.signature, wrong)
        if not self.verify(peer, signed, said.signature):
            raise Violation("its verdict is not signed", peer=peer)


def _other_loss(receipt: Receipt, said: Audited) -> str:
    """Say what a hop's loss is and what a judge has; "" where that is the same, or the hop computes none."""
    told = receipt.loss_sum
    far = receipt.tokens and abs(said.loss_sum - told) > LOSS_TOLERANCE * max(abs(told), said.loss_sum)
    return f"a loss of {told:g}, {said.loss_sum:g}" if far else ""
