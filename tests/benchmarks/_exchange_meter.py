"""What one peer of the benchmark ``allreduce`` uses in a round: CPU seconds, memory, bytes its daemon writes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks._pipeline_load import cpu_seconds

_PEAK_RESET = "5"  # proc(5): /proc/pid/clear_refs, since Linux 4.0


class Meter:
    """For one peer, whose processes are ``pids``: role → ids; ``daemon`` is the one that has the network.

    Memory is a process's resident set: its largest in a round (VmHWM, which the kernel keeps and a write resets), less
    what it was when the inputs were there and no round had been. So what a round leaves behind counts in the next.
    """

    def __init__(self, pids: Mapping[str, Sequence[int]], elements: int) -> None:
        self._pids, self._elements = pids, elements
        self._resident = {pid: _status(pid, "VmRSS") for pid in self._all}
        self._cpu: dict[str, float] = {}
        self._written = 0

    @property
    def _all(self) -> list[int]:
        return [pid for pids in self._pids.values() for pid in pids]

    def begin(self) -> None:
        """A round is about to begin."""
        for pid in self._all:
            Path(f"/proc/{pid}/clear_refs").write_text(_PEAK_RESET, encoding="ascii")
        self._cpu, self._written = cpu_seconds(self._pids), self._written_bytes()

    def end(self) -> dict[str, Any]:
        """What the round took. ``wire_bytes``: half of what the daemon wrote, which is what it sent to others and, as
        much again where all members do the same, what it handed to its peer; headers and encryption count.
        ``extra_memory`` is a share of the vector, without one output vector; the daemons' apart."""
        cpu, written = cpu_seconds(self._pids), self._written_bytes()
        grown = {
            role: sum(_status(pid, "VmHWM") - self._resident[pid] for pid in pids) for role, pids in self._pids.items()
        }
        daemon, vector = grown.pop("daemon"), 4 * self._elements
        return {
            "cpu_s": sum(cpu[role] - self._cpu[role] for role in cpu),
            "extra_memory": sum(grown.values()) / vector - 1,
            "extra_daemon": daemon / vector,
            "wire_bytes": (written - self._written) / 2,
        }

    def _written_bytes(self) -> int:
        return sum(_io(pid) for pid in self._pids["daemon"])


def family(root: int = 0) -> list[int]:
    """This process and all that it started."""
    import psutil

    process = psutil.Process(root or os.getpid())
    return [process.pid, *(child.pid for child in process.children(recursive=True))]


def _status(pid: int, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, f"no {key} of {pid}: it has ended"
    return int(found[1]) * 1024


def _io(pid: int) -> int:
    found = re.search(r"^wchar: (\d+)$", Path(f"/proc/{pid}/io").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1])
