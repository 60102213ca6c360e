"""What ``swarm doctor`` finds out with torch: the device and its memory, which parts of a run fit, and their speed.

Everything is blocking; call it on a thread of its own. Imports torch: seconds.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from swarm.clock import Clock
from swarm.columns import host_parts
from swarm.config import Manifest
from swarm.device import Device, DeviceThread, choose_device, resolve_device
from swarm.ids import ENDS, PartName, variant_of
from swarm.membership.part_memory import lacking_memory, part_bytes
from swarm.membership.rules import spec_of
from swarm.models.family import PartModule
from swarm.models.layout import install_weights, state_of
from swarm.models.lora import LoraFamily, install_base
from swarm.models.passes import run_backward, run_forward
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec
from swarm.optim.swapped_part import Home

ROUNDS = 3
LARGE_PARAMETERS = 64_000_000
"""Of a stage with more one layer is measured, and the rest follows from its operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeen:
    """A device that computes: its name as torch knows it and for people, and bytes of its memory."""

    device: str
    title: str
    free: int
    total: int
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPart:
    """What training one part takes in bytes, and what is in the way of it here; "" for one that fits."""

    part: PartName
    bytes: int
    parameters: int
    lacking: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpeed:
    """Seconds of a microbatch's forward and backward: in one stage, through the ``whole`` model, and what was
    ``measured`` for that, in words."""

    stage_s: float
    whole_s: float
    measured: str


@dataclass(frozen=True, slots=True)
class _Planned:
    """See :class:`~swarm.membership.roles.MemoryContext`."""

    manifest: Manifest
    device: Device
    home: Home | None = None


def try_device(name: str) -> DeviceSeen:
    """Return the device after it has computed something. Raises ConfigError for one that is not there, RuntimeError for
    one on which torch cannot compute."""
    device, why = choose_device(name)
    probe = torch.ones((64, 64), device=device, requires_grad=True)
    total = float((probe @ probe).sum().detach())
    if total != 64.0**3:
        raise RuntimeError(f"the sum of a product of ones is {total:g} there, and should be {64**3}")
    planned = DeviceThread(device)
    title, memory = f"the CPU ({why})" if name == "auto" else "the CPU", 0
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        title, memory = str(found.name), int(found.total_memory)
    elif device.type == "mps":
        title, memory = "Apple's GPU", int(torch.mps.recommended_max_memory())
    return DeviceSeen(
        device=str(device), title=title, free=planned.free_memory(), total=memory, torch=str(torch.__version__),
    )  # fmt: skip


