"""One part of the model on this peer: its weights and optimizer state, and for a part that is trained the open step.

:class:`PartState` is all that a copy of a part is: it has no module and no accumulator, for nothing computes with it.
:class:`TrainedPart` adds both. Everything here is synchronous and belongs on the device thread.

The flat vectors are never written to after they were made: a step makes new ones, the shadow, and
:meth:`PartState.swap` puts them in place. So graphs made before a swap stay right, and a snapshot on CPU costs nothing
and stays what it is for as long as someone holds it.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from swarm.errors import BugError, StateError
from swarm.ids import MicrobatchId
from swarm.models.family import PartModule
from swarm.models.layout import FlatLayout, install_weights
from swarm.models.passes import (
    Gradients,
    Graph,
    run_backward,
    run_embedding,
    run_forward,
    run_head,
    run_loss,
    summed,
)
from swarm.models.registry import family_of
from swarm.models.spec import ModelConfig, PartSpec
from swarm.optim.accumulate import Accumulator, AccumulatorDType
from swarm.optim.adamw import AdamWState, StepNumbers
from swarm.optim.update import Update
from swarm.state.snapshot import Snapshot, digest

# --- the state alone: weights and both moments, and how an update changes them ---------------------------------------


_CPU = torch.device("cpu")


class PartState:
    """Empty until :meth:`install`; then it holds the state after step :attr:`step`. One thread at a time.

    Memory per parameter: 12 bytes, and 12 more between ``prepare`` and ``swap``.
    """

    def __init__(self, spec: PartSpec, layout: FlatLayout, update: Update, device: torch.device = _CPU) -> None:
        self.spec, self.layout = spec, layout
        self._update, self._device = update, device
        self._state: AdamWState | None = None
        self._shadow: AdamWState | None = None
        self._step = -1

    @staticmethod
    def of(spec: PartSpec, model: ModelConfig, update: Update) -> PartState:
        """An empty one on CPU, for a part of this model. Costs no memory yet."""
        family = family_of(model)
        return PartState(spec, family.layout(family.build(spec)), update)

    @property
    def step(self) -> int:
        """The closed step whose result this part holds; 0 is the initial weights. Raises BugError before install."""
        self._installed()
        return self._step

    def install(self, snapshot: Snapshot) -> None:
        """Hold this state from now on; what was accumulated or prepared is dropped.

        Raises StateError, with nothing changed, when it is of another part or another model.
        """
        if snapshot.part != self.spec.name or snapshot.layout != self.layout:
            raise StateError(f"a snapshot of {snapshot.part} does not fit {self.spec.name} of this model")
        vectors = (snapshot.params, snapshot.exp_avg, snapshot.exp_avg_sq)
        self._become(AdamWState(*(vector.to(self._device) for vector in vectors)), snapshot.step)

    def snapshot(self) -> Snapshot:
        """The state after :attr:`step`, on CPU: the part's own immutable vectors there, copies from CUDA."""
        return self._as_snapshot(self._installed(), self._step)

    def prepare(self, mean: Tensor, *, lr: float, clip: float, step: int) -> str:
        """Compute the state after ``step`` beside the current one; returns its digest, which the close record names.

        ``mean`` is what the replicas agreed on, float32 (layout.elements,), the same bits on every one. Preparing again
        replaces the shadow. Raises BugError when ``step`` is not the one after :attr:`step`.
        """
        if step != self.step + 1:
            raise BugError(f"prepare of step {step} on a part at step {self.step}")
        numbers = StepNumbers(step=step, lr=lr, clip=clip)
        self._shadow = self._update(self._installed(), mean.to(self._device), self.layout, numbers)
        return digest(self._as_snapshot(self._shadow, step))

    def swap(self) -> None:
        """The shadow becomes the state, and the next step is open. Raises BugError without a shadow."""
        if self._shadow is None:
            raise BugError("swap without prepare")
        self._become(self._shadow, self._step + 1)

    def give_up(self) -> None:
        """Nothing of the open step counts: what was accumulated or prepared is dropped, and the state that is held is
        the next step's as well."""
        self._become(self._installed(), self._step + 1)

    def discard(self) -> None:
        """Forget the shadow; the open step stays as it is."""
        self._shadow = None

    def _become(self, state: AdamWState, step: int) -> None:
        self._state, self._step, self._shadow = state, step, None

    def _installed(self) -> AdamWState:
        if self._state is None:
            raise BugError(f"{self.spec.name} has no weights yet")
        return self._state

    def _as_snapshot(self, state: AdamWState, step: int) -> Snapshot:
        return Snapshot(
            part=self.spec.name,
            step=step,
            layout=self.layout,
            params=state.params.to(_CPU),
            exp_avg=state.exp_avg.to(_CPU),
            exp_avg_sq=state.exp_avg_sq.to(_CPU),
        )


