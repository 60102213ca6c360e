"""What one peer needs to know about itself, as plain data: nothing here is read from the environment or a file.

Not the run manifest: that is agreed between peers (``swarm.config``), this is one machine's business. What a person
says on the command line, in the environment or in a file becomes this in :mod:`peers.join_settings`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from peers.preemption.choice import read_choice, read_url
from swarm.errors import ConfigError
from swarm.membership.settings import MemberSettings
from swarm.schema import in_words

DEVICE = r"^(cpu|cuda(:[0-9]{1,3})?)$"
NAME = r"^[a-z0-9][a-z0-9-]{0,40}$"
REGION = r"^[a-z0-9-]{0,32}$"
PATTERNS = {
    REGION: "up to 32 small letters, digits and dashes",
    DEVICE: "cpu, cuda or cuda:N",
    NAME: "1 to 41 small letters, digits and dashes, the first no dash",
}
"""What they mean, in words."""
PATIENCE_S = 120.0


def _understood(read: Callable[[str], object]) -> Callable[[str], str]:
    """A validator: the text itself, when ``read`` can make something of it."""

    def check(text: str) -> str:
        try:
            read(text)
        except ValueError as error:
            raise PydanticCustomError("preemption", "{allowed}", {"allowed": str(error)}) from None
        return text

    return check


Role = Literal["bootstrap", "stage", "trainer"]
Address = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Name = Annotated[str, StringConstraints(pattern=NAME)]
Region = Annotated[str, StringConstraints(pattern=REGION)]
"""Where a peer is: those of one region average among themselves first, where the run averages by regions."""
Device = Annotated[str, StringConstraints(pattern=DEVICE)]
Preemption = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_understood(read_choice))]
"""What gives notice that this machine is taken back: see :func:`peers.preemption.choice.read_choice`."""
MetadataAddress = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_understood(read_url))]
"""Where the clouds' metadata is asked for: see :func:`peers.preemption.choice.read_url`."""


class PeerSettings(BaseModel):
    """The settings of one peer, for :func:`peers.node.run_peer`. Build them with :func:`exact_settings`.

    ``home`` is the directory of this one life: ``events.jsonl``, ``history.jsonl``, ``peer.log``, sockets.
    ``identity`` is the key file; without it ``identity.key`` in ``home``. ``stage`` is for stage hosts (None: wherever
    it is needed most). ``bootstrap`` are multiaddrs ending in ``/p2p/<peer id>``. ``manifest`` and ``tokenizer`` are
    for the bootstrap, which serves them, for at most ``patience_s`` seconds of waiting for the peers that the run
    needs (None: for ever). ``data`` is a trainer's: a built shard or plain text, None for the built-in text.
    ``listen`` are multiaddrs, ``announce`` those that others shall be told instead of what was found out.
    ``region`` is where this peer is, "" for nowhere in particular; with ``dial_out_only`` others shall not have to call
    it for averaging, where the run leaves them the choice.
    ``run_directory`` is where this machine keeps the run: manifest, tokenizer, and the checkpoints that its peers
    write every ``checkpoint_every`` steps (None: a tenth of the run) and when they end; ``{run}`` in it stands for the
    run's name and id. ``checkpoints_kept`` older ones stay (None: all). With ``resume``, a bootstrap founds the run
    with the checkpoint of that step there.
    ``max_in_flight`` bounds a trainer's journeys; None lets it choose from what it measures. ``grace_s`` bounds how
    long it may take to leave in order after SIGTERM; 0 leaves at once. ``preemption`` is what gives notice that this
    machine is taken back; ``preemption_url`` where a cloud is asked, None: where clouds answer. ``control`` is the
    socket on which it answers ``swarm status``; None: it does not. ``invite_file`` is where a bootstrap writes the
    invite. On stdout ``verbose`` tells what happens,
    ``json_lines`` writes every event.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    home: Path
    identity: Path = Path("identity.key")
    role: Role
    name: Name = "peer"
    stage: Annotated[int, Field(ge=0, le=511)] | None = None
    bootstrap: tuple[Address, ...] = ()
    run: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    manifest: Path | None = None
    tokenizer: Path | None = None
    listen: Annotated[tuple[Address, ...], Field(min_length=1)] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[Address, ...] = ()
    relay: Literal["auto", "off"] = "auto"
    region: Region = ""
    dial_out_only: bool = False
    device: Device = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    data: Path | None = None
    run_directory: Path | None = None
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    checkpoints_kept: Annotated[int, Field(ge=1)] | None = None
    resume: Annotated[int, Field(ge=0)] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    patience_s: Annotated[float, Field(gt=0)] | None = PATIENCE_S
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    preemption: Preemption = "none"
    preemption_url: MetadataAddress | None = None
    control: Path | None = None
    invite_file: Path | None = None
    verbose: bool = False
    json_lines: bool = False

    @model_validator(mode="before")
    @classmethod
    def _identity_at_home(cls, given: Any) -> Any:
        if isinstance(given, dict) and "identity" not in given and "home" in given:
            return given | {"identity": Path(given["home"]) / "identity.key"}
        return given


def exact_settings(**given: Any) -> PeerSettings:
    """What is given, and the defaults for the rest. Raises ConfigError naming key, value and what is allowed."""
    try:
        settings = PeerSettings(**given)
    except ValidationError as error:
        raise explain(error) from None
    check_settings(settings)
    return settings


def member_settings(settings: PeerSettings) -> MemberSettings:
    """Return what the membership of a run needs of a peer's settings."""
    return MemberSettings(
        role=settings.role,
        name=settings.name,
        stage=settings.stage,
        region=settings.region,
        dial_out_only=settings.dial_out_only,
        max_in_flight=settings.max_in_flight,
        patience_s=settings.patience_s,
        history=settings.home / "history.jsonl",
        votes=settings.identity.with_name("vote"),
    )


