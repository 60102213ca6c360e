"""Networks of containers: who is on which at what address, and the commands that cut links or make them narrow.

One network is shared by all ("wan"), and one by each region. A peer behind NAT is on a network of its own, with a
router that is on "wan" too and translates its address: it can call others and cannot be called, but by whom it calls
in the same moment (a port is translated to itself, no matter who is called, and lets in who was called).
"""

from __future__ import annotations

import ipaddress
import math
import random
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peers.chaos.engine import Engine, EngineError
from peers.chaos.faults import CannotInflict
from peers.chaos.nemesis import BOUNDED, Nemesis
from peers.chaos.world import PeerSpec
from swarm.sim.links import Cause, LinkShape, PerCause

WAN = "wan"
NO_DELAY = "this kernel has no netem, which makes links late: use bytes_per_s and loss, or swarm chaos --on processes"
_POOL = ipaddress.IPv4Network("10.128.0.0/9")
_PUBLIC = ipaddress.IPv4Network("25.0.0.0/8")
"""Allocated, but not announced on the internet: libp2p takes its addresses for public ones, and punches holes between
no others."""
_LAN = "lan-"
_TRIES = 30
_FIRST = 10
CHAIN = "SWARM"
_QUEUE_S = 0.4
"""Bytes that wait longer than this at a narrow link are dropped, as at a router."""


@dataclass(slots=True)
class ContainerLinks:
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
        """Restore the links, except for other causes if one is named."""
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


@dataclass(slots=True)
class _At:
    """A peer's address on each of its networks, and the networks that it is not on at the moment. ``seen`` is the
    address by which others see a peer behind NAT. ``net`` is the namespace of its first process, which distinguishes it
    from a later process with the same number; "" when it ended at once."""

    addresses: dict[str, str]
    container: str = ""
    pid: int = 0
    net: str = ""
    off: set[str] = field(default_factory=set)
    seen: str = ""


