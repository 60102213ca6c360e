"""``swarm id``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.options import AsJson, Home

if TYPE_CHECKING:
    from peers.place_identity import PlaceIdentity

SCHEMA = 1


def identity(
    place: Annotated[
        str | None,
        typer.Option("--place", "--peer", metavar="PLACE", help="Whose identity.  [default: of every place]"),
    ] = None,
    home: Home = None,
    create: Annotated[bool, typer.Option("--create", help="Make it now, when there is none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the identity of a place.

    Its peer id and the name that comes of it stay from run to run.
    A place gets one when a peer first starts in it, or by --create (place 1, unless another is named); without that,
    nothing is made. Where there are several places, --json wants one of them named.

    Example: swarm id --create --json
    """
    from peers.place_identity import create_identity, only_identity, show_identities, show_identity
    from peers.places import home_directory

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
