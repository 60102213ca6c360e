"""A tie is proven by what the replicas signed, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.consensus.roster import Roster
from swarm.errors import Violation
from swarm.ids import PartName, PeerId
from swarm.step.decisions import Disagreement
from swarm.step.messages import Apply, Averaged, Reconcile
from swarm.step.results import Asked, ResultSigning
from swarm.step.ties import Statement, Tied, TieEvidence, check_tied
from tests.harness.rigs.consensus import RUN, A, B, T, listed, sign, verify

C = PeerId("C")
PART = PartName("stage-0")
ROSTER = Roster([listed(A), listed(B), listed(T, "trainer", "ends")])
SIGNING = ResultSigning(RUN, 3, "ab" * 32)
ONE, OTHER = "1" * 64, "2" * 64


def asked(attempt: int, clip: float = 1.0) -> Asked:
    reconcile = Reconcile(step=3, term=0, committed=(), live=(A, B, T), attempts={PART: attempt})
    return Asked(reconcile, Apply(step=3, term=0, lr=0.1, clip=clip, sq_norms={}))


def said(
    peer: PeerId, digest: str, attempt: int, *, signer: PeerId | None = None, what: Any = "weights", clip: float = 1.0
) -> Statement:
    inputs = asked(attempt, clip).inputs(what)
    signature = sign(signer or peer, SIGNING.data(PART, attempt, what, inputs, digest))
    return Statement(peer=peer, attempt=attempt, what=what, asked=inputs, digest=digest, signature=signature)


def tie(attempt: int, **digests: str) -> tuple[Statement, ...]:
    return tuple(said(PeerId(peer), digest, attempt) for peer, digest in digests.items())


def tied(**changes: Any) -> Tied:
    fields: dict[str, Any] = {"part": PART, "first": tie(1, A=ONE, B=OTHER), "second": tie(2, A=ONE, B=OTHER)}
    return Tied(step=3, term=0, **(fields | changes))


def test_two_ties_that_both_replicas_signed_are_a_proof() -> None:
    check_tied(tied(), SIGNING, ROSTER, (), verify)
    three = Roster([*ROSTER.members, listed(C)])
    check_tied(tied(), SIGNING, three, (C,), verify)
    norms = {"A": ONE + "/" + (4.0).hex(), "B": ONE + "/" + (0.0).hex()}  # one mean, of which one lies
    check_tied(tied(first=tie(1, **norms), second=tie(2, **norms)), SIGNING, ROSTER, (), verify)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"second": tie(1, A=ONE, B=OTHER)}, "not of the same"),
        ({"first": (said(A, ONE, 1), said(B, OTHER, 2))}, "one attempt each"),
        ({"first": (said(A, ONE, 1), said(B, OTHER, 1, what="gradient"))}, "one attempt each"),
        ({"first": (said(A, ONE, 1, clip=0.9), said(B, OTHER, 1, clip=0.8))}, "one attempt each"),
        ({"first": (said(A, ONE, 1), said(B, OTHER, 1), said(B, OTHER, 1))}, "between all its replicas"),
        ({"first": tie(1, A=ONE, B=ONE)}, "not tied"),
        ({"first": tie(1, A=f"{ONE}/0x1.0p+0", B=f"{ONE}/0x1.0000000000001p+0")}, "not tied"),
        ({"part": "ends"}, "nobody takes ends over"),
        ({"first": (said(A, ONE, 1), said(B, OTHER, 1, signer=A))}, "forged"),
        ({"first": (said(A, ONE, 1), said(T, OTHER, 1))}, "between all its replicas"),
    ],
)
def test_what_proves_no_tie_is_a_violation(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Violation, match=words):
        check_tied(tied(**changes), SIGNING, ROSTER, (), verify)


def test_replica_that_was_not_asked_makes_it_no_tie_unless_it_is_gone() -> None:
    three = Roster([*ROSTER.members, listed(C)])
    with pytest.raises(Violation, match="between all its replicas"):
        check_tied(tied(), SIGNING, three, (), verify)


def test_evidence_is_whole_with_the_second_tie_of_a_part_and_names_who_did_not_sign() -> None:
    evidence = TieEvidence(SIGNING, verify)
    found = Disagreement("the updated weights", PART, {A: ONE, B: OTHER})

    def signatures(attempt: int) -> dict[PeerId, bytes]:
        return {one.peer: one.signature for one in tie(attempt, A=ONE, B=OTHER)}  # type: ignore[misc]

    assert evidence.unsigned(found, asked(1), {A: signatures(1)[A]}) == [B]
    assert evidence.unsigned(found, asked(1), signatures(1)) == []
    assert evidence.second(0, found, asked(1), signatures(1)) is None
    assert evidence.second(0, found, asked(1), signatures(1)) is None
    proof = evidence.second(0, found, asked(2), signatures(2))
    assert proof == tied()


def test_zero_with_a_sign_is_the_norm_of_nothing_and_no_other() -> None:
    plain, signed = (Averaged(digest=ONE, sq_norm=zero, cursor=None).result for zero in (0.0, -0.0))
    assert plain == signed == f"{ONE}/0x0.0p+0"
    said(A, plain, 1)
    with pytest.raises(ValueError, match="digest"):
        said(A, f"{ONE}/0x1.0p+9999", 1)
