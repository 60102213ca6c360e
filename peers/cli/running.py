"""The commands about peers that run on this machine: ``swarm drain``, ``id``, ``invite``, ``peers`` and ``status``."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peers.cli.options import AsJson, Home, Peer
from peers.exit_codes import EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE

if TYPE_CHECKING:
    from peers.home.identity import PlaceIdentity


def drain(
    peer: Peer = None,
    everyone: Annotated[bool, typer.Option("--all", help="Drain all peers of this machine.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the peer has left. --no-wait only tells it.")
    ] = True,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Have a peer leave its run in order.

    The peer takes no new work, hands over, and leaves at the end of a step. A
    peer that cannot be spared waits for another to join. The run ends in
    order when all its peers, on all machines, have been asked and nobody
    joins. Nothing is lost then, and `swarm new --resume` continues it.

    Exits with 0 when the peer has left. --all tells every peer, also when
    some do not answer, and exits with the worst code. Ctrl-C ends the waiting.
    The peer goes on leaving. With --json the line comes when all have left.

    Example: swarm drain --peer brave-otter

    Example: swarm drain --all
    """
    from peers.commands.leave import leave
    from peers.console.words import CommandError, command_name
    from peers.control.choose import choose_all_live, choose_live
    from peers.home.places import home_directory

    if everyone and peer is not None:
        command = f"{command_name()} drain"
        raise CommandError("--all and --peer were given together", next_=f"{command} --all, or {command} --peer NAME",
                           exit_code=EXIT_USAGE)  # fmt: skip
    root = home_directory(home)
    places = choose_all_live(root) if everyone else [choose_live(root, peer, command="drain")]
    codes, peers = leave(places, (lambda line: None) if as_json else (lambda line: print(line, flush=True)), wait=wait)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "peers": peers}), flush=True)
    raise typer.Exit(max(codes, default=EXIT_OK))


def rewind(peer: Peer = None, home: Home = None, as_json: AsJson = False) -> None:
    """Allow a run to go back to a checkpoint.

    A run with `[run] rewind = "ask"` waits for this when the last holder of a
    part is lost and no copy is left. It then goes back to the newest
    checkpoint that its peers have whole, and repeats the steps since. Say it
    at one peer that votes or issues invites: the others check its signature.
    Nothing happens if no part is lost, or if every part is held again before.

    Example: swarm rewind
    """
    from peers.control.choose import choose_speaker
    from peers.control.client import ask
    from peers.home.places import home_directory

    place = choose_speaker(home_directory(home), peer, command="rewind")
    said = ask(place.control, "rewind", who=place.described)
    print(_told(place.title, said) if as_json else f"{place.title}: {said}", flush=True)


def _told(peer: str, said: str) -> str:
    """Return what a peer answered, for programs."""
    return json.dumps({"schema": SCHEMA, "peer": peer, "said": said})


# --- swarm id --------------------------------------------------------------------------------------------------------


SCHEMA = 1


