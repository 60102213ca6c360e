"""What one peer needs to know about itself: flags > environment ``SWARM_*`` > TOML file > default.

Not the run manifest: that is agreed between peers (``swarm.config``), this is one machine's business.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from swarm.errors import ConfigError

PREFIX = "SWARM_"
DEVICE = r"^(cpu|cuda(:[0-9]{1,3})?)$"

Role = Literal["bootstrap", "stage", "trainer"]
Address = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class PeerSettings(BaseSettings):
    """The settings of one peer. Build them with :func:`load_settings`; ``PeerSettings(...)`` reads the environment too.

    ``home`` is the peer's own directory: ``identity.key``, ``events.jsonl``, ``peer.log``, sockets. ``stage`` is for
    stage hosts (None: wherever it is needed most), ``shard`` for trainers, ``manifest`` and ``tokenizer`` for the
    bootstrap, which serves them. ``bootstrap`` are multiaddrs ending in ``/p2p/<peer id>``.
    ``checkpoints`` is the directory to write checkpoints into, every ``checkpoint_every`` steps and at the last.
    ``max_in_flight`` bounds a trainer's journeys; None lets it choose from what it measures.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, nested_model_default_partial_update=False
    )

    home: Path
    role: Role
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "peer"
    stage: Annotated[int, Field(ge=0, le=511)] | None = None
    bootstrap: Annotated[tuple[Address, ...], NoDecode] = ()
    run: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    manifest: Path | None = None
    tokenizer: Path | None = None
    listen: Address = "/ip4/127.0.0.1/tcp/0"
    device: Annotated[str, StringConstraints(pattern=DEVICE)] = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    shard: Path | None = None
    checkpoints: Path | None = None
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    verbose: bool = False

    @field_validator("bootstrap", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return tuple(part for part in value.replace(",", " ").split() if part) if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and the environment only: a ``.env`` lying about is not ours to read, the TOML file is named."""
        return init_settings, env_settings


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> PeerSettings:
    """Merge all sources. ``flags`` holds what was given on the command line, None meaning: not given.

    Raises ConfigError naming key, value, what is allowed, and which source gave it.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    document = _read_toml(config) if config else {}

    class _WithFile(PeerSettings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *args: Any, **sources: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            inner = super().settings_customise_sources(settings_cls, *args, **sources)
            return *inner, InitSettingsSource(settings_cls, init_kwargs=document)

    try:
        merged = _WithFile(**given)
        settings = PeerSettings(**merged.model_dump())
    except ValidationError as error:
        raise _explain(error, given, config) from None
    check_settings(settings)
    return settings


def exact_settings(**given: Any) -> PeerSettings:
    """What is given and the defaults, nothing from the environment: for peers that a program starts for itself.

    Raises ConfigError naming key, value and what is allowed.
    """
    defaults = {key: field.default for key, field in PeerSettings.model_fields.items() if not field.is_required()}
    try:
        return PeerSettings(**(defaults | given))
    except ValidationError as error:
        raise _explain(error, defaults | given, None) from None


def check_settings(settings: PeerSettings) -> None:
    """What holds between settings. Raises ConfigError."""
    needed: dict[Role, tuple[str, ...]] = {
        "bootstrap": ("manifest", "tokenizer"),
        "stage": ("bootstrap",),
        "trainer": ("bootstrap", "shard"),
    }
    for key in needed[settings.role]:
        if not getattr(settings, key):
            raise ConfigError(
                key, None, f"a value when role is {settings.role}", f"Give --{key} or {PREFIX}{key.upper()}."
            )
    if settings.stage is not None and settings.role != "stage":
        raise ConfigError("stage", settings.stage, "only for role stage", f"Leave it out for a {settings.role}.")
    if settings.checkpoint_every is not None and settings.checkpoints is None:
        raise ConfigError(
            "checkpoint_every",
            settings.checkpoint_every,
            "only together with checkpoints",
            "Say with --checkpoints where to write them.",
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", str(path), "a readable TOML file", f"{error.strerror}; check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), "valid TOML", f"{error}; fix that line.") from None


def _explain(error: ValidationError, flags: Mapping[str, Any], config: Path | None) -> ConfigError:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else "settings"
    variable = f"{PREFIX}{key.upper()}"
    flag = "--" + key.replace("_", "-")
    if first["type"] == "missing":
        return ConfigError(key, None, "a value: it has no default", f"Give {flag} or {variable}.")
    if first["type"] == "extra_forbidden":
        return ConfigError(key, first["input"], "no such key", f"Remove it from {config}, or look for a misspelling.")
    source = flag if key in flags else variable if variable in os.environ else str(config)
    message = first["msg"][0].lower() + first["msg"][1:]
    return ConfigError(key, first["input"], message, f"It came from {source}: correct it there.")
