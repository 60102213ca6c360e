"""``swarm ckpt``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.light import WholeGroup
from peers.cli.options import AsJson, Home
from swarm.disk import size_text

if TYPE_CHECKING:
    from peers.checkpoints.pull import Pulled
    from peers.checkpoints.verify import CheckedStep
    from peers.home.run_directory import RunDirectory

SCHEMA = 1

ckpt = typer.Typer(
    cls=WholeGroup, help="List, check and fetch the checkpoints from which a run can be resumed.", no_args_is_help=True
)

Directory = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", help="A run's directory, or the beginning of its id.  [default: the newest run]"),
]


@ckpt.command("ls")
def list_checkpoints(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="A run's directory, or the beginning of its id.  [default: all runs]"),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """List runs and their checkpoints, with the parts that are here and those that are missing.

    A machine keeps the parts that its peers trained; other machines keep the rest.

    Example: swarm ckpt ls --json
    """
    from peers.checkpoints.listing import run_facts, run_lines
    from peers.home.run_directory import find_run_directory, known_runs

    runs = known_runs(home) if directory is None else [find_run_directory(directory, home)]
    facts = [run_facts(run) for run in runs]
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, "runs": facts}))
        return
    for one in facts:
        typer.echo("\n".join(run_lines(one)))
    if not facts:
        typer.echo(
            "no run is kept here: swarm quickstart and swarm join leave them, and swarm ckpt pull fetches them",
            err=True,
        )


@ckpt.command()
def verify(
    directory: Directory = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="Check only this step.  [default: all]")] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a run's checkpoints against its digest, and each record against its signatures.

    Exits with 1, naming the file, when something is wrong. A part that is on another machine is no error.

    Example: swarm ckpt verify --step 60
    """
    from peers.console.words import print_error
    from peers.home.run_directory import find_run_directory

    found = find_run_directory(directory, home)
    # After the directory is known to be one: a wrong path should not cost the seconds that torch takes.
    from peers.checkpoints.verify import check_run

    manifest, checked = check_run(found, step)
    bad = [trouble for one in checked for trouble in one.bad]
    if as_json:
        document = {"schema": SCHEMA, "path": str(found.root.absolute()), "run": manifest.run_id, "ok": not bad,
                    "steps": [_facts(one) for one in checked]}  # fmt: skip
        typer.echo(json.dumps(document))
    else:
        chosen = directory is not None
        typer.echo(_title(found, manifest.run.name, manifest.run_id, home, chosen=chosen))
        for one in checked:
            typer.echo(_line(one))
    sys.stdout.flush()
    for trouble in bad:
        print_error(trouble)
    raise typer.Exit(1 if bad else 0)


