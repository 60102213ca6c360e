"""The quick checks of ``swarm doctor``: what this machine has, without torch and without calling anybody.

:func:`look` reads the facts, everything else is pure. ``swarm join`` and ``swarm new`` do the same before they start.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.commands.preflight import check_devices, check_listen, has_gpu_driver
from peers.console.words import command_name, listed
from peers.doctor.results import CheckResult, raise_first, refused
from peers.options.model import ANY_PORT
from swarm.disk import size_text
from swarm.errors import ConfigError

NEWEST_PYTHON = (3, 13)
"""Newer ones may do, and nobody has tried them."""
PEER_MEMORY, SPARE_MEMORY = 350 << 20, 1 << 30
"""Of a peer and its daemon before it holds any part; and what leaves room for a small one."""
LEAST_DISK, SPARE_DISK = 64 << 20, 1 << 30
"""For a peer's log and the files of its run; and for a few checkpoints of a small one."""
LIMIT_S = 15.0
"""For everything, unless it is told otherwise."""
LEAST_FILES, SPARE_FILES = 256, 1024
"""Open at a time by a peer and its daemon in a small swarm; and in one of some two hundred peers."""
NEEDED = ("torch", "hivemind", "multiaddr", "uvloop", "numpy", "msgpack", "pydantic", "safetensors", "tokenizers",
          "blake3", "cryptography", "psutil")  # fmt: skip
_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}
"""What an ELF header calls a machine, and what Python does."""
_REINSTALL = "Install swarm again, with make setup in its checkout, or from a wheel made there."


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """A torch that is installed: its version, and the version of CUDA or ROCm that it was built for, "" for none."""

    version: str
    cuda: str = ""
    rocm: str = ""

    @property
    def words(self) -> str:
        """Return it in words."""
        what = f"for CUDA {self.cuda}" if self.cuda else f"for ROCm {self.rocm}" if self.rocm else "for the CPU"
        return f"{self.version}, built {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What a machine has. ``missing`` are packages that are needed, ``daemon`` is what is wrong with the libp2p
    program, ``disk`` the directory whose ``disk_free`` bytes count and ``disk_error`` why nothing can be written there,
    ``gpu`` is true where there is a trace of a driver of a GPU that torch calls cuda."""

    python: tuple[int, int, int]
    system: str
    machine: str
    cores: int
    missing: tuple[str, ...]
    daemon: str
    torch: TorchBuild | None
    gpu: bool
    memory_free: int
    memory_total: int
    disk: Path
    disk_free: int
    disk_error: str
    files_soft: int
    files_hard: int


def look(home: Path, root: Path = Path("/")) -> MachineFacts:
    """Read the facts. Imports nothing heavy, makes nothing; ``home`` need not be there yet."""
    import psutil

    from swarm.device import free_memory

    place = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    files_soft, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        python=sys.version_info[:3],
        system=platform.system(),
        machine=platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        missing=tuple(name for name in NEEDED if importlib.util.find_spec(name) is None),
        daemon=_daemon_problem(platform.machine()),
        torch=_torch_build(),
        gpu=has_gpu_driver(root),
        memory_free=free_memory(),
        memory_total=int(psutil.virtual_memory().total),
        disk=place,
        disk_free=shutil.disk_usage(place).free,
        disk_error=_write_problem(place),
        files_soft=files_soft,
        files_hard=files_hard,
    )


def _package(name: str) -> Path | None:
    """The directory of a package, which is not imported."""
    found = importlib.util.find_spec(name)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _torch_build() -> TorchBuild | None:
    """Return what torch says of itself in its own file; an import would take seconds."""
    place = _package("torch")
    if place is None:
        return None
    try:
        text = (place / "version.py").read_text()
    except OSError:
        text = ""
    said = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^'\n]*)'", text, re.MULTILINE))
    return TorchBuild(
        version=said.get("__version__", "of an unknown version"), cuda=said.get("cuda", ""), rocm=said.get("hip", "")
    )


def _daemon_problem(machine: str) -> str:
    """Return why the libp2p daemon, a program in the package hivemind, cannot run here; "" where nothing is in its
    way."""
    place = _package("hivemind")
    if place is None:
        return ""  # said already
    program = place / "hivemind_cli" / "p2pd"
    try:
        with program.open("rb") as file:
            head = file.read(20)
    except OSError as error:
        return f"{program}: {error.strerror}"
    if not os.access(program, os.X_OK):
        return f"{program} may not be run"
    built = _MACHINES.get(int.from_bytes(head[18:20], "little")) if head.startswith(b"\x7fELF") else "another system"
    return "" if built in (None, machine) else f"{program} is built for {built}, and this machine is {machine}"


def _write_problem(place: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return error.strerror or str(error)


# --- what follows of the facts ---------------------------------------------------------------------------------------


def judge_machine(facts: MachineFacts) -> Iterator[CheckResult]:
    """Return what these facts say about joining any run. Pure."""
    yield judge_python(facts)
    yield judge_torch(facts)
    yield judge_memory(facts)
    yield judge_disk(facts)
    yield judge_files(facts)


def judge_python(facts: MachineFacts) -> CheckResult:
    """Python, the system, the packages, and the libp2p daemon's program. Pure."""
    base = CheckResult(
        name="python",
        found=f"{'.'.join(map(str, facts.python))} on {facts.system} {facts.machine}, {facts.cores} cores",
        facts={
            "python": list(facts.python), "system": facts.system, "machine": facts.machine, "cores": facts.cores,
            "missing": list(facts.missing),
        },
    )  # fmt: skip
    if facts.missing:
        there = f"{sys.executable} -m pip list"
        return base.fails(f"there is no package {listed(facts.missing)}", check=there, next_=_REINSTALL)
    if facts.daemon or facts.system != "Linux":
        return base.fails(
            facts.daemon or "the libp2p daemon that hivemind brings is built for Linux",
            check="uname -sm; it needs Linux on x86-64",
            next_="Run the peer on such a machine, or in a container: see docker/README.md",
        )
    if facts.python[:2] > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        remedy = f"Should it fail: python{newest} -m venv .venv, and install swarm there."
        return base.warns(f"nobody has tried it with one above {newest}", next_=remedy)
    return base


