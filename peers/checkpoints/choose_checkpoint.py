"""Choose the checkpoint that is sampled, evaluated or exported: the step asked for, or the newest complete one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_shards.tokenize import Tokenizer
from peers.checkpoints.verify import named_file
from peers.console.words import CommandError, command_name, gathering, listed
from peers.data.foreign_tokenizer import check_foreign_tokenizer
from peers.exit_codes import EXIT_USAGE
from peers.home.run_directory import RunDirectory
from swarm.columns import takes
from swarm.config import Manifest, load_manifest
from swarm.errors import ConfigError, StateError
from swarm.models.registry import family_of
from swarm.models.spec import PartSpec
from swarm.schema import TOKENIZER_FILE
from swarm.state.checkpoints.files import (
    CheckpointManifest,
    flaw,
    held,
    latest,
    read_manifest,
    step_directory,
    steps,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStep:
    """A step of a run of which every part is here, but for those that organisations keep to themselves. ``passed_over``
    says what is wrong with a newer one, if one is.
    Where stages have variants it is as many models as there are choices: ``choice`` says which one is meant."""

    directory: RunDirectory
    manifest: Manifest
    record: CheckpointManifest
    passed_over: str | None
    choice: int | None = None

    def on_path(self, name: str | None) -> ChosenStep:
        """Return the model that text of this domain trained, or with this number of a kind of text; where stages have
        no variants, ``name`` is None. Raises ConfigError for one that there is not."""
        paths = self.paths
        if name is not None and name not in paths:
            allowed = f"one of {', '.join(paths)}" if paths else "none for a run whose stages have no variants"
            raise ConfigError("--path", name, allowed, "Correct it." if paths else "Leave it out.")
        chosen = self if name is None else replace(self, choice=paths.index(name))
        if name is not None and (owners := self.manifest.split.owners):
            root = self.directory.checkpoints
            there = held(root, self.step).parts
            if kept := [spec.name for spec in chosen.specs if spec.name in owners and spec.name not in there]:
                raise CommandError(
                    f"step {self.step} lacks {kept[0]} here: {owners[kept[0]]} keeps it to itself",
                    check=str(step_directory(root, self.step)),
                    next_=f"a peer of {owners[kept[0]]} can take it; or name another path: {', '.join(paths)}",
                    exit_code=EXIT_USAGE,
                )
        return chosen

    @property
    def paths(self) -> tuple[str, ...]:
        """Return what its models are called; none where there is one, since stages have no variants."""
        split = self.manifest.split
        return split.domains or tuple(map(str, range(len(split.centres))))

    @property
    def specs(self) -> tuple[PartSpec, ...]:
        """Return the parts of the one model that is meant. Raises ConfigError where it could be several."""
        split = self.manifest.split
        if split.variants and self.choice is None:
            remedy = f"Say which, as --path {self.paths[0]}."
            raise ConfigError("--path", None, f"one of {', '.join(self.paths)}", remedy,
                              why="stages have variants, and each path through them is a model")  # fmt: skip
        specs = family_of(self.manifest.model).parts(split)
        return tuple(spec for spec in specs if takes(spec.name, self.choice or 0))

    @property
    def step(self) -> int:
        """Its number."""
        return self.record.step


def choose_step(directory: RunDirectory, step: int | None = None) -> ChosenStep:
    """Return the checkpoint after ``step``, or the newest complete one. Reads names and headers, no tensors.

    Raises ConfigError when there is none such, CommandError when parts of it are not on this machine, StateError when
    it is damaged, or of another run.
    """
    manifest = load_manifest(directory.manifest)
    root = directory.checkpoints
    chosen = _choose(directory, manifest, step)
    record = read_manifest(root, chosen)
    if record.run != manifest.run_id:
        raise StateError(f"{root}: step {chosen} belongs to run {record.run[:12]}, not {manifest.run_id[:12]}")
    newest = steps(root)[-1]
    passed_over = _flaw(directory, manifest, newest) if step is None and newest != chosen else None
    return ChosenStep(directory=directory, manifest=manifest, record=record, passed_over=passed_over)


def run_tokenizer(chosen: ChosenStep) -> tuple[bytes, Tokenizer]:
    """Return the run's tokenizer, its file and what it loads as. Raises StateError for one that is missing or another,
    ConfigError for one that must not be loaded here."""
    document = named_file(chosen.directory, chosen.manifest, TOKENIZER_FILE)
    check_foreign_tokenizer(document)  # a contact sent it
    return document, Tokenizer(document, chosen.manifest.tokenizer.end or None)


def _missing(directory: RunDirectory, manifest: Manifest, step: int) -> list[str]:
    """The parts of a step that are not on this machine, as where their peers ran on others; in the model's order."""
    where = step_directory(directory.checkpoints, step)
    there = {name for cut in manifest.cuts for name in cut if (where / f"{name}.safetensors").is_file()}
    return [name for name in manifest.cut_with(there) if name not in there and name not in manifest.split.owners]


def _choose(directory: RunDirectory, manifest: Manifest, step: int | None) -> int:
    """The step asked for, or the newest complete one. Raises as :func:`choose_step`."""
    root = directory.checkpoints
    have = steps(root)
    if not have:
        raise CommandError(
            f"the run in {directory.root} has no checkpoint: the run ended before the first was written",
            check=str(root),
            next_=f"train again: {command_name()} quickstart",
            exit_code=EXIT_USAGE,
        )
    if step is not None and step not in have:
        allowed = f"one of {', '.join(map(str, have))}"
        raise ConfigError("--step", step, allowed, "Leave it out to take the newest complete one.")
    chosen = latest(root, manifest.split.owners) if step is None else step
    wanted = have[-1] if chosen is None else chosen
    if lacking := _missing(directory, manifest, wanted):
        raise _incomplete(directory, wanted, lacking, none=chosen is None)
    if chosen is None:
        raise StateError(f"no checkpoint is complete; the newest: {flaw(root, wanted, manifest.split.owners)}")
    return chosen


def _flaw(directory: RunDirectory, manifest: Manifest, step: int) -> str | None:
    if lacking := _missing(directory, manifest, step):
        return f"step {step}, which lacks {listed(lacking)} here"
    return flaw(directory.checkpoints, step, manifest.split.owners)


def _incomplete(directory: RunDirectory, step: int, lacking: Sequence[str], *, none: bool) -> CommandError:
    where = step_directory(directory.checkpoints, step)
    cause = f"step {step} lacks {listed(lacking)}"
    files = " ".join(f"{name}.safetensors" for name in lacking)
    copy = f"copy {files} of that step from there (the same path below that machine's home) into {where}"
    return CommandError(
        f"no step is complete here: the newest, {cause}" if none else f"{cause} here",
        check=f"{where}: each machine keeps the parts that its peers held; look on the others too",
        next_=gathering(directory.root) if none else copy,
    )
