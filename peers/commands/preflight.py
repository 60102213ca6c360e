"""Check this machine before anything slow is imported or any peer is called."""

from __future__ import annotations

import errno
import os
import re
import shlex
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peers.console.words import another_path
from peers.options.model import ANY_PORT, DEVICE, DEVICE_WORDS
from peers.options.relay import PORT as RELAY_PORT
from peers.reporting.trackers import check_trackers
from swarm.device import named_devices
from swarm.errors import ConfigError

GPU_TRACES = ("dev/nvidia*", "proc/driver/nvidia/gpus/*", "dev/nvgpu*", "dev/nvhost-gpu", "dev/dxg", "dev/kfd")
"""What drivers of GPUs that torch calls ``cuda`` leave: NVIDIA's (also on boards), WSL's, AMD's."""
_TRANSPORTS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}


def check_device(device: str, root: Path = Path("/")) -> None:
    """Refuse a device that no peer could use, before anything is made. Raises ConfigError.

    Imports no torch: of a GPU it only asks whether there is a trace of any driver below ``root``. Whether it is there
    under that number, and whether torch can use it, the peers find out.
    """
    if re.fullmatch(DEVICE, device) is None:
        raise ConfigError("--device", device, DEVICE_WORDS, "Correct the name.")
    if device.startswith("cuda") and not has_gpu_driver(root):
        remedy, why = (
            "Leave --device out to use the CPU. Does nvidia-smi list a GPU?",
            "no GPU driver is on this machine",
        )
        raise ConfigError("--device", device, "cpu here", remedy, why=why)


def check_devices(devices: str) -> None:
    """Refuse devices of one peer, with ``+``, or of several, with commas, that none could use. Raises as
    :func:`check_device`."""
    for joined in devices.split(","):
        for device in named_devices(joined, "--device"):
            check_device(device)


def has_gpu_driver(root: Path = Path("/")) -> bool:
    """Return whether there is a trace of a driver of a GPU that torch calls ``cuda``, below ``root``."""
    return any(any(root.glob(trace)) for trace in GPU_TRACES)


def check_checkpoints(pattern: Path) -> None:
    """Refuse a place for checkpoints in which this user cannot write, up to what ``{run}`` in it stands for. Tries it,
    and leaves nothing. Raises ConfigError."""
    _check_writable("--checkpoints", pattern, "keep the run in the home")


def check_reporting(trackers: str | None, directory: Path | None) -> None:
    """Refuse trackers that are not here, or could not write. Raises ConfigError."""
    check_trackers(trackers)
    if directory is not None:
        if trackers is None:
            remedy = "Add --report-to tensorboard, or leave it out."
            raise ConfigError("--report-dir", str(directory), "only together with --report-to", remedy)
        _check_writable("--report-dir", directory, "write into the session")


