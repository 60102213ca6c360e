"""The ``step/1`` and ``lead/1`` protocols: leases, completions, and the questions with which a leader closes a step.

Each carries the term of the leader that asks, or is asked: a lower one than the receiver knows is Superseded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from swarm.consensus.acceptor import NO_EVIDENCE, BranchHead, RecordEvidence, SignedPromise, Vote
from swarm.consensus.changes import NO_CHANGES, Admission, Changes, Departure
from swarm.consensus.faults import MAX_FAULTS, Fault, HopFault
from swarm.consensus.records import (
    MAX_PACE_US,
    MAX_VOTERS,
    CloseRecord,
    Committed,
    Contribution,
    GradientLengths,
    Guarded,
    MeasuredLink,
    Quarantined,
    SquaredNorm,
)
from swarm.consensus.trials import Words
from swarm.ids import PeerId
from swarm.network.protocols import Rpc
from swarm.schema import (
    LISTED,
    Count,
    DigestField,
    Empty,
    Message,
    MicrobatchField,
    PartField,
    PeerIdField,
    SignatureField,
)
from swarm.security.credentials import Credential
from swarm.step.turnout import MAX_TOLD, REASON_CHARS


class Lease(Message):
    """A trainer wants ``total`` microbatches of a step in all."""

    step: Count
    term: Count
    total: Count


class Leased(Message):
    """What is leased to the trainer in all, and why not more."""

    total: Count
    reason: Annotated[str, StringConstraints(max_length=200)]


class SignedReceipt(Message):
    """A replica's signature that it added a microbatch, and the digest that it signs of what it got and sent: of the
    text nobody can check a guess by it (:func:`~swarm.pipeline.seals.told_digest`)."""

    digest: Annotated[bytes, Field(min_length=32, max_length=32)]
    signature: SignatureField


class Complete(Message):
    """A journey came home; ``receipts`` are the replicas' in the order of the stages."""

    step: Count
    term: Count
    contribution: Contribution
    receipts: Annotated[tuple[SignedReceipt, ...], Field(max_length=1024)]


class Quarantine(Message):
    """No replica could compute this microbatch; it is not counted, and another may be leased for it."""

    step: Count
    term: Count
    aside: Quarantined


class ResumeTrainer(Message):
    """A trainer tells a leader that does not know it what it has begun in the step, in the order of its shard; what
    was put aside of it is listed, what is complete is reported afterwards."""

    step: Count
    term: Count
    started: Annotated[tuple[MicrobatchField, ...], LISTED]
    aside: Annotated[tuple[Quarantined, ...], LISTED]


class TrainerResumed(Message):
    """The first ``kept`` of what was begun count as leased; the trainer gives up the others and does them later. Where
    ``early`` work counts no more, for nobody is left at a stage who could add it, it gives up that first, and asks
    again."""

    kept: Count
    early: bool = True


class Feed(Message):
    """There is quota again: somebody's work was lost. ``faults`` prove who did it wrong in the step."""

    step: Count
    term: Count
    faults: Annotated[tuple[Fault, ...], Field(max_length=MAX_FAULTS, exclude_if=operator.not_)] = ()


class Over(Message):
    """Every replica of this part is lost, or every trainer, and nobody came for as long as the manifest says, or all
    others were asked to leave: the run cannot go on. Who sees the same, and has waited as long or is to leave, ends."""

    step: Count
    term: Count
    part: PartField | Literal["trainers", "routes"]


class Working(Message):
    """Does the receiver have a question of the open step's leader to answer?"""

    step: Count
    term: Count


class StillWorking(Message):
    """Whether it does; ``False`` also where it was asked nothing."""

    working: bool


class Prepare(Message):
    """The sender leads the step in this term: follow no lower one. What have you accepted?"""

    step: Count
    term: Count


class Promise(Message):
    """The receiver follows the term. ``vote`` is what it accepted last, ``free`` see :class:`Acceptor`; ``candidate``
    what it closed without a majority. With ``votes_only`` it was started anew: it has its vote in this step, and
    nothing else. Vote and free are ``signed``: see :class:`SignedPromise`."""

    vote: Vote | None
    free: Count
    candidate: BranchHead | None = None
    votes_only: bool = False
    signed: Annotated[bytes, Field(max_length=64)] = b""

    @property
    def accepted(self) -> tuple[int, str] | None:
        """The term and the hash of the vote."""
        return None if self.vote is None else self.vote.accepted

    @property
    def shown(self) -> SignedPromise:
        """Return what others are shown of it."""
        return SignedPromise(accepted=self.accepted, free=self.free, signature=self.signed)


