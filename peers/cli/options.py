"""What the commands that look at this machine's peers share: their options."""

from __future__ import annotations

from typing import Annotated

import typer

Home = Annotated[
    str | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Where this machine's peers live.  "
        "[default: $SWARM_HOME, else $XDG_DATA_HOME/swarm, else ~/.local/share/swarm]",
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        metavar="PEER",
        help="Its name, its place, or at least 10 characters with which its peer id begins.  [default: the only one]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON, nothing else.")]
