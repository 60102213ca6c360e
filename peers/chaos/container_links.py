"""What the network of a container has to be like, as commands: who is cut off from it, and which links are narrow.
Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.sim.links import Cause, LinkShape, PerCause

CHAIN = "SWARM"
_QUEUE_S = 0.4
"""Bytes that wait longer than this at a narrow link are dropped, as at a router."""


@dataclass(slots=True)
class Links:
    """Between whom nothing passes, and what shape other links have; in one direction each, from the first to the
    second, and until the last of its causes is over."""

    cut: PerCause[bool] = field(default_factory=PerCause)
    shapes: PerCause[LinkShape] = field(default_factory=PerCause)

    def part(self, one: Iterable[str], other: Iterable[str], *, both: bool, cause: Cause = "") -> None:
        """Nothing passes from these to those, and back if ``both``."""
        for pair in _pairs(one, other) | (_pairs(other, one) if both else set()):
            self.cut.put(pair, True, cause)

    def shape(self, one: Iterable[str], other: Iterable[str], shape: LinkShape, *, cause: Cause = "") -> None:
        """All links between them, in both directions."""
        for pair in _pairs(one, other) | _pairs(other, one):
            self.shapes.put(pair, shape, cause)

    def mend(self, only: Cause = None) -> None:
        """As they were, but for other causes where one is named."""
        self.cut.end((), only=only)
        self.shapes.end((), only=only)

    def commands(self, name: str, addresses: Mapping[str, Sequence[str]], interfaces: Sequence[str]) -> list[str]:
        """Shell commands that make the network of ``name`` so, whatever it was before. ``addresses`` are those by
        which others see each peer."""
        return [*self._filters(name, addresses), *self._queues(name, addresses, interfaces)]

    def _filters(self, name: str, addresses: Mapping[str, Sequence[str]]) -> list[str]:
        """The chain is replaced in one piece: what is cut stays so while something else is changed."""
        rules = [
            f"-A {CHAIN} -s {address} -j DROP"
            for (one, other), _ in self.cut.items()
            if other == name
            for address in addresses.get(one, ())
        ]
        rules += [
            f"-A {CHAIN} -s {address} -m statistic --mode random --probability {shape.loss:.4f} -j DROP"
            for (one, other), shape in self.shapes.items()
            if other == name and shape.loss
            for address in addresses.get(one, ())
        ]
        lines = ("*filter", f":{CHAIN} - [0:0]", *rules, "COMMIT")
        return [
            f"printf '%s\\n' {' '.join(map(shlex.quote, lines))} | iptables-restore -w 5 --noflush",
            f"(iptables -w 5 -C INPUT -j {CHAIN} 2>/dev/null || iptables -w 5 -I INPUT -j {CHAIN})",
        ]

    def _queues(self, name: str, addresses: Mapping[str, Sequence[str]], interfaces: Sequence[str]) -> list[str]:
        shaped = [
            (shape, addresses[other])
            for (one, other), shape in self.shapes.items()
            if one == name and addresses.get(other) and (shape.bytes_per_s < math.inf or shape.latency_s)
        ]
        commands = []
        for interface in interfaces:
            commands.append(f"(tc qdisc del dev {interface} root 2>/dev/null || true)")
            if shaped:
                commands.append(f"tc qdisc add dev {interface} root handle 1: htb")
            for number, (shape, targets) in enumerate(shaped, start=1):
                commands += _queue(interface, number, shape, targets)
        return commands


def _queue(interface: str, number: int, shape: LinkShape, targets: Sequence[str]) -> list[str]:
    """What is sent to these addresses; what is sent to others passes by (htb without a default class)."""
    rate = min(shape.bytes_per_s, 10e9 / 8)
    burst = max(16_000, int(rate * 0.01))
    kbit = max(8, int(rate * 8 / 1000))
    found = [
        f"tc class add dev {interface} parent 1: classid 1:{number} htb rate {kbit}kbit burst {burst} quantum 60000",
        *(
            f"tc filter add dev {interface} parent 1: protocol ip u32 match ip dst {target}/32 flowid 1:{number}"
            for target in targets
        ),
    ]
    if shape.latency_s:
        late = f"delay {shape.latency_s * 1e3:.1f}ms {shape.jitter_s * 5e2:.1f}ms"
        found.append(f"tc qdisc add dev {interface} parent 1:{number} netem {late} limit 10000")
    else:
        queue = max(32_000, int(rate * _QUEUE_S))
        found.append(f"tc qdisc add dev {interface} parent 1:{number} bfifo limit {queue}")
    return found


def _pairs(one: Iterable[str], other: Iterable[str]) -> set[tuple[str, str]]:
    others = tuple(other)
    return {(first, second) for first in one for second in others if first != second}
