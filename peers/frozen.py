"""The frozen weights of runs that train adapters, on this machine: made when a run is founded, found, and removed."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peers.console.lasting import Lasting, Told, tells_nobody
from peers.console.words import command_name
from peers.home.places import FROZEN, RUNS, home_directory
from peers.home.run_directory import RunDirectory, known_runs
from peers.manifest_file import render_tables
from swarm.config import Manifest, load_manifest
from swarm.disk import size_text, write_whole
from swarm.errors import ConfigError, Incompatible, StateError
from swarm.ids import PartName
from swarm.membership.gate import CallGate, given_by_role
from swarm.membership.parts import FrozenPart
from swarm.models.lora import LoraFamily, Stored
from swarm.models.registry import AnyModel, family_of, lora_of
from swarm.models.spec import PartSpec
from swarm.network.protocols import Service
from swarm.parsing import parse_toml
from swarm.state.frozen import FrozenService, FrozenStore, ModelFiles, wanted_frozen

_NOTES = "users"
"""Below the store: a note for each run that needs some of them and is kept elsewhere than in this home."""


def frozen_store(home: Path | str | None) -> FrozenStore:
    """Return where this home keeps them. Raises ConfigError for a home that cannot be one."""
    return FrozenStore(home_directory(home) / FROZEN)


def with_frozen(
    manifest: Manifest,
    files: Path | None,
    store: FrozenStore,
    told: Callable[[str], None],
    lasting: Told = tells_nobody,
) -> Manifest:
    """Return the manifest with the digests of its frozen weights, all of which are in the store from then on.

    Args:
        manifest: Any run's; one that trains all its weights is returned as it is.
        files: The directory of the model's files; None for a model that begins with random weights.
        store: Where to keep them.
        told: Called with a line for each part that was made.
        lasting: Told how many bytes are made, and of how many.

    Raises:
        ConfigError: No module of the model is a target of an adapter.
        Incompatible: The manifest names other frozen weights than these files give.
        StateError: The files or the disk fail. What was made stays, and is not made again.
    """
    family = family_of(manifest.model)
    if not isinstance(family, LoraFamily):
        return manifest
    specs = family.parts(manifest.split)
    if not any(family.adapted(family.build(spec)) for spec in specs):
        there = sorted(set().union(*(family.choices(spec) for spec in specs)))
        remedy = "Name some of them, or leave it out for all."
        raise ConfigError("model.lora.targets", ", ".join(family.lora.targets), ", ".join(there), remedy)
    said, digests = family.lora.digests, dict[PartName, str]()
    layouts = {spec: family.base(spec) for spec in specs}
    done, total = 0, sum(layout.bytes for layout in layouts.values())
    for spec, layout in layouts.items():
        name = spec.name
        lasting("frozen weights of adapters", done, total)
        done += layout.bytes
        if name in said and store.holds(wanted_frozen(name, layout, said[name])):
            digests[name] = said[name]
            continue
        digests[name] = _made(family, spec, manifest, files, store)
        gc.collect()  # the modules that the weights were read into refer to themselves, and would lie next to the next
        told(f"{name}: {size_text(layout.bytes)} in {family.lora.base}, {digests[name][:12]}, in {store.root}")
        if said and digests[name] != said.get(name):
            named = f"weights whose digest begins {said.get(name, '')[:12]} for {name}"
            remedy = "Give the files that the run was founded with, or leave digests out to found another run."
            raise Incompatible("model.lora.digests", digests[name][:12], named, remedy)
    lora = family.lora.model_copy(update={"digests": digests})
    return manifest.model_copy(update={"model": manifest.model.model_copy(update={"lora": lora})})


def _made(family: LoraFamily, spec: PartSpec, manifest: Manifest, files: Path | None, store: FrozenStore) -> str:
    """Make and keep a part's frozen weights; returns their digest."""
    layout = family.base(spec)
    try:
        weights = family.base_weights(manifest.run.seed, spec, files)
    except StateError as error:
        if not family.lora.digests:
            raise
        how = f"{command_name()} ckpt frozen --run {manifest.run_id[:12]} --add DIR, or fetch them: ckpt pull"
        raise StateError(
            f"{error} The frozen weights of {spec.name} are not in {store.root}: make them with {how}"
        ) from None
    return store.keep(spec.name, layout, layout.pack(weights))


def frozen_services(model: AnyModel, files: ModelFiles, gate: CallGate | None = None) -> list[Service]:
    """Return what hands out a run's frozen weights, by role where there is a ``gate``; nothing for one without any."""
    lora = lora_of(model)
    if lora is None or files.frozen is None:
        return []
    service = FrozenService(files.frozen, {PartName(part): found for part, found in lora.digests.items()})
    return [given_by_role(service, gate)]


def store_of(directory: RunDirectory) -> FrozenStore:
    """Return where the frozen weights of a run are that is kept on this machine: in the home in which its directory
    lies, else in the directory."""
    runs = directory.root.absolute().parent
    at_home = runs.name == RUNS and not directory.frozen.is_dir()
    return FrozenStore(runs.parent / FROZEN if at_home else directory.frozen)


