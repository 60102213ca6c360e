"""What is meant to differ from the base commit, each with the reason.

    EXPECTED = (Expected("events", "kill-*", "HopMoved", "a hop that was moved is told once, by its trainer"),)

A commit that is meant to change something names it here, weights included. The next commit moves :data:`BASE` to it and
empties :data:`EXPECTED`. A line without a difference is an error: it would hide the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

BASE = "891faa33686afeb3a12f731b3ce6c7fdf1689356"
"""The commit that everything is compared with: the last that changed what peers do. It plays today's stories with its
own ``names.py``."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A named difference. Stories and names are patterns as for files.

    ``weights``: parts of the name ``name`` may end with other weights; what is told of losses and digests is left out.
    ``events``: events of the kind ``name`` are left out of both sides' sequences; of ``*`` none is compared.
    ``counts``: another number of ``name`` is allowed, a kind of event or message.
    """

    what: Literal["weights", "events", "counts"]
    story: str
    name: str
    reason: str

    def is_of(self, story: str) -> bool:
        """Whether it is about this story."""
        return fnmatchcase(story, self.story)

    def covers(self, what: str, name: str) -> bool:
        """Whether it names this difference, of a story that it is about."""
        return self.what == what and fnmatchcase(name, self.name)


EXPECTED: tuple[Expected, ...] = ()