def identity(
    place: Annotated[
        str | None,
        typer.Option("--place", "--peer", metavar="PLACE", help="Show this place only.  [default: every place]"),
    ] = None,
    home: Home = None,
    create: Annotated[bool, typer.Option("--create", help="Create an identity if there is none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the id of a peer of this machine.

    The peer id, and the name made of it, stay the same from run to run. A place gets its identity when a peer first
    starts in it, or with --create (in place 1 unless --place names another). With several places, --json needs --place.

    Example: swarm id --create --json
    """
    from peers.home.identity import create_identity, only_identity, show_identities, show_identity
    from peers.home.places import home_directory

    root = home_directory(home)
    if create:
        found = create_identity(root, place or "1")
    elif place is not None:
        found = show_identity(root, place)
    elif as_json:
        found = only_identity(root)
    else:
        print("\n\n".join(_lines(one) for one in show_identities(root)))
        return
    if as_json:
        print(json.dumps({"schema": SCHEMA, "place": found.place, "peer": found.peer, "name": found.name,
                          "key": str(found.key.absolute())}))  # fmt: skip
        return
    print(_lines(found))


def _lines(found: PlaceIdentity) -> str:
    return f"peer   {found.peer}\nname   {found.name}\nplace  {found.place}\nkey    {found.key}"


# --- swarm invite ----------------------------------------------------------------------------------------------------


def invite(
    peer: Peer = None,
    home: Home = None,
    name: Annotated[
        str | None,
        typer.Option("--for", metavar="NAME[,…]", help="Name whom it admits, in a run that admits by invite."),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option("--role", metavar="<stage|trainer|observer|any>", help="What the holder may do.  [default: any]"),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="How long it can be used: 12h, 7d.  [default: 7d]")
    ] = None,
    holder: Annotated[
        str | None,
        typer.Option("--id", metavar="PEER_ID", help="The only peer that may use it; needed where peers are named."),
    ] = None,
    organisation: Annotated[
        str | None, typer.Option("--organisation", metavar="NAME", help="Organisation of the holder.")
    ] = None,
    no_vote: Annotated[bool, typer.Option("--no-vote", help="The holder does not vote on steps.")] = False,
    countersign: Annotated[
        str | None,
        typer.Option(
            "--countersign", metavar="INVITE", help="Sign another issuer's invite, where several must; -: stdin."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE|DIR/", help="Write it to a file that only this user can read: NAME.txt."),
    ] = None,
    qr: Annotated[bool, typer.Option("--qr", help="Show it as a QR code, too, on stderr.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print an invite to the run of a peer on this machine.

    The invite is all that another peer needs to join. Only the invite goes to stdout; instructions go to stderr. In a
    run that admits by invite (swarm new --admission) each is for one peer, named with --for, and expires; an issuer of
    the run gives it.

    Example: swarm invite > invite.txt

    Example: swarm invite --for ana --role trainer --expires 7d --out ana.txt

    Example: swarm invite --for ana,ben,cy --role stage --out invites/

    Example: swarm invite --countersign - --out both.txt < ana.txt
    """
    from peers.commands.invite import show_invite
    from peers.home.places import home_directory

    wishes = {"for": name, "role": role, "expires": expires, "id": holder, "organisation": organisation}
    given: dict[str, object] = {key: value for key, value in wishes.items() if value is not None}
    given |= {"vote": False} if no_vote else {}
    given |= {} if countersign is None else {"countersign": countersign}
    given_out = show_invite(home_directory(home), peer, given, out=out, qr=qr, words=not as_json)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "invites": given_out}), flush=True)


# --- swarm revoke ----------------------------------------------------------------------------------------------------


def revoke(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Whom the invite was for; or a peer's name, or its id's beginning.")
    ],
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask, even where no other peer holds a part.")] = False,
    peer: Peer = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Revoke an invite, used or not.

    A member is cut off at once, and out of the roster with the next record. An issuer of the run decides it alone (or
    as many of them as sign each invite); without issuers more than half of the members that vote do, each with this
    command. Where nobody else holds a part of the model, so that the run would wait, it asks first; without a terminal
    it does nothing then, unless --yes.

    Example: swarm revoke ana
    """
    from peers.commands.invite import take_back
    from peers.control.choose import choose_speaker
    from peers.home.places import home_directory

    place = choose_speaker(home_directory(home), peer, command="revoke")
    said = take_back(place, name, sure=sure)
    print(_told(place.title, said) if as_json else said, flush=True)


# --- swarm issuers ---------------------------------------------------------------------------------------------------


def issuers(
    appoint: Annotated[
        str | None,
        typer.Option("--appoint", metavar="PEER_ID", help="Make this peer an issuer from the next record on."),
    ] = None,
    dismiss: Annotated[
        str | None, typer.Option("--dismiss", metavar="PEER_ID", help="Remove this peer from the issuers.")
    ] = None,
    peer: Peer = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show who may invite to a run, or change that.

    An issuer changes it alone (or as many of them as sign each invite); without issuers more than half of the members
    that vote do, each with this command.

    Example: swarm issuers --appoint 12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X
    """
    from peers.control.choose import choose_speaker
    from peers.control.client import ask
    from peers.home.places import home_directory
    from peers.invites.wishes import check_peer_id

    wishes = {"appoint": appoint, "dismiss": dismiss}
    given: dict[str, Any] = {key: value for key, value in wishes.items() if value is not None}
    for key, value in given.items():
        check_peer_id(f"--{key}", value)
    place = choose_speaker(home_directory(home), peer, command="issuers")
    said = ask(place.control, "issuers", who=place.described, **given)
    print(_told(place.title, said) if as_json else said, flush=True)


# --- swarm peers -----------------------------------------------------------------------------------------------------


