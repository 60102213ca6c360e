"""A stage that is on its device for some of the time: its state, and the sum of its step, are elsewhere.

It is brought where something is computed with it, and goes when others need the room
(:class:`~swarm.residency.Residents`). Nothing of it stays on the device then, so no graph may outlive the work that it
was made in. What was summed up in the meantime is added to the sum at once when it goes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from swarm.disk import reserve, size_text
from swarm.errors import BugError, StateError
from swarm.ids import StepWork
from swarm.models.family import PartModule
from swarm.models.layout import install_tensors, install_weights, state_of
from swarm.models.passes import Gradients
from swarm.models.spec import ModelConfig, PartSpec
from swarm.optim.accumulate import Accumulator, AccumulatorDType
from swarm.optim.part import TrainedPart
from swarm.optim.update import Update
from swarm.planning.costs import MemoryKind
from swarm.residency import Residents
from swarm.state.snapshot import Snapshot

_CPU = torch.device("cpu")
Allocate = Callable[[int, torch.dtype], Tensor]
"""Makes a flat vector of zeros on the host."""


def in_memory(elements: int, dtype: torch.dtype) -> Tensor:
    """Return a vector in the machine's memory."""
    return torch.zeros(elements, dtype=dtype)


def in_files(directory: Path) -> Allocate:
    """Return what makes vectors whose bytes are in files without a name in a directory: they are gone with the vector,
    or with the process, however that ends. It raises StateError where the disk has no room."""

    def allocate(elements: int, dtype: torch.dtype) -> Tensor:
        size = max(1, elements * dtype.itemsize)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="vector-") as file:
            file.truncate(size)
            try:  # all of it now: who writes to memory that the disk has no room for is killed
                reserve(file.fileno(), size)
            except OSError as error:
                raise StateError(
                    f"{directory} has no room for {size_text(size)} of a stage: {error.strerror}"
                ) from error
            return torch.from_file(file.name, shared=True, size=elements, dtype=dtype)

    return allocate


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where parts are that take turns on one device: those that are on it, and where their vectors are: in a
    ``directory``, or (None) in memory."""

    residents: Residents = field(default_factory=Residents)
    directory: Path | None = None

    @property
    def allocate(self) -> Allocate:
        """Return what makes their vectors."""
        return in_memory if self.directory is None else in_files(self.directory)


class StagedAccumulator(Accumulator):
    """A sum on the host, to which what is made on a device is added when the part leaves it."""

    def __init__(self, part: SwappedPart, dtype: AccumulatorDType) -> None:
        super().__init__(part.layout, dtype, torch.device("meta"))
        self._part = part
        self._host = part.allocate(part.layout.elements, self._dtype)
        self._here = False
        self.sums = [self._host]
        self._views = self._named(self._host)

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        layout = self._part.layout
        return {name: view for name, view in layout.views(flat).items() if name not in layout.buffers}

    def _take(self, gradients: Gradients, sign: int, scale: float) -> None:
        if not self._here:
            device = self._part.device
            self._here, stage = True, torch.zeros(len(self._host), dtype=self._dtype, device=device)
            self.sums, self._views = [self._host, stage], self._named(stage)
        super()._take(gradients, sign, scale)

    def flush(self) -> None:
        """Bring what is on the device into the host's sum; nothing is there then."""
        if self._here:
            self._host.add_(self.sums[1].to(_CPU))
            self._drop()

    def _drop(self) -> None:
        self._here, self.sums, self._views = False, [self._host], self._named(self._host)

    @property
    def total(self) -> Tensor:
        """See :attr:`Accumulator.total`; on the host."""
        self.flush()
        return self._host

    def copied(self) -> Tensor:
        """See :meth:`Accumulator.copied`."""
        return self.total.clone()

    def reset(self) -> None:
        """See :meth:`Accumulator.reset`."""
        self._drop()
        super().reset()


class SwappedPart(TrainedPart):
    """A :class:`TrainedPart` whose vectors are made by ``allocate``. Memory on the device while it is there: 2 or 4
    bytes of weights and 4 (or 8) of a sum for each parameter; on the host, or on its disk, 12 of state with AdamW and 4
    (or 8) of the step's sum."""

    def __init__(
        self,
        spec: PartSpec,
        model: ModelConfig,
        update: Update,
        *,
        devices: Sequence[torch.device] = (_CPU,),
        accumulator: AccumulatorDType = "float32",
        home: Home,
    ) -> None:
        self._residents, self.allocate = home.residents, home.allocate
        self._brought = False
        super().__init__(spec, model, update, devices=devices, accumulator=accumulator)

    def _new_sum(self, accumulator: AccumulatorDType) -> Accumulator:
        return StagedAccumulator(self, accumulator)

    @property
    def device(self) -> torch.device:
        """Return where it is when it is computed with."""
        return self._device

    def depart(self) -> None:
        """See :class:`~swarm.residency.Resident`."""
        self._brought = False
        for one in self._sums.made:
            assert isinstance(one, StagedAccumulator)  # noqa: S101 - made here
            one.flush()
        meta = torch.device("meta")
        held = state_of(self._module)
        gone = {name: torch.empty_like(tensor, device=meta) for name, tensor in held.items()}
        install_tensors(self._module, held, gone, meta, requires_grad=True)

    def install(self, snapshot: Snapshot) -> None:
        """See :meth:`PartState.install`; the vectors are copied to where they belong."""
        own = tuple(self.allocate(len(vector), vector.dtype).copy_(vector) for vector in snapshot.vectors)
        super().install(replace(snapshot, vectors=own))

    def tensors(self) -> dict[MemoryKind, list[Tensor]]:
        """See :meth:`PartState.tensors`."""
        held = super().tensors()
        return held | {"weights": [one for one in held["weights"] if one.device.type != "meta"]}

    def _new_like(self, vector: Tensor) -> Tensor:
        return self.allocate(len(vector), vector.dtype)

    def _module_for(self, work: StepWork | None) -> PartModule:
        module = super()._module_for(work)
        if self._residents.use(self) or not self._brought:
            self._bring()
        return module

    def _bring(self) -> None:
        weights = self.layout.views(self._installed()[0])
        if self._device.type == "cpu":  # else it would compute with the vector itself, wherever that is
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        install_weights(self._module, weights, requires_grad=True, device=self._device)
        self._brought = True

    def _stepped(self) -> None:
        if self._brought:
            super()._stepped()

    def _compute_with(self, params: Tensor, module: PartModule) -> None:
        if module is not self._module:
            raise BugError("a part that comes and goes has one module")
        self._brought = False  # brought anew where it is computed with
