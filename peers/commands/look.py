"""Looking at this machine's peers: what each says about itself, or why it says nothing."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from peers.console.words import CommandError, command_name
from peers.control.client import PATIENCE_S, NotServing, ask
from peers.control.status import AdmissionReport, MemberReport, StatusReport
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_PAUSED, EXIT_UNREACHABLE, worth_a_retry
from peers.home.places import PlaceInfo, look_at_place
from swarm.membership.status_types import DeviceUse, MemoryReport, PartTurnout, VariantReport

LATE_S = 86_400.0
"""How long a peer that ended is of interest to who did not ask for it."""

MAX_KINDS, MAX_KIND_CHARS = 32, 32
"""Of memory, in a peer's answer; a later version may have more than this one knows."""

T = TypeVar("T", StatusReport, MemberReport, PartTurnout, VariantReport, MemoryReport, AdmissionReport, DeviceUse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A place, and the standing of the peer in it. Without one, ``trouble`` says why a live peer gave none."""

    place: PlaceInfo
    standing: StatusReport | None = None
    trouble: CommandError | None = None

    @property
    def phase(self) -> str:
        """The peer's own phase; else ``starting``, ``silent``, ``ended``, ``killed`` or ``unreadable``, as seen from
        outside; also ``paused`` or ``retrying``."""
        state = self.place.state
        if self.place.owner:
            return "unreadable"
        if self.standing is not None:
            return self.standing.phase
        if state is not None and state.end is not None:
            return "ended" if not self.comes_back else "paused" if state.end.exit_code == EXIT_PAUSED else "retrying"
        if not self.place.live:
            return "killed" if state is not None else "unused"
        return "starting" if isinstance(self.trouble, NotServing) else "silent"

    @property
    def comes_back(self) -> bool:
        """True if it has ended, and the process that starts it again is there."""
        state = self.place.state
        if self.place.live or state is None or state.end is None or not state.keeper:
            return False
        again = state.end.exit_code == EXIT_PAUSED or worth_a_retry(state.end.exit_code)
        return again and _older(state.keeper, state.started)

    @property
    def starting(self) -> bool:
        """True if it lives and takes part in nothing yet."""
        return self.phase == "starting"

    def document(self) -> dict[str, Any]:
        """The same as plain data for ``--json``."""
        state = dataclasses.asdict(self.place.state) if self.place.state is not None else {}
        state.pop("schema", None)
        return {
            "place": self.place.name,
            "path": str(self.place.path.absolute()),
            "live": self.place.live,
            "phase": self.phase,
            **state,
            "standing": dataclasses.asdict(self.standing) if self.standing else None,
            "trouble": str(self.trouble) if self.trouble else "",
            "owner": self.place.owner,
        }


def _older(pid: int, started: float) -> bool:
    """Return whether a process is there and was before a time: a younger one only has its number."""
    import psutil

    try:
        return bool(psutil.Process(pid).create_time() <= started)
    except psutil.Error:
        return False


def look_at(place: PlaceInfo, *, timeout_s: float = PATIENCE_S) -> Seen:
    """Ask the peer of a place, when it is live. Blocks for ``timeout_s`` at most; a silent peer is no error."""
    if not place.live:
        return Seen(place=place)
    try:
        answer = ask(place.control, "status", who=place.described, timeout_s=timeout_s)
        return Seen(place=place, standing=standing_from(StatusReport, answer, place.described))
    except CommandError as trouble:
        return Seen(place=place, trouble=trouble)


def look_at_all(places: Sequence[PlaceInfo], *, timeout_s: float = PATIENCE_S) -> list[Seen]:
    """Every place, in order; all are asked at once, so that several silent peers cost ``timeout_s`` together."""
    seen = {place.name: Seen(place=place) for place in places}

    def look(place: PlaceInfo) -> None:
        seen[place.name] = look_at(place, timeout_s=timeout_s)

    threads = [threading.Thread(target=look, args=(place,), daemon=True) for place in places if place.live]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(seen.values())


def check_health(seen: Sequence[Seen], home: Path) -> None:
    """Raises CommandError, exit code 3, unless some peer of these places runs and all that run answer: one that answers
    serves its loop, whatever it waits for. A peer that is still starting is not healthy yet; one that is paused on
    purpose is."""
    live = [one for one in seen if one.place.live]
    if not live and not any(one.phase == "paused" for one in seen):
        raise CommandError("no peer runs here", check=f"places are looked for in {home} (--home, SWARM_HOME)",
                           next_=f"{command_name()} status --all", exit_code=EXIT_UNREACHABLE)  # fmt: skip
    for one in live:
        if one.standing is None:
            why = str(one.trouble) if one.trouble is not None else ""
            raise CommandError(f"{one.place.described} is {one.phase}", check=why, exit_code=EXIT_UNREACHABLE)


def look_at_swarm(place: PlaceInfo) -> tuple[StatusReport, list[MemberReport]] | None:
    """Return the status of a live place's peer, and of the others as it sees them; None while it is starting. Raises
    CommandError when it cannot be asked."""
    try:
        standing = standing_from(StatusReport, ask(place.control, "status", who=place.described), place.described)
        return standing, members_from(ask(place.control, "peers", who=place.described), place.described)
    except NotServing as trouble:
        if Seen(place=look_at_place(place.path), trouble=trouble).starting:
            return None
        raise


def of_late(seen: Sequence[Seen], now: float) -> list[Seen]:
    """Those that live, and those that ended less than :data:`LATE_S` before ``now`` (seconds since the epoch); of one
    that was killed only its start is known. Pure."""
    return [one for one in seen if one.place.live or one.place.owner or _last_known(one.place) > now - LATE_S]


def _last_known(place: PlaceInfo) -> float:
    state = place.state
    if state is None:
        return 0.0
    return state.started if state.end is None else state.end.at


def standing_from(kind: type[T], answer: object, who: str) -> T:
    """A standing out of a peer's answer. Raises CommandError (exit code 4) when a field is missing; more are passed
    over, so that a command can look at a peer of a somewhat later version."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if isinstance(answer, Mapping) and isinstance(parts := answer.get("averaging"), list):
        answer = {**answer, "averaging": [standing_from(PartTurnout, part, who) for part in parts]}
    if isinstance(answer, Mapping) and isinstance(variants := answer.get("variants"), list):
        answer = {**answer, "variants": [standing_from(VariantReport, one, who) for one in variants]}
    if isinstance(answer, Mapping) and answer.get("memory") is not None:
        answer = {**answer, "memory": _memory_from(answer["memory"], who)}
    if isinstance(answer, Mapping) and answer.get("admission") is not None:
        answer = {**answer, "admission": standing_from(AdmissionReport, answer["admission"], who)}
    if isinstance(answer, Mapping) and answer.get("device_use") is not None:
        answer = {**answer, "device_use": standing_from(DeviceUse, answer["device_use"], who)}
    if not isinstance(answer, Mapping) or not fields <= answer.keys():
        raise _unreadable(who)
    return kind(**{name: _frozen(answer[name]) for name in fields})


def _memory_from(answer: object, who: str) -> MemoryReport:
    """Raises CommandError as :func:`standing_from`, also for what is no number of bytes."""
    memory = standing_from(MemoryReport, answer, who)
    for kinds in (memory.predicted, memory.measured):
        if not isinstance(kinds, Mapping) or len(kinds) > MAX_KINDS or max(map(len, kinds), default=0) > MAX_KIND_CHARS:
            raise _unreadable(who)
    sizes = [*memory.predicted.values(), *memory.measured.values(), memory.resident, memory.allocated or 0]
    if not all(type(size) is int and 0 <= size < 1 << 60 for size in sizes):
        raise _unreadable(who)
    return memory


def _unreadable(who: str) -> CommandError:
    return CommandError(f"{who} sent an answer that this version of swarm cannot read",
                        check="was the peer started with another version?",
                        exit_code=EXIT_INCOMPATIBLE)  # fmt: skip


def members_from(answer: object, who: str) -> list[MemberReport]:
    """The swarm out of a peer's answer. Raises CommandError as :func:`standing_from`."""
    members = answer if isinstance(answer, list) else [answer]
    return [standing_from(MemberReport, member, who) for member in members]


def _frozen(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value
