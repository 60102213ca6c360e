"""What travels between trainers and stage replicas. Tensors ride as the payload of the call, not in the body.

``hop`` is always the stage of the *receiver*; ``route`` names one replica per stage. A higher ``attempt`` supersedes
a lower one of the same microbatch: anyone who knows the higher refuses the lower. ``after`` says which record the step
follows: what is under way while its lineage is given up must not be taken for the step of the same number.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from swarm.ids import ATTEMPTS_OF_A_WAY, JourneyKey
from swarm.network.protocols import Rpc
from swarm.schema import AfterField, Count, Empty, Message, MicrobatchField, PeerIdField, SignatureField

StageField = Annotated[int, Field(ge=0, lt=1024)]
Attempt = Annotated[int, Field(ge=0, lt=4 * ATTEMPTS_OF_A_WAY)]
Seconds = Annotated[float, Field(ge=0)]
Direction = Literal["forward", "backward"]
Route = Annotated[tuple[PeerIdField, ...], Field(min_length=1, max_length=1024)]
What = Literal["output", "gradient", "input", "received"]
TrainerWhat = Literal["output", "gradient", "input", "received", "targets"]
Seal = Annotated[bytes, Field(max_length=64)]
"""A sender's signature under a tensor's hash; empty where nothing came."""


class JourneyMessage(Message):
    """Part of one microbatch's journey."""

    step: Count
    microbatch: MicrobatchField
    attempt: Attempt
    after: AfterField = ""

    @property
    def key(self) -> JourneyKey:
        """Return what graphs and waiting work are indexed by."""
        return JourneyKey(self.step, self.microbatch, self.attempt, self.after)


class RoutedMessage(JourneyMessage):
    """One that has a replica go a way. ``chosen``: the signature of the microbatch's trainer, that this attempt takes
    this route; it goes with the tensors, from replica to replica."""

    route: Route
    chosen: SignatureField


class Forward(RoutedMessage):
    """An activation for stage ``hop`` (hosted ends: token ids for stage 0). ``seal``: its sender's signature under its
    hash (:mod:`swarm.pipeline.seals`)."""

    hop: StageField
    seal: SignatureField


class Targets(RoutedMessage):
    """Hosted ends only: the targets of a microbatch, for the last stage."""


class Backward(RoutedMessage):
    """The gradient of the output of stage ``hop``; ``seal`` as of :class:`Forward`."""

    hop: StageField
    seal: SignatureField


class Resend(RoutedMessage):
    """A trainer asks a replica to send its retained output again, along another route and as a new attempt."""

    hop: StageField


class Adopt(RoutedMessage):
    """A trainer asks a replica to take stage ``hop`` over, on the way back: it fetches its input and the gradient of
    its output from its neighbours on the route, for at most ``within_s`` seconds, computes, adds its contribution and
    passes the input's gradient on. Where that was done before, it only tells and, ``pass_on``, passes on again: the
    gradient is not kept and would have to be computed anew, for nothing where it has arrived."""

    hop: StageField
    within_s: Annotated[float, Field(gt=0, le=3600)]
    pass_on: bool = True


class Drop(JourneyMessage):
    """A trainer tells a replica that another does the work of this and all earlier attempts. With ``undo`` the
    microbatch is begun anew: what was added of it is taken out of the sum. What it takes to add it stays until the
    step is closed: should the trainer have reported it as complete, it is added again."""

    hop: StageField
    undo: bool = False


class Recall(Message):
    """A neighbour on the route, or the trainer, asks stage ``hop`` for what it sent: its output, or the gradient of
    its input. The answer's payload is the tensor, wire-encoded. Who sent it may ask for what came there, too, as it is
    retained: its ``input``, or the gradient that it ``received`` (where the loss is computed: the targets). Who holds
    the same stage may ask for all of it."""

    step: Count
    microbatch: MicrobatchField
    after: AfterField = ""
    route: Route
    hop: StageField
    what: What


class TrainerRecall(Message):
    """The first stage asks a trainer for what it sends there (``output``), the last one for the gradient of its
    output, or for hosted ``targets``; each for what it sent, too, as it is retained: the last one's output
    (``input``), the gradient of the first one's input (``received``)."""

    step: Count
    microbatch: MicrobatchField
    after: AfterField = ""
    route: Route
    what: TrainerWhat


class Recalled(Message):
    """The tensor is the payload; ``seal`` is as of the message with which it is sent, empty of targets."""

    seal: Seal = b""


