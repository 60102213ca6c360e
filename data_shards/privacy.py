"""Keeps private text out of everything a person or another program may read: representations, errors, events.

Two leaks are easy to miss and are closed here: a dataclass or tensor that prints its contents in a traceback, and an
exception that carries its input (``UnicodeDecodeError.object``, a tokenizer's complaint about a string).
What this cannot hide: a shard's digest and size travel with the run, so somebody who already has the very same text
and tokenizer can confirm that a shard is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swarm.errors import StateError, SwarmError


class Private:
    """Base of objects that hold text or tokens: their representation names the type and the size, never the content.

    A subclass gives ``private_size()``, a text such as ``3 documents``.
    """

    __slots__ = ()

    def private_size(self) -> str:
        """Return how much there is, in words; must not depend on the content in any other way."""
        return "contents withheld"

    def __repr__(self) -> str:
        """Type and size only."""
        return f"<{type(self).__name__}: {self.private_size()}>"

    __str__ = __repr__


@contextmanager
def withhold(doing: str) -> Iterator[None]:
    """Turn any foreign error inside into a StateError that says what was being done and the error's type only.

    The original is cut off (``from None``), because its message, arguments and traceback frames may hold private text.
    Our own errors pass: they are written without content. Interrupts and cancellation pass as well.
    """
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # noqa: BLE001 - a border: nothing foreign may carry text across it
        name = type(error).__name__
        raise StateError(
            f"{doing} failed with {name}; its message is withheld because it may hold private text"
        ) from None
