"""Read what a person says, from the command, the environment and a TOML file: option > variable > file > default.

Whatever cannot be used is a ConfigError that names who gave it: the option, the variable, or the file, its key and its
line. Errors that are found out later, by a look at this machine or in the run, are brought to that by :func:`blamed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from peers.commands.preflight import check_port
from peers.console.words import another_path, command_name
from peers.dashboard.place import TOKEN_VARIABLE
from peers.options.fields import PREFIX, REFUSED, Setting, settings_of
from peers.options.foundation import Foundation, Invocation
from peers.options.local import LocalOptions
from peers.options.model import ANY_PORT, PeerOptions
from peers.options.relay import RelayOptions
from peers.preemption.notice_options import read_choice
from swarm.disk import read_named
from swarm.errors import ConfigError
from swarm.parsing import parse_toml

FOR_TESTS = f"{PREFIX}TEST_"
"""Variables of this prefix are the test suite's."""

_OF_A_SERVICE = re.compile(
    rf"{PREFIX}(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every container next to a service called ``swarm``."""

ModelT = TypeVar("ModelT", PeerOptions, Foundation, Invocation, LocalOptions, RelayOptions)


class Hidden:
    """Stands for a value that no message shows."""

    def __repr__(self) -> str:
        return "(not shown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value as somebody gave it, who that is in words, and how to correct it."""

    value: Any
    origin: str
    remedy: str


def read_peer_options(command: str, typed: Mapping[str, Any], invocation: Invocation | None = None) -> PeerOptions:
    """Return what all sources together say about a peer.

    Args:
        command: The command that was typed: ``join`` or ``new``.
        typed: What was given there, by key; None, or nothing, where it was not.
        invocation: Where a port and a file may be named.

    Raises:
        ConfigError: A value cannot be used or is not known, with who gave it; also for a variable ``SWARM_…`` that is
            no setting, and for a port that this process cannot open now.
    """
    invocation = invocation or Invocation()
    environment = _of_environment()
    given = _of_file(invocation.config) | environment | _of_command(PeerOptions, command, typed)
    if invocation.port is not None:
        given["listen"] = _port(invocation.port, given.get("listen"))
    origins = {key: one.origin for key, one in given.items()}
    options = dataclasses.replace(_validated(PeerOptions, given), origins=origins)
    with blaming(options):
        check_options(options, options.part_taken)
    return options


def read_foundation(typed: Mapping[str, Any], command: str = "new") -> Foundation:
    """Return what a run is to be founded with. Raises ConfigError."""
    return _validated(Foundation, _of_command(Foundation, command, typed))


def read_local_options(typed: Mapping[str, Any]) -> LocalOptions:
    """Return the settings of a run on this machine alone. Raises ConfigError."""
    return _validated(LocalOptions, _of_command(LocalOptions, "quickstart", typed))


def read_relay_options(typed: Mapping[str, Any]) -> RelayOptions:
    """Return the settings of a relay. Raises ConfigError."""
    return _validated(RelayOptions, _of_command(RelayOptions, "relay", typed))


def read_invocation(command: str, typed: Mapping[str, Any]) -> Invocation:
    """Return what concerns this start of a command. Raises ConfigError."""
    return _validated(Invocation, _of_command(Invocation, command, typed))


def check_options(options: PeerOptions, role: Literal["bootstrap", "stage", "trainer"]) -> None:
    """Check the relations between the options of a peer of this role. Raises ConfigError naming the option."""
    join = f"{command_name()} join INVITE"
    if options.stage is not None and role != "stage":
        remedy = f"As a stage host: {join} --stage {options.stage}; as a trainer: {join} --role trainer"
        raise ConfigError("--stage", options.stage, "only for role stage", remedy, why=f"a {role} holds no stage")
    if options.data is not None and role != "trainer":
        data = shlex.quote(str(options.data))
        remedy = f"As a stage host: {join} --role stage; as a trainer: {join} --role trainer --data {data}"
        title = "stage host" if role == "stage" else role
        raise ConfigError("--data", data, "only for role trainer", remedy, why=f"a {title} reads no data")
    if options.eval is not None and role != "trainer":
        remedy = f"As a trainer: {join} --role trainer --eval {shlex.quote(str(options.eval))}"
        raise ConfigError("--eval", str(options.eval), "only for role trainer", remedy)
    if options.state == "disk" and (options.role != "all" or role == "bootstrap"):
        remedy = f"To hold a whole run on this machine: {join} --role all --state disk"
        raise ConfigError("--state", options.state, "disk only with role all", remedy)
    if options.preemption_url is not None and not read_choice(options.preemption).clouds:
        # A user who gives it believes that a cloud is watched.
        remedy = f"preemption is {options.preemption}: say which cloud it is, or leave the URL out."
        allowed = "only with preemption aws, gcp, azure or auto"
        raise ConfigError("--preemption-url", options.preemption_url, allowed, remedy)


# --- who is to blame -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def blaming(options: PeerOptions) -> Iterator[None]:
    """Have a ConfigError about an option name who gave that one."""
    try:
        yield
    except ConfigError as error:
        raise blamed(error, options) from None


def blamed(error: ConfigError, options: PeerOptions) -> ConfigError:
    """Return the error with who gave the setting in place of the option that it is about; any other as it is."""
    for key, origin in options.origins.items():
        setting = settings_of(PeerOptions)[key]
        if error.key in (*setting.names, key) and type(error) is ConfigError:
            value = error.value if error.value is None else _shown(error.value, setting)
            return ConfigError(origin, value, error.allowed, error.remedy, why=error.why)
    return error


# --- sources ---------------------------------------------------------------------------------------------------------


def _of_command(model: type, command: str, typed: Mapping[str, Any]) -> dict[str, Given]:
    found = {}
    for key, setting in settings_of(model).items():
        value = typed.get(key)
        if command not in setting.option.of or value is None or (setting.many and not value):
            continue
        name = setting.names[0]
        default = setting.said_default
        without = f", or leave it out: by default it is {default}" if default else ""
        remedy = f"Correct {name}{without}. All options: {command_name()} {command} --help"
        found[key] = Given(value=value, origin=name, remedy=remedy)
    return found


def _of_environment() -> dict[str, Given]:
    """Return the settings in variables. An empty variable is unset: supervisors pass unset variables on like that."""
    settings = {one.variable: one for one in settings_of(PeerOptions).values()}
    known, found = {*settings, TOKEN_VARIABLE}, {}
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}
    given = {name: value for name, value in given.items() if not name.startswith(FOR_TESTS)}
    if unknown := [name for name in given if name not in known and not _OF_A_SERVICE.fullmatch(name)]:
        bare = [name.removeprefix(PREFIX) for name in settings]  # with it any two would be alike
        close = difflib.get_close_matches(unknown[0].removeprefix(PREFIX), bare, n=1)
        meant = f"Did you mean {PREFIX}{close[0]}? If not: " if close else ""
        allowed, why = f"one of {', '.join(sorted(settings))}", "there is no such setting"
        raise ConfigError(unknown[0], Hidden(), allowed, f"{meant}unset {' '.join(unknown)}", why=why)
    for variable, value in given.items():
        if variable in settings and value:
            remedy = f"Correct {variable}, or do without: unset {variable}"
            found[settings[variable].key] = Given(value=value, origin=variable, remedy=remedy)
    return found


