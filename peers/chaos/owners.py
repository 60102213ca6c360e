"""Whose plays are: told from the labels of what they have made, and whether who made it still lives."""

from __future__ import annotations

import os
from pathlib import Path

_MACHINE, _BOOT = Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")


def owner() -> str:
    """This process, so that no other is ever taken for it: where its number counts (machine, boot, namespace), its
    number, when it began."""
    return f"{_where()}-{os.getpid()}-{_began(os.getpid())}"


def is_dead(who: str) -> bool:
    """Whether the process that :func:`owner` named so is known to be gone. One of another machine, boot or container
    is not known."""
    where, _, process = who.partition("-")
    number, _, began = process.partition("-")
    return where == _where() and number.isdigit() and began != _began(int(number))


def is_of_another_boot(who: str) -> bool:
    """Whether that process was started on this machine at another boot, as far as one can tell: machines that were
    copied have the same number."""
    machine, _, rest = _where().partition(".")
    its, _, its_rest = who.partition("-")[0].partition(".")
    same = bool(machine) and its == machine and its_rest.count(".") == rest.count(".")
    return same and its_rest.partition(".")[0] != rest.partition(".")[0]


def _where() -> str:
    """This machine, this boot, and the namespace that numbers our processes."""
    try:
        machine = _MACHINE.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = ""
    boot = _BOOT.read_text(encoding="ascii").strip().replace("-", "")
    return f"{machine if machine.isalnum() else ''}.{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks since boot, which no clock step moves; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
