"""The file of ``swarm plan --peers``: classes of peers, by what they can do or by the name of their device."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, StringConstraints, ValidationError

from peers.console.words import another_path
from swarm.columns import MAX_VARIANTS
from swarm.config import Manifest
from swarm.disk import read_named
from swarm.errors import ConfigError
from swarm.models.spec import SplitConfig
from swarm.parsing import parse_toml
from swarm.planning.devices import DEVICES, KnownDevice
from swarm.planning.workload import PeerClass
from swarm.schema import Section, in_words, keys_at

MBIT, GIB, HOUR = 125_000.0, float(2**30), 3600.0
MAX_CLASSES = 16
EXAMPLE = 'peers = [{ name = "home", count = 8, device = "rtx4090", host_memory_gib = 64, up_mbit = 100 }]'
"""One line, which can be pasted as it is."""


ATTAINED = {"bfloat16": 0.4, "float32": 0.6}
"""Of a device's peak, in forward and backward of a block; ``swarm doctor`` measures what it is."""

Positive = Annotated[float, Field(gt=0, lt=1e21)]


class PeersEntry(Section):
    """One class of peers as a file has it. ``device`` or ``flops`` is needed, and ``memory_gib`` beside ``flops``."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,40}$")]
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    device: str | None = None
    flops: Positive | None = None
    peak_flops: Positive | None = None
    together_flops: Positive | None = None
    memory_gib: Positive | None = None
    host_memory_gib: Positive | None = None
    down_mbit: Positive = 100.0
    up_mbit: Positive = 100.0
    round_trip_ms: Annotated[float, Field(ge=0, le=60_000)] = 50.0
    stay_hours: Positive | None = None


Kinds = Annotated[tuple[Positive, ...], Field(max_length=MAX_VARIANTS)]


class PeersFile(Section):
    """The whole file. ``kinds`` say how much text there is of each domain, or kind of text, in proportion."""

    kinds: Kinds = ()
    peers: Annotated[tuple[PeersEntry, ...], Field(min_length=1, max_length=MAX_CLASSES)]


class PlanPeers(NamedTuple):
    """The peers that a run is planned for, what tells of them, and how much text there is of each of ``kinds``, in
    proportion; none: of each as much."""

    origin: str
    classes: Sequence[PeerClass]
    kinds: Sequence[float] = ()


def read_peers(path: Path, manifest: Manifest) -> PlanPeers:
    """Return the peers of a file, for the model and the variants of a run. Raises as :func:`read_file`, and ConfigError
    for a device that is not known, and for other kinds of text than the run's."""
    file = read_file(path)
    check_each_kind(file.kinds, manifest.split, path)
    return PlanPeers(str(path), [class_of(one, manifest.model.compute, path) for one in file.peers], file.kinds)


def check_each_kind(kinds: Sequence[float], split: SplitConfig, path: Path) -> None:
    """Raise ConfigError for text of other kinds than a run's microbatches are of."""
    if not kinds or (split.variants and len(kinds) == split.choices):
        return
    of = "domain" if split.domains else "kind of text"
    allowed = f"{split.choices} numbers, one for each {of}" if split.variants else "none: no stage has variants"
    raise ConfigError("kinds", list(kinds), allowed, f"Correct it in {path}, or leave it out: then each has as much.")


def read_file(path: Path) -> PeersFile:
    """Return what a file says of classes of peers.

    Raises ConfigError naming --peers, or the key of the file, for what is missing, unknown or malformed.
    """
    try:
        document = parse_toml(read_named(path))
    except OSError as error:
        cause = (error.strerror or "unreadable").lower()
        remedy = f"{another_path(path)} A file has, for instance: {EXAMPLE}"
        raise ConfigError("--peers", str(path), "a readable TOML file", remedy, why=cause) from None
    except ValueError as error:
        raise ConfigError("--peers", str(path), "valid TOML", f"Fix that line in {path}.", why=str(error)) from None
    try:
        found = PeersFile.model_validate(with_classes(document))
    except ValidationError as error:
        raise explained(error, PeersFile, path) from None
    check_names(found.peers, path)
    return found


def with_classes(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's document with its lists as validation takes them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in document.items()}


def check_names(entries: Sequence[PeersEntry], path: Path) -> None:
    """Raise ConfigError for two classes of one name."""
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError("peers.name", twice, "a name of its own for each class", f"Correct it in {path}.")


def class_of(entry: PeersEntry, compute: str, path: Path) -> PeerClass:
    """Return what an entry of a file says, for a model that is computed in this dtype. Raises ConfigError naming the
    key for what it lacks."""
    known = _known(entry, path)
    if entry.flops is None and known is None:
        remedy = f"Add one to {entry.name} in {path}; swarm doctor says how fast a machine is."
        raise ConfigError("peers.flops", None, "flops, operations a second, or the name of a device", remedy)
    memory = entry.memory_gib if entry.memory_gib is not None else known.memory_gib if known else None
    if memory is None:
        remedy = f"Add it to {entry.name} in {path}."
        raise ConfigError("peers.memory_gib", None, "GiB of memory, with flops", remedy)
    if known is not None and entry.host_memory_gib is None:
        remedy = f"Add it to {entry.name} in {path}."
        why = "weights and the optimizer's state lie in the host's memory"
        raise ConfigError("peers.host_memory_gib", None, "GiB of the host's memory, with device", remedy, why=why)
    peak = entry.peak_flops or (getattr(known, compute) if known else None)
    return PeerClass(
        name=entry.name,
        count=entry.count,
        flops=entry.flops or ATTAINED[compute] * (peak or 0.0),
        memory=memory * GIB,
        host_memory=None if entry.host_memory_gib is None else entry.host_memory_gib * GIB,
        down=entry.down_mbit * MBIT,
        up=entry.up_mbit * MBIT,
        round_trip_s=entry.round_trip_ms / 1e3,
        stay_s=None if entry.stay_hours is None else entry.stay_hours * HOUR,
        peak_flops=peak,
        together_flops=entry.together_flops,
    )


def _known(entry: PeersEntry, path: Path) -> KnownDevice | None:
    if entry.device is None:
        return None
    if (known := DEVICES.get(entry.device.lower())) is not None:
        return known
    close = difflib.get_close_matches(entry.device.lower(), DEVICES, n=1)
    meant = f"Did you mean {close[0]}? If not, give" if close else "Give"
    raise ConfigError(
        "peers.device",
        entry.device,
        f"one of {', '.join(DEVICES)}",
        f"{meant} flops and memory_gib in its place in {path}; swarm doctor says how fast a machine is.",
    )


def explained(error: ValidationError, file: type[Section], path: Path) -> ConfigError:
    """Return what is wrong in a file with ``[[peers]]``, as an error that names the key."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    key = ".".join(part for part in place if not part.isdigit())
    which = next((f" (number {int(part) + 1})" for part in place if part.isdigit()), "")
    if first["type"] == "extra_forbidden":
        known = keys_at(file, first["loc"][:-1])
        close = difflib.get_close_matches(place[-1], known, n=1)
        meant = f"Did you mean {close[0]}? If not, remove" if close else "Remove"
        shown = first["input"] if isinstance(first["input"], str | int | float) else "[…]"
        return ConfigError(key, shown, f"one of {', '.join(known)}", f"{meant} it from {path}{which}.")
    if first["type"] == "missing":
        return ConfigError(key, None, "a value: it has no default", f"Add it to {path}{which}: {EXAMPLE}")
    shown = first["input"] if isinstance(first["input"], str | int | float) else "[…]"
    return ConfigError(key, shown, in_words(first, {}), f"Correct it in {path}{which}.")
