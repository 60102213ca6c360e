"""Strikes on named peers, made of the ``[[fault]]`` tables of a scenario. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from peers.chaos import faults
from peers.chaos.cast import FOUNDER, JOINER, TWIN, SwarmSpec
from peers.chaos.faults import Fault
from peers.chaos.plan import On, Strike
from peers.chaos.scenario import FaultEntry, Scenario, When
from swarm.errors import ConfigError
from swarm.sim.links import LinkShape

_LATECOMER = re.compile(rf"{JOINER}\d+|.+{TWIN}")
NEVER = On("PeerStopped", where={"reason": lambda _: False})
"""For strikes whose moment is a time."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A strike. ``at_s`` (after the first closed step) for those that wait for no event. Those it hits are started
    again ``back_s`` later, where that is said."""

    strike: Strike
    at_s: float | None = None
    back_s: float | None = None
    keep_disk: bool = True


def planned(scenario: Scenario, cast: SwarmSpec) -> tuple[Planned, ...]:
    """All of a scenario's tables, in order. Raises ConfigError for peers that are not there, and for labels that are
    not unique or not known."""
    found: list[Planned] = []
    for number, entry in enumerate(scenario.fault, 1):
        key = f"fault.{number - 1}"
        made = [_drawn_by(fault, scenario.seed + number) for fault in _faults(entry, cast, key)]
        label = entry.label or f"{entry.do}-{number}"
        for index, fault in enumerate(made, 1):
            _check_founder(entry, fault, key)
            on = NEVER if entry.on is None else _on(entry.on, cast, key)
            strike = Strike(label if index == 1 else f"{label}-{index}", on, fault)
            found.append(Planned(strike, entry.at_s, entry.back_s, entry.keep_disk))
    _check_labels([one.strike for one in found])
    return tuple(found)


def _check_founder(entry: FaultEntry, fault: Fault, key: str) -> None:
    returns = entry.back_s is not None or isinstance(fault, faults.Restart)
    if returns and not entry.keep_disk and FOUNDER in fault.victims:
        allowed = f"true for {FOUNDER}: without its disk it would found another run"
        raise ConfigError(f"{key}.keep_disk", False, allowed, f"Leave {FOUNDER} out, or let it keep its disk.")


def _check_labels(strikes: list[Strike]) -> None:
    labels = [strike.label for strike in strikes]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError("fault.label", label, "a label that no other fault has", "Choose another.")
    for strike in strikes:
        if strike.on.after and strike.on.after not in labels:
            raise ConfigError("fault.on.after", strike.on.after, f"a label: {', '.join(labels)}", "Correct it.")


def _on(when: When, cast: SwarmSpec, key: str) -> On:
    if when.peer and when.peer not in cast.names and not _LATECOMER.fullmatch(when.peer):
        known = ", ".join(cast.names)
        raise ConfigError(
            f"{key}.on.peer", when.peer, f"one of {known}", "Correct the name, or leave it out to match any peer."
        )
    return On(when.event, when.peer, when.nth, dict(when.where), when.after)


def _faults(entry: FaultEntry, cast: SwarmSpec, key: str) -> Iterator[Fault]:
    """One for all peers where the fault takes many, else one for each, or each pair."""
    peers = cast.chosen(entry.peers, f"{key}.peers")
    others = cast.chosen(entry.others, f"{key}.others")
    if overlap := set(peers) & set(others):
        raise ConfigError(f"{key}.others", sorted(overlap), "peers that are not among peers already", "Leave them out.")
    if (make := _OF_MANY.get(entry.do)) is not None:
        yield make(entry, peers, others)
    elif (make_one := _OF_PAIRS.get(entry.do)) is not None:
        yield from (make_one(entry, pair) for pair in itertools.product(peers, others))
    else:
        yield from (_OF_ONE[entry.do](entry, name) for name in peers)


def _drawn_by(fault: Fault, seed: int) -> Fault:
    """The same, with a seed where there is something to draw."""
    return replace(fault, seed=seed) if isinstance(fault, faults.Strangers) else fault


def shape_of(entry: FaultEntry) -> LinkShape:
    """Return the shape that links get."""
    return LinkShape(
        latency_s=entry.latency_ms / 1e3,
        jitter_s=entry.jitter_ms / 1e3,
        bytes_per_s=math.inf if entry.mbit_per_s is None else entry.mbit_per_s * 1e6 / 8,
        loss=entry.loss,
    )


Names = tuple[str, ...]

_OF_MANY: Mapping[str, Callable[[FaultEntry, Names, Names], Fault]] = {
    "kill": lambda entry, peers, others: faults.Kill(peers),
    "pause": lambda entry, peers, others: faults.Pause(peers, entry.seconds),
    "resume": lambda entry, peers, others: faults.Resume(peers),
    "stop": lambda entry, peers, others: faults.Stop(peers, entry.grace_s),
    "partition": lambda entry, peers, others: faults.Partition(peers, others, entry.one_way, entry.seconds),
    "moment": lambda entry, peers, others: faults.Moment(),
    "heal": lambda entry, peers, others: faults.Heal(),
    "slow_links": lambda entry, peers, others: faults.SlowLinks(peers, others, shape_of(entry), entry.seconds),
    "disconnect": lambda entry, peers, others: faults.Disconnect(peers, entry.network, entry.seconds),
    "reconnect": lambda entry, peers, others: faults.Reconnect(peers, entry.network),
    "joiner_storm": lambda entry, peers, others: faults.JoinerStorm(entry.count or 1),
    "strangers": lambda entry, peers, others: faults.Strangers(
        peers, entry.attacks, entry.seconds or 0.0, entry.count or 5, entry.knows
    ),
}
_OF_PAIRS: Mapping[str, Callable[[FaultEntry, tuple[str, str]], Fault]] = {
    "corrupt_bytes": lambda entry, pair: faults.CorruptBytes(pair, entry.messages),
}
_OF_ONE: Mapping[str, Callable[[FaultEntry, str], Fault]] = {
    "kill_daemon": lambda entry, peer: faults.KillDaemon(peer),
    "slow_device": lambda entry, peer: faults.SlowDevice(peer, entry.factor or 1.0),
    "limit_cpu": lambda entry, peer: faults.LimitCpu(peer, entry.cpus or 0.0),
    "limit_memory": lambda entry, peer: faults.LimitMemory(peer, entry.mib or 0),
    "fill_disk": lambda entry, peer: faults.FillDisk(peer),
    "free_disk": lambda entry, peer: faults.FreeDisk(peer),
    "skew_clock": lambda entry, peer: faults.SkewClock(peer, entry.offset_s or 0.0),
    "restart": lambda entry, peer: faults.Restart(peer, entry.keep_disk),
    "upgrade": lambda entry, peer: faults.Upgrade(peer, entry.grace_s),
    "lie": lambda entry, peer: faults.Restart(peer, lie=entry.lie),
    "start": lambda entry, peer: faults.Start(peer),
    "twin": lambda entry, peer: faults.Twin(peer),
}
