"""What a person says about a peer: flags > environment ``SWARM_*`` > TOML file > default."""

from __future__ import annotations

import difflib
import os
import shlex
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

from peers.commands.preflight import ANY_PORT, check_port
from peers.console.words import another_path, command_name
from peers.settings import PATTERNS, Address, Device, MetadataAddress, Name, Preemption, Region, check_preemption_url
from swarm.errors import ConfigError
from swarm.schema import in_words

PREFIX = "SWARM_"
FOR_TESTS = f"{PREFIX}TEST_"
"""Variables of this prefix are the test suite's."""
GRACE_S = 60.0
"""Enough for the step under way of most models; a platform that kills sooner should be told less."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=8192)]
_LISTS = ("invite", "listen", "announce")


class JoinSettings(BaseSettings):
    """What ``swarm new`` and ``swarm join`` can be told. Build it with :func:`load_join_settings`.

    ``home`` holds this machine's places, None means the default one; ``place`` is one of them, None the first that is
    free. ``invite`` is an invite or multiaddrs, ``invite_file`` where one is or will be.
    ``role`` auto means trainer where ``data`` is given, else stage host.
    ``grace`` are seconds. The rest is as in :class:`peers.settings.PeerSettings`.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    home: Path | None = None
    place: Text | None = None
    name: Name | None = None
    invite: Annotated[tuple[Text, ...], NoDecode] = ()
    invite_file: Path | None = None
    role: Literal["auto", "stage", "trainer"] = "auto"
    stage: Annotated[int, Field(ge=0, le=511)] | None = None
    data: Path | None = None
    listen: Annotated[tuple[Address, ...], NoDecode, Field(min_length=1)] = (ANY_PORT,)
    announce: Annotated[tuple[Address, ...], NoDecode] = ()
    relay: Literal["auto", "off"] = "auto"
    region: Region = ""
    dial_out_only: bool = False
    device: Device = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    checkpoints: Path | None = None
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    grace: Annotated[float, Field(ge=0, le=86_400)] = GRACE_S
    preemption: Preemption = "none"
    preemption_url: MetadataAddress | None = None

    @field_validator(*_LISTS, mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

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

    @property
    def part_taken(self) -> Literal["stage", "trainer"]:
        """The role, once ``auto`` is decided."""
        if self.role == "auto":
            return "stage" if self.data is None else "trainer"
        return self.role


def load_join_settings(flags: Mapping[str, Any], config: Path | None = None) -> JoinSettings:
    """Merge all sources. ``flags`` holds what was given on the command line, None meaning: not given.

    Raises ConfigError naming key, value, what is allowed, and which source gave it; also for a variable ``SWARM_…``
    that is no setting.
    """
    _check_environment()
    given = {key: value for key, value in flags.items() if value is not None}
    document = _read_toml(config) if config else {}

    class _WithFile(JoinSettings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *args: Any, **sources: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            inner = super().settings_customise_sources(settings_cls, *args, **sources)
            return *inner, InitSettingsSource(settings_cls, init_kwargs=document)

    try:
        settings = _WithFile(**given)
    except ValidationError as error:
        raise _explain(error, given, config) from None
    _check(settings)
    return settings


def listen_on(listen: list[str] | None, port: int | None) -> tuple[str, ...] | None:
    """``--listen`` and its short form ``--port``; None when neither is given. Raises ConfigError for both, and for a
    port that this process cannot open now."""
    if port is None:
        return tuple(listen) if listen else None
    if listen:
        raise ConfigError("--port", port, "one of --port and --listen", "Say the port in --listen, or leave that out.")
    check_port(port)
    return (f"{ANY_PORT.removesuffix('0')}{port}",)


def _check(settings: JoinSettings) -> None:
    join = f"{command_name()} join INVITE"
    if settings.stage is not None and settings.part_taken != "stage":
        remedy = f"As a stage host: {join} --stage {settings.stage}; as a trainer: {join} --role trainer"
        raise ConfigError("--stage", settings.stage, "only for role stage", remedy, why="a trainer holds no stage")
    if settings.data is not None and settings.part_taken != "trainer":
        data = shlex.quote(str(settings.data))
        remedy = f"As a stage host: {join} --role stage; as a trainer: {join} --role trainer --data {data}"
        raise ConfigError("--data", data, "only for role trainer", remedy, why="a stage host reads no data")
    check_preemption_url("--preemption-url", settings.preemption, settings.preemption_url)


def _check_environment() -> None:
    known = sorted(f"{PREFIX}{key.upper()}" for key in JoinSettings.model_fields)
    for variable, value in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or variable in known or variable.startswith(FOR_TESTS):
            continue
        close = difflib.get_close_matches(variable.removeprefix(PREFIX).lower(), list(JoinSettings.model_fields), n=1)
        meant = f"Did you mean {PREFIX}{close[0].upper()}? If not: " if close else ""
        raise ConfigError(variable, value, f"one of {', '.join(known)}", f"{meant}unset {variable}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = (error.strerror or "unreadable").lower()
        raise ConfigError("--config", str(path), "a readable TOML file", another_path(path), why=why) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--config", str(path), "valid TOML", f"Fix that line in {path}.", why=str(error)) from None


def _explain(error: ValidationError, flags: Mapping[str, Any], config: Path | None) -> ConfigError:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "extra_forbidden":
        known = list(JoinSettings.model_fields)
        close = difflib.get_close_matches(key, known, n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        return ConfigError(key, first["input"], f"one of {', '.join(known)}", f"{meant}Correct it in {config}.")
    variable, flag = f"{PREFIX}{key.upper()}", "--" + key.replace("_", "-")
    source = flag if key in flags else variable if variable in os.environ else str(config)
    allowed = in_words(first, PATTERNS)
    return ConfigError(source if source != str(config) else key, first["input"], allowed, f"Correct it in {source}.")
