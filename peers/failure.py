"""Which peer is to blame when a local run breaks: the first to go, not the ones that ended because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.launch import PeerExit
from peers.run_view import Stopped

_TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Blame:
    """The peer and why, in words that follow its name."""

    name: str
    reason: str


def blame(
    exits: Sequence[PeerExit], stopped: Mapping[str, Stopped], lost: Mapping[str, str], last_words: Mapping[str, str]
) -> Blame | None:
    """Pick one peer out of those that ended badly, or None when none did.

    Peers that lose another end with an error of their own, so in this order: one killed by a signal (it could not even
    say so), one that ended without a last word, the first that the others report as lost (``lost``: names in the order
    of the reports, with reasons), the earliest last word with an error.
    """
    killed = [exit_ for exit_ in exits if exit_.code < 0]
    mute = [exit_ for exit_ in exits if exit_.code > 0 and exit_.name not in stopped]
    if killed or mute:
        first = (killed or mute)[0]
        words = f": {last_words[first.name]}" if last_words.get(first.name) else ""
        return Blame(first.name, str(first).removeprefix(first.name).strip() + words)
    wrong = {name: last for name, last in stopped.items() if last.exit_code}
    for name, reason in lost.items():
        return _in_its_words(name, wrong) or Blame(name, f"was lost: {reason}")
    if wrong:
        return _in_its_words(min(wrong, key=lambda name: (wrong[name].wall, name)), wrong)
    bad = next((exit_ for exit_ in exits if exit_.code), None)
    return Blame(bad.name, str(bad).removeprefix(bad.name).strip()) if bad else None


def _in_its_words(name: str, wrong: Mapping[str, Stopped]) -> Blame | None:
    last = wrong.get(name)
    return Blame(name, f"ended the run: {last.reason} (exit code {last.exit_code})") if last else None


def last_words(log: Path) -> str:
    """The last line that a peer printed, which after a crash is the exception; empty when there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
