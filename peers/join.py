"""``swarm join``: from an invite to a peer that takes part. Everything that can be checked without calling anybody is
checked first, and nothing slow is imported before that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers.join_settings import JoinSettings
from peers.preflight import check_checkpoints, check_device, check_listen
from peers.run_directory import RUNS
from peers.session import Who, aloud, know_thyself, last_event, live, open_session, silent
from peers.settings import exact_settings
from peers.words import ENDED, command_name, print_error
from swarm import __version__
from swarm.clock import SystemClock
from swarm.errors import EXIT_OK

if TYPE_CHECKING:
    from peers.invite import Contacts
    from peers.place_state import PlaceState
    from peers.places import Place
    from peers.settings import PeerSettings


CHECKPOINTS_KEPT = 3
MOST_KNOWN = 8
"""Addresses of a place's own memory that are tried beside those of the invite."""


def join(arguments: Sequence[str], settings: JoinSettings, *, words: bool, json_lines: bool) -> int:
    """Run one peer until its run is over or it has left; returns its exit code, 0 at once where the run has ended on
    this machine before. Blocking.

    ``arguments`` are an invite or multiaddrs; without any, those of ``settings``, else the one in its invite file, when
    there is one. Raises ConfigError, Incompatible or
    Complaint, having dialled nobody, for what cannot be used.
    """
    from peers.invite import contacts_from
    from peers.places import home_directory, take_place

    say = aloud if words else silent
    given = arguments or settings.invite
    if not given and settings.invite_file is not None:
        given = (_awaited(settings.invite_file, say),)
    contacts = contacts_from(given)
    role = settings.part_taken
    say(f"swarm {__version__}", f"joins {contacts.run_name or 'the run of a peer'} as {_title(role)}")
    check_listen(settings.listen)
    check_device(settings.device)
    if settings.checkpoints is not None:
        check_checkpoints(settings.checkpoints)
    words_of_data, data = _checked_data(settings.data) if role == "trainer" else ("", "")
    if words_of_data:
        say("data", words_of_data)
    home = home_directory(settings.home)
    run = contacts.run or ""
    # Before the place is taken: what is known of its last peer goes with that. Who is started again and again by a
    # supervisor is to stop here: there is nobody left to call.
    seen = newest_closing(home, run) if run else None
    if seen is not None and seen.is_last and not _done_again(home, run, seen):
        over, swarm = f"this run ended here at step {seen.step}, its last", command_name()
        again = f"or, if its last steps are done again elsewhere, {swarm} join with an address there for the invite"
        print_error(over, next_=f"{swarm} sample, or {swarm} new for another run; {again}", label="note")
        return EXIT_OK
    if seen is not None and seen.ended:
        going_on = f"{command_name()} new --resume"
        say("known", f"{ENDED} {seen.step}, as a peer here saw: somebody must have gone on with it ({going_on})")
    with take_place(home, settings.place, clock=SystemClock(), run=run, role=role, data=data) as place:
        who = know_thyself(place, settings.name)
        say("identity", who.described())
        say("contact", f"dialling {', '.join(contacts.addresses)}")
        peer = _peer_settings(place, who, contacts, settings)
        place.trains_on(data)
        return live(place, peer.model_copy(update={"verbose": words, "json_lines": json_lines}))


def _awaited(file: Path, say: Callable[[str, str], None]) -> str:
    from peers.invite_file import await_invite, read_invite

    if read_invite(file) is None:
        say("invite", f"waits for one in {file}")
    return await_invite(file).text()


def _peer_settings(place: Place, who: Who, contacts: Contacts, settings: JoinSettings) -> PeerSettings:
    from peers.acquaintances import acquaintances
    from peers.places import home_directory

    role, home = settings.part_taken, home_directory(settings.home)
    # Who was here before can come back through others than those of its invite. Any peer of the run will do: what it
    # serves is checked against the run's id.
    known = acquaintances(place.path, contacts.run, who.peer)[:MOST_KNOWN] if contacts.run is not None else ()
    kept = settings.checkpoints or home / RUNS / "{run}"
    session = open_session(place, who, role=role, run=contacts.run or "", run_name=contacts.run_name or "")
    return exact_settings(
        home=session,
        identity=place.identity.absolute(),
        role=role,
        name=who.name,
        stage=settings.stage,
        bootstrap=tuple(dict.fromkeys((*contacts.addresses, *known))),
        run=contacts.run,
        listen=settings.listen,
        announce=settings.announce,
        relay=settings.relay,
        region=settings.region,
        dial_out_only=settings.dial_out_only,
        device=settings.device,
        threads=settings.threads,
        data=None if settings.data is None else settings.data.absolute(),
        run_directory=kept.absolute(),
        checkpoint_every=settings.checkpoint_every,
        checkpoints_kept=CHECKPOINTS_KEPT,
        max_in_flight=settings.max_in_flight,
        patience_s=None,
        grace_s=settings.grace,
        preemption=settings.preemption,
        preemption_url=settings.preemption_url,
        control=place.control.absolute(),
    )


@dataclass(frozen=True, slots=True)
class Closing:
    """The last step that a peer of this machine saw close: its run's last one, or one that ended the run, or another.
    ``since`` is when the peer was started, ``at`` when it saw it."""

    step: int
    ended: bool
    is_last: bool
    since: float
    at: float

    @property
    def over(self) -> bool:
        """Whether the run was over with it."""
        return self.ended or self.is_last


def newest_closing(home: Path, run: str) -> Closing | None:
    """What the last peers of all places here saw of a run: how it ended, unless one that was started after that saw a
    step close; else the newest step; None when they saw none. Reads events only; those of weeks take seconds."""
    from peers.places import list_places

    closings = (_last_closing(place.state) for place in list_places(home) if place.state and place.state.run == run)
    found = [closing for closing in closings if closing is not None]
    end = max((one for one in found if one.over), key=lambda one: one.at, default=None)
    # Who saw less than the end, though later, was a little behind; unless it came when the run had been gone on with.
    counted = [one for one in found if end is None or one.since > end.at]
    return max(counted, key=lambda one: one.at, default=end)


def _done_again(home: Path, run: str, end: Closing) -> bool:
    """Whether a peer that runs here now was started after a run's end: it must be doing the last steps again."""
    from peers.places import list_places

    states = [place.state for place in list_places(home) if place.live and place.state is not None]
    return any(state.run == run and state.started > end.at for state in states)


def _last_closing(state: PlaceState) -> Closing | None:
    events = Path(state.session) / "events.jsonl"
    closed = last_event(events, "StepClosed", whole=True)
    if closed is None:
        return None
    named = last_event(events, "RunFound", whole=True) or {}
    return Closing(
        step=closed["step"],
        ended=bool(closed.get("ended")),
        is_last=closed["step"] == named.get("steps"),
        since=state.started,
        at=closed.get("t", state.started),
    )


def _checked_data(data: Path | None) -> tuple[str, str]:
    """What a trainer trains on, in words, and its digest: "" for what every trainer has."""
    if data is None:
        return "the text that comes with Python; your own with --data", ""
    # numpy and tokenizers: not for a stage host.
    from peers.data import check_data

    found = check_data(data)
    return f"{data}: {found.words}", found.digest


def _title(role: str) -> str:
    return "a stage host" if role == "stage" else f"a {role}"
