"""Decide which peers join and leave when a step closes, and who of them has worked lately. Pure.

A peer asks for itself, with its signature, for one step after one record; the leader of that step gathers what it was
asked and puts the resulting roster into the close record; every member computes the same roster from the same requests
before it accepts. So nobody can be put into a roster, or out of it, against its will, and no old request can be used
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from swarm.columns import becomes, host_parts
from swarm.consensus.admissions import MAX_ORDERS, AdmissionPolicy, Admissions, check_orders
from swarm.consensus.faults import barred_words
from swarm.consensus.placement import holding
from swarm.consensus.proof import Proof
from swarm.consensus.roster import (
    HowToJoin,
    Member,
    Roster,
    join_words,
    lacking,
    lacks_server,
    lost_parts,
    serves_alone,
)
from swarm.consensus.slowness import rests_until
from swarm.errors import Refused, Violation
from swarm.ids import ENDS, PartName, PeerId, RunId
from swarm.schema import Count, DigestField, Message, PartField, PeerIdField, SignatureField
from swarm.security.credentials import Credential, Order
from swarm.security.signing import Verify

MAX_CHANGES = 64
"""Of each kind in one step; who comes later is asked to try the next one."""

ALL_ASKED = "all have been asked to leave"
"""How it begins what a leader says to one that cannot be spared, and need not be for long."""


class Admission(Message):
    """A peer that holds its part asks to be in the roster that the record of ``step`` names; where one must be admitted
    with its ``credential``. Of a part that its organisation keeps to itself, and that no member holds that is there,
    ``state`` is the digest of what it holds: nobody else has any."""

    step: Count
    member: Member
    signature: SignatureField
    credential: Annotated[Credential | None, Field(exclude_if=lambda credential: credential is None)] = None
    state: Annotated[DigestField | None, Field(exclude_if=lambda state: state is None)] = None


class Departure(Message):
    """A member asks not to be in the roster that the record of ``step`` names. ``ends``: where all members ask so, the
    run may end with it."""

    step: Count
    peer: PeerIdField
    ends: bool = False
    signature: SignatureField

    @model_serializer(mode="wrap")
    def _as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Peers of before know nothing of ``ends``."""
        plain: dict[str, Any] = dump(self)
        return {key: value for key, value in plain.items() if value or key != "ends"}


class Reassign(Message):
    """A member holds another part from the record of ``step`` on, instead of its own.

    Members sign it for a part of which they have a copy: one whose replicas are all lost, or one that needs them more
    than their own, as everybody plans (:mod:`swarm.step.moves`).
    """

    step: Count
    peer: PeerIdField
    part: PartField
    signature: SignatureField


class PersonsWord(Message):
    """A person where ``peer`` is has said that the run may go back from one record to another; good for these two."""

    peer: PeerIdField
    signature: SignatureField


class Changes(Message):
    """All requests that one close record grants, the members that were lost in its step, and the orders that it carries
    out. ``back`` proves the record to which the run goes back with it, ``wanted`` that a person agrees."""

    joins: Annotated[tuple[Admission, ...], Field(max_length=MAX_CHANGES)] = ()
    leaves: Annotated[tuple[Departure, ...], Field(max_length=MAX_CHANGES)] = ()
    reassigns: Annotated[tuple[Reassign, ...], Field(max_length=MAX_CHANGES)] = ()
    absent: Annotated[tuple[PeerIdField, ...], Field(max_length=20_000)] = ()
    orders: Annotated[tuple[Order, ...], Field(max_length=MAX_ORDERS, exclude_if=lambda orders: not orders)] = ()
    back: Annotated[Proof | None, Field(exclude_if=lambda back: back is None)] = None
    wanted: Annotated[PersonsWord | None, Field(exclude_if=lambda wanted: wanted is None)] = None

    def end(self, before: Roster) -> bool:
        """Return whether the run ends with the record: every member of the roster ``before`` asks for it, none was
        lost, and nobody joins or moves. Then all stay in the roster, for nobody has to do without anybody."""
        agreed = {leave.peer for leave in self.leaves if leave.ends}
        changed = self.joins or self.absent or self.reassigns
        return bool(agreed) and not changed and agreed == set(before.peers)


