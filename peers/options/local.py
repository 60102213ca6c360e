"""Define the options of ``swarm quickstart`` beside those of the run that it founds; read from the command alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from peers.options.fields import MODEL_CONFIG, FilePath, Option, between
from peers.options.model import Trackers

_LOCAL = ("quickstart",)
MOST_PEERS = 64
"""Of a kind, on one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """How a whole run is played on this machine: its peers, its text, and what is left of it."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    peers: Annotated[
        Annotated[int, between(1, MOST_PEERS)] | None,
        Option(
            metavar="N", of=_LOCAL, default="4; with a RUN.toml its own",
            help="Start N stage hosts, and a bootstrap and the trainers. More than stages gives replicas.",
        ),
    ] = None  # fmt: skip
    minutes: Annotated[
        Annotated[float, between(0.1, 1e5)] | None,
        Option(
            metavar="N", of=_LOCAL, default="1.5, unless the steps are said",
            help="Train about so long: a measurement chooses the steps, and smaller batches where few would fit.",
        ),
    ] = None  # fmt: skip
    text: Annotated[
        tuple[FilePath, ...],
        Option(
            metavar="PATH", of=_LOCAL, default="Python's own documentation",
            help="Train on this file or directory. Repeat it for more. Conversations need a --model with a "
            "chat template.",
        ),
    ] = ()  # fmt: skip
    special_tokens: Annotated[bool, Option(of=_LOCAL, help="Read special tokens in --text as tokens, not as text.")] = (
        False
    )
    allow_bad: Annotated[bool, Option(of=_LOCAL, help="Go on even if more than 1 % of it cannot be used.")] = False
    out: Annotated[
        FilePath | None,
        Option(metavar="DIR", of=_LOCAL, help="Write everything to this new directory.", default="out/<date-time>"),
    ] = None
    report: Annotated[
        FilePath | None, Option(metavar="FILE", of=_LOCAL, help="Write the JSON report to this file, too.")
    ] = None
    report_to: Annotated[
        Trackers | None,
        Option(
            metavar="TRACKER", of=_LOCAL,
            help="Send the run's figures to tensorboard, wandb or mlflow, or several with commas.",
        ),
    ] = None  # fmt: skip
    report_dir: Annotated[
        FilePath | None,
        Option(
            metavar="DIR",
            of=_LOCAL,
            default="reports/ in --out",
            help="Write the files of --report-to to this directory.",
        ),
    ] = None
    device: Annotated[
        str, Option(metavar="DEVICE", of=_LOCAL, help="Compute on auto, mps, cpu, cuda or cuda:N, every peer.")
    ] = "auto"
    json: Annotated[bool, Option(of=_LOCAL, help="Print the report as one line of JSON, and nothing else.")] = False
