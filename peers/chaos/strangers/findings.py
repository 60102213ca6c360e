"""What strangers were told to do, what they did, and what they were answered: as arguments, and as a file of JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from swarm.disk import write_whole
from swarm.errors import ConfigError
from swarm.network.addresses import ip_of, parse_address
from swarm.parsing import parse_json

PROGRAM = "peers.chaos.strangers"
REPORT = "strangers.json"
Attack = Literal["large", "small", "directory", "slow", "methods", "join"]
IDENTITIES, SECONDS = 5, 30.0
Side = Literal["peers", "sink"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrangerOrders:
    """``at``: addresses that name their peer, by which the run is found; ``run`` None: they are all that is known.
    ``targets`` are the ids of those to attack, by so many identities for so many seconds."""

    at: tuple[str, ...]
    run: str | None
    targets: tuple[str, ...]
    attacks: tuple[Attack, ...]
    identities: int = IDENTITIES
    seconds: float = SECONDS
    seed: int = 0

    def attacks_of(self, number: int) -> tuple[Attack, ...]:
        """Return those of one identity: none disturbs another, for what bounds one identity bounds all that it does."""
        return self.attacks[number :: self.identities] or (self.attacks[number % len(self.attacks)],)

    def share_of(self, attack: Attack) -> float:
        """Return the part of an attack that is each identity's, of those that do it."""
        return 1.0 / sum(attack in self.attacks_of(number) for number in range(self.identities))

    def arguments(self) -> tuple[str, ...]:
        """The program's, but for ``--home``, which the world that starts it knows."""
        run = () if self.run is None else ("--run", self.run)
        return (
            "--at", *self.at, *run, "--targets", *self.targets, "--attacks", *self.attacks,
            "--identities", str(self.identities), "--seconds", str(self.seconds), "--seed", str(self.seed),
        )  # fmt: skip


def orders_from(arguments: Sequence[str]) -> tuple[Path, StrangerOrders]:
    """Return the home and the orders in the program's arguments; the worlds' others are passed over. Raises ConfigError
    for an address that is not of a private network: these programs attack what a play has started, and nobody else."""
    parser = argparse.ArgumentParser(PROGRAM, allow_abbrev=False)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--at", nargs="+", required=True)
    parser.add_argument("--run")
    parser.add_argument("--targets", nargs="+", required=True)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--identities", type=int, default=IDENTITIES)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    read, _ = parser.parse_known_args(arguments)
    check_private(read.at)
    orders = StrangerOrders(
        at=tuple(read.at),
        run=read.run,
        targets=tuple(read.targets),
        attacks=tuple(read.attacks),
        identities=read.identities,
        seconds=read.seconds,
        seed=read.seed,
    )
    return read.home, orders


def check_private(addresses: Iterable[str]) -> None:
    """Raises ConfigError for an address that is not of this machine or of a private network."""
    for text in addresses:
        host = ip_of(parse_address(text))
        if host is None or not (host.is_loopback or host.is_private):
            allowed = "addresses of this machine or of private networks: strangers attack the play's own peers only"
            raise ConfigError("--at", text, allowed, "Name a peer that the play has started.")


@dataclass(slots=True)
class StrangerFindings:
    """``turns`` are whom they attacked from when to when, by the machine's monotonic clock; all else is of the peers'
    turns. ``answered`` counts by method the answers that were no refusal. ``slow`` are half frames that were sent."""

    turns: list[tuple[Side, float, float]] = field(default_factory=list)
    bytes: int = 0
    calls: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    records_taken: int = 0
    records_refused: int = 0
    lookups: int = 0
    lookups_answered: int = 0
    slow: int = 0
    problems: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises OSError."""
        told = {name: getattr(self, name) for name in self.__slots__}
        write_whole(path, [json.dumps(told, indent=1).encode()])


def read_findings(homes: Iterable[Path], offset: float) -> list[Mapping[str, Any]]:
    """Return what all strangers of a play wrote, by the names of their homes; ``offset`` is what the monotonic clock
    lacks to the wall clock of the play."""
    found: list[Mapping[str, Any]] = []
    for path in sorted(path for home in homes for path in home.glob(f"*/{REPORT}")):
        told = parse_json(path.read_text(encoding="utf-8"))
        turns = [(side, from_s + offset, to_s + offset) for side, from_s, to_s in told["turns"]]
        found.append({"name": path.parent.name, **told, "turns": turns})
    return found
