"""The gate of a run that not everybody may join: who a caller is, asked before a byte of what it sends is decoded.

A caller that nobody knows shows its credential once (``admit/1/present``), which is verified once against the issuers
that the newest record names, and remembered by its peer id, which the transport proves. Whom that record names as a
member needs none: the majority that decided it has renewed it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from swarm.consensus.acceptor import Vote
from swarm.consensus.admissions import AdmissionPolicy, Admissions
from swarm.consensus.records import CloseRecord
from swarm.errors import Busy, PeerError, Refused, Unadmitted, Violation
from swarm.ids import PeerId
from swarm.membership.access import METHODS, CallerAccess
from swarm.network.discovery.records import PeerRecord
from swarm.network.protocols import Directory, RecordT, Rpc
from swarm.schema import Record
from swarm.security.credentials import Credential, Order, Verify

MAX_REMEMBERED = 2048
"""Credentials that were shown, the one used longest ago is forgotten first: its holder shows it again."""
MAX_PENDING = 64
"""Orders that no record has carried out yet."""


class Standpoint(Protocol):
    """What a peer knows of the run: :class:`swarm.step.member.position.Position`."""

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
        self._verified: OrderedDict[str, None] = OrderedDict()
        self._pending: dict[str, Order] = {}
        self._view = _View(None, rules.first())
        self.expel: Callable[[PeerId, str], None] = lambda peer, reason: None

    def follow(self, at: Standpoint, founder: PeerId) -> None:
        """Take what this peer knows from there from now on; until there is a record ``founder`` leads."""
        self._at, self._founder = at, founder

    def observed(self, record: CloseRecord) -> None:
        """Take this verified record, which a peer sees before it is a member."""
        if self._observed is None or record.step > self._observed.step:
            self._observed = record

    # --- who may -------------------------------------------------------------------------------------------------

    def may(self, caller: PeerId, rpc: Rpc[Any, Any]) -> None:
        """Raise Unadmitted for a caller that must show a credential first, or whose credential does not count; Refused
        for what its credential does not allow, Busy for what only members may, of whom it may be one by now."""
        needed = METHODS.get(rpc.name)
        if needed is None:
            raise Refused(f"{rpc.name} is open to nobody")
        if caller == self._me or needed is CallerAccess.STRANGER:
            return
        found = self.access_of(caller)
        if found >= needed:
            return
        if found is CallerAccess.JOINER and needed >= CallerAccess.MEMBER:
            raise Busy(f"{caller} is no member of the run yet, as far as is known here")
        raise Refused(f"{rpc.name} is for a {needed.name.lower()}, and {caller} is a {found.name.lower()} here")

    def access_of(self, caller: PeerId) -> CallerAccess:
        """Return what a caller is. Raises Unadmitted, saying why, for a stranger."""
        view = self._looked()
        if (reason := view.banned.get(caller)) is not None:
            raise Unadmitted(reason)
        if (member := view.access.get(caller)) is not None:
            return member
        if (expected := self._expected(caller)) is not None:
            return expected
        shown = self._shown.get(caller)
        if caller in view.state.issuers:
            found = CallerAccess.JOINER
        elif shown is None:
            raise Unadmitted("this run admits by invite, and the caller has shown none")
        else:
            self._check_now(view, shown)
            found = CallerAccess.OBSERVER if shown.grant.role == "observer" else CallerAccess.JOINER
        founds = view.head is None and caller == self._founder
        return CallerAccess.VOTER if founds and found is CallerAccess.JOINER else found

    def _check_now(self, view: _View, shown: Credential) -> None:
        try:
            view.state.check_grant(shown.grant, shown.peer, view.step)
        except Refused as refused:
            raise Unadmitted(refused.reason) from None
        if shown.grant.serial in view.void:
            raise Unadmitted(f"the invite for {shown.grant.name} was revoked")

    def _expected(self, caller: PeerId) -> CallerAccess | None:
        """What it is by the record that we have accepted, which may be decided elsewhere before we hear of it."""
        vote = _vote_of(self._at)
        if vote is None or caller not in vote.record.members:
            return None
        return _access(vote.record.members[caller].mute)

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
            try:
                self.rules.check_signed(view.state, credential, self._verify)
            except Refused as refused:
                raise Unadmitted(refused.reason) from None
            self._verified[text] = None
            if len(self._verified) > MAX_REMEMBERED:
                self._verified.popitem(last=False)

    def vouches(self, peer: PeerId, credential: Credential | None) -> bool:
        """Return whether what a peer says of itself in the directory counts."""
        view = self._looked()
        if peer in view.banned:
            return False
        if peer in view.access or peer in view.state.issuers or peer == self._me:
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
        """What the newest record that is known here says of admission."""
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
        voters = () if head is None else head.members.entitled
        due = self.rules.due(state, self._pending.values(), voters, self._verify)
        self._view = view = _View(head, state, due)
        if state.issuers != before.state.issuers:
            self._verified.clear()
            self._shown.clear()
        for key, order in list(self._pending.items()):
            if order.verb != "revoke" and order.after < state.number or order.serial in state.void:
                del self._pending[key]
        for peer, reason in view.banned.items():
            if peer in view.access or peer not in before.banned:
                self.expel(peer, reason)

    # --- orders --------------------------------------------------------------------------------------------------

    def take(self, order: Order) -> Order | None:
        """Take an order, with what others signed of it; return it as it is known now if that is news, else None.
        Raises Refused for one that nobody who may has signed, Busy when too many are pending. Cost: 0.1 ms a
        signature."""
        view = self._looked()
        if order.run != self.rules.run:
            raise Refused("this order is for another run")
        if order.verb == "revoke" and order.serial in view.state.void:
            return None
        known = self._pending.get(order.key)
        may_sign = {*view.state.issuers, *(() if view.head is None else view.head.members.entitled)}
        if known is not None and order.signatures.keys() <= known.signatures.keys():
            return None
        signers = order.signers(may_sign, self._verify)
        if not signers:
            raise Refused(f"nobody who may has signed the order to {order.verb} {order.name}")
        if known is None and len(self._pending) >= MAX_PENDING:
            raise Busy(f"{MAX_PENDING} orders are pending")
        signed = {**({} if known is None else known.signatures), **{peer: order.signatures[peer] for peer in signers}}
        merged = order.model_copy(update={"signatures": signed})
        self._pending[order.key] = merged
        self._look(view.head)
        return merged

    @property
    def orders(self) -> Collection[Order]:
        """Those that enough have signed, and no record has carried out yet."""
        return self._looked().due

    def counts(self, order: Order) -> bool:
        """Return whether enough have signed it, or it was carried out."""
        view = self._looked()
        return any(one.key == order.key for one in view.due) or order.serial in view.state.void


class _View:
    """What follows from one record, and from orders that are ``due`` with the next."""

    def __init__(self, head: CloseRecord | None, state: Admissions, due: Sequence[Order] = ()) -> None:
        self.head, self.state, self.due = head, state, tuple(due)
        self.step = 0 if head is None else head.step + 1
        self.void = state.void | {order.serial for order in due if order.verb == "revoke"}
        self.banned = {
            PeerId(one.peer): f"the invite for {one.name} was revoked"
            for one in state.by_peer.values()
            if one.serial in self.void
        }
        members = () if head is None else head.roster
        self.access = {PeerId(member.peer): _access(member.mute) for member in members}


def _access(mute: bool) -> CallerAccess:
    return CallerAccess.MEMBER if mute else CallerAccess.VOTER


def _vote_of(at: Standpoint | None) -> Vote | None:
    opened = getattr(at, "open", None)
    return None if opened is None else opened.ballot.vote


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
        return {peer: record for peer, record in found.items() if self._gate.vouches(peer, _shown_in(record))}


def _shown_in(record: Record) -> Credential | None:
    return record.credential if isinstance(record, PeerRecord) else None
