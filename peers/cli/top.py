"""``swarm top``."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.options import Home, Peer
from peers.exit_codes import EXIT_ERROR, EXIT_USAGE

if TYPE_CHECKING:
    from peers.dashboard.feed import StateFeed
    from swarm.clock import Clock


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            show_default=False,
            help="A peer of this machine, a directory with the files of a run, also a past one, or of several (the "
            "newest is shown), or an invite.  [default: the run of the peer here]",
        ),
    ] = None,
    peer: Peer = None,
    once: Annotated[bool, typer.Option("--once", help="Print the run once, as text. It needs no terminal.")] = False,
    home: Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's state as JSON, with --once.")] = False,
) -> None:
    """Watch a run in the terminal.

    Shows how far the run is, what each replica of each part does, the loss, the peers that came and went, what each
    peer contributed, and what happened. Draws it anew every second, until you press q. The key ? explains it.

    Asks a peer of this machine, reads the files of the run in a directory, or follows a run by its invite, as an
    observer that holds nothing. Needs the extra top.

    Example: swarm top

    Example: swarm top out/first
    """
    import asyncio

    from peers.console.words import CommandError, command_name
    from swarm.clock import SystemClock

    if run is not None and peer is not None:
        raise CommandError("--peer and RUN were given together",
                           next_="Leave one of them out.", exit_code=EXIT_USAGE)  # fmt: skip
    if as_json and not once:
        raise CommandError("--json needs --once: it prints one state of the run",
                           next_=f"{command_name()} top --once --json",
                           exit_code=EXIT_USAGE)  # fmt: skip
    if once:
        _needs_textual()
        clock = SystemClock()
        print(asyncio.run(_seen_once(feed_of(run, peer, home, clock), as_json=as_json)), flush=True)
        return
    if not _on_terminal():
        swarm = command_name()
        raise CommandError("swarm top needs a terminal",
                           check="are stdin, stdout and stderr a terminal, without < > and |?",
                           next_=f"{swarm} top --once for text, or {swarm} dashboard for a browser",
                           exit_code=EXIT_USAGE)  # fmt: skip
    _needs_textual()
    clock = SystemClock()
    ended = asyncio.run(_shown(feed_of(run, peer, home, clock), clock))
    if ended is not None:
        raise ended


def _on_terminal() -> bool:
    """Textual reads keys from stdin and draws on stderr; who sends stdout elsewhere wants text."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def _needs_textual() -> None:
    from importlib.util import find_spec

    from peers.console.words import CommandError
    from swarm.errors import install_command

    if find_spec("textual") is None:
        raise CommandError("swarm top needs textual, which is not installed", check="pip list | grep textual",
                           next_=install_command("top"), exit_code=EXIT_ERROR)  # fmt: skip


@asynccontextmanager
async def feed_of(run: str | None, peer: str | None, home: str | None, clock: Clock) -> AsyncIterator[StateFeed]:
    """Have what keeps the state of the wanted run up to date. Raises ConfigError and CommandError for none, and
    RunEnded for an invite to a run that cannot be reached."""
    from peers.dashboard.feed import StateFeed
    from peers.dashboard.overview import Overview
    from peers.dashboard.start import seen_from

    sight = seen_from(run, peer, home, command="top")
    async with sight.source as source:
        yield StateFeed(source, Overview({"kind": sight.kind, "label": sight.name}), clock)


async def _seen_once(opened: AbstractAsyncContextManager[StateFeed], *, as_json: bool) -> str:
    """Look at it once; returns its panes one below the other, or its state as JSON. Raises what ends the looking."""
    import json
    import shutil

    from peers.top.app import PANES
    from peers.top.drawing import header

    async with opened as feed:
        feed.state()  # somebody looks: a peer is asked for all that it knows
        await feed.update()
        state = feed.state()
    if as_json:
        return json.dumps(state)
    width, height = shutil.get_terminal_size()
    panes = [header(state, width).plain]
    panes += [f"{title}\n{drawing(state, width, height).plain}" for title, drawing in PANES.items()]
    return "\n\n".join("\n".join(line.rstrip() for line in pane.splitlines()).rstrip() for pane in panes)


async def _shown(opened: AbstractAsyncContextManager[StateFeed], clock: Clock) -> BaseException | None:
    async with opened as feed:
        return await _watched(feed, clock)


async def _watched(feed: StateFeed, clock: Clock) -> BaseException | None:
    """Show it until somebody quits, or what ends it is returned."""
    import asyncio

    from peers.console.interrupt import SIGNALS, Interrupted
    from peers.top.app import TopApp

    app = TopApp(feed, clock)
    for number in SIGNALS:  # the terminal is put back as it was before the command ends
        asyncio.get_running_loop().add_signal_handler(number, app.exit, Interrupted(number))
    return await app.run_async()
