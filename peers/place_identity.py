"""The identity of a place, for people: who a peer will be before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peers.choose import choose_any
from peers.complaint import Complaint
from peers.exit_codes import EXIT_OK, EXIT_USAGE
from peers.names import friendly_name
from peers.places import KEY_FILE, PlaceInfo, list_places, take_place
from peers.words import command_name
from swarm.clock import SystemClock
from swarm.ids import PeerId
from swarm.network.identity import load_or_create


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceIdentity:
    """A place, the peer id of its key, the peer's name (its own, or the one that the id gives), and the key file."""

    place: str
    peer: PeerId
    name: str
    key: Path


def show_identity(home: Path, wanted: str) -> PlaceIdentity:
    """The identity of the place or peer called ``wanted``; makes nothing.

    Raises Complaint when there is no such place or no key in it yet, and ConfigError for a key file that is no good.
    """
    if not list_places(home):
        raise _none_yet(home, wanted)
    place = choose_any(home, wanted, command="id")
    if not (place.path / KEY_FILE).is_file():
        raise _none_yet(home, place.name)
    return _identity_of(place)


def _identity_of(place: PlaceInfo) -> PlaceIdentity:
    key = place.path / KEY_FILE
    peer = load_or_create(key).peer
    name = place.state.name if place.state is not None and place.state.name else friendly_name(peer)
    return PlaceIdentity(place=place.name, peer=peer, name=name, key=key)


def show_identities(home: Path) -> list[PlaceIdentity]:
    """The identity of every place that has one; makes nothing. Raises Complaint when none has, ConfigError for a key
    file that is no good."""
    found = [_identity_of(place) for place in list_places(home) if (place.path / KEY_FILE).is_file()]
    if not found:
        raise _none_yet(home, "1")
    return found


def only_identity(home: Path) -> PlaceIdentity:
    """The identity of the only place that has one. Raises Complaint when none has, and (exit code 2) when several
    have."""
    found = show_identities(home)
    if len(found) == 1:
        return found[0]
    raise Complaint(f"there are {len(found)} places here",
                    check="; ".join(f"{one.place}: {one.name}" for one in found),
                    next_=f"{command_name()} id --json --place {found[0].place}", exit_code=EXIT_USAGE)  # fmt: skip


def create_identity(home: Path, place: str) -> PlaceIdentity:
    """The identity of a place, made when there is none. Raises ConfigError when a running peer has the place and no
    key, when the name cannot be one, or when the disk refuses."""
    known = {one.name for one in list_places(home) if (one.path / KEY_FILE).is_file()}
    if place not in known:
        with take_place(home, place, clock=SystemClock()) as taken:
            load_or_create(taken.identity)
            taken.ended("its identity was made; no peer has run here yet", EXIT_OK)
    return show_identity(home, place)


def _none_yet(home: Path, wanted: str) -> Complaint:
    return Complaint(f"place {wanted} has no identity yet",
                     check=f"places are looked for in {home} (--home, SWARM_HOME)",
                     next_=f"{command_name()} id --place {wanted} --create, or start a peer there")  # fmt: skip