class Audit(JourneyMessage):
    """A trainer asks another replica of stage ``hop`` to compute again what that on the ``route`` did, and signed for:
    see :class:`HopReport`. Nothing of it is added."""

    route: Route
    hop: StageField
    content: Annotated[bytes, Field(min_length=128, max_length=128)]
    seals: tuple[Seal, Seal]
    receipt: SignatureField
    tokens: Count


Verdict = Literal["right", "wrong", "withheld", "unjudged"]


class Audited(Message):
    """What came of it. ``withheld``: what it was computed from cannot be had of who did, nor of its neighbours, or what
    it sent not of these; ``unjudged``: for another ``reason`` nothing can be said. What is right or wrong is signed
    (:func:`~swarm.security.signing.audit_bytes`), but for a ``loss_sum``, for which no receipt is."""

    verdict: Verdict
    reason: Annotated[str, StringConstraints(max_length=400)] = ""
    loss_sum: Annotated[float, Field(ge=0)] = 0.0
    signature: Seal = b""


class Evaluate(Message):
    """A trainer asks a replica of stage ``hop`` for its output of rows that nobody learns from, computed with the
    parameters with which the open step began: nothing is dropped, kept or added. The payload is the stage's input,
    and behind it, for a last stage that computes the loss, the targets."""

    step: Count
    microbatch: MicrobatchField
    after: AfterField = ""
    hop: StageField


class Evaluated(Message):
    """The stage's output is the payload; of a last stage that computes the loss it is the loss."""

    loss_sum: Annotated[float, Field(ge=0)] = 0.0
    tokens: Count = 0


class ProbeRequest(Message):
    """Answer after ``seconds``; a trainer that waits for the answer learns at once when the connection breaks."""

    seconds: Annotated[float, Field(gt=0, le=120)]


class Output(JourneyMessage):
    """The last stage's output, back to the trainer; ``seal`` as of :class:`Forward`."""

    seal: SignatureField


class InputGradient(JourneyMessage):
    """The gradient of the first stage's input, back to the trainer: the way home ends here. ``seal`` as of
    :class:`Forward`."""

    seal: SignatureField


class HopReport(JourneyMessage):
    """A replica tells the trainer that a hop is done, and what it took. ``receipt`` signs a backward contribution; a
    backward without one has handed the gradient on, and its contribution is told later. ``again`` says that it was told
    before, or is told once more later, and measures nothing. With the receipt comes what it signs the digest of: hashes
    (``content``, see :class:`~swarm.pipeline.seals.Content`), and the signatures under the input and the gradient that
    came, by whom they came from. They are for the trainer alone."""

    hop: StageField
    direction: Direction
    queued_s: Seconds
    compute_s: Seconds
    receipt: Annotated[bytes, Field(max_length=64)] = b""
    content: Annotated[bytes, Field(max_length=128)] = b""
    seals: tuple[Seal, Seal] = (b"", b"")
    loss_sum: float = 0.0
    tokens: Count = 0
    again: bool = False


class Blocked(JourneyMessage):
    """A replica tells the trainer that it could not hand the microbatch on to ``hop``, or refuses to go on with it."""

    hop: StageField
    direction: Direction
    peer: PeerIdField
    code: Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,20}$")]
    reason: Annotated[str, StringConstraints(max_length=400)]


# What a stage's replica answers.
FORWARD = Rpc("pipeline/1/forward", Forward, Empty)
TARGETS = Rpc("pipeline/1/targets", Targets, Empty)
BACKWARD = Rpc("pipeline/1/backward", Backward, Empty)
RESEND = Rpc("pipeline/1/resend", Resend, Empty)
ADOPT = Rpc("pipeline/1/adopt", Adopt, Empty)
RECALL = Rpc("pipeline/1/recall", Recall, Recalled)
DROP = Rpc("pipeline/1/drop", Drop, Empty)
AUDIT = Rpc("pipeline/1/audit", Audit, Audited)
EVALUATE = Rpc("pipeline/1/evaluate", Evaluate, Evaluated)
ATTEND = Rpc("pipeline/1/attend", ProbeRequest, Empty)

# What a trainer answers.
OUTPUT = Rpc("trainer/1/output", Output, Empty)
GRADIENT = Rpc("trainer/1/gradient", InputGradient, Empty)
HOP = Rpc("trainer/1/hop", HopReport, Empty)
BLOCKED = Rpc("trainer/1/blocked", Blocked, Empty)
TRAINER_RECALL = Rpc("trainer/1/recall", TrainerRecall, Recalled)
