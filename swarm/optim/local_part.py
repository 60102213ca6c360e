"""One part of the model on a peer that trains on its own between two synchronisations (`local`, DiLoCo).

Every replica begins a step at the same weights, the anchor. It takes an optimizer step of its own whenever it has
gradients of its share of a batch, and contributes to the step's close how far it has come. So what was computed is in
the weights at once: nothing can be taken out again, and what a replica did is lost with it.

With fragments a step's close averages one of them (:mod:`swarm.optim.outer`), and a replica goes on from its own
weights in all others. Anchor and momentum are the same at all replicas; weights are each one's own until their fragment
has its turn. Anyone who gets a state from others, and everybody after a step that was given up, begins at the anchor
with all of them: what made a mean infinite stays in nobody's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.averaging.gossip.versions import Version
from swarm.errors import BugError, Refused
from swarm.ids import StepWork
from swarm.models.passes import Bound, Gradients
from swarm.models.spec import ModelConfig, PartSpec
from swarm.optim.clipping import clip_factor
from swarm.optim.outer import Outer
from swarm.optim.part import TrainedPart
from swarm.optim.schedules import OptimizerConfig, learning_rate
from swarm.optim.update import StepNumbers, Update, Vectors, stepped
from swarm.planning.costs import MemoryKind

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRules:
    """``batch`` microbatches of ``tokens`` target tokens each make one optimizer step of all replicas together, and
    each takes one of its own, ``inner``, for its share of them. ``mix_after`` of those lead to a mixing,
    ``inner_steps`` to the step's close, if all are equally fast; the run has ``steps``. ``mixing_weight`` is the new
    anchor's share in what a replica goes on from."""

    batch: int
    tokens: int
    mix_after: int
    inner_steps: int
    steps: int
    optimizer: OptimizerConfig
    inner: Update
    outer: Outer
    mixing_weight: float = 1.0


