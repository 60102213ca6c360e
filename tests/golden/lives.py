"""What the base commit made of stories on this machine, kept from one comparison to the next.

Below the user's cache directory, a directory for all that decides what comes of a story (:func:`key`) and a file for
each story and seed. What cannot be read, or is not whole, is not there.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

KEPT = 3
"""So many keys, the newest: bases, or stories as they are edited."""
CPU = Path("/proc/cpuinfo")
KERNELS = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")
"""Variables by which torch is told what processor this is."""


def default_place() -> Path:
    """Where a user's caches are."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "swarm-tests" / "golden"


def key(commit: str, definitions: Iterable[Path]) -> str:
    """Of the commit, the files that define the stories, the processor, the interpreter, and all that is installed."""
    installed = sorted({f"{one.name} {one.version}" for one in metadata.distributions()})
    told = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(KERNELS))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in definitions]
    about = [commit, *digests, platform.machine(), _cpu(), sys.version, *installed, *told]
    return f"{commit[:12]}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"


def _cpu() -> str:
    with contextlib.suppress(OSError):
        lines = CPU.read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return platform.processor()


class Lives:
    """The runs of one key. Where nothing can be written, nothing is kept."""

    def __init__(self, place: Path, key: str) -> None:
        self._place, self._mine = place, place / key

    def find(self, story: str, seed: int) -> dict[str, Any] | None:
        """A run that was kept; None where there is none, or another, or half of one."""
        with contextlib.suppress(OSError, EOFError, ValueError, zlib.error):
            digest, _, text = gzip.decompress(self._file(story, seed).read_bytes()).partition(b"\n")
            if digest.decode() == hashlib.sha256(text).hexdigest():
                run = json.loads(text)
                return run if (run["story"], run["seed"]) == (story, seed) else None
        return None

    def keep(self, runs: Iterable[Mapping[str, Any]]) -> None:
        """All of them, each whole or not at all; and no more than :data:`KEPT` keys."""
        with contextlib.suppress(OSError):
            self._mine.mkdir(parents=True, exist_ok=True)
            for run in runs:
                if run["error"] or run["missing"]:
                    continue  # it may be this machine's fault, and is looked at once more
                text = json.dumps(run).encode()
                with tempfile.NamedTemporaryFile(dir=self._mine, prefix=".", delete=False) as file:
                    file.write(gzip.compress(hashlib.sha256(text).hexdigest().encode() + b"\n" + text, 1))
                os.replace(file.name, self._file(run["story"], run["seed"]))
            os.utime(self._mine)
            keys = self._place.glob(f"{'[0-9a-f]' * 12}-{'[0-9a-f]' * 16}")
            for old in sorted(keys, key=lambda path: path.stat().st_mtime)[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def _file(self, story: str, seed: int) -> Path:
        return self._mine / f"{story}-{seed}.json.gz"
