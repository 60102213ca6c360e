"""Compute again what another replica of the stage did and signed for, and say whether it was right.

What it was computed from is had of that replica itself, else of its neighbours: the receipt has the hashes, so it does
not matter who gives the bytes. What comes of it is compared by its hashes, and where those differ by numbers: machines
differ in the last bits. A lie below twice the tolerance is not seen, nor one where the last bits decide: who trains
chooses what goes through a stage, and could else have honest ones call each other wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from swarm.columns import standing_at
from swarm.errors import Busy, PeerError, Refused
from swarm.ids import JourneyKey, PeerId, StepWork
from swarm.models.dropout import dropout_seed
from swarm.models.spec import TensorSpec
from swarm.network.protocols import Payload
from swarm.pipeline.boundary import BoundarySpecs
from swarm.pipeline.compute import Material
from swarm.pipeline.messages import Audit, Audited, Direction, TrainerWhat, Verdict
from swarm.pipeline.recall import Errand, Recalls
from swarm.pipeline.seals import NOTHING, Content, hash_of
from swarm.pipeline.stage.admission import StageContext, StageSettings
from swarm.security.signing import audit_bytes

MAX_AUDITS = 4
"""At a time; more are Busy: what is learnt has the device first."""
EXACT_TOLERANCE, TOLERANCE, COARSE_TOLERANCE = 1e-5, 5e-2, 2e-1
"""How far a row may be from what it should be, relative to its length: in float32 with codecs that carry it bit for
bit, else, and behind codecs of less than 8 bits. Between instruction sets whole outputs differ by 2e-8 in float32 and
3e-4 in bfloat16; single rows by up to 3e-2 there, and more where that decides how a number is rounded to 4 bits."""
SURELY = 2.0
"""So many times as far it is wrong, and between nothing is said: else who lies by just so much would have one machine
call wrong what another calls right, and be barred for that."""
MANY = 1 << 16
"""Numbers of which a codec's bytes say how many bits one has."""
SMALLEST = 1e-3
"""Rows shorter than this part of the usual one are as good as zero, and measured by it."""
FAR_ROWS = 0.02
"""Part of the rows of a mixture of experts that may be far out: where two experts are nearly alike for a token, the
last bits decide."""
FARTHEST = 2.0
"""How far these may be, relative to their length: another expert is no other size."""


_Source = tuple[TrainerWhat, int]
"""What is had of which stage."""


class Withheld(Refused):
    """What a hop was computed from, or what it sent, cannot be had."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a replica signed that it did, and where what it takes to see that may be had."""

    accused: PeerId
    content: Content
    errand: Errand
    deadline: float


class Found(NamedTuple):
    """What one found that computed a hop again."""

    verdict: Verdict
    reason: str = ""
    loss_sum: float = 0.0