def note_use(directory: RunDirectory, manifest: Manifest, store: FrozenStore | None) -> None:
    """Note in the store which of its weights a run needs that is kept where nobody would look for it, so that they do
    not count as unused. Nothing for other runs. Blocking; raises OSError."""
    lora = lora_of(manifest.model)
    if lora is None or store is None or store_of(directory).root.absolute() == store.root.absolute():
        return
    kept = str(directory.root.absolute())
    name = hashlib.sha256(f"{manifest.run_id} {kept}".encode()).hexdigest()[:32]
    said: dict[str, Any] = {
        "run": {"name": manifest.run.name, "directory": kept},
        "model": {"lora": {"digests": dict(lora.digests)}},
    }
    write_whole(store.root / _NOTES / f"{name}.toml", [render_tables(said).encode()])


def frozen_of(manifest: Manifest, part: PartName, store: FrozenStore) -> dict[str, Stored]:
    """Return the frozen weights of a part by name, verified. Raises StateError with what to do where they are not
    here."""
    frozen = FrozenPart(manifest, part, store)
    if not frozen.here:
        remedy = f"Make them of the model's files: {command_name()} ckpt frozen --run RUN --add DIR, RUN being "
        remedy += "the run's directory; or fetch them, of a peer or the home of one: ckpt pull --from INVITE|HOME"
        raise StateError(f"the frozen weights of the adapters of {part}, {frozen.wanted.digest[:12]}, are not in "
                         f"{store.root}. {remedy}")  # fmt: skip
    return dict(frozen.load())


def frozen_of_all(manifest: Manifest, store: FrozenStore) -> dict[str, Stored]:
    """Return those of the whole model. Raises as :func:`frozen_of`."""
    parts = family_of(manifest.model).parts(manifest.split)
    return {name: stored for spec in parts for name, stored in frozen_of(manifest, spec.name, store).items()}


# --- swarm ckpt frozen -----------------------------------------------------------------------------------------------


def listed_frozen(home: Path | str | None) -> list[dict[str, Any]]:
    """Return what a home keeps, as plain data: with the names of the runs there that need it, and of those that its
    peers keep elsewhere with where."""
    users: dict[str, set[str]] = {}
    for file in _files_that_name(home):
        for found, name in _digests_of(file) or ():
            users.setdefault(found, set()).add(name)
    return [
        {"digest": one.digest, "part": one.part, "bytes": one.bytes, "complete": one.whole,
         "runs": sorted(users.get(one.digest, ()))}
        for one in frozen_store(home).listing()
    ]  # fmt: skip


def remove_frozen(home: Path | str | None, wanted: str, *, unused: bool) -> list[dict[str, Any]]:
    """Remove those whose digest begins so, or all that no run of this home needs; returns what was removed.

    A running peer has its own in memory, but can hand out to nobody what is removed here. Raises ConfigError for a
    digest that there is not, StateError when the disk refuses, or where the file of a run cannot be read: that may need
    any of those that look unused.
    """
    if unused and (unread := [file for file in _files_that_name(home) if _digests_of(file) is None]):
        remedy = f"Mend it or remove it; or remove single ones: {command_name()} ckpt frozen --remove DIGEST"
        raise StateError(f"{unread[0]}: it cannot be read, so what its run needs is not known. {remedy}")
    kept = listed_frozen(home)
    gone = [one for one in kept if not one["runs"]] if unused else [o for o in kept if o["digest"].startswith(wanted)]
    if not gone and not unused:
        there = ", ".join(one["digest"][:12] for one in kept)
        allowed = f"how a digest begins: one of {there}" if kept else "nothing: no such weights are kept here"
        raise ConfigError("--remove", wanted, allowed, "See swarm ckpt frozen, also for another --home.")
    store = frozen_store(home)
    for one in gone:
        try:
            store.remove(one["digest"])
        except OSError as error:
            raise StateError(f"{store.place(one['digest'])}: {error.strerror}. It was not removed.") from None
    return gone


def add_frozen(directory: RunDirectory, files: Path, told: Callable[[str], None]) -> None:
    """Make the frozen weights of a run of the model's files on this machine. Raises as :func:`with_frozen`."""
    lasting = Lasting(told, size_text).told
    with_frozen(load_manifest(directory.manifest), files, store_of(directory), told, lasting)


def _files_that_name(home: Path | str | None) -> Iterator[Path]:
    """The files that say which frozen weights the runs of this home need."""
    at = home_directory(home)
    yield from (directory.manifest for directory in known_runs(home))
    # Founders, and peers that joined lately, have their run's file where they live.
    yield from at.glob(f"*/sessions/*/{RunDirectory(Path()).manifest}")
    yield from (at / FROZEN / _NOTES).glob("*.toml")


def _digests_of(file: Path) -> list[tuple[str, str]] | None:
    """(digest, run) of the frozen weights that a run needs, as a file of it says; None where it cannot be read.

    A run that is kept elsewhere counts also while its directory is not there: it may lie on a disk that is not mounted.
    """
    try:
        said = parse_toml(file.read_text(encoding="utf-8"))
        run, digests = said.get("run", {}), said.get("model", {}).get("lora", {}).get("digests", {})
        name, directory = str(run.get("name", "")), run.get("directory")
        if directory is not None:
            name = f"{name} in {directory}{'' if Path(directory).exists() else ', which is not there now'}"
        return [(str(one), name) for one in digests.values()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, TypeError):
        return None
