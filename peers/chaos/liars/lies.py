"""The lies of one member, each around the methods in which it computes, says or does what others believe.

    liar = Liar("sum-x-10", mine=lambda: PEER.get() == "host-0")
    with lying(liar):
        run_world(swarm.run())
    assert liar.fired

What is said again, as to a peer that computes it again, is the same lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from data_shards.shard_source import ShardBatch, ShardSource
from peers.chaos.liars.made_up import Inventor
from swarm.averaging.allreduce.output import ReducedVector
from swarm.membership.membership import Membership
from swarm.optim.part import TrainedPart
from swarm.pipeline.compute import BackwardResult, Material, StageCompute
from swarm.pipeline.stage.microbatch_state import MicrobatchState
from swarm.pipeline.stage.worker import Worker
from swarm.pipeline.trainer.journey import FinishedJourney, Journey
from swarm.step.leader.close import StepClose
from swarm.step.member.member_service import MemberService
from swarm.step.messages import RECONCILE

FIRST_DELAY_S, MORE, LONGEST_DELAY_S = 0.05, 1.25, 3600.0
"""Of a host that gets slower with each forward, up to where nobody can wait for it."""
RECONCILE_S, APPLY_S, PROPOSE_S = 55.0, 25.0, 25.0
"""By how much a late member's answers are late: a little less than is waited for them."""
AGAIN_S = 29.0
"""How often a leader that gets nowhere asks the same again: a little sooner than it is given up."""


@dataclass(slots=True)
class Liar:
    """One member that lies. ``mine`` says whether the code that runs is its own, where others run in the same process.

    Attributes:
        kind: A key of LIES.
        rate: The share of the microbatches, or steps, about which it lies.
        seed: Draws them.
        told: About what it has lied.
        kept: What a lie remembers.
    """

    kind: str
    rate: float = 1.0
    seed: int = 0
    mine: Callable[[], bool] = lambda: True
    told: set[tuple[Any, ...]] = field(default_factory=set)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def fired(self) -> int:
        """Return about how many microbatches, or steps, it has lied."""
        return len(self.told)

    def lies(self, *about: Any) -> bool:
        """Return whether it lies about this: the same each time that it is asked. It lies about the first."""
        if self.told and about not in self.told and self._drawn(about) >= self.rate * 2**32:
            return False
        self.told.add(about)
        return True

    def random(self, *about: Any) -> torch.Generator:
        """Return what draws the lie about this: the same each time."""
        return torch.Generator().manual_seed(self._drawn(("lie", *about)))

    def _drawn(self, about: tuple[Any, ...]) -> int:
        return int.from_bytes(hashlib.sha256(repr((self.seed, about)).encode()).digest()[:4], "big")


class LieSeam(NamedTuple):
    """A method of the product, and what the liar does in its place, which is given the liar and the honest method."""

    owner: type
    method: str
    lie: Callable[..., Any]


@contextlib.contextmanager
def lying(liar: Liar) -> Iterator[Liar]:
    """Have a member lie."""
    with contextlib.ExitStack() as stack:
        for seam in LIES[liar.kind]:
            stack.enter_context(mock.patch.object(seam.owner, seam.method, _around(seam, liar)))
        yield liar


def _around(seam: LieSeam, liar: Liar) -> Callable[..., Any]:
    honest = getattr(seam.owner, seam.method)

    @functools.wraps(honest)
    def method(*arguments: Any, **more: Any) -> Any:
        return seam.lie(liar, honest, *arguments, **more) if liar.mine() else honest(*arguments, **more)

    return method


# --- what a replica computes -----------------------------------------------------------------------------------------


def _output(change: Callable[[torch.Tensor, Liar, Any], torch.Tensor]) -> tuple[LieSeam, ...]:
    """It hands on another output than it computed; not of rows that are only measured."""

    def forward(liar: Liar, honest: Any, part: TrainedPart, x: Any, *, seed: Any, work: Any = None, **more: Any) -> Any:
        output, graph = honest(part, x, seed=seed, work=work, **more)
        if seed is None or work is None or not liar.lies(work.step, work.microbatch):
            return output, graph
        return change(output, liar, work), graph

    return (LieSeam(TrainedPart, "forward", forward),)


