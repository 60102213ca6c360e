"""Run the libp2p daemon as a child process: start it, watch it, drain its output, and never leave it behind.

It runs in a process group of its own, so that Ctrl-C on the terminal reaches us and not it; the kernel sends it SIGTERM
when we die in whatever way (it then unlinks its socket). Not in a session of its own: Linux shares the processor
between sessions first (autogroup), so on a full machine our event loop would pay for what our device thread has used.
Measured (benchmark ``loop`` at df58d3c1): p99 lag 6.6 ms against 16.2 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from ipaddress import ip_address
from pathlib import Path

from multiaddr import Multiaddr

from swarm.errors import BugError, ConfigError, Unreachable
from swarm.network.addresses import ip_of, is_loopback
from swarm.parsing import parse_json

logger = logging.getLogger(__name__)

_READ_BYTES = 64 << 10
_MAX_LINE_BYTES = 16 << 10
_READY = b"Peer ID:"
_STOP_S = 1.0
_CORES_PER_GO_THREAD = 4
"""Go's idle threads look for work before they sleep. With one thread on two shared cores the daemons took 10 to 25 %
less time for the same traffic; larger machines were not measured. The user's own GOMAXPROCS goes first."""

_LAST_LINES = 12

# PR_SET_PDEATHSIG survives exec. It is set by a small launcher rather than between fork and exec of a process with
# threads; a parent that died before the call is noticed by its changed pid.
_LAUNCHER = """
import ctypes, os, signal, sys
os.setpgid(0, 0)
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Settings of the daemon's start. ``bootstrap`` addresses end in ``/p2p/<peer id>``; the others do not.

    ``port_map`` asks the router for a forwarded port (UPnP, NAT-PMP), which changes the settings of a device that may
    not be the user's own: off unless asked for, and never on loopback.
    """

    key_file: Path
    control: Path
    listen: Sequence[Multiaddr]
    announce: Sequence[Multiaddr] = ()
    bootstrap: Sequence[Multiaddr] = ()
    port_map: bool = False
    startup_timeout_s: float = 60.0


