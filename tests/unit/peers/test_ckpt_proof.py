"""What proves a checkpoint, and what does not."""

from __future__ import annotations

import pytest

from swarm.consensus.proof import Proof
from swarm.consensus.records import Decision, acceptance_bytes
from swarm.errors import StateError
from swarm.ids import RunId
from swarm.membership.founding_record import Origin, founding_record
from swarm.state.checkpoints.files import CheckpointManifest, decode_manifest, encode_manifest
from swarm.state.checkpoints.proof import manifest_with, proof_in
from tests.harness.rigs.peers import KeptRun


def through_the_file(proof: Proof, run: KeptRun) -> Proof:
    return proof_in(decode_manifest(encode_manifest(manifest_with(proof)), "it"), run.manifest.run_id)


@pytest.mark.parametrize("term", [0, 3])
def test_proof_of_a_step_is_decided_by_who_took_part_in_it(run: KeptRun, term: int) -> None:
    before = run.decide(0).record
    proof = through_the_file(Proof.of(run.decide(1, term=term), before), run)
    assert proof.standing() == "decided"
    assert proof.record == run.decisions[1].record
    wrong_term = proof.model_copy(update={"term": term + 1})
    with pytest.raises(StateError, match="was not decided"):
        wrong_term.standing()


def test_proof_of_a_founding_record_is_its_own_roster(run: KeptRun) -> None:
    genesis = run.decide(0)
    assert through_the_file(Proof.of(genesis, None), run).standing() == "decided"
    again = run.signed(founding_record(run.manifest.run_id, run.roster, Origin.after(run.decide(1).record)))
    assert through_the_file(Proof.of(again, run.decisions[1].record), run).standing() == "decided"


def test_proof_of_a_run_that_begins_in_its_middle_is_refused(run: KeptRun) -> None:
    before = run.decide(0).record
    again = run.signed(
        founding_record(run.manifest.run_id, run.roster, Origin(digests={}, step=1, previous=before.hash()))
    )
    with pytest.raises(StateError, match="does not begin in its middle"):
        Proof.of(again, None).model_copy(update={"before": before}).standing()


def test_proof_by_a_majority_is_enough_and_by_less_is_not(run: KeptRun) -> None:
    before, decision = run.decide(0).record, run.decide(1)
    first, second, third = decision.acceptances.items()
    two = Decision(decision.record, dict([first, second]))
    assert Proof.of(two, before).standing() == "decided"
    one = Decision(decision.record, dict([third]))
    with pytest.raises(StateError, match="1 of 3 voters"):
        Proof.of(one, before).standing()
    forged = Decision(decision.record, dict([first, (second[0], bytes(64)), (third[0], first[1])]))
    with pytest.raises(StateError, match="no majority"):
        Proof.of(forged, before).standing()


def test_proof_without_signatures_or_the_record_before_is_unproven(run: KeptRun) -> None:
    before, decision = run.decide(0).record, run.decide(1)
    assert Proof(record=decision.record).standing() == "unproven"
    assert Proof.of(decision, None).standing() == "unproven"
    assert Proof.of(decision, run.decide(2).record).before is None
    assert Proof.of(Decision(decision.record, {}), before).standing() == "unproven"


def test_proof_with_a_record_before_that_is_another_s_is_refused(run: KeptRun) -> None:
    run.decide(0)
    decision, other = run.decide(1), run.decide(2)
    proof = Proof.of(decision, run.decisions[0].record).model_copy(update={"before": other.record})
    with pytest.raises(StateError, match="does not follow"):
        proof.standing()


def test_proof_in_a_file_of_another_run_or_other_parts_is_refused(run: KeptRun) -> None:
    manifest = manifest_with(Proof.of(run.decide(0), None))
    with pytest.raises(StateError, match="is of run"):
        proof_in(manifest, RunId("cd" * 32))
    changed = manifest.model_copy(update={"parts": {"ends": "0" * 64}})
    with pytest.raises(StateError, match="names other parts"):
        proof_in(changed, run.manifest.run_id)
    empty = CheckpointManifest(run=manifest.run, step=0, parts=manifest.parts)
    with pytest.raises(StateError, match="cannot be read: record"):
        proof_in(empty, run.manifest.run_id)


def test_proof_that_brings_its_own_electorate_is_none_among_those_known(run: KeptRun) -> None:
    """One member signs what it likes, and says that it alone takes part."""
    before, decision = run.decide(0).record, run.decide(1)
    known = decision.record.members
    assert Proof.of(decision, before).accepted_among(known.peers)
    alone = decision.record.roster[:1]
    (liar,) = (key for key in run.keys if key.peer == alone[0].peer)
    forged = decision.record.model_copy(update={"step": 90, "committed": (), "roster": alone, "digests": {}})
    proof = Proof(record=forged, acceptances={liar.peer: liar.sign(acceptance_bytes(forged)).hex()})
    assert proof.standing() == "decided"
    assert not proof.accepted_among(known.peers)
    copied = proof.model_copy(update={"acceptances": {key.peer: proof.acceptances[liar.peer] for key in run.keys}})
    assert not copied.accepted_among(known.peers)
