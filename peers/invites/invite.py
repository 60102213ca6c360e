"""An invite: one word to send to a friend, with all that a machine needs to find a run and to know that it is the one.

``swarm1:`` and, as base64url of compact JSON, the run's id and name, addresses of peers that are in it, and the wire
version; for a run that not everybody may join what admits one peer, with a one-time key. It is no secret key beyond
that: who has it can join.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peers.console.words import GIVES_INVITE, NEW_INVITE, command_name
from swarm import WIRE_VERSION
from swarm.errors import ConfigError, Incompatible, Refused
from swarm.ids import PeerId, RunId
from swarm.network.addresses import is_loopback, parse_address
from swarm.parsing import parse_json

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
_RUN = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{64}")
_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
_SHOWN = 60
_AROUND = "\"'`“”„‘’‚«»‹›<>()[]{}.,;!?*"
_FAMILIES = {"": socket.AF_UNSPEC, "4": socket.AF_INET, "6": socket.AF_INET6}
_UNDERSCORED = re.compile(r"/dns(?P<family>[46]?)/(?P<name>[A-Za-z0-9._-]*_[A-Za-z0-9._-]*)(?P<rest>/.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What admits one peer: a grant, signed, and the one-time key it is for, None where it names the peer."""

    grant: SignedGrant
    seed: bytes | None = field(default=None, repr=False)

    def fields(self) -> dict[str, Any]:
        """It as fields of an invite."""
        return {"grant": self.grant.model_dump(mode="json"), **({} if self.seed is None else {"key": self.seed.hex()})}

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
        """The invite as one word of some 200 to 600 characters, twice as many with what admits a peer;
        :func:`parse_invite` gives it back."""
        fields: dict[str, Any] = {"run": self.run, "name": self.name, "at": list(self.at), "wire": self.wire}
        if self.granted is not None:
            fields |= self.granted.fields()
        body = json.dumps(fields, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(body).rstrip(b"=").decode()

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
        raise ConfigError("INVITE", "", _ALLOWED, f"Did the command in $(…), or the variable, say anything? For "
                          f"one in a file type - < FILE in its place. {NEW_INVITE}", why="it is empty")  # fmt: skip
    if len(text) > MAX_CHARACTERS:
        raise _bad(text, f"at most {MAX_CHARACTERS} characters", "it is longer")
    text = text[found.start() :] if (found := _ANY_PREFIX.search(text)) else text  # behind "swarm join", say
    version = _ANY_PREFIX.match(text)
    if version is None:
        raise _bad(text, _ALLOWED)
    if version.group() != PREFIX:
        raise Incompatible("INVITE", _brief(text, quoted=False), f"an invite of form 1 ({PREFIX}…)",
                           "A newer version of swarm made it: update swarm on this machine.")  # fmt: skip
    fields = _decode(text, text[len(PREFIX) :])
    _check_wire(text, fields.get("wire"))
    return _checked(text, fields)


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


def _decode(text: str, body: str) -> dict[str, Any]:
    body = body.rstrip("=")
    if not body:
        raise _bad(text, f"more than {PREFIX}", "the rest is missing")
    if not _BASE64URL.fullmatch(body):
        strange = next(letter for letter in body if not _BASE64URL.fullmatch(letter))
        raise _bad(text, "letters, digits, - and _ only", f"there is {strange!r} in it")
    try:
        decoded = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:  # one character too many for any number of bytes
        raise _bad(text, "a whole invite", "it was cut off, or something was added to it") from None
    try:
        fields = parse_json(decoded)
    except ValueError:
        raise _bad(text, "a whole invite", _not_json(decoded.decode(errors="replace"))) from None
    if not isinstance(fields, dict):
        raise _bad(text, "an invite", f"what it holds is a {type(fields).__name__}, not a set of fields")
    return fields


def _not_json(decoded: str) -> str:
    """Explain, as damage on the way, an invite that is not exactly one set of fields."""
    try:
        _, end = json.JSONDecoder().raw_decode(decoded)
    except (ValueError, RecursionError):
        cut = decoded.startswith("{") and not decoded.rstrip().endswith("}")
        return "it was cut off" if cut else "what it holds is not JSON: some of its characters have changed"
    return "something was added at its end" if decoded[end:] else "it nests without end"


def _check_wire(text: str, wire: object) -> None:
    """Before anything else in it: what another version may say is not ours to judge."""
    if type(wire) is not int or wire < 1:
        raise _bad(text, "an invite with its wire version", f"its wire version is {_brief(wire)}")
    if wire != WIRE_VERSION:
        raise Incompatible("INVITE", _brief(text, quoted=False), f"a run of wire version {WIRE_VERSION}",
                           _update(wire), why=f"it is to a run of version {_brief(wire)}")  # fmt: skip


def _update(wire: int) -> str:
    if wire > WIRE_VERSION:
        return "Update swarm on this machine, then join with the same invite."
    return (
        "Have the run founded anew where it was, after you update swarm on the peers of that run: swarm new, and then "
        f"for its invite: {GIVES_INVITE}."
    )


def _checked(text: str, fields: dict[str, Any]) -> Invite:
    wrong = sorted((fields.keys() - {"grant", "key"}) ^ {"run", "name", "at", "wire"})
    if wrong:
        what = ", ".join(f"{'no' if key in ('run', 'name', 'at') else 'a strange'} {_brief(key)}" for key in wrong)
        raise _bad(text, "an invite with run, name, at and wire", f"it has {what}")
    run, name, at = fields["run"], fields["name"], fields["at"]
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise _bad(text, "a run id of 64 hex digits", f"its run is {_brief(run)}")
    if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
        raise _bad(text, "a run's name in small letters, digits and dashes", f"its name is {_brief(name)}")
    if not isinstance(at, list) or not 1 <= len(at) <= MAX_ADDRESSES or not all(isinstance(one, str) for one in at):
        raise _bad(text, f"1 to {MAX_ADDRESSES} addresses", f"its addresses are {_brief(at)}")
    addresses = tuple(str(parse_address(one, key="address in the invite")) for one in at)
    return Invite(run=RunId(run), name=name, at=addresses, wire=fields["wire"], granted=_granted(text, fields))


def _granted(text: str, fields: dict[str, Any]) -> Granted | None:
    grant, key = fields.get("grant"), fields.get("key")
    if grant is None and key is None:
        return None
    from pydantic import ValidationError  # slow to import, and most invites grant nothing

    from swarm.security.credentials import SignedGrant

    try:
        signed = SignedGrant.model_validate_json(json.dumps(grant))
    except ValidationError:
        raise _bad(text, "an invite whose grant can be read", f"its grant is {_brief(grant)}") from None
    if key is not None and not (isinstance(key, str) and _KEY.fullmatch(key)):
        raise _bad(text, "an invite whose key can be read", "its key is none")
    if signed.grant.run != fields["run"]:
        raise _bad(text, "an invite to one run", "its grant is for another run")
    return Granted(grant=signed, seed=None if key is None else bytes.fromhex(key))


def _bad(text: str, allowed: str, why: str = "") -> ConfigError:
    return ConfigError("INVITE", _brief(text, quoted=False), allowed, _AGAIN, why=why)


def _brief(value: object, *, quoted: bool = True) -> str:
    shown = repr(value) if quoted else str(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
