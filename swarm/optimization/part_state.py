"""The state of one part of the model after one step: weights and both moments, and how an update changes them.

This is all that a copy of a part is: nothing computes with it, so it has no module and no accumulator. The flat vectors
are never written to after they were made: a step makes new ones, the shadow, and :meth:`PartState.swap` puts them in
place. So a snapshot on CPU costs nothing and stays what it is for as long as someone holds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.errors import BugError, StateError
from swarm.models.layout import FlatLayout
from swarm.models.spec import ModelConfig, PartSpec
from swarm.models.split import build_part
from swarm.optimization.adamw import AdamWState, StepNumbers
from swarm.optimization.update import Update
from swarm.state.snapshot import Snapshot, digest

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
        return PartState(spec, FlatLayout.of(build_part(spec, model)), update)

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
