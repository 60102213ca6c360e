"""Credentials: what an issuer grants, who holds it, and the check of both without asking anybody. Pure.

An issuer signs a :class:`Grant` for a one-time key, whose private half travels in an invite, or for a peer id. The
one who got it signs his own peer id with that key: both together are a :class:`Credential`. A copy of it is of no use
to another, for the transport proves whose peer id calls.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from swarm.errors import Refused, Violation
from swarm.ids import ENDS, PeerId
from swarm.schema import Count, DigestField, Message, OrganisationName, PeerIdField
from swarm.security.signing import PrivateIdentity, Verify

GrantRole = Literal["stage", "trainer", "observer", "any"]
"""What the holder may do: one of the two, look only, or all."""

HolderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")]
SerialField = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
SignatureHex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]

MAX_ISSUERS = 16
MAX_CREDENTIAL_CHARS = 6144
"""Of a credential as text: one with the signatures of all issuers has room."""

SEED_BYTES = 32


class Grant(Message):
    """What issuers allow one holder, in one run. ``until_step`` is the last step with whose record it may be used to
    come in; ``key`` is the one-time key, as a peer id, or the holder's own peer id. ``vote``: it may vote on steps, and
    lead them."""

    run: DigestField
    serial: SerialField
    name: HolderName
    organisation: OrganisationName = ""
    role: GrantRole
    vote: bool = True
    until_step: Count
    key: PeerIdField

    def allows(self, role: str) -> bool:
        """Return whether the holder may take part in this role of a member."""
        return self.role in (role, "any")

    def gives(self, part: str) -> bool:
        """Return whether the holder may have this part of the model."""
        return self.allows(role_that_holds(part))

    def signed_bytes(self) -> bytes:
        """Return what issuers sign."""
        return b"grant|" + _canonical(self)


def role_that_holds(part: str) -> GrantRole:
    """Return the role in which peers hold a part of the model."""
    return "trainer" if part == ENDS else "stage"


class SignedGrant(Message):
    """A grant with the signatures of issuers, by their peer ids."""

    grant: Grant
    signatures: Annotated[dict[PeerIdField, SignatureHex], Field(max_length=MAX_ISSUERS)]


class Credential(Message):
    """A signed grant in the hands of ``peer``. ``proof`` is the one-time key's signature over that id, "" where the
    grant names the id itself."""

    signed: SignedGrant
    peer: PeerIdField
    proof: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{128})?$")] = ""

    @property
    def grant(self) -> Grant:
        """Return what was granted."""
        return self.signed.grant

    def text(self) -> str:
        """Return it as one line of JSON; :func:`credential_of` gives it back."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def new_serial() -> str:
    """Return 16 random hex digits."""
    return secrets.token_hex(8)


def sign_grant(grant: Grant, issuer: PrivateIdentity, before: Mapping[str, str] | None = None) -> SignedGrant:
    """Return the grant with this issuer's signature beside those of ``before``."""
    own = {str(issuer.peer): issuer.sign(grant.signed_bytes()).hex()}
    return SignedGrant(grant=grant, signatures={**(before or {}), **own})


def holder_bytes(grant: Grant, peer: str) -> bytes:
    """Return what the one-time key signs for its holder."""
    return f"holder|{grant.run}|{grant.serial}|{grant.key}|{peer}".encode()


def credential_for(signed: SignedGrant, peer: PeerId, seed: bytes | None) -> Credential:
    """Return the credential of ``peer``; ``seed`` is the one-time key's, None where the grant names the peer. Raises
    Refused for a grant to another peer, and for a key that is not the grant's."""
    if seed is None:
        if signed.grant.key != peer:
            raise Refused(f"it was granted to {signed.grant.key}, and this is {peer}")
        return Credential(signed=signed, peer=peer)
    key = PrivateIdentity(seed)
    if key.peer != signed.grant.key:
        raise Refused("its key is not the one that was granted")
    return Credential(signed=signed, peer=peer, proof=key.sign(holder_bytes(signed.grant, peer)).hex())


