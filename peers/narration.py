"""How a peer's events reach the person or program that started it: in words, as JSON, or only in its file."""

from __future__ import annotations

import logging

from peers.event_lines import EventLines
from peers.invite import invite_to
from peers.invite_file import write_invite
from peers.log_lines import LogLines
from peers.narrator import Narrator
from peers.settings import PeerSettings
from peers.voice import Voice
from swarm.clock import Clock
from swarm.errors import ConfigError
from swarm.events import Event, EventSink, Invited, PeerStarted, PeerStopped, RunFound

logger = logging.getLogger(__name__)


class Narration:
    """The sink of one peer's events, and, where they are words, of what is logged until the last of them. A founder's
    invite is added once its run and its addresses are known."""

    def __init__(self, settings: PeerSettings, sink: EventSink, clock: Clock, *, peer: str) -> None:
        self._founds = settings.role == "bootstrap"
        self._run: RunFound | None = None
        self._addresses: tuple[str, ...] = ()
        self._log: LogLines | None = None
        self._file = settings.invite_file
        if settings.json_lines:
            self._sink: EventSink = EventLines(sink, Voice(), clock, peer=peer)
        elif settings.verbose:
            voice = Voice()
            self._sink = Narrator(sink, voice, clock, founder=self._founds)
            self._log = LogLines(voice)
            self._log.open()
        else:
            self._sink = sink

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`."""
        if isinstance(event, PeerStopped) and self._log is not None:
            self._log.close()
        self._sink.emit(event)
        if not self._founds:
            return
        match event:
            case RunFound():
                self._run = event
            case PeerStarted():
                self._addresses = event.addresses
            case _:
                return
        if self._run is not None and self._addresses:
            self._invite(self._run)

    def _invite(self, run: RunFound) -> None:
        try:
            invite = invite_to(run.run, run.name, self._addresses)
        except ConfigError:
            # None of its addresses can be dialled: what it listens on has been told.
            return
        self._founds = False
        if self._file is not None:
            try:
                write_invite(self._file, invite.text())
            except ConfigError as error:  # it was looked at before: the disk has filled up, or is gone
                logger.error("nobody can read the invite: %s", error)
        self._sink.emit(Invited(invite=invite.text()))