class ContainerNetworks:
    """Networks are made when their first peer comes, and removed with the play."""

    def __init__(self, engine: Engine, nemesis: Nemesis) -> None:
        self._engine, self._nemesis = engine, nemesis
        self._subnets: dict[str, ipaddress.IPv4Network] = {}
        self._taken: dict[str, int] = {}
        self._at: dict[str, _At] = {}
        self._links = ContainerLinks()
        self._delay: bool | None = None
        self.public = False
        """Whether wan is like the internet: its addresses are public ones, and peers listen on QUIC too."""

    def name(self, network: str) -> str:
        """Its name in the engine."""
        return f"swarm-{self._engine.play}-{network}"

    def add(self, spec: PeerSpec) -> None:
        """Give a peer its addresses, which it keeps. Again: no change."""
        if spec.name in self._at:
            return
        if spec.behind_nat:
            lan = f"{_LAN}{spec.name}"
            seen = self._router(spec.name, lan)
            self._at[spec.name] = _At({lan: self._address(lan)}, seen=seen)
            return
        networks = [WAN, *([spec.region] if spec.region else [])]
        self._at[spec.name] = _At({network: self._address(network) for network in networks})

    def options(self, spec: PeerSpec) -> list[str]:
        """Those of a new container of this peer: it is on its first network from the start on."""
        first, address = next(iter(self._at[spec.name].addresses.items()))
        return ["--network", self.name(first), "--ip", address]

    def connect(self, spec: PeerSpec, container: str) -> None:
        """Put a new container on the other networks of its peer, before it is started."""
        for network, address in list(self._at[spec.name].addresses.items())[1:]:
            self._engine.call("network", "connect", "--ip", address, self.name(network), container)

    def arrive(self, name: str, container: str, pid: int) -> None:
        """It runs: what is wrong with the networks is so for it, too."""
        at = self._at[name]
        at.container, at.pid = container, pid
        at.net = self._nemesis.run([f"(readlink /proc/{pid}/ns/net || true)"])
        if at.seen:
            router = self._subnets[next(iter(at.addresses))][_FIRST - 1]
            self._nemesis.within(pid, [f"ip route replace default via {router}"])
        for network in at.off:
            self._engine.call("network", "disconnect", self.name(network), container)
        if self._links.cut.items() or self._links.shapes.items():
            self._apply([name])

    def part(self, one: Iterable[str], other: Iterable[str], *, both: bool, cause: Cause = "") -> None:
        """Nothing passes from these to those, and back if ``both``."""
        self._links.part(one, other, both=both, cause=cause)
        self._apply(self._at)

    def shape(self, one: Sequence[str], other: Sequence[str], shape: LinkShape, *, cause: Cause = "") -> None:
        """All links between them, in both directions. Raises CannotInflict for what this kernel cannot do."""
        if shape.reset:
            raise CannotInflict(
                "containers have no connections that break by chance: use loss, or partition for a moment"
            )
        if shape.latency_s and not self.has_delay():
            raise CannotInflict(NO_DELAY)
        self._links.shape(one, other, shape, cause=cause)
        self._apply(self._at)

    def mend(self, only: Cause = None) -> None:
        """All links are as they were, but for other causes where one is named; who is off a network stays so."""
        self._links.mend(only)
        self._apply(self._at)

    def has_delay(self) -> bool:
        """Return whether this kernel can make links late."""
        if self._delay is None:
            self._delay = self._nemesis.has_delay()
        return self._delay

    def disconnect(self, names: Iterable[str], network: str) -> None:
        """These are on that network no more; on none for ""."""
        for name in names:
            at = self._at[name]
            for one in self.meant(name, network) - at.off:
                self._engine.call("network", "disconnect", "--force", self.name(one), at.container)
                at.off.add(one)

    def reconnect(self, names: Iterable[str], network: str) -> None:
        """They are again, at the same address; on all of theirs for ""."""
        back = list(names)
        for name in back:
            at = self._at[name]
            for one in sorted(self.meant(name, network) & at.off):
                self._engine.call("network", "connect", "--ip", at.addresses[one], self.name(one), at.container)
                at.off.discard(one)
        self._apply(back)

    def meant(self, name: str, network: str) -> set[str]:
        """Those of this peer's networks that are meant by that name: all of them by "". Raises CannotInflict."""
        known = set(self._at[name].addresses)
        if not network:
            return known
        if network not in known:
            raise CannotInflict(f"{name} is not on {network}: it is on {', '.join(sorted(known))}")
        return {network}

    def _apply(self, names: Iterable[str]) -> None:
        """One command for all of them. Who has ended is passed over: its next start is told."""
        seen = {name: (at.seen,) if at.seen else tuple(at.addresses.values()) for name, at in self._at.items()}
        for name in names:
            at = self._at[name]
            if not self._is_there(at):
                continue
            commands = self._links.commands(name, seen, self._interfaces(at))
            try:
                self._nemesis.within(at.pid, commands)
            except EngineError:
                if self._runs(at):
                    raise

    def _is_there(self, at: _At) -> bool:
        return bool(at.net) and self._nemesis.run([f"(readlink /proc/{at.pid}/ns/net || true)"]) == at.net

    def _interfaces(self, at: _At) -> list[str]:
        said = self._nemesis.run([f"(nsenter -t {at.pid} -n ip -o link show up || true)"])
        names = [line.split(":")[1].strip().partition("@")[0] for line in said.splitlines() if line.count(":") > 1]
        return [name for name in names if name != "lo"]

    def _runs(self, at: _At) -> bool:
        return self._engine.inspect(at.container, "{{.State.Running}}") == "true"

    def _address(self, network: str) -> str:
        subnet = self._subnets.get(network) or self._make(network)
        number = self._taken[network] = self._taken.get(network, _FIRST - 1) + 1
        return str(subnet[number])

    def _make(self, network: str) -> ipaddress.IPv4Network:
        """A network with addresses that no other on this machine has, as the engine says."""
        draw = random.Random(f"{self._engine.play}/{network}")
        pool = _PUBLIC if network == WAN and self.public else _POOL
        for attempt in range(_TRIES):
            subnet = ipaddress.IPv4Network((int(pool[0]) + 256 * draw.randrange(pool.num_addresses // 256), 24))
            # Engines drop what leaves an internal network, even through a router on it.
            internal = ("--internal",) if network != WAN and not network.startswith(_LAN) else ()
            try:
                self._engine.call("network", "create", *self._engine.labels, *internal, "--subnet", str(subnet),
                                  self.name(network))  # fmt: skip
            except EngineError as error:
                if "overlaps" not in str(error) or attempt == _TRIES - 1:
                    raise
                continue
            break
        self._subnets[network] = subnet
        return subnet

    def _router(self, name: str, lan: str) -> str:
        """Start the router of a peer, on wan and on its network; returns its address on wan."""
        self._make(lan)
        inside, seen = str(self._subnets[lan][_FIRST - 1]), self._address(WAN)
        router = f"swarm-{self._engine.play}-router-{name}"
        self._engine.call(
            "create", "--name", router, *self._engine.labels, *BOUNDED, "--init", "--network", self.name(WAN),
            "--ip", seen, "--sysctl", "net.ipv4.ip_forward=1", "--stop-signal", "KILL", self._nemesis.image,
            "sleep", "infinity",
        )  # fmt: skip
        self._engine.call("network", "connect", "--ip", inside, self.name(lan), router)
        self._engine.call("start", router)
        pid, here = int(self._engine.inspect(router, "{{.State.Pid}}")), self._subnets[lan]
        self._nemesis.within(pid, [
            f"iptables -w 5 -t nat -A POSTROUTING -s {here} ! -d {here} -j MASQUERADE",
            f"iptables -w 5 -A FORWARD -d {here} -m conntrack ! --ctstate ESTABLISHED,RELATED -j DROP",
            # As home routers do. Otherwise who calls first takes the port: the answer of whom it called, who sends from
            # the same port in the same moment, is given another one, and no hole is punched.
            f"iptables -w 5 -A INPUT -d {seen} -m conntrack ! --ctstate ESTABLISHED,RELATED -j DROP",
        ])  # fmt: skip
        return seen


def _queue(interface: str, number: int, shape: LinkShape, targets: Sequence[str]) -> list[str]:
    """Return the queue for packets to these addresses; others pass by (htb without a default class)."""
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
