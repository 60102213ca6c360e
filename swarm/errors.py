"""The whole exception tree. Each name says whose fault it is and who handles it.

SwarmError
├── ConfigError        the user's: key, value, what is allowed, what to do
│   └── Incompatible       what was given belongs to another manifest, tokenizer or version
│       └── OtherWire          it was made for another wire version
├── PeerError          another peer's or the link's; the caller routes around or ends the run
│   ├── Unreachable        no connection, or it broke before the answer came
│   ├── DeadlineMissed     no answer in time
│   ├── Busy               a bounded queue is full: try another, no punishment
│   ├── WrongStep          the message belongs to a step that is not open there
│   ├── Superseded         a later term, or a newer attempt, has taken the place of what was asked about
│   ├── Refused            a reasoned no
│   │   └── Unadmitted         the caller is nobody there yet: its credential is to be shown first
│   └── Violation          it sent what no honest peer sends: oversized, wrong shape, dtype, NaN, forged
│       └── SpeaksOtherWire    found here and not told: its frames are of another wire version
├── RoundFailed        an averaging round broke; nobody may apply its result
├── OutOfSync          replicas that must agree do not
├── StateError         weights or a checkpoint that fail verification
├── RunEnded           the run is over for this peer, with a reason and how it ends
└── BugError           ours

An application turns the ``ending`` of an error into an exit code, and an :class:`Advice` in its text into commands.
"""

from __future__ import annotations

import re
import shlex
import sys
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from swarm import WIRE_VERSION


class Ending(Enum):
    """How a peer or a command ends with an error, or without one."""

    DONE = "done"
    FAILED = "failed"
    MISUSED = "misused"
    """Its user gave what cannot be used."""
    UNREACHABLE = "unreachable"
    """Other peers failed, or cannot be reached."""
    INCOMPATIBLE = "incompatible"
    DRAINED = "drained"
    """It left in order because it was told to stop: its supervisor may start it again, elsewhere."""
    PAUSED = "paused"
    """It left in order because its machine is wanted for something else: it comes back when that is over."""


class Advice(StrEnum):
    """What a person can do or look at. Each is a sentence of its own that names no command: an application that has
    commands finds it in an error's text, and says it with them."""

    NEW_INVITE = "Ask somebody in the run for a new invite."
    NEW_GRANT = "Ask an issuer of the run for a new invite."
    JOIN_ANEW = "Ask somebody in the run for a new invite, and join with that one."
    JOIN_FOUNDER = "Join with an invite from the founder, or from another peer that waits."
    FOUND_AGAIN = (
        "Have the founder start the same run again, on its machine, with the same files. At the same port the invite "
        "stays good; at another one it prints a new one."
    )
    WHICH_VERSION = "which version runs there, and which here?"
    SAME_VERSION = "Update the older of the two. Found the run again where it was. Ask there for the new invite."
    WHAT_IS_KEPT = "which step is complete, on one machine or on several together?"
    RESUME = "Start the run again from its newest checkpoint."
    SAY_SO = "have a person who takes part say so"
    GO_ON = "to go on, found it again from its newest checkpoint"
    PORT = "can they reach a port of this machine, opened in the firewall?"
    RELAY = "Open a port, or let a peer relay for this one."
    RELAY_THERE = "Start a relay there, and give the address that it prints."
    OTHER_HOME = "Look at that history; then give this peer a new home."
    PROVEN_WRONG = "look at the proof in the run's history, and check this machine"
    DAMAGED_STEP = "Use the step before it, or copy the damaged file from another peer."


def install_command(extra: str) -> str:
    """Return what a person types to install an extra of this project for the Python that runs: from the locks of the
    checkout whose environment that is, else with pip."""
    root = Path(__file__).resolve().parents[1]
    if (root / "locks").is_dir() and Path(sys.prefix).resolve() == (root / ".venv").resolve():
        return f"make -C {shlex.quote(str(root))} setup EXTRAS={extra}"
    source = str(root) if (root / "pyproject.toml").is_file() else "swarm-trainer"
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(f'{source}[{extra}]')}"


_INVITE = re.compile(r"\b(swarm[0-9]{1,4}:[\w-]{53})[\w-]+")
"""An invite may hold a key: where one was typed in another's place, its beginning says which it was."""


def _shortened(said: Any) -> Any:
    return _INVITE.sub(r"\1…", said) if isinstance(said, str) else said


class SwarmError(Exception):
    """Anything this project raises on purpose."""

    ending = Ending.FAILED


