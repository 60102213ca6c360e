"""The places of one machine's peers: ``HOME/<place>/``, each locked by the process that runs there.

A place keeps its key, and so its peer id, from run to run. The lock is the kernel's and ends with the process, however
that dies. It belongs to the open file (``F_OFD_SETLK``), like flock's, and unlike flock's it can be looked at without
being taken: a command that only reads never stands in the way of a peer that starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pwd
import re
import shlex
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from peers.console.words import CommandError, another_path, command_name, reason_of
from peers.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE, exit_code_of
from peers.home.sessions import founded_in, new_session
from swarm.disk import write_whole
from swarm.errors import ConfigError, SwarmError, Violation
from swarm.parsing import parse_json

if TYPE_CHECKING:
    from swarm.clock import Clock  # it imports asyncio, which a command that only reads does without

LOCK_FILE = "place.lock"
KEY_FILE = "identity.key"
CONTROL_SOCKET = "control.sock"
RUNS, FROZEN = "runs", "frozen"
"""Below a home, beside the places: what this machine's peers keep of each run they joined, and the frozen weights of
all of them."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
# struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid.
_FLOCK = "hhqqi4x"


def home_directory(given: Path | str | None = None) -> Path:
    """Return the directory of this machine's places: ``given``, else $SWARM_HOME, else $XDG_DATA_HOME/swarm or
    ~/.local/share/swarm.

    Nothing is made. Raises ConfigError where this user has no home directory: a container's, say, without HOME.
    """
    named = given if given is not None else os.environ.get("SWARM_HOME") or None
    try:
        if named is not None:
            return Path(named).expanduser()
        data = os.environ.get("XDG_DATA_HOME", "")
        # The XDG specification has relative paths ignored.
        return (Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share") / "swarm"
    except RuntimeError as error:
        raise ConfigError("home", None if named is None else str(named), "a directory for this machine's peers",
                          "Name one with --home or SWARM_HOME.", why=str(error)) from None  # fmt: skip


def home_option(home: Path | None) -> str:
    """Return `` --home HOME`` for a command that is to be typed about this home; "" where the command finds it
    unsaid."""
    if home is None:
        return ""
    with contextlib.suppress(ConfigError):
        if home.absolute() == home_directory().absolute():
            return ""
    return f" --home {shlex.quote(str(home))}"


class HeldPlace:
    """A place that this process holds, ``last`` as its last start left it. Get it from :func:`take_place`; a context
    manager that gives it back."""

    def __init__(self, path: Path, lock: int, clock: Clock) -> None:
        self.path = path
        self._lock, self._clock = lock, clock
        self.last = last = read_state(path)
        self._state = PlaceState(
            pid=os.getpid(), started=clock.wall(), peer=last.peer if last else "", name=last.name if last else ""
        )
        write_state(path, self._state)

    @property
    def name(self) -> str:
        """Its name: ``1``, ``2``, … or the name it was given."""
        return self.path.name

    def name_of(self, peer: str) -> str:
        """Return the name of the peer with that id at its last start here; empty if there was none."""
        return self._state.name if self._state.peer == peer else ""

    @property
    def identity(self) -> Path:
        """The key file; ``swarm.network.libp2p.identity.load_or_create`` makes it at the first start."""
        return self.path / KEY_FILE

    @property
    def control(self) -> Path:
        """The path for the peer's control socket."""
        return self.path / CONTROL_SOCKET

    def open_session(self, *, name: str, peer: str, role: str, run: str = "", run_name: str = "") -> Path:
        """A new directory for this start, ``sessions/<date-time>-<first 8 of the run id>``, noted in ``place.json``.

        The oldest are deleted, as :mod:`peers.home.sessions` says. Raises OSError when the disk refuses.
        """
        session = new_session(self.path, self._clock.wall(), run)
        self._note(name=name, peer=peer, role=role, run=run, run_name=run_name, session=str(session.absolute()))
        return session

    def joined(self, run: str, run_name: str) -> None:
        """Note the run, for who learns it only after the start. Raises OSError when the disk refuses."""
        self._note(run=run, run_name=run_name)

    def trains_on(self, data: str) -> None:
        """Note the digest of what this trainer was given. Raises OSError when the disk refuses."""
        self._note(data=data)

    def kept_by(self, keeper: int) -> None:
        """Note the process that starts this peer again. Raises OSError when the disk refuses."""
        self._note(keeper=keeper)

    def admitted(self, run: str, credential: str) -> None:
        """Keep what admits this place's peer to a run, for when it comes back. Raises OSError when the disk refuses."""
        write_whole(_credential_file(self.path, run), [credential.encode()], mode=0o600)

    def credential(self, run: str) -> str | None:
        """Return what was kept; None where nothing was."""
        return _kept_credential(self.path, run)

    def ended(self, reason: str, exit_code: int) -> None:
        """Note how the peer ended; the place stays taken until :meth:`close`. Raises OSError when the disk refuses."""
        self._note(end=PlaceEnd(reason=reason, exit_code=exit_code, at=self._clock.wall()))

    def close(self) -> None:
        """Give the place back. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> HeldPlace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._state.end is None:
                self._broke_off(error)
        finally:
            self.close()

    def _broke_off(self, error: BaseException) -> None:
        if isinstance(error, SwarmError):
            self.ended(reason_of(error), exit_code_of(error))
        else:
            self.ended(str(error) or type(error).__name__, getattr(error, "exit_code", EXIT_ERROR))

    def _note(self, **changes: object) -> None:
        self._state = dataclasses.replace(self._state, **changes)  # type: ignore[arg-type]
        write_state(self.path, self._state)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInfo:
    """A place as others see it. ``live`` is whether a process holds it now; ``state`` is of that one or of the last.
    ``owner`` is another user, to whom it belongs: nothing of it is read."""

    name: str
    path: Path
    live: bool
    state: PlaceState | None
    owner: str = ""

    @property
    def control(self) -> Path:
        """The path of a live peer's control socket."""
        return self.path / CONTROL_SOCKET

    @property
    def title(self) -> str:
        """The name of the peer there, for people, or its place while it has none."""
        return self.state.name if self.state and self.state.name else f"place {self.name}"

    @property
    def described(self) -> str:
        """The title with what tells it from others: ``brave-otter (place 1, pid 812)``."""
        if self.owner:
            return f"{self.title} (it belongs to {self.owner})"
        pid = f", pid {self.state.pid}" if self.live and self.state else ""
        return f"{self.title} (place {self.name}{pid})" if self.state and self.state.name else f"{self.title}{pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who wants a place: its run, "" while that is not known, and its role there; a digest of a trainer's data; and for
    whom its invite is, "" for one that is for everybody."""

    run: str = ""
    role: str = ""
    data: str = ""
    holder: str = ""


def take_place(home: Path, name: str | None = None, *, clock: Clock, tenant: Tenant = Tenant()) -> HeldPlace:
    """Take the place called ``name``, made when missing, else the first free one of 1, 2, …; never waits.

    Of free ones, that of somebody with the tenant's role in its run comes first: who was killed and is started again
    is who it was, and a trainer goes on in its text. Of several trainers' that is the one with the same data; with
    other data, only the place of a trainer who was alone, who may have changed its text. One that had another role in
    the run is left alone, and by who has an invite for one peer also one that was let in by another's.

    Raises ConfigError when that place is taken (it says by which process) or belongs to somebody else, or when ``home``
    cannot be used: also where another user could read the key there, or put one of his own in its place.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError("place", name, "small letters, digits and dashes, 41 at most", "Choose another name.")
    try:
        _check_home(home)
        if name is None:
            numbers = _numbers(home, tenant)
            return next(place for number in numbers if (place := _take(home / number, clock)) is not None)
        place = _take(home / name, clock)
    except OSError as error:
        raise ConfigError("home", str(home), "a directory of this user on a disk that has file locks",
                          "Choose another with --home or SWARM_HOME.", why=str(error.strerror)) from error  # fmt: skip
    if place is None:
        state, owner = read_state(home / name), _owner_elsewhere(home / name)
        why = f"it belongs to {owner}" if owner else f"process {state.pid if state else '(unknown)'} has it"
        raise ConfigError("place", name, "a place that no other running peer uses",
                          "Leave --place out to get a free one, or choose another name.", why=why)  # fmt: skip
    return place


def list_places(home: Path) -> list[PlaceInfo]:
    """Every place under ``home``, numbers first. Writes nothing and takes no lock. Raises ConfigError when ``home`` is
    there and cannot be read."""
    try:
        found = [path for path in home.iterdir() if _owner_elsewhere(path) or (path / LOCK_FILE).is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        why = str(error.strerror)
        raise ConfigError("home", str(home), "a directory this user can read", another_path(home), why=why) from error
    found.sort(key=lambda path: (not path.name.isdigit(), len(path.name) if path.name.isdigit() else 0, path.name))
    return [look_at_place(path) for path in found]


def look_at_place(path: Path) -> PlaceInfo:
    """One place now. A place whose lock cannot be looked at counts as not live."""
    if owner := _owner_elsewhere(path):
        return PlaceInfo(name=path.name, path=path, live=False, state=None, owner=owner)
    # The lock first: anyone who ends between the two looks is then shown as live, with its end beside it.
    live = _held(path / LOCK_FILE)
    return PlaceInfo(name=path.name, path=path, live=live, state=read_state(path))


def check_nobody_here(home: Path, run: str) -> None:
    """Raises CommandError while a peer of this home is in the run: it is not to be begun a second time beside it."""
    for place in list_places(home):
        if place.live and place.state is not None and place.state.run == run:
            raise runs_still(place)


def runs_still(place: PlaceInfo) -> CommandError:
    """Return the error for a run that is not to be begun alongside the peer of this place, which is in it."""
    swarm, at = command_name(), home_option(place.path.parent)
    return CommandError(f"{place.described} is here, in that run, and runs still",
                        check=f"{swarm} status --peer {place.name}{at}", exit_code=EXIT_USAGE,
                        next_=f"have it leave first: {swarm} drain --peer {place.name}{at}")  # fmt: skip


def cut_off_founding(places: Sequence[PlaceInfo]) -> Path | None:
    """Return the manifest with which the newest founder of these that was killed, or lost its run, comes back to it;
    None where there is no such founder."""
    cut = [(place.state, place.path) for place in places if not place.live and place.state and place.state.run]
    cut = [one for one in cut if one[0].end is None or one[0].end.exit_code not in (EXIT_OK, EXIT_USAGE)]
    cut.sort(key=lambda one: one[0].started, reverse=True)
    return next((file for state, path in cut if (file := founded_in(path, state.run))), None)


def _numbers(home: Path, tenant: Tenant) -> Iterator[str]:
    """The places to try, the best first; without end."""
    places = [place for place in list_places(home) if place.name.isdigit()] if tenant.run else []
    known = {place.name: place.state for place in places if place.state is not None and place.state.run == tenant.run}
    alike = {name: state.data for name, state in known.items() if state.role == tenant.role}
    if tenant.holder:
        let_in = {name: _let_in(home / name, tenant.run) for name in alike}
        own = [name for name in alike if let_in[name] == tenant.holder]  # whatever its data: another would be refused
        yield from sorted(own, key=lambda name: alike[name] != tenant.data)
        alike = {name: had for name, had in alike.items() if not let_in[name]}
    yield from (name for name, had in alike.items() if had == tenant.data or len(alike) == 1)
    yield from (name for name in map(str, count(1)) if name not in known)


def _let_in(place: Path, run: str) -> str:
    """Return for whom the invite was that let this place's peer into the run; "" where none is kept that says it."""
    kept = _kept_credential(place, run)
    if kept is None:
        return ""
    from swarm.security.credentials import credential_of  # not for who has no invite of its own

    try:
        return credential_of(kept).grant.name
    except Violation:
        return ""


def _kept_credential(place: Path, run: str) -> str | None:
    try:
        return _credential_file(place, run).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _credential_file(place: Path, run: str) -> Path:
    return place / f"credential-{run[:16]}.json"


def _take(path: Path, clock: Clock) -> HeldPlace | None:
    """None when another process has it, or another user. Raises OSError for what is no directory, a link to one
    included: the one who made the link would choose where the key lies."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is a link")
    if _owner_elsewhere(path):
        return None
    os.chmod(path, 0o700)
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Only what the lock itself says means that it is taken: a state that cannot be written may say the same.
        if not _lock(lock):
            os.close(lock)
            return None
        return HeldPlace(path, lock, clock)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(lock)
        raise


def _check_home(home: Path) -> None:
    """Raises ConfigError for a home in which another user may do as he likes; one that is not there yet is ours."""
    try:
        found = home.stat()
    except FileNotFoundError:
        return
    own = found.st_uid in (os.geteuid(), 0)  # who is root can take it anyway
    if not own and os.geteuid():
        why = f"it belongs to {_user(found.st_uid)}, who could take this peer's key"
        raise ConfigError("home", str(home), "a directory of this user", "Choose another with --home or SWARM_HOME.",
                          why=why)  # fmt: skip


def _owner_elsewhere(path: Path) -> str:
    """The other user to whom what is under a place's name belongs; "" where that is us, no place, or nothing."""
    try:
        found = path.lstat()
    except OSError:
        return ""
    if (
        path.name == RUNS
        or not _NAME.fullmatch(path.name)
        or not stat.S_ISDIR(found.st_mode)
        or found.st_uid == os.geteuid()
    ):
        return ""
    return _user(found.st_uid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _lock(descriptor: int) -> bool:
    """Return whether the lock is ours now; False when another process has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        kind = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
        return bool(kind != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)


# --- place.json: a place's record of the process that holds it, or held it last ---------------------------------------
# Read by commands that must start fast, hence checked by hand and not by pydantic.


STATE_FILE = "place.json"
STATE_SCHEMA = 1

_MAX_STATE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceEnd:
    """The end of a peer: in words, as an exit code, and its time (seconds since the epoch)."""

    reason: str
    exit_code: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceState:
    """The last peer of a place. Empty text is what is not known yet; ``session`` is the path of its directory;
    ``data`` is the digest of what a trainer was given, empty for what comes with Python.

    ``keeper`` is the process that starts it again after a pause or a crash, 0: none.

    ``started`` is seconds since the epoch. ``end`` is None while it runs, and for ever when it was killed.
    """

    schema: int = STATE_SCHEMA
    pid: int
    started: float
    name: str = ""
    peer: str = ""
    role: str = ""
    run: str = ""
    run_name: str = ""
    session: str = ""
    data: str = ""
    keeper: int = 0
    end: PlaceEnd | None = None


def read_state(place: Path) -> PlaceState | None:
    """The state in a place's directory; None when there is none, or none that can be read."""
    try:
        with (place / STATE_FILE).open("rb") as file:
            document = parse_json(file.read(_MAX_STATE_BYTES))
        return _state(document)
    except (OSError, ValueError, TypeError):
        return None


def write_state(place: Path, state: PlaceState) -> None:
    """Replace the state in a place's directory, whole or not at all. Only for who holds the place's lock.

    Raises OSError when the disk refuses; the old state is there then.
    """
    # One name for ever: only one process writes here, and what a killed one left is written over.
    temporary = place / f".{STATE_FILE}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(state), file, indent=1)
        file.write("\n")
    os.replace(temporary, place / STATE_FILE)


def _state(document: Any) -> PlaceState:
    """Raises ValueError or TypeError for what is no state of ours; keys of a later version are passed over."""
    known = _checked(PlaceState, document)
    end = document.get("end")
    return PlaceState(**known | {"end": None if end is None else PlaceEnd(**_checked(PlaceEnd, end))})


def _checked(kind: type[PlaceState] | type[PlaceEnd], document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise TypeError(f"not a set of fields but {document!r:.60}")
    types: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float)}
    found = {}
    for field in dataclasses.fields(kind):
        if field.name in document and str(field.type) in types:
            value = document[field.name]
            if not isinstance(value, types[str(field.type)]):
                raise TypeError(f"{field.name} is {value!r}")
            found[field.name] = value
    return found
