"""``swarm dashboard``."""

from __future__ import annotations

from typing import Annotated

import typer

from peers.cli.options import Home, Peer


def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            show_default=False,
            help="A peer of this machine, a directory with the files of a run or of several (the newest is shown), an "
            "invite (-: from standard input), or a peer's address.  [default: the run of this machine's peer]",
        ),
    ] = None,
    peer: Peer = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="PORT", help="Serve at this port of this machine alone; ADDRESS:PORT for others, too."
        ),
    ] = "7300",
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name", metavar="HOST", help="Answer also browsers that ask for this host name; repeat for more."
        ),
    ] = None,
    show_addresses: Annotated[
        bool, typer.Option("--show-addresses", help="Show the network addresses of the peers, too.")
    ] = False,
    home: Home = None,
) -> None:
    """Show a run live in a browser.

    Serves one page: who holds which part and what it does, loss and speed, who
    came and went, what each peer contributed, links, and what happened; with
    /api/v1/state (JSON), /api/v1/events (server-sent events) and /metrics
    (Prometheus).

    With an invite it follows the run as an observer that holds nothing. With a
    directory (of swarm quickstart, of a session, or of several runs) it shows
    one from its files, also one that is over. A running peer serves the same
    page with swarm join --dashboard PORT.

    At any address but this machine's own a token is needed; it is part of the
    printed address, and comes from SWARM_DASHBOARD_TOKEN or a file in the home.

    Example: swarm dashboard

    Example: swarm dashboard out/first
    """
    from peers.dashboard.start import DashboardOptions, run_dashboard

    options = DashboardOptions(listen=listen, names=tuple(name or ()), show_addresses=show_addresses, home=home)
    run_dashboard(run, peer, options, lambda line: print(line, flush=True))
