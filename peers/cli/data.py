"""``swarm data``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.options import AsJson, WholeGroup

data = typer.Typer(
    cls=WholeGroup, help="Build, check and list shards: private text as tokens for training.", no_args_is_help=True
)


@data.command()
def build(
    text: Annotated[list[Path], typer.Argument(metavar="TEXT", help="UTF-8 files, or directories of text files.")],
    tokenizer: Annotated[Path, typer.Option(metavar="FILE", help="The run's tokenizer.json.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New directory for the shard.")],
    as_json: AsJson = False,
) -> None:
    """Build a shard from text. Nothing leaves this machine.

    The run's tokenizer is beside its run.toml; swarm new prints that directory. swarm join --data TEXT takes the text
    itself and needs no shard.

    Example: swarm data build texts/ --tokenizer tokenizer.json --out shards/mine
    """
    from peers.data.source import build_from, describe

    facts = describe(out, build_from(text, tokenizer, out))
    typer.echo(json.dumps(facts) if as_json else _line(facts))


@data.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A shard.")],
    as_json: AsJson = False,
) -> None:
    """Check that a shard is whole: every byte against its digest.

    Example: swarm data verify shards/mine
    """
    from peers.data.source import describe, open_shard

    facts = describe(directory, open_shard(directory, "DIR", anew=True).manifest)
    typer.echo(json.dumps(facts) if as_json else f"whole: {_line(facts)}")


@data.command("ls")
def list_shards(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Directory to search.  [default: this one]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shards in a directory and below it. Reads their manifests, not their tokens.

    Example: swarm data ls out/
    """
    from peers.data.source import SCHEMA, shards_below

    found = shards_below(directory or Path())
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, "shards": found}))
        return
    for facts in found:
        typer.echo(_line(facts))
    if not found:
        typer.echo(f"no shard in {directory or 'this directory'} or below it", err=True)


def _line(facts: dict[str, object]) -> str:
    if "error" in facts:
        return f"{facts['path']}: broken: {facts['error']}"
    size = f"{facts['tokens']:,} tokens of {facts['documents']:,} documents"
    return f"{facts['path']}: {size}, tokenizer {str(facts['tokenizer'])[:16]}, digest {str(facts['digest'])[:16]}"
