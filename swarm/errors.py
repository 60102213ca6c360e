"""The whole exception tree. Each name says whose fault it is and who handles it.

SwarmError
├── ConfigError        the user's: key, value, what is allowed, what to do; the CLI prints it, exit 2
│   └── Incompatible       what was given belongs to another manifest, tokenizer or version, exit 4
├── PeerError          another peer's or the link's; the caller routes around or ends the run
│   ├── Unreachable        no connection, or it broke before the answer came
│   ├── DeadlineMissed     no answer in time
│   ├── Busy               a bounded queue is full: try another, no punishment
│   ├── WrongStep          the message belongs to a step that is not open there
│   ├── Superseded         a later term, or a newer attempt, has taken the place of what was asked about
│   ├── Refused            a reasoned no
│   └── Violation          it sent what no honest peer sends: oversized, wrong shape, dtype, NaN, forged
├── RoundFailed        an averaging round broke; nobody may apply its result
├── OutOfSync          replicas that must agree do not
├── StateError         weights or a checkpoint that fail verification
├── RunEnded           the run is over for this peer, with a reason and an exit code
└── BugError           ours
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INCOMPATIBLE = 4
EXIT_DRAINED = 75
"""A peer left in order because it was told to stop (EX_TEMPFAIL): its supervisor may start it again, elsewhere."""
EXIT_INTERRUPTED = 130


class SwarmError(Exception):
    """Anything this project raises on purpose."""

    exit_code = EXIT_ERROR


class ConfigError(SwarmError):
    """A setting that cannot be used; the message names key, value, what is allowed and the remedy: what to do or type.

    ``why`` is what is wrong with the value where what is allowed does not say it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, key: str, value: object, allowed: str, remedy: str, *, why: str = "") -> None:
        super().__init__(f"{key} = {value!r}: expected {allowed}{f'; {why}' if why else ''}. {remedy}")
        self.key, self.value, self.allowed, self.remedy, self.why = key, value, allowed, remedy, why


class Incompatible(ConfigError):
    """Both sides are in order, and do not fit together: another manifest, tokenizer or version."""

    exit_code = EXIT_INCOMPATIBLE


class PeerError(SwarmError):
    """Something another peer, or the link to it, did. ``code`` is how it travels on the wire."""

    code = "failed"
    exit_code = EXIT_UNREACHABLE

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


class Violation(PeerError):
    """No honest peer sends this: the stream is closed and nothing of it is kept."""

    code = "violation"


PEER_ERRORS: dict[str, type[PeerError]] = {
    error.code: error
    for error in (PeerError, Unreachable, DeadlineMissed, Busy, WrongStep, Superseded, Refused, Violation)
}


class RoundFailed(SwarmError):
    """An averaging round did not complete. Inputs are kept; nobody may apply any of its output.

    ``peer`` is the member it broke on as seen here; empty when nobody is to blame, or only by another's report.
    ``aborted_by`` is who said that it is void, where it was not found out here. ``differs``: members hold different
    results, and ``peer`` is who holds another than most; who reduced may have given it that.
    """

    def __init__(self, reason: str, *, peer: str = "", aborted_by: str = "", differs: bool = False) -> None:
        super().__init__(f"{peer}: {reason}" if peer else reason)
        self.reason, self.peer, self.aborted_by, self.differs = reason, peer, aborted_by, differs


class OutOfSync(SwarmError):
    """Replicas or records that must be equal are not."""


class StateError(SwarmError):
    """Weights, a checkpoint or a shard failed verification; nothing of it was installed."""


class RunEnded(SwarmError):
    """The run is over for this peer. Raised through the node's task group, printed by the CLI.

    ``check`` says what to look at and ``remedy`` what to do next; empty where there is nothing to say.
    """

    def __init__(self, reason: str, exit_code: int, *, check: str = "", remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code
        self.check, self.remedy = check, remedy


class BugError(SwarmError):
    """An invariant of our own code is broken."""
