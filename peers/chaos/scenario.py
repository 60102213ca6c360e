"""Scenario file: a swarm, how long it runs, what goes wrong, and what must be true afterwards.

    name = "bootstrap-dies"
    proves = "A run goes on without the peer that founded it."
    seed = 1

    [swarm]                          # 3 stages of 2 replicas and two trainers, where nothing else is said
    stages = 2
    [until]
    steps = 20                       # or minutes = 1.5, after the first step
    [[fault]]
    do = "kill"
    peers = ["bootstrap"]            # names, patterns (host-1-*), or region:NAME
    on = { event = "StepClosed", where = { step = 5 } }
    [expect]
    at_least = { throughput_retained = 0.8 }

All keys are in ``docs/engineer/faults.md``. Decoded strictly: a key that is not known is an error that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from peers.chaos.figures import FIGURES
from peers.chaos.invariants.check import CHECKERS
from peers.chaos.liars.orders import KINDS as LIES
from peers.chaos.liars.orders import LIE
from peers.chaos.strangers.findings import Attack
from swarm.disk import read_named
from swarm.errors import ConfigError
from swarm.events import Event
from swarm.parsing import parse_toml
from swarm.schema import RegionField, Section, in_words, keys_at

_NAME = r"^[a-z0-9][a-z0-9-]{0,40}$"
_LABEL = r"^[^:]*$"
_PATTERNS = {
    _NAME: "1 to 41 small letters, digits and dashes, the first no dash",
    _LABEL: "a label without a colon: those of drawn strikes and of returns have one",
    LIE: f"KIND:RATE, with a kind of {', '.join(LIES)}, and a rate up to 1",
}

_OF_EVERY_FAULT = frozenset({"do", "label", "on", "at_s"})
_SHAPE = ("latency_ms", "jitter_ms", "mbit_per_s", "loss")
_BACK = ("back_s", "keep_disk")

Name = Annotated[str, StringConstraints(pattern=_NAME)]
Label = Annotated[str, StringConstraints(pattern=_LABEL, max_length=100)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=400)]
Small = Annotated[int, Field(ge=1, le=64)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
Some = Annotated[float, Field(gt=0, le=86_400)]
Share = Annotated[float, Field(ge=0, lt=1)]
Value = bool | int | float | str
Kind = Annotated[str, StringConstraints(min_length=1, max_length=30)]


class Later(Section):
    """``[[swarm.later]]``: a peer that is there for ``do = "start"``. ``stage`` None: where it is needed most."""

    name: Name
    role: Literal["stage", "trainer"] = "stage"
    stage: Annotated[int, Field(ge=0)] | None = None
    region: RegionField = ""


class Limit(Section):
    """``[[swarm.limit]]``: what peers whose names fit a pattern may use; the last that fits decides."""

    peer: Text
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    disk_mib: Annotated[int, Field(ge=1)] | None = None


class SwarmSection(Section):
    """``[swarm]``. ``manifest`` replaces values of the run's manifest, or of the ``preset``'s; ``regions`` are dealt
    out to the replicas of each stage, and to the trainers, in turn; ``links`` as in ``swarm/sim/links.py``."""

    stages: Small = 3
    replicas: Small = 2
    trainers: Small = 2
    regions: tuple[RegionField, ...] = ()
    nat: tuple[Text, ...] = ()
    preset: Text | None = None
    manifest: dict[str, dict[str, Any]] = Field(default_factory=dict)
    links: dict[str, Any] = Field(default_factory=dict)
    limit: tuple[Limit, ...] = ()
    later: tuple[Later, ...] = ()
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None


class Until(Section):
    """``[until]``: whichever comes first; ``steps`` of the run, ``minutes`` after its first step."""

    steps: Annotated[int, Field(ge=3, lt=10**6)] | None = None
    minutes: Annotated[float, Field(gt=0, le=24 * 60)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.steps is None and self.minutes is None:
            raise ValueError("steps, minutes, or both")
        return self


class When(Section):
    """``on``: the ``nth`` such event, from the strike ``after`` on; of ``peer``, "" for anybody."""

    event: Text
    peer: str = ""
    nth: Annotated[int, Field(ge=1)] = 1
    where: dict[str, Value] = Field(default_factory=dict)
    after: str = ""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.event not in Event.kinds():
            raise ValueError(f"event: the name of an event, as docs/reference/events.md lists them, not {self.event!r}")
        fields = [field.name for field in dataclasses.fields(Event.kinds()[self.event])]
        for name in self.where:
            if name not in fields:
                raise ValueError(f"where: fields of {self.event}, which are {', '.join(fields)}, not {name!r}")
        return self


@dataclass(frozen=True, slots=True)
class FaultKeys:
    """Keys that must be there, and that may."""

    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()


KINDS: Mapping[str, FaultKeys] = {
    "kill": FaultKeys(("peers",), _BACK),
    "kill_daemon": FaultKeys(("peers",)),
    "pause": FaultKeys(("peers",), ("seconds",)),
    "resume": FaultKeys(("peers",)),
    "stop": FaultKeys(("peers",), ("grace_s", *_BACK)),
    "partition": FaultKeys(("peers", "others"), ("one_way", "seconds")),
    "heal": FaultKeys(),
    "slow_links": FaultKeys(("peers", "others"), ("seconds", *_SHAPE)),
    "disconnect": FaultKeys(("peers",), ("network", "seconds")),
    "reconnect": FaultKeys(("peers",), ("network",)),
    "corrupt_bytes": FaultKeys(("peers", "others"), ("messages",)),
    "slow_device": FaultKeys(("peers", "factor")),
    "limit_cpu": FaultKeys(("peers", "cpus")),
    "limit_memory": FaultKeys(("peers", "mib"), _BACK),
    "fill_disk": FaultKeys(("peers",)),
    "free_disk": FaultKeys(("peers",)),
    "skew_clock": FaultKeys(("peers", "offset_s")),
    "restart": FaultKeys(("peers",), ("keep_disk",)),
    "upgrade": FaultKeys(("peers",), ("grace_s",)),
    "lie": FaultKeys(("peers", "lie")),
    "start": FaultKeys(("peers",)),
    "moment": FaultKeys(),
    "twin": FaultKeys(("peers",)),
    "joiner_storm": FaultKeys(("count",)),
    "strangers": FaultKeys(("peers", "attacks", "seconds"), ("count", "knows")),
}


def problem_of(do: str, given: Collection[str]) -> str:
    """Return the problem with the given keys, "" when there is none."""
    takes = KINDS.get(do)
    if takes is None:
        return f"do: {', '.join(KINDS)}, not {do!r}"
    missing = [key for key in takes.needs if key not in given]
    if missing:
        return f"{', '.join(missing)} for do = {do!r}"
    if do == "slow_links" and not set(_SHAPE) & set(given):
        return f"one of {', '.join(_SHAPE)} for do = {do!r}"
    surplus = sorted(set(given) - _OF_EVERY_FAULT - set(takes.needs) - set(takes.may))
    if surplus:
        allowed = ", ".join((*takes.needs, *takes.may)) or "no keys"
        return f"{allowed} for do = {do!r}, not {', '.join(surplus)}"
    return ""


class FaultEntry(Section):
    """``[[fault]]``: what (``do``), to whom, and when: ``on`` an event, or ``at_s`` after the first closed step. With
    ``back_s`` who was struck is started again so much later, without its disk unless ``keep_disk``."""

    do: Kind
    label: Label = ""
    on: When | None = None
    at_s: Seconds | None = None
    peers: tuple[Text, ...] = ()
    others: tuple[Text, ...] = ()
    seconds: Some | None = None
    one_way: bool = False
    network: str = ""
    cpus: Annotated[float, Field(ge=0)] | None = None
    mib: Annotated[int, Field(ge=1)] | None = None
    factor: Annotated[float, Field(ge=1)] | None = None
    offset_s: float | None = None
    count: Small | None = None
    attacks: tuple[Attack, ...] = ()
    knows: Literal["address", "run"] = "address"
    lie: Annotated[str, StringConstraints(pattern=LIE)] = ""
    messages: Annotated[int, Field(ge=1)] = 1
    grace_s: Seconds = 30.0
    latency_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    jitter_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    mbit_per_s: Annotated[float, Field(gt=0)] | None = None
    loss: Share = 0.0
    back_s: Seconds | None = None
    keep_disk: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.on is None) == (self.at_s is None):
            raise ValueError("one of on and at_s")
        if problem := problem_of(self.do, self.model_fields_set):
            raise ValueError(problem)
        for key in ("peers", "others", "attacks"):
            if key in self.model_fields_set and not getattr(self, key):
                raise ValueError(f"{key}: at least one")
        return self


class FaultSchedule(Section):
    """``[schedule]``: strikes drawn by the seed, one in each of equal spans of ``3600 / per_hour`` seconds. ``kinds``
    have weights; who is struck is drawn ``among`` those alive and ready, but for the last ready replica of a stage, the
    last trainer, and who is struck already. Killed or stopped peers are back after ``back_s`` (from, to) seconds,
    without their disk in ``new_disk`` of the cases; paused ones go on after ``pause_s``. With ``stretch_s`` nothing
    strikes for ``quiet_s`` after each stretch of that length: what was struck is compared with the quiet around it."""

    per_hour: Annotated[float, Field(gt=0, le=3600)]
    kinds: Annotated[
        dict[Literal["kill", "stop", "pause", "kill_daemon"], Annotated[float, Field(gt=0)]], Field(min_length=1)
    ]
    among: tuple[Text, ...] = ("host-*",)
    back_s: tuple[Seconds, Seconds] = (5.0, 15.0)
    pause_s: tuple[Some, Some] = (2.0, 8.0)
    new_disk: Annotated[float, Field(ge=0, le=1)] = 0.5
    grace_s: Seconds = 30.0
    stretch_s: Some | None = None
    quiet_s: Seconds = 0.0

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.stretch_s is None) != (self.quiet_s == 0.0):
            raise ValueError("stretch_s and quiet_s, or neither")
        return self


class TraceSection(Section):
    """``[trace]``: machines taken back, many at once. Of a ``file`` (lines "seconds, how many, back after seconds"), or
    the spot market's seeded shape with a share of ``churn`` of the machines a minute; ``speed`` times as fast."""

    file: Text | None = None
    churn_per_minute: Annotated[float, Field(gt=0, le=1)] | None = None
    speed: Annotated[float, Field(gt=0)] = 1.0
    among: tuple[Text, ...] = ("host-*",)
    grace_s: Seconds = 30.0

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.file is None) == (self.churn_per_minute is None):
            raise ValueError("one of file and churn_per_minute")
        return self


