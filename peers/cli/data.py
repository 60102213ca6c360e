"""``swarm data``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peers.cli.light import WholeGroup
from peers.cli.options import AsJson, Home, Peer
from peers.console.words import count, printable
from swarm.errors import SwarmError

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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write the shard to this new directory.")],
    field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Read the text from this key or column. a.b is b in a.  [default: messages, text]"
        ),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Write conversations with this chat template, or that of a model's directory.  [default: "
            "next to the tokenizer]",
        ),
    ] = None,
    special_tokens: Annotated[
        bool,
        typer.Option("--special-tokens", help="Read special tokens as tokens, not as text."),
    ] = False,
    allow_bad: Annotated[
        bool, typer.Option("--allow-bad", help="Go on even if more than 1 % of the records or bytes cannot be used.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="Tokenize in N processes.  [default: one a core]")
    ] = None,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Show the packing for rows of N tokens.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Build a shard from text. Nothing leaves this machine.

    The run's tokenizer is next to its run.toml. swarm new prints that directory. swarm join --data TEXT takes the text
    itself, and needs no shard. Conversations (messages) teach the assistant's answers. The same command goes on where
    it was after an interrupt or a kill. Leaves out and counts lines and records that cannot be used, and keys of which
    nothing is made. Makes no shard where more than 1 % is bad, unless --allow-bad is given.

    Example: swarm data build texts/ notes.jsonl.gz --tokenizer tokenizer.json --out shards/mine
    """
    from dataclasses import asdict

    from peers.console.interrupt import Interrupted
    from peers.data.building import build_from_files, is_begun
    from peers.data.tokenizer_files import read_encoding
    from peers.data.trainer_data import describe

    encoding = read_encoding(tokenizer, key="TEXT", field=field, template=template, special_in_text=special_tokens)
    try:
        with _progress() as told:
            report = build_from_files(text, out, encoding, allow_bad=allow_bad, processes=processes, told=told)
    except (Interrupted, SwarmError):
        if is_begun(out):
            typer.echo("what is done is kept: type the same command again to go on", err=True)
        raise
    facts = describe(out, report.shard)
    facts |= {"keys": asdict(report.keys), "left_out": report.left_out.facts()} if as_json else {}
    typer.echo(json.dumps(facts) if as_json else _line(facts))
    _tell_flaws(report)
    for line in report.keys.lines("--special-tokens"):
        typer.echo(line, err=True)
    if not as_json:
        _tell_packing(out, context)


@data.command()
def audit(peer: Peer = None, home: Home = None, as_json: AsJson = False) -> None:
    """Show what a peer of this machine has sent, in bytes, by kind and receiver.

    Counts since that peer was started what it wrote to others in calls of the run, with frames' headers: not what
    encryption and the directory add. Activations are what microbatches become on their way, and with hosted ends token
    ids and labels, too; averaging is sums, and the means that copies take.

    Example: swarm data audit --peer otter
    """
    from peers.commands.status_text import table
    from peers.control.choose import choose_live
    from peers.control.client import ask
    from peers.control.sent import sent_lines
    from peers.home.places import home_directory
    from swarm.clock import moment

    place = choose_live(home_directory(home), peer, command="data audit")
    found = ask(place.control, "sent", who=place.described)
    if as_json:
        typer.echo(json.dumps({"schema": 1, **found}))
        return
    of = f" of {found['organisation']}" if found["organisation"] else ""
    own = "microbatches stay in one organisation" if found["routes"] == "organisation" else "microbatches pass any host"
    typer.echo(f"bytes that {found['name']}{of} has sent since {moment(found['since'])}; {own}")
    for line in table(sent_lines(found["receivers"])):
        typer.echo(line)


@data.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A shard.")],
    as_json: AsJson = False,
) -> None:
    """Check that a shard is whole: every byte against its digest.

    Example: swarm data verify shards/mine
    """
    from peers.data.trainer_data import describe, open_shard

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
    from peers.data.trainer_data import SCHEMA, shards_below

    found = shards_below(directory or Path())
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, "shards": found}))
        return
    for facts in found:
        typer.echo(_line(facts))
    if not found:
        typer.echo(f"no shard in {directory or 'this directory'} or below it", err=True)


