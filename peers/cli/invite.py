"""``swarm invite``."""

from __future__ import annotations

import sys

from peers.cli.options import Home, Peer


def invite(peer: Peer = None, home: Home = None) -> None:
    """Print an invite: all it takes to join.

    It invites to the run of a peer on this machine. Only the invite goes to stdout, what to do with it to stderr.

    Example: swarm invite > invite.txt
    """
    from peers.choose import choose_live
    from peers.control_client import ask
    from peers.places import home_directory

    place = choose_live(home_directory(home), peer, command="invite")
    text = str(ask(place.control, "invite", who=place.described))
    print(text, flush=True)
    hint = "" if sys.stdout.isatty() else "; it went where stdout goes"
    print(f"On the other machine: swarm join INVITE (the line above{hint})", file=sys.stderr)