class Expect(Section):
    """``[expect]``: bars on figures, how often events must have happened, and which invariants must have had something
    to look at beside the usual ones. ``gap_s`` is the bar of I13."""

    at_least: dict[str, float] = Field(default_factory=dict)
    at_most: dict[str, float] = Field(default_factory=dict)
    happened: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    looked_at: tuple[str, ...] = ()
    gap_s: Some = 60.0

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in (*self.at_least, *self.at_most):
            if name not in FIGURES:
                raise ValueError(f"figures: {', '.join(sorted(FIGURES))}, not {name!r}")
        for name in self.happened:
            if name not in Event.kinds():
                raise ValueError(
                    f"happened: the name of an event, as docs/reference/events.md lists them, not {name!r}"
                )
        for name in self.looked_at:
            if name not in CHECKERS:
                raise ValueError(f"looked_at: {', '.join(CHECKERS)}, not {name!r}")
        return self


class Compare(Section):
    """``[compare]``: the same swarm over the same links once more, ``manifest`` in place of what differs; how many
    tokens a second both committed is told, and must be ``at_least`` so many times those of the other."""

    name: Name
    manifest: dict[str, dict[str, Any]]
    at_least: Annotated[float, Field(gt=0)] | None = None


class Scenario(Section):
    """A whole file. ``baseline_steps`` are closed, after the first, before a schedule or trace begins; ``needs`` says
    that only containers have the means."""

    name: Name
    proves: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    needs: Literal["containers"] | None = None
    baseline_steps: Annotated[int, Field(ge=2, le=1000)] = 5
    swarm: SwarmSection = SwarmSection()
    until: Until
    fault: tuple[FaultEntry, ...] = ()
    schedule: FaultSchedule | None = None
    trace: TraceSection | None = None
    compare: Compare | None = None
    expect: Expect = Expect()

    @model_validator(mode="after")
    def _in_time(self) -> Self:
        minutes = self.until.minutes
        for number, entry in enumerate(self.fault, 1):
            if minutes is not None and entry.at_s is not None and entry.at_s > 60 * minutes:
                called = entry.label or f"{entry.do}-{number}"
                raise ValueError(f"at_s of {called} to be before the end, {60 * minutes:g} s, and not {entry.at_s:g}")
        if self.compare is not None and (self.fault or self.schedule or self.trace):
            raise ValueError("compare: a scenario in which nothing goes wrong: strikes would fall on different work")
        return self

    def compared(self) -> Scenario | None:
        """Return the other play of ``[compare]``; None without."""
        if self.compare is None:
            return None
        manifest = dict(self.swarm.manifest)
        for name, table in self.compare.manifest.items():
            manifest[name] = {**manifest.get(name, {}), **table}
        swarm = self.swarm.model_copy(update={"manifest": manifest})
        return self.model_copy(update={"name": self.compare.name, "swarm": swarm, "compare": None})


