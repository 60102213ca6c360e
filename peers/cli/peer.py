"""``swarm peer``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer


def peer(
    home: Annotated[Path | None, typer.Option(help="The peer's own directory: key, events, log, sockets.")] = None,
    role: Annotated[str | None, typer.Option(help="bootstrap, stage or trainer.")] = None,
    name: Annotated[str | None, typer.Option(help="What people call it.  [default: peer]")] = None,
    stage: Annotated[int | None, typer.Option(help="Stage to host.")] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(help="Multiaddr of a peer of the run, ending in /p2p/<peer id>; repeat for more."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Run id to insist on (64 hex digits).")] = None,
    manifest: Annotated[Path | None, typer.Option(help="Run manifest that a bootstrap serves.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer that a bootstrap serves.")] = None,
    listen: Annotated[str | None, typer.Option(help="Multiaddr to listen on.  [default: /ip4/127.0.0.1/tcp/0]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.  [default: cpu]")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for torch.  [default: 1]")] = None,
    shard: Annotated[Path | None, typer.Option(help="A trainer's private shard.")] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="Directory to write checkpoints into.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="Most microbatches a trainer has on their way.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these settings.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Run one peer in the foreground until its run is over.

    Every option can also come from the environment (SWARM_HOME, SWARM_ROLE, …) or from --config; an option given here
    wins over the environment, which wins over the file.
    """
    from peers.settings import load_settings

    settings = load_settings(
        {
            "home": home,
            "role": role,
            "name": name,
            "stage": stage,
            "bootstrap": tuple(bootstrap) if bootstrap else None,
            "run": run,
            "manifest": manifest,
            "tokenizer": tokenizer,
            "listen": listen,
            "device": device,
            "threads": threads,
            "shard": shard,
            "checkpoints": checkpoints,
            "checkpoint_every": checkpoint_every,
            "max_in_flight": max_in_flight,
            "verbose": not quiet,
        },
        config,
    )
    # After the settings are known to be good: torch and hivemind take seconds.
    from peers.node import run_peer

    by_keyboard: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        by_keyboard.append(number)
        os.kill(os.getpid(), signal.SIGTERM)

    # From here on the peer itself takes SIGTERM, as its order to leave; Ctrl-C means the same.
    signal.signal(signal.SIGINT, leave)
    code = run_peer(settings)
    raise typer.Exit(128 + by_keyboard[0] if by_keyboard and code else code)
