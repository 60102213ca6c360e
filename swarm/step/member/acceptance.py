"""What a member accepts of what a leader says: only what it has computed itself, or can compute. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from swarm.columns import passed_by
from swarm.consensus.acceptor import NO_EVIDENCE, Vote, has_majority, has_to_be_proposed, promise_bytes
from swarm.consensus.branches import check_lineage
from swarm.consensus.changes import ChangeRules, OpenStepFacts, with_work
from swarm.consensus.faults import barred_words, barring, check_faults, newly_barred
from swarm.consensus.history import History
from swarm.consensus.proof import Proof, proven_among
from swarm.consensus.records import MAX_ASIDE, CloseRecord, Decision, check_acceptances, check_confirmed, voters
from swarm.consensus.roster import Roster, lost_parts, needed, owner, part_lost
from swarm.consensus.slowness import following, struck
from swarm.consensus.trials import checked_words
from swarm.consensus.trials import following as trials_following
from swarm.errors import Busy, OutOfSync, Refused, RunEnded, StateError, Violation
from swarm.ids import PartName, PeerId
from swarm.security.credentials import Credential
from swarm.security.signing import Verify
from swarm.step.decisions import (
    ATTEMPTS_PER_TERM,
    NORM_TOLERANCE,
    given_up,
    gone_back,
    guarded,
    kept_digests,
    round_inputs,
    totals,
    usual_by_part,
)
from swarm.step.member.open_step import Mean, OpenStep
from swarm.step.messages import Apply, Propose, Reconcile
from swarm.step.results import unproven
from swarm.step.rules import StepRules

FOUNDED = frozenset(
    {"run", "step", "digests", "cursors", "roster", "admissions", "barred", "trials", "resumed", "previous"}
)
"""What a founding record decides: all else of it is as if nothing were."""


class AcceptanceRules:
    """One member's rules."""

    def __init__(self, me: PeerId, rules: StepRules, history: History, verify: Verify) -> None:
        self._me, self._rules, self._history, self._verify = me, rules, history, verify
        self._changes = ChangeRules(rules.roster, verify)

    def check_reconcile(
        self, roster: Roster, body: Reconcile, name: PartName | None = None, before: Reconcile | None = None
    ) -> None:
        """Raises Refused or Violation for an attempt that no honest leader makes: without a number of its own term for
        each part, or, of our part (``name``), with the number of the one ``before`` and other inputs. Else we would
        sign that the result of the one is that of the other."""
        if not set(body.live) <= set(roster.peers):
            raise Violation("it counts on a peer that does not take part")
        known = body.attempts.keys() == set(roster.parts) and set(body.plainly) <= set(roster.parts)
        own = range(body.term * ATTEMPTS_PER_TERM, (body.term + 1) * ATTEMPTS_PER_TERM)
        if not known or not all(number in own for number in body.attempts.values()):  # later terms need theirs
            raise Violation("attempts at rounds that there are not")
        if name is not None and before is not None and before.attempts[name] == body.attempts[name]:
            asked = [round_inputs(roster, name, one.committed, one.live, one.forfeits) for one in (before, body)]
            if asked[0] != asked[1]:
                raise Violation(f"attempt {body.attempts[name]} at averaging {name} is of something else than before")
        self._rules.check_committed(roster, body.committed)
        self._rules.lateness.check(roster, self._history.head, body.live, body.late)
        if not set(body.forfeits) <= set(body.live) & self._history.head.late.keys():
            raise Violation("it forgoes what is owed to nobody that closes the step")
        for contribution in body.committed:
            if not set(contribution.route) <= {*body.live, *body.late}:
                raise Refused(f"{contribution.microbatch} is assigned to a replica that is not there")
            version = contribution.work(body.step).version
            if not all(roster.computes(peer, version) for peer in contribution.route):
                raise Refused(f"{contribution.microbatch} is assigned to a replica without the parameters for it")
            trainer = roster[PeerId(contribution.microbatch.trainer)]
            if trainer.part is not None and trainer.peer not in body.live:
                raise Refused(f"{contribution.microbatch} counts, and its trainer is not there with its ends")

    def check_norms(self, roster: Roster, name: PartName | None, mean: Mean, body: Apply) -> None:
        """Raises Violation where the norms that the caps and the clip factor follow from lack a part, or give ours
        another norm than it has, where the clip factor is not what follows from them, and where others are told
        something else of us than we said."""
        if set(body.sq_norms) != set(roster.parts):
            raise Violation("the norms are not those of the run's parts")
        if body.clip != (clip := self._rules.clipped(body.sq_norms).clip):
            raise Violation(f"a clip factor of {body.clip} where the parts' norms give {clip}")
        if name is not None and not math.isclose(body.sq_norms[name], mean.answer.sq_norm, rel_tol=NORM_TOLERANCE):
            raise Violation(f"a squared norm of {body.sq_norms[name]} for {name}: it is {mean.answer.sq_norm} here")
        if body.guarded.get(self._me, {}) != mean.answer.guarded:
            raise Violation("it says that this replica left out other sums than it did")
        if self._rules.influence and body.lengths.get(self._me, (0.0, 0.0)) != mean.answer.lengths:
            raise Violation("it says that other lengths of microbatches are usual here than are")
        if self._rules.tries_trainers and body.words.get(self._me, ()) != mean.answer.words:
            raise Violation("it has this replica say something else of trainers than it did")

    def over(
        self, roster: Roster, part: str, gone: Mapping[PeerId, str], fell_silent: Callable[[PeerId], bool]
    ) -> RunEnded:
        """Return why the run is over, as a leader says, for want of a replica of ``part``. Raises Refused when it is
        not seen here, and by a member that sees no majority: a minority ends nothing. Who has ended, as others that
        were told before, is with no majority elsewhere: only those that are gone and ``fell_silent`` may be."""
        error = part_lost(roster, part, gone)
        if error is None:
            raise Refused(f"a replica of {part} is there, as far as is known here")
        if not has_majority(voters(roster, self._history.head_hash), set(filter(fell_silent, gone))):
            raise Refused("no majority is there, as far as is known here: a minority does not end a run")
        return error

    def may_found(self, caller: PeerId, record: CloseRecord, founder: PeerId) -> bool:
        """Return whether this is the record with which the run begins here. Raises Refused for one from somebody
        else."""
        if not record.founding:
            return False
        if self._history.next_step > 0:
            raise Refused(f"the run has begun here: step {self._history.next_step} is open")
        if caller != founder:
            raise Refused(f"{founder} founds this run")
        return True

    def check_founding(self, record: CloseRecord, credentials: Sequence[Credential] | None = None) -> None:
        """Raises Refused for a record with which the run cannot begin here; ``credentials`` are those of its members,
        None where they were looked at before it was decided."""
        if self._me not in record.members:
            raise Refused("the record with which the run begins leaves this member out")
        if record.run != self._rules.run:
            raise Refused("the record belongs to another run")
        if record.codecs:
            raise Refused("the record names codecs, and nothing was measured before it")
        self._check_begins(record)
        if (record.barred or record.trials) and not record.step:
            raise Refused("the record keeps peers out of a run that has not begun")
        if out := newly_barred(record.barred, record.step).intersection(record.members.peers):
            raise Refused(f"{min(out)} is to take part: {barred_words(record.barred[min(out)].until)}")
        if credentials is not None:
            admission, members = self._rules.admission, record.members.members
            admission.check_founding(record.admissions, record.step, members, credentials, self._verify)
        after = self._rules.begins_after
        if after is not None and record.step <= after[0] and (record.step, record.previous) != after:
            raise Refused(f"the run goes on with another's checkpoint of step {after[0]}, and the record does not")

    def _check_begins(self, record: CloseRecord) -> None:
        """Raises Refused for a founding record that decides anything of a step, or says of its members what only steps
        can show: work that gives a vote, slowness that takes one out, or a place in a lineage that no majority has
        seen."""
        decides = {name: getattr(record, name) for name in FOUNDED}
        plain = CloseRecord(**decides, committed=(), tokens=0, loss_sum=0.0, grad_norm=0.0, clip=1.0, lr=0.0)
        if odd := [name for name in CloseRecord.model_fields if getattr(record, name) != getattr(plain, name)]:
            raise Refused(f"the record with which the run begins decides {odd[0]}, and no step was closed before it")
        roster, most = record.members, max(self._rules.max_members, len(record.members.trainers))
        if new := [member.peer for member in record.roster if member.worked or member.since]:
            raise Refused(f"the record says of {new[0]} what it did in steps that were not")
        if len({member.peer for member in record.roster}) < len(record.roster):
            raise Refused("the record with which the run begins names a member twice")
        if set(record.digests) != {*roster.parts, *roster.paused}:
            raise Refused("the record's digests are not those of the parts that its members hold")
        if len(roster) > most or len(record.cursors) > most or not set(roster.trainers) <= set(record.cursors):
            raise Refused("the record names more members, or cursors, than there is room for, or not all trainers'")

    def check_decided(self, roster: Roster, decision: Decision) -> None:
        """Raises Refused for a record that those of the open step have not decided, or that does not follow what we
        know. One with which the run begins names its own electorate: it counts with our signature only."""
        record = decision.record
        if record.repeats and self._rules.rewind == "never":
            raise Refused("the manifest says that this run never goes back")
        try:
            self._history.check(record)
        except OutOfSync as error:
            raise Refused(str(error)) from error
        if record.founding:
            if len(roster):
                raise Refused("it commits nothing: a run does not begin in its middle")
            self.check_founding(record)
        electorate = record.members if record.founding else roster
        # Who was not there when others went on by themselves goes on with them only when a majority has accepted that.
        check = check_confirmed if self._me in record.absent else check_acceptances
        check(record, electorate, decision.acceptances, self._verify, decision.term)

    def check_proposal(self, roster: Roster, name: PartName | None, state: OpenStep, body: Propose) -> None:
        """Raises Refused unless the record is possible, and in its own term the one that this member's results give.

        One that does not hold the results, because it was thought lost, or because the record was proposed first in a
        term of which it did not hear, votes on it all the same, and cannot swap to it: so a majority may decide
        although few could compute. That the others computed it their signatures show (:meth:`unproven`).
        """
        record = body.record
        if record.term < body.term <= state.ballot.free:
            raise Violation("its leader closes the step anew in this term, and proposes a record of an earlier one")
        self._check_following(roster, body)
        outside = self._me in record.absent or self._me in record.late
        if record.term == body.term and not outside:
            self._check_result(name, state, record)
        self._check_content(roster, record)  # what is accepted must be possible, or later leaders could not go on

    def check_possible(self, roster: Roster, vote: Vote) -> None:
        """Raises Refused or Violation for a record that no member can have accepted in this step, no matter who says
        that it did: what every member can check, and would refuse as well."""
        body = Propose(record=vote.record, changes=vote.changes, term=vote.term, evidence=vote.evidence)
        if vote.record.void:
            self.check_void(roster, body)
            return
        self._check_following(roster, body)
        check_lineage(vote.record, self._history.head, None)
        self._check_content(roster, vote.record)
        if why := self.unproven(roster, body):
            raise Refused(why)

    def unproven(self, roster: Roster, body: Propose) -> str:
        """Say what of a record that has results its evidence does not bear out; "" where it is all there."""
        record = body.record
        return "" if record.void else unproven(roster, record, body.evidence, self._verify)

    def may_be_decided(self, roster: Roster, body: Propose, gone: Collection[PeerId]) -> bool:
        """Return whether the promises with a record show that it may have been decided in an earlier term: then it is
        accepted whatever we know about who is lost. Those that accepted it may be too few by now to decide it again.
        Of those that are ``gone`` here nobody knows what they accepted."""
        step, electors = body.record.decides, voters(roster, self._history.head_hash)
        about = (self._rules.run, step, self._history.head_hash)
        signed = {
            peer: one
            for peer in electors
            if (one := body.promises.get(peer)) is not None
            and self._verify(peer, promise_bytes(about, body.term, one.accepted, one.free), one.signature)
        }
        vote, leader = (body.term, body.record.hash()), owner(roster, step, body.term)
        return has_to_be_proposed(vote, signed, electors, leader=leader, gone=gone)

    def _check_following(self, roster: Roster, body: Propose) -> None:
        """That the record is of this step, with the roster and the sums that it must have. Raises Refused or
        Violation."""
        record, told = body.record, body.evidence
        if not {*told.results, *told.rows} <= set(roster.peers) or not set(told.attempts) <= set(roster.parts):
            raise Violation("it shows signatures of peers, or attempts at parts, that do not take part")
        self._check_next(record)
        self._check_roster(roster, body)
        for contribution in record.committed:
            self._rules.check_loss(contribution)  # or the sum may be no number
        if (record.tokens, record.loss_sum) != totals(record.committed):
            raise Refused("the record's tokens and loss are not the sums of its microbatches")
        if record.term > body.term:
            raise Violation("a record of a later term than the one in which it is proposed")

    def _check_next(self, record: CloseRecord) -> None:
        try:
            self._history.check(record)
        except OutOfSync as error:
            raise Refused(str(error)) from error

    def _check_content(self, roster: Roster, record: CloseRecord) -> None:
        """What can be said of a record without any result. Raises Refused or Violation."""
        self._rules.check_committed(roster, record.committed)
        self._rules.check_scalars(record.step, record.lr, record.clip)
        if any(peer in record.absent for contribution in record.committed for peer in contribution.route):
            raise Refused("the record assigns a microbatch to a replica that it says was lost")
        self._check_late(roster, record)
        self._check_slow(roster, record)
        self._check_faults(roster, record)
        if not set(record.cursors) <= {*self._history.head.cursors, *roster.peers, *record.members.peers} or (
            len(record.cursors) > max(self._rules.max_members, len(record.members.trainers))
        ):
            raise Refused("the record keeps cursors of peers that never took part, or more than it has room for")
        if len(record.aside) > MAX_ASIDE:
            raise Refused("the record puts more microbatches aside than it has room for")
        if not {*record.links, *record.paces} <= set(record.members.peers):
            raise Refused("the record tells of links or paces of peers that are not in its roster")
        if record.codecs != self._rules.codecs.following(self._history.head, record):
            raise Refused("the record's codecs are not those that its links and paces give")
        if set(record.norms) != set(roster.parts):
            raise Refused("the record's norms are not those of the run's parts")
        found = self._rules.clipped(record.norms)
        if (record.grad_norm, record.clip, record.caps) != (found.norm, found.clip, found.caps):
            raise Refused("the record's scalars and caps are not those that the parts' norms give")
        said = record.guarded if self._rules.guards else {}
        if record.guarded != guarded(roster, record.committed, said):
            raise Refused("the record says that sums were left out that there are not")
        self._check_usual(roster, record)
        self._check_trials(roster, record)
        if set(record.digests) != {*self._rules.roster.parts_after(record.step, roster), *roster.paused}:
            raise Refused("the record's digests are not those of the run's parts")

    def _check_usual(self, roster: Roster, record: CloseRecord) -> None:
        """That what is usual is what the replicas' words give, of a run that bounds microbatches; and what its
        microbatches, of one with variants."""
        holders = {peer for part in roster.parts for peer in roster.replicas(part)} if self._rules.influence else set()
        if not set(record.lengths) <= holders:
            raise Refused("the record tells of lengths of microbatches where there are none")
        if record.usual != usual_by_part(roster, self._history.head.usual, record.lengths):
            raise Refused("what the record says is usual is not what its lengths give")
        if record.passed != passed_by(self._history.head.passed, roster.parts, record.committed):
            raise Refused("what the record says has passed each variant is not what its microbatches give")

    def _check_trials(self, roster: Roster, record: CloseRecord) -> None:
        """That trainers are judged as the replicas' words give, of a run that tests them."""
        said = record.words if self._rules.tries_trainers else {}
        if record.words != checked_words(roster, record.committed, said):
            raise Refused("the record has words about trainers from those that cannot have said them")
        known = self._history.head.trials
        if record.trials != trials_following(known, record.step, roster, record.committed, record.words):
            raise Refused("what the record says of trainers is not what its words and the record before give")

    def _check_late(self, roster: Roster, record: CloseRecord) -> None:
        """That it owes those that it calls late what they did, to none whom it calls lost, and that they stay."""
        rules, head = self._rules.lateness, self._history.head
        live = set(roster.peers) - {*record.absent, *record.late}
        rules.check(roster, head, live, record.late)
        if record.late and record.late != rules.owed(roster, head, record.committed, record.late):
            raise Refused("the record owes those that were late something else than they did")
        rules.check_staying(roster, record)

    def _check_slow(self, roster: Roster, record: CloseRecord) -> None:
        """Raises Refused where it says more of those that hold steps up than its leader may: one word of each."""
        known, leader = self._history.head.slow, owner(roster, record.step, record.term)
        late = {
            p for p in roster.peers if p not in record.absent and record.slow.get(p) == struck(known.get(p), leader)
        }
        if record.slow != following(known, record.step, roster.peers, record.absent, (leader, late)):
            raise Refused(
                "what the record says of members that hold steps up is not its leader's word on the one before"
            )

    def _check_faults(self, roster: Roster, record: CloseRecord) -> None:
        """Raises Refused or Violation where what it says of those that were proven wrong is not what the proofs in it
        give, or one of these closed the step."""
        about = (self._rules.run, roster, record.step, self._history.head_hash)
        found = check_faults(*about, record.faults, self._verify)
        if record.barred != barring(self._history.head.barred, record.step, found):
            raise Refused("whom the record bars is not what the proofs in it give")
        if stays := newly_barred(record.barred, record.step).intersection(roster.peers) - set(record.absent):
            raise Refused(f"{min(stays)} was proven wrong, and closed the step")

    def check_lost(self, roster: Roster, record: CloseRecord, gone: Collection[str]) -> None:
        """Raises Busy where we believe that one is there of those that a void record calls lost, or are one: we may
        accept it yet."""
        if there := sorted(needed(roster, lost_parts(roster, record.absent), record.absent) - set(gone)):
            raise Busy(f"{there[0]} is there, as far as is known here")

    def check_back(self, body: Propose, known: bool, copied: Collection[str]) -> None:
        """Raises Refused unless the run may go back, and the step to which it does was decided: as this peer's own
        checkpoint has it (``known``), or as a majority of those that vote now have signed; and where this peer
        keeps a copy of one of the parts that are lost, ``copied``: nothing need be done again then."""
        record, proof = body.record, body.changes.back
        if lost := set(lost_parts(self._history.head.members, record.absent)).intersection(copied):
            raise Refused(f"a copy of {min(lost)} is here")
        if proof is None:
            raise Refused("it goes back to a step of which it proves nothing")
        if not known and not (self.is_decided(proof) and proven_among(proof, self._history.head.members)):
            raise Refused(f"that step {record.step} was so decided is not known here, nor proven by those that vote")

    def is_decided(self, proof: Proof) -> bool:
        """Return whether a proof's own signatures show that its record was decided. Raises Violation where they show
        that it was not."""
        try:
            return proof.standing() == "decided"
        except StateError as error:
            raise Violation(str(error)) from error

    def check_void(self, roster: Roster, body: Propose) -> None:
        """Raises Refused or Violation unless the record gives its step up as it must: nothing but the roster changes,
        and in that every part is held again."""
        record, head, most = body.record, self._history.head, self._rules.max_members
        if body.evidence != NO_EVIDENCE:
            raise Violation("it shows results of a step that is given up")
        self._check_next(record)
        now = OpenStepFacts(record.decides, roster, self._history.head_hash, provisional=record.provisional)
        following, absent = self._changes.give_up(now, body.changes), body.changes.absent
        if record.repeats:
            proof = body.changes.back
            if proof is None or proof.record.run != head.run or proof.record.step > head.step or head.provisional:
                raise Violation("it goes back to no step of this run")
            if self._rules.rewind == "never":
                raise Refused("the manifest says that this run never goes back")
            if self._rules.rewind == "ask":
                self._changes.check_wanted(now, body.changes.wanted, proof.record.hash())
            expected = gone_back(head, record.term, following, absent, most, proof.record)
        else:
            expected = given_up(head, record.previous, record.term, following, body.changes, most)
        if (said := self._changes.admissions(now, body.changes, following)) is not None:
            expected = expected.model_copy(update={"admissions": said})
        if record.term > body.term or record != expected:
            raise Violation("a record that gives its step up changes more than the roster")

    def _check_result(self, name: PartName | None, state: OpenStep, record: CloseRecord) -> None:
        if state.mean is None or state.applied is None or state.reconciled is None:
            raise Refused("nothing was averaged and applied for this step yet")
        if state.reconciled.committed != record.committed:
            raise Refused("the record's microbatches are not those that were averaged")
        if set(state.reconciled.late) != set(record.late):
            raise Refused("the record calls others late than its averaging was made without")
        applied = state.applied
        asked = (applied.lr, applied.sq_norms, applied.guarded, applied.lengths, applied.words)
        if (record.lr, record.norms, record.guarded, record.lengths, record.words) != asked:
            raise Refused("the record's scalars are not those that were applied")
        if name is not None and record.told_of(name) != state.digest:
            raise Refused(f"the record's digest of {name} is not ours")
        said = state.mean.answer.cursor
        if said is not None and record.cursors.get(self._me) != said:
            raise Refused("the record's cursor of this trainer is not where it is")

    def _check_roster(self, roster: Roster, body: Propose) -> None:
        step, last = body.record.step, self._rules.steps
        if step >= last and (body.changes.joins or body.changes.leaves):
            raise Refused("nobody joins or leaves with the run's last step")
        fixed = not body.changes.reassigns or body.record.provisional
        planned = {} if fixed else self._rules.moves.planned(self._history.head, body.changes)
        if unplanned := [move for move in body.changes.reassigns if planned.get(PeerId(move.peer)) != move.part]:
            raise Refused(f"{unplanned[0].peer} is not to move to {unplanned[0].part}, as everybody can plan")
        if body.record.dealt != self._rules.moves.dealt(self._history.head, body.changes):
            raise Refused("the record gives copies of parts to others than everybody can plan")
        if not kept_digests(self._history.head, body.changes).items() <= body.record.digests.items():
            raise Refused("the record has another digest than was, or was said, of a part that nobody held")
        if body.record.absent != body.changes.absent:
            raise Refused("the record's absent members are not those of its changes")
        if body.record.ended != body.changes.end(roster) or (body.record.ended and body.record.provisional):
            raise Refused("the run ends when all members ask for it, not provisionally, and else goes on")
        now = OpenStepFacts(step, roster, self._history.head_hash, provisional=body.record.provisional)
        workers = {one.microbatch.trainer for one in body.record.committed}
        following = with_work(self._changes.apply(now, body.changes), step, workers)
        if body.record.roster != following.members:
            raise Refused("the record's roster is not what the requests with it make of the one before")
        if body.record.admissions != self._changes.admissions(now, body.changes, following):
            raise Refused("the record's admissions are not what the requests and orders with it make of those before")
