"""``swarm quickstart``: its options are made from :mod:`peers.options`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from peers.cli.options import offer
from peers.options.foundation import Foundation
from peers.options.local import LocalOptions

if TYPE_CHECKING:
    from pathlib import Path


@offer("quickstart", Foundation, LocalOptions)
def quickstart(**typed: Any) -> None:
    """Train a small model with a whole swarm on this machine: no network, no account, within two minutes.

    Measures how fast the machine computes, and chooses as many steps as fit into --minutes. Starts a bootstrap, stage
    hosts and trainers as separate processes, prints a row per step, and leaves a directory with the manifest,
    checkpoints, events of every peer, a loss plot and a report. Ctrl-C stops everything.

    The run is that of a RUN.toml, of a preset (tiny unless it is named), or of a model; options replace what it says.

    Example: swarm quickstart --model models/llama --lora-rank 16 --text chats.jsonl
    """
    from peers.options.reading import read_foundation, read_local_options
    from peers.presets import refuse_as_file

    foundation, local = read_foundation(typed, "quickstart"), read_local_options(typed)
    _refuse_text(foundation.file, local)
    refuse_as_file(foundation.file)
    # Manifests import torch: after what can be refused without them.
    from peers.commands.quickstart import plan_run
    from peers.commands.quickstart import quickstart as run_quickstart
    from swarm.clock import SystemClock

    raise typer.Exit(run_quickstart(plan_run(foundation, local), SystemClock()))


def _refuse_text(file: Path | None, local: LocalOptions) -> None:
    """Raises ConfigError for a text where a RUN.toml belongs, as when several files follow one ``--text``."""
    if file is None or not local.text or file.suffix == ".toml":
        return
    from swarm.errors import ConfigError

    files = " ".join(f"--text {shlex.quote(str(name))}" for name in (*local.text, file))
    raise ConfigError(
        "RUN.toml", str(file), "a file that ends in .toml", f"For several files repeat the option: {files}"
    )