@ckpt.command()
def frozen(
    add: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Make them of this model's files, for the run that --run names."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="A run's directory, or the beginning of its id.")
    ] = None,
    remove: Annotated[str | None, typer.Option(metavar="DIGEST", help="Remove those whose digest begins so.")] = None,
    unused: Annotated[bool, typer.Option("--unused", help="Remove those that no run of this home needs.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """List, make or remove the frozen weights of adapters (LoRA) that this machine keeps, once for all of its runs.

    Example: swarm ckpt frozen --unused
    """
    from peers.home.run_directory import find_run_directory
    from swarm.errors import ConfigError

    if remove and unused:
        raise ConfigError("--unused", remove, "no --remove with it", "Give one of the two, then the other.")
    directory = None if add is None else find_run_directory(run, home, key="--run")
    # After the run is known to be one: torch takes seconds.
    from peers.frozen import add_frozen, listed_frozen, remove_frozen

    if add is not None and directory is not None:
        add_frozen(directory, add, lambda line: typer.echo(line, err=as_json))
    gone = remove_frozen(home, remove or "", unused=unused) if remove or unused else []
    kept = listed_frozen(home)
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, "frozen": kept, "removed": gone}))
        return
    for verb, found in (("removed ", gone), ("", kept)):
        for one in found:
            state = "" if one["complete"] else ", begun only"
            used = f"for {', '.join(one['runs'])}" if one["runs"] else "for no run here"
            typer.echo(f"{verb}{one['digest'][:12]}  {one['part']}, {size_text(one['bytes'])}{state}, {used}")
    if not (kept or gone):
        typer.echo("no frozen weights of adapters are kept here", err=True)


@ckpt.command()
def pull(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Directory for the parts.  [default: where this machine keeps that run]"),
    ] = None,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            "--peer",
            metavar="SOURCE",
            help="Fetch from a run's directory, a home, an invite (-: from stdin), or a peer of this machine; repeat "
            "for more directories.  [default: the peer that runs here]",
        ),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the missing parts of the newest checkpoint that is complete across all sources.

    Asks the peers of a running run, or combines several directories, verifies every byte, and continues an interrupted
    fetch. Of a run with adapters (LoRA) it fetches the weights beside them, too, where a source has them. Where all
    parts are together, swarm new --resume can continue the run once all its peers are gone.

    Example: swarm ckpt pull --from swarm1:eyJydW4…
    """
    result = pulled_from(sources or (), directory, home, words=not as_json)
    if as_json:
        document = {"schema": SCHEMA, "path": str(result.directory.root.absolute()), "run": result.run,
                    "step": result.step, "fetched": result.fetched, "bytes": result.bytes,
                    "newer": result.newer, "run_step": result.run_step, "unfrozen": result.unfrozen}  # fmt: skip
        typer.echo(json.dumps(document))
        return
    what = "is complete here" if result.fetched else "was complete here already, and no newer one can be had whole"
    late = result.run_step is not None and result.run_step > result.step
    of = f" (the run is at step {result.run_step}; peers keep one every few steps: --checkpoint-every)" if late else ""
    typer.echo(f"step {result.step} {what}{of}: {result.directory.root}")


def pulled_from(
    sources: Sequence[str], into: Path | None, home: str | None, *, words: bool, frozen: bool = True
) -> Pulled:
    """Pull from what a person named, and say on stderr what of it could not be had.

    Args:
        sources: As :func:`peers.checkpoints.named.named_sources` takes them, which goes first.
        into: The directory; None: where this home keeps that run.
        home: The home.
        words: Whether to say on stdout how it goes on.
        frozen: Whether the frozen weights of adapters are wanted, too.
    """
    from peers.checkpoints.named import named_sources
    from peers.console.words import print_error
    from peers.home.places import home_directory
    from peers.session import echo, silent

    named, say = named_sources(sources, home_directory(home)), echo if words else silent
    for line in named.lines():
        say("source", line)
    # After the sources mean something, and are said: torch and hivemind take seconds.
    from peers.checkpoints.pull import pull_from
    from peers.checkpoints.pull_frozen import where_frozen

    result = pull_from(named, into, home, say, frozen=frozen)
    for why in result.newer:
        print_error(f"step {result.step} is not the newest: {why}", label="warning")
    if result.unfrozen:
        cause, next_ = where_frozen(result.directory, result.unfrozen)
        print_error(cause, next_=next_, label="warning")
    return result


def _facts(one: CheckedStep) -> dict[str, object]:
    return {"step": one.step, "ok": not one.bad, "complete": one.good, "bytes": one.bytes, "parts": one.parts,
            "missing": one.missing, "proof": one.proof, "bad": one.bad}  # fmt: skip


def _title(found: RunDirectory, name: str, run: str, home: str | None, *, chosen: bool) -> str:
    """Return the title with the checked run and, if nobody chose it, the commands for the others."""
    from peers.console.words import command_name
    from peers.home.run_directory import known_runs, said_run_id

    title = f"{name} {run[:12]}  {found.root}"
    others = [] if chosen else sorted({said_run_id(one)[:12] for one in known_runs(home)} - {run[:12], ""})
    return f"{title}\nthe newest here; others: {command_name()} ckpt verify {' | '.join(others)}" if others else title


def _line(one: CheckedStep) -> str:
    from peers.console.words import listed

    signed = {"decided": "; its record is signed by those who decided it", "unproven": "; its record is unproven"}
    if not one.of and not one.bad:
        return f"step {one.step}: nothing of it is saved"
    state = "damaged, " if one.bad else "whole, " if one.good else ""
    good = "good" if one.bad else "undamaged"
    lacks = f"; lacks {listed(one.missing)}" if one.missing else ""
    parts = f"{len(one.parts)} of {one.of} parts, {good}, {one.bytes:,} bytes"
    return f"step {one.step}: {state}{parts}{lacks}{signed.get(one.proof, '')}"
