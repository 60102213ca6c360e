"""``swarm export`` and ``swarm sample``: what a trained model is for."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.options import AsJson, Home

if TYPE_CHECKING:
    from peers.home.run_directory import RunDirectory

SCHEMA = 1


class StoredAs(StrEnum):
    """What exported weights are stored in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="A run's directory, or the beginning of its id.  [default: the newest under ./out and in the home]",
    ),
]
Step = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Checkpoint to use.  [default: the newest complete one]")
]


def export(
    into: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the model, or an empty one.")],
    run: Run = None,
    step: Step = None,
    dtype: Annotated[
        StoredAs, typer.Option(help="Store the weights in this; bfloat16 is half as large, and rounded.")
    ] = StoredAs.float32,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as a directory that transformers loads, with its tokenizer and a model card.

    Works from the checkpoints on this machine, whether the run goes on or not. Needs no transformers itself.

    Example: swarm export my-model --run out/first
    """
    from peers.commands.model_directory import check_target
    from peers.home.run_directory import find_run_directory

    check_target(into)
    found = find_run_directory(run, home, key="--run")
    # After both directories are known to be right: a wrong path should not cost the seconds that torch takes.
    from peers.checkpoints.choice import choose_step
    from peers.commands.export import export, load_command

    chosen = choose_step(found, step)
    _tell_which(found, chosen.step, chosen.passed_over, asked=step is not None, named=run is not None)
    made = export(chosen, into, dtype.value, told=(lambda line: None) if as_json else typer.echo)
    if as_json:
        document = {"schema": SCHEMA, "path": str(into.absolute()), "run": chosen.manifest.run_id, "step": chosen.step,
                    "parameters": made.parameters, "bytes": made.bytes, "dtype": dtype.value,
                    "files": made.files}  # fmt: skip
        typer.echo(json.dumps(document))
        return
    typer.echo(f"step {chosen.step} of {chosen.manifest.run.name}, {made.parameters:,} parameters, is in {into}")
    typer.echo(f"next: {load_command(into)}")


def sample(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Directory of a run.  [default: the newest under ./out and in the home]",
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "The",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Tokens to generate.")] = 100,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**31 - 1, help="The same seed gives the same text.")
    ] = 0,
    temperature: Annotated[
        float,
        typer.Option(metavar="X", min=0.0, max=10.0, help="Sampling temperature; 0 always takes the likeliest token."),
    ] = 0.8,
    step: Step = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Have a trained model continue a prompt.

    Takes the directory of a swarm quickstart, or of a run that this machine's peers joined, and prints the prompt and
    the text that the model generates.
    """
    from peers.console.words import printable
    from peers.home.run_directory import find_run_directory

    found = find_run_directory(directory)
    # After the directory is known to be one: a wrong path should not cost the seconds that torch takes.
    from peers.commands.evaluate import Sampling, load_checkpoint, sample_text

    checkpoint = load_checkpoint(found, step)
    _tell_which(found, checkpoint.step, checkpoint.passed_over, asked=step is not None, named=directory is not None)
    sampling = Sampling(prompt=prompt, tokens=tokens, seed=seed, temperature=temperature)
    made = sample_text(checkpoint, sampling)
    if as_json:
        answer = {"directory": str(found.root), "step": checkpoint.step, "prompt": prompt, "text": made, "seed": seed}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(printable(prompt + made))


def _tell_which(found: RunDirectory, step: int, passed_over: str | None, *, asked: bool, named: bool) -> None:
    """Say on stderr which checkpoint is used, as far as nobody ``asked`` for the step or ``named`` the run."""
    from peers.console.words import age_of_checkpoint, print_error, with_commands
    from peers.local.report import closed_steps

    if passed_over is not None:
        print_error(f"taking step {step}, because of {with_commands(passed_over)}", label="warning")
    # Whoever names a step knows its age.
    age = None if asked else age_of_checkpoint(step, closed_steps(found.report))
    if age is not None:
        print_error(age, label="note")
    if not named:
        print_error(f"step {step} of {found.root}", label="from")