def judge_torch(facts: MachineFacts) -> CheckResult:
    """The torch that is installed, beside the GPU that is here. Pure."""
    build = facts.torch
    if build is None:
        return CheckResult(name="torch", found="not installed").fails(
            "every peer computes with it", check=f"{sys.executable} -m pip show torch", next_=_REINSTALL
        )
    said = {"version": build.version, "cuda": build.cuda, "rocm": build.rocm}
    base = CheckResult(name="torch", found=build.words, facts=said)
    if facts.gpu and not (build.cuda or build.rocm):
        return base.warns(
            "there is a GPU, or its driver, and this torch cannot use it",
            check="nvidia-smi",
            next_="Install a torch that can: pip install --force-reinstall torch",
        )
    return base


def judge_memory(facts: MachineFacts) -> CheckResult:
    """The memory that is free, beside what a peer takes before it holds a part. Pure."""
    base = CheckResult(
        name="memory",
        found=f"{size_text(facts.memory_free)} free of {size_text(facts.memory_total)}",
        facts={"free": facts.memory_free, "total": facts.memory_total},
    )
    takes = f"a peer takes {size_text(PEER_MEMORY)} besides its part of the model"
    remedy = "End other programs, or give the container more memory (docker run --memory)."
    if facts.memory_free < PEER_MEMORY:
        return base.fails(takes, check="free -h", next_=remedy)
    if facts.memory_free < SPARE_MEMORY:
        return base.warns(f"{takes}, and little is left for that", check="free -h", next_=remedy)
    return base


