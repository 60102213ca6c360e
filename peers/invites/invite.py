"""An invite: one word to send to a friend, with all that a machine needs to find a run and to know that it is the one.

``swarm1:`` and, as base64url, the wire version, the run's id and name and addresses of peers that are in it; for a run
that not everybody may join what admits one peer, with a one-time key. It is no secret key beyond that: who has it can
join. An invite is typed, mailed and scanned, so its bytes are few: each peer id is in them once.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiaddr import Multiaddr

from peers.console.words import GIVES_INVITE, NEW_INVITE, command_name
from swarm import WIRE_VERSION
from swarm.errors import ConfigError, Incompatible, Refused
from swarm.ids import PeerId, RunId
from swarm.network.addresses import is_loopback, parse_address
from swarm.security.signing import SIGNATURE_BYTES, PrivateIdentity, peer_of, public_key_of

if TYPE_CHECKING:
    from swarm.security.credentials import Credential, SignedGrant

PREFIX = "swarm1:"
MAX_CHARACTERS = 8192
"""One that 16 issuers signed has room."""
MAX_ADDRESSES = 5

_ALLOWED = f"an invite ({PREFIX}…) or a multiaddr ending in /p2p/<peer id>"
_AGAIN = "Copy it again, whole, as swarm new or swarm invite prints it."
_ANY_PREFIX = re.compile(r"swarm([0-9]{1,4}):")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")
_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
_HOP = re.compile(r"(.*?)/p2p/([^/]+)")
_SHOWN = 60
_CHECKSUM, _DIGEST, _KEY, _SERIAL = 4, 32, 32, 8
"""Bytes of each."""
_MAX_KEYS = 32
"""Of two peers in each address, 16 issuers and a holder."""
_SERVES = ("stage", "trainer", "observer", "any")
_MUTE, _KEYED = 4, 8
"""Beside the role's number in a grant's first byte: it gives no vote; a one-time key follows, and no peer."""
_AROUND = "\"'`“”„‘’‚«»‹›<>()[]{}.,;!?*"
_FAMILIES = {"": socket.AF_UNSPEC, "4": socket.AF_INET, "6": socket.AF_INET6}
_UNDERSCORED = re.compile(r"/dns(?P<family>[46]?)/(?P<name>[A-Za-z0-9._-]*_[A-Za-z0-9._-]*)(?P<rest>/.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What admits one peer: a grant, signed, and the one-time key it is for, None where it names the peer."""

    grant: SignedGrant
    seed: bytes | None = field(default=None, repr=False)

    def credential(self, peer: PeerId) -> Credential:
        """Return what ``peer`` shows to others. Raises ConfigError where it was granted to another."""
        from swarm.security.credentials import credential_for

        try:
            return credential_for(self.grant, peer, self.seed)
        except Refused as refused:
            raise ConfigError("INVITE", f"for {self.grant.grant.name}", "an invite for the peer that uses it",
                              f"Join from the place that has that id ({command_name()} id shows them), with --place; "
                              f"or have an issuer run: {command_name()} invite --for {self.grant.grant.name} "
                              f"--id {peer}", why=refused.reason) from None  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """A run and where to find it: ``at`` are one to five multiaddrs, each ending in ``/p2p/<peer id>``."""

    run: RunId
    name: str
    at: tuple[str, ...]
    wire: int = WIRE_VERSION
    granted: Granted | None = None

    def text(self) -> str:
        """The invite as one word of some 200 characters, twice as many with what admits a peer; :func:`parse_invite`
        gives it back."""
        body = _packed(self)
        return PREFIX + base64.urlsafe_b64encode(_checksum(body) + body).rstrip(b"=").decode()

    @property
    def local(self) -> bool:
        """True if it is of use on this machine only, as all its addresses are."""
        return all(is_loopback(parse_address(address)) for address in self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contacts:
    """The peers to dial, and the run to require: None when plain addresses name none."""

    addresses: tuple[str, ...]
    run: RunId | None = None
    run_name: str | None = None
    granted: Granted | None = None

    @property
    def invited(self) -> str | None:
        """As whom the invite admits a peer, which is called so unless it says otherwise; None for anybody."""
        return None if self.granted is None else self.granted.grant.grant.name


def invite_to(run: RunId, name: str, addresses: Iterable[str]) -> Invite:
    """An invite with the five most useful addresses: those that other machines can reach before this one's own.

    Raises ConfigError when there is none, or when one names no peer.
    """
    known = [parse_address(text, key="address") for text in dict.fromkeys(addresses)]
    if not known:
        raise ConfigError("address", None, "at least one address at which this peer can be reached",
                          "Wait until it listens, or give one with --announce.")  # fmt: skip
    at = tuple(str(address) for address in sorted(known, key=is_loopback)[:MAX_ADDRESSES])
    return Invite(run=run, name=name, at=at)


def parse_invite(text: str) -> Invite:
    """The invite that a person pasted, checked throughout. White space in it is passed over (terminals break lines),
    and so is what a message has around it: quotation marks, brackets, a full stop.

    Raises ConfigError for what is no whole invite; Incompatible (exit code 4) for one of another wire version.
    """
    text = "".join(text[: 2 * MAX_CHARACTERS].split()).strip(_AROUND)
    if not text:
        raise ConfigError("INVITE", "", _ALLOWED, "Check that the command in $(…), or the variable, prints one. For "
                          f"an invite in a file, type - < FILE. {NEW_INVITE}", why="it is empty")  # fmt: skip
    if len(text) > MAX_CHARACTERS:
        raise _bad(text, f"at most {MAX_CHARACTERS} characters", "it is longer")
    text = text[found.start() :] if (found := _ANY_PREFIX.search(text)) else text  # behind "swarm join", say
    version = _ANY_PREFIX.match(text)
    if version is None:
        raise _bad(text, _ALLOWED)
    if version.group() != PREFIX:
        raise Incompatible("INVITE", _brief(text), f"an invite of form 1 ({PREFIX}…)",
                           "A newer version of swarm made it: update swarm on this machine.")  # fmt: skip
    body = _Reader(_decoded(text, text[len(PREFIX) :]))
    try:
        _check_wire(text, body.number())
        return _unpacked(body)
    except ValueError as error:
        raise _bad(text, "an invite as swarm new or swarm invite makes it", str(error)) from None


def contacts_from(arguments: Sequence[str]) -> Contacts:
    """Parse the arguments of ``swarm join``: one invite, or multiaddrs of peers of the run, or both.

    Raises ConfigError for what is neither, for none at all, and for invites to different runs; Incompatible as
    :func:`parse_invite` does.
    """
    given = _joined(arguments)
    invites = [parse_invite(text) for text in given if not text.lstrip().startswith("/")]
    plain = [str(parse_address(_resolved(text), key="INVITE")) for text in given if text.lstrip().startswith("/")]
    runs = {invite.run for invite in invites}
    if len(runs) > 1:
        raise ConfigError("INVITE", ", ".join(sorted(run[:12] for run in runs)), "invites to one run",
                          "A peer takes part in one run; start one peer for each.")  # fmt: skip
    addresses = tuple(dict.fromkeys([*(address for invite in invites for address in invite.at), *plain]))
    if not addresses:
        raise ConfigError("INVITE", None, _ALLOWED, NEW_INVITE)
    return Contacts(
        addresses=addresses,
        run=invites[0].run if invites else None,
        run_name=invites[0].name if invites else None,
        granted=next((invite.granted for invite in invites if invite.granted is not None), None),
    )


def invite_on_standard_input(command: str) -> str:
    """Read the invite from standard input, of a terminal its first line: so that no list of processes shows it.
    ``command`` is what was typed, behind ``swarm``, for the error: ConfigError where there is nothing."""
    asked = sys.stdin.isatty()
    if asked:
        sys.stderr.write("Paste the invite, and press Enter: ")
        sys.stderr.flush()
    line = (sys.stdin.readline if asked else sys.stdin.read)(2 * MAX_CHARACTERS).strip()
    if not line:
        raise ConfigError("INVITE", "-", _ALLOWED, f"{command_name()} {command} < FILE, where FILE has one. "
                          f"{NEW_INVITE}", why="nothing came on standard input")  # fmt: skip
    return line


def typed_invite(text: str, command: str) -> str:
    """Return an invite that was typed; for ``-`` the one on standard input. See :func:`invite_on_standard_input`."""
    return invite_on_standard_input(command) if text == "-" else text


def _joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with the pieces of an invite, which a line break had cut, put together again."""
    whole: list[str] = []
    for text in arguments:
        begins = text.lstrip().startswith("/") or _ANY_PREFIX.match(text.strip().strip(_AROUND))
        piece = not begins and whole and _ANY_PREFIX.match(whole[-1].strip().strip(_AROUND))
        if piece:
            whole[-1] += text
        else:
            whole.append(text)
    return whole


def _resolved(address: str) -> str:
    """An address whose name has an underscore, as services of compose files may, with the IP address that it has now:
    multiaddrs know no such names. Raises ConfigError where the name has none."""
    match = _UNDERSCORED.match(address.strip())
    if match is None:
        return address
    try:
        found = socket.getaddrinfo(match["name"], None, _FAMILIES[match["family"]], socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("INVITE", address, "the name of a machine that this one can find",
                          f"Check it: getent hosts {match['name']}", why=str(error.strerror)) from None  # fmt: skip
    family, ip = found[0][0], found[0][4][0]
    return f"/{'ip4' if family == socket.AF_INET else 'ip6'}/{ip}{match['rest']}"


def _decoded(text: str, body: str) -> bytes:
    """Return the bytes of an invite. Raises ConfigError unless they are those that were given out."""
    body = body.rstrip("=")
    if not body:
        raise _bad(text, f"more than {PREFIX}", "the rest is missing")
    if not _BASE64URL.fullmatch(body):
        strange = next(letter for letter in body if not _BASE64URL.fullmatch(letter))
        raise _bad(text, "letters, digits, - and _ only", f"there is {strange!r} in it")
    try:
        found = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:  # one character too many for any number of bytes
        found = b""
    if len(found) <= _CHECKSUM or found[:_CHECKSUM] != _checksum(found[_CHECKSUM:]):
        raise _bad(text, "a whole invite", "it was cut off, or some of its characters were changed or added")
    return found[_CHECKSUM:]


def _check_wire(text: str, wire: int) -> None:
    """Before anything else in it: what another version may say is not ours to judge."""
    if wire != WIRE_VERSION:
        raise Incompatible("INVITE", _brief(text), f"a run of wire version {WIRE_VERSION}", _update(wire),
                           why=f"it is to a run of version {wire}")  # fmt: skip


def _update(wire: int) -> str:
    if wire > WIRE_VERSION:
        return "Update swarm on this machine, then join with the same invite."
    return (
        "Have the run founded anew where it was, after you update swarm on the peers of that run: swarm new, and then "
        f"for its invite: {GIVES_INVITE}."
    )


def _bad(text: str, allowed: str, why: str = "") -> ConfigError:
    return ConfigError("INVITE", _brief(text), allowed, _AGAIN, why=why)


def _brief(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


# --- bytes -----------------------------------------------------------------------------------------------------------
# A number is seven bits a byte, the lowest first; what has no fixed length begins with its own. Addresses and
# signatures name peers by their place in a table of public keys, from which peer ids follow.


def _checksum(body: bytes) -> bytes:
    """Return what tells an invite that was cut or mistyped; it is no proof of who made it."""
    return hashlib.sha256(body).digest()[:_CHECKSUM]


def _packed(invite: Invite) -> bytes:
    keys: dict[bytes, int] = {}

    def peer(peer_id: str) -> bytes:
        key = public_key_of(PeerId(peer_id))
        if key is None:
            raise ValueError(f"{peer_id} is of no Ed25519 key")
        return _number(keys.setdefault(key, len(keys)))

    said = [_number(len(invite.at)), *(part for address in invite.at for part in _packed_address(address, peer))]
    if (granted := invite.granted) is not None:
        grant, signatures = granted.grant.grant, granted.grant.signatures
        flags = _SERVES.index(grant.role) | (0 if grant.vote else _MUTE) | (0 if granted.seed is None else _KEYED)
        said += [bytes([flags]), bytes.fromhex(grant.serial), _text(grant.name), _text(grant.organisation)]
        said += [_number(grant.until_step), peer(grant.key) if granted.seed is None else granted.seed]
        said += [_number(len(signatures)), *(peer(by) + bytes.fromhex(made) for by, made in signatures.items())]
    head = [_number(invite.wire), bytes.fromhex(invite.run), _text(invite.name)]
    return b"".join([*head, _number(len(keys)), *keys, *said])


def _packed_address(address: str, peer: Callable[[str], bytes]) -> Iterable[bytes]:
    """Yield how many hops it has, and of each the way to it and who it is. A relay with a key of another kind is a part
    of the way to the next hop."""
    hops, way = [], ""
    for more, peer_id in _HOP.findall(address):
        way += more
        if public_key_of(PeerId(peer_id)) is None:
            way += f"/p2p/{peer_id}"
        else:
            hops.append(_sized(Multiaddr(way).to_bytes()) + peer(peer_id))
            way = ""
    yield _number(len(hops))
    yield from hops


def _unpacked(body: _Reader) -> Invite:
    """Return the invite behind the wire version. Raises ValueError, and ConfigError for an address of no use."""
    run, name = body.take(_DIGEST).hex(), body.text()
    if not _RUN_NAME.fullmatch(name):
        raise ValueError("its name is none of a run")
    keys = [peer_of(body.take(_KEY)) for _ in range(body.count(_MAX_KEYS))]
    at = tuple(_unpacked_address(body, keys) for _ in range(body.count(MAX_ADDRESSES)))
    if not at:
        raise ValueError("it has no address")
    granted = _unpacked_grant(body, run, keys) if body.left else None
    if body.left:
        raise ValueError("there is more behind its end")
    return Invite(run=RunId(run), name=name, at=at, granted=granted)


def _unpacked_address(body: _Reader, keys: Sequence[PeerId]) -> str:
    text = ""
    for _ in range(body.count(2)):
        way = body.take(body.number())
        try:
            text += f"{Multiaddr(way)}/p2p/{body.one_of(keys)}"
        except Exception as error:  # noqa: BLE001 - a foreign decoder, of bytes that anybody may have made
            raise ValueError(f"an address of it cannot be read: {error}") from None
    return str(parse_address(text, key="address in the invite"))


def _unpacked_grant(body: _Reader, run: str, keys: Sequence[PeerId]) -> Granted:
    from pydantic import ValidationError  # slow to import, and most invites grant nothing

    from swarm.security.credentials import MAX_ISSUERS, SEED_BYTES, SignedGrant

    flags = body.number()
    if flags >= 2 * _KEYED:
        raise ValueError("its grant is of an unknown kind")
    serial, name, organisation = body.take(_SERIAL).hex(), body.text(), body.text()
    until = body.number()
    seed = body.take(SEED_BYTES) if flags & _KEYED else None
    holder = body.one_of(keys) if seed is None else PrivateIdentity(seed).peer
    signatures = {body.one_of(keys): body.take(SIGNATURE_BYTES).hex() for _ in range(body.count(MAX_ISSUERS))}
    grant = {"run": run, "serial": serial, "name": name, "organisation": organisation, "role": _SERVES[flags % _MUTE],
             "vote": not flags & _MUTE, "until_step": until, "key": holder}  # fmt: skip
    try:
        return Granted(grant=SignedGrant.model_validate({"grant": grant, "signatures": signatures}), seed=seed)
    except ValidationError:
        raise ValueError("its grant cannot be used") from None


def _number(value: int) -> bytes:
    low = value & 0x7F
    return bytes([low]) if value < 0x80 else bytes([low | 0x80]) + _number(value >> 7)


def _sized(data: bytes) -> bytes:
    return _number(len(data)) + data


def _text(text: str) -> bytes:
    return _sized(text.encode())


class _Reader:
    """Bytes that anybody may have made, taken one after the other; what is not there is a ValueError."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Return how many are left."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        """Return so many."""
        if size > self.left:
            raise ValueError("it ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        """Return a number of 63 bits at most."""
        value = 0
        for place in range(0, 63, 7):
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << place
            if byte < 0x80:
                return value
        raise ValueError("a number in it has no end")

    def count(self, most: int) -> int:
        """Return how many of something follow."""
        if (found := self.number()) > most:
            raise ValueError(f"it has {found} of what it may have {most} at most")
        return found

    def text(self) -> str:
        """Return a short text."""
        return self.take(self.number()).decode("ascii")

    def one_of(self, keys: Sequence[PeerId]) -> PeerId:
        """Return the peer whose place in the table is next."""
        if (place := self.number()) >= len(keys):
            raise ValueError("it names a peer that it does not have")
        return keys[place]
