"""``swarm data``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peers.cli.options import AsJson, WholeGroup

if TYPE_CHECKING:
    from peers.data.building import BuildProgress, BuildReport

data = typer.Typer(
    cls=WholeGroup, help="Build, check and list shards: private text as tokens for training.", no_args_is_help=True
)


@data.command()
def build(
    text: Annotated[
        list[Path],
        typer.Argument(
            metavar="TEXT",
            help="UTF-8 files, or directories: text, JSONL, CSV, Parquet, Arrow; .gz, .zst; patterns.",
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(metavar="FILE", help="The run's tokenizer.json, or a model's directory.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New directory for the shard.")],
    field: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Key or column with the text; a.b is b in a.  [default: messages, text]"),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Chat template in Jinja.  [default: the one beside the tokenizer]"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="Processes that tokenize.  [default: one a core]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build a shard from text. Nothing leaves this machine.

    The run's tokenizer is beside its run.toml; swarm new prints that directory. swarm join --data TEXT takes the text
    itself and needs no shard. Of conversations (messages) the assistant's answers are learnt. After an
    interrupt or a kill the same command goes on where it was. Records that cannot be used are left out and counted.

    Example: swarm data build texts/ notes.jsonl.gz --tokenizer tokenizer.json --out shards/mine
    """
    from peers.console.interrupt import Interrupted
    from peers.data.building import build_from_files
    from peers.data.source import describe
    from peers.data.tokenizer_files import read_encoding

    encoding = read_encoding(tokenizer, key="TEXT", field=field, template=template)
    try:
        with _progress() as told:
            report = build_from_files(text, out, encoding, processes=processes, told=told)
    except Interrupted:
        typer.echo("what is done is kept: type the same command again to go on", err=True)
        raise
    facts = describe(out, report.shard)
    typer.echo(json.dumps(facts) if as_json else _line(facts))
    _tell_flaws(report)


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


def _line(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return f"{facts['path']}: broken: {facts['error']}"
    size = f"{facts['tokens']:,} tokens of {facts['documents']:,} documents"
    return f"{facts['path']}: {size}, tokenizer {str(facts['tokenizer'])[:16]}, digest {str(facts['digest'])[:16]}"


def _tell_flaws(report: BuildReport) -> None:
    if report.kept_tokens:
        typer.echo(f"{report.kept_tokens:,} tokens of it were kept from a build before this one", err=True)
    if report.flawed:
        typer.echo(f"{report.flawed:,} {'record was' if report.flawed == 1 else 'records were'} left out:", err=True)
        for flaw in report.flaws:
            typer.echo(f"  {flaw}", err=True)
        if report.flawed > len(report.flaws):
            typer.echo(f"  … and {report.flawed - len(report.flaws):,} more", err=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[BuildProgress], None]]:
    """A bar on a terminal; nothing where stderr is none."""
    import sys

    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenizing")

        def told(progress: BuildProgress) -> None:
            words = "found again" if progress.kept else f"{progress.tokens:,} tokens"
            bar.update(task, total=progress.total, completed=progress.read, description=words)

        yield told
