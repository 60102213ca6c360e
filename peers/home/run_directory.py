"""The directory of a run on this machine: where everything lies, and how to find it again."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from peers.console.words import CommandError, another_path, command_name
from peers.exit_codes import EXIT_USAGE
from peers.home.places import FROZEN, RUNS, cut_off_founding, home_directory, home_option, list_places
from swarm.clock import Clock
from swarm.errors import ConfigError
from swarm.schema import TOKENIZER_FILE

OUT = Path("out")
ALLOWED = "a run's directory (swarm quickstart and swarm join make them), or how its id begins: 6 hex digits or more"
_RUN_ID = re.compile(r"[0-9a-f]{6,64}")
_FIRST_LINE = re.compile(r"# run ([0-9a-f]{64})\s*$")


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
        return self.file(TOKENIZER_FILE)

    def file(self, name: str) -> Path:
        """A file that the manifest names by digest: the tokenizer, or what else the model came with."""
        return self.root / name

    @property
    def held_out(self) -> Path:
        """The shard that nobody trains on."""
        return self.root / "shards" / "held-out"

    @property
    def checkpoints(self) -> Path:
        """One directory per step inside."""
        return self.root / "checkpoints"

    @property
    def frozen(self) -> Path:
        """The frozen weights of adapters, of a local run: others have them in their home."""
        return self.root / FROZEN

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
        """The output of the process that starts the peers."""
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
            "--out", str(root), "a directory that does not exist yet", "Name another, what is there stays: --out NEW"
        ) from None
    except OSError as error:
        raise ConfigError(
            "--out", str(root), "a directory that can be made", another_path(root), why=str(error.strerror)
        ) from None
    return RunDirectory(root)


def find_run_directory(given: Path | None, home: Path | str | None = None, *, key: str = "DIR") -> RunDirectory:
    """The directory given, else that of the run whose id begins like this, else the newest run; runs are looked for
    under ``./out`` and in this machine's home. ``key`` is what errors name. Raises ConfigError when there is none such,
    CommandError when there is none at all."""
    if given is None:
        runs = known_runs(home)
        if not runs:
            founding = cut_off_founding(list_places(home_directory(home)))
            again = f"come back to the run founded here: {command_name()} new {shlex.quote(str(founding))}"
            again += f"{home_option(home_directory(home))} (and the options of its peer); or "
            raise CommandError(
                "no run is kept here",
                check=f"runs are looked for in {OUT.absolute()} and in {_joined(home)} (--home, SWARM_HOME)",
                next_=f"{again if founding else ''}"
                f"fetch one from peers that still run: {command_name()} ckpt pull --from INVITE; or gather it "
                "from the run's directories, copied from the machines that keep it: "
                f"{command_name()} ckpt pull --from A --from B; or name the directory of one; or train one: "
                f"{command_name()} quickstart",
                exit_code=EXIT_USAGE,
            )
        return runs[0]
    found = RunDirectory(given)
    there = os.path.exists(given)  # not pathlib's, which raises for a name that is too long
    if not there and _RUN_ID.fullmatch(str(given)):
        return _by_id(str(given), home, key)
    if not os.path.isfile(found.manifest):
        what = "it holds no run.toml" if os.path.isdir(given) else "it is a file" if there else _nowhere(given, home)
        raise _unknown(key, str(given), what)
    return found


def known_runs(home: Path | str | None = None) -> list[RunDirectory]:
    """Every run under ``./out`` and in this machine's home, the newest first. Reads no file. Raises ConfigError where
    the home cannot be read."""
    try:
        files = [file for root in (OUT, _joined(home)) for file in root.glob("*/run.toml")]
        files.sort(key=lambda file: (file.parent.stat().st_mtime_ns, file.parent.name), reverse=True)
    except OSError as error:
        where = Path(error.filename or ".")
        raise ConfigError("home", str(where), "a directory this user can read", another_path(where),
                          why=str(error.strerror)) from None  # fmt: skip
    return [RunDirectory(file.parent) for file in files]


def said_run_id(directory: RunDirectory) -> str:
    """The run id that the first line of ``run.toml`` says, "" when it says none. Cheap and not verified: the id follows
    from the manifest's content."""
    return run_id_in(directory.manifest)


def run_id_in(manifest: Path) -> str:
    """As :func:`said_run_id`, of a manifest wherever it lies. What a run is founded with says it, as nobody types."""
    try:
        with manifest.open(encoding="utf-8", errors="replace") as file:
            found = _FIRST_LINE.match(file.readline(200))
    except OSError:
        return ""
    return found[1] if found else ""


def _by_id(prefix: str, home: Path | str | None, key: str) -> RunDirectory:
    found = [directory for directory in known_runs(home) if said_run_id(directory).startswith(prefix)]
    ids = {said_run_id(directory) for directory in found}
    if len(ids) == 1:
        return found[0]
    raise _unknown(key, prefix, f"{OUT} and {_joined(home)} hold {'several such' if ids else 'none such'}")


def _unknown(key: str, given: str, why: str) -> ConfigError:
    return ConfigError(key, given, f"{ALLOWED}; {why}", f"See which runs are here: {command_name()} ckpt ls")


def _nowhere(given: Path, home: Path | str | None) -> str:
    """Return the directories searched, in words."""
    return f"{given.absolute()} does not exist, and in {OUT} and {_joined(home)} is no run whose id begins like that"


def _joined(home: Path | str | None) -> Path:
    return home_directory(home) / RUNS