class DeviceBench:
    """What one device can do for a run: which parts fit, and how fast they are.

    ``name`` is the device's; torch's kernels have so many CPU ``threads``.
    """

    def __init__(self, manifest: Manifest, name: str, threads: int, clock: Clock) -> None:
        self._manifest, self._threads, self._clock = manifest, threads, clock
        self._family, self._device = family_of(manifest.model), resolve_device(name)

    def free(self) -> int:
        """Return the bytes of the device's memory that are free."""
        return DeviceThread(self._device).free_memory()

    def parts(self) -> list[PlannedPart]:
        """Return for each part of the model whether a peer that joins here could train it: what
        :func:`~swarm.membership.part_memory.lacking_memory` says to one. Raises ConfigError where the model cannot be
        made here."""
        manifest, family, apart = self._manifest, self._family, self._device.type != "cpu"
        family.warm_up()
        planned, found = _Planned(manifest, DeviceThread(self._device)), []
        for spec in family.parts(manifest.split):
            takes = sum(part_bytes(manifest, spec, apart=apart).values())
            parameters = family.cost(spec, manifest.model.context).parameters
            lacking = lacking_memory(planned, spec.name)
            found.append(PlannedPart(part=spec.name, bytes=takes, parameters=parameters, lacking=lacking))
        return found

    def speed(self, part: PartName, within_s: float) -> BlockSpeed:
        """Measure forward and backward of a microbatch through a stage with weights of no meaning, the best of some.

        A large stage is measured by one layer, and a large microbatch by some of its rows; the rest follows from the
        numbers of operations and rows. Takes no longer than about ``within_s`` and two passes of a row. Raises
        RuntimeError where the memory of the device does not do.
        """
        torch.set_num_threads(self._threads)
        clock, wanted = self._clock, self._manifest.batch.microbatch_size
        stage = spec_of(self._manifest, part)
        measured = self._bare(stage)
        module = self._filled(measured)
        ends, rows = clock.monotonic() + within_s, 1
        self._pass(module, 1)  # the first of a process makes torch load what it needs
        best = self._pass(module, 1)
        affordable = int((ends - clock.monotonic()) / (ROUNDS * max(best, 1e-6)))
        if (more := min(wanted, affordable)) > 1:
            rows, best = more, self._pass(module, more)
        for _ in range(ROUNDS - 1):
            if clock.monotonic() < ends:
                best = min(best, self._pass(module, rows))
        an_operation = best * wanted / rows / max(1, self._flops(measured))
        layers = measured.last_layer - measured.first_layer
        return BlockSpeed(
            stage_s=an_operation * self._flops(stage),
            whole_s=an_operation * self._flops(self._family.whole),
            measured=f"{layers} layer{'s' if layers != 1 else ''}, {rows} of {wanted} rows, best of {ROUNDS}",
        )

    @property
    def microbatch_flops(self) -> float:
        """Operations of a microbatch's forward and backward through the whole model."""
        return (
            3.0 * self._flops(self._family.whole) * self._manifest.batch.microbatch_size * self._manifest.model.context
        )

    def together(self, peers: int, within_s: float) -> float:
        """Return the seconds from one microbatch to the next through the whole model, while so many peers of this
        machine compute at once: one layer tells, on a thread for each.

        Takes no longer than about ``within_s`` and three passes of a row. Raises RuntimeError where the memory of the
        device does not do.
        """
        torch.set_num_threads(self._threads)
        clock, wanted, over = self._clock, self._manifest.batch.microbatch_size, threading.Event()
        whole = self._family.whole
        layer = replace(whole, embedding=False, head=False, last_layer=whole.first_layer + 1)
        modules = [self._filled(layer) for _ in range(peers)]
        self._pass(modules[0], 1)  # the first of a process makes torch load what it needs
        once = self._pass(modules[0], 1)
        rows = max(1, min(wanted, int(within_s / (2 * peers * max(once, 1e-6)))))

        def passes_a_second(module: PartModule) -> float:
            began, passes = clock.monotonic(), 0
            while (spent := clock.monotonic() - began) < within_s or not passes:
                if over.is_set():
                    break
                self._pass(module, rows)
                passes += 1
            return passes / spent

        began, used = clock.monotonic(), time.process_time()
        with ThreadPoolExecutor(peers) as pool:
            try:
                rate = sum(pool.map(passes_a_second, modules))
            finally:
                over.set()
        cores = (time.process_time() - used) / (clock.monotonic() - began) if self._device.type == "cpu" else 1.0
        alone = wanted / rows * self._flops(whole) / max(1, self._flops(layer)) / rate
        # Where each peer has a core, that with the most work lets the others wait.
        return alone * max(1.0, cores * self._largest_share())

    def _largest_share(self) -> float:
        """The share of a microbatch's work that falls on one peer, of those that the run starts with, at most."""
        split, start = self._manifest.split, self._manifest.run.start_when
        shares = []
        for spec in self._family.parts(split):
            each = start.stage_hosts // len(host_parts(split.parts)) * variant_of(spec.name)[1]
            replicas = start.trainers if spec.name == ENDS else each
            shares.append(self._flops(spec) / max(1, replicas))
        return max(shares) / max(1, self._flops(self._family.whole))

    def _bare(self, stage: PartSpec) -> PartSpec:
        """A stage without ends and, where it is large, all its layers but one."""
        bare = replace(stage, embedding=False, head=False)
        large = self._family.cost(bare, self._manifest.model.context)
        if large.parameters + large.frozen > LARGE_PARAMETERS:
            return replace(bare, last_layer=bare.first_layer + 1)
        return bare

    def _flops(self, spec: PartSpec) -> int:
        return self._family.cost(spec, self._manifest.model.context).forward_flops

    def _filled(self, spec: PartSpec) -> PartModule:
        """A part with small weights, the frozen ones all zero: they take the same time."""
        module, family = self._family.build(spec), self._family
        if isinstance(family, LoraFamily):
            base = family.base(spec)
            install_base(module, base.views(torch.zeros(base.bytes, dtype=torch.uint8)), self._device)
        generator = torch.Generator().manual_seed(0)
        weights = {n: 0.02 * torch.randn(t.shape, generator=generator) for n, t in state_of(module).items()}
        install_weights(module, weights, requires_grad=True, device=self._device)
        return module

    def _pass(self, module: PartModule, rows: int) -> float:
        """Seconds of one forward and backward."""
        spec = self._family.boundary(rows, self._manifest.model.context)
        hidden = torch.full(spec.shape, 0.01, dtype=getattr(torch, spec.dtype), device=self._device)
        began = self._clock.monotonic()
        output, graph = run_forward(module, hidden, seed=None, graph=True)
        if graph is not None:
            run_backward(graph, torch.full_like(output, 1e-3))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return self._clock.monotonic() - began
