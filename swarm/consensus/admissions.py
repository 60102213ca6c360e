"""Who may take part in a run, as its close records carry it: issuers, who used which grant, and what was revoked. Pure.

The newest decided record says it all, so a run needs no issuer to go on: whom its roster names stays, a joiner's
credential is verified against the issuers named here, and a majority of the voters may do all that issuers may, but
grant. Read :class:`Admissions`, then :class:`AdmissionPolicy`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, Protocol

from pydantic import Field

from swarm.columns import takes
from swarm.consensus.majority import majority
from swarm.errors import Refused, Violation
from swarm.ids import PartName, PeerId, RunId
from swarm.schema import MAX_COUNT, Count, Message, OrganisationName, PartField, PeerIdField, Section
from swarm.security.credentials import (
    MAX_ISSUERS,
    Credential,
    Grant,
    GrantRole,
    HolderName,
    Order,
    SerialField,
    Verify,
    check_credential,
)
from swarm.security.signing import public_key_of

MAX_HOLDERS, MAX_REVOKED = 1024, 1024
"""Of grants that were used, and of those that count no more: what has expired makes room for what has not."""
MAX_ORDERS = 16
"""Of one record."""
ADMISSIONS_BYTES = MAX_HOLDERS * 320 + MAX_REVOKED * 120 + MAX_ISSUERS * 64
"""An upper estimate of what all that takes in a record."""


class AdmissionConfig(Section):
    """``[admission]``: who may join."""

    mode: Literal["open", "token", "organisation"] = "open"
    """``open``: anybody who knows the run joins; ``token``: who has an invite for one peer, or is named;
    ``organisation``: only peers that issuers have named."""
    issuers: Annotated[tuple[PeerIdField, ...], Field(max_length=MAX_ISSUERS)] = ()
    """Peer ids of those who may invite at first; where there is none, the founder names itself."""
    threshold: Annotated[int, Field(ge=1, le=MAX_ISSUERS)] = 1
    """How many issuers must sign each invite."""
    organisation: Annotated[OrganisationName, Field(exclude_if=lambda name: not name)] = ""
    """Organisation of the issuers named here, who need no invite: where ``split.routes`` keeps microbatches in one."""

    @property
    def closed(self) -> bool:
        """Return whether one must be admitted."""
        return self.mode != "open"


class Holder(Message):
    """A grant that was used, and by whom."""

    serial: SerialField
    peer: PeerIdField
    name: HolderName
    organisation: OrganisationName = ""
    role: GrantRole
    vote: bool
    until_step: Count

    @staticmethod
    def of(credential: Credential) -> Holder:
        """Make it of a credential."""
        grant = credential.grant
        return Holder(
            serial=grant.serial,
            peer=credential.peer,
            name=grant.name,
            organisation=grant.organisation,
            role=grant.role,
            vote=grant.vote,
            until_step=grant.until_step,
        )


class Revoked(Message):
    """A grant that counts no more; remembered until it would have expired, and as long as its holder is."""

    serial: SerialField
    name: HolderName
    until_step: Count


class Admissions(Message):
    """What a decided record says of admission. ``number`` counts the changes of ``issuers`` so far; ``holders`` are in
    the order in which they came. ``own_routes``: microbatches stay in the organisation of their trainer. ``owners`` has
    the organisation of each part that one keeps to itself."""

    issuers: Annotated[tuple[PeerIdField, ...], Field(max_length=MAX_ISSUERS)]
    number: Count = 0
    holders: Annotated[tuple[Holder, ...], Field(max_length=MAX_HOLDERS)] = ()
    revoked: Annotated[tuple[Revoked, ...], Field(max_length=MAX_REVOKED)] = ()
    own_routes: Annotated[bool, Field(exclude_if=lambda own: not own)] = False
    owners: Annotated[
        dict[PartField, OrganisationName], Field(max_length=1024, exclude_if=lambda owners: not owners)
    ] = {}

    @cached_property
    def by_serial(self) -> Mapping[str, Holder]:
        """Return who used which grant."""
        return {one.serial: one for one in self.holders}

    @cached_property
    def by_peer(self) -> Mapping[str, Holder]:
        """Return the newest grant that each peer has used, of those that count if one does."""
        return {one.peer: one for one in sorted(self.holders, key=lambda one: one.serial not in self.void)}

    @cached_property
    def organisations(self) -> Mapping[str, str]:
        """Return the organisation of each peer whose grant counts and names one."""
        counting = {peer: one for peer, one in self.by_peer.items() if one.serial not in self.void}
        return {peer: one.organisation for peer, one in counting.items() if one.organisation}

    def check_own(self, part: str | None, peer: str, shown: Credential | None = None) -> None:
        """Raises Refused for a part that an organisation keeps to itself, unless ``peer`` is of it: by a grant that it
        has used, or by the checked one that it has ``shown``."""
        if not (owner := self.owners.get(part or "")):
            return
        if owner not in (self.organisations.get(peer), None if shown is None else shown.grant.organisation):
            raise Refused(f"{part} is an expert that {owner} keeps to itself, and {peer} is not of {owner}")

    def check_member(self, member: _Named, shown: Credential | None = None) -> None:
        """As :meth:`check_own`, of what a member is to hold; of a trainer also of what its microbatches pass."""
        passed = [part for part in self.owners if member.role == "trainer" and takes(PartName(part), member.choice)]
        for part in (member.part, *passed):
            self.check_own(part, member.peer, shown)

    @cached_property
    def void(self) -> frozenset[str]:
        """Return the serials that were revoked."""
        return frozenset(one.serial for one in self.revoked)

    def banned(self, void: Collection[str]) -> Mapping[str, str]:
        """Return, by peer, why those are out of whose grants all are ``void``."""
        counting = {one.peer for one in self.holders if one.serial not in void}
        return {p: f"the invite for {one.name} was revoked" for p, one in self.by_peer.items() if p not in counting}

    def check_grant(self, grant: Grant, peer: str, step: int) -> None:
        """Check what changes with a run: that the grant may be used by ``peer`` with ``step``; who has used it before
        may come back whenever it likes. Raises Refused."""
        if grant.serial in self.void:
            raise Refused(f"the invite for {grant.name} was revoked")
        used = self.by_serial.get(grant.serial)
        if used is not None and used.peer != peer:
            raise Refused(f"the invite for {grant.name} was used by another peer: it is for one")
        if used is None and step > grant.until_step:
            raise Refused(f"the invite for {grant.name} expired with step {grant.until_step}; step {step} is open")


class _Named(Protocol):
    """What is asked of a member here."""

    @property
    def peer(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def part(self) -> str | None: ...
    @property
    def choice(self) -> int: ...
    @property
    def mute(self) -> bool: ...
    @property
    def entitled(self) -> bool: ...


def may_serve_as(grant: Grant, role: str) -> bool:
    """Return whether the holder may be a member in this role; a peer that holds nothing needs a grant for all."""
    return grant.allows(role) if role != "bootstrap" else grant.role == "any"


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What the manifest says of admission: everybody applies it alike. ``own_routes`` and ``owners``: see
    :class:`Admissions`."""

    run: RunId = RunId("")
    config: AdmissionConfig = AdmissionConfig()
    own_routes: bool = False
    owners: Mapping[PartName, str] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Return whether one must be admitted."""
        return self.config.closed

    def first(self) -> Admissions:
        """Return what holds before the first record."""
        issuers = tuple(sorted(set(self.config.issuers)))
        holders = (self._first_holder(peer) for peer in issuers) if self.config.organisation else ()
        owners = {str(part): owner for part, owner in self.owners.items()}
        return Admissions(issuers=issuers, holders=tuple(holders), own_routes=self.own_routes, owners=owners)

    def _first_holder(self, issuer: str) -> Holder:
        """Return what stands for the grant of a first issuer, who needs none: it is of an organisation all the same."""
        name, serial = self.config.organisation, hashlib.sha256(f"issuer|{issuer}".encode()).hexdigest()[:16]
        return Holder(
            serial=serial, peer=issuer, name=name, organisation=name, role="any", vote=True, until_step=MAX_COUNT
        )

    def needed(self, state: Admissions) -> int:
        """Return how many issuers must sign: no more than there are."""
        return max(1, min(self.config.threshold, len(state.issuers)))

    def check_signed(self, state: Admissions, credential: Credential, verify: Verify) -> None:
        """Check what never changes of a credential; see :func:`check_credential`. Cost: 0.2 ms."""
        named = self.config.mode == "organisation"
        needed = self.needed(state)
        check_credential(credential, run=self.run, issuers=state.issuers, threshold=needed, named=named, verify=verify)

    def check_joiner(
        self, state: Admissions, step: int, member: _Named, credential: Credential | None, verify: Verify
    ) -> None:
        """Raises Refused, or Violation for a forged credential, unless ``member`` may join with ``step``."""
        if member.peer in state.issuers:
            return
        if credential is None:
            raise Refused("this run admits by invite, and the request shows none")
        if credential.peer != member.peer:
            raise Violation(f"{member.peer} shows the credential of {credential.peer}")
        self.check_signed(state, credential, verify)
        state.check_grant(credential.grant, member.peer, step)
        if not may_serve_as(credential.grant, member.role):
            raise Refused(f"the invite for {credential.grant.name} is for {credential.grant.role}, not {member.role}")
        if self.own_routes and not credential.grant.organisation:
            raise Refused(f"the invite for {credential.grant.name} names no organisation, and microbatches stay in one")
        known = credential.grant.serial in state.by_serial
        if not known and sum(one.until_step >= step for one in state.holders) >= MAX_HOLDERS:
            raise Refused(f"{MAX_HOLDERS} grants are in use: some must expire or be revoked first")

    def mute(self, state: Admissions, peer: str, credential: Credential | None) -> bool:
        """Return whether a member has no vote, as its credential says, or one that it used before."""
        if not self.closed or peer in state.issuers:
            return False
        if credential is not None:
            return not credential.grant.vote
        held = state.by_peer.get(peer)
        return held is not None and not held.vote

    def homes(self, state: Admissions, shown: Iterable[Credential]) -> Mapping[str, str] | None:
        """Return the organisation of each peer that has one, by ``state`` and what newcomers have ``shown``; None where
        microbatches pass anybody."""
        if not self.own_routes:
            return None
        return {**{one.peer: one.grant.organisation for one in shown}, **state.organisations}

    def may_hold(self, state: Admissions, shown: Iterable[Credential]) -> Mapping[PartName, Collection[str]]:
        """Return who may hold each part that an organisation keeps to itself, by ``state`` and what newcomers have
        ``shown``."""
        new = {one.peer: one.grant.organisation for one in shown if one.peer not in state.issuers}  # whom nobody checks
        known = {**new, **state.organisations}
        return {part: {p for p, at in known.items() if at == owner} for part, owner in self.owners.items()}

    # --- founding ------------------------------------------------------------------------------------------------

    def founding(
        self, before: Admissions | None, step: int, used: Sequence[Credential], roster: Collection[str]
    ) -> Admissions | None:
        """Return what the record says with which a run begins: after ``before``, the state of the checkpoint that it
        goes on from, with the credentials of its members; None where anybody may join."""
        return self.following(before or self.first(), step, used, (), roster) if self.closed else None

    def check_founding(
        self, said: Admissions | None, step: int, members: Sequence[_Named], used: Sequence[Credential], verify: Verify
    ) -> None:
        """Raises Refused, or Violation for forged credentials, unless a run may begin with ``members``, of which the
        record has ``said`` this: each an issuer, or the holder of a grant of its own, and one at least with a vote. A
        run that begins with initial weights has the manifest's issuers; of one that goes on the founder is believed
        what the record before said, as it is about cursors. Cost: 0.2 ms a member."""
        if not self.closed or said is None:
            if self.closed != (said is not None):
                raise Refused("the record says of admission what the manifest does not")
            return
        if (said.own_routes, said.owners) != (self.own_routes, self.owners):
            raise Refused("the record says of routes, or of who keeps what to itself, what the manifest does not")
        begins = step == 0
        state, shown = self.first() if begins else said, {one.peer: one for one in used}
        _check_founders(state, members, used)
        for member in members:
            held = said.by_peer.get(member.peer)
            if begins or member.peer in shown or (held is None and member.peer not in said.issuers):
                self.check_joiner(state, step, member, shown.get(member.peer), verify)
            elif held is not None and held.serial in said.void:
                raise Refused(f"the invite for {held.name} was revoked")
            said.check_member(member)
            if member.mute != self.mute(state, member.peer, shown.get(member.peer)):
                raise Refused(f"the record gives {member.peer} a vote that its credential does not")
        if begins and said != self.founding(None, step, used, [member.peer for member in members]):
            raise Refused("the record's admissions are not those that its members' credentials give")

    # --- orders --------------------------------------------------------------------------------------------------

    def check_order(self, state: Admissions, step: int, order: Order, voters: Collection[str], verify: Verify) -> None:
        """Raises Refused unless the order is to be carried out with ``step``: enough issuers signed it, or more than
        half of the ``voters``: it alters nothing before a record that takes a majority (:mod:`.majority`) carries it
        out. Cost: 0.1 ms a signature."""
        if order.run != self.run:
            raise Refused("this order is for another run")
        check_due(state, step, order)
        issuers, needed = order.signers(state.issuers, verify), self.needed(state)
        if len(issuers) >= needed and state.issuers:
            return
        voted = order.signers(voters, verify)
        if 2 * len(voted) <= len(voters):
            who = f"{len(issuers)} of {needed} issuers and {len(voted)} of {len(voters)} voters signed it"
            raise Refused(f"to {order.verb} {order.name} takes more: {who}")

    def due(
        self,
        state: Admissions,
        step: int,
        orders: Iterable[Order],
        voters: Collection[str],
        verify: Verify,
        *,
        electors: Collection[str] = (),
    ) -> list[Order]:
        """Return those of the orders that the record of ``step`` can carry out, one by one. What would leave out
        so many of the ``electors``, who decide that record, that the others are no majority of them has to wait."""
        found: list[Order] = []
        for order in orders:
            if len(found) == MAX_ORDERS:
                break
            try:
                self.check_order(state, step, order, voters, verify)
            except Refused:
                continue
            then = _carried_out(state, order)
            out, before = then.banned(then.void), state.banned(state.void)
            left = sum(peer not in out for peer in electors)
            if len(out) > len(before) and electors and left < majority(len(electors)):
                continue
            state = then
            found.append(order)
        return found

    # --- from record to record -----------------------------------------------------------------------------------

    def following(
        self, state: Admissions, step: int, used: Sequence[Credential], orders: Sequence[Order], roster: Collection[str]
    ) -> Admissions:
        """Return what the record of ``step`` says: with the grants that were ``used`` and the orders carried out, all
        of which were checked; ``roster`` are its members. Where there is no room for all, holders go first whose grant
        has expired and who are not in the roster."""
        fresh = {one.grant.serial: Holder.of(one) for one in used if one.peer not in state.issuers}
        new = tuple(one for serial, one in sorted(fresh.items()) if serial not in state.by_serial)
        held = _roomy((*state.holders, *new), step, roster)
        state = Admissions(issuers=state.issuers, number=state.number, holders=held, revoked=state.revoked)
        for order in orders:
            state = _carried_out(state, order)
        serials = {one.serial for one in state.holders}
        void = [one for one in state.revoked if one.until_step >= step or one.serial in serials]
        over = {one.serial for one in sorted(void, key=lambda one: one.until_step)[: max(0, len(void) - MAX_REVOKED)]}
        return Admissions(
            issuers=tuple(sorted(state.issuers)),
            number=state.number,
            holders=tuple(one for one in state.holders if one.serial not in over),
            revoked=tuple(one for one in void if one.serial not in over),
            own_routes=self.own_routes,
            owners={str(part): owner for part, owner in self.owners.items()},
        )


def _roomy(holders: Sequence[Holder], step: int, roster: Collection[str]) -> tuple[Holder, ...]:
    """Return as many of the holders as a record has room for, in their order."""

    def worth(at: int) -> tuple[bool, bool, int]:
        return holders[at].peer in roster, holders[at].until_step >= step, at

    kept = sorted(range(len(holders)), key=worth)[-MAX_HOLDERS:]
    return tuple(holders[at] for at in sorted(kept))


def _carried_out(state: Admissions, order: Order) -> Admissions:
    issuers, number, revoked = state.issuers, state.number, state.revoked
    if order.verb == "revoke":
        held = state.by_serial.get(order.serial)
        until = order.until_step if held is None else held.until_step
        revoked = (*revoked, Revoked(serial=order.serial, name=order.name, until_step=until))
    else:
        others = tuple(peer for peer in issuers if peer != order.peer)
        issuers = (*others, order.peer) if order.verb == "appoint" else others
        number += 1
    return Admissions.model_construct(
        issuers=issuers,
        number=number,
        holders=state.holders,
        revoked=revoked,
        own_routes=state.own_routes,
        owners=state.owners,
    )


def check_due(state: Admissions, step: int, order: Order) -> None:
    """Raises Refused unless the record of ``step`` can carry the order out, no matter who signed it."""
    check_sense(state, step, order)
    if order.verb == "revoke":
        if order.serial in state.void:
            raise Refused(f"the invite for {order.name} is revoked already")
        return
    if order.after != state.number:
        raise Refused(f"the issuers have changed since: {state.number} times, not {order.after}")
    if (order.verb == "appoint") == (order.peer in state.issuers):
        raise Refused(f"{order.peer} {'is' if order.verb == 'appoint' else 'is not'} an issuer")
    if order.verb == "appoint" and len(state.issuers) >= MAX_ISSUERS:
        raise Refused(f"there are {MAX_ISSUERS} issuers: dismiss one first")


def check_sense(state: Admissions, step: int, order: Order) -> None:
    """Raises Refused for an order that no record from that of ``step`` on can carry out: one about nothing that there
    is, or that comes too late."""
    if order.verb != "revoke":
        if public_key_of(PeerId(order.peer)) is None:
            raise Refused(f"{order.peer!r} is no peer id")
        if order.after < state.number:
            raise Refused(f"the issuers have changed since: {state.number} times, not {order.after}")
    elif not order.serial:
        raise Refused("this order revokes nothing")
    elif order.until_step < step and order.serial not in state.by_serial:
        raise Refused(f"the invite for {order.name} has expired, and nobody holds it")


def is_past(state: Admissions, step: int, order: Order) -> bool:
    """Return whether an order was carried out, or cannot be any more."""
    try:
        check_sense(state, step, order)
    except Refused:
        return True
    return order.serial in state.void


def _check_founders(state: Admissions, members: Sequence[_Named], used: Sequence[Credential]) -> None:
    """Raises Refused unless each of the credentials that are ``used`` is a member's, no grant is used twice, and one of
    the members votes."""
    if not {one.peer for one in used} <= {member.peer for member in members}:
        raise Refused("the record comes with credentials of peers that are no members")
    serials = [one.grant.serial for one in used if one.peer not in state.issuers]
    if len(set(serials)) < len(serials):
        raise Refused("two members use one invite, and each is for one")
    if not any(member.entitled for member in members):
        raise Refused("none of the members may vote")


def check_orders(
    rules: AdmissionPolicy,
    state: Admissions,
    step: int,
    orders: Sequence[Order],
    voters: Collection[PeerId],
    verify: Verify,
) -> None:
    """Raises Refused unless all of the orders are to be carried out, one after the other, in the order of their
    keys."""
    if list(orders) != rules.due(state, step, sorted(orders, key=lambda one: one.key), voters, verify):
        raise Refused("the record carries out an order that too few signed, or that was carried out before")
