"""What a running peer does about who may join its run: grant invites, revoke them, change who grants them, report."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peers.console.words import (
    CommandError,
    agreed_text,
    command_name,
    command_to_invite,
    command_to_order,
    listed,
    named,
)
from peers.control.choose import begins
from peers.control.status import AdmissionReport, Revocation
from peers.exit_codes import EXIT_ERROR, EXIT_USAGE
from peers.invites.invite import Granted, parse_invite
from peers.invites.wishes import DEFAULT_EXPIRES, WISHES, check_peer_id, check_wishes, seconds_of
from peers.settings import PeerSettings
from swarm.clock import Clock
from swarm.config import Manifest
from swarm.consensus.roster import lost_parts
from swarm.disk import write_whole
from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.membership.admission import AdmissionService
from swarm.membership.membership import Membership
from swarm.membership.roles import PeerContext
from swarm.schema import Count
from swarm.security.credentials import SEED_BYTES, Grant, Order, SignedGrant, new_serial, sign_grant
from swarm.security.signing import PrivateIdentity
from swarm.step.blocked import awaited_holders

ISSUED_FILE = "issued.json"
MAX_ISSUED = 4096
MAX_TOLD = 64
"""Of the invites that nobody has used, and of the votes that are open, so many are in a status."""


class IssuedGrant(SignedGrant):
    """A grant that was signed here, and when: seconds since the epoch, 0 where that was not noted."""

    given: Count = 0


class _Due(NamedTuple):
    """A grant that may be revoked; ``peer`` is "" where nobody has used it."""

    serial: str
    name: str
    until: int
    peer: str


@dataclass(slots=True, kw_only=True)
class Admitting:
    """One peer's part in admission. ``issued`` is the file with the grants that it signed: an invite that nobody has
    used yet is in no record, and can be revoked all the same."""

    manifest: Manifest
    identity: PrivateIdentity
    service: AdmissionService
    membership: Membership
    issued: Path
    clock: Clock
    _known: list[IssuedGrant] | None = field(default=None, init=False)

    @staticmethod
    def of(
        settings: PeerSettings, identity: PrivateIdentity, around: PeerContext, membership: Membership
    ) -> Admitting | None:
        """Make it for a peer; None in a run that anybody may join."""
        if around.admission is None:
            return None
        return Admitting(
            manifest=around.manifest,
            identity=identity,
            service=around.admission,
            membership=membership,
            issued=settings.identity.with_name(ISSUED_FILE),
            clock=around.clock,
        )

    def grant(self, request: Mapping[str, Any]) -> Granted:
        """Sign a grant: for ``for``, as ``role``, which ``expires`` in 7d, say, for the peer ``id`` or a one-time key.
        Raises CommandError."""
        check_wishes({key: request[key] for key in WISHES if request.get(key) is not None})
        self._check_issuer()
        holder, seed = str(request.get("id") or ""), None
        if self.manifest.admission.mode == "organisation" and not holder:
            name, role = str(request["for"]), str(request.get("role") or "any")
            raise CommandError("this run admits only peers that an issuer names by id", check="which id has the peer?",
                               next_=f"{command_name()} id --create, on the machine that shall join; then here: "
                               f"{command_to_invite('organisation', role, name)}", exit_code=EXIT_USAGE)  # fmt: skip
        if self.service.gate.rules.own_routes and not request.get("organisation") and request.get("role") != "observer":
            name = str(request["for"])
            raise CommandError("the invite needs an organisation: microbatches of this run stay in one",
                               check="which organisation does the holder belong to?",
                               next_=f"{command_name()} invite --for {name} --organisation NAME",
                               exit_code=EXIT_USAGE)  # fmt: skip
        if not holder:
            seed = secrets.token_bytes(SEED_BYTES)
            holder = PrivateIdentity(seed).peer
        grant = Grant(
            run=self.manifest.run_id,
            serial=new_serial(),
            name=str(request["for"]),
            organisation=str(request.get("organisation") or ""),
            role=request.get("role") or "any",
            vote=bool(request.get("vote", True)),
            until_step=self._until(str(request.get("expires") or DEFAULT_EXPIRES)),
            key=holder,
        )
        signed = sign_grant(grant, self.identity)
        self._remember(signed)
        return Granted(grant=signed, seed=seed)

    def _until(self, expires: str) -> int:
        """The step by which a grant expires that is for so long, at the pace of the newest step; the run's last where
        no step has been timed yet."""
        seconds, rate = seconds_of(expires), self.membership.situation.tokens_per_s
        last, batch = self.manifest.run.steps, self.manifest.batch
        if not rate:
            return last
        step_s = batch.microbatch_size * self.manifest.step_microbatches * self.manifest.model.context / rate
        return min(last, self.service.gate.step + math.ceil(seconds / step_s))

    # --- revoking ------------------------------------------------------------------------------------------------

    def revoke(self, wanted: str, gone: Mapping[PeerId, str], *, sure: bool) -> Revocation:
        """Revoke what was granted to somebody, as an issuer, or vote for it as a member.

        Args:
            wanted: The name of an invite, all of them of that name; or a peer's name, or the beginning of its id.
            gone: Members that do not answer, and why: they hold nothing now.
            sure: Whether it is done also where nobody else holds a part of the model.

        Returns:
            What came of it; nothing was done where it asks.

        Raises:
            CommandError: For a name that nobody has, or that could mean several.
        """
        gate = self.service.gate
        grants = self._meant(wanted)
        void = gate.state.void | {one.serial for one in gate.orders if one.verb == "revoke"}
        due = [grant for serial, grant in sorted(grants.items()) if serial not in void]
        if not due:
            raise self._nobody(wanted, known=bool(grants))
        held = gate.state.by_serial
        peers = [PeerId(held[one.serial].peer) for one in due if one.serial in held]
        if not sure and (asks := self._costs(peers, gone)):
            return Revocation(asks=asks)
        run = self.manifest.run_id
        orders = [Order(verb="revoke", run=run, name=one.name, serial=one.serial, until_step=one.until) for one in due]
        for order in orders:
            self._give(order)
        who = wanted if wanted == due[0].name else f"{wanted}, who has the invite for {due[0].name},"
        if all(gate.counts(one) for one in orders):
            return Revocation(said=self._revoked(who, peers))
        if all(gate.counts(one) or gate.waits(one) for one in orders):
            return Revocation(
                said=f"{who} is to be revoked, which waits: those that would be left are no majority of those that "
                "decide the next record. It is cut off as soon as they are: others go first, or more that vote must "
                "join"
            )
        return Revocation(said=self._voted(orders, wanted))

    def _meant(self, wanted: str) -> dict[str, _Due]:
        """Return the grants that a name means, by serial, of those that were used or that somebody could still use.
        Raises CommandError where it could be the names of several."""
        gate, roster = self.service.gate, self.membership.roster
        known = {one.serial: _Due(one.serial, one.name, one.until_step, one.peer) for one in gate.state.holders}
        for one in (issued.grant for issued in self._issued()):
            if one.until_step >= gate.step:
                known.setdefault(one.serial, _Due(one.serial, one.name, one.until_step, ""))
        called = {peer for peer in roster.peers if wanted in (roster.names[peer], roster[peer].name)}
        by_invite = {serial: one for serial, one in known.items() if one.name == wanted}
        by_peer = {serial: one for serial, one in known.items() if one.peer in called or begins(one.peer, wanted)}
        others = {one.peer for one in by_peer.values()} - {one.peer for one in by_invite.values()}
        if len(others) + bool(by_invite) > 1:
            could = [f"the invite for {wanted}"] if by_invite else []
            could += [f"{roster.names.get(PeerId(peer), 'a peer that left')}, {peer}" for peer in sorted(others)]
            raise CommandError(f"{wanted!r} fits several peers", check="; ".join(could), exit_code=EXIT_USAGE,
                               next_=f"{command_name()} revoke PEER_ID, with one of these ids")  # fmt: skip
        return by_invite or by_peer

    def _nobody(self, wanted: str, *, known: bool) -> CommandError:
        """Return the error for a name that means no grant which is still good."""
        state, roster = self.service.gate.state, self.membership.roster
        for peer in state.issuers:
            if begins(peer, wanted) or (peer in roster and wanted in (roster.names[PeerId(peer)], roster[peer].name)):
                return CommandError(f"{wanted!r} is an issuer of the run: no invite admitted it",
                                    check=f"{command_name()} issuers shows who is", exit_code=EXIT_ERROR,
                                    next_=f"{command_name()} issuers --dismiss {peer}")  # fmt: skip
        names = sorted({one.name for one in state.holders if one.serial not in state.void})
        again = "is revoked already" if known else "fits no peer that this run has admitted"
        return CommandError(f"{wanted!r} {again}", check=f"admitted are {listed(names) or 'none'}",
                            next_=f"{command_name()} status --peer PEER shows who is",
                            exit_code=EXIT_ERROR)  # fmt: skip

    def _costs(self, peers: Sequence[PeerId], gone: Mapping[PeerId, str]) -> str:
        """Say what the run would wait for without these peers that it does not wait for now; "" for nothing."""
        roster, out = self.membership.roster, {**gone, **dict.fromkeys(peers, "revoked")}
        parts = [part for part in lost_parts(roster, out) if part not in lost_parts(roster, gone)]
        if not parts:
            return ""
        named_so = listed([roster.names[peer] for peer in peers if peer in roster])
        waits = awaited_holders(roster, out, self.manifest.run.copies)
        return f"nobody but {named_so} holds {listed(parts)}: the run would wait for {waits}"

    def _revoked(self, who: str, peers: Sequence[PeerId]) -> str:
        """Say what became of who has these grants, in the newest record: a member, one that left, or nobody."""
        if any(peer in self.membership.roster for peer in peers):
            return f"{who} is revoked: it is cut off now, and out of the roster with the next record"
        if peers:
            return f"{who} is revoked: it is no member now, and cannot come back with its invite"
        return f"the invite for {who} is revoked: by the newest record nobody had joined with it, and now nobody can"

    def _give(self, order: Order) -> bool:
        """Sign an order and have it told; return whether it counts. Raises CommandError for who may not."""
        signed = order.with_signature(self.identity)
        try:
            self.service.give(signed)
        except PeerError as error:
            raise CommandError(f"the order to {order.verb} {order.name} was refused: {error.reason}",
                               check="this peer is neither an issuer of the run nor one that votes",
                               next_=f"{command_to_order(order.verb, order.peer or order.name)}, on the machine of an "
                               "issuer, or of more than half of those that vote",
                               exit_code=EXIT_ERROR) from None  # fmt: skip
        return self.service.gate.counts(signed)

    def _voted(self, orders: Sequence[Order], who: str) -> str:
        """Say how the vote about these orders stands, which are all about ``who``: who has agreed, who can, and what
        they type. Of several orders that which fewest have signed counts."""
        gate, roster, me = self.service.gate, self.membership.roster, self.identity.peer
        keys, issuers = {one.key for one in orders}, gate.state.issuers
        still_open = (one for one in gate.votes if one.key in keys)
        order = min(still_open, key=lambda one: len(one.signatures), default=orders[0])
        signed = order.signatures.keys()
        agreed = [peer for peer in roster.entitled if peer in signed]
        left = [peer for peer in roster.entitled if peer not in signed]
        said = f"a vote to {order.verb} {who} {'was begun' if signed <= {me} else 'is under way'}"
        stands = agreed_text(len(agreed), len(roster.entitled))
        others = f"of those that vote, {listed(left) or 'nobody'} can agree, too"
        if issuers:
            needed, have = gate.rules.needed(gate.state), len(signed & set(issuers))
            deciding = "one issuer decides it alone" if needed == 1 else f"{needed} issuers decide it ({have} signed)"
            others += f"; or {deciding}: {listed(issuers)}"
        here = roster[me].name if me in roster else "PEER"
        lines = [
            f"{said}: {stands}. Until then nothing changes",
            f"agreed: {listed(agreed) or 'no voter'}; {others}",
            f"each of them types, at its own peer: {command_to_order(order.verb, who)}",
            f"how it stands: {command_name()} status --peer {here}, or the same again here",
        ]
        return named("\n  ".join(lines), roster.names)

    # --- issuers -------------------------------------------------------------------------------------------------

    def issuers(self, request: Mapping[str, Any]) -> str:
        """Say who may invite, having signed an order to ``appoint`` or ``dismiss`` a peer where one is named. Raises
        CommandError."""
        state = self.service.gate.state
        needed = self.service.gate.rules.needed(state)
        verbs: tuple[Literal["appoint", "dismiss"], ...] = ("appoint", "dismiss")
        asked = [(verb, str(request[verb])) for verb in verbs if request.get(verb)]
        if not asked:
            signing = "" if needed == 1 else f", of which {needed} sign each invite"
            return (
                f"{listed(state.issuers)}{signing}" if state.issuers else "none is left: --appoint one, by a majority"
            )
        (verb, peer), *more = asked
        if more:
            raise CommandError("--appoint and --dismiss were given together", check="each is an order of its own",
                               next_=f"{command_name()} issuers --appoint PEER_ID, then --dismiss PEER_ID",
                               exit_code=EXIT_USAGE)  # fmt: skip
        check_peer_id(f"--{verb}", peer)
        if (verb == "appoint") == (peer in state.issuers):
            raise CommandError(f"{peer} is {'already' if verb == 'appoint' else 'not'} an issuer",
                               check=f"the issuers are {listed(state.issuers) or 'gone'}",
                               next_=f"{command_name()} issuers", exit_code=EXIT_USAGE)  # fmt: skip
        if verb == "dismiss" and len(state.issuers) == 1:
            raise CommandError(f"{peer} is the last issuer: nobody could invite any more",
                               check=f"{command_name()} issuers shows who may", exit_code=EXIT_USAGE,
                               next_=f"{command_name()} issuers --appoint PEER_ID, another one, first")  # fmt: skip
        order = Order(verb=verb, run=self.manifest.run_id, name=peer[-12:], peer=peer, after=state.number)
        if self._give(order):
            return f"{peer} is {'an' if verb == 'appoint' else 'no'} issuer with the next record"
        return self._voted([order], peer)

    def countersign(self, text: str) -> str:
        """Return an invite of this run with this issuer's signature beside the others'. Raises CommandError, and
        ConfigError for what is no invite."""
        invite = parse_invite(text)
        granted = invite.granted
        if invite.run != self.manifest.run_id or granted is None:
            raise CommandError("this invite is not for the run of this peer, or grants nothing",
                               check=f"the run of this peer is {self.manifest.run_id[:12]}",
                               next_=f"{command_to_invite(self.manifest.admission.mode)}, at the first issuer",
                               exit_code=EXIT_USAGE)  # fmt: skip
        self._check_issuer()
        signed = sign_grant(granted.grant.grant, self.identity, granted.grant.signatures)
        self._remember(signed)
        return replace(invite, granted=Granted(grant=signed, seed=granted.seed)).text()

    def _check_issuer(self) -> None:
        issuers = self.service.gate.state.issuers
        if self.identity.peer not in issuers:
            raise CommandError("this peer may not invite: it is no issuer of the run",
                               check=f"the issuers are {listed(issuers) or 'gone'}",
                               next_=f"{command_to_invite(self.manifest.admission.mode)}, at one of them",
                               exit_code=EXIT_ERROR)  # fmt: skip

    def report(self) -> AdmissionReport:
        """Return who is in, for people."""
        state = self.service.gate.state
        return AdmissionReport(
            mode=self.manifest.admission.mode,
            issuers=state.issuers,
            admitted=tuple((one.name, one.role, one.peer) for one in state.holders if one.serial not in state.void),
            revoked=tuple(one.name for one in state.revoked),
            votes=self._votes(),
            invited=tuple(
                (one.grant.name, one.grant.role, one.grant.until_step, one.given) for one in self._unused()[-MAX_TOLD:]
            ),
        )

    def _votes(self) -> tuple[tuple[str, str, int, int], ...]:
        """Votes that are open, one for each name: of several orders about it that which fewest have signed counts."""
        voters, found = set(self.membership.roster.entitled), dict[tuple[str, str], int]()
        for one in self.service.gate.votes[:MAX_TOLD]:
            key, agreed = (one.verb, one.peer or one.name), len(one.signatures.keys() & voters)
            found[key] = min(agreed, found.get(key, agreed))
        return tuple((verb, who, agreed, len(voters)) for (verb, who), agreed in sorted(found.items()))

    # --- what was issued here ------------------------------------------------------------------------------------

    def _unused(self) -> list[IssuedGrant]:
        """Those of them that somebody could still join with, the newest last."""
        gate = self.service.gate
        out = gate.state.by_serial.keys() | gate.state.void | {one.serial for one in gate.orders}
        return [one for one in self._issued() if one.grant.serial not in out and one.grant.until_step >= gate.step]

    def _issued(self) -> list[IssuedGrant]:
        """Return what this place has issued for the run; nothing where that cannot be read."""
        if self._known is None:
            try:
                lines = self.issued.read_text().splitlines()[-MAX_ISSUED:]
                found = [IssuedGrant.model_validate_json(line) for line in lines]
            except (OSError, ValueError):
                found = []
            self._known = [one for one in found if one.grant.run == self.manifest.run_id]
        return self._known

    def _remember(self, signed: SignedGrant) -> None:
        """Note it before anybody has it. Raises CommandError when the disk refuses."""
        new = IssuedGrant(grant=signed.grant, signatures=signed.signatures, given=int(self.clock.wall()))
        issued = [*self._issued()[-MAX_ISSUED + 1 :], new]
        try:
            write_whole(self.issued, ["\n".join(one.model_dump_json() for one in issued).encode() + b"\n"], mode=0o600)
        except OSError as error:
            raise CommandError(f"{self.issued} cannot be written: {error.strerror}", check="is the disk full? df -h",
                               next_="make room, then repeat the command", exit_code=EXIT_ERROR) from None  # fmt: skip
        self._known = issued


def granted_by(admitting: Admitting | None, request: Mapping[str, Any]) -> Granted | None:
    """Return what an invite grants; None for one to a run that anybody may join. Raises CommandError where it must name
    whom it is for, and where it need not."""
    if admitting is None:
        if request.get("for"):
            raise open_run("an invite is for anybody: leave --for out")
        return None
    if not request.get("for"):
        raise CommandError("this run admits by invite, one for each peer", check="who is the invite for?",
                           next_=command_to_invite(admitting.manifest.admission.mode, "stage"),
                           exit_code=EXIT_USAGE)  # fmt: skip
    return admitting.grant(request)


def open_run(why: str) -> CommandError:
    """The error for what only a run has that not everybody may join."""
    return CommandError(f"anybody may join this run: {why}", check="its manifest says admission.mode = open",
                        next_=f"{command_name()} new --admission token, for a run that admits by invite",
                        exit_code=EXIT_USAGE)  # fmt: skip