def _of_file(path: Path | None) -> dict[str, Given]:
    if path is None:
        return {}
    try:
        text = read_named(path)
        document = parse_toml(text)
    except OSError as error:
        why = (error.strerror or "unreadable").lower()
        raise ConfigError("--config", str(path), "a readable TOML file", another_path(path), why=why) from None
    except ValueError as error:
        raise ConfigError("--config", str(path), "valid TOML", f"Fix that line in {path}.", why=str(error)) from None
    found = {}
    for key, value in document.items():
        line = re.search(rf"^[ \t\[]*[\"']?{re.escape(key)}\b", text, re.MULTILINE)
        at = f":{text.count(chr(10), 0, line.start()) + 1}" if line else ""
        origin = f"{path}{at}: {key}"
        if key not in settings_of(PeerOptions):
            known = list(settings_of(PeerOptions))
            close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
            meant = f"Did you mean {close[0]}? " if close else ""
            remedy = f"{meant}Correct it there, or remove it."
            raise ConfigError(origin, Hidden(), f"one of {', '.join(known)}", remedy, why="there is no such setting")
        found[key] = Given(value=value, origin=origin, remedy="Correct it there, or remove it.")
    return found


def _port(port: int, listen: Given | None) -> Given:
    if listen is not None and listen.origin == "--listen":
        raise ConfigError("--port", port, "one of --port and --listen", "Say the port in --listen, or leave that out.")
    check_port(port)
    return Given(value=(f"{ANY_PORT.removesuffix('0')}{port}",), origin="--port", remedy="Choose another --port.")


# --- values ----------------------------------------------------------------------------------------------------------


def _validated(model: type[ModelT], given: Mapping[str, Given]) -> ModelT:
    try:
        return TypeAdapter(model).validate_python({key: one.value for key, one in given.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        who, setting = given[key], settings_of(model)[key]
        value = first["input"] if len(first["loc"]) > 1 else who.value
        raise ConfigError(who.origin, _shown(value, setting), expected(first, setting), who.remedy) from None


def _shown(value: Any, setting: Setting) -> Any:
    secret = setting.option.secret and value not in ("", "-")
    return Hidden() if secret else str(value) if isinstance(value, Path) else value


def expected(error: Mapping[str, Any], setting: Setting) -> str:
    """Return what was expected of a setting, for people: of one of ``ValidationError.errors()``."""
    return str(error["msg"]) if error["type"] == REFUSED else setting.allowed
