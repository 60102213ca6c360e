"""What proves that a replica sent something else than its stage computes: its own receipt, and the signed words of the
other replicas of the stage, who computed it again. Pure.

Who checks is nobody's choice: all other replicas of the stage, or those that the record before draws where they are
many. Their word is about one hop of the open step. So nobody is called a liar by one other, nor by a leader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from swarm.consensus.roster import Roster
from swarm.errors import Refused, Violation
from swarm.ids import ATTEMPTS_OF_A_WAY, JourneyKey, PeerId, stage_part
from swarm.schema import AFTER_CHARS, AfterField, Count, Message, MicrobatchField, PeerIdField, SignatureField
from swarm.security.signing import audit_bytes, receipt_bytes

MAX_AUDITORS = 6
"""So many replicas judge one hop at most."""


class Statement(Message):
    """What one replica found that computed a hop again: ``wrong`` or not, signed (:func:`audit_bytes`)."""

    auditor: PeerIdField
    wrong: bool
    signature: SignatureField


class Fault(Message):
    """A hop of the open step that a replica, the ``accused``, signed for, and what others found that computed it again.

    The microbatch, and where it was, are named as in the pipeline's messages; ``hop`` is the stage. ``receipt`` is the
    accused's signature under what it ``told`` of its content (:func:`~swarm.pipeline.seals.told_digest`), with the
    ``tokens`` of a replica that computes the loss, 0 of others.
    """

    step: Count
    microbatch: MicrobatchField
    attempt: Annotated[int, Field(ge=0, lt=4 * ATTEMPTS_OF_A_WAY)]
    after: AfterField
    hop: Annotated[int, Field(ge=0, lt=1024)]
    accused: PeerIdField
    told: Annotated[bytes, Field(min_length=32, max_length=32)]
    tokens: Count
    receipt: SignatureField
    statements: Annotated[tuple[Statement, ...], Field(max_length=MAX_AUDITORS)]

    @property
    def key(self) -> JourneyKey:
        """Return what graphs and waiting work are indexed by."""
        return JourneyKey(self.step, self.microbatch, self.attempt, self.after)


def auditors(roster: Roster, key: JourneyKey, hop: int, accused: str) -> tuple[PeerId, ...]:
    """Return who judges a hop, in an order that neither who did it nor who asks can choose: the other replicas of its
    stage, the first MAX_AUDITORS of them."""
    others = [peer for peer in roster.replicas(stage_part(hop)) if peer != accused]
    drawn = "|".join(map(str, ("audits", key.after, *key.microbatch, hop)))
    return tuple(sorted(others, key=lambda peer: hashlib.sha256(f"{drawn}|{peer}".encode()).digest())[:MAX_AUDITORS])


def check_fault(
    run: str,
    roster: Roster,
    step: int,
    previous_hash: str,
    fault: Fault,
    verify: Callable[[PeerId, bytes, bytes], bool],
) -> tuple[PeerId, ...]:
    """Return whom a fault of the open step proves wrong: the accused, where more than half of those that judge the hop
    found it wrong, or who called wrong what more than half of them found right. Two of them at least must agree.

    Args:
        run: The run's id.
        roster: The members of the open step.
        step: The open step.
        previous_hash: The hash of the record before it.
        fault: What is said, by anybody.
        verify: Checks a peer's signature.

    Raises:
        Refused: It is of another step, names nobody of the stage, or decides nothing.
        Violation: A signature in it is forged, or it has two words of one replica.
    """
    if (fault.step, fault.after) != (step, previous_hash[:AFTER_CHARS]):
        raise Refused(f"it is of a hop of step {fault.step} after {fault.after or 'no record'}; step {step} is open")
    if fault.accused not in roster.replicas(stage_part(fault.hop)):
        raise Refused(f"{fault.accused} is no replica of {stage_part(fault.hop)}")
    key, accused = fault.key, PeerId(fault.accused)
    if not verify(accused, receipt_bytes(run, key, fault.hop, fault.told, fault.tokens), fault.receipt):
        raise Violation(f"the receipt of {accused} is forged")
    judges, said = auditors(roster, key, fault.hop, accused), {one.auditor: one.wrong for one in fault.statements}
    if len(said) != len(fault.statements):
        raise Violation("a replica that says twice what it found")
    if strange := sorted(said.keys() - set(judges)):
        raise Refused(f"{strange[0]} does not judge {stage_part(fault.hop)} of {fault.microbatch}")
    for one in fault.statements:
        signed = audit_bytes(run, key, fault.hop, accused, fault.told, one.wrong)
        if not verify(PeerId(one.auditor), signed, one.signature):
            raise Violation(f"what {one.auditor} is said to have found is forged")
    for verdict, found in ((True, (accused,)), (False, tuple(PeerId(peer) for peer in sorted(said) if said[peer]))):
        agreed = sum(wrong is verdict for wrong in said.values())
        if found and agreed >= 2 and 2 * agreed > len(judges):
            return found
    raise Refused(f"{len(said)} of {len(judges)} replicas said what they found: that decides nothing")