def parse_scenario(document: Mapping[str, Any], origin: str) -> Scenario:
    """Validate decoded TOML. Raises ConfigError naming the key, its value, what is allowed and the remedy."""
    try:
        return Scenario.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        allowed = in_words(first, _PATTERNS)
        if first["type"] == "extra_forbidden":
            allowed = _keys_beside(first["loc"])
        raise ConfigError(
            key or "scenario", first["input"] if key else origin, allowed, f"Correct it in {origin}."
        ) from None
    except TypeError as error:  # dates and times are TOML and no JSON
        raise ConfigError("scenario", origin, "numbers, texts, lists and tables", f"{error}; correct that.") from None


def _keys_beside(where: Sequence[int | str]) -> str:
    """Return the keys that may replace an unknown one."""
    known = sorted(keys_at(Scenario, where[:-1]))
    close = difflib.get_close_matches(str(where[-1]), known, n=1)
    return f"{close[0]}, or another of {', '.join(known)}" if close else f"one of {', '.join(known)}"


def load_scenario(path: Path) -> Scenario:
    """Read a scenario. Raises ConfigError also for a missing or malformed file."""
    try:
        document = parse_toml(read_named(path))
    except OSError as error:
        raise ConfigError(
            "SCENARIO.toml", str(path), "a readable file", "swarm chaos --list shows those here.",
            why=(error.strerror or "unreadable").lower(),
        ) from error  # fmt: skip
    except ValueError as error:
        raise ConfigError("SCENARIO.toml", str(path), "valid TOML", "Correct that line.", why=str(error)) from error
    return parse_scenario(document, str(path))
