"""What an event is, and who takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

UNSAID: Mapping[str, bool] = MappingProxyType({"unsaid": True})
"""Of a field that is not written where it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``kind`` is the class name."""

    _kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super(Event, cls).__init_subclass__(**kwargs)
        Event._kinds[cls.__name__] = cls

    @staticmethod
    def kinds() -> dict[str, type[Event]]:
        """All event classes by kind, for anyone who reads events back."""
        return dict(Event._kinds)

    @property
    def kind(self) -> str:
        """Name under which the event is stored."""
        return type(self).__name__

    def fields(self) -> dict[str, Any]:
        """The event's own fields as plain data."""
        each = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {field.name: value for field, value in each if value or not field.metadata.get("unsaid")}


class EventSink(Protocol):
    """Where events go. Never blocks and never raises for a full disk: it counts what it dropped."""

    def emit(self, event: Event) -> None:
        """Append one event."""


class NullSink:
    """Throws events away."""

    def emit(self, event: Event) -> None:
        """See :class:`EventSink`."""


EventT = TypeVar("EventT", bound=Event)


@dataclass(slots=True)
class EventList:
    """A sink that keeps what it gets, and tells ``listeners`` at once."""

    events: list[Event] = field(default_factory=list)
    listeners: list[Callable[[Event], None]] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        """See :class:`EventSink`."""
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def of(self, kind: type[EventT]) -> list[EventT]:
        """Return all events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]
