"""Bring a peer's events to the person or program that started it: in words, as JSON, or only in its file."""

from __future__ import annotations

import logging

from peers.console.event_words import harmless, labelled
from peers.console.narrator import EventPrinter
from peers.console.voice import ConsolePrinter, Speaker
from peers.invites.invite import invite_to
from peers.invites.invite_file import write_invite
from peers.settings import PeerSettings
from swarm.clock import Clock
from swarm.errors import ConfigError
from swarm.events import Event, EventSink, Invited, PeerStarted, PeerStopped, RunFound
from swarm.monitoring.recorder import ENVELOPE, encode_line

logger = logging.getLogger(__name__)


class EventNarration:
    """The sink of one peer's events, and, where they are words, of what is logged until the last of them. A founder's
    invite is added once its run and its addresses are known, also when it came back."""

    def __init__(self, settings: PeerSettings, sink: EventSink, clock: Clock, *, peer: str) -> None:
        self._invites = settings.role == "bootstrap"
        self._run: RunFound | None = None
        self._addresses: tuple[str, ...] = ()
        self._log: LogLines | None = None
        self._file = settings.options.invite_file
        if settings.json_lines:
            self._sink: EventSink = EventLines(sink, ConsolePrinter(), clock, peer=peer)
        elif settings.verbose:
            voice = ConsolePrinter()
            self._sink = EventPrinter(sink, voice, clock, founder=self._invites and not settings.returns)
            self._log = LogLines(voice)
            self._log.open()
        else:
            self._sink = sink

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`."""
        if isinstance(event, PeerStopped) and self._log is not None:
            self._log.close()
        self._sink.emit(event)
        if not self._invites:
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
        self._invites = False
        if self._file is not None:
            try:
                write_invite(self._file, invite.text())
            except ConfigError as error:  # it was looked at before: the disk has filled up, or is gone
                logger.error("nobody can read the invite: %s", error)
        self._sink.emit(Invited(invite=invite.text(), admission=run.admission))


# --- events as lines of JSON -----------------------------------------------------------------------------------------
# On stdout, for a program that started the peer: ``swarm join --json``.


class EventLines:
    """Passes every event on and writes it as the recorder does: ``t``, ``m``, ``peer``, ``kind`` and its fields.

    A reader who stops reading misses lines; ``events.jsonl`` has them all.
    """

    def __init__(self, sink: EventSink, voice: Speaker, clock: Clock, *, peer: str) -> None:
        self._sink, self._voice, self._clock, self._peer = sink, voice, clock, peer

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`. The last event, PeerStopped, closes the voice."""
        self._sink.emit(event)
        line = {"t": self._clock.wall(), "m": self._clock.monotonic(), "peer": self._peer, "kind": event.kind}
        fields = {f"{name}_" if name in ENVELOPE else name: value for name, value in event.fields().items()}
        self._voice.say(encode_line(line | fields).decode().rstrip("\n"))
        if isinstance(event, PeerStopped):
            self._voice.close()


# --- what this program logs ------------------------------------------------------------------------------------------
# On the screen of the person who started a peer, in the columns of everything else there.


_OURS = ("peers", "swarm", "data_shards")


class LogLines(logging.Handler):
    """Says warnings and errors of our own modules from :meth:`open` to :meth:`close`; others have their own ways."""

    def __init__(self, voice: Speaker) -> None:
        super().__init__(logging.WARNING)
        self._voice = voice

    def open(self) -> None:
        """From now on."""
        for name in _OURS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`. A traceback follows on lines of its own."""
        label = "error" if record.levelno >= logging.ERROR else "warning"  # libraries rename the levels
        self._voice.say(labelled(label, harmless(record.getMessage())))
        if record.exc_info:
            self._voice.say((self.formatter or logging.Formatter()).formatException(record.exc_info))

    def close(self) -> None:
        """No more. Idempotent."""
        for name in _OURS:
            logging.getLogger(name).removeHandler(self)
        super().close()
