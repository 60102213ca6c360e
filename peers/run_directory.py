"""The directory of one local run: where everything lies, and how to find it again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from peers.places import home_directory
from peers.words import command_name
from swarm.clock import Clock
from swarm.errors import ConfigError

OUT = Path("out")
RUNS = "runs"
"""Below a home: what this machine's peers keep of each run they joined."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths only; nothing here reads or writes."""

    root: Path

    @property
    def manifest(self) -> Path:
        """The run manifest."""
        return self.root / "run.toml"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that the manifest names by digest."""
        return self.root / "tokenizer.json"

    @property
    def held_out(self) -> Path:
        """The shard that nobody trains on."""
        return self.root / "shards" / "held-out"

    @property
    def checkpoints(self) -> Path:
        """One directory per step inside."""
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        """The JSON report."""
        return self.root / "report.json"

    @property
    def plot(self) -> Path:
        """The loss curve."""
        return self.root / "loss.svg"

    @property
    def launch_log(self) -> Path:
        """What the process that starts the peers prints."""
        return self.root / "launch.log"

    def shard(self, trainer: int) -> Path:
        """The private shard of one trainer."""
        return self.root / "shards" / f"trainer-{trainer}"

    def home(self, peer: str) -> Path:
        """A peer's own directory."""
        return self.root / "peers" / peer

    def events(self, peer: str) -> Path:
        """A peer's events."""
        return self.home(peer) / "events.jsonl"


def create_run_directory(out: Path | None, clock: Clock) -> RunDirectory:
    """Make a new directory for a run, ``out/<date-time>`` unless ``out`` says where.

    Never uses one that exists: raises ConfigError then, and when it cannot be made.
    """
    stamp = datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%d-%H%M%S")
    root = out if out is not None else OUT / stamp
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(
            "--out", str(root), "a directory that does not exist yet", "Remove it or name another."
        ) from None
    except OSError as error:
        raise ConfigError(
            "--out", str(root), "a directory that can be made", f"{error.strerror}; name another."
        ) from None
    return RunDirectory(root)


def find_run_directory(given: Path | None) -> RunDirectory:
    """The directory given, or the newest run under ``./out`` and in this machine's home. Raises ConfigError when there
    is none."""
    if given is None:
        joined = home_directory() / RUNS
        runs = [path.parent for root in (OUT, joined) for path in root.glob("*/run.toml")]
        if not runs:
            remedy = f"There is none. Train one: {command_name()} quickstart, or name its directory."
            raise ConfigError("DIR", f"{OUT} or {joined}", "a directory that holds runs", remedy)
        given = max(runs, key=lambda path: (path.stat().st_mtime_ns, path.name))
    found = RunDirectory(given)
    if not found.manifest.is_file():
        what = "It holds no run.toml" if given.is_dir() else "It is a file" if given.exists() else "It does not exist"
        raise ConfigError(
            "DIR", str(given), "a directory that swarm quickstart or swarm join made", f"{what}: check the path."
        )
    return found