NO_CHANGES = Changes()


def admission_bytes(run: RunId, step: int, previous: str, member: Member, state: str | None = None) -> bytes:
    """Return the bytes that a peer signs to join with ``step``; ``previous`` is the hash of the record before,
    ``state`` as in :class:`Admission`."""
    text = json.dumps(member.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    said = f"join|{run}|{step}|{previous}|{hashlib.sha256(text.encode()).hexdigest()}"
    return (said if state is None else f"{said}|{state}").encode()


def departure_bytes(run: RunId, step: int, previous: str, peer: str, *, ends: bool = False) -> bytes:
    """Return the bytes that a member signs to leave; see :func:`admission_bytes` and :class:`Departure`."""
    return f"leave|{run}|{step}|{previous}|{peer}{'|ends' if ends else ''}".encode()


def reassign_bytes(run: RunId, step: int, previous: str, peer: str, part: str) -> bytes:
    """Return the bytes that a member signs to hold another part; see :func:`admission_bytes`."""
    return f"reassign|{run}|{step}|{previous}|{peer}|{part}".encode()


def wanted_bytes(run: RunId, previous: str, record: str) -> bytes:
    """Return the bytes that a peer signs where a person agrees that the run goes back to the record with the hash
    ``record``; see :func:`admission_bytes`."""
    return f"rewind|{run}|{previous}|{record}".encode()


def may_agree(roster: Roster, issuers: Collection[str], peer: str) -> bool:
    """Return whether the word of a person where this peer is counts: it may vote, or is an issuer of the run. One such
    word is enough, the leader's too."""
    return peer in issuers or (peer in roster and roster[PeerId(peer)].entitled)


@dataclass(frozen=True, slots=True)
class OpenStepFacts:
    """The open step at the time of a request: its members, the hash of the record before it, and, when the step is
    given up, the peers believed ``lost``, which may ask to join anew; ``before``, where it matters, is the hash of the
    record before that; ``provisional``: the step's record is to be."""

    step: int
    roster: Roster
    previous: str
    lost: Collection[str] = ()
    before: str = ""
    provisional: bool = False

    @property
    def ordering(self) -> Collection[PeerId]:
        """Those of whom more than half may order what issuers may: nobody where not all can be asked."""
        return () if self.provisional else self.roster.entitled

    @property
    def staying(self) -> Roster:
        """Those that are not lost."""
        return Roster(member for member in self.roster.members if member.peer not in self.lost)


@dataclass(frozen=True, slots=True)
class RosterRules:
    """The limits of a run's roster: ``most`` are the members for which a record has room; ``served`` as in
    :class:`~swarm.step.rules.StepRules`; ``dated``: members that join are noted with their first step
    (:attr:`Member.since`); ``how`` tells people how to join; ``admission`` says who may. Stages that share their layers
    part with the close of the first step from ``delink_at`` on, 0: never."""

    run: RunId
    most: int
    served: bool = False
    dated: bool = False
    how: HowToJoin = join_words
    admission: AdmissionPolicy = AdmissionPolicy()
    delink_at: int = 0

    def parts_after(self, step: int, before: Roster) -> tuple[PartName, ...]:
        """Return the parts there are from the close of a step of these members on: every one is held."""
        if not 0 < self.delink_at <= step:
            return before.parts
        return tuple(one for part in before.parts for one in becomes(part))


class ChangeRules:
    """Who may join and leave a run's roster, within its ``rules``."""

    def __init__(self, rules: RosterRules, verify: Verify) -> None:
        self._rules, self._verify = rules, verify

    def check_admission(self, now: OpenStepFacts, request: Admission) -> None:
        """Raises Refused with the reason, Violation for a forged request."""
        member, peer = request.member, PeerId(request.member.peer)
        if request.step != now.step:
            raise Refused(f"this asks to join in step {request.step}, step {now.step} is open")
        if peer in now.roster and peer not in now.lost:
            raise Refused(f"{peer} is in the roster already")
        signed = admission_bytes(self._rules.run, now.step, now.previous, member, request.state)
        if not self._verify(peer, signed, request.signature):
            raise Violation(f"the request of {peer} to join is forged")
        if now.step < (until := rests_until(now.roster.barred, peer)):
            raise Refused(f"{peer}: {barred_words(until)}")
        until = rests_until(now.roster.slow, peer)
        at_home = now.roster.borders.home(peer), member.part
        # What is lost, or lacks at home, is worth a slow one.
        if now.step < until and not now.lost and at_home not in lacking(now.roster, now.lost):
            wait = f"it may join again from step {until} on"
            raise Refused(f"{peer} held up step after step: {wait}; next: find out what slows its machine or its link")
        if member.part not in _parts_of(now.roster, member.role):
            raise Refused(f"a {member.role} of this run does not hold {member.part or 'nothing'}")
        if member.worked or member.since or member.mute:
            raise Violation(f"{peer} asks to join with work that nobody knows of")
        if self._rules.admission.closed:
            state = now.roster.admissions or self._rules.admission.first()
            self._rules.admission.check_joiner(state, now.step, member, request.credential, self._verify)
            self._check_own(now, state, request)
        if self._rules.served and (problem := lacks_server(now.staying, member, self._rules.how)):
            raise Refused(problem)

    @staticmethod
    def _check_own(now: OpenStepFacts, state: Admissions, request: Admission) -> None:
        """Raises Refused for who may not hold a part, or feed it, that an organisation keeps to itself; and unless it
        says which state it has of one that nobody else can give."""
        member = request.member
        # Nobody has looked at what an issuer shows.
        state.check_member(member, None if member.peer in state.issuers else request.credential)
        if member.part in state.owners and set(now.roster.replicas(PartName(member.part or ""))) <= set(now.lost):
            if request.state is None:
                raise Refused(f"{member.part} has no host, and this one does not say which state it has")
        elif request.state is not None:
            raise Refused(f"{member.part} is held by others, who give its state")

    def check_departure(self, now: OpenStepFacts, request: Departure) -> None:
        """Raises Refused with the reason, Violation for a forged request."""
        peer = PeerId(request.peer)
        if request.step != now.step or peer not in now.roster:
            raise Refused(f"{peer} asks to leave in step {request.step}; it is step {now.step}'s members that may now")
        signed = departure_bytes(self._rules.run, now.step, now.previous, peer, ends=request.ends)
        if not self._verify(peer, signed, request.signature):
            raise Violation(f"the request of {peer} to leave is forged")

    def check_reassign(self, now: OpenStepFacts, request: Reassign) -> None:
        """Raises Refused with the reason, Violation for a forged request."""
        peer, part = PeerId(request.peer), PartName(request.part)
        if request.step != now.step or peer not in now.roster or peer in now.lost:
            raise Refused(f"{peer} cannot hold {part} after step {now.step}")
        signed = reassign_bytes(self._rules.run, now.step, now.previous, peer, part)
        if not self._verify(peer, signed, request.signature):
            raise Violation(f"the request of {peer} to hold {part} is forged")
        if part not in _parts_of(now.roster, now.roster[peer].role):
            raise Refused(f"a {now.roster[peer].role} of this run does not hold {part}")
        if now.roster.admissions is not None:
            now.roster.admissions.check_own(part, peer)
        if part == now.roster[peer].part:
            raise Refused(f"{peer} holds {part} already")

    def check_wanted(self, now: OpenStepFacts, wanted: PersonsWord | None, record: str) -> None:
        """Raises Refused where nobody whose word counts has said that the run may go back to the record with this hash,
        Violation for a forged word."""
        if wanted is None:
            raise Refused("the run goes back only once a person has said so, and nobody has")
        issuers = (now.roster.admissions or self._rules.admission.first()).issuers
        if not may_agree(now.roster, issuers, wanted.peer):
            raise Refused(f"{wanted.peer} may not say that the run goes back: it neither votes nor issues invites")
        signed = wanted_bytes(self._rules.run, now.previous, record)
        if not self._verify(PeerId(wanted.peer), signed, wanted.signature):
            raise Violation(f"the word of {wanted.peer} that the run may go back is forged")

    def spared(
        self, before: Roster, leaving: Sequence[str], peer: str, *, lost: bool = False, moves: bool = False
    ) -> str | None:
        """Return why ``peer`` can not be spared when ``leaving`` go as well; None when it can. Of one that is ``lost``
        only what nobody can do without is asked. One that only ``moves`` keeps its vote.

        Who joins in the same step does not count: it takes the step's result from those who stay.
        """
        staying = [member for member in before.members if member.peer != peer and member.peer not in leaving]
        member = before[peer]
        kept = member.part in before.owners
        if member.part is not None and not kept and all(other.part != member.part for other in staying):
            return f"it holds the only replica of {member.part}: {_another(member, self._rules.how)}"
        if not moves and member.entitled and not any(other.entitled for other in staying):
            return f"it is the only one that may vote: {_another(member, self._rules.how)}"
        if member.role == "trainer" and all(other.role != "trainer" for other in staying):
            return f"it is the only trainer: {_another(member, self._rules.how)}"
        going = {peer, *leaving}
        if before.feeding(leaving) and not before.feeding(going):
            lacks = "no other organisation has a trainer and every stage"
            lacks = "no other trainer's microbatches have a way" if before.owners else lacks
            return f"{lacks}: {_another(member, self._rules.how)}"
        if self._rules.served and not lost and serves_alone(Roster(staying), member):
            return f"it is the only replica of {member.part} that others can call: {_another(member, self._rules.how)}"
        return None

    def gather(
        self, before: Roster, joins: Sequence[Admission], leaves: Sequence[Departure], absent: Collection[PeerId] = ()
    ) -> Changes:
        """Return the requests that a leader grants of the checked ones: in the order of the peers, as far as the record
        has room and the run can do without."""
        gone = sorted(absent)
        granted: list[Departure] = []
        for request in sorted(leaves, key=lambda leave: leave.peer)[:MAX_CHANGES]:
            going = [*gone, *(leave.peer for leave in granted)]
            if request.peer not in gone and not self.spared(before, going, request.peer):
                granted.append(request)
        room = max(0, min(MAX_CHANGES, self._rules.most - len(before) + len(granted) + len(gone)))
        return Changes(
            joins=tuple(alike_in_state(each_grant_once(sorted(joins, key=lambda join: join.member.peer)))[:room]),
            leaves=tuple(granted),
            absent=tuple(gone),
        )

    def move(self, before: Roster, changes: Changes, moves: Sequence[Reassign]) -> Changes:
        """Return the changes with those of the checked ``moves`` that their own part can do without, in the order of
        the peers."""
        going, granted = [*changes.absent, *(leave.peer for leave in changes.leaves)], list[Reassign]()
        for move in sorted(moves, key=lambda move: move.peer)[:MAX_CHANGES]:
            if move.peer not in going and self.spared(before, going, move.peer, moves=True) is None:
                granted.append(move)
                going.append(move.peer)
        return changes.model_copy(update={"reassigns": tuple(granted)})

    def end(self, before: Roster, leaves: Sequence[Departure]) -> Changes | None:
        """Return the grants when all members have sent a checked request that lets the run end; None when not all
        have, or more than a record has room for: then those leave first that can be spared."""
        if len(leaves) > MAX_CHANGES:
            return None
        changes = Changes(leaves=tuple(sorted(leaves, key=lambda leave: leave.peer)))
        return changes if changes.end(before) else None

    def apply(self, now: OpenStepFacts, changes: Changes) -> Roster:
        """Return the roster that a record with these changes must name; of one that ends the run, the same. Raises
        Refused or Violation for changes that no honest leader makes."""
        before = now.roster
        self._check_requests(now, changes)
        leaving = [*changes.absent, *(leave.peer for leave in changes.leaves)]
        if not set(changes.absent) <= set(before.peers):
            raise Violation("somebody was lost who did not take part")
        lost, going = set(changes.absent), [*leaving, *(move.peer for move in changes.reassigns)]
        if len(set(going)) != len(going):
            raise Violation("a peer that leaves or moves twice in one step")
        if changes.end(before):
            return self._parted(now, self._changed(now, [], changes))
        for index, peer in enumerate(going):
            if reason := self.spared(before, going[:index], peer, lost=peer in lost, moves=peer not in leaving):
                raise Refused(f"{peer} cannot leave{'' if peer in leaving else ' its part'}: {reason}")
        return self._parted(now, self._changed(now, leaving, changes))

    def give_up(self, now: OpenStepFacts, changes: Changes) -> Roster:
        """Return the roster that a record that gives its step up must name: without those that are lost, with every
        part held again, by a member that had a copy of it or by one that joins. Raises Refused or Violation for changes
        that no honest leader makes."""
        now = replace(now, lost=changes.absent)
        if changes.leaves or not set(changes.absent) <= set(now.roster.peers):
            raise Violation("a step that is given up names as lost who did not take part, or somebody leaves with it")
        if not lost_parts(now.roster, changes.absent):
            raise Violation("every part has a replica that is there: there is no reason to give the step up")
        self._check_requests(now, changes)
        roster = self._changed(now, changes.absent, changes)
        kept = now.roster.owners
        if missing := [part for part in now.roster.parts if not roster.replicas(part) and part not in kept]:
            raise Refused(f"nobody holds {', '.join(missing)}")
        if not roster.trainers or not roster.entitled:
            raise Refused("no trainer is left" if roster.entitled else "nobody is left that may vote")
        if now.roster.borders.drawn or kept:
            state = now.roster.admissions or self._rules.admission.first()
            if not Roster(roster.members, self._said(state, now, changes, roster)).feeding():
                lacks = (
                    "no trainer's microbatches have a way" if kept else "no organisation has a trainer and every stage"
                )
                raise Refused(lacks)
        return roster

    def _check_requests(self, now: OpenStepFacts, changes: Changes) -> None:
        """Check every request by itself, and that nobody makes two of a kind."""
        for join in changes.joins:
            self.check_admission(now, join)
        for leave in changes.leaves:
            self.check_departure(now, leave)
        for move in changes.reassigns:
            self.check_reassign(now, move)
        joining = {join.member.peer for join in changes.joins}
        moving = {move.peer for move in changes.reassigns}
        if len(joining) != len(changes.joins) or len(moving) != len(changes.reassigns):
            raise Violation("a peer that joins or moves twice in one step")
        if each_grant_once(changes.joins) != list(changes.joins):
            raise Violation("two peers that join with one invite")
        if alike_in_state(changes.joins) != list(changes.joins):
            raise Violation("two peers that join one part with two states of it")

    def admissions(self, now: OpenStepFacts, changes: Changes, following: Roster) -> Admissions | None:
        """Return what the record with these checked changes must say of admission, whose roster is ``following``; None
        where anybody may join. Raises Refused for orders that are not to be carried out."""
        rules, state = self._rules.admission, now.roster.admissions or self._rules.admission.first()
        if not rules.closed and changes.orders:
            raise Refused("orders in a run that anybody may join")
        if not rules.closed:
            return None
        check_orders(rules, state, now.step, changes.orders, now.ordering, self._verify)
        said = self._said(state, now, changes, following)
        if out := _out(said, following):
            raise Refused(f"the record's roster names {min(out)}, whose invite was revoked")
        return said

    def _said(self, state: Admissions, now: OpenStepFacts, changes: Changes, following: Roster) -> Admissions:
        # Nobody has looked at what an issuer shows.
        used = [j.credential for j in changes.joins if j.credential and j.member.peer not in state.issuers]
        return self._rules.admission.following(state, now.step, used, changes.orders, following.peers)

    def with_due(self, now: OpenStepFacts, changes: Changes, following: Roster, orders: Collection[Order]) -> Changes:
        """Return the changes with those of the orders that the record of the open step, whose roster is ``following``,
        is to carry out: what would leave out somebody that is in it has to wait for the next."""
        state = now.roster.admissions
        if state is None or not orders:
            return changes
        sorted_ = sorted(orders, key=lambda one: one.key)
        for order in self._rules.admission.due(state, now.step, sorted_, now.ordering, self._verify):
            more = changes.model_copy(update={"orders": (*changes.orders, order)})
            if not _out(self._said(state, now, more, following), following):
                changes = more
        return changes

    def _changed(self, now: OpenStepFacts, leaving: Collection[str], changes: Changes) -> Roster:
        """Return the roster without ``leaving``, with who joins, and with who moves at its new part. Raises Refused
        for more members than a record has room for."""
        before, new = now.roster, {"since": now.step + 1} if self._rules.dated else {}
        places = {move.peer: move.part for move in changes.reassigns}
        staying = [member for member in before.members if member.peer not in leaving]
        moved = [m.model_copy(update={"part": places[m.peer], **new}) if m.peer in places else m for m in staying]
        joined = [join.member.model_copy(update={**new, **self._mute(now, join)}) for join in changes.joins]
        roster = Roster([*moved, *joined])
        if len(roster) > max(self._rules.most, len(before)):
            raise Refused(f"a roster of {len(roster)} where a record has room for {self._rules.most}")
        return roster

    def too_few(self, now: OpenStepFacts, changes: Changes) -> str:
        """Return why stages cannot part yet with the step in which these are granted; "" where they can, or do not."""
        parts = host_parts(self._rules.parts_after(now.step, now.roster))
        if parts == host_parts(now.roster.parts):
            return ""
        leaving = {*changes.absent, *(leave.peer for leave in changes.leaves)}
        staying = [*(m for m in now.roster.members if m.peer not in leaving), *(join.member for join in changes.joins)]
        hosts = sum(member.role == "stage" for member in staying)
        if hosts >= len(parts):
            return ""
        return f"{len(parts)} stage hosts, for stages share their layers no more after this step: {hosts} are here"

    def _parted(self, now: OpenStepFacts, roster: Roster) -> Roster:
        """Return the roster of the step after, in which stages may share nothing any more: each host has one of its
        own. Raises Refused where they are fewer than the stages."""
        parts = self._rules.parts_after(now.step, now.roster)
        placed = roster if parts == now.roster.parts else holding(roster, parts)
        if self._rules.dated and placed is not roster:
            return Roster(
                m.model_copy(update={"since": now.step + 1}) if m.role == "stage" else m for m in placed.members
            )
        return placed

    def _mute(self, now: OpenStepFacts, join: Admission) -> dict[str, bool]:
        admission = self._rules.admission
        muted = admission.mute(now.roster.admissions or admission.first(), join.member.peer, join.credential)
        return {"mute": True} if muted else {}


def _parts_of(roster: Roster, role: str) -> tuple[PartName | None, ...]:
    """Return what a peer of a role may hold, of a roster in which every part is held that nobody keeps to itself."""
    if role == "stage":
        return tuple(part for part in roster.all_parts if part != ENDS)
    return (ENDS,) if role == "trainer" and ENDS in roster.parts else (None,)


def _out(said: Admissions, following: Roster) -> set[str]:
    """Return those of the roster whom the record calls revoked."""
    return (said.banned(said.void).keys() & set(following.peers)) - set(said.issuers)


def each_grant_once(joins: Sequence[Admission]) -> list[Admission]:
    """Return the requests without those that use a grant that one before them uses."""
    used, found = set[str](), list[Admission]()
    for join in joins:
        serial = "" if join.credential is None else join.credential.grant.serial
        if serial not in used:
            found.append(join)
        used |= {serial} - {""}
    return found


def alike_in_state(joins: Sequence[Admission]) -> list[Admission]:
    """Return the requests without those that say another state of a part than one before them."""
    said: dict[str | None, str | None] = {}
    return [join for join in joins if said.setdefault(join.member.part, join.state) == join.state]


def _another(member: Member, how: HowToJoin) -> str:
    """Return, in words, the condition under which a member can be spared."""
    part = PartName(member.part) if member.role == "stage" and member.part else None
    return f"another must join first ({how(part)}), or all be asked to leave, which ends the run in order"


# --- who has worked --------------------------------------------------------------------------------------------------


WORK_STEPS = 16
"""For so many steps committed work gives a vote to who holds no part."""


def with_work(roster: Roster, step: int, workers: Collection[str]) -> Roster:
    """Return the roster that the record of ``step`` names, in which work of ``workers`` was committed. What is noted of
    a member changes at most every WORK_STEPS / 2 steps."""

    def worked(member: Member) -> int:
        age = step - member.worked
        if member.part is not None:
            return 0
        if member.peer in workers and (not member.worked or age >= WORK_STEPS // 2):
            return step
        return member.worked if age < WORK_STEPS else 0

    return Roster(m if (at := worked(m)) == m.worked else m.model_copy(update={"worked": at}) for m in roster.members)
