"""Options of the commands that start a peer."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class RelayUse(StrEnum):
    """Whether others may reach this peer through a relay."""

    auto = "auto"
    off = "off"


PeerName = Annotated[
    str | None, typer.Option("--name", help="What people call this peer.  [default: two words made of its id]")
]
Place = Annotated[
    str | None, typer.Option("--place", metavar="NAME", help="Which key and directory to use.  [default: a free one]")
]
Listen = Annotated[
    list[str] | None,
    typer.Option("--listen", metavar="ADDR", help="Multiaddr to listen on.  [default: /ip4/0.0.0.0/tcp/0]"),
]
Port = Annotated[
    int | None,
    typer.Option("--port", metavar="N", min=1, max=65535, help="Listen on this TCP port of all interfaces."),
]
Announce = Annotated[
    list[str] | None,
    typer.Option("--announce", metavar="ADDR", help="Multiaddr to tell others instead of what is found out."),
]
Relay = Annotated[
    RelayUse | None,
    typer.Option("--relay", help="auto: be reached through other peers where nothing else works.  [default: auto]"),
]
Grace = Annotated[
    float | None,
    typer.Option(
        "--grace", metavar="S", min=0, help="Seconds to leave in order after SIGTERM; 0: leave at once.  [default: 60]"
    ),
]
Preemption = Annotated[
    str | None,
    typer.Option(
        "--preemption",
        metavar="WHAT",
        help="What gives notice that this machine is taken back, for the peer to leave in time: aws, gcp, azure, auto "
        "(whichever answers), file:PATH, command:CMD (exit code 0 is the notice) or none.  [default: none]",
    ),
]
PreemptionUrl = Annotated[
    str | None,
    typer.Option(
        "--preemption-url", metavar="URL", help="Where a cloud's metadata is.  [default: http://169.254.169.254]"
    ),
]
InviteFile = Annotated[
    Path | None,
    typer.Option(
        "--invite-file",
        metavar="FILE",
        help="Of swarm new: write the invite here, and where one is already, come back to its run. Of swarm join: wait "
        "for the invite in it.",
    ),
]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with any of these.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
AsEvents = Annotated[bool, typer.Option("--json", help="Print every event as a line of JSON, nothing else.")]
