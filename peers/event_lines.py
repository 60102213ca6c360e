"""A peer's events as lines of JSON on stdout, for whoever started it from a program: ``swarm join --json``."""

from __future__ import annotations

from peers.voice import Speaker
from swarm.clock import Clock
from swarm.events import Event, EventSink, PeerStopped
from swarm.monitoring.recorder import ENVELOPE, encode_line


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