class Arrive(Message):
    """The batch is complete. Answer when what you contribute to the close is settled."""

    step: Count
    term: Count


class Arrived(Message):
    """It is settled; ``since`` is the first step whose work is in it. With ``cut_off``, the reason, it is not: the peer
    has to get its state from others first."""

    since: Count = 0
    cut_off: Annotated[str, StringConstraints(max_length=REASON_CHARS)] = ""


class Reconcile(Message):
    """This is what counts, and these peers close the step: make your sum equal to it, and average.

    ``attempts`` says for each part which attempt at its round this is. It grows when a round was void, or anything that
    it depends on has changed: members whose part's attempt is the one they have done already keep its result.
    ``provisional``: its leader had no majority, so the term is not free for what it says. ``left_out`` says why others
    of the roster are not in ``live``, for people. ``within_s`` is how long the leader waits: rounds end before, for
    else nobody could say on whom they broke. ``late`` are members that were not ready: the step is closed without
    them, and what they did of ``committed`` counts later (:mod:`swarm.step.lateness`). ``forfeits`` are members that
    were late before and got their state from others since: what they did then is in no weights any more, nor in theirs.
    """

    step: Count
    term: Count
    committed: Committed
    live: Annotated[tuple[PeerIdField, ...], Field(max_length=20_000)]
    provisional: bool = False
    within_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    attempts: Annotated[dict[PartField, Count], Field(max_length=1025)]
    plainly: Annotated[tuple[PartField, ...], Field(max_length=1024)] = ()
    left_out: Annotated[
        dict[PeerIdField, Annotated[str, StringConstraints(max_length=REASON_CHARS)]], Field(max_length=MAX_TOLD)
    ] = {}
    late: Annotated[tuple[PeerIdField, ...], Field(max_length=20_000, exclude_if=operator.not_)] = ()
    forfeits: Annotated[tuple[PeerIdField, ...], Field(max_length=20_000, exclude_if=operator.not_)] = ()

    def asks_as(self, other: Reconcile) -> bool:
        """Return whether it asks for the same as another, whatever time and reasons they give."""
        return self == other.model_copy(update={"within_s": self.within_s, "left_out": self.left_out})

    def absent(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Return without which of the step's members it is closed."""
        return frozenset(peers).difference(self.live, self.late)


class Averaged(Message):
    """The group's result as this member has it. ``digest`` is empty for a peer that holds no part, else it is
    ``signed`` with the norm (:mod:`swarm.step.ties`).

    With a ``failure`` there is no result: ``culprit`` is whom it broke on, as far as that is known (the member itself
    when it could not make its sum equal to what counts), ``missing`` the microbatches that it then lacked. ``rows`` is
    a trainer's signature under its rows of the step (:func:`~swarm.consensus.records.rows_bytes`), empty where they are
    not what it reported. ``aborted_by`` is who told it that the round is void, where it did not find out itself.
    ``differs``: the culprit holds another result than most. ``proven`` is this member's signature that it has itself
    proven the culprit wrong (:func:`~swarm.security.signing.averaging_bytes`). ``heard`` is what it measured of the
    links to the others of its part, ``pace_us`` how many microseconds it computes a microbatch for, 0 where no record
    is to say so. ``guarded`` are the sums that it left out of what it averaged for all, ``lengths`` those of its
    microbatches that are usual, where they are bounded, ``words`` what it says of their trainers, where these are
    tested. ``waited`` are those of its part that were late for the round, with the seconds that it waited for each.
    """

    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16,64})?$")]
    sq_norm: SquaredNorm
    cursor: tuple[Count, Count] | None
    failure: Annotated[str, StringConstraints(max_length=400)] = ""
    culprit: PeerIdField | None = None
    aborted_by: PeerIdField | None = None
    differs: bool = False
    proven: Annotated[bytes, Field(max_length=64, exclude_if=operator.not_)] = b""
    missing: Annotated[tuple[MicrobatchField, ...], LISTED] = ()
    heard: Annotated[dict[PeerIdField, MeasuredLink], Field(max_length=1024)] = {}
    pace_us: Annotated[int, Field(ge=0, le=MAX_PACE_US, exclude_if=lambda value: not value)] = 0
    guarded: Annotated[Guarded, Field(exclude_if=operator.not_)] = {}
    lengths: Annotated[GradientLengths, Field(exclude_if=lambda value: not any(value))] = (0.0, 0.0)
    words: Annotated[Words, Field(exclude_if=operator.not_)] = ()
    waited: Annotated[
        dict[PeerIdField, Annotated[float, Field(ge=0, le=1e6)]], Field(max_length=1024, exclude_if=operator.not_)
    ] = {}
    rows: Annotated[bytes, Field(max_length=64)] = b""
    signed: Annotated[bytes, Field(max_length=64)] = b""

    @property
    def result(self) -> str:
        """Return what its replica signs, and others of its part must have too: ``digest/norm``, the norm's bits in hex.
        Empty without a digest."""
        return f"{self.digest}/{abs(self.sq_norm).hex()}" if self.digest else ""  # a zero may come with a sign