def _check_writable(option: str, pattern: Path, otherwise: str) -> None:
    place = next(path for path in (pattern, *pattern.parents) if "{run}" not in str(path))
    missing = [path for path in (place, *place.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        remedy = f"{error.strerror or error}: name another with {option}, or leave it out to {otherwise}."
        raise ConfigError(option, str(pattern), "a directory that this user may write", remedy) from None
    finally:
        for path in reversed(made):
            path.rmdir()


def check_output(option: str, path: Path) -> None:
    """Refuse a file that could not be written, before the work of which it is to tell. Writes nothing. What exists and
    is no regular file is written into, a link is followed. Raises ConfigError."""
    if path.is_dir():
        remedy = f"Name a file in it: {option} {path / 'FILE'}"
        raise ConfigError(option, str(path), "a file", remedy, why="this is a directory")
    if path.exists():
        if os.access(path, os.W_OK):
            return
        raise ConfigError(option, str(path), "a file that this user may write", another_path(path))
    above = Path(os.path.realpath(path)).parent
    if not above.is_dir():
        why, remedy = f"there is no directory {above}", f"Make it: mkdir -p {shlex.quote(str(above))}"
        raise ConfigError(option, str(path), "a file in a directory that is there", remedy, why=why)
    if not os.access(above, os.W_OK | os.X_OK):
        why = f"nothing can be made in {above}"
        raise ConfigError(option, str(path), "a file that this user may write", another_path(path), why=why)


def check_listen(addresses: Sequence[str]) -> None:
    """Refuse addresses that nobody could listen on: malformed, not this machine's, or a port that is taken.

    Binds each port for a moment, so another process may still take it afterwards: the daemon then says so. Raises
    ConfigError naming the port and, where this user may see it, the process that holds it.
    """
    from swarm.network.addresses import name_of, parse_address, tcp_port_of

    for text in addresses:
        address = parse_address(text, key="--listen", use="listen")
        names = [protocol.name for protocol in address.protocols()]
        if name_of(address) is not None:
            port = tcp_port_of(address) or 0
            remedy = f"Listen at all, and tell others the name: --listen {ANY_PORT[:-1]}{port} --announce {text}"
            raise ConfigError("--listen", text, "an IP address of this machine", remedy, why="this is a name")
        if names[0] in _FAMILIES and names[1] in _TRANSPORTS:
            host, port = str(address.value_for_protocol(names[0])), int(address.value_for_protocol(names[1]))
            _check_bind(text, _FAMILIES[names[0]], _TRANSPORTS[names[1]], (host, port))


def check_announce(addresses: Sequence[str]) -> None:
    """Refuse addresses to be told others that nobody could dial. Raises ConfigError."""
    from swarm.network.addresses import parse_address

    for text in addresses:
        parse_address(text, key="--announce", use="announce")


def check_through(addresses: Sequence[str]) -> None:
    """Refuse addresses at which no relay could be dialled. Raises ConfigError."""
    from swarm.network.addresses import is_relayed, parse_address

    for text in addresses:
        if "/p2p/" not in text and "/ipfs/" not in text and text.strip():
            raise _without_peer(text.strip())
        if is_relayed(parse_address(text, key="--through")):
            remedy = f"Leave out what follows the relay's own id: --through {text.partition('/p2p-circuit')[0]}"
            why = "this one leads through a relay to another peer"
            raise ConfigError("--through", text, "the address of a relay", remedy, why=why)


def _without_peer(text: str) -> ConfigError:
    """The error for a relay's address without its peer id, with the address made whole but for that."""
    from peers.console.words import command_name

    swarm, host, port = command_name(), text.strip("/[]"), str(RELAY_PORT)
    if text.startswith("/"):
        whole = text.rstrip("/") if "/tcp/" in text or "/udp/" in text else f"{text.rstrip('/')}/tcp/{port}"
    else:
        if host.count(":") == 1 or "]:" in host:
            host, _, port = host.rpartition(":")
        host = host.strip("[]")
        kind = "ip6" if ":" in host else "ip4" if re.fullmatch(r"[0-9.]+", host) else "dns4"
        whole = f"/{kind}/{host}/tcp/{port}"
    return ConfigError(
        "--through", text, "the whole address of a relay, as swarm relay prints it",
        f"On the relay's machine: {swarm} status --peer relay shows it; then here: --through {whole}/p2p/PEER_ID",
        why="it ends in no /p2p/PEER_ID, the id by which the relay proves to be the one that is meant",
    )  # fmt: skip


def check_port(port: int) -> None:
    """Refuse a TCP port of all interfaces that nobody could listen on, as :func:`check_listen` does, in words about
    ``--port``. Raises ConfigError."""
    try:
        _bind(socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", port))
    except OSError as error:
        remedy = "Choose another, or leave --port out to take any free one."
        match error.errno:
            case errno.EADDRINUSE:
                allowed = f"a free port; {port} is taken{port_holder(port)}"
            case errno.EACCES:
                allowed, remedy = "a port this user may open", f"Choose one from 1024 on. {remedy}"
            case _:
                allowed = f"a port to listen on: {error.strerror or error}"
        raise ConfigError("--port", port, allowed, remedy) from None


def _bind(family: int, kind: int, place: tuple[str, int]) -> None:
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # as the daemon does: the same port of IPv4 may be somebody else's
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(place)
        if kind == socket.SOCK_STREAM:
            # With SO_REUSEADDR a port that somebody listens on is refused only here.
            probe.listen(1)


def _check_bind(text: str, family: int, kind: int, place: tuple[str, int]) -> None:
    try:
        _bind(family, kind, place)
    except OSError as error:
        raise _refused(text, error, place[1]) from None


def _refused(text: str, error: OSError, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        remedy = f"Stop that process, or take any free port: --listen {ANY_PORT}"
        return ConfigError("--listen", text, f"a free port; {port} is taken{port_holder(port)}", remedy)
    if error.errno == errno.EADDRNOTAVAIL:
        remedy = f"Listen on all of them: --listen {ANY_PORT.removesuffix('0')}{port}"
        return ConfigError("--listen", text, "an address of this machine", remedy)
    if error.errno == errno.EACCES:
        remedy = f"Choose a port from 1024 on, or any: --listen {ANY_PORT}"
        return ConfigError("--listen", text, "a port this user may open", remedy)
    why = error.strerror or str(error)
    return ConfigError("--listen", text, "an address to listen on", f"Take any: --listen {ANY_PORT}", why=why)


def port_holder(port: int) -> str:
    """`` by python (pid 812)`` when that can be seen."""
    import psutil

    try:
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr.port == port and not connection.raddr and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return ""
    return ""
