"""One start of a peer in a place of this machine: from its place to how it ended."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers.console.event_words import labelled
from peers.console.interrupt import defer
from peers.console.words import command_name, print_error
from peers.exit_codes import EXIT_ERROR, EXIT_PAUSED
from peers.home.identity import friendly_name
from peers.home.last_events import last_event
from peers.home.places import HeldPlace
from peers.settings import VOTE_FILE, PeerSettings
from swarm.errors import ConfigError
from swarm.ids import PeerId

if TYPE_CHECKING:
    from peers.household import Hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """The identity of this peer: its id, its name, and whether its key was made just now."""

    peer: PeerId
    name: str
    new: bool
    key: Path

    def described(self) -> str:
        """The whole of it in words."""
        return f"{self.name}, {self.peer} ({'new' if self.new else 'known'}: {self.key})"


def load_identity(place: HeldPlace, name: str | None) -> Who:
    """The identity of a place, made now at the first start there, under its last name unless ``name`` gives another.
    Raises ConfigError for a key file that is no good."""
    from swarm.network.libp2p.identity import load_or_create

    new = not place.identity.exists()
    peer = load_or_create(place.identity).peer
    return Who(peer=peer, name=name or place.name_of(peer) or friendly_name(peer), new=new, key=place.identity)


def open_session(place: HeldPlace, who: Who, *, role: str, run: str = "", run_name: str = "") -> Path:
    """The directory of this start. Raises ConfigError when the disk refuses."""
    try:
        return place.open_session(name=who.name, peer=who.peer, role=role, run=run, run_name=run_name).absolute()
    except OSError as error:
        raise ConfigError(
            "--home",
            str(place.path),
            "a directory with room for a session",
            "Make room, or choose another with --home.",
            why=str(error.strerror),
        ) from None


def live(place: HeldPlace, settings: PeerSettings, hosts: Hosts | None = None) -> int:
    """Run the peer, and where there are any the ``hosts`` beside it in its process, to its end and note in the place
    how it ended; returns the exit code. Blocking.

    Imports torch and hivemind: some seconds.
    """
    from peers.node import run_peer

    # An exception inside its event loop would be lost: a signal from here on is an order to the peer, which takes also
    # what comes before it listens, and none cuts in until its end is noted.
    defer()
    warn_of_copy(place)
    if settings.back is not None:
        place.kept_by(settings.back.keeper)
    code = run_peer(settings) if hosts is None else run_peer(settings, hosts)
    note_end(place, settings, code)
    return code


def note_end(place: HeldPlace, settings: PeerSettings, code: int | None = None) -> None:
    """Note in the place how its peer ended, as its last event and the exit code say, which is that event's by
    default."""
    last = last_event(settings.home / "events.jsonl", "PeerStopped")
    found = last_event(settings.home / "events.jsonl", "RunFound", whole=True)
    reason = str(last.get("reason", "")) if last is not None else ""
    code = int(last.get("exit_code", EXIT_ERROR) if last is not None else EXIT_ERROR) if code is None else code
    if code == EXIT_PAUSED and (paused := last_event(settings.home / "events.jsonl", "Paused", whole=True)):
        reason = f"paused, {paused.get('reason', '')}: {reason}"
    # A full disk: `swarm status` will not know how this one ended, and the exit code still says it.
    with contextlib.suppress(OSError):
        if found is not None:
            place.joined(str(found.get("run", "")), str(found.get("name", "")))
        place.ended(reason, code)


def warn_of_copy(place: HeldPlace) -> None:
    """Say so where this place is a copy of one that has been in a run: two peers must not run with one key, and what
    the other voted since is not known here. Imports what the run does."""
    from swarm.consensus.ballot import VoteFile

    if not VoteFile(place.identity.with_name(VOTE_FILE)).written_elsewhere():
        return
    home, swarm = shlex.quote(str(place.path.parent)), command_name()
    ended = place.last is not None and place.last.end is not None
    how = "after its peer had ended" if ended else "while its peer ran, or after it was killed"
    print_error(
        f"place {place.name} in {home} seems to be a copy: what its peer voted last was written in another directory, "
        "or on a disk that had another number. Until the run has taken it in anew it votes on nothing: what was voted "
        "there since is not known here",
        check=f"it was copied {how}. Does the peer run there still? Two with one key put each other out of the run",
        next_=f"end it there and start it in one place only. To move a home: {swarm} drain --all there; once {swarm} "
        f"status there says that all have ended, copy it whole (tar, rsync -a), remove it there, and start here",
        label="note",
    )


def echo(label: str, text: str) -> None:
    """Say a line before there is a narrator."""
    sys.stdout.write(labelled(label, text) + "\n")
    sys.stdout.flush()


def silent(label: str, text: str) -> None:
    """Say nothing: for those who asked for quiet or for JSON."""
