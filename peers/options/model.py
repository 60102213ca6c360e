"""Define every option of ``swarm new`` and ``swarm join`` once: names, limits, default and help.

:class:`PeerOptions` describes a peer, and is read from the command, the environment or a TOML file.
:class:`Foundation` describes the run to found and :class:`Invocation` one start of a command; both are read from the
command alone. :mod:`peers.options.fields` says how a field is read, :mod:`peers.options.reading` reads them.

Over 400 lines: one table of all options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from peers.dashboard.place import PLACE_WORDS, listening_place
from peers.options.fields import (
    MODEL_CONFIG,
    FilePath,
    Option,
    Split,
    between,
    lengths,
    matching,
    settings_of,
    understood,
)
from peers.preemption.choice import ALLOWED, METADATA_URL, read_choice, read_url

DEVICE = r"auto|cpu|mps|cuda(:[0-9]{1,3})?"
DEVICE_WORDS = "auto, mps, cpu, cuda or cuda:N"
DEVICES_WORDS = f"{DEVICE_WORDS}, or several with commas"
MAX_DEVICES = 16
ANY_PORT = "/ip4/0.0.0.0/tcp/0"
GRACE_S = 60.0
"""Enough for the step under way of most models; a platform that kills sooner should be told less."""
_JOIN, _NEW = ("join",), ("new",)

Text = Annotated[str, lengths(1, 8192, "text")]
Address = Annotated[str, lengths(1, 1024, "a multiaddr")]
Addresses = Annotated[tuple[Address, ...], lengths(0, 1024, "multiaddrs", "of them")]
Name = Annotated[
    str, matching(r"[a-z0-9][a-z0-9-]{0,40}", "1 to 41 small letters, digits and dashes, the first no dash")
]
Region = Annotated[str, matching(r"[a-z0-9-]{0,32}", "up to 32 small letters, digits and dashes")]
Trackers = Annotated[
    str, matching(r"((tensorboard|wandb|mlflow)(,(?!$)|$))+", "tensorboard, wandb or mlflow, or several with commas")
]
Devices = Annotated[str, matching(rf"({DEVICE})(,({DEVICE})){{0,{MAX_DEVICES - 1}}}", DEVICES_WORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The settings of a peer, as a person gives them. Read them with :func:`peers.options.reading.read_peer_options`.

    Of a founder (``swarm new``) only what that command offers is used: see :meth:`of_founder`. ``home`` holds this
    machine's places, None means the default one; ``place`` is one of them, None the first that is free.
    ``dial_out_only`` is found out when it is false.
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    invite: Annotated[
        Annotated[tuple[Text, ...], lengths(0, 1024, "an invite, or multiaddrs", "of them")],
        Split(),
        Option(
            names=("INVITE",), of=_JOIN, secret=True,
            help="The invite from swarm new or swarm invite, or multiaddrs of peers; - reads it from standard input.",
        ),
    ] = field(default=(), repr=False)  # fmt: skip
    role: Annotated[
        Literal["auto", "stage", "trainer"],
        Option(
            of=_JOIN,
            help="stage: hold a slice of the model; trainer: feed text; auto: trainer with --data, else stage.",
        ),
    ] = "auto"
    data: Annotated[
        FilePath | None,
        Option(
            metavar="PATH", of=_JOIN, help="Text for a trainer (a file or directory), or a shard; it stays here.",
            default="the text that comes with Python",
        ),
    ] = None  # fmt: skip
    data_field: Annotated[
        Text | None,
        Option(
            metavar="NAME", of=_JOIN, help="Key or column of --data that has the text; a.b is b in a.",
            default="messages, conversations or text",
        ),
    ] = None  # fmt: skip
    data_template: Annotated[
        FilePath | None,
        Option(
            metavar="PATH", of=_JOIN, default="none",
            help="Chat template of the conversations in --data: a file in Jinja, or a model's directory.",
        ),
    ] = None  # fmt: skip
    model_files: Annotated[
        FilePath | None,
        Option(
            names=("--model-files", "--base"), metavar="DIR", of=_JOIN,
            help="The model's files, where this machine has them: what is in them is read, not downloaded.",
        ),
    ] = None  # fmt: skip
    from_hub: Annotated[
        bool,
        Option(
            of=_JOIN, help="Download the model's files from the hub that the run names. Nothing is asked otherwise."
        ),
    ] = False
    stage: Annotated[
        Annotated[int, between(0, 511)] | None,
        Option(metavar="N", of=_JOIN, help="Hold this stage.", default="the one with the fewest replicas"),
    ] = None
    name: Annotated[
        Name | None,
        Option(metavar="NAME", of=_JOIN, help="Name of this peer, for people.", default="two words made of its id"),
    ] = None
    place: Annotated[
        Text | None,
        Option(metavar="NAME", help="Place to use: a key and a directory of this machine.", default="a free one"),
    ] = None
    home: Annotated[
        FilePath | None,
        Option(
            metavar="DIR", help="Directory of this machine's places and runs.",
            default="$SWARM_HOME, else $XDG_DATA_HOME/swarm, else ~/.local/share/swarm",
        ),
    ] = None  # fmt: skip
    listen: Annotated[
        Annotated[tuple[Address, ...], lengths(1, 1024, "multiaddrs", "of them")],
        Split(),
        Option(metavar="ADDR", help="Listen on this multiaddr; repeat for more."),
    ] = (ANY_PORT,)
    announce: Annotated[
        Addresses,
        Split(),
        Option(metavar="ADDR", help="Tell others this multiaddr instead of the detected ones; repeat for more."),
    ] = ()
    relay: Annotated[
        Literal["auto", "off"], Option(help="auto: be reached through other peers when nobody can dial this one.")
    ] = "auto"
    region: Annotated[
        Region,
        Option(
            metavar="NAME", of=_JOIN,
            help="Region of this peer: with strategy hierarchy, a run averages within regions first.",
        ),
    ] = ""  # fmt: skip
    dial_out_only: Annotated[
        bool,
        Option(
            of=_JOIN, default="detected",
            help="With strategy server: let no other peer call this one for averaging.",
        ),
    ] = False  # fmt: skip
    device: Annotated[
        Devices,
        Option(
            metavar="DEVICE", of=_JOIN,
            help="Compute on this device (cuda is also AMD's); of several each gets a peer: cuda:0,cuda:1.",
        ),
    ] = "cpu"  # fmt: skip
    max_memory: Annotated[
        Annotated[float, between(0.1, 1e6)] | None,
        Option(
            metavar="GB", of=_JOIN, default="all that is free",
            help="Plan with so much memory of the device at most: for the part, and for what its microbatches keep.",
        ),
    ] = None  # fmt: skip
    threads: Annotated[
        int, between(1, 1024), Option(metavar="N", of=_JOIN, help="Compute with this many CPU threads.")
    ] = 1
    activation_checkpointing: Annotated[
        Literal["auto", "on", "off"],
        Option(
            of=_JOIN,
            help="on: keep only each layer's input for the backward and compute the rest again: 1.4 times the time, "
            "the same numbers; auto: where memory is short.",
        ),
    ] = "auto"
    deferred_weights: Annotated[
        Literal["on", "off"],
        Option(
            of=_JOIN,
            help="on: hand a gradient on before those of the weights are computed, which fill the time between: less "
            "waiting, the same numbers, some memory (mode sync).",
        ),
    ] = "on"
    checkpoints: Annotated[
        FilePath | None,
        Option(
            metavar="DIR", of=_JOIN, help="Keep the run here: manifest, tokenizer, checkpoints of the peer's part.",
            default="runs/ in the home",
        ),
    ] = None  # fmt: skip
    checkpoint_every: Annotated[
        Annotated[int, between(1)] | None,
        Option(metavar="N", of=_JOIN, help="Steps between checkpoints.", default="a tenth of the run"),
    ] = None
    max_in_flight: Annotated[
        Annotated[int, between(1, 100_000)] | None,
        Option(
            metavar="N", of=_JOIN, help="Microbatches that a trainer has in flight, at most.",
            default="chosen from measurements",
        ),
    ] = None  # fmt: skip
    grace: Annotated[
        float,
        between(0.0, 86_400.0),
        Option(metavar="S", help="Seconds that leaving in order may take after SIGTERM; 0: leave at once."),
    ] = GRACE_S
    preemption: Annotated[
        str,
        lengths(1, 4096, ALLOWED),
        understood(read_choice, ALLOWED),
        Option(
            metavar="WHAT",
            help="Watch for a notice that this machine is taken back, and leave in time: aws, gcp, azure, auto (the "
            "cloud that answers), file:PATH (it exists), command:CMD (exits with 0) or none.",
        ),
    ] = "none"
    preemption_url: Annotated[
        Annotated[str, understood(read_url, "a URL like http://127.0.0.1:8080")] | None,
        Option(metavar="URL", help="Ask a cloud's metadata service at this URL.", default=METADATA_URL),
    ] = None
    dashboard: Annotated[
        Annotated[str, understood(listening_place, PLACE_WORDS)] | None,
        Option(
            metavar="PORT", default="none",
            help="Serve a page about the run at this port of this machine; ADDRESS:PORT for others, with a token.",
        ),
    ] = None  # fmt: skip
    invite_file: Annotated[
        FilePath | None,
        Option(
            metavar="FILE",
            help="swarm new: write the invite to this file, or return to the run of the invite in it; swarm join: wait "
            "for an invite in it.",
        ),
    ] = None
    report_to: Annotated[
        Trackers | None,
        Option(
            metavar="TRACKER", help="Hand the run's figures on: tensorboard, wandb, mlflow, or several with commas."
        ),
    ] = None
    report_dir: Annotated[
        FilePath | None,
        Option(metavar="DIR", help="Directory of the files of --report-to.", default="reports/ in the session"),
    ] = None
    origins: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The source of each setting that is not its default, by key, in words: an option, a variable, or a file."""

    @property
    def part_taken(self) -> Literal["stage", "trainer"]:
        """The role, once ``auto`` is decided."""
        if self.role == "auto":
            return "stage" if self.data is None else "trainer"
        return self.role

    def of_founder(self) -> PeerOptions:
        """Return them with what ``swarm new`` does not offer left at its default."""
        offered = {key: getattr(self, key) for key, one in settings_of(PeerOptions).items() if "new" in one.option.of}
        return PeerOptions(**offered, origins=self.origins)


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
            names=("RUN.toml",), of=_NEW,
            help="The run's manifest; with --resume: its directory, or that of one of its checkpoints.",
        ),
    ] = None  # fmt: skip
    resume: Annotated[
        bool, Option(of=_NEW, help="Continue a run whose peers are all gone, from its newest checkpoint.")
    ] = False
    preset: Annotated[
        str | None, Option(metavar="NAME", of=_NEW, help="Use a preset instead of a file: tiny, small or medium.")
    ] = None
    model: Annotated[
        str | None,
        Option(
            metavar="DIR|ID[@REV]",
            of=_NEW,
            help="Train this model of transformers: its directory, or OWNER/NAME on the hub. Needs the extra hf.",
            default="our own transformer",
        ),
    ] = None
    from_scratch: Annotated[
        bool, Option(of=_NEW, help="With --model: begin with random weights, not with those of the files.")
    ] = False
    context: Annotated[
        int | None,
        Option(
            metavar="N", of=_NEW, manifest="model.context", help="Tokens in a row, at most those that the model has."
        ),
    ] = None
    compute: Annotated[
        str | None,
        Option(metavar="DTYPE", of=_NEW, manifest="model.compute", help="Compute in float32 or bfloat16."),
    ] = None
    lora_rank: Annotated[
        int | None,
        Option(
            metavar="N", of=_NEW, manifest="model.lora.rank",
            help="Train adapters of this rank (LoRA), and none of the model's own weights.",
        ),
    ] = None  # fmt: skip
    lora_alpha: Annotated[
        float | None,
        Option(metavar="X", of=_NEW, manifest="model.lora.alpha", help="An adapter's weight is this over the rank."),
    ] = None
    lora_targets: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME", of=_NEW, manifest="model.lora.targets", default="all",
            help="Give adapters to linear modules of this name, as q_proj; repeat for more.",
        ),
    ] = ()  # fmt: skip
    lora_base: Annotated[
        str | None,
        Option(
            metavar="DTYPE", of=_NEW, manifest="model.lora.base", default="bfloat16",
            help="Keep the weights beside adapters in bfloat16, nf4 (4 bits) or float32.",
        ),
    ] = None  # fmt: skip
    packing: Annotated[
        str | None,
        Option(
            metavar="HOW",
            of=_NEW,
            manifest="batch.packing",
            help="What a row is: a part of the stream of all documents, or whole documents that do not see each other.",
            default="stream",
        ),
    ] = None
    profile: Annotated[
        str | None,
        Option(
            metavar="NAME", of=_NEW, manifest="speed.profile", default="the file's, or none",
            help="Suit the run to its links: lan, wan (machines far apart) or thin (under 50 Mbit/s).",
        ),
    ] = None  # fmt: skip
    name: Annotated[
        str | None, Option(metavar="NAME", of=_NEW, manifest="run.name", help="Name of the run, for people.")
    ] = None
    steps: Annotated[
        int | None, Option(metavar="N", of=_NEW, manifest="run.steps", help="Optimizer steps until the run is over.")
    ] = None
    lr: Annotated[
        float | None,
        Option(metavar="X", of=_NEW, manifest="optimizer.lr", help="Highest learning rate, after the warm-up."),
    ] = None
    stages: Annotated[
        int | None,
        Option(metavar="N", of=_NEW, manifest="split.stages", help="Cut the model's blocks into this many stages."),
    ] = None
    layers_per_stage: Annotated[
        Annotated[str, matching(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", "whole numbers with commas, such as 1,3")]
        | None,
        Option(
            metavar="N,…", of=_NEW, manifest="split.layers_per_stage",
            help="Cut the model's blocks into stages of these sizes.", default="as --peers says, or evenly",
        ),
    ] = None  # fmt: skip
    peers: Annotated[
        FilePath | None,
        Option(
            metavar="FILE", of=_NEW, help="Size stages for the classes of peers in this file, as swarm plan --peers.",
            default="none",
        ),
    ] = None  # fmt: skip
    hosts: Annotated[
        int | None,
        Option(
            metavar="N", of=_NEW, manifest="run.start_when.stage_hosts",
            help="Start when this many stage hosts have joined.",
        ),
    ] = None  # fmt: skip
    trainers: Annotated[
        int | None,
        Option(
            metavar="N", of=_NEW, manifest="run.start_when.trainers", help="Start when this many trainers have joined."
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(metavar="N", of=_NEW, manifest="run.seed", help="Seed of the initial weights, but of private ends."),
    ] = None
    tokenizer: Annotated[
        FilePath | None,
        Option(metavar="FILE", of=_NEW, help="Use this tokenizer.json.", default="beside RUN.toml, or a new one"),
    ] = None
    text: Annotated[
        tuple[FilePath, ...],
        Option(
            metavar="FILE", of=_NEW, help="Make the tokenizer from this text; repeat for more.", default="Python's own"
        ),
    ] = ()  # fmt: skip

    @property
    def cut_said(self) -> bool:
        """Whether it says how the model is cut into stages."""
        return any(said is not None for said in (self.stages, self.layers_per_stage, self.peers))

    @property
    def changes(self) -> dict[str, Any]:
        """Values that replace those of the manifest, by dotted key."""
        made = {one.option.manifest: getattr(self, key) for key, one in settings_of(Foundation).items()}
        if self.layers_per_stage is not None:
            sizes = [int(size) for size in self.layers_per_stage.split(",")]
            made["split.layers_per_stage"] = sizes
            made["split.stages"] = len(sizes) if self.stages is None else self.stages
        return {key: value for key, value in made.items() if key and value not in (None, ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """Options of one start of a command that runs a peer."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    port: Annotated[
        Annotated[int, between(1, 65535)] | None,
        Option(metavar="N", help="Listen on this TCP port of all interfaces; short for --listen."),
    ] = None
    config: Annotated[
        FilePath | None, Option(metavar="FILE", help="Read settings of the peer from this TOML file, one per key.")
    ] = None
    quiet: Annotated[bool, Option(names=("--quiet", "-q"), help="Print errors only.")] = False
    json: Annotated[bool, Option(help="Print each event as one line of JSON, and nothing else.")] = False

    @property
    def words(self) -> bool:
        """True when the command prints words for a person."""
        return not self.quiet and not self.json
