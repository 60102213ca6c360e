"""Define every option of a peer once: names, limits, default and help.

:class:`PeerOptions` is read from the command, the environment or a TOML file; :mod:`peers.options.foundation` has what
the command alone may say. :mod:`peers.options.fields` says how a field is read, :mod:`peers.options.reading` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from peers.dashboard.place import PLACE_WORDS, listening_place
from peers.options.fields import (
    MODEL_CONFIG,
    Allowed,
    FilePath,
    Option,
    Split,
    between,
    lengths,
    matching,
    settings_of,
    understood,
)
from peers.preemption.notice_options import ALLOWED, METADATA_URL, read_choice, read_url
from peers.sharing.limit_options import PAUSE_WORDS, RATE_WORDS, read_pause, read_rate
from swarm.ids import NAME_WORDS, is_name

DEVICE = r"auto|cpu|mps|cuda(:[0-9]{1,3})?"
DEVICE_WORDS = "auto, mps, cpu, cuda or cuda:N"
DEVICES_WORDS = f"{DEVICE_WORDS}, or several with commas, or with + for one peer"
MAX_DEVICES = 16
ANY_PORT = "/ip4/0.0.0.0/tcp/0"
GRACE_S = 60.0
"""Enough for the step under way of most models; a platform that kills sooner should be told less."""
_JOIN = ("join",)

Text = Annotated[str, lengths(1, 8192, "text")]
InviteText = Annotated[str, lengths(0, 8192, "text")]
"""Who parses it says of an empty one what to look at, and where there is another."""
Address = Annotated[str, lengths(1, 1024, "a multiaddr")]
Addresses = Annotated[tuple[Address, ...], lengths(0, 1024, "multiaddrs", "of them")]
Name = Annotated[str, Allowed(NAME_WORDS, lambda text: "" if is_name(text) else NAME_WORDS)]
Region = Annotated[str, matching(r"[a-z0-9-]{0,32}", "up to 32 small letters, digits and dashes")]
Trackers = Annotated[
    str, matching(r"((tensorboard|wandb|mlflow)(,(?!$)|$))+", "tensorboard, wandb or mlflow, or several with commas")
]
Rate = Annotated[str, understood(read_rate, RATE_WORDS)]
Devices = Annotated[str, matching(rf"({DEVICE})([,+]({DEVICE})){{0,{MAX_DEVICES - 1}}}", DEVICES_WORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The settings of a peer, as a person gives them. Read them with :func:`peers.options.reading.read_peer_options`.

    Of a founder (``swarm new``) only what that command offers is used: see :meth:`of_founder`. ``home`` holds this
    machine's places, None means the default one; ``place`` is one of them, None the first that is free.
    ``dial_out_only`` is found out when it is false.
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    invite: Annotated[
        Annotated[tuple[InviteText, ...], lengths(0, 1024, "an invite, or multiaddrs", "of them")],
        Split(),
        Option(
            names=("INVITE",), of=_JOIN, secret=True,
            help="The invite of swarm new or swarm invite, or multiaddrs of peers. - reads it from standard input.",
        ),
    ] = field(default=(), repr=False)  # fmt: skip
    role: Annotated[
        Literal["auto", "stage", "trainer", "all"],
        Option(
            of=_JOIN,
            help="stage holds a slice of the model. trainer feeds text. all is a trainer with a host of every stage. "
            "auto is trainer with --data, else stage.",
        ),
    ] = "auto"
    data: Annotated[
        FilePath | None,
        Option(
            metavar="PATH", of=_JOIN, help="Train on this text: a file, a directory or a shard. It stays here.",
            default="the text that comes with Python",
        ),
    ] = None  # fmt: skip
    data_field: Annotated[
        Text | None,
        Option(
            metavar="NAME", of=_JOIN, help="Read the text from this key or column of --data. a.b is b in a.",
            default="messages, conversations or text",
        ),
    ] = None  # fmt: skip
    data_template: Annotated[
        FilePath | None,
        Option(
            metavar="PATH", of=_JOIN, default="none",
            help="Write the conversations of --data with this chat template: a file in Jinja, or a model's directory.",
        ),
    ] = None  # fmt: skip
    data_special_tokens: Annotated[
        bool,
        Option(of=_JOIN, help="Read special tokens in --data as tokens, not as text."),
    ] = False
    data_allow_bad: Annotated[
        bool,
        Option(of=_JOIN, help="Train on --data even if more than 1 % of it cannot be used."),
    ] = False
    eval: Annotated[
        FilePath | None,
        Option(
            metavar="PATH", of=_JOIN, default="none",
            help="Measure the loss of this text or shard while a trainer trains. Nothing is learnt from it.",
        ),
    ] = None  # fmt: skip
    eval_every: Annotated[
        Annotated[int, between(1)] | None,
        Option(metavar="N", of=_JOIN, help="Measure --eval every N steps.", default="a tenth of the run"),
    ] = None
    model_files: Annotated[
        FilePath | None,
        Option(
            names=("--model-files", "--base"), metavar="DIR", of=_JOIN,
            help="Read the model's files from this directory. They are not downloaded then.",
        ),
    ] = None  # fmt: skip
    from_hub: Annotated[
        bool,
        Option(
            of=_JOIN, help="Download the model's files from the hub that the run names. No hub is asked without it."
        ),
    ] = False
    stage: Annotated[
        Annotated[int, between(0, 511)] | None,
        Option(metavar="N", of=_JOIN, help="Hold this stage.", default="the one with the fewest replicas"),
    ] = None
    domain: Annotated[
        Text | None,
        Option(
            metavar="NAME", of=_JOIN,
            help="Train on text of this domain, or hold an expert for it, where the run has domains.",
            default="none",
        ),
    ] = None  # fmt: skip
    name: Annotated[
        Name | None,
        Option(
            metavar="NAME",
            of=_JOIN,
            help="Name this peer, for people.",
            default="whom its invite is for, or two words made of its id",
        ),
    ] = None
    place: Annotated[
        Text | None,
        Option(metavar="NAME", help="Use this place of the machine: a key and a directory.", default="a free one"),
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
        Option(metavar="ADDR", help="Listen on this multiaddr. Repeat it for more."),
    ] = (ANY_PORT,)
    announce: Annotated[
        Addresses,
        Split(),
        Option(metavar="ADDR", help="Tell others this multiaddr, not the detected ones. Repeat it for more."),
    ] = ()
    relay: Annotated[
        Literal["auto", "off"], Option(help="auto lets others relay to this peer when nobody can dial it.")
    ] = "auto"
    through: Annotated[
        Addresses,
        Split(),
        Option(
            metavar="ADDR", default="none",
            help="Be reached through the relay at this multiaddr, which swarm relay prints. Repeat it for more.",
        ),
    ] = ()  # fmt: skip
    region: Annotated[
        Region,
        Option(
            metavar="NAME", of=_JOIN,
            help="Name this peer's region. Strategy hierarchy averages within regions first.",
        ),
    ] = ""  # fmt: skip
    dial_out_only: Annotated[
        bool,
        Option(
            of=_JOIN, default="detected",
            help="Let no peer call this one for averaging, with strategy server.",
        ),
    ] = False  # fmt: skip
    device: Annotated[
        Devices,
        Option(
            metavar="DEVICE", of=_JOIN,
            help="Compute on this device; auto: a GPU that computes, else the CPU. Of several each gets a peer: "
            "cuda:0,cuda:1. With + one peer has them all, each with strips of every layer: cuda:0+cuda:1.",
        ),
    ] = "auto"  # fmt: skip
    max_memory: Annotated[
        Annotated[float, between(0.1, 1e6)] | None,
        Option(
            metavar="GB", of=_JOIN, default="all that is free",
            help="Plan with at most so much of the device's memory, for the part and its microbatches.",
        ),
    ] = None  # fmt: skip
    max_upload: Annotated[
        Rate | None,
        Option(
            metavar="RATE", default="none",
            help="Send at most so much a second, as 20mbit or 2MB. Such a peer relays for nobody. Several "
            "devices share it.",
        ),
    ] = None  # fmt: skip
    max_download: Annotated[
        Rate | None,
        Option(metavar="RATE", default="none", help="Receive at most so much a second, as --max-upload."),
    ] = None
    threads: Annotated[
        int, between(1, 1024), Option(metavar="N", of=_JOIN, help="Compute with this many CPU threads.")
    ] = 1
    state: Annotated[
        Literal["memory", "disk"],
        Option(
            of=_JOIN,
            help="Where a machine with --role all keeps the state of its stages. disk takes 16 bytes a parameter "
            "there, and memory for two stages.",
        ),
    ] = "memory"
    activation_checkpointing: Annotated[
        Literal["auto", "on", "off"],
        Option(
            of=_JOIN,
            help="on keeps each layer's input alone, and computes the rest again: 1.4 times the time, the same "
            "numbers. auto does so where memory is short.",
        ),
    ] = "auto"
    deferred_weights: Annotated[
        Literal["on", "off"],
        Option(
            of=_JOIN,
            help="on hands a gradient on first, and computes those of the weights while it waits. It gives the "
            "same numbers and takes some memory (mode sync).",
        ),
    ] = "on"
    checkpoints: Annotated[
        FilePath | None,
        Option(
            metavar="DIR", of=_JOIN,
            help="Keep the run in this directory: manifest, tokenizer and checkpoints of the peer's part.",
            default="runs/ in the home",
        ),
    ] = None  # fmt: skip
    checkpoint_every: Annotated[
        Annotated[int, between(1)] | None,
        Option(
            metavar="N",
            of=_JOIN,
            help="Write a checkpoint every N steps. All peers also write one each tenth of the run.",
            default="a tenth of the run",
        ),
    ] = None
    max_in_flight: Annotated[
        Annotated[int, between(1, 100_000)] | None,
        Option(
            metavar="N", of=_JOIN, help="Have at most N microbatches of a trainer in flight.",
            default="chosen from measurements",
        ),
    ] = None  # fmt: skip
    grace: Annotated[
        float,
        between(0.0, 86_400.0),
        Option(metavar="S", help="Take at most so many seconds to leave in order after SIGTERM. 0 leaves at once."),
    ] = GRACE_S
    preemption: Annotated[
        str,
        lengths(1, 4096, ALLOWED),
        understood(read_choice, ALLOWED),
        Option(
            metavar="WHAT",
            help="Watch for the notice that this machine is taken back, and leave in time: aws, gcp, azure, "
            "auto (the cloud that answers), file:PATH (it exists), command:CMD (exits with 0) or none.",
        ),
    ] = "none"
    preemption_url: Annotated[
        Annotated[str, understood(read_url, "a URL like http://127.0.0.1:8080")] | None,
        Option(metavar="URL", help="Ask a cloud's metadata service at this URL.", default=METADATA_URL),
    ] = None
    pause_when: Annotated[
        Annotated[
            tuple[Annotated[str, lengths(1, 4096, PAUSE_WORDS), understood(read_pause, PAUSE_WORDS)], ...],
            lengths(0, 16, PAUSE_WORDS, "of them"),
        ],
        Split(";"),
        Option(
            metavar="WHEN", of=_JOIN, default="none",
            help="Pause while this holds: battery, hours:22-07 (local time), or command:CMD (exits with 0). "
            "Repeat it for more.",
        ),
    ] = ()  # fmt: skip
    resume_after: Annotated[
        float,
        between(1.0, 86_400.0),
        Option(
            metavar="S",
            of=_JOIN,
            help="Come back when none has held for so many seconds. It is longer after short stays.",
        ),
    ] = 60.0
    retry: Annotated[
        bool,
        Option(help="Start again after a crash, or when nobody answers. Waits get longer."),
    ] = False
    dashboard: Annotated[
        Annotated[str, understood(listening_place, PLACE_WORDS)] | None,
        Option(
            metavar="PORT", default="none",
            help="Serve a page about the run at this port of this machine. ADDRESS:PORT serves others, with a token.",
        ),
    ] = None  # fmt: skip
    invite_file: Annotated[
        FilePath | None,
        Option(
            metavar="FILE",
            help="swarm new writes the invite to this file, or returns to the run of the invite in it. swarm "
            "join waits for an invite in it.",
        ),
    ] = None
    report_to: Annotated[
        Trackers | None,
        Option(
            metavar="TRACKER", help="Send the run's figures to tensorboard, wandb or mlflow, or several with commas."
        ),
    ] = None
    report_dir: Annotated[
        FilePath | None,
        Option(
            metavar="DIR", help="Write the files of --report-to to this directory.", default="reports/ in the session"
        ),
    ] = None
    origins: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The source of each setting that is not its default, by key, in words: an option, a variable, or a file."""

    @property
    def part_taken(self) -> Literal["stage", "trainer"]:
        """The role, once ``auto`` is decided; of a machine with every part that of its trainer."""
        if self.role == "auto":
            return "stage" if self.data is None else "trainer"
        return "trainer" if self.role == "all" else self.role

    def of_founder(self) -> PeerOptions:
        """Return them with what ``swarm new`` does not offer left at its default."""
        offered = {key: getattr(self, key) for key, one in settings_of(PeerOptions).items() if "new" in one.option.of}
        return PeerOptions(**offered, origins=self.origins)
