"""``swarm model``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from peers.cli.options import AsJson, WholeGroup

model = typer.Typer(
    cls=WholeGroup, help="Look at models of transformers: may they be trained here?", no_args_is_help=True
)


@model.command()
def check(
    given: Annotated[
        str, typer.Argument(metavar="DIR", help="A model's directory, or OWNER/NAME[@REVISION] on the hub.")
    ],
    stages: Annotated[
        int | None, typer.Option(min=1, max=512, help="Show what a part is of so many stages.  [default: 2]")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row.  [default: 512, or what it has]")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how a model can be cut, what a peer needs for a part, and whether it gives the same bits cut as whole.

    Builds the model without its weights, and tries a small one of its kind: some seconds. Needs the extra hf. Exits
    with 2, and says why, where the model cannot be trained here, or only with --from-scratch.

    Example: swarm model check models/llama --stages 4
    """
    from peers.commands.model import examine, lines

    facts = examine(given, stages=stages, context=context)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for label, text in lines(facts):
            typer.echo(f"{label:<12}  {text}")
    if not facts["trainable"] or facts["files"]["error"] or facts["flaw"]:
        raise typer.Exit(2)
