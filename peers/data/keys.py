"""The keys of records that something is made of, and a count of those that nothing is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from data_shards.messages import BESIDE, UnusableRecord
from data_shards.tokenize import Passage
from peers.console.words import count, printable

TEXT_FIELD = "text"
CHAT_FIELDS = ("messages", "conversations")
PAIR = ("prompt", "completion")
"""Of TRL: texts, or lists of messages; the completion is learnt."""
ALPACA = ("instruction", "output", "input", "history")
"""What a user says, with what is in ``input`` on a line of its own, and the answer; turns before them are pairs."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
PREFERENCES = (
    "chosen",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "preferred_output",
    "non_preferred_output",
    "kto_tag",
)
"""Answers of which one is better: to learn them all alike is what nobody wants of them."""
READ = frozenset({TEXT_FIELD, *CHAT_FIELDS, *PAIR, *ALPACA, *BESIDE, *MEDIA, *PREFERENCES, "label"})
"""Columns of a table that are read unless one is named."""

MOST_KEYS = 32
_LONGEST_KEY = 60


@dataclass(slots=True)
class KeyCount:
    """How many records have keys that nothing is made of, by key, for so many keys; ``more`` is how often there were
    others.

    ``unused`` are left out of what a record became, ``refused`` are why one became nothing. ``special`` is how often
    the text of a special token is in plain text and is not taken for one.
    """

    unused: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    special: int = 0
    more: int = 0

    def note(self, key: str, records: int = 1, *, refused: bool = False) -> None:
        """Count records that have the key."""
        named = self.refused if refused else self.unused
        name = printable(key[:_LONGEST_KEY].replace("\n", " "))
        if name in named or len(named) < MOST_KEYS:
            named[name] = named.get(name, 0) + records
        else:
            self.more += records

    def refuse(self, unusable: UnusableRecord) -> None:
        """Count a record that became nothing, where that is a key's doing."""
        if unusable.refused:
            self.note(unusable.refused, refused=True)

    def look_for_special(self, document: str | Passage, special: re.Pattern[str]) -> None:
        """Count the places of special tokens in a text that is taken as ordinary characters; in a passage those that
        begin in it."""
        passage = Passage.of(document)
        found = special.finditer(passage.text)
        self.special += sum(passage.begin <= place.start() < passage.end for place in found)

    def add(self, other: KeyCount) -> None:
        """Count what another has counted."""
        for theirs, refused in ((other.unused, False), (other.refused, True)):
            for key, records in theirs.items():
                self.note(key, records, refused=refused)
        self.special += other.special
        self.more += other.more

    def lines(self, option: str = "") -> list[str]:
        """Return what was not used, in words. ``option`` takes special tokens in text as tokens."""
        said = [f"key {key}: {count(number, 'record')}: not used" for key, number in self.unused.items()]
        said += [f"key {key}: {count(number, 'record')}: left out" for key, number in self.refused.items()]
        if self.more:
            said.append(f"other keys: {count(self.more, 'time')}: not used")
        if self.special:
            taken = f"; {option} takes them as tokens" if option else ""
            places = count(self.special, "place")
            said.append(f"text of special tokens: {places}: taken as ordinary characters{taken}")
        return said

    def words(self, option: str = "") -> str:
        """For behind what is said of the rest, as :meth:`lines`; "" where all was used."""
        return "".join(f"; {line}" for line in self.lines(option))


def is_empty(value: Any) -> bool:
    """Return whether a key says nothing: nothing is lost with it."""
    return value is None or value in ("", [], {})
