"""``swarm sample``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


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
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Checkpoint to use.  [default: the newest complete one]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Have a trained model continue a prompt.

    Takes the directory of a swarm quickstart, or of a run that this machine's peers joined, and prints the prompt and
    the text that the model generates.
    """
    from peers.console.words import age_of_checkpoint, print_error, printable, with_commands
    from peers.home.run_directory import find_run_directory
    from peers.local.report import closed_steps

    found = find_run_directory(directory)
    # After the directory is known to be one: a wrong path should not cost the seconds that torch takes.
    from peers.commands.evaluate import Sampling, load_checkpoint, sample_text

    checkpoint = load_checkpoint(found, step)
    if checkpoint.passed_over is not None:
        print_error(
            f"taking step {checkpoint.step}, because of {with_commands(checkpoint.passed_over)}", label="warning"
        )
    # Whoever names a step knows its age.
    age = age_of_checkpoint(checkpoint.step, closed_steps(found.report)) if step is None else None
    if age is not None:
        print_error(age, label="note")
    if directory is None:
        print_error(f"step {checkpoint.step} of {found.root}", label="from")
    sampling = Sampling(prompt=prompt, tokens=tokens, seed=seed, temperature=temperature)
    made = sample_text(checkpoint, sampling)
    if as_json:
        answer = {"directory": str(found.root), "step": checkpoint.step, "prompt": prompt, "text": made, "seed": seed}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(printable(prompt + made))
