"""Watching a peer leave: from the order to drain until its process is gone."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from peers.commands.look import look_at
from peers.console.interrupt import Interrupted
from peers.console.words import CommandError, command_name, one_line, report_error
from peers.control.client import ask
from peers.exit_codes import EXIT_DRAINED, EXIT_ERROR, EXIT_OK
from peers.home.places import PlaceInfo, look_at_place

LOOK_EVERY_S = 1.0
"""How often the peer is asked what it still waits for. Its end is seen at once, whatever this is."""

IN_ORDER = (EXIT_OK, EXIT_DRAINED)


def leave(
    places: Sequence[PlaceInfo], say: Callable[[str], None], *, wait: bool
) -> tuple[list[int], list[dict[str, Any]]]:
    """Tell the peers of these places to leave, and with ``wait`` :func:`follow` each that was told; one that fails
    keeps from no other, and is reported. Returns exit codes for a command, and of each peer what it said, as plain
    data. Raises Interrupted, having said of each that it goes on leaving."""
    told, codes = list[tuple[PlaceInfo, dict[str, Any]]](), list[int]()
    peers = list[dict[str, Any]]()
    for place in places:
        peers.append({"peer": place.title, "place": place.name, "said": "", "exit_code": None})
    for place, found in zip(places, peers, strict=True):
        try:
            found["said"] = str(ask(place.control, "drain", who=place.described))
            say(f"{place.title}: {found['said']}")
            told.append((place, found))
        except CommandError as trouble:
            codes.append(_reported(trouble))
    for number, (place, found) in enumerate(told if wait else ()):
        try:
            found["exit_code"] = follow(place, say)
            codes.append(found["exit_code"])
        except CommandError as trouble:
            codes.append(_reported(trouble))
        except Interrupted:
            look = f"{command_name()} status{f' --peer {place.name}' if len(places) == 1 else ''}"
            for one, _ in told[number:]:
                if look_at_place(one.path).live:
                    say(f"{one.title}: goes on leaving; how far it is: {look}")
            raise
    return codes, peers


def _reported(trouble: CommandError) -> int:
    report_error(trouble)
    return trouble.exit_code


def follow(place: PlaceInfo, say: Callable[[str], None], *, look_every_s: float = LOOK_EVERY_S) -> int:
    """Block until the peer that has ``place`` is gone, saying what it waits for whenever that changes.

    Returns the exit code for a command: 0 when it left in order, else its own, with the reason said. Raises
    CommandError (exit code 1) when it ended without a word. There is no deadline: a peer leaves when its step closes.
    """
    said = ""
    with _process(place) as poller:
        while _same(place, now := look_at_place(place.path)):
            seen = look_at(now)
            waits = seen.standing.waiting_for if seen.standing else ""
            if waits and waits != said:
                said = waits
                say(f"{place.title}: waiting: {one_line(waits)}")
            for descriptor, _ in poller.poll(look_every_s * 1000):
                # The lock decides. Should something else still hold it, that is not to be asked without a pause.
                poller.unregister(descriptor)
    return _verdict(place, now, say)


@contextlib.contextmanager
def _process(place: PlaceInfo) -> Iterator[select.poll]:
    """Something whose ``poll`` returns when the peer's process has ended."""
    poller = select.poll()
    descriptor = -1
    # No process of that pid, or one we may not look at (another container): poll() then merely waits its time.
    with contextlib.suppress(OSError):
        if place.state is not None and look_at_place(place.path).live:
            descriptor = os.pidfd_open(place.state.pid)
            poller.register(descriptor, select.POLLIN)
    try:
        yield poller
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _same(place: PlaceInfo, now: PlaceInfo) -> bool:
    """Return whether the peer we watch is still there, and not the next one in its place."""
    if not now.live or now.state is None or place.state is None:
        return now.live
    return (now.state.pid, now.state.started) == (place.state.pid, place.state.started)


def _verdict(place: PlaceInfo, now: PlaceInfo, say: Callable[[str], None]) -> int:
    end = now.state.end if now.state is not None and _same_start(place, now) else None
    if end is None and now.live and not _same_start(place, now):
        say(f"{place.title}: has left; another peer has its place now")
        return EXIT_OK
    if end is None:
        session = place.state.session if place.state else ""
        raise CommandError(f"{place.title} ended without giving a reason: it may have been killed",
                        check=f"{session}/events.jsonl" if session else "", exit_code=EXIT_ERROR)  # fmt: skip
    say(f"{place.title}: has left: {one_line(end.reason)} (exit code {end.exit_code})")
    return EXIT_OK if end.exit_code in IN_ORDER else end.exit_code


def _same_start(place: PlaceInfo, now: PlaceInfo) -> bool:
    return place.state is not None and now.state is not None and place.state.started == now.state.started