def check_settings(settings: PeerSettings) -> None:
    """What holds between settings. Raises ConfigError."""
    needed: dict[Role, tuple[str, ...]] = {
        "bootstrap": ("manifest", "tokenizer"),
        "stage": ("bootstrap",),
        "trainer": ("bootstrap",),
    }
    for key in needed[settings.role]:
        if not getattr(settings, key):
            raise ConfigError(key, None, f"a value when role is {settings.role}", "Give one.")
    if settings.stage is not None and settings.role != "stage":
        raise ConfigError("stage", settings.stage, "only for role stage", f"Leave it out for a {settings.role}.")
    if settings.data is not None and settings.role != "trainer":
        raise ConfigError("data", str(settings.data), "only for role trainer", f"Leave it out for a {settings.role}.")
    if settings.resume is not None and (settings.role != "bootstrap" or settings.run_directory is None):
        allowed = "only for role bootstrap, together with run_directory"
        raise ConfigError("resume", settings.resume, allowed, "Say where the checkpoint is.")
    check_preemption_url("preemption_url", settings.preemption, settings.preemption_url)
    if settings.checkpoint_every is not None and settings.run_directory is None:
        raise ConfigError(
            "checkpoint_every",
            settings.checkpoint_every,
            "only together with run_directory",
            "Say where to write them.",
        )


def check_preemption_url(key: str, preemption: str, url: str | None) -> None:
    """Refuse a URL that nothing would be asked at: whoever gives it believes that a cloud is watched. Raises
    ConfigError."""
    if url is not None and not read_choice(preemption).clouds:
        remedy = f"preemption is {preemption}: say which cloud it is, or leave the URL out."
        raise ConfigError(key, url, "only with preemption aws, gcp, azure or auto", remedy)


def explain(error: ValidationError, remedy: str = "Correct it.") -> ConfigError:
    """A failed validation of settings as the ConfigError of its first mistake."""
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "missing":
        return ConfigError(key, None, "a value: it has no default", "Give one.")
    message = "no such key" if first["type"] == "extra_forbidden" else in_words(first, PATTERNS)
    return ConfigError(key, first["input"], message, remedy)
