"""``swarm invite`` and ``swarm revoke``: invites to the run of a peer here, and what is to be known of them."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.commands.look import look_at
from peers.commands.status_text import invited_text
from peers.console.words import CommandError, command_name, listed, print_error
from peers.control.choose import choose_speaker
from peers.control.client import ask
from peers.control.status import StatusReport
from peers.exit_codes import EXIT_USAGE
from peers.home.places import PlaceInfo
from peers.invites.invite import Invite, invite_on_standard_input, parse_invite
from peers.invites.invite_file import qr_code, write_invite
from peers.invites.wishes import DEFAULT_EXPIRES, check_wishes, each_wish
from swarm.errors import ConfigError
from swarm.security.credentials import Grant


def show_invite(
    home: Path, peer: str | None, wishes: Mapping[str, Any], *, out: str | None, qr: bool, words: bool = True
) -> list[dict[str, Any]]:
    """Print an invite on stdout, or write it to a file, and the rest on stderr; for several names a file each. Returns
    what was given, for programs.

    Args:
        home: Where peers of this machine are looked for.
        peer: The one that is asked; None: any of the run.
        wishes: As :func:`~peers.invites.wishes.check_wishes`.
        out: The file, or the directory for a file each.
        qr: Whether it is shown as a QR code, too.
        words: Whether invites are printed, and what is to be done with them; notes are at any rate.

    Raises ConfigError and CommandError; files that were written before stay, and were named.
    """
    each = each_wish(wishes)
    for one in each:
        check_wishes(one)
    if wishes.get("countersign") is not None and wishes["countersign"] != "-":
        parse_invite(wishes["countersign"])
    files = _files(each, out, qr)
    place = choose_speaker(home, peer, command="invite")
    if wishes.get("countersign") == "-":
        each = [{"countersign": invite_on_standard_input("invite --countersign -")}]
    standing = look_at(place).standing
    found = []
    for one, file in zip(each, files, strict=True):
        invite = _give(place, one, file, words=words)
        if invite.granted is not None and "countersign" not in one:
            grant = invite.granted.grant.grant
            _tell_others(standing, grant)
            _tell_unknown_pace(standing, grant, str(one.get("expires", DEFAULT_EXPIRES)), place)
        found.append(_facts(invite, file))
    if invite.local:
        print_error(
            f"{place.title} can be reached from this machine only",
            check=f"swarm status --peer {place.name} shows its addresses",
            next_="start it with --listen /ip4/0.0.0.0/tcp/0 to be reached from others",
            label="note",
        )
    if qr:
        _show_qr(invite.text())
    return found


def _facts(invite: Invite, file: Path | None) -> dict[str, Any]:
    grant = None if invite.granted is None else invite.granted.grant.grant
    granted = {} if grant is None else {"for": grant.name, "role": grant.role, "until_step": grant.until_step}
    where = {"invite": invite.text()} if file is None else {"file": str(file.absolute())}
    return {"run": invite.run, "run_name": invite.name, **where, **granted}


def _files(each: Sequence[Mapping[str, Any]], out: str | None, qr: bool) -> list[Path | None]:
    """Return where each invite goes, None for stdout. Raises ConfigError where several would go to one place, and for
    a file in a directory that is there: its invite may not have been handed on yet."""
    in_directory = out is not None and (out.endswith("/") or Path(out).is_dir())
    if len(each) > 1 and (not in_directory or qr):
        option, value = ("--qr", True) if qr and in_directory else ("--out", out)
        raise ConfigError(option, value, "--out DIR/ and no --qr with several names in --for",
                          f"Type for example: {command_name()} invite --for ana,ben --out invites/")  # fmt: skip
    if not in_directory or out is None:
        return [None if out is None else Path(out)]
    if "for" not in each[0]:
        raise ConfigError("--out", out, "a file, where --for names nobody",
                          f"Type for example: {command_name()} invite --out {Path(out) / 'invite.txt'}")  # fmt: skip
    files = [Path(out) / f"{one['for']}.txt" for one in each]
    if there := [str(file) for file in files if file.exists()]:
        raise ConfigError("--out", out, "a directory without files of these names",
                          "Move them away, or choose another directory.", why=f"{listed(there)} is there")  # fmt: skip
    return [*files]


def _give(place: PlaceInfo, wishes: Mapping[str, Any], out: Path | None, *, words: bool) -> Invite:
    """Have one invite made, print or write it, and say what its holder types."""
    text = str(ask(place.control, "invite", who=place.described, **wishes))
    invite = parse_invite(text)
    made = None if out is None else write_invite(out, text, option="--out")
    if out is not None:  # at any rate: the next one may fail
        _say(f"The invite is in {out}{f', in the new directory {made}' if made else ''}.")
    if not words:
        return invite
    if out is None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    said = "Anybody with this invite can join the run."
    grant = None if invite.granted is None else invite.granted.grant.grant
    if grant is not None:
        said = f"Keep it secret: it is for one peer, {grant.name}, as {grant.role}, until step {grant.until_step}."
    _say(f"{said} On another machine: {_use('- < FILE' if out else 'INVITE', 'any' if grant is None else grant.role)}")
    return invite


def take_back(place: PlaceInfo, name: str, *, sure: bool) -> str:
    """Have revoked what was granted to ``name``; returns what comes of it, in words.

    Where the run would be left without a part of its model, a person at a terminal is asked first, unless ``sure``.
    Raises CommandError where nothing was done, because that was not agreed to either.
    """
    found = ask(place.control, "revoke", who=place.described, name=name, sure=sure)
    if not (asks := str(found["asks"])):
        return str(found["said"])
    again = f"{command_name()} revoke {shlex.quote(name)} --yes"
    if not sys.stdin.isatty():
        raise CommandError(asks, check="nothing was revoked", next_=f"{again}, where that is meant",
                           exit_code=EXIT_USAGE)  # fmt: skip
    sys.stderr.write(f"{asks}.\nRevoke it all the same? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was revoked", next_=again)
    return str(ask(place.control, "revoke", who=place.described, name=name, sure=True)["said"])


def _use(invite: str, role: str) -> str:
    """Return what its holder types."""
    if role == "observer":
        return "swarm dashboard INVITE, or swarm top INVITE"
    return f"swarm join {invite}{' --role trainer --data TEXT' if role == 'trainer' else ''}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _tell_others(standing: StatusReport | None, grant: Grant) -> None:
    """Say so where invites for that name were given before: each is one of its own, and revoked with the others."""
    admission = None if standing is None else standing.admission
    if admission is None:
        return
    before = [invited_text(*one) for one in admission.invited if one[0] == grant.name]
    before += [f"{name}, as {role}: used by {peer}" for name, role, peer in admission.admitted if name == grant.name]
    if not before:
        return
    known, stay = ("an invite", "It stays") if len(before) == 1 else (f"{len(before)} invites", "They stay")
    print_error(
        f"{known} for {grant.name} had been given before this one: {'; '.join(before)}. {stay} good as well: each "
        "admits one peer",
        check=f"{command_name()} status --peer PEER shows who was invited, and who was admitted",
        next_=f"to take all of them back, this one too: {command_name()} revoke {grant.name}; then give one anew. For "
        "another peer another name tells them apart",
        label="note",
    )


def _tell_unknown_pace(standing: StatusReport | None, grant: Grant, expires: str, place: PlaceInfo) -> None:
    """Say so where a span of time was to become a step, and nobody knows how long steps take."""
    if standing is None or standing.tokens_per_s or grant.until_step < standing.steps:
        return
    of = f" --organisation {shlex.quote(grant.organisation)}" if grant.organisation else ""
    print_error(
        f"no step has been timed yet, so this invite expires with the run's last step, and not in {expires}",
        check=f"{command_name()} status --peer {place.name} shows tokens/s once it is known",
        next_=f"where that is too long, take it back then and give another: {command_name()} revoke {grant.name}; "
        f"{command_name()} invite --for {grant.name} --role {grant.role}{of} --expires {expires}",
        label="note",
    )


def _show_qr(text: str) -> None:
    try:
        _say(qr_code(text, shutil.get_terminal_size().columns))
    except ConfigError as narrow:  # the invite is given all the same
        again = "make its letters smaller, and repeat the command"
        print_error(f"no QR code is shown: it needs {narrow.allowed}", next_=again, label="note")
