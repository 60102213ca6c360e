"""``swarm peers``."""

from __future__ import annotations

import dataclasses
import json

from peers.cli.options import AsJson, Home, Peer

SCHEMA = 1


def peers(peer: Peer = None, home: Home = None, as_json: AsJson = False) -> None:
    """Show the whole swarm, by part.

    As a peer of this machine sees it, with how it reaches the others. Without --peer any peer of the run will do;
    where peers of several runs live, say which.

    Example: swarm peers --json
    """
    from peers.choose import choose_speaker
    from peers.control_client import ask
    from peers.look import members_from, standing_from
    from peers.places import home_directory
    from peers.standing import Standing
    from peers.standing_text import member_lines

    place = choose_speaker(home_directory(home), peer, command="peers")
    standing = standing_from(Standing, ask(place.control, "status", who=place.described), place.described)
    members = members_from(ask(place.control, "peers", who=place.described), place.described)
    if not as_json:
        print("\n".join(member_lines(standing, members)))
        return
    document = {
        "schema": SCHEMA,
        "seen_by": standing.peer,
        "run": standing.run,
        "run_name": standing.run_name,
        "step": standing.step,
        "steps": standing.steps,
        "peers": [dataclasses.asdict(member) for member in members],
    }
    print(json.dumps(document))
