"""Which words about waiting a person is told: the same ones, as with each step, not again and again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

AGAIN_S = 60.0
"""The same words are said once in so many seconds, unless there was news of the others meanwhile."""


@dataclass(slots=True)
class Waits:
    """What was said last, and what is held back because it was said lately: a wait that goes on is said in the end."""

    said: str = ""
    until: float = float("-inf")
    held: str = ""

    def begin(self, what: str, now: float) -> bool:
        """Whether to say that this is waited for."""
        lately = what == self.said and now < self.until
        self.held = what if lately else ""
        if not lately:
            self.said, self.until = what, now + AGAIN_S
        return not lately

    def end(self) -> None:
        """Nothing is waited for any more."""
        self.held = ""

    def news(self) -> None:
        """Something was said after which the same words tell something new."""
        self.said = ""

    def due(self, now: float) -> str:
        """What was held back long enough and is waited for still; empty for nothing."""
        if not self.held or now < self.until:
            return ""
        what, self.held = self.held, ""
        self.said, self.until = what, now + AGAIN_S
        return what