# --- a part that is trained ------------------------------------------------------------------------------------------


class TrainedPart(PartState):
    """A stage or the private ends. Empty until :meth:`install`; then it holds the state after step :attr:`step`.

    Memory per parameter: 12 bytes of state, 4 (or 8) of accumulator, 2 of bfloat16 copy where ``compute`` is bfloat16,
    and 12 more between ``prepare`` and ``swap``.
    """

    def __init__(
        self,
        spec: PartSpec,
        model: ModelConfig,
        update: Update,
        *,
        device: torch.device = _CPU,
        accumulator: AccumulatorDType = "float32",
    ) -> None:
        family = family_of(model)
        self._module = family.build(spec)
        super().__init__(spec, family.layout(self._module), update, device)
        self._accumulator = Accumulator(self.layout, accumulator, device)

    # --- passes --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *, seed: int | None, graph: bool = True) -> tuple[Tensor, Graph | None]:
        """See :func:`~swarm.models.passes.run_forward`."""
        return run_forward(self._ready(), x, seed=seed, graph=graph)

    def forward_loss(
        self, x: Tensor, targets: Tensor, *, seed: int | None, graph: bool = True
    ) -> tuple[float, int, Graph | None]:
        """Hosted last stage; its backward takes no ``grad_output``. See :func:`~swarm.models.passes.run_loss`."""
        return run_loss(self._ready(), x, targets, seed=seed, graph=graph)

    def backward(self, graph: Graph, grad_output: Tensor | None) -> tuple[Tensor | None, Gradients]:
        """See :func:`~swarm.models.passes.run_backward`. Adds nothing anywhere: :meth:`accumulate` does."""
        return run_backward(graph, grad_output)

    def embed(self, tokens: Tensor, *, seed: int | None = None) -> tuple[Tensor, Graph]:
        """Private ends: see :func:`~swarm.models.passes.run_embedding`."""
        return run_embedding(self._ready(), tokens, seed=seed)

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[float, int, Tensor, Gradients]:
        """Private ends: see :func:`~swarm.models.passes.run_head`."""
        return run_head(self._ready(), hidden, targets)

    def embed_backward(self, graph: Graph, grad: Tensor) -> Gradients:
        """Private ends: the embedding's gradient. Joined to :meth:`loss`'s it makes the microbatch's whole gradient."""
        return run_backward(graph, grad)[1]

    # --- the open step -------------------------------------------------------------------------------------------

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """Microbatches accumulated in the open step."""
        return self._accumulator.microbatches

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Add to the open step, once; see :meth:`~swarm.optim.accumulate.Accumulator.add`."""
        self._accumulator.add(microbatch, summed(gradients))

    def reverse(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Undo an accumulation; see :meth:`~swarm.optim.accumulate.Accumulator.remove`."""
        self._accumulator.remove(microbatch, summed(gradients))

    def gradient_sum(self) -> Tensor:
        """A CPU copy of the sum over accumulated microbatches, (layout.elements,) in the accumulator's dtype."""
        return self._accumulator.total.detach().to(_CPU, copy=True)

    def contribution(self, assigned: Set[MicrobatchId], tokens: int) -> Tensor | None:
        """Return this replica's input to the round when ``assigned``, with so many target tokens, count for it: the sum
        of their gradients; None while anything else is in it, or one is missing. A copy, as :meth:`gradient_sum`."""
        return self.gradient_sum() if self.microbatches == assigned else None

    def _become(self, state: AdamWState, step: int) -> None:
        install_weights(self._module, self.layout.views(state.params), requires_grad=True)
        super()._become(state, step)
        self._accumulator.reset()

    def _ready(self) -> PartModule:
        self._installed()
        return self._module