def _noise(output: torch.Tensor, liar: Liar, work: Any) -> torch.Tensor:
    drawn = torch.randn(output.shape, generator=liar.random(work.step, work.microbatch)).to(output)
    return drawn * output.std() + output.mean()


def _sum(factor: float) -> tuple[LieSeam, ...]:
    """It hands in a multiple of its sum; of a trainer that is the sum of the ends."""

    def contribution(liar: Liar, honest: Any, part: TrainedPart, *said: Any) -> torch.Tensor | None:
        sums: torch.Tensor | None = honest(part, *said)
        return sums if sums is None or not liar.lies(part.step + 1) else sums * factor

    return (LieSeam(TrainedPart, "contribution", contribution),)


def _back(liar: Liar, honest: Any, compute: StageCompute, material: Material, *more: Any) -> BackwardResult:
    """It hands back a gradient of its input that is longer, below what a norm gate refuses, and the other way round."""
    result: BackwardResult = honest(compute, material, *more)
    if result.grad_input is None or not liar.lies(material.work.step, material.work.microbatch):
        return result
    return result._replace(grad_input=result.grad_input * -50)


def _negated_chunk(liar: Liar, honest: Any, output: ReducedVector, chunk: Any, result: Any) -> memoryview:
    """It turns the means around that it reduces for all."""
    encoded: memoryview = honest(output, chunk, -result if liar.lies(output._plan.key.step) else result)
    return encoded


# --- what a trainer says ---------------------------------------------------------------------------------------------


def _labels(liar: Liar, honest: Any, source: ShardSource) -> ShardBatch:
    """Its text says that any token follows any."""
    batch: ShardBatch = honest(source)
    if not liar.lies(batch.id):
        return batch
    most = int(max(batch.inputs.max(), batch.targets.max()))
    drawn = torch.randint(0, most + 1, batch.targets.shape, generator=liar.random(batch.id))
    return replace(batch, targets=torch.where(batch.targets < 0, batch.targets, drawn))


def _turned(change: Callable[[torch.Tensor, Liar, Any], torch.Tensor]) -> tuple[LieSeam, ...]:
    """A trainer's gradients are others than those of its loss: of its ends, and what it hands back to the stages."""

    def loss(liar: Liar, honest: Any, part: TrainedPart, hidden: Any, targets: Any, *, work: Any = None) -> Any:
        loss_sum, tokens, back, gradients = honest(part, hidden, targets, work=work)
        if work is None or not liar.lies(work.step, work.microbatch):
            return loss_sum, tokens, back, gradients
        return loss_sum, tokens, change(back, liar, work), [(name, change(one, liar, work)) for name, one in gradients]

    return (LieSeam(TrainedPart, "loss", loss),)


def _times(factor: float) -> Callable[[torch.Tensor, Liar, Any], torch.Tensor]:
    return lambda gradient, liar, work: gradient * factor


def _loud(gradient: torch.Tensor, liar: Liar, work: Any) -> torch.Tensor:
    """Return noise, 30 times as long."""
    drawn = torch.randn(gradient.shape, generator=liar.random(work.step, work.microbatch)).to(gradient)
    return drawn * float(30.0 * gradient.norm() / drawn.norm().clamp(min=1e-30))


def _report(change: Callable[[FinishedJourney], FinishedJourney]) -> tuple[LieSeam, ...]:
    """It reports another loss, or fewer tokens, than it computed."""

    def finished(liar: Liar, honest: Any, journey: Journey) -> FinishedJourney:
        found: FinishedJourney = honest(journey)
        return change(found) if liar.lies(found.key.step, found.key.microbatch) else found

    return (LieSeam(Journey, "_finished", finished),)


