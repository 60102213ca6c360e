"""``swarm invite``."""

from __future__ import annotations

import sys

from peers.cli.options import Home, Peer


def invite(peer: Peer = None, home: Home = None) -> None:
    """Print an invite: all it takes to join.

    It invites to the run of a peer on this machine. Only the invite goes to stdout, what to do with it to stderr.

    Example: swarm invite > invite.txt
    """
    from peers.choose import choose_speaker
    from peers.control_client import ask
    from peers.invite import parse_invite
    from peers.places import home_directory
    from peers.words import print_error

    place = choose_speaker(home_directory(home), peer, command="invite")
    text = str(ask(place.control, "invite", who=place.described))
    print(text, flush=True)
    print("Whoever has it can join this run. On another machine: swarm join INVITE", file=sys.stderr)
    if parse_invite(text).local:
        print_error(
            f"{place.title} can be reached from this machine only",
            check=f"swarm status --peer {place.name} shows its addresses",
            next_="start it with --listen /ip4/0.0.0.0/tcp/0 to be reached from others",
            label="note",
        )
