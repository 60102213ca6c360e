"""What one peer needs to know about itself, as plain data: nothing here is read from the environment or a file.

Not the run manifest: that is agreed between peers (``swarm.config``), this is one machine's business. What a person
says on the command line, in the environment or in a file becomes this in :mod:`peers.join_settings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from swarm.errors import ConfigError

DEVICE = r"^(cpu|cuda(:[0-9]{1,3})?)$"
NAME = r"^[a-z0-9][a-z0-9-]{0,40}$"
PATIENCE_S = 120.0

Role = Literal["bootstrap", "stage", "trainer"]
Address = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Name = Annotated[str, StringConstraints(pattern=NAME)]
Device = Annotated[str, StringConstraints(pattern=DEVICE)]


class PeerSettings(BaseModel):
    """The settings of one peer, for :func:`peers.node.run_peer`. Build them with :func:`exact_settings`.

    ``home`` is the directory of this one life: ``events.jsonl``, ``history.jsonl``, ``peer.log``, sockets.
    ``identity`` is the key file; without it ``identity.key`` in ``home``. ``stage`` is for stage hosts (None: wherever
    it is needed most). ``bootstrap`` are multiaddrs ending in ``/p2p/<peer id>``. ``manifest`` and ``tokenizer`` are
    for the bootstrap, which serves them, for at most ``patience_s`` seconds of waiting for the peers that the run
    needs (None: for ever). ``data`` is a trainer's: a built shard or plain text, None for the built-in text.
    ``listen`` are multiaddrs, ``announce`` those that others shall be told instead of what was found out.
    ``run_directory`` is where this machine keeps the run: manifest, tokenizer, and the checkpoints that its peers
    write every ``checkpoint_every`` steps (None: a tenth of the run) and when they end; ``{run}`` in it stands for the
    run's name and id. ``checkpoints_kept`` older ones stay (None: all).
    ``max_in_flight`` bounds a trainer's journeys; None lets it choose from what it measures. ``grace_s`` bounds how
    long it may take to leave in order after SIGTERM; 0 leaves at once. ``control`` is the socket on which it answers
    ``swarm status``; None: it does not. On stdout ``verbose`` tells what happens, ``json_lines`` writes
    every event.
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
    device: Device = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    data: Path | None = None
    run_directory: Path | None = None
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    checkpoints_kept: Annotated[int, Field(ge=1)] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    patience_s: Annotated[float, Field(gt=0)] | None = PATIENCE_S
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    control: Path | None = None
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
        raise ConfigError("data", str(settings.data), "only for role trainer", f"A {settings.role} reads no data.")
    if settings.checkpoint_every is not None and settings.run_directory is None:
        raise ConfigError(
            "checkpoint_every",
            settings.checkpoint_every,
            "only together with run_directory",
            "Say where to write them.",
        )


def explain(error: ValidationError, remedy: str = "Correct it.") -> ConfigError:
    """A failed validation of settings as the ConfigError of its first mistake."""
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "missing":
        return ConfigError(key, None, "a value: it has no default", "Give one.")
    message = "no such key" if first["type"] == "extra_forbidden" else first["msg"][0].lower() + first["msg"][1:]
    return ConfigError(key, first["input"], message, remedy)
