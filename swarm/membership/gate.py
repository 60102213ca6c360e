"""The gate of a run that not everybody may join: who a caller is, asked before a byte of what it sends is decoded.

A caller that nobody knows shows its credential once (``admit/1/present``), which is verified once against the issuers
that the newest record names, and remembered by its peer id, which the transport proves. Whom that record names as a
member needs none: the majority that decided it has renewed it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from swarm.consensus.admissions import AdmissionPolicy, Admissions, check_sense, is_past
from swarm.consensus.records import CloseRecord, voters
from swarm.errors import Busy, PeerError, Refused, Unadmitted, Violation
from swarm.ids import PeerId
from swarm.membership.access import METHODS, CallerAccess
from swarm.network.discovery.records import PeerRecord
from swarm.network.protocols import AnyMethod, Directory, RecordT, Rpc, Service
from swarm.schema import Record
from swarm.security.credentials import Credential, Order, role_that_holds
from swarm.security.signing import Verify
from swarm.step.member.open_step import OpenStep
from swarm.step.member.position import Forking

MAX_REMEMBERED = 2048
"""Credentials that were shown, the one used longest ago is forgotten first: its holder shows it again."""
MAX_PENDING_EACH = 4
"""Orders that one peer may have signed that wait for the signatures of others."""
MAX_PENDING = 1024
"""Orders that no record has carried out yet."""


class Standpoint(Protocol):
    """What a peer knows of the run: :class:`swarm.step.member.position.Position`. ``open`` has its vote in the open
    step, ``forking`` where the provisional lineage began that it is of."""

    open: OpenStep
    forking: Forking

    @property
    def head(self) -> CloseRecord | None:
        """The newest record that is decided here."""


class CallGate:
    """One peer's gate. ``may`` is what its endpoint asks (:data:`swarm.network.protocols.May`); ``credential`` what
    admits the peer itself, None for an issuer."""

    def __init__(self, rules: AdmissionPolicy, me: PeerId, credential: Credential | None, verify: Verify) -> None:
        self.rules, self.credential = rules, credential
        self._me, self._verify = me, verify
        self._at: Standpoint | None = None
        self._founder: PeerId | None = None
        self._observed: CloseRecord | None = None
        self._shown: OrderedDict[PeerId, Credential] = OrderedDict()
        self._verified: OrderedDict[str, PeerError | None] = OrderedDict()
        self._pending: dict[str, Order] = {}
        self._view = _View(None, rules.first())
        self.expel: Callable[[PeerId, str], None] = lambda peer, reason: None

    def follow(self, at: Standpoint, founder: PeerId) -> None:
        """Take what this peer knows from there from now on; until there is a record ``founder`` leads."""
        self._at, self._founder, self._observed = at, founder, None

    def observed(self, record: CloseRecord) -> None:
        """Take this verified record, which a peer sees before it is a member."""
        if self._observed is None or record.age > self._observed.age:
            self._observed = record

    # --- who may -------------------------------------------------------------------------------------------------

    def may(self, caller: PeerId, rpc: Rpc[Any, Any]) -> None:
        """Raise Unadmitted for a caller that must show a credential first, or whose credential does not count; Refused
        for what its credential does not allow, Busy for what only members may, of whom it may be one by now."""
        needed = METHODS.get(rpc.name)
        if needed is None:
            raise Refused(f"{rpc.name} is open to nobody")
        self.require(caller, needed, rpc.name)

    def require(self, caller: PeerId, needed: CallerAccess, what: str) -> None:
        """Raise as :meth:`may` for a caller that is less than is ``needed`` for this."""
        if caller == self._me or needed is CallerAccess.STRANGER:
            return
        found = self.access_of(caller)
        if found >= needed:
            return
        if found is CallerAccess.JOINER and needed >= CallerAccess.MEMBER:
            raise Busy(f"{caller} is no member of the run yet, as far as is known here")
        raise Refused(f"{what} is for a {needed.name.lower()}, and {caller} is a {found.name.lower()} here")

    def may_fetch(self, caller: PeerId, part: str) -> None:
        """Raise as :meth:`may` for a caller that may look, but learn nothing of the model; Refused for one that is to
        join in a role that does not hold this part, and for whoever is not of the organisation that keeps it to itself.
        A member holds, or copies, what its record says."""
        self.require(caller, CallerAccess.JOINER, "a part of the model")
        shown, view = self._shown.get(caller), self._looked()
        if caller != self._me:
            view.state.check_own(part, caller, None if caller in view.access else shown)
        if shown is None or shown.grant.gives(part) or self.access_of(caller) >= CallerAccess.MEMBER:
            return
        needed = f"that takes an invite as {role_that_holds(part)}, or as any"
        raise Refused(f"{part} is not for who joins as {shown.grant.role}: {needed}")

    def access_of(self, caller: PeerId) -> CallerAccess:
        """Return what a caller is. Raises Unadmitted, saying why, for a stranger."""
        view = self._looked()
        shown = self._shown.get(caller)
        if (reason := view.banned.get(caller)) is not None:
            if not self._counts_anew(view, caller):
                raise Unadmitted(reason)
        elif (member := view.access.get(caller)) is not None:
            return member
        elif (expected := self._expected(caller)) is not None:
            return expected
        if caller in view.state.issuers:
            found = CallerAccess.JOINER
        elif shown is None:
            raise Unadmitted("this run admits by invite, and the caller has shown none")
        else:
            self._check_now(view, shown)
            found = CallerAccess.OBSERVER if shown.grant.role == "observer" else CallerAccess.JOINER
        founds = view.head is None and caller == self._founder
        return CallerAccess.VOTER if founds and found is CallerAccess.JOINER else found

    def _counts_anew(self, view: _View, peer: PeerId) -> bool:
        """Return whether one that was revoked has shown, or has itself, another grant since, with which it may join
        anew."""
        shown = self.credential if peer == self._me else self._shown.get(peer)
        if shown is None:
            return False
        try:
            self._check_now(view, shown)
        except Unadmitted:
            return False
        return True

    def _check_now(self, view: _View, shown: Credential) -> None:
        try:
            view.state.check_grant(shown.grant, shown.peer, view.step)
        except Refused as refused:
            raise Unadmitted(refused.reason) from None
        if shown.grant.serial in view.void:
            raise Unadmitted(f"the invite for {shown.grant.name} was revoked")

    def _expected(self, caller: PeerId) -> CallerAccess | None:
        """Return what it is by the record that we have accepted, which may be decided elsewhere before we hear of it;
        and by the one after which our lineage went on by itself, whose voters say together what counts."""
        if self._at is None:
            return None
        vote, fork = self._at.open.ballot.vote, self._at.forking.fork
        for record in (None if vote is None else vote.record, None if fork is None else fork.point):
            if record is not None and caller in record.members:
                return _access(record.members[caller].mute)
        return None

    def show(self, caller: PeerId, credential: Credential) -> None:
        """Take a caller's credential. Raises Unadmitted with the cause, Violation for a forged one or another's. Cost:
        0.2 ms the first time, then next to nothing."""
        if credential.peer != caller:
            raise Violation(f"{caller} shows the credential of {credential.peer}")
        view = self._looked()
        self._check_signed(view, credential)
        self._check_now(view, credential)
        self._shown[caller] = credential
        self._shown.move_to_end(caller)
        if len(self._shown) > MAX_REMEMBERED:
            self._shown.popitem(last=False)

    def _check_signed(self, view: _View, credential: Credential) -> None:
        text = credential.text()
        if text not in self._verified:
            self._verified[text] = self._found_out(view, credential)
            if len(self._verified) > MAX_REMEMBERED:
                self._verified.popitem(last=False)
        if (error := self._verified[text]) is not None:
            raise type(error)(error.reason)

    def _found_out(self, view: _View, credential: Credential) -> PeerError | None:
        try:
            self.rules.check_signed(view.state, credential, self._verify)
        except Refused as refused:
            return Unadmitted(refused.reason)
        except Violation as forged:
            return forged
        return None

    def attests(self, peer: PeerId, credential: Credential | None) -> bool:
        """Return whether what a peer says of itself in the directory counts."""
        view = self._looked()
        known = peer in view.access or peer in view.state.issuers or peer == self._me
        if known and peer not in view.banned:
            return True
        if credential is None or credential.peer != peer or credential.grant.role == "observer":
            return False
        try:
            self._check_signed(view, credential)
            self._check_now(view, credential)
        except PeerError:
            return False
        return True

    # --- what is known -------------------------------------------------------------------------------------------

    @property
    def state(self) -> Admissions:
        """Return what the newest record that is known here says of admission."""
        return self._looked().state

    @property
    def members(self) -> Sequence[PeerId]:
        """The members that the newest record names."""
        head = self._looked().head
        return () if head is None else head.members.peers

    @property
    def step(self) -> int:
        """The step that is open, as far as is known here."""
        return self._looked().step

    def _looked(self) -> _View:
        head = None if self._at is None else self._at.head
        if self._observed is not None and (head is None or head.step < self._observed.step):
            head = self._observed
        if head is not self._view.head:
            self._look(head)
        return self._view

    def _look(self, head: CloseRecord | None) -> None:
        before, state = self._view, (None if head is None else head.admissions) or self.rules.first()
        step, provisional = (0 if head is None else head.step + 1), head is not None and head.provisional
        entitled = () if head is None else head.members.entitled
        electors = () if head is None else voters(head.members, head.hash())
        ordering = () if provisional else entitled  # of whom more than half order what issuers may
        was_due = {order.key for order in before.due}  # what was cut off stays so, whatever comes later
        pending = sorted(self._pending.values(), key=lambda one: (one.key not in was_due, one.key))
        due = self.rules.due(state, step, pending, ordering, self._verify, electors=electors)
        self._view = view = _View(head, state, due, ordering)
        if state.issuers != before.state.issuers:
            self._verified.clear()
            self._shown.clear()
        if not provisional:  # what a provisional record carried out may have to be carried out again
            self._forget({*state.issuers, *entitled})
        for peer, reason in view.banned.items():
            if (peer in view.access or peer not in before.banned) and not self._counts_anew(view, peer):
                self.expel(peer, reason)

    def _forget(self, counting: Collection[str]) -> None:
        """Forget orders that are carried out, or cannot be any more, and those of which no signature counts."""
        state, step = self._view.state, self._view.step
        for key, order in list(self._pending.items()):
            if is_past(state, step, order) or not order.signatures.keys() & counting:
                del self._pending[key]

    # --- orders --------------------------------------------------------------------------------------------------

    def take(self, order: Order) -> Order | None:
        """Take an order, with what others signed of it; return it as it is known now if that is news, else None.
        Raises Refused for one that nobody who may has signed, and one that can be carried out no more; Busy where who
        signed it has too many pending of which too few have signed, Violation for a forged signature. Cost: 0.1 ms a
        signature that is new."""
        view = self._looked()
        head = view.head
        if order.run != self.rules.run:
            raise Refused("this order is for another run")
        if order.serial in view.state.void and not (head is not None and head.provisional):
            return None
        check_sense(view.state, view.step, order)
        known, merged = self._pending.get(order.key), self._merged(view, order)
        if known is not None and merged.signatures.keys() <= known.signatures.keys():
            return None
        if known is None:
            self._check_room(view, merged)
        pending = self._pending
        self._pending = {**pending, order.key: merged}
        try:
            self._look(head)
        except BaseException:
            self._pending = pending
            raise
        return merged

    def _merged(self, view: _View, order: Order) -> Order:
        """Return the order with those of its signatures that count, and those that are known. Raises Refused where
        none counts, Violation for the first that is forged."""
        known = self._pending.get(order.key)
        may_sign = {*view.state.issuers, *(() if view.head is None else view.head.members.entitled)}
        said, signed = order.signed_bytes(), {} if known is None else dict(known.signatures)
        for peer, signature in order.signatures.items():
            if peer in may_sign and peer not in signed:
                if not self._verify(PeerId(peer), said, bytes.fromhex(signature)):
                    raise Violation(f"the signature of {peer} under the order to {order.verb} {order.name} is forged")
                signed[peer] = signature
        signed = {peer: signature for peer, signature in signed.items() if peer in may_sign}
        if not signed:
            raise Refused(f"nobody who may has signed the order to {order.verb} {order.name}")
        return order.model_copy(update={"signatures": signed})

    def _check_room(self, view: _View, order: Order) -> None:
        """Raises Busy for a new order of peers that have signed too many already which are not due, unless enough have
        signed this one."""
        if len(self._pending) >= MAX_PENDING:
            raise Busy(f"{MAX_PENDING} orders are pending")
        if self._is_signed(view, order):
            return
        due = {one.key for one in view.due}
        spent = Counter(peer for key, one in self._pending.items() if key not in due for peer in one.signatures)
        if all(spent[peer] >= MAX_PENDING_EACH for peer in order.signatures):
            raise Busy(f"{MAX_PENDING_EACH} orders of {min(order.signatures)} are pending that too few have signed")

    def _is_signed(self, view: _View, order: Order) -> bool:
        try:
            self.rules.check_order(view.state, view.step, order, view.ordering, self._verify)
        except Refused:
            return False
        return True

    @property
    def orders(self) -> Collection[Order]:
        """Those that enough have signed, and no record has carried out yet."""
        return self._looked().due

    @property
    def votes(self) -> Sequence[Order]:
        """Orders that too few have signed so far, with the signatures that count."""
        view = self._looked()
        return [one for one in self._pending.values() if not self._is_signed(view, one)]

    def counts(self, order: Order) -> bool:
        """Return whether enough have signed it, or it was carried out."""
        view = self._looked()
        return any(one.key == order.key for one in view.due) or order.serial in view.state.void

    def waits(self, order: Order) -> bool:
        """Return whether enough have signed it, and it has to wait: for others that are due, or because those that
        would be left are no majority of those who decide the next record."""
        view, known = self._looked(), self._pending.get(order.key)
        return known is not None and not self.counts(order) and self._is_signed(view, known)


class _View:
    """What follows from one record, and from orders that are ``due`` with the next; ``ordering`` as there."""

    def __init__(
        self,
        head: CloseRecord | None,
        state: Admissions,
        due: Sequence[Order] = (),
        ordering: Collection[PeerId] = (),
    ) -> None:
        self.head, self.state, self.due, self.ordering = head, state, tuple(due), ordering
        self.step = 0 if head is None else head.step + 1
        self.void = state.void | {order.serial for order in due if order.verb == "revoke"}
        self.banned = {PeerId(peer): reason for peer, reason in state.banned(self.void).items()}
        members = () if head is None else head.roster
        self.access = {PeerId(member.peer): _access(member.mute) for member in members}


def _access(mute: bool) -> CallerAccess:
    return CallerAccess.MEMBER if mute else CallerAccess.VOTER


class AdmittedDirectory:
    """A directory in which only records of those who may take part are seen."""

    def __init__(self, directory: Directory, gate: CallGate) -> None:
        self._directory, self._gate = directory, gate

    async def announce(self, record: Record, *, ttl_s: float) -> None:
        """See :class:`~swarm.network.protocols.Directory`."""
        await self._directory.announce(record, ttl_s=ttl_s)

    async def lookup(self, kind: type[RecordT]) -> dict[PeerId, RecordT]:
        """See :class:`~swarm.network.protocols.Directory`."""
        found = await self._directory.lookup(kind)
        return {peer: record for peer, record in found.items() if self._gate.attests(peer, _shown_in(record))}


def _shown_in(record: Record) -> Credential | None:
    return record.credential if isinstance(record, PeerRecord) else None


def given_by_role(service: Service, gate: CallGate | None) -> Service:
    """Return a service whose calls about a part are refused to callers whose invite is for another role.

    Args:
        service: What hands out parts; it knows no roles.
        gate: Who a caller is; None in a run that anybody may join, where the service stays as it is.
    """
    return service if gate is None else _ByRole(service, gate)


class _ByRole:
    """``service`` behind what :meth:`CallGate.may_fetch` says of each request that names a part: before the service
    admits it, so that it costs nothing to refuse."""

    def __init__(self, service: Service, gate: CallGate) -> None:
        self._service, self._gate = service, gate

    def methods(self) -> Sequence[AnyMethod]:
        """See :class:`~swarm.network.protocols.Service`."""
        return [self._checked(method) for method in self._service.methods()]

    def _checked(self, method: AnyMethod) -> AnyMethod:
        def admit(caller: PeerId, body: Any, payload_bytes: int) -> None:
            if (part := getattr(body, "part", None)) is not None:
                self._gate.may_fetch(caller, part)
            if method.admit is not None:
                method.admit(caller, body, payload_bytes)
            elif payload_bytes:
                raise Violation("this takes no payload", peer=caller)

        return replace(method, admit=admit)
