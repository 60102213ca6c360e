"""Other machines on this one: network namespaces joined by a switch, some behind a router that translates addresses.

Each *host* is a namespace with a loopback interface and one more; nothing in the machine's own network is touched, and
no packet leaves it. Needs root, iproute2 and iptables: :func:`why_not` says what is missing.

::

    with lan("a", "b") as net, behind_nat(net, "c"):
        child = net.start("b", [sys.executable, "-m", "http.server"])
        net.run("c", ["curl", "-s", f"http://{net.address('b')}:8000"])

Everything is gone at the end of the ``with``, processes included; what a killed test left is removed by the next one.
``python -m tests.harness.namespaces`` exits with 0 where this works, else it says why not and exits with 1.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.harness.expect import wait_until

_PLACE = "/run/netns"
_PREFIX = "swt"
_NAME = re.compile(rf"{_PREFIX}(\d+)-\d+-[a-z0-9]+")
_COMMAND_S = 60.0
_serial = itertools.count()


def why_not() -> str | None:
    """Why namespaces cannot be used here; None when they can. Makes one and removes it."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [program for program in ("ip", "iptables") if shutil.which(program) is None]
    if missing:
        return f"needs the program {missing[0]}"
    try:
        with lan("a", "b") as net, behind_nat(net, "c"):
            net.run("c", ["true"])
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {str(error.stderr).strip()}"
    return None


class Net:
    """Some hosts and how to reach them. Made by :func:`lan`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._namespaces: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._name = f"{_PREFIX}{os.getpid()}-{next(_serial)}"

    def address(self, host: str) -> str:
        """The host's IPv4 address on its own network."""
        return self._addresses[host]

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on a host; its process is the command's own."""
        return ["ip", "netns", "exec", self._namespaces[host], *command]

    def run(self, host: str, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, at most 10 s unless ``timeout`` says otherwise. Raises
        CalledProcessError unless it exits with 0."""
        options = {"check": True, "capture_output": True, "text": True, "timeout": _COMMAND_S} | options
        done: subprocess.CompletedProcess[str] = subprocess.run(self.command(host, command), **options)
        return done

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host; at the latest at the end of the ``with`` it is killed. ``options`` are Popen's."""
        return subprocess.Popen(self.command(host, command), **options)

    def unplug(self, host: str) -> None:
        """Pull the host's cable: packets are lost without a word. The processes go on."""
        self.run(host, ["ip", "link", "set", "eth0", "down"])

    def add(self, host: str, address: str, *, network: str | None = None, router: str | None = None) -> None:
        """A new host. ``network`` is the host with the switch, ``router`` the address of its way out."""
        name = self._namespaces[host] = f"{self._name}-{host}"
        _ip("netns", "add", name)
        self._addresses[host] = address
        self.run(host, ["ip", "link", "set", "lo", "up"])
        if network is not None:
            self.wire(host, "eth0", f"{address}/24", network)
        if router is not None:
            self.run(host, ["ip", "route", "add", "default", "via", router])

    def switch(self, host: str) -> None:
        """A new host that is only a switch."""
        self.add(host, "")
        self.run(host, ["ip", "link", "add", "br0", "type", "bridge"])
        self.run(host, ["ip", "link", "set", "br0", "up"])

    def wire(self, host: str, interface: str, address: str, network: str) -> None:
        """A cable from a host's new interface to a switch."""
        port = f"p{next(_serial)}"
        here, there = self._namespaces[host], self._namespaces[network]
        _ip("link", "add", interface, "netns", here, "type", "veth", "peer", "name", port, "netns", there)
        self.run(network, ["ip", "link", "set", port, "master", "br0", "up"])
        self.run(host, ["ip", "address", "add", address, "dev", interface])
        self.run(host, ["ip", "link", "set", interface, "up"])

    def remove(self, *hosts: str) -> None:
        """Hosts and everything that runs on them. Killed are only processes inside namespaces of ours."""
        for host in hosts:
            name = self._namespaces.pop(host, None)
            if name is not None:
                _remove(name)

    def remove_all(self) -> None:
        """All of them."""
        self.remove(*self._namespaces)


@contextlib.contextmanager
def lan(*hosts: str, prefix: str = "198.51.100") -> Iterator[Net]:
    """Hosts on one switch, with the addresses ``prefix``.1, .2, …: they all reach each other."""
    sweep()
    net = Net(prefix)
    try:
        net.switch("sw")
        for number, host in enumerate(hosts, 1):
            net.add(host, f"{prefix}.{number}", network="sw")
        yield net
    finally:
        net.remove_all()


@contextlib.contextmanager
def behind_nat(net: Net, *hosts: str, subnet: str = "192.168.7") -> Iterator[str]:
    """Hosts at home: they reach those on the switch, as one address that this gives, and cannot be reached from there.

    Several homes may use the same ``subnet``, as homes do.
    """
    home = f"nat{next(_serial)}"
    router, switch = f"{home}r", f"{home}s"
    outside = f"{net.prefix}.{100 + next(_serial) % 150}"
    try:
        net.switch(switch)
        net.add(router, outside, network="sw")
        net.wire(router, "eth1", f"{subnet}.254/24", switch)
        net.run(router, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        for rule in (
            "-t nat -A POSTROUTING -o eth0 -j MASQUERADE",
            "-A FORWARD -i eth1 -j ACCEPT",
            "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            "-P FORWARD DROP",
            "-A INPUT -i eth0 -j DROP",
        ):
            net.run(router, ["iptables", "-w", *rule.split()])
        for number, host in enumerate(hosts, 1):
            net.add(host, f"{subnet}.{number}", network=switch, router=f"{subnet}.254")
        yield outside
    finally:
        net.remove(*hosts, router, switch)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=_COMMAND_S)
    return done.stdout


def _remove(namespace: str) -> None:
    def empty() -> bool:
        left = _ip("netns", "pids", namespace).split()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not left

    with contextlib.suppress(subprocess.CalledProcessError):
        wait_until(empty, what=f"the end of what runs in {namespace}")
        _ip("netns", "delete", namespace)


def left() -> list[str]:
    """Return the namespaces of test processes that are gone."""
    found = map(_NAME.match, os.listdir(_PLACE)) if os.path.isdir(_PLACE) else ()
    return [name[0] for name in found if name and not os.path.exists(f"/proc/{name[1]}")]


def sweep() -> None:
    """Remove them."""
    for name in left():
        _remove(name)


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        print(reason)
    sys.exit(0 if reason is None else 1)
