"""Timeline of a play, told while it happens: what was struck, and what the swarm did about it."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 10.0
"""Steps are told this often, unless something happened in one."""
COUNTED = {
    "HopMoved": "hops moved",
    "ContributionReplayed": "microbatches replayed",
    "RoundVoid": "averagings void",
    "AttemptFailed": "closings repeated",
}
"""Events that are told as how many there were in a step."""

LONGEST = 150
"""Characters of what a peer said that are told."""
_PEER_ID = re.compile(r"\b12D3Koo\w{45}\b")

Names = Callable[[str], str]


class Timeline:
    """Turns events and strikes into lines for ``say``; ``names`` turns a peer id into a name. From any thread.

    Seconds count from the first closed step, as in the picture; before it, from the start of the play."""

    def __init__(self, say: Callable[[str], None], names: Names) -> None:
        self._say, self._names = say, names
        self._lock = threading.Lock()
        self._began: float | None = None
        self._counts_steps = False
        self._told_at = 0.0
        self._step = 0
        self._counts: Counter[str] = Counter()
        self._seen: set[tuple[str, ...]] = set()
        self._leaving = False
        self.lines: list[str] = []

    def tell(self, wall: float, text: str) -> None:
        """One line now: seconds, the newest step, the text."""
        with self._lock:
            self._tell(wall, text)

    def struck(self, wall: float, text: str) -> None:
        """A strike; what follows is told anew."""
        with self._lock:
            self._seen.clear()
            self._tell(wall, f"▲ {text}")

    def leaving(self, wall: float) -> None:
        """All are told to leave: from here on only that they end. What a swarm that dissolves says of its peers (who is
        missed, who leads) reads like faults, and is none."""
        with self._lock:
            self._tell(wall, "everybody is told to leave, and again when that takes long")
            self._leaving = True

    def heard(self, wall: float, name: str, kind: str, fields: Mapping[str, Any]) -> None:
        """An event of a peer."""
        with self._lock:
            if self._leaving:
                if kind == "PeerStopped":
                    self._tell(wall, f"  {name} has ended")
            elif kind == "StepClosed":
                self._closed(wall, fields)
            elif kind in COUNTED:
                self._counts[kind] += 1
            elif text := self._text(name, kind, fields):
                self._tell(wall, f"  {self._in_words(text)}")

    def _closed(self, wall: float, fields: Mapping[str, Any]) -> None:
        step = int(fields["step"])
        if step <= self._step:
            return
        if not self._counts_steps and fields["tokens"]:
            self._began, self._counts_steps = wall, True
        self._step = step
        notes = [f"{count} {COUNTED[kind]}" for kind, count in self._counts.items()]
        self._counts.clear()
        if notes or wall - self._told_at >= EVERY_S:
            self._told_at = wall
            tokens = int(fields["tokens"])
            text = f"  closed, loss {float(fields['loss']):.3f}, {tokens} tokens" if tokens else "  closed, empty"
            self._tell(wall, f"{text}: {', '.join(notes)}" if notes else text)

    def _tell(self, wall: float, text: str) -> None:
        if self._began is None:
            self._began = wall
        since = f"{'' if self._counts_steps else 'start + '}{wall - self._began:.1f} s"
        line = f"{since:>15}  step {self._step:<4} {text}"
        self.lines.append(line)
        self._say(line)

    def _in_words(self, text: str) -> str:
        """With names for peer ids, and short."""
        text = _PEER_ID.sub(lambda found: self._names(found.group()), text)
        return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"

    def _once(self, *key: str) -> bool:
        """Return whether nobody has told this since the last strike."""
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _text(self, name: str, kind: str, fields: Mapping[str, Any]) -> str:
        said = _WORDS.get(kind)
        if said is None:
            return ""
        if kind in ("PeerLost", "PeerBack"):
            name = self._names(str(fields["peer"]))
        if kind in ("StepGivenUp", "WentBack") and not self._once(kind, str(fields["step"])):
            return ""
        if kind in ("PeerLost", "PeerBack", "TermBegan") and not self._once(kind, name):
            return ""
        return said(name, fields)


def _ready(name: str, fields: Mapping[str, Any]) -> str:
    again = " again" if fields.get("again") else ""
    part = fields.get("part")
    return f"{name} is ready{again}{f' with {part}' if part else ''}, {float(fields['seconds']):.1f} s after it entered"


def _moved(name: str, fields: Mapping[str, Any]) -> str:
    moves = ", ".join(f"{peer} to {part}" for peer, part in fields["moves"].items())
    return f"hosts move with step {fields['step']}: {moves}; {'; '.join(fields['reasons'])}"


_WORDS: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {
    "PeerLost": lambda name, fields: f"{name} is missed: {fields['reason']}",
    "PeerBack": lambda name, fields: f"{name} answers again",
    "PeerReady": _ready,
    "PeerStopped": lambda name, fields: f"{name} has ended: {fields['reason']}",
    "Draining": lambda name, fields: f"{name} leaves in order",
    "DaemonRestarted": lambda name, fields: f"{name} has another daemon after {float(fields['seconds']):.1f} s",
    "TermBegan": lambda name, fields: f"{name} leads from here: {fields['reason']}",
    "CutOff": lambda name, fields: f"{name} was left behind: {fields['reason']}",
    "QuorumLost": lambda name, fields: f"{name} sees {fields['there']} of {fields['voters']}: no majority, it waits",
    "QuorumBack": lambda name, fields: f"{name} sees a majority again after {float(fields['seconds']):.1f} s",
    "LineageBegan": lambda name, fields: f"{name} goes on without a majority, provisionally",
    "LineageGivenUp": lambda name, fields: f"{name} rewinds {fields['microbatches']} microbatches: {fields['reason']}",
    "StepGivenUp": lambda name, fields: f"step {fields['step']} is given up: nobody is left with {fields['lost']}",
    "WentBack": lambda name, fields: f"the run goes back from step {fields['repeats']} to that of {fields['step']}",
    "HostsMoved": _moved,
    "MoveDeclined": lambda name, fields: f"{fields['peer']} does not move to {fields['part']}: {fields['reason']}",
    "DigestMismatch": lambda name, fields: f"{name} found that replicas of {fields['part']} differ",
    "PartsCapped": lambda name, fields: f"{' and '.join(fields['caps'])} is far out, and scaled down by itself",
    "SumLeftOut": lambda name, fields: (
        f"the sum of {fields['peer']} is left out of {fields['part']}: far from the others'"
    ),
    "LossesFarOut": lambda name, fields: (
        f"{fields['microbatches']} microbatches have {fields['loss']:.0f} nats a token"
    ),
    "GradientsFarOut": lambda name, fields: (
        f"{fields['peer']} sends {name} gradients {fields['times']:.0f} times too long"
    ),
    "HopDiffers": lambda name, fields: (
        f"{name} does not believe what {fields['peer']} says that it got or sent at stage {fields['stage']}"
    ),
    "HopAudited": lambda name, fields: (
        ""
        if fields["outcome"] == "passed"
        else f"{name} had stage {fields['stage']} of {fields['peer']} computed again: {fields['outcome']}"
    ),
    "ClosedWithout": lambda name, fields: f"step {fields['step']} closes without {', '.join(fields['late'])}, late",
    "StepHeldUp": lambda name, fields: f"step {fields['step']} waited {fields['seconds']:.1f} s for {fields['peer']}",
    "LeftOutAsSlow": lambda name, fields: f"the run goes on without {fields['peer']}: {fields['reason']}",
    "ProvenWrong": lambda name, fields: f"{fields['peer']} is proven wrong by {' and '.join(fields['by'])}",
    "RecordRefused": lambda name, fields: f"{name} refuses a record of {fields['peer']}: {fields['reason']}",
    "QuotaTaken": lambda name, fields: (
        f"nothing more is taken of {fields['peer']}: {fields['microbatches']} microbatches pull against the others'"
    ),
    "LateWorkLost": lambda name, fields: f"{fields['tokens']} tokens of {fields['peer']} are lost: {fields['reason']}",
    "StateLeftBehind": lambda name, fields: f"{name} ends with the only {fields['part']} of step {fields['step']}",
    "CaughtUp": lambda name, fields: f"{name} caught up with step {fields['step']}, for which it was late",
    "CodecsChanged": lambda name, fields: f"boundaries have other codecs: {fields['why']}",
    "DiskRefused": lambda name, fields: f"the disk of {name} takes nothing more",
    "DiskTook": lambda name, fields: f"the disk of {name} takes again",
    "CheckpointFailed": lambda name, fields: f"{name} could not keep a checkpoint",
    "WorkExcluded": lambda name, fields: f"{name}: work was left out of the step",
}
