"""``swarm doctor``: why this machine cannot join, or that it can."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Annotated

import typer

from peers.cli.options import AsJson, Home

Typed = str | None


def doctor(
    invite: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INVITE",
            show_default=False,
            envvar="SWARM_INVITE",
            show_envvar=False,
            help="Also try the run of this invite, or of peers' multiaddrs; - reads it from standard input.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Look at this machine only, in a third of a second.")] = False,
    device: Annotated[
        Typed,
        typer.Option(
            "--device",
            metavar="DEVICE",
            envvar="SWARM_DEVICE",
            show_envvar=False,
            help="Try this device: auto, mps, cpu, cuda or cuda:N.  [default: auto]",
        ),
    ] = None,
    threads: Annotated[
        Typed,
        typer.Option(
            "--threads",
            metavar="N",
            envvar="SWARM_THREADS",
            show_envvar=False,
            help="Measure its speed with this many CPU threads.  [default: 1]",
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen",
            metavar="ADDR",
            envvar="SWARM_LISTEN",
            show_envvar=False,
            help="Be called at this multiaddr; repeat for more.  [default: /ip4/0.0.0.0/tcp/0]",
        ),
    ] = None,
    port: Annotated[
        Typed, typer.Option("--port", metavar="N", help="Be called at this TCP port of all interfaces.")
    ] = None,
    through: Annotated[
        list[str] | None,
        typer.Option(
            "--through",
            metavar="ADDR",
            envvar="SWARM_THROUGH",
            show_envvar=False,
            help="Ask the relay at this multiaddr whether this machine needs one; repeat for more.",
        ),
    ] = None,
    timeout: Annotated[
        Typed, typer.Option("--timeout", metavar="S", help="End within this many seconds.  [default: 15]")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can join a run, and say why not.

    Looks at Python, torch, device, memory, disk, open files and port; with an INVITE also at the way to its peers and
    back, the clock, the link, which parts of the model fit, and how fast they are here compared with the others.
    Prints each check as it ends, and what to do where one fails. Joins nothing and leaves nothing.

    Exits with 5 when a check failed. What only costs speed is a warning.

    Example: swarm doctor swarm1:eyJydW4…

    Example: swarm doctor --quick

    Example: swarm doctor --through /dns4/relay.example.org/tcp/4001/p2p/12D3Koo…
    """  # fmt: skip
    from peers.commands.doctor import examine, read_wishes
    from peers.doctor.results import CheckResult, prints_marks

    plain = not prints_marks()

    def show(result: CheckResult) -> None:
        if not as_json:
            print("\n".join(result.lines(plain=plain)), flush=True)

    typed = {"device": device, "threads": threads, "port": port, "timeout": timeout, "home": home}
    invited = _several(invite) or (("",) if invite else ())  # one that is empty was meant to be one
    wishes = read_wishes(typed, invite=invited, listen=_several(listen), through=_several(through))
    report = examine(wishes, quick=quick, show=show)
    if as_json:
        print(json.dumps(report.document()), flush=True)
    else:
        print(report.verdict(quick=quick, invited=bool(wishes.invite)), flush=True)
    sys.stdout.flush()
    if report.unfinished:
        os._exit(report.exit_code)  # a thread that does not end would hold up the interpreter, or crash it
    raise typer.Exit(report.exit_code)


def _several(typed: list[str] | None) -> tuple[str, ...]:
    """Return what was repeated, or stands in a variable with commas or spaces."""
    return tuple(filter(None, (piece for text in typed or () for piece in re.split(r"[,\s]+", text))))
