"""``swarm peers``."""

from __future__ import annotations

import dataclasses
import json

from peers.cli.options import AsJson, Home, Peer

SCHEMA = 1


def peers(peer: Peer = None, home: Home = None, as_json: AsJson = False) -> None:
    """Show the whole swarm, by part.

    As a peer of this machine sees it, with how it reaches the others, and which peers of this machine are starting.
    Without --peer any peer of the run will do; where peers of several runs live, say which.

    Example: swarm peers --json
    """
    from peers.choose import choose_speaker
    from peers.look import look_at_all, look_at_swarm
    from peers.places import home_directory, list_places
    from peers.standing_text import member_lines, starting_lines

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
