"""``swarm quickstart``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from peers.foreign_model import ChosenModel
    from swarm.models.lora_config import LoraConfig


class PackingChoice(StrEnum):
    """What a row of text is."""

    stream = "stream"
    documents = "documents"


class BaseChoice(StrEnum):
    """What frozen weights are stored in."""

    bfloat16 = "bfloat16"
    nf4 = "nf4"
    float32 = "float32"


class EndsChoice(StrEnum):
    """The holders of embedding, head and loss."""

    private = "private"
    hosted = "hosted"


def quickstart(
    context: typer.Context,
    steps: Annotated[int, typer.Option(help="Optimizer steps to train.")] = 60,
    peers: Annotated[
        int,
        typer.Option(help="Stage hosts, in addition to a bootstrap and the trainers; more than stages gives replicas."),
    ] = 4,
    stages: Annotated[int, typer.Option(help="Cut the model's blocks into this many stages.")] = 2,
    trainers: Annotated[int, typer.Option(help="Peers that feed private text, each from its own shard.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the choice of held-out text, and the sample.")] = 0,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Train on this file or directory; repeat for more. Conversations need --model, with a chat template.  "
            "[default: Python's own documentation]",
        ),
    ] = None,
    allow_bad: Annotated[
        bool, typer.Option("--allow-bad", help="Go on where more than 1 % of its records or bytes cannot be used.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID",
            help="Train this model of transformers (extra hf): its directory, or OWNER/NAME on the hub.  "
            "[default: our own]",
        ),
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="With --model: begin with random weights, not the files'.")
    ] = False,
    tokens_in_a_row: Annotated[
        int | None, typer.Option("--context", help="With --model: tokens in a row.  [default: 512, or what it has]")
    ] = None,
    packing: Annotated[
        PackingChoice,
        typer.Option(
            help="What a row is: a part of the stream of all documents, or whole documents that do not see each other."
        ),
    ] = PackingChoice.stream,
    lora_rank: Annotated[
        int | None, typer.Option(help="Train adapters of this rank (LoRA), and none of the model's own weights.")
    ] = None,
    lora_base: Annotated[
        BaseChoice | None, typer.Option(help="With --lora-rank: what the weights beside adapters are kept in.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write everything to this new directory.  [default: out/<date-time>]")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the JSON report here.")] = None,
    report_to: Annotated[
        str | None,
        typer.Option(
            metavar="TRACKER", help="Hand the run's figures on: tensorboard, wandb, mlflow, or several with commas."
        ),
    ] = None,
    report_dir: Annotated[
        Path | None, typer.Option(help="With --report-to: directory of its files.  [default: reports/ in --out]")
    ] = None,
    ends: Annotated[
        EndsChoice,
        typer.Option(help="private: token ids and labels never leave a trainer; hosted: stages hold the ends."),
    ] = EndsChoice.private,
    device: Annotated[str, typer.Option(help="Device of every peer: auto, mps, cpu, cuda or cuda:N.")] = "cpu",
    local_steps: Annotated[
        int,
        typer.Option(
            help="Optimizer steps that each replica takes on its own before all average their weights (DiLoCo) and a "
            "step closes; 1 averages the gradients of each batch."
        ),
    ] = 1,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Give the same weights, bit for bit, for any wiring.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one line of JSON, and nothing else.")
    ] = False,
) -> None:
    """Train a small model with a whole swarm on this machine: no network, no account, a few minutes.

    Starts a bootstrap, stage hosts and trainers as separate processes, prints a row per step, and leaves a directory
    with the manifest, checkpoints, events of every peer, a loss plot and a report. Ctrl-C stops everything.
    For a quick look: --steps 10.
    """
    from peers.commands.quickstart import QuickstartOptions
    from peers.commands.quickstart import quickstart as run_quickstart
    from peers.data.prepare import RunShape
    from swarm.clock import SystemClock

    _refuse_arguments(context.args, text or ())

    shape = RunShape(
        steps=steps,
        peers=peers,
        stages=stages,
        trainers=trainers,
        seed=seed,
        ends=ends.value,
        reproducible=reproducible,
        local_steps=local_steps,
        chosen=_chosen(model, from_scratch, tokens_in_a_row, packing),
        packing=packing.value,
        lora=_lora(lora_rank, lora_base),
    )
    options = QuickstartOptions(
        shape=shape,
        text=tuple(text or ()),
        allow_bad=allow_bad,
        out=out,
        report=report,
        device=device,
        json=as_json,
        report_to=report_to,
        report_dir=report_dir,
    )
    raise typer.Exit(run_quickstart(options, SystemClock()))


def _chosen(model: str | None, scratch: bool, context: int | None, packing: PackingChoice) -> ChosenModel | None:
    """The model that is named, None for our own. Raises ConfigError."""
    from swarm.errors import ConfigError

    if model is not None:
        from peers.foreign_model import choose_model

        return choose_model(model, scratch=scratch, context=context, packing=packing.value)
    if scratch or context is not None:
        name, value = ("--from-scratch", "") if scratch else ("--context", str(context))
        raise ConfigError(name, value, "only together with --model", "Name the model too, or leave it out.")
    return None


def _lora(rank: int | None, base: BaseChoice | None) -> LoraConfig | None:
    """The adapters that are asked for. Raises ConfigError."""
    from swarm.errors import ConfigError
    from swarm.models.lora_config import LoraConfig

    if rank is None:
        if base is not None:
            raise ConfigError("--lora-base", base.value, "only together with --lora-rank", "Add --lora-rank 16.")
        return None
    if not 1 <= rank <= 4096:
        raise ConfigError("--lora-rank", rank, "from 1 to 4096", "Choose a number in that range, as 16.")
    return LoraConfig(rank=rank, alpha=2.0 * rank, base="bfloat16" if base is None else base.value)


def _refuse_arguments(arguments: Sequence[str], text: Sequence[Path]) -> None:
    """Raises ConfigError for words that belong to no option, as when several files follow one ``--text``."""
    if not arguments:
        return
    from swarm.errors import ConfigError

    files = " ".join(f"--text {shlex.quote(name)}" for name in (*map(str, text), *arguments))
    remedy = f"For several files repeat the option: {files}" if text else "See swarm quickstart --help."
    raise ConfigError("argument", " ".join(arguments), "options only", remedy)