def credential_of(text: str) -> Credential:
    """Return the credential in a text. Raises Violation for anything else."""
    if len(text) > MAX_CREDENTIAL_CHARS:
        raise Violation(f"a credential of {len(text)} characters")
    try:
        return Credential.model_validate_json(text)
    except ValidationError:
        raise Violation("this is no credential") from None


def check_credential(
    credential: Credential, *, run: str, issuers: Collection[str], threshold: int, named: bool, verify: Verify
) -> None:
    """Check what never changes of a credential: that so many ``issuers`` signed it for this run, and that it is its
    holder's; ``named``: it must name the holder's own peer id. Expiry and revocation are the run's state to say. Cost:
    two signatures to verify, 0.2 ms. Raises Refused, and Violation for a forged one."""
    grant = credential.grant
    if grant.run != run:
        raise Refused("this credential is for another run")
    if named and grant.key != credential.peer:
        raise Refused(f"this run admits the peers that it names, and the grant names {grant.key}")
    signers = [peer for peer in sorted(credential.signed.signatures) if peer in issuers]
    if len(signers) < threshold:
        raise Refused(f"{len(signers)} of this run's issuers signed it, and {threshold} must")
    said = grant.signed_bytes()
    for issuer in signers[:threshold]:
        if not verify(PeerId(issuer), said, bytes.fromhex(credential.signed.signatures[issuer])):
            raise Violation(f"the signature of issuer {issuer} is forged")
    if grant.key != credential.peer and not verify(
        PeerId(grant.key), holder_bytes(grant, credential.peer), bytes.fromhex(credential.proof)
    ):
        raise Violation(f"this credential is not of {credential.peer}")


def _canonical(message: Message) -> bytes:
    text = json.dumps(message.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest().encode()


# --- orders ----------------------------------------------------------------------------------------------------------
# What issuers, or a majority of those who vote, say about who belongs to a run.


class Order(Message):
    """To ``revoke`` all that was granted to ``name`` under ``serial``, or to ``appoint`` or ``dismiss`` the issuer
    ``peer``, with signatures by peer id. It counts when as many issuers signed it as a grant needs, or more than half
    of the voters. ``serial`` is "" for issuers, ``peer`` "" for a grant; ``until_step`` is when a revoked grant that
    nobody has used would have expired. ``after`` is how often the issuers had changed when it was given, so that no
    such order is carried out twice."""

    verb: Literal["revoke", "appoint", "dismiss"]
    run: DigestField
    name: HolderName
    serial: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16})?$")] = ""
    peer: Annotated[str, StringConstraints(pattern=r"^[1-9A-HJ-NP-Za-km-z0]{0,64}$")] = ""
    until_step: Count = 0
    after: Count = 0
    signatures: Annotated[dict[PeerIdField, SignatureHex], Field(max_length=64)] = {}

    def signed_bytes(self) -> bytes:
        """Return what is signed: all but the signatures."""
        return b"order|" + _canonical(self.model_copy(update={"signatures": {}}))

    @property
    def key(self) -> str:
        """Return what tells it from other orders."""
        return hashlib.sha256(self.signed_bytes()).hexdigest()

    def with_signature(self, signer: PrivateIdentity) -> Order:
        """Return it with one more signature."""
        own = {str(signer.peer): signer.sign(self.signed_bytes()).hex()}
        return self.model_copy(update={"signatures": {**self.signatures, **own}})

    def signers(self, among: Collection[str], verify: Verify) -> list[str]:
        """Return those ``among`` these peers whose signature is right. Cost: 0.1 ms each."""
        said = self.signed_bytes()
        signed = {peer: bytes.fromhex(text) for peer, text in self.signatures.items() if peer in among}
        return [peer for peer in sorted(signed) if verify(PeerId(peer), said, signed[peer])]
