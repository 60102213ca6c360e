"""One part of the model on this peer: its weights, its optimizer state, and the step that is open.

Everything here is synchronous and belongs on the device thread. The flat master vectors are never written to after
they were made (:class:`~swarm.optimization.part_state.PartState`), so graphs made before a swap stay right.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from swarm.errors import BugError
from swarm.ids import MicrobatchId
from swarm.models.gpt import Piece, Stage
from swarm.models.layout import FlatLayout
from swarm.models.passes import Gradients, Graph, run_backward, run_embedding, run_forward, run_head, run_loss
from swarm.models.spec import ModelConfig, PartSpec
from swarm.models.split import build_part, install_weights
from swarm.optimization.accumulate import Accumulator, AccumulatorDType
from swarm.optimization.adamw import AdamWState
from swarm.optimization.part_state import PartState
from swarm.optimization.update import Update

_CPU = torch.device("cpu")


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
        self._module: Piece = build_part(spec, model)
        super().__init__(spec, FlatLayout.of(self._module), update, device)
        self._accumulator = Accumulator(self.layout, accumulator, device)

    # --- passes --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *, seed: int | None, graph: bool = True) -> tuple[Tensor, Graph | None]:
        """See :func:`~swarm.models.passes.run_forward`."""
        return run_forward(self._stage(), x, seed=seed, graph=graph)

    def forward_loss(
        self, x: Tensor, targets: Tensor, *, seed: int | None, graph: bool = True
    ) -> tuple[float, int, Graph | None]:
        """Hosted last stage; its backward takes no ``grad_output``. See :func:`~swarm.models.passes.run_loss`."""
        return run_loss(self._stage(), x, targets, seed=seed, graph=graph)

    def backward(self, graph: Graph, grad_output: Tensor | None) -> tuple[Tensor | None, Gradients]:
        """See :func:`~swarm.models.passes.run_backward`. Adds nothing anywhere: :meth:`accumulate` does."""
        return run_backward(graph, grad_output)

    def embed(self, tokens: Tensor, *, seed: int | None = None) -> tuple[Tensor, Graph]:
        """Private ends: see :func:`~swarm.models.passes.run_embedding`."""
        return run_embedding(self._piece(), tokens, seed=seed)

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[float, int, Tensor, Gradients]:
        """Private ends: see :func:`~swarm.models.passes.run_head`."""
        return run_head(self._piece(), hidden, targets)

    def embed_backward(self, graph: Graph, grad: Tensor) -> Gradients:
        """Private ends: the embedding's gradient. Joined to :meth:`loss`'s it makes the microbatch's whole gradient."""
        return run_backward(graph, grad)[1]

    # --- the open step -------------------------------------------------------------------------------------------

    @property
    def microbatches(self) -> frozenset[MicrobatchId]:
        """Microbatches accumulated in the open step."""
        return self._accumulator.microbatches

    def accumulate(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Add to the open step, once; see :meth:`~swarm.optimization.accumulate.Accumulator.add`."""
        self._accumulator.add(microbatch, gradients)

    def reverse(self, microbatch: MicrobatchId, gradients: Gradients) -> None:
        """Undo an accumulation; see :meth:`~swarm.optimization.accumulate.Accumulator.remove`."""
        self._accumulator.remove(microbatch, gradients)

    def gradient_sum(self) -> Tensor:
        """A CPU copy of the sum over accumulated microbatches, (layout.elements,) in the accumulator's dtype."""
        return self._accumulator.total.detach().to(_CPU, copy=True)

    def contribution(self, assigned: Set[MicrobatchId], tokens: int) -> Tensor | None:
        """What this replica puts into the round when ``assigned``, with so many target tokens, count for it: the sum of
        their gradients; None while anything else is in it, or one is missing. A copy, as :meth:`gradient_sum`."""
        return self.gradient_sum() if self.microbatches == assigned else None

    def _become(self, state: AdamWState, step: int) -> None:
        install_weights(self._module, self.layout.views(state.params), requires_grad=True)
        super()._become(state, step)
        self._accumulator.reset()

    def _piece(self) -> Piece:
        self._installed()
        return self._module

    def _stage(self) -> Stage:
        module = self._piece()
        if not isinstance(module, Stage):
            raise BugError(f"{self.spec.name} has no blocks")
        return module