@data.command()
def stats(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A shard.")],
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Length of rows: the run's model.context.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Show a shard's documents, lengths, and how it packs into rows.

    Example: swarm data stats shards/mine --context 2048
    """
    from dataclasses import asdict

    from data_shards.stats import packing_of, stats_of
    from peers.data.trainer_data import SCHEMA, open_shard

    shard = open_shard(directory, "DIR")
    found = stats_of(shard)
    if as_json:
        packed = [asdict(packing_of(shard, context, packing)) for packing in ("stream", "documents")]
        typer.echo(json.dumps({"schema": SCHEMA, "path": str(directory), **asdict(found), "packing": packed}))
        return
    low, *percentiles, high, mean = found.lengths
    typer.echo(f"{found.tokens:,} tokens of {found.documents:,} documents")
    typer.echo("a document: {:,} to {:,} tokens, mean {:,.0f}; 5 %, 50 %, 95 %: {:,}, {:,}, {:,}".format(
        low, high, mean, *percentiles
    ))  # fmt: skip
    if found.tokens_per_byte is not None:
        typer.echo(f"{found.tokens_per_byte:.3f} tokens a byte of text")
    if found.altered:
        typer.echo(f"documents that are another text when they are decoded: {found.altered:,}")
    if found.frame is not None:
        typer.echo(printable(f"a text is written as {found.frame}"))
    typer.echo(f"{100 * found.counted:.1f} % of tokens are learnt")
    _tell_packing(directory, context)


@data.command()
def histogram(
    directory: Annotated[Path, typer.Argument(metavar="SHARD", help="A shard.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the histogram to this file.")],
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Length of rows: the run's model.context.")] = 1024,
) -> None:
    """Write how often tokens are in a shard, for the founder of a run with experts: no text.

    swarm new --histogram FILE learns from it which kinds of text there are. The file has the means of groups of at
    least 32 documents each, in 256 bins that tokens are hashed into. It tells which kinds of text the shard has, and
    how much of each.

    Example: swarm data histogram shards/mine --out mine.json
    """
    from data_shards.histogram import histogram_of
    from peers.commands.preflight import check_output
    from peers.data.trainer_data import open_shard
    from swarm.disk import write_named

    check_output("--out", out)
    found = histogram_of(open_shard(directory, "SHARD"), context)
    write_named(out, [found.model_dump_json().encode()])
    sizes = ", ".join(f"{one.documents:,}" for one in found.groups)
    typer.echo(f"{out}: {count(len(found.groups), 'group')} of documents: {sizes}")


@data.command()
def sample(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A shard.")],
    tokenizer: Annotated[Path, typer.Option(metavar="FILE", help="The tokenizer.json that it was built with.")],
    documents: Annotated[int, typer.Option(metavar="N", min=1, help="Show N documents.")] = 3,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Show N tokens of each.")] = 200,
    seed: Annotated[int, typer.Option(metavar="N", help="Choose documents by this seed.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show some documents of a shard as text: it is private. What is learnt stands in «…» where not all is.

    Example: swarm data sample shards/mine --tokenizer tokenizer.json
    """
    from data_shards.stats import sample_documents
    from peers.data.tokenizer_files import read_encoding
    from peers.data.trainer_data import SCHEMA, check_made_with, open_shard

    shard = open_shard(directory, "DIR")
    decoder = read_encoding(tokenizer, key="DIR").make_tokenizer()
    check_made_with(shard.manifest, decoder.digest, directory)
    shown = list(sample_documents(shard, decoder, documents, seed=seed, tokens=tokens))
    typer.echo("this is the shard's private text: show it to nobody who must not read it", err=True)
    if as_json:
        found = [{"document": one.number, "parts": one.parts, "more_tokens": one.more} for one in shown]
        typer.echo(json.dumps({"schema": SCHEMA, "documents": found}))
        return
    for one in shown:
        typer.echo(f"--- document {one.number}")
        marked = (f"«{text}»" if learnt and shard.counted is not None else text for text, learnt in one.parts)
        typer.echo(printable("".join(marked)) + (f" … ({one.more:,} tokens more)" if one.more else ""))


def _tell_packing(directory: Path, context: int) -> None:
    from data_shards.stats import packing_of
    from peers.data.trainer_data import open_shard

    shard = open_shard(directory, "DIR")
    for packing in ("stream", "documents"):
        found = packing_of(shard, context, packing)
        words = f"{found.rows:,} rows of {context:,}, {100 * found.filled:.1f} % full"
        typer.echo(f"packed as {packing}: {words}; {100 * found.targets:.1f} % of the tokens that count are targets")


def _line(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return f"{facts['path']}: broken: {facts['error']}"
    size = f"{facts['tokens']:,} tokens of {facts['documents']:,} documents"
    return f"{facts['path']}: {size}, tokenizer {str(facts['tokenizer'])[:16]}, digest {str(facts['digest'])[:16]}"


def _tell_flaws(report: BuildReport) -> None:
    if report.kept_tokens:
        typer.echo(f"{report.kept_tokens:,} tokens of it were kept from a build before this one", err=True)
    if report.marks:
        typer.echo(f"{count(report.marks, 'file')} began with a byte order mark, which is left out", err=True)
    if report.altered:
        words = "is another text" if report.altered == 1 else "are other texts"
        typer.echo(
            f"{count(report.altered, 'document')} {words} when the tokens are decoded: this tokenizer does not keep "
            "every character",
            err=True,
        )
    for line in report.left_out.lines():
        typer.echo(line, err=True)
    for flaw in report.left_out.first[1:]:
        typer.echo(f"  {flaw}", err=True)


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