def peers(peer: Peer = None, home: Home = None, as_json: AsJson = False) -> None:
    """Show the whole swarm by part, as a peer of this machine sees it.

    Shows how that peer reaches the others, and which peers of this machine are starting. Without --peer it asks any
    peer of the run; when peers of several runs are here, --peer is required.

    Example: swarm peers --json
    """
    from peers.commands.look import look_at_all, look_at_swarm
    from peers.commands.status_text import member_lines, starting_lines
    from peers.control.choose import choose_speaker
    from peers.home.places import home_directory, list_places

    root = home_directory(home)
    place = choose_speaker(root, peer, command="peers")
    known = look_at_swarm(place)
    live = [place] if peer is not None else [one for one in list_places(root) if one.live]
    starting = [one for one in look_at_all(live) if one.starting]
    if not as_json:
        lines = [] if known is None else member_lines(*known)
        print("\n".join([*lines, *starting_lines(starting, alone=not lines)]))
        return
    standing, members = (None, []) if known is None else known
    document = {
        "schema": SCHEMA,
        "seen_by": standing.peer if standing else "",
        "run": standing.run if standing else "",
        "run_name": standing.run_name if standing else "",
        "step": standing.step if standing else 0,
        "steps": standing.steps if standing else 0,
        "peers": [dataclasses.asdict(member) for member in members],
        "starting": [{"place": one.place.name, "name": one.place.title} for one in starting],
    }
    print(json.dumps(document))


# --- swarm status ----------------------------------------------------------------------------------------------------


def logs(
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer", metavar="PEER", help="Show only this peer: its name, its place, or the beginning of its id."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what they tell, until Ctrl-C.")] = False,
    lines: Annotated[
        str | None, typer.Option("--lines", "-n", metavar="N", help="Begin with the newest N lines.  [default: 100]")
    ] = None,
    home: Home = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each line: its time, its peer, its text.")
    ] = False,
) -> None:
    """Show the log of this machine's peers.

    Reads the events below the home, of each peer since its last start: the lines are those that it says in its
    terminal. More than that has events.jsonl itself, in the directory that swarm status --peer shows.

    Example: swarm logs --peer otter -f
    """
    from peers.commands.logs import retell
    from peers.control.choose import choose_any
    from peers.home.places import home_directory, list_places
    from swarm.errors import ConfigError

    if lines is not None and not (lines.isascii() and lines.isdigit() and len(lines) < 8):
        raise ConfigError("--lines", lines, "a whole number from 0 on", "Correct it, or leave it out.")
    root = home_directory(home)
    places = list_places(root) if peer is None else [choose_any(root, peer, command="logs")]
    retell(places, lines=int(lines or 100), follow=follow, out=_as_json if as_json else _plain)


def _plain(moment: str, name: str, line: str) -> None:
    print(f"{moment}  {name}  {line}", flush=True)


def _as_json(moment: str, name: str, line: str) -> None:
    print(json.dumps({"at": moment, "peer": name, "line": line}), flush=True)


def status(
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer",
            "--place",
            metavar="PEER",
            help="Show this peer alone, in detail: by name, place, or the beginning of its id.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also show peers that ended more than a day ago.")
    ] = False,
    healthy: Annotated[
        bool, typer.Option("--healthy", help="Print problems alone, and exit with 3 if there are any.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the peers of this machine.

    Shows what each running peer does, what it waits for, and what its memory holds. Shows how the others ended: those
    of the last day, or all with --all or --json.

    Exits with 3 when no peer runs, also when all have left in order. With --peer it does so when that peer does not run
    or does not answer, and with --healthy when any running peer does not answer. A peer that is paused, or is to be
    started again, counts as one that runs.

    Example: swarm status --json
    """
    from peers.commands.look import check_health, look_at_all, of_late
    from peers.commands.status_text import detail_lines, hidden_line, status_lines
    from peers.console.words import print_error
    from peers.control.choose import choose_any, end_is_known, nobody_here
    from peers.home.places import home_directory, list_places

    root = home_directory(home)
    seen = look_at_all(list_places(root) if peer is None else [choose_any(root, peer, command="status")])
    if healthy:
        check_health(seen, root)
        raise typer.Exit
    if as_json:
        document = {"schema": SCHEMA, "home": str(root.absolute()), "places": [one.document() for one in seen]}
        print(json.dumps(document))
    elif peer is not None:
        print("\n".join(detail_lines(seen[0])))
    elif seen:
        shown = seen if everything else of_late(seen, datetime.now(UTC).timestamp())
        print("\n".join([*status_lines(shown), *hidden_line(len(seen) - len(shown), root)]).strip())
    sys.stdout.flush()
    if peer is not None:
        raise typer.Exit(EXIT_OK if seen[0].standing is not None or seen[0].comes_back else EXIT_UNREACHABLE)
    if not any(one.place.live or one.comes_back for one in seen):
        nobody = nobody_here(root)
        if not end_is_known(root):
            raise nobody
        print_error(nobody.cause, check=nobody.check, next_=nobody.next, label="note")
        raise typer.Exit(nobody.exit_code)