def judge_disk(facts: MachineFacts) -> CheckResult:
    """The disk of this machine's peers. Pure."""
    base = CheckResult(
        name="disk",
        found=f"{size_text(facts.disk_free)} free in {facts.disk}",
        facts={"path": str(facts.disk), "free": facts.disk_free},
    )
    place = shlex.quote(str(facts.disk))
    if facts.disk_error:
        cause, remedy = facts.disk_error, "Name a directory in which this user may write: --home DIR"
        return base.fails(
            f"nothing can be written there: {cause}", check=f"ls -ld {place}; df -h {place}", next_=remedy
        )
    remedy = "Make room, or name a directory on another disk: --home DIR"
    if facts.disk_free < LEAST_DISK:
        cause = f"a peer's log and the files of its run take {size_text(LEAST_DISK)} at least"
        return base.fails(cause, check=f"df -h {place}", next_=remedy)
    if facts.disk_free < SPARE_DISK:
        cause = "a checkpoint of its part takes 12 bytes a parameter, and three are kept"
        return base.warns(cause, check=f"df -h {place}", next_=remedy)
    return base


def judge_files(facts: MachineFacts) -> CheckResult:
    """The limit of open files: a peer raises the soft one to the hard one itself. Pure."""
    unlimited = facts.files_hard == resource.RLIM_INFINITY
    base = CheckResult(
        name="open files",
        found="no limit" if unlimited else f"{facts.files_hard:,} at a time",
        facts={"soft": facts.files_soft, "hard": None if unlimited else facts.files_hard},
    )
    remedy = (
        "Raise the limit: LimitNOFILE=65536 of a systemd service, docker run --ulimit nofile=65536:65536, or a line "
        "nofile in /etc/security/limits.conf and a new login."
    )
    if unlimited or facts.files_hard >= SPARE_FILES:
        return base
    if facts.files_hard < LEAST_FILES:
        return base.fails(f"a peer and its daemon take {LEAST_FILES}", check="ulimit -Hn", next_=remedy)
    wants = f"each other peer takes four or five: of 200, {SPARE_FILES}"
    return base.warns(wants, check="ulimit -Hn", next_=remedy)


# --- what a person asked for -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorWishes:
    """What to look at: as ``swarm join`` would be called, and how long it may take."""

    home: Path
    invite: tuple[str, ...] = ()
    device: str = "auto"
    listen: tuple[str, ...] = (ANY_PORT,)
    through: tuple[str, ...] = ()
    threads: int = 1
    limit_s: float = LIMIT_S


def check_wishes(facts: MachineFacts, device: str, listen: Sequence[str]) -> Iterator[CheckResult]:
    """Return what is in the way of this device and these addresses. Binds each port for a moment."""
    yield _check_device(facts, device)
    if tuple(listen) == (ANY_PORT,):  # what reads addresses takes a tenth of all the time there is
        yield CheckResult(name="port", found="any free one, of all interfaces", facts={"listen": list(listen)})
        return
    try:
        check_listen(listen)
    except ConfigError as error:
        yield refused("port", f"cannot listen on {', '.join(listen)}", error)
    else:
        yield CheckResult(name="port", found=f"can listen on {', '.join(listen)}", facts={"listen": list(listen)})


def _check_device(facts: MachineFacts, devices: str) -> CheckResult:
    try:
        check_devices(devices)
    except ConfigError as error:
        return refused("device", f"{devices} cannot be used", error)
    usable = facts.gpu and facts.torch is not None and bool(facts.torch.cuda or facts.torch.rocm)
    found = f"auto: {'a GPU' if usable else 'the CPU'}" if devices == "auto" else devices
    base = CheckResult(name="device", found=found, facts={"device": devices})
    if devices == "cpu" and usable:
        remedy = "Leave --device out, here and of join."
        return base.warns("a GPU is here, and would not be used", check="nvidia-smi", next_=remedy)
    return base


def check_before_start(home: Path, say: Callable[[str, str], None]) -> None:
    """Refuse to start a peer on a machine that cannot run one, and ``say`` a line for each doubt. Takes milliseconds.

    A home that cannot be written into is left to who takes a place there: that error says whose it is. Raises
    CommandError, exit code 5.
    """
    try:
        facts = look(home)
    except OSError:
        return
    results = [result for result in judge_machine(facts) if not (result.name == "disk" and facts.disk_error)]
    raise_first(results)
    for result in results:
        if result.level == "warn":
            say(result.name, f"{result.found}: {result.cause} ({command_name()} doctor)")
