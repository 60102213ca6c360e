"""``swarm status``."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from peers.cli.options import AsJson, Home

SCHEMA = 1


def status(
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer",
            "--place",
            metavar="PEER",
            help="Only this one, with more about it: its name, its place, or how its peer id begins.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended more than a day ago.")] = False,
    healthy: Annotated[
        bool, typer.Option("--healthy", help="Only check: print the trouble alone, exit code 3 where there is any.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the peers of this machine.

    What each does and waits for, and how those that do not run any more ended; of these only the ones of the last
    day, unless --all or --json is given.
    Exit code 3 when none runs; with --peer, when that one does not run or does not answer; with --healthy, when any
    that runs does not answer.

    Example: swarm status --json
    """
    from peers.choose import choose_any, nobody_here
    from peers.look import check_health, look_at_all, of_late
    from peers.places import home_directory, list_places
    from peers.standing_text import detail_lines, hidden_line, status_lines

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
        print("\n".join([*status_lines(shown), *hidden_line(len(seen) - len(shown))]).strip())
    sys.stdout.flush()
    if peer is not None:
        raise typer.Exit(0 if seen[0].standing is not None else 3)
    if not any(one.place.live for one in seen):
        raise nobody_here(root)
