"""What proves a member wrong: the signed words of the other replicas of its part, who computed again what it did. Pure.

A hop, for which it signed a receipt, all other replicas of the stage judge, or those that the record before draws where
they are many. What it did in averaging all other replicas of the part saw. So nobody is called a liar by one other, nor
by a leader.

The record of the step carries what was found, and says until when a member that is proven wrong is barred from the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from pydantic import ConfigDict, Field

from swarm.consensus.roster import Roster
from swarm.consensus.slowness import FORGET, Barred, doubled
from swarm.errors import Advice, Refused, Violation
from swarm.ids import ATTEMPTS_OF_A_WAY, JourneyKey, MicrobatchId, PartName, PeerId, stage_of, stage_part
from swarm.schema import (
    AFTER_CHARS,
    AfterField,
    Count,
    Message,
    MicrobatchField,
    PartField,
    PeerIdField,
    SignatureField,
)
from swarm.security.signing import Verify, audit_bytes, averaging_bytes, receipt_bytes
from swarm.security.statements import AuditStatement, found_wrong

Proven = tuple[PeerId, ...]
"""Whom a fault proves wrong."""

MAX_AUDITORS = 6
"""So many replicas judge one hop at most."""
MAX_STATEMENTS = 32
"""More than half of those that judge the most members whose averaging is checked."""
MAX_FAULTS, FAULT_BYTES = 8, 5500
"""So many faults go into one record, and the most that one takes there."""
FIRST_BAR, MOST_DOUBLINGS = 256, 20
"""For so many steps a member that is proven wrong is barred, and how often that is doubled."""
CONTRADICTIONS = 2
"""In so many steps a replica must contradict what most find of a hop, to be barred for it."""


class PeerFault(Message):
    """What a member of the open step, the ``accused``, did, and what others of its part found that computed it again.

    ``after`` is the beginning of the hash of the record before. Bytes are hex in files.
    """

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    step: Count
    after: AfterField
    accused: PeerIdField
    statements: Annotated[tuple[AuditStatement, ...], Field(max_length=MAX_STATEMENTS)]

    def where(self, roster: Roster) -> PartName:
        """Return the part that the accused held."""
        raise NotImplementedError

    @property
    def work(self) -> MicrobatchId | None:
        """Return of which microbatch it is, None where it is of the part's averaging."""
        return None

    def is_shown(self, run: str, verify: Verify) -> bool:
        """Return whether the accused has signed what it is accused of, where it signs that."""
        return True

    def judges(self, roster: Roster) -> tuple[PeerId, ...]:
        """Return whose words count."""
        return tuple(peer for peer in roster.replicas(self.where(roster)) if peer != self.accused)

    def signed(self, run: str, *, wrong: bool) -> bytes:
        """Return what one of them signs."""
        raise NotImplementedError

    def said(self, *, wrong: bool) -> tuple[PeerId, ...]:
        """Return who found it wrong, or right."""
        return tuple(PeerId(one.auditor) for one in self.statements if one.wrong is wrong)

    @property
    def sides(self) -> tuple[Proven, Proven]:
        """Return whom what is decided proves wrong, and who says so; the accused's word is what it did."""
        for_it, against = (PeerId(self.accused), *self.said(wrong=False)), self.said(wrong=True)
        return (for_it, against) if len(against) >= len(for_it) else (against, for_it)


class HopFault(PeerFault):
    """A hop that the accused signed for.

    The microbatch, and where it was, are named as in the pipeline's messages; ``hop`` is the stage. ``receipt`` is the
    accused's signature under what it ``told`` of its content (:func:`~swarm.pipeline.seals.told_digest`), with the
    ``tokens`` of a replica that computes the loss, 0 of others.
    """

    microbatch: MicrobatchField
    attempt: Annotated[int, Field(ge=0, lt=4 * ATTEMPTS_OF_A_WAY)]
    hop: Annotated[int, Field(ge=0, lt=1024)]
    told: Annotated[bytes, Field(min_length=32, max_length=32)]
    tokens: Count
    receipt: SignatureField

    @property
    def key(self) -> JourneyKey:
        """Return what graphs and waiting work are indexed by."""
        return JourneyKey(self.step, self.microbatch, self.attempt, self.after)

    def where(self, roster: Roster) -> PartName:
        """See :class:`PeerFault`: the stage, or the variant of it that the accused holds."""
        part = roster.part_of(self.accused)
        return stage_part(self.hop) if part is None or stage_of(part) != self.hop else part

    @property
    def work(self) -> MicrobatchId | None:
        """See :class:`PeerFault`."""
        return self.microbatch

    def is_shown(self, run: str, verify: Verify) -> bool:
        """See :class:`PeerFault`: the receipt."""
        signed = receipt_bytes(run, self.key, self.hop, self.told, self.tokens)
        return verify(PeerId(self.accused), signed, self.receipt)

    def judges(self, roster: Roster) -> tuple[PeerId, ...]:
        """See :func:`auditors`."""
        return auditors(roster, self.key, self.hop, self.accused)

    def signed(self, run: str, *, wrong: bool) -> bytes:
        """See :class:`PeerFault`."""
        return audit_bytes(run, self.key, self.hop, self.accused, self.receipt, wrong)


class AveragingFault(PeerFault):
    """What the accused did when its part was averaged: it reduced a mean that its sums do not give, or committed to two
    sums. Its bits are in no record. All of the round judge them before they leave it
    (:mod:`swarm.averaging.allreduce.check`)."""

    part: PartField

    def where(self, roster: Roster) -> PartName:
        """See :class:`PeerFault`."""
        return PartName(self.part)

    def signed(self, run: str, *, wrong: bool) -> bytes:
        """See :class:`PeerFault`."""
        return averaging_bytes(run, self.step, self.after, self.part, self.accused, wrong)


