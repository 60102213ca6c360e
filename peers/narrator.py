"""What a peer in the foreground tells the person who started it: the same events as everybody else reads, as lines."""

from __future__ import annotations

from swarm.events import Event, EventSink, PeerLost, PeerReady, PeerStarted, RunStarted, StepClosed


class Narrator:
    """Passes every event on, and prints some of them."""

    def __init__(self, name: str, sink: EventSink) -> None:
        self._name, self._sink = name, sink

    def emit(self, event: Event) -> None:
        """See :class:`~swarm.events.EventSink`."""
        self._sink.emit(event)
        text = _words(event)
        if text is not None:
            print(f"{self._name}: {text}", flush=True)  # noqa: T201 - a foreground peer's only voice


def _words(event: Event) -> str | None:
    match event:
        case PeerStarted():
            addresses = "\n  ".join(event.addresses)
            return f"listening; others reach this peer with --bootstrap\n  {addresses}\nwaiting for the run to start"
        case PeerReady():
            return f"holds {event.part or 'no part of the model'}, ready after {event.seconds:.1f} s"
        case RunStarted():
            return f"run {event.run[:12]} has started with {len(event.roster)} peers and {event.stages} stages"
        case StepClosed():
            return f"step {event.step} closed: loss {event.loss:.3f}, {event.tokens} tokens in {event.seconds:.1f} s"
        case PeerLost():
            return f"{event.name} ({event.peer}) is lost: {event.reason}"
        case _:
            return None