class Daemon:
    """A running daemon. Made by :meth:`start` only."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ready = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._drain = asyncio.get_running_loop().create_task(self._read_output(), name="p2pd output")

    @classmethod
    async def start(cls, config: DaemonConfig) -> Daemon:
        """Start it and wait until it serves its control socket.

        Must run on the main thread: the kernel's death signal is bound to the *thread* that spawned. Raises
        Unreachable when it exits or is not ready within ``startup_timeout_s`` (the message has its last lines),
        ConfigError when its program cannot run here. Cancelled, it leaves no process.
        """
        if threading.current_thread() is not threading.main_thread():
            raise BugError("the daemon must be started from the main thread")
        with as_file(files("hivemind.hivemind_cli") / "p2pd") as program:
            daemon = cls(await _spawn(program, config))
            try:
                async with asyncio.timeout(config.startup_timeout_s):
                    await daemon._wait_ready()
            except TimeoutError as error:
                await daemon.stop()
                raise Unreachable(f"p2pd was not ready in {config.startup_timeout_s:g} s; {daemon.tail()}") from error
            except BaseException:
                await daemon.stop()
                raise
        return daemon

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Until it ends: its exit code, negative for a signal."""
        return await self._process.wait()

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL a second later. Idempotent; once begun it is finished even when cancelled."""
        await asyncio.shield(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.running:
                self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._drain.cancel()
        await asyncio.gather(self._drain, return_exceptions=True)

    async def _wait_ready(self) -> None:
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({ready, self._drain}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set():
            raise Unreachable(f"p2pd ended with exit code {await self.wait()}; {self.tail()}")

    def tail(self) -> str:
        """The last that it printed, in words."""
        return f"it said: {' | '.join(self._lines)[-800:] or 'nothing'}"

    async def _read_output(self) -> None:
        """Drain stdout for ever: a full pipe would block the daemon. Lines of any length, the excess dropped."""
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - we asked for a pipe
        partial = b""
        while data := await stdout.read(_READ_BYTES):
            *lines, partial = (partial + data).split(b"\n")
            partial = partial[:_MAX_LINE_BYTES]
            for line in lines:
                self._on_line(line[:_MAX_LINE_BYTES])

    def _on_line(self, line: bytes) -> None:
        if line.startswith(_READY):
            self._ready.set()
        text = line.decode(errors="replace").strip()
        with contextlib.suppress(ValueError, TypeError):
            record = parse_json(text)
            text = (
                f"{record['logger']}: {record['msg']} {record.get('error', '')}".strip() if "logger" in record else text
            )
        if text:
            self._lines.append(text)
            logger.debug("p2pd: %s", text)


async def _spawn(program: Path, config: DaemonConfig) -> asyncio.subprocess.Process:
    if not os.access(program, os.X_OK):
        raise ConfigError("hivemind", str(program), "an executable p2pd", "Reinstall hivemind for this platform.")
    environment = {**os.environ, "GOLOG_LOG_FMT": "json", "GOLOG_LOG_LEVEL": "error"}
    environment.setdefault("GOMAXPROCS", str(max(1, (os.cpu_count() or 1) // _CORES_PER_GO_THREAD)))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(program), *_arguments(config),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )  # fmt: skip


def _arguments(config: DaemonConfig) -> list[str]:
    local = all(is_loopback(address) for address in config.listen)
    options: dict[str, object] = {
        "id": config.key_file,
        "listen": f"/unix{config.control}",
        "hostAddrs": _join(config.listen),
        "dhtServer": 1,  # finds addresses of peers known by id only
        "connManager": 1,
        "autonat": int(not local),  # with it comes hole punching
        # It tries for who knows that nobody can dial it. AutoNAT finds that out 15 to 25 s after the start, when the
        # relayed connections, at whose beginning it tries, have long begun. We do not use what AutoNAT says; a peer
        # that can be dialled is not called through relays, so that saying so of all is without effect on it.
        "forceReachabilityPrivate": int(not local),
        "natPortMap": int(config.port_map and not local),
        "noise": 0,  # TLS 1.3 alone: AES where the processor has it, which takes less of it than Noise's ChaCha20
        "relay": 1,  # its streams may go over relayed connections
        "relayService": 0,  # swarm.network.reach.relay serves instead
        "idleTimeout": "30s",  # ends by itself when we never attach
    }
    if config.announce:
        options["announceAddrs"] = _join(config.announce)
    if config.bootstrap:
        options |= {"b": 1, "bootstrapPeers": _join(config.bootstrap)}
    return [f"-{name}={value}" for name, value in options.items()]


def _join(addresses: Sequence[Multiaddr]) -> str:
    return ",".join(str(address) for address in addresses)


def signal_name(exit_code: int) -> str:
    """An exit code in words: ``killed by SIGKILL`` or ``exit code 1``."""
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


# --- the ports that a daemon chose -----------------------------------------------------------------------------------
# Pinned, so that the daemon that takes its place is found where the first one was.


_Bound = tuple[bool, str, int]
"""Whether it is UDP, the IP address, the port."""


async def pinned(listen: Sequence[Multiaddr], pid: int) -> tuple[Multiaddr, ...]:
    """The same addresses, each port 0 replaced by the one that process ``pid`` listens at for it.

    What it tells of itself is not used: announced and forwarded addresses have other ports. An address whose port
    cannot be found out stays as it is. Never raises; costs some milliseconds in a thread, nothing when no port is 0.
    """
    if not any(_wish(address) for address in listen):
        return tuple(listen)
    return pin(listen, await asyncio.to_thread(_bound_by, pid))


def pin(listen: Sequence[Multiaddr], bound: Collection[_Bound]) -> tuple[Multiaddr, ...]:
    """The rule of :func:`pinned`. An address for which several ports would do gets the lowest that is free."""
    left = sorted(bound)
    chosen = []
    for address in listen:
        wish = _wish(address)
        fitting = next((each for each in left if each[:2] == wish), None)
        if wish is None or fitting is None:
            chosen.append(address)
            continue
        left.remove(fitting)
        kind = "udp" if fitting[0] else "tcp"
        chosen.append(Multiaddr(str(address).replace(f"/{kind}/0", f"/{kind}/{fitting[2]}", 1)))
    return tuple(chosen)


def _wish(address: Multiaddr) -> tuple[bool, str] | None:
    """(UDP?, IP address) of an address that leaves its port open; None for all others."""
    ip = ip_of(address)
    for kind in ("tcp", "udp") if ip is not None else ():
        with contextlib.suppress(LookupError):
            return (kind == "udp", str(ip)) if int(str(address.value_for_protocol(kind))) == 0 else None
    return None


def _bound_by(pid: int) -> set[_Bound]:
    import psutil  # only a running peer needs it

    try:
        found = psutil.Process(pid).net_connections("inet")
    except (psutil.Error, OSError) as error:
        logger.warning("cannot find the ports of p2pd (%s): it may listen at others after a restart", error)
        return set()
    return {
        (udp, str(ip_address(each.laddr.ip)), each.laddr.port)
        for each in found
        if (udp := each.type == socket.SOCK_DGRAM) or each.status == psutil.CONN_LISTEN
    }