class Apply(Message):
    """The scalars of the step: compute what the update makes of the state. ``sq_norms`` are the squared norms of all
    parts' means, of which everybody finds the same caps (``swarm.optim.clipping``). ``guarded``, ``lengths`` and
    ``words`` say by replica what it answered: who computes with this signs that its own answer is in it."""

    step: Count
    term: Count
    lr: float
    clip: float
    sq_norms: Annotated[dict[PartField, SquaredNorm], Field(max_length=1025)]
    guarded: Annotated[dict[PeerIdField, Guarded], Field(max_length=20_000, exclude_if=operator.not_)] = {}
    lengths: Annotated[dict[PeerIdField, GradientLengths], Field(max_length=20_000, exclude_if=operator.not_)] = {}
    words: Annotated[dict[PeerIdField, Words], Field(max_length=20_000, exclude_if=operator.not_)] = {}


class Prepared(Message):
    """Digest of the state after the step: parameters and what the optimizer keeps; where stages part with it, one for
    each (:func:`~swarm.columns.joined`). Empty for a peer that holds no part, else ``signed``."""

    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16,64}([+][0-9a-f]{64}){0,511})?$")]
    signed: Annotated[bytes, Field(max_length=64)] = b""


class Propose(Message):
    """The close record, the signed requests that explain its roster, and what bears it out. For step 0 it is the
    genesis: install your part before you accept. ``credentials`` are those of the members of a founding record, in a
    run that not everybody may join. ``promises`` are those of this term that show that a record of an earlier one may
    have been decided."""

    record: CloseRecord
    changes: Changes = NO_CHANGES
    term: Count = 0
    evidence: RecordEvidence = NO_EVIDENCE
    promises: Annotated[
        dict[PeerIdField, SignedPromise], Field(max_length=MAX_VOTERS, exclude_if=lambda promises: not promises)
    ] = {}
    credentials: Annotated[
        tuple[Credential, ...], Field(max_length=20_000, exclude_if=lambda credentials: not credentials)
    ] = ()


class Accepted(Message):
    """A signature over :func:`~swarm.consensus.records.acceptance_bytes`."""

    signature: SignatureField


class Decide(Message):
    """A majority accepted the record in this term: swap. The signatures prove it."""

    step: Count
    record: DigestField
    term: Count = 0
    acceptances: Annotated[dict[PeerIdField, SignatureField], Field(max_length=20_000)]


# What the leader of a step answers.
LEASE = Rpc("lead/1/lease", Lease, Leased)
COMPLETE = Rpc("lead/1/complete", Complete, Empty)
ASIDE = Rpc("lead/1/aside", Quarantine, Empty)
RESUME = Rpc("lead/1/resume", ResumeTrainer, TrainerResumed)
JOIN = Rpc("lead/1/join", Admission, Empty)
LEAVE = Rpc("lead/1/leave", Departure, Empty)
FAULT = Rpc("lead/1/fault", HopFault, Empty)

# What a trainer answers its leader.
AGAIN = Rpc("feed/1/again", Feed, Empty)

# What a member answers its leader.
PREPARE = Rpc("step/1/prepare", Prepare, Promise)
ARRIVE = Rpc("step/1/arrive", Arrive, Arrived)
RECONCILE = Rpc("step/1/reconcile", Reconcile, Averaged)
APPLY = Rpc("step/1/apply", Apply, Prepared)
PROPOSE = Rpc("step/1/propose", Propose, Accepted)
DECIDE = Rpc("step/1/decide", Decide, Empty)
OVER = Rpc("step/1/over", Over, Empty)

# What a member answers any other.
WORKING = Rpc("step/1/working", Working, StillWorking)
