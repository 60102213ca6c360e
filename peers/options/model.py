"""Every option of ``swarm new`` and ``swarm join``, once: what it is called, may be, is by default, and does.

:class:`PeerOptions` are what a person says about a peer, in the command, the environment or a TOML file;
:class:`Foundation` what a run is founded with, and :class:`Invocation` what concerns one start of a command: both in
the command alone. :mod:`peers.options.fields` says how a field is read, :mod:`peers.options.reading` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

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

DEVICE = r"cpu|cuda(:[0-9]{1,3})?"
DEVICE_WORDS = "cpu, cuda or cuda:N"
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
Device = Annotated[str, matching(DEVICE, DEVICE_WORDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """What a person says about a peer. Read it with :func:`peers.options.reading.read_peer_options`.

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
            help="What swarm new or swarm invite printed, or multiaddrs of peers.",
        ),
    ] = field(default=(), repr=False)  # fmt: skip
    role: Annotated[
        Literal["auto", "stage", "trainer"],
        Option(
            of=_JOIN, help="stage: hold a slice of the model; trainer: feed text; auto: trainer if there is --data."
        ),
    ] = "auto"
    data: Annotated[
        FilePath | None,
        Option(
            metavar="PATH", of=_JOIN, help="A trainer's text (a file, a directory) or a shard; it stays here.",
            default="the text that comes with Python",
        ),
    ] = None  # fmt: skip
    stage: Annotated[
        Annotated[int, between(0, 511)] | None,
        Option(metavar="N", of=_JOIN, help="Stage to hold.", default="where it is needed most"),
    ] = None
    name: Annotated[
        Name | None,
        Option(metavar="NAME", of=_JOIN, help="What people call this peer.", default="two words made of its id"),
    ] = None
    place: Annotated[
        Text | None, Option(metavar="NAME", help="Which key and directory to use.", default="a free one")
    ] = None
    home: Annotated[
        FilePath | None,
        Option(
            metavar="DIR", help="Where this machine's peers live.",
            default="$SWARM_HOME, else $XDG_DATA_HOME/swarm, else ~/.local/share/swarm",
        ),
    ] = None  # fmt: skip
    listen: Annotated[
        Annotated[tuple[Address, ...], lengths(1, 1024, "multiaddrs", "of them")],
        Split(),
        Option(metavar="ADDR", help="Multiaddr to listen on; repeat for more."),
    ] = (ANY_PORT,)
    announce: Annotated[
        Addresses,
        Split(),
        Option(metavar="ADDR", help="Multiaddr to tell others instead of what is found out; repeat for more."),
    ] = ()
    relay: Annotated[
        Literal["auto", "off"], Option(help="auto: be reached through other peers where nothing else works.")
    ] = "auto"
    region: Annotated[
        Region,
        Option(
            metavar="NAME", of=_JOIN,
            help="Where this peer is: a run whose strategy is hierarchy averages within regions first.",
        ),
    ] = ""  # fmt: skip
    dial_out_only: Annotated[
        bool,
        Option(
            of=_JOIN, default="found out",
            help="Others shall not call this peer for averaging, where the run's strategy is server.",
        ),
    ] = False  # fmt: skip
    device: Annotated[Device, Option(metavar="DEVICE", of=_JOIN, help="What it computes on.")] = "cpu"
    threads: Annotated[int, between(1, 1024), Option(metavar="N", of=_JOIN, help="CPU threads.")] = 1
    checkpoints: Annotated[
        FilePath | None,
        Option(
            metavar="DIR", of=_JOIN, help="Keep the run here: manifest, tokenizer, checkpoints of its part.",
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
            metavar="N", of=_JOIN, help="Most microbatches a trainer has on their way.",
            default="chosen from what it measures",
        ),
    ] = None  # fmt: skip
    grace: Annotated[
        float,
        between(0.0, 86_400.0),
        Option(metavar="S", help="Seconds to leave in order after SIGTERM; 0: leave at once."),
    ] = GRACE_S
    preemption: Annotated[
        str,
        lengths(1, 4096, ALLOWED),
        understood(read_choice, ALLOWED),
        Option(
            metavar="WHAT",
            help="What gives notice that this machine is taken back, for the peer to leave in time: aws, gcp, azure, "
            "auto (whichever answers), file:PATH, command:CMD (exit code 0 is the notice) or none.",
        ),
    ] = "none"
    preemption_url: Annotated[
        Annotated[str, understood(read_url, "a URL like http://127.0.0.1:8080")] | None,
        Option(metavar="URL", help="Where a cloud's metadata is.", default=METADATA_URL),
    ] = None
    invite_file: Annotated[
        FilePath | None,
        Option(
            metavar="FILE",
            help="Of swarm new: write the invite here, and where one is already, come back to its run. Of swarm join: "
            "wait for the invite in it.",
        ),
    ] = None
    origins: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Who gave the settings that are no defaults, by key and in words: an option, a variable, or a file."""

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
    """What a run is founded with: a preset's name or a file, what replaces values in it, and where the tokenizer comes
    from. With ``resume`` the run is an old one, and ``file`` its directory or a checkpoint's in it, the beginning of
    its id, or None: the newest.
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    file: Annotated[
        FilePath | None,
        Option(
            names=("RUN.toml",), of=_NEW,
            help="The run's manifest; with --resume its directory, or a checkpoint's in it.",
        ),
    ] = None  # fmt: skip
    resume: Annotated[
        bool, Option(of=_NEW, help="Go on with a run whose peers are all gone, from its newest checkpoint.")
    ] = False
    preset: Annotated[str | None, Option(metavar="NAME", of=_NEW, help="Instead of a file: tiny, small or medium.")] = (
        None
    )
    name: Annotated[
        str | None, Option(metavar="NAME", of=_NEW, manifest="run.name", help="What people call the run.")
    ] = None
    steps: Annotated[
        int | None, Option(metavar="N", of=_NEW, manifest="run.steps", help="Optimizer steps; then the run is over.")
    ] = None
    stages: Annotated[
        int | None, Option(metavar="N", of=_NEW, manifest="split.stages", help="Pieces the blocks are cut into.")
    ] = None
    hosts: Annotated[
        int | None,
        Option(
            metavar="N", of=_NEW, manifest="run.start_when.stage_hosts",
            help="Start when so many stage hosts are here.",
        ),
    ] = None  # fmt: skip
    trainers: Annotated[
        int | None, Option(metavar="N", of=_NEW, manifest="run.start_when.trainers", help="… and so many trainers.")
    ] = None
    seed: Annotated[
        int | None,
        Option(metavar="N", of=_NEW, manifest="run.seed", help="Seed of the initial weights, but of private ends."),
    ] = None
    tokenizer: Annotated[
        FilePath | None,
        Option(metavar="FILE", of=_NEW, help="A tokenizer.json.", default="beside RUN.toml, or a new one"),
    ] = None
    text: Annotated[
        tuple[FilePath, ...],
        Option(
            metavar="FILE", of=_NEW, help="Text to make a tokenizer from; repeat for more.", default="Python's own"
        ),
    ] = ()  # fmt: skip

    @property
    def changes(self) -> dict[str, Any]:
        """What replaces values in the manifest, by its dotted keys."""
        made = {one.option.manifest: getattr(self, key) for key, one in settings_of(Foundation).items()}
        return {key: value for key, value in made.items() if key and value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What concerns one start of a command that runs a peer."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = MODEL_CONFIG

    port: Annotated[
        Annotated[int, between(1, 65535)] | None,
        Option(metavar="N", help="Listen on this TCP port of all interfaces: short for --listen."),
    ] = None
    config: Annotated[
        FilePath | None, Option(metavar="FILE", help="TOML file with settings of the peer, one to a key.")
    ] = None
    quiet: Annotated[bool, Option(names=("--quiet", "-q"), help="Print errors only.")] = False
    json: Annotated[bool, Option(help="Print every event as a line of JSON, nothing else.")] = False

    @property
    def words(self) -> bool:
        """It tells what happens."""
        return not self.quiet and not self.json