class Auditing:
    """One replica's judging of others of its stage; a few hops at a time."""

    def __init__(self, settings: StageSettings, context: StageContext, recalls: Recalls) -> None:
        self._settings, self._context, self._recalls = settings, context, recalls
        self._open, self._begun = Counter[PeerId](), Counter[PeerId]()
        """By trainer, that of this step."""
        self._said: dict[tuple[JourneyKey, PeerId, bytes], Audited] = {}
        """In the step ``_after`` this record: who asks again has the same answer, and nothing is computed."""
        self._after = ""

    async def judge(self, body: Audit, deadline: float, *, alone: bool) -> Audited:
        """``pipeline/1/audit``, after admission: compute the hop again before the ``deadline``, on the monotonic clock,
        and sign what was found. A trainer that is not ``alone`` has half of the places. Raises Busy, and Refused where
        it has more computed again in a step than it may feed."""
        key, trainer = body.key, body.microbatch.trainer
        accused, content = standing_at(body.route, body.hop, trainer), Content.from_wire(body.content)
        if self._after != key.after:
            self._after, self._said, self._begun = key.after, {}, Counter()
        if (known := self._said.get((key, accused, body.receipt))) is not None:
            return known
        if self._begun[trainer] >= self._settings.max_fed:
            raise Refused(f"{self._begun[trainer]} hops of {trainer} were computed again in step {body.step}")
        if self._open.total() >= MAX_AUDITS or (self._open[trainer] >= MAX_AUDITS // 2 and not alone):
            raise Busy(f"{self._open.total()} hops are computed again, {self._open[trainer]} of them of {trainer}")
        work, route = StepWork(body.step, body.microbatch), tuple(map(PeerId, body.route))
        self._open[trainer] += 1
        self._begun[trainer] += 1
        try:
            claim = _Claim(accused, content, Errand(work, route, self._settings.send_timeout_s, body.after), deadline)
            found = await self._judge(claim, body.tokens)
        except Withheld as withheld:
            found = Found("withheld", withheld.reason)
        except PeerError as error:
            found = Found("unjudged", str(error))
        finally:
            self._open[trainer] -= 1
        signature = b""
        if found.verdict in ("right", "wrong"):
            signed = audit_bytes(self._settings.run, key, body.hop, accused, body.receipt, found.verdict == "wrong")
            signature = self._context.sign(signed)
        verdict, reason, loss_sum = found
        said = Audited(verdict=verdict, reason=reason[:400], loss_sum=loss_sum, signature=signature)
        if signature:
            self._said[key, accused, body.receipt] = said
        return said

    async def _judge(self, claim: _Claim, tokens: int) -> Found:
        material = await self._material(claim)
        output, back = await self._recalls.on_device(lambda: self._context.compute.again(material))
        if back.tokens != tokens:
            return Found("wrong", f"a loss over {tokens} tokens, where {back.tokens} count")
        hop, stage, doubt = claim.content, self._settings.stage, ""
        sent: tuple[tuple[Payload | None, bytes, Direction, tuple[_Source, _Source]], ...] = (
            (output, hop.output, "forward", (("input", stage + 1), ("output", stage))),
            (back.gradient, hop.sent, "backward", (("received", stage - 1), ("gradient", stage))),
        )
        for ours, said, direction, sources in sent:
            if await hash_of(ours) == said:
                continue
            what = "output" if direction == "forward" else "gradient of the input"
            if ours is None:
                return Found("wrong", f"another {what} than none")
            if said == NOTHING:  # its trainer takes no such receipt
                doubt = f"it does not say which {what} it has"
                continue
            # Who took the hop over has its own, which it sent to nobody; a lie that all cover is not to count.
            theirs = await self._had(claim, said, sources)
            found = await self._compared(ours, theirs, material.work, direction)
            if found.verdict == "wrong" and await self._steady(material, ours, direction):
                return Found("wrong", f"the {what}: {found.reason}")
            if found.verdict == "wrong":
                found = Found("unjudged", "it hangs on the last bits of what it is computed from")
            if found.verdict != "right":
                doubt = f"the {what}: {found.reason}"
        if doubt:
            return Found("unjudged", doubt)
        return Found("right", loss_sum=back.loss_sum)

    async def _steady(self, material: Material, ours: Payload, direction: Direction) -> bool:
        """Return whether what we found comes out the same where what it is computed from differs in the last place.
        Cost: computing it once more, and where somebody is to be called wrong only."""
        again = partial(self._context.compute.again, material, shaken=True)
        output, back = await self._recalls.on_device(again)
        other = output if direction == "forward" else back.gradient
        assert other is not None  # noqa: S101 - ours is not
        return (await self._compared(ours, other, material.work, direction)).verdict == "right"

    async def _compared(self, ours: Payload, theirs: Payload, work: StepWork, direction: Direction) -> Found:
        settings, about = self._settings, (ours, theirs, work.ready_in, direction)
        compare = partial(compared, settings.specs, *about, mixture=settings.mixture)
        found: Found = await self._recalls.on_device(compare)
        return found

    # --- what it takes ---------------------------------------------------------------------------------------------

    async def _material(self, claim: _Claim) -> Material:
        """Raises Withheld."""
        settings, stage, content = self._settings, self._settings.stage, claim.content
        targets = settings.computes_loss
        own_input = await self._had(claim, content.input, (("input", stage), ("output", stage - 1)))
        behind: TrainerWhat = "targets" if targets else "gradient"
        back = await self._had(claim, content.gradient, (("received", stage), (behind, stage + 1)))
        return Material(
            work=claim.errand.work,
            seed=dropout_seed(settings.seed, claim.errand.work.microbatch),
            first=settings.first,
            input=own_input,
            gradient=None if targets else back,
            targets=back if targets else None,
        )

    async def _had(self, claim: _Claim, hashed: bytes, sources: Iterable[_Source]) -> Payload:
        """Bytes with this hash, of the first that gives them: what it has, and at which stage that is. Raises
        Withheld."""
        why = []
        for what, hop in sources:
            try:
                return await self._fetched(claim, hashed, what, hop)
            except PeerError as error:
                why.append(str(error))
        raise Withheld(f"nobody gives what {claim.accused} got, or sent: {'; '.join(why)}"[:400])

    async def _fetched(self, claim: _Claim, hashed: bytes, what: TrainerWhat, hop: int) -> Payload:
        stage, errand = self._settings.stage, claim.errand
        left_s = claim.deadline - self._context.clock.monotonic()
        errand = Errand(errand.work, errand.route, max(0.01, min(errand.within_s, left_s / 2)), errand.after)
        peer = claim.accused
        if hop != stage:
            errand = errand.through(self._context.endpoint.peer, stage)
            peer = standing_at(errand.route, hop, errand.work.microbatch.trainer)
        payload, _ = await self._recalls.ask(peer, errand, hop, what)
        if await hash_of(payload) != hashed:
            raise Refused(f"{what} of stage {hop} with another hash than the receipt has", peer=peer)
        return payload


# --- numbers ----------------------------------------------------------------------------------------------------------


def compared(
    specs: BoundarySpecs, ours: Payload, theirs: Payload, step: int, direction: Direction, *, mixture: bool = False
) -> Found:
    """Return whether one payload that leaves a stage is right, by ours: where machines may differ so much. It is wrong
    only SURELY times further out, else unjudged.

    Raises Violation for a payload of another length, or that is not finite.
    """
    (right, notes), (said, said_notes) = specs.left(ours, step, direction), specs.left(theirs, step, direction)
    if notes != said_notes:
        return Found("wrong", "what goes with it is of other rows")
    most = _tolerance(specs, step, direction)
    if not (doubt := _far(right, said, most, mixture=mixture)):
        return Found("right")
    if wrong := _far(right, said, most, mixture=mixture, times=SURELY):
        return Found("wrong", wrong)
    return Found("unjudged", f"{doubt}, but not {SURELY:g} times as far, or as many")


def _far(right: Tensor, said: Tensor, most: float, *, mixture: bool, times: float = 1.0) -> str:
    """Say how many rows are further out than so many times what may be; "" where no more are than may."""
    far = far_rows(right, said, times * most)
    allowed = times * math.ceil(FAR_ROWS * far.numel()) if mixture else 0
    if int(far.sum()) <= allowed and not bool(far_rows(right, said, times * max(most, FARTHEST)).any()):
        return ""
    return f"{int(far.sum())} of {far.numel()} rows are further out than {times * most:g} of their length"


def _tolerance(specs: BoundarySpecs, step: int, direction: Direction) -> float:
    codec, of = specs.leaving(step, direction), specs.activation
    if of.dtype == "float32" and codec.exact("float32"):
        return EXACT_TOLERANCE
    return COARSE_TOLERANCE if codec.wire_bytes(TensorSpec((MANY,), of.dtype)) < MANY else TOLERANCE


def far_rows(right: Tensor, said: Tensor, tolerance: float) -> Tensor:
    """Return which rows, along the last dimension, are too far from what is right, bool (rows,). Where most are nothing
    the usual one is not."""
    right, said = (one.reshape(-1, one.shape[-1]).to(torch.float64) for one in (right, said))
    length = torch.linalg.vector_norm(right, dim=-1)
    usual = float(length[length > 0].median()) if bool(length.any()) else 0.0
    far: Tensor = torch.linalg.vector_norm(said - right, dim=-1) > tolerance * length.clamp(min=SMALLEST * usual)
    return far