class LocalPart(TrainedPart):
    """``replicas`` says how many share the batch; the one who opens a step sets it. ``leg_over`` is called, on the
    device thread, after each leg.

    Memory per parameter: 12 bytes of state and 12 of its own weights and moments, 4 of accumulator, and 12 more while
    a step of either optimizer is taken. Its moments stay with it from step to step and are nobody else's: a replica
    that joins begins with none.
    """

    def __init__(
        self, spec: PartSpec, model: ModelConfig, rules: LocalRules, *, devices: Sequence[torch.device] = (_CPU,)
    ) -> None:
        super().__init__(spec, model, rules.outer, devices=devices)
        self._kept = len(self._update.vectors)  # its own weights begin as the anchor's vector
        self._rules = rules
        self._own: Vectors | None = None
        self._made = 0
        self._inner = 0
        self._counted: set[StepWork] = set()
        self._apart = self._late = False
        self.since = 0
        """The first step whose work our weights hold."""
        self._version: Version | None = None
        self.replicas = 1
        self.leg_over: Callable[[], None] = _nobody

    def accumulated(self, step: int) -> frozenset[StepWork]:
        """Return what of the open step went into the weights, or will with the next optimizer step. Raises
        WrongStep."""
        super().accumulated(step)
        return frozenset(self._counted)

    def accumulate(
        self, work: StepWork, gradients: Gradients, *, checked: bool = False, bound: Bound | None = None
    ) -> None:
        """Add to the batch, and take an optimizer step when our share of one is there; nothing is bounded. Raises as
        :meth:`TrainedPart.accumulate`. Cost: now and then one step of the inner optimizer."""
        if work in self._counted:
            raise BugError(f"{work} was counted already")
        super().accumulate(work, gradients, checked=checked)
        self._counted.add(work)
        if len(self._batch) >= self._share:
            self._take_step()
            if self._inner % self._rules.mix_after == 0:
                self._publish()
                self.leg_over()

    def reverse(self, work: StepWork, gradients: Gradients) -> None:
        """It counts no more for us. Where its gradient has gone into the weights it stays in them."""
        if work in self._batch:
            super().reverse(work, gradients)
        self._counted.discard(work)

    def take_all_out(self, step: int) -> None:
        """Raises Refused: what has gone into the weights stays in them."""
        raise Refused("what was added has gone into the weights")

    def contribution(self, step: int, assigned: Set[StepWork], tokens: int) -> Tensor | None:
        """anchor − own weights of what is averaged, times ``tokens``, whatever is assigned, and what is owed of earlier
        ones. What does not make a whole share of a batch yet is taken as a smaller step first."""
        if self._batch:
            self._take_step()
        part = self.averaged(step)
        delta = self._installed()[0][part] - self._mine[0][part].to(_CPU)
        return self.feedback.added_to(delta * float(tokens))

    def prepare(
        self, mean: Tensor, *, lr: float, clip: float, step: int, fed: bool = True, left: Tensor | None = None
    ) -> str:
        """See :meth:`TrainedPart.prepare`. Of a mean with ours in it, until :meth:`prepare_late` says otherwise."""
        self._late = False
        return super().prepare(mean, lr=lr, clip=clip, step=step, fed=fed, left=left)

    def discard(self) -> None:
        """See :meth:`PartState.discard`."""
        super().discard()
        self._late, self.feedback.pending = False, None

    def prepare_late(self, mean: Tensor, *, lr: float, clip: float, step: int, fed: bool = True) -> str:
        """As :meth:`prepare`, of a step whose mean was made without us, because we were late: at the swap our weights
        move as the anchor does, so that our next contribution brings what we learnt. What does not make a whole share
        of a batch yet is taken as a smaller step first."""
        if self._batch:
            self._take_step()
        digest = self.prepare(mean, lr=lr, clip=clip, step=step, fed=fed, left=self.feedback.residual)
        self._late = True
        return digest

    def swap(self) -> None:
        """See :meth:`PartState.swap`. Of what was averaged our own weights come as near to the new anchor as
        ``mixing_weight`` says; the others stay. Who has not trained since it was at the anchor stays at that: it would
        contribute how far the others have come without it. After :meth:`prepare_late` all that was learnt stays."""
        before, part, weight = self._mine[0], self.averaged(self.step + 1), self._rules.mixing_weight
        apart, late, since, old = self._apart, self._late, self.since, self._installed()[0]
        super().swap()
        if late:
            self.since = since
        if not apart or (not late and weight == 1.0 and part == slice(0, self.layout.elements)):
            return
        (anchor, *kept), params = self._mine, before.clone()
        if late:
            params[part] += (self._installed()[0][part] - old[part]).to(self._device)
        else:
            params[part] = anchor[part] if weight == 1.0 else torch.lerp(before[part], anchor[part], weight)
        self._go_on((params, *kept))
        self._apart = True

    def tensors(self) -> dict[MemoryKind, list[Tensor]]:
        """See :meth:`PartState.tensors`. A version that others may fetch is the round's."""
        held, own, version = super().tensors(), self._own or (), self._version
        return {
            **held,
            "weights": [*held["weights"], *own[:1]],
            "optimizer": [*held["optimizer"], *own[1:]],
            "round": [*held["round"], *([] if version is None else [version.params])],
        }

    # --- versions ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        """Our parameters at the end of the newest leg, ``mix_after`` optimizer steps, on CPU."""
        if self._version is None:
            raise BugError(f"{self.spec.name} has no weights yet")
        return self._version

    def mix(self, mine: Version, mean: Tensor) -> bool:
        """Go as far as from the version ``mine`` to ``mean``, that of a group of them, float32 (elements,) on CPU; what
        was learnt since stays, and a version that was published since gets the same shift. False when the step of that
        version is closed."""
        if mine.step != self.step + 1:
            return False
        shift = mean - mine.params
        params, *kept = self._mine
        self._go_on((params + shift.to(self._device), *kept))
        if self.version.leg != mine.leg:  # published meanwhile, without it: the next mixing begins from what we are
            self._version = replace(self.version, params=self.version.params + shift)
        return True

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def _batch(self) -> frozenset[StepWork]:
        """Return what the next optimizer step of our own is of."""
        return super().accumulated(self.step + 1)

    @property
    def _share(self) -> int:
        return max(1, -(-self._rules.batch // max(1, self.replicas)))

    @property
    def _mine(self) -> Vectors:
        if self._own is None:
            raise BugError(f"{self.spec.name} has no weights yet")
        return self._own

    def _take_step(self) -> None:
        """The inner optimizer on our own weights. The mean counts all of a microbatch's tokens as targets; the norm is
        this part's, nobody knows the model's. A part of a share moves the weights by as much less. Gradients whose sum
        is not finite count as none: moments that were NaN once would stay so."""
        rules, count, total = self._rules, len(self._batch), self._sums[self.step + 1]
        gradient = total.total / float(count * rules.tokens)
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            norm = 0.0
            gradient.zero_()
        done = min(self._inner, rules.inner_steps - 1)
        lr = learning_rate(rules.optimizer, self.step * rules.inner_steps + done + 1, rules.steps * rules.inner_steps)
        numbers = StepNumbers(
            step=self._made + 1,
            lr=lr * min(1.0, count / self._share),
            clip=clip_factor(norm, rules.optimizer.clip_norm),
        )
        plan = rules.inner.plan(self._mine, gradient, self.layout, numbers, self._device)
        self._go_on(stepped(plan, self._mine))
        self._made, self._inner, self._apart = self._made + 1, self._inner + 1, True
        total.reset()

    def _go_on(self, own: Vectors) -> None:
        self._own = own
        self._compute_with(own[0], self._module)

    def _publish(self) -> None:
        params = self._mine[0].to(_CPU)  # here, for who shows it to others must not wait for the device
        self._version = Version(self.step + 1, self._inner // self._rules.mix_after, params)

    def _open(self, step: int) -> None:
        """Go on from the anchor, with our own moments."""
        super()._open(step)
        params = self._installed()[0].to(self._device)
        lengths = self.layout.kept_by(self._rules.inner.vectors).lengths[1:]
        kept = [params.new_zeros(each) for each in lengths] if self._own is None else self._own[1:]
        self._go_on((params, *kept))
        self._inner, self._apart, self._late, self.since = 0, False, False, step + 1
        self._counted.clear()
        self._publish()


def _nobody() -> None:
    pass