Fault = HopFault | AveragingFault
"""What a record may carry."""


def auditors(roster: Roster, key: JourneyKey, hop: int, accused: str) -> tuple[PeerId, ...]:
    """Return who judges a hop, in an order that neither who did it nor who asks can choose: the other replicas of its
    part, the first MAX_AUDITORS of them."""
    part = roster.part_of(accused)
    others = [peer for peer in roster.replicas(part) if peer != accused] if part is not None else []
    drawn = "|".join(map(str, ("audits", key.after, *key.microbatch, hop)))
    return tuple(sorted(others, key=lambda peer: hashlib.sha256(f"{drawn}|{peer}".encode()).digest())[:MAX_AUDITORS])


def check_fault(run: str, roster: Roster, step: int, previous_hash: str, fault: PeerFault, verify: Verify) -> Proven:
    """Return whom a fault of the open step proves wrong: the accused and who called it right, where more than half of
    those that judge it found it wrong, or who called wrong what half of them, and so with the accused more than half of
    all, call right (:func:`~swarm.security.statements.found_wrong`). Two of three replicas that lie can so bar the
    third: as judges at once, else in CONTRADICTIONS steps. (Honest ones do not contradict each other: between right and
    wrong is what none of them judges.)

    Args:
        run: The run's id.
        roster: The members of the open step.
        step: The open step.
        previous_hash: The hash of the record before it.
        fault: What is said, by anybody.
        verify: Checks a peer's signature.

    Raises:
        Refused: It is of another step, names nobody of the part, or decides nothing.
        Violation: A signature in it is forged, or it has two words of one replica.
    """
    if (fault.step, fault.after) != (step, previous_hash[:AFTER_CHARS]):
        raise Refused(f"it is of step {fault.step} after {fault.after or 'no record'}; step {step} is open")
    if fault.accused not in roster.replicas(part := fault.where(roster)):
        raise Refused(f"{fault.accused} is no replica of {part}")
    if not fault.is_shown(run, verify):
        raise Violation(f"the receipt of {fault.accused} is forged")
    judges, said = fault.judges(roster), {one.auditor for one in fault.statements}
    if len(said) != len(fault.statements):
        raise Violation("a replica that says twice what it found")
    if strange := sorted(said - set(judges)):
        raise Refused(f"{strange[0]} does not judge what {fault.accused} did")
    for one in fault.statements:
        if not verify(PeerId(one.auditor), fault.signed(run, wrong=one.wrong), one.signature):
            raise Violation(f"what {one.auditor} is said to have found is forged")
    against = len(fault.said(wrong=True))
    if against and found_wrong(against, len(said) - against, len(judges)) is not None:
        return fault.sides[0]
    raise Refused(f"{len(said)} of {len(judges)} replicas said what they found: that decides nothing")


def check_faults(
    run: str, roster: Roster, step: int, previous_hash: str, faults: Sequence[PeerFault], verify: Verify
) -> dict[str, Proven]:
    """Return by the accused whom each of a record's faults proves wrong. Raises as :func:`check_fault`, and Violation
    for two of one accused."""
    found = {one.accused: check_fault(run, roster, step, previous_hash, one, verify) for one in faults}
    if len(found) != len(faults):
        raise Violation("it accuses a member twice")
    return found


# --- who is barred ----------------------------------------------------------------------------------------------------


MAX_BARRED, BARRED_BYTES = 512, 120
"""Of so many peers a record says that they are barred or were, those whose time ends last, and the most that one
takes."""


def barring(known: Mapping[str, Barred], step: int, found: Mapping[str, Collection[PeerId]]) -> dict[str, Barred]:
    """Return what the record of a step says of those that were proven wrong.

    Args:
        known: What the record before it says.
        step: The step.
        found: By the accused of each fault, whom it proves wrong (:func:`check_fault`).
    """
    lied = {accused for accused, wrong in found.items() if accused in wrong}
    said: dict[str, Barred] = {}
    for peer in {*known, *(peer for wrong in found.values() for peer in wrong)}:
        one = known.get(peer, Barred())
        words = one.contradicted + any(peer in wrong for wrong in found.values())
        if peer in lied or (words > one.contradicted and words >= CONTRADICTIONS):
            times = one.times + 1
            one = Barred(times=times, until=step + 1 + doubled(FIRST_BAR, times, MOST_DOUBLINGS))
        elif words > one.contradicted:
            one = one.model_copy(update={"contradicted": words, "until": max(one.until, step + 1)})
        if step < one.until + FORGET * FIRST_BAR * max(1, one.times):
            said[peer] = one
    kept = sorted(said, key=lambda peer: (said[peer].until, peer))[-MAX_BARRED:]
    return {peer: said[peer] for peer in sorted(kept)}


def newly_barred(barred: Mapping[str, Barred], step: int) -> set[PeerId]:
    """Return the peers that the record of a step keeps out of the next one: those of its roster that were proven wrong
    in it among them."""
    return {PeerId(peer) for peer, one in barred.items() if one.until > step + 1}


def barred_words(until: int, last: int = 0) -> str:
    """Return what a peer that is barred is told; ``last`` is the run's last step, where it is barred until then: with
    that one it is too late to join."""
    wrong = f"what it computed, or said of others' work, was proven wrong: it is barred until step {until}"
    if last:
        return f"{wrong}, and with the run's last step, {last}, no peer can join; {Advice.PROVEN_WRONG}"
    return f"{wrong}; {Advice.PROVEN_WRONG}, and join again then"
