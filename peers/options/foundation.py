"""Define the options of one start of a command: of the run that ``swarm new`` or ``swarm quickstart`` founds, and of
the command itself.

:class:`Foundation` describes the run to found and :class:`Invocation` one start of a command; both are read from the
command alone. What a peer is told is in :mod:`peers.options.model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from peers.options.fields import MODEL_CONFIG, FilePath, Option, between, matching, settings_of

_JOIN, _NEW = ("join",), ("new",)
_FOUND = ("new", "quickstart")


STRANGERS: Mapping[str, Any] = {
    "averaging.guard": "leave-out",
    "averaging.check": 0.02,
    "optimizer.influence": 2.0,
    "optimizer.trainer_test": True,
    "verify.audit": 0.05,
}
"""Keys of the manifest, and their values, where peers need not believe each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """The run to found: a preset's name or a file, values that replace some of its own, and a tokenizer's source. With
    ``resume`` it is an old run, and ``file`` names its directory, a checkpoint's directory in it, or the beginning of
    its id; None means the newest. With ``resume`` and other stages it is a run that goes on with that checkpoint.
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    file: Annotated[
        FilePath | None,
        Option(
            names=("RUN.toml",), of=_FOUND,
            help="The run's manifest. With --resume: its directory, or that of a checkpoint.",
        ),
    ] = None  # fmt: skip
    print_config: Annotated[
        bool, Option(of=_NEW, help="Print the manifest, every key with the source of its value. Nothing is founded.")
    ] = False
    resume: Annotated[
        bool, Option(of=_NEW, help="Continue a run from its newest checkpoint when all its peers are gone.")
    ] = False
    preset: Annotated[
        str | None, Option(metavar="NAME", of=_FOUND, help="Use a preset and no file: tiny, small or medium.")
    ] = None
    model: Annotated[
        str | None,
        Option(
            metavar="DIR|ID[@REV]",
            of=_FOUND,
            help="Train this model of transformers: its directory, or OWNER/NAME on the hub. Needs the extra hf.",
            default="our own transformer",
        ),
    ] = None
    from_scratch: Annotated[bool, Option(of=_FOUND, help="Begin with random weights, not with those of --model.")] = (
        False
    )
    context: Annotated[
        int | None,
        Option(
            metavar="N",
            of=_FOUND,
            manifest="model.context",
            help="Make rows of N tokens, at most those that the model has.",
        ),
    ] = None
    compute: Annotated[
        str | None,
        Option(metavar="DTYPE", of=_FOUND, manifest="model.compute", help="Compute in float32 or bfloat16."),
    ] = None
    lora_rank: Annotated[
        int | None,
        Option(
            metavar="N", of=_FOUND, manifest="model.lora.rank",
            help="Train adapters of this rank (LoRA), and not the model's own weights.",
        ),
    ] = None  # fmt: skip
    lora_alpha: Annotated[
        float | None,
        Option(metavar="X", of=_FOUND, manifest="model.lora.alpha", help="Weigh an adapter by this over the rank."),
    ] = None
    lora_targets: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME", of=_FOUND, manifest="model.lora.targets", default="all",
            help="Give adapters to linear modules of this name, as q_proj. Repeat it for more.",
        ),
    ] = ()  # fmt: skip
    lora_dropout: Annotated[
        float | None,
        Option(
            metavar="X", of=_FOUND, manifest="model.lora.dropout", default="0",
            help="Drop this fraction of an adapter's input in training.",
        ),
    ] = None  # fmt: skip
    lora_base: Annotated[
        str | None,
        Option(
            metavar="DTYPE", of=_FOUND, manifest="model.lora.base", default="bfloat16",
            help="Store the frozen weights of adapters in bfloat16, nf4 (4 bits) or float32.",
        ),
    ] = None  # fmt: skip
    packing: Annotated[
        str | None,
        Option(
            metavar="HOW",
            of=_FOUND,
            manifest="batch.packing",
            help="Fill rows from the stream of all documents, or with whole documents that do not see each other.",
            default="stream",
        ),
    ] = None
    profile: Annotated[
        str | None,
        Option(
            metavar="NAME", of=_FOUND, manifest="speed.profile", default="the file's, or none",
            help="Choose mode, codecs and batch for these links: lan, wan (machines far apart) or thin (under "
            "50 Mbit/s).",
        ),
    ] = None  # fmt: skip
    mode: Annotated[
        Literal["sync", "overlap", "local"] | None,
        Option(
            of=_FOUND, default="sync",
            help="sync closes each step before the next begins. overlap feeds the next meanwhile. local lets "
            "replicas train apart, and averages weights now and then (DiLoCo).",
        ),
    ] = None  # fmt: skip
    local_steps: Annotated[
        Annotated[int, between(1, 1000)] | None,
        Option(
            metavar="N", of=_FOUND, default="8 in mode local",
            help="Let each replica take N optimizer steps before all average weights and a step closes. More "
            "than 1 means mode local. --steps counts optimizer steps.",
        ),
    ] = None  # fmt: skip
    strategy: Annotated[
        str | None,
        Option(
            metavar="NAME", of=_FOUND, manifest="averaging.strategy", default="everyone",
            help="Choose who averages with whom: everyone, grid, butterfly-groups, server, hierarchy, random "
            "or push-sum.",
        ),
    ] = None  # fmt: skip
    batch: Annotated[
        int | None,
        Option(metavar="N", of=_FOUND, manifest="batch.microbatches_per_step", help="Make a step of N microbatches."),
    ] = None
    rows: Annotated[
        int | None,
        Option(metavar="N", of=_FOUND, manifest="batch.microbatch_size", help="Make a microbatch of N rows of text."),
    ] = None
    ends: Annotated[
        Literal["private", "hosted"] | None,
        Option(
            of=_FOUND, manifest="split.ends", default="private",
            help="private keeps token ids and labels at a trainer. hosted has stages hold the ends.",
        ),
    ] = None  # fmt: skip
    reproducible: Annotated[
        bool,
        Option(
            of=_FOUND,
            manifest="run.reproducible",
            help="Give the same weights, bit for bit, whichever peer computes what.",
        ),
    ] = False
    name: Annotated[
        str | None, Option(metavar="NAME", of=_FOUND, manifest="run.name", help="Name the run, for people.")
    ] = None
    steps: Annotated[
        int | None, Option(metavar="N", of=_FOUND, manifest="run.steps", help="End the run after N optimizer steps.")
    ] = None
    lr: Annotated[
        float | None,
        Option(
            metavar="X",
            of=_FOUND,
            manifest="optimizer.lr",
            help="Set the highest learning rate, which follows the warm-up.",
        ),
    ] = None
    stages: Annotated[
        int | None,
        Option(metavar="N", of=_FOUND, manifest="split.stages", help="Cut the model's blocks into this many stages."),
    ] = None
    layers_per_stage: Annotated[
        Annotated[str, matching(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", "whole numbers with commas, such as 1,3")]
        | None,
        Option(
            metavar="N,…", of=_FOUND, manifest="split.layers_per_stage",
            help="Cut the model's blocks into stages of these sizes.", default="as --peers says, or evenly",
        ),
    ] = None  # fmt: skip
    peers: Annotated[
        FilePath | None,
        Option(
            metavar="FILE", of=_NEW, help="Size stages for the peers in this file, as swarm plan --peers does.",
            default="none",
        ),
    ] = None  # fmt: skip
    hosts: Annotated[
        int | None,
        Option(
            metavar="N", of=_NEW, manifest="run.start_when.stage_hosts",
            help="Start when this many stage hosts have joined.", default="the file's; of a preset one for each stage",
        ),
    ] = None  # fmt: skip
    trainers: Annotated[
        int | None,
        Option(
            metavar="N",
            of=_FOUND,
            manifest="run.start_when.trainers",
            help="Start when this many trainers have joined.",
        ),
    ] = None
    admission: Annotated[
        Literal["open", "token", "organisation"] | None,
        Option(
            metavar="MODE", of=_NEW, manifest="admission.mode", default="open",
            help="Let anybody join (open), by invites for one peer each (token), or named peers alone "
            "(organisation). This peer issues.",
        ),
    ] = None  # fmt: skip
    own_routes: Annotated[
        bool,
        Option(
            of=_NEW,
            manifest="split.routes",
            help="Let microbatches pass only hosts of their trainer's own organisation, as invites name it. Takes "
            "--organisation, and --admission organisation or token.",
        ),
    ] = False
    strangers: Annotated[
        bool,
        Option(
            of=_NEW,
            manifest="averaging.guard",
            help="Check what peers compute: where three or more replicas hold a part, leave out sums far from the "
            "others and compute 1 mean of 50 again; have other hosts compute 1 hop of 20 again; let no microbatch "
            "weigh more than twice the usual, and no trainer feed that pulls against the others. It costs some CPU.",
        ),
    ] = False
    organisation: Annotated[
        str | None,
        Option(
            metavar="NAME", of=_NEW, manifest="admission.organisation", default="none",
            help="Say of which organisation this peer is, with --own-routes or --own.",
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        Option(
            metavar="N",
            of=_FOUND,
            manifest="run.seed",
            help="Draw the initial weights from this seed, except those of private ends.",
        ),
    ] = None
    tokenizer: Annotated[
        FilePath | None,
        Option(metavar="FILE", of=_FOUND, help="Use this tokenizer.json.", default="next to RUN.toml, or a new one"),
    ] = None
    text: Annotated[
        tuple[FilePath, ...],
        Option(
            metavar="FILE", of=_NEW, default="Python's own",
            help="Make the tokenizer from this text, and with --route-by text learn kinds of text. Repeat it for more."
        ),
    ] = ()  # fmt: skip
    variants: Annotated[
        Annotated[str, matching(r"[1-9][0-9]?(,[1-9][0-9]?)*", "whole numbers with commas, such as 1,4")] | None,
        Option(
            metavar="N,…", of=_NEW, manifest="split.variants", default="one",
            help="Give stages this many experts: a number each, or one number for all but the first.",
        ),
    ] = None  # fmt: skip
    route_by: Annotated[
        Literal["text", "domain"] | None,
        Option(
            of=_NEW, manifest="split.route_by", default="text with --variants",
            help="Let experts be of kinds of text, which are learnt from --text and --histogram, or of the domains "
            "that trainers join with.",
        ),
    ] = None  # fmt: skip
    domains: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME", of=_NEW, manifest="split.domains", default="none",
            help="Name a domain that trainers can join with, in the order of variants. Repeat it for more.",
        ),
    ] = ()  # fmt: skip
    own: Annotated[
        tuple[
            Annotated[str, matching(r"[a-z0-9-]+=[A-Za-z0-9._-]+", "a domain and an organisation, as legal=acme")], ...
        ],
        Option(
            metavar="DOMAIN=ORG", of=_NEW, manifest="split.own", default="none",
            help="Let an organisation keep the expert of a domain to itself: its peers alone hold and feed it, and "
            "nobody else gets its weights. Repeat it for more. Takes --admission organisation or token.",
        ),
    ] = ()  # fmt: skip
    histogram: Annotated[
        tuple[FilePath, ...],
        Option(
            metavar="FILE", of=_NEW, default="none",
            help="Learn kinds of text from this file of swarm data histogram, too. Repeat it for more.",
        ),
    ] = ()  # fmt: skip
    allow_bad: Annotated[bool, Option(of=_NEW, help="Take --text even if more than 1 % of it cannot be used.")] = False

    @property
    def cut_said(self) -> bool:
        """Return whether it says how the model is cut into stages."""
        return any(said is not None for said in (self.stages, self.layers_per_stage, self.peers))

    @property
    def changes(self) -> dict[str, Any]:
        """Values that replace those of the manifest, by dotted key."""
        made = {one.option.manifest: getattr(self, key) for key, one in settings_of(Foundation).items()}
        if self.layers_per_stage is not None:
            sizes = [int(size) for size in self.layers_per_stage.split(",")]
            made["split.layers_per_stage"] = sizes
            made["split.stages"] = len(sizes) if self.stages is None else self.stages
        made["split.own"] = dict(one.split("=") for one in self.own) or None
        made["split.variants"] = None  # which takes the number of stages: see peers.founding_files
        if self.own_routes:
            made["split.routes"] = "organisation"
        if self.strangers:
            made |= STRANGERS
        unsaid = (None, (), False)
        said = (made | self._apart).items()
        return {key: value for key, value in said if key and not any(value is one for one in unsaid)}

    @property
    def _apart(self) -> dict[str, Any]:
        """Return what ``mode`` and ``local_steps`` say together. Steps of a run that trains apart are averagings."""
        steps = self.local_steps or 1
        if self.mode == "local" or (self.mode is None and steps > 1):
            closes = None if self.steps is None else -(-self.steps // steps)
            return {"averaging.mode": "local", "averaging.local.steps": self.local_steps, "run.steps": closes}
        if self.mode is None and self.local_steps is None:
            return {}
        return {"averaging.mode": "sync", "speed.mode": self.mode, "averaging.local.steps": self.local_steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """Options of one start of a command that runs a peer."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    port: Annotated[
        Annotated[int, between(1, 65535)] | None,
        Option(metavar="N", help="Listen on this TCP port of all interfaces. It is short for --listen."),
    ] = None
    config: Annotated[FilePath | None, Option(metavar="FILE", help="Read the peer's settings from this TOML file.")] = (
        None
    )
    quiet: Annotated[bool, Option(names=("--quiet", "-q"), help="Print errors only.")] = False
    json: Annotated[bool, Option(help="Print each event as one line of JSON, and nothing else.")] = False

    @property
    def words(self) -> bool:
        """True when the command prints words for a person."""
        return not self.quiet and not self.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Installing:
    """Options of ``swarm service install`` beside those of the peer."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    unit: Annotated[str, Option(metavar="NAME", of=_JOIN, help="Name the service.")] = "swarm"
    dry_run: Annotated[bool, Option(of=_JOIN, help="Print the unit, and install nothing.")] = False
