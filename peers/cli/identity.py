"""``swarm id``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from peers.cli.options import AsJson, Home

SCHEMA = 1


def identity(
    place: Annotated[str, typer.Option("--place", "--peer", metavar="PLACE", help="Whose identity.")] = "1",
    home: Home = None,
    create: Annotated[bool, typer.Option("--create", help="Make it now, when there is none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the identity of a place.

    Its peer id and the name that comes of it stay from run to run.
    A place gets one when a peer first starts in it, or by --create; without that, nothing is made.

    Example: swarm id --create --json
    """
    from peers.place_identity import create_identity, show_identity
    from peers.places import home_directory

    root = home_directory(home)
    found = create_identity(root, place) if create else show_identity(root, place)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "place": found.place, "peer": found.peer, "name": found.name,
                          "key": str(found.key.absolute())}))  # fmt: skip
        return
    print(f"peer   {found.peer}\nname   {found.name}\nplace  {found.place}\nkey    {found.key}")