class ConfigError(SwarmError):
    """A setting that cannot be used; the message names key, value, what is allowed and the remedy: what to do or type.

    ``why`` is what is wrong with the value where what is allowed does not say it.
    """

    ending = Ending.MISUSED

    def __init__(self, key: str, value: object, allowed: str, remedy: str, *, why: str = "") -> None:
        value, allowed, remedy, why = map(_shortened, (value, allowed, remedy, why))
        super().__init__(_shortened(f"{key} = {value!r}: expected {allowed}{f'; {why}' if why else ''}. {remedy}"))
        self.key, self.value, self.allowed, self.remedy, self.why = key, value, allowed, remedy, why


class Incompatible(ConfigError):
    """Both sides are in order, and do not fit together: another manifest, tokenizer or version."""

    ending = Ending.INCOMPATIBLE


class OtherWire(Incompatible):
    """A run, or a file of one, of another wire version than ours; ``origin`` is what says so."""

    def __init__(self, wire: int, origin: str) -> None:
        made_by = "a newer" if wire > WIRE_VERSION else "an older"
        super().__init__(
            "run.wire",
            wire,
            f"{WIRE_VERSION}, the wire version of this swarm",
            "Update swarm on this machine." if wire > WIRE_VERSION else "Go on with it in the swarm that made it.",
            why=f"{origin} is of {made_by} version of swarm",
        )
        self.wire, self.origin = wire, origin


class PeerError(SwarmError):
    """Something another peer, or the link to it, did. ``code`` is how it travels on the wire."""

    code = "failed"
    ending = Ending.UNREACHABLE

    def __init__(self, reason: str, *, peer: str = "") -> None:
        super().__init__(f"{peer}: {reason}" if peer else reason)
        self.reason, self.peer = reason, peer

    @staticmethod
    def from_code(code: str, reason: str, peer: str = "") -> PeerError:
        """The error that travelled as ``code``; an unknown code gives a plain PeerError."""
        return PEER_ERRORS.get(code, PeerError)(reason, peer=peer)


class Unreachable(PeerError):
    """No connection, or it broke before the answer."""

    code = "unreachable"


class DeadlineMissed(PeerError):
    """No answer in time. The work may or may not have been done."""

    code = "deadline"


class Busy(PeerError):
    """A bounded queue is full. Route around it; do not punish."""

    code = "busy"


class WrongStep(PeerError):
    """The message belongs to a step that is not open at the receiver."""

    code = "wrong_step"


class Superseded(PeerError):
    """A later term of the step, or a newer attempt of its leader, has taken the place of what was asked about."""

    code = "superseded"


class Refused(PeerError):
    """A reasoned no to a well-formed request."""

    code = "refused"


class Unadmitted(Refused):
    """Nobody knows the caller there: it has shown no credential, or one that does not count."""

    code = "unadmitted"


class Violation(PeerError):
    """No honest peer sends this: the stream is closed and nothing of it is kept."""

    code = "violation"


class SpeaksOtherWire(Violation):
    """Its frames are of another wire version than ours. Travels as a violation: the other side could not read more."""


PEER_ERRORS: dict[str, type[PeerError]] = {
    error.code: error
    for error in (PeerError, Unreachable, DeadlineMissed, Busy, WrongStep, Superseded, Refused, Unadmitted, Violation)
}


class RoundFailed(SwarmError):
    """An averaging round did not complete. Inputs are kept; nobody may apply any of its output.

    ``peer`` is the member it broke on as seen here; empty when nobody is to blame, or only by another's report.
    ``aborted_by`` is who said that it is void, where it was not found out here. ``differs``: members hold different
    results, and ``peer`` is who holds another than most; who reduced may have given it that. ``proven``: to the bit, or
    by its own signatures, it was found here that ``peer`` lied.
    """

    def __init__(
        self, reason: str, *, peer: str = "", aborted_by: str = "", differs: bool = False, proven: bool = False
    ) -> None:
        super().__init__(f"{peer}: {reason}" if peer else reason)
        self.reason, self.peer, self.aborted_by = reason, peer, aborted_by
        self.differs, self.proven = differs, proven


class OutOfSync(SwarmError):
    """Replicas or records that must be equal are not."""


class StateError(SwarmError):
    """Weights, a checkpoint or a shard failed verification; nothing of it was installed."""


class RunEnded(SwarmError):
    """The run is over for this peer. Raised through the node's task group.

    ``check`` says what to look at and ``remedy`` what to do next; empty where there is nothing to say.
    """

    def __init__(self, reason: str, ending: Ending, *, check: str = "", remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.ending = ending
        self.check, self.remedy = check, remedy


class BugError(SwarmError):
    """An invariant of our own code is broken."""
