"""What a peer's memory holds, by kind: what it is expected to, from the manifest and the roster, and what it does.

Both are for people, who compare them. A peer looks itself which parts fit before it takes one (:func:`unfit_parts`),
and before it moves to another (:func:`lacking_to_move`). What it does hold is counted where it lies, tensor by tensor,
without a look at anything else of the process: of graphs their number, with the bytes that one is expected to have.
What is neither (torch, buffers of the network, what a backward makes) is in the process's memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from torch import Tensor

from swarm.consensus.copies import copies_of
from swarm.device import allocated_memory, resident_memory
from swarm.ids import ENDS, PartName
from swarm.membership.copying import Copies
from swarm.membership.holding import RoleManager
from swarm.membership.observer_service import ObserverService
from swarm.membership.part_memory import MemoryContext, lacking_memory, part_bytes
from swarm.membership.roles import Role
from swarm.membership.rules import spec_of, update_of
from swarm.membership.run import RunContext
from swarm.membership.settings import MemberSettings
from swarm.membership.status_types import MemoryReport
from swarm.models.layout import full_vectors
from swarm.models.spec import PartSpec
from swarm.optim.part import TrainedPart
from swarm.pipeline.retention import RETENTION_BYTES
from swarm.planning.costs import MemoryKind, copy_bytes
from swarm.step.rounds import Rounds

KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


class MemoryAccount:
    """One peer's, made anew whenever it is asked for; what follows from the manifest is computed once for each part,
    for which that is built without weights. Cost: some microseconds for each tensor that is held."""

    def __init__(
        self, run: RunContext, holding: RoleManager, copies: Copies, rounds: Rounds, observers: ObserverService
    ) -> None:
        self._run, self._holding, self._copies = run, holding, copies
        self._rounds, self._observers = rounds, observers
        self._of_copies: dict[PartName, int] = {}
        self._of_parts: dict[PartName, dict[MemoryKind, int]] = {}

    def report(self) -> MemoryReport:
        """Return it as it is now. On the event loop."""
        allocated = [allocated_memory(device) for device in self._run.around.device.torch_devices]
        return MemoryReport(
            predicted=_of_all_kinds(self._predicted()),
            measured=_of_all_kinds(self._measured()),
            resident=resident_memory(),
            allocated=None if None in allocated else sum(one or 0 for one in allocated),
        )

    def _predicted(self) -> dict[MemoryKind, int]:
        role, part = self._holding.role, self._holding.part
        found: dict[MemoryKind, int] = {"copies": sum(map(self._copy_bytes, self._wanted()))}
        if part is not None:
            found |= self._part_bytes(part.spec)
        if role is not None:
            number, each = role.expected_graphs
            found |= {"graphs": number * each, "payloads": self._payloads(role)}
        return found

    def _payloads(self, role: Role) -> int:
        """Of each microbatch of its share of a step a replica retains what came in and the gradient that came back, and
        a trainer with ends the same of its own. Each trainer deals its own out evenly, and knows nothing of the others:
        a replica may get one more of each. Where steps are fed early there are two of them."""
        if role.part is None:
            return 0
        specs, manifest, roster = self._run.around.boundary(0, 1), self._run.around.manifest, self._run.position.roster
        step, replicas = manifest.step_microbatches, len(roster.replicas(role.part.spec.name))
        share = min(step, -(-step // max(1, replicas)) + max(0, len(roster.trainers) - 1))
        held = share * (2 if manifest.speed.overlaps else 1)
        return min(RETENTION_BYTES, held * (specs.activation_bytes + specs.gradient_bytes))

    def _wanted(self) -> tuple[PartName, ...]:
        roster, me, manifest = self._run.position.roster, self._run.around.endpoint.peer, self._run.around.manifest
        return tuple(copies_of(roster, me, manifest.run.copies)) if me in roster else ()

    def _part_bytes(self, spec: PartSpec) -> dict[MemoryKind, int]:
        if spec.name not in self._of_parts:
            apart = self._run.around.device.torch_device.type != "cpu"
            self._of_parts[spec.name] = part_bytes(self._run.around.manifest, spec, apart=apart)
        return self._of_parts[spec.name]

    def _copy_bytes(self, part: PartName) -> int:
        if part not in self._of_copies:
            manifest = self._run.around.manifest
            vectors = full_vectors(update_of(manifest).vectors)
            self._of_copies[part] = copy_bytes(manifest.model, spec_of(manifest, part), vectors=vectors)
        return self._of_copies[part]

    def _measured(self) -> dict[MemoryKind, int]:
        role, part = self._holding.role, self._holding.part
        held = {} if part is None else part.tensors()
        held["round"] = [*held.get("round", ()), *self._observers.means()]
        held["copies"] = self._copies.tensors()
        found = storage_bytes(held)
        found["round"] += self._rounds.held_bytes
        if role is not None:
            graphs, found["payloads"] = role.service.held()
            found["graphs"] = graphs * role.expected_graphs[1]
        return found


def lacking_to_move(around: MemoryContext, held: TrainedPart, name: PartName, of_the_step: int) -> str:
    """Return what is missing to train another part, of which a copy is here, in place of the one that is ``held``; ""
    where it fits. Blocking: some milliseconds.

    The copy's state becomes the part's, and that of ``held`` stays as a copy, neither copied; all else of ``held`` is
    let go first, and with it ``of_the_step`` bytes of the host's memory, of the round and of payloads. So one part is
    here at most, and the state of another.
    """
    manifest, tensors = around.manifest, [tensor for kind in held.tensors().values() for tensor in kind]
    vectors = full_vectors(update_of(manifest).vectors)
    copied, stays = (
        copy_bytes(manifest.model, spec_of(manifest, name), vectors=vectors),
        4 * vectors * held.layout.elements,
    )
    on_host, apart = (
        sum(storage_bytes({"weights": [one for one in tensors if (one.device.type == "cpu") is host]}).values())
        for host in (True, False)
    )
    return lacking_memory(around, name, here=copied + on_host + of_the_step - stays, here_apart=apart)


def unfit_parts(around: MemoryContext, there: Sequence[PartName], settings: MemberSettings) -> dict[PartName, str]:
    """Return the parts of these that a peer might take, by its role and its wish, and whose training its memory does
    not hold, each with the reason. Blocking: some milliseconds a part."""
    parts: Iterable[PartName] = ()
    if settings.role == "stage":
        parts = settings.wish.among(there)
    elif settings.role == "trainer":
        parts = set(there) & {ENDS}
    reasons = {part: lacking_memory(around, part) for part in parts}
    return {part: reason for part, reason in reasons.items() if reason}


def _of_all_kinds(found: Mapping[MemoryKind, int]) -> dict[str, int]:
    return {kind: found.get(kind, 0) for kind in KINDS}


def storage_bytes(held: Mapping[MemoryKind, Iterable[Tensor]]) -> dict[MemoryKind, int]:
    """Bytes of what these tensors lie in, each counted once, by the first kind that names it."""
    found, seen = dict.fromkeys(held, 0), set()
    for kind, tensors in held.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            place = (tensor.device, storage.data_ptr())
            if not tensor.is_meta and place not in seen:
                seen.add(place)
                found[kind] += storage.nbytes()
    return found
