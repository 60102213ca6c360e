"""``swarm new --resume … --stages N``: the checkpoint of a run, cut into other stages, as that of a run of its own.

Stages are part of the manifest, and so of the run's id: what goes on is another run, whose manifest names the step and
the record that it follows. Its directory is made with that one checkpoint, every weight and moment as it was; from then
on it is a run that is resumed.

What no checkpoint has is lost as in every resumed run: what averaging rounded off and replicas still owe, each
replica's own moments with ``averaging.mode = "local"``, microbatches that were fed early.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from peers.checkpoints.resume import Resumable
from peers.checkpoints.writer import keep_run, run_directory_of
from peers.console.words import command_name, reason_of
from peers.frozen import frozen_store, store_of
from peers.home.places import RUNS, home_directory
from swarm.config import Manifest, Parent, new_nonce, parse_manifest
from swarm.consensus.proof import Proof
from swarm.consensus.records import CloseRecord
from swarm.consensus.roster import Roster
from swarm.errors import ConfigError, StateError
from swarm.ids import PartName, shared_by
from swarm.membership.founding_record import Origin, founding_record
from swarm.membership.rules import update_of
from swarm.models.layout import FlatLayout
from swarm.models.lora import LoraFamily
from swarm.models.registry import family_of, lora_of
from swarm.models.spec import PartSpec
from swarm.state.checkpoints.files import read_manifest, step_directory, write_manifest
from swarm.state.checkpoints.proof import manifest_with, proof_in
from swarm.state.checkpoints.recut import recut
from swarm.state.frozen import FrozenStore, wanted_frozen


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """The run of another cut, ready to be resumed; ``digest`` is that of the whole model, in both cuts."""

    resumable: Resumable
    parent: Manifest
    digest: str

    @property
    def said(self) -> list[tuple[str, str]]:
        """Return what was done, as (label, text)."""
        parent, manifest = self.parent, self.resumable.manifest
        cuts = " to ".join(f"{len(sizes)} of {', '.join(map(str, sizes))}" for sizes in map(_sizes, (parent, manifest)))
        return [
            ("cut anew", f"from {parent.run.name}, {parent.run_id[:12]}: stages with these layers, {cuts}"),
            ("whole", f"{self.digest}, before and after: every weight and moment is as it was"),
        ]


def recut_run(found: Resumable, changes: Mapping[str, Any], home: Path | str | None) -> Recut:
    """Make a run of a checkpoint of another, with another cut, and its directory in this home.

    Reads the checkpoint twice and what it writes once, some 20 s a GB. Takes the memory of one part, and the disk that
    the checkpoint takes. When it fails it leaves no run; frozen weights that were cut by then stay in the store of this
    machine.

    Args:
        found: The checkpoint, complete and verified.
        changes: Values that replace those of the manifest, by dotted key, ``split.stages`` among them.
        home: This machine's, in which the new run is kept.

    Raises:
        ConfigError: The model cannot be cut so, or is already; or a run with this manifest cannot be.
        StateError: The files changed, are of another model than the manifest's, or the disk refuses.
    """
    if found.manifest.split.variants:
        raise ConfigError("--stages", changes.get("split.stages"), "none for a run whose stages have variants",
                          f"To go on with it: {command_name()} new --resume {shlex.quote(str(found.directory.root))}",
                          why="which layers of which variant belong together is said nowhere")  # fmt: skip
    source = found.directory.checkpoints
    kept = read_manifest(source, found.step)
    record = proof_in(kept, found.manifest.run_id).record
    if any(shared_by(PartName(part)) for part in record.digests):
        raise ConfigError("--stages", changes.get("split.stages"), "the run's own while stages share their layers",
                          "Cut a checkpoint of a step after model.delink_at.")  # fmt: skip
    manifest = _manifest(found.manifest, record, changes)
    if _sizes(manifest) == _sizes(found.manifest):
        raise ConfigError(
            "--stages",
            manifest.split.stages,
            f"another cut than the run's own, {', '.join(map(str, _sizes(manifest)))} layers",
            f"To go on with that run: {command_name()} new --resume {shlex.quote(str(found.directory.root))}",
        )
    family, vectors = family_of(manifest.model), update_of(manifest).vectors
    layouts = dict[PartName, FlatLayout]()
    for spec in family.parts(manifest.split):
        layouts[spec.name] = family.layout(family.build(spec)).kept_by(vectors)
    manifest = _with_frozen(found.manifest, manifest, store_of(found.directory), frozen_store(home))
    directory = run_directory_of(home_directory(home) / RUNS / "{run}", manifest)
    try:
        made, digest = recut(source, kept, directory.checkpoints, manifest.run_id, layouts)
        parts = {PartName(part): one for part, one in made.parts.items()}
        origin = dataclasses.replace(Origin.after(record), digests=parts)
        begins = founding_record(manifest.run_id, Roster(()), origin)
        write_manifest(directory.checkpoints, manifest_with(Proof(record=begins)))
        keep_run(directory, manifest, found.files)  # the last: a directory without it is no run's
    except StateError as error:
        shutil.rmtree(directory.root, ignore_errors=True)
        raise StateError(
            f"the checkpoint in {step_directory(source, found.step)} was not cut into {manifest.split.stages} stages: "
            f"{reason_of(error)}. The run goes on uncut with {command_name()} new --resume "
            f"{shlex.quote(str(found.directory.root))}"
        ) from error
    except BaseException:
        shutil.rmtree(directory.root, ignore_errors=True)
        raise
    resumable = dataclasses.replace(found, directory=directory, manifest=manifest)
    return Recut(resumable=resumable, parent=found.manifest, digest=digest)


def decided_by(record: CloseRecord) -> str:
    """Return the hash of the record that decided the state of this one: a founding record decides nothing of its own,
    what it begins with is the state of the record before it."""
    return record.previous if record.founding and record.step else record.hash()


def _manifest(old: Manifest, record: CloseRecord, changes: Mapping[str, Any]) -> Manifest:
    """The manifest of the run that goes on after this record of another. Raises ConfigError."""
    stages = changes.get("split.stages", old.split.stages)
    if changes.get("run.start_when.stage_hosts", old.run.start_when.stage_hosts) < stages:
        hosts = changes.get("run.start_when.stage_hosts", old.run.start_when.stage_hosts)
        why = f"the run would start with {hosts}, and every stage needs one"
        raise ConfigError("--hosts", hosts, f"at least {stages} stage hosts", f"Add --hosts {stages}.", why=why)
    document = old.model_dump(mode="json")
    document["split"].pop("layers_per_stage", None)  # those of the old cut
    if lora_of(old.model) is not None:
        document["model"]["lora"].pop("digests", None)
    for key in ("share", "delink_at"):  # stages share nothing any more
        document["model"].pop(key, None)
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        here = document
        for section in sections:
            here = here[section]
        here[key] = value
    document["run"]["parent"] = Parent(run=old.run_id, step=record.step, record=decided_by(record)).model_dump()
    document["run"]["nonce"] = new_nonce()
    return parse_manifest(document, "the run that is cut anew")


def _sizes(manifest: Manifest) -> list[int]:
    """The layers of each stage."""
    specs = family_of(manifest.model).parts(manifest.split)
    return [spec.last_layer - spec.first_layer for spec in specs if spec.last_layer > spec.first_layer]


# --- the frozen weights of adapters -----------------------------------------------------------------------------------


def _with_frozen(old: Manifest, new: Manifest, source: FrozenStore, store: FrozenStore) -> Manifest:
    """The new manifest with the digests of its parts' frozen weights, which are in the store from then on: the old
    parts' bytes, tensor by tensor. Memory of one old part and one new. Raises StateError where they are not here."""
    family = family_of(new.model)
    before = family_of(old.model)
    if not isinstance(family, LoraFamily) or not isinstance(before, LoraFamily):
        return new
    there = {spec: before.base(spec) for spec in before.parts(old.split)}
    holder = {slot.name: spec for spec, layout in there.items() for slot in layout.slots}
    digests = dict[PartName, str]()
    for spec in family.parts(new.split):
        layout = family.base(spec)
        string = torch.zeros(layout.bytes, dtype=torch.uint8)
        for part in dict.fromkeys(holder[slot.name] for slot in layout.slots):
            bytes_of = _frozen_bytes(before, part, source)
            for slot in layout.slots:
                if slot.name in bytes_of:
                    string[slot.offset : slot.offset + slot.size] = bytes_of[slot.name]
        digests[spec.name] = store.keep(spec.name, layout, string.view(torch.float32))
    lora = family.lora.model_copy(update={"digests": digests})
    return new.model_copy(update={"model": new.model.model_copy(update={"lora": lora})})


def _frozen_bytes(family: LoraFamily, spec: PartSpec, source: FrozenStore) -> dict[str, torch.Tensor]:
    """Each frozen tensor of an old part as it is stored, by name."""
    layout = family.base(spec)
    wanted = wanted_frozen(spec.name, layout, family.lora.digests[spec.name])
    if not source.holds(wanted):
        remedy = f"Make them of the model's files: {command_name()} ckpt frozen --add DIR, or fetch them: ckpt pull"
        raise StateError(f"the frozen weights of the adapters of {spec.name} are not in {source.root}. {remedy}")
    string = source.load(wanted).view(torch.uint8)
    return {slot.name: string[slot.offset : slot.offset + slot.size] for slot in layout.slots}