def _few(found: FinishedJourney) -> FinishedJourney:
    tokens = max(1, found.tokens // 16)
    return replace(found, tokens=tokens, loss_sum=found.loss_sum * tokens / found.tokens)


# --- when a member answers -------------------------------------------------------------------------------------------


async def _slower(liar: Liar, honest: Any, worker: Worker, state: MicrobatchState, queued: float) -> None:
    """It delays each forward a little longer than the last."""
    if liar.lies(state.key.step, state.key.microbatch):
        delay_s = min(LONGEST_DELAY_S, liar.kept.get("delay", FIRST_DELAY_S) * MORE)
        liar.kept["delay"] = delay_s
        await asyncio.sleep(delay_s)
    if not state.dropped:
        await honest(worker, state, queued)


def _late(method: str, by_s: float) -> LieSeam:
    """It does what it is asked, and answers late."""

    async def answer(liar: Liar, honest: Any, service: MemberService, caller: Any, body: Any) -> Any:
        said = await honest(service, caller, body)
        if liar.lies(service.position.open_step):
            await asyncio.sleep(by_s)
        return said

    return LieSeam(MemberService, method, answer)


# --- what a leader and a voter do ------------------------------------------------------------------------------------


async def _asks_again(liar: Liar, honest: Any, leading: StepClose, committed: Any) -> Any:
    """It asks for the same round again and again, each time with another time for it."""
    if leading.term > 0 or not liar.lies(leading.book.step):
        return await honest(leading, committed)
    body = leading._question(committed)
    for number in itertools.count(1):
        asked = body.model_copy(update={"within_s": 60.0 + number})
        await leading._asks.all([*leading.book.roster.peers], RECONCILE, asked)
        await asyncio.sleep(AGAIN_S)


async def _invents(liar: Liar, honest: Any, membership: Membership) -> Any:
    """It takes terms only to have records accepted that it made up, as those of earlier terms too."""
    campaign = asyncio.create_task(_campaign(liar, membership))
    try:
        return await honest(membership)
    finally:
        campaign.cancel()
        await asyncio.gather(campaign, return_exceptions=True)


async def _campaign(liar: Liar, membership: Membership) -> None:
    inventor = Inventor(membership._run)
    await inventor.wait(Inventor.FIRST_STEP)
    while True:
        step = inventor.step
        if liar.lies(step):
            await inventor.strike()
        await inventor.wait(step + 1)


LIES: Mapping[str, tuple[LieSeam, ...]] = {
    "output-noise": _output(_noise),
    "output-x1.5": _output(lambda output, liar, work: output * 1.5),
    "output-x-1": _output(lambda output, liar, work: -output),
    "output-zero": _output(lambda output, liar, work: torch.zeros_like(output)),
    "output-stale": _output(lambda output, liar, work: liar.kept.setdefault("output", output)),
    "gradient-x-50": (LieSeam(StageCompute, "_backward", _back),),
    "sum-x-1": _sum(-1.0),
    "sum-x-10": _sum(-10.0),
    "sum-x-60": _sum(-60.0),
    "reducer-x-1": (LieSeam(ReducedVector, "settle", _negated_chunk),),
    "pulls-x-1": _turned(_times(-1.0)),
    "pulls-x-10": _turned(_times(-10.0)),
    "pulls-noise": _turned(_loud),
    "labels": (LieSeam(ShardSource, "take", _labels),),
    "loss-zero": _report(lambda found: replace(found, loss_sum=0.0)),
    "tokens-few": _report(_few),
    "slower": (LieSeam(Worker, "_forward", _slower),),
    "late": (
        _late("_on_reconcile", RECONCILE_S),
        _late("_on_apply", APPLY_S),
        _late("_on_propose", PROPOSE_S),
    ),
    "asks-again": (LieSeam(StepClose, "reconcile", _asks_again),),
    "invents": (LieSeam(Membership, "run", _invents),),
}
"""By kind. Each is one that the product's bounds let pass, or did."""
