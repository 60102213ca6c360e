"""Find the checkpoint from which a run without peers is resumed: the newest complete one of a directory, verified."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from peers.checkpoints.verify import CheckedStep, check_step, named_files
from peers.console.lasting import Told, tells_nobody
from peers.console.words import CommandError, command_name, gathering, listed
from peers.exit_codes import EXIT_USAGE
from peers.home.last_events import newest_closing
from peers.home.places import RUNS, check_nobody_here, home_directory
from peers.home.run_directory import RunDirectory, find_run_directory
from swarm.config import Manifest, load_manifest
from swarm.errors import StateError
from swarm.ids import PartName, RunId
from swarm.membership.founding_record import Origin
from swarm.schema import MAX_COUNT
from swarm.state.checkpoints.files import held, read_manifest, step_called, step_directory, steps
from swarm.state.checkpoints.parts import load_part
from swarm.state.checkpoints.proof import proof_in
from swarm.state.checkpoints.rotation import aside_directory
from swarm.state.snapshot import Snapshot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """A run that can go on after ``step``. ``passed_over`` says, newest first, why newer checkpoints cannot be used."""

    directory: RunDirectory
    manifest: Manifest
    files: dict[str, bytes]
    step: int
    passed_over: tuple[str, ...]

    def issuers(self) -> tuple[str, ...]:
        """Return who may invite to the run that goes on: as the record of its step says, else as its manifest does.
        Raises StateError for a record that is none."""
        record = proof_in(read_manifest(self.directory.checkpoints, self.step), self.manifest.run_id).record
        said = Origin.after(record).admissions
        return self.manifest.admission.issuers if said is None else said.issuers


class NotWhole(CommandError):
    """No checkpoint of the run that is here has every part."""


class FromCheckpoint:
    """The state that a resumed run begins with: every part of a step, as its close record says. Implements
    :class:`swarm.membership.state_keeper.Beginning`."""

    def __init__(self, root: Path, step: int, run: RunId) -> None:
        self._root, self._step, self._run = root, step, run

    async def load(self, told: Callable[[int, int], None]) -> tuple[Origin, list[Snapshot]]:
        """Read and verify all of it, off the event loop. Raises StateError naming the file that is not as it was."""
        manifest, snapshots = await asyncio.to_thread(read_manifest, self._root, self._step), list[Snapshot]()
        proof = proof_in(manifest, self._run)
        proof.standing()
        for part, expected in manifest.parts.items():
            told(len(snapshots), len(manifest.parts))
            load = partial(load_part, self._root, self._step, PartName(part), expected_digest=expected)
            snapshots.append(await asyncio.to_thread(load))
        return dataclasses.replace(Origin.after(proof.record), resumed=1 + secrets.randbelow(MAX_COUNT)), snapshots


def find_resumable(given: Path | None, home: Path | str | None, told: Told = tells_nobody) -> Resumable:
    """The run in the directory given (or whose id begins like that, or the newest) and the checkpoint to go on from.

    The newest step that is complete and right to the last bit; older ones stand in for those that are not, but for the
    last step of the run. With the directory of a checkpoint it is that one, whatever else is there. Raises ConfigError
    when there is no such run, StateError when its files are damaged, NotWhole when parts are missing, with the command
    that gets them, CommandError when it has no checkpoint, or when the run is over. Reads whole steps: minutes for a
    large model; ``told`` is told how many bytes are read, and of how many.
    """
    given, chosen = _asked_for(given)
    directory = find_run_directory(given, home, key="--resume")
    manifest = load_manifest(directory.manifest)
    files = named_files(directory, manifest)
    present = steps(directory.checkpoints) if chosen is None else (chosen,)
    if not present:
        check_nobody_here(home_directory(home), manifest.run_id)
        raise CommandError(
            f"the run in {directory.root} has no checkpoint: the run ended before the first was written",
            check=str(directory.checkpoints),
            next_=f"have its founder come back to it, or found it again, where it was founded: {command_name()} new "
            f"FILES/run.toml; or found another run of its kind: {command_name()} new "
            f"{shlex.quote(str(directory.manifest))} --name NAME",
            exit_code=EXIT_USAGE,
        )
    passed: list[CheckedStep] = []
    for step in reversed(present):
        checked = check_step(directory, manifest.run_id, step, told)
        lacking = _lacking(checked, manifest)
        if checked.good and not lacking:
            if step >= manifest.run.steps:
                raise _over(directory, manifest)
            last = _over_with(directory, manifest, passed, home) if chosen is None else None
            if last is not None and step < last:
                raise _last_step_elsewhere(directory, manifest, passed, step, last)
            said = tuple(_told(one, manifest) for one in passed)
            return Resumable(directory=directory, manifest=manifest, files=files, step=step, passed_over=said)
        passed.append(checked)
    raise _incomplete(directory, manifest, passed)


def _asked_for(given: Path | None) -> tuple[Path | None, int | None]:
    """The run's directory, and the step when it is a checkpoint's below it: to go on from there on purpose."""
    step = None if given is None else step_called(given.name)
    if given is None or step is None or not os.path.isdir(given):
        return given, None
    return given.absolute().parent.parent, step


def _over_with(
    directory: RunDirectory, manifest: Manifest, passed: Sequence[CheckedStep], home: Path | str | None
) -> int | None:
    """The step with which the run is over, the last or one that ended it: as its record here says, or as the peers of
    this machine saw last of a run that never went on from before; None when it is not."""
    last = manifest.run.steps
    newest = next((one for one in passed if one.proof), None)
    if newest is not None and (newest.ended or newest.step >= last):
        return newest.step
    ours = directory.root.absolute().parent == (home_directory(home) / RUNS).absolute()
    went_back = steps(aside_directory(directory.checkpoints))
    seen = newest_closing(home_directory(home), manifest.run_id) if ours and not went_back else None
    if seen is None or not seen.over or (newest is not None and newest.step > seen.step):
        return None
    return seen.step


def _lacking(checked: CheckedStep, manifest: Manifest) -> list[PartName]:
    """The model's parts that are not there, whatever the record says there are."""
    return [name for name in manifest.cut_with(checked.parts) if name not in checked.parts]


def _told(checked: CheckedStep, manifest: Manifest) -> str:
    if checked.bad:
        return f"step {checked.step} is damaged: {checked.bad[0]}"
    lacking, owners = _lacking(checked, manifest), manifest.split.owners
    told = f"step {checked.step} lacks {listed(lacking)} here"
    kept = [part for part in lacking if part in owners]
    if not kept:
        return told
    named = listed(list(dict.fromkeys(owners[part] for part in kept)))
    return f"{told}, of which {named} alone can have {listed(kept)}, and nobody where no host of it was there then"


def _over(directory: RunDirectory, manifest: Manifest) -> CommandError:
    kept = directory.checkpoints
    earlier = next((s for s in reversed(steps(kept)) if s < manifest.run.steps and held(kept, s).complete), None)
    again = "found a new run with more --steps"
    if earlier is not None:
        place = shlex.quote(str(step_directory(kept, earlier)))
        again = f"repeat the steps since {earlier}: {command_name()} new --resume {place}"
    return CommandError(
        f"the run is over: its last step, {manifest.run.steps}, is closed",
        check=f"the checkpoint in {kept}",
        next_=f"{command_name()} sample {shlex.quote(str(directory.root))}, or {again}",
    )


def _last_step_elsewhere(
    directory: RunDirectory, manifest: Manifest, passed: Sequence[CheckedStep], whole: int, last: int
) -> CommandError:
    told = next((_told(one, manifest) for one in passed if one.step >= last), f"step {last} is not here")
    earlier = shlex.quote(str(step_directory(directory.checkpoints, whole)))
    return CommandError(
        f"the run is over: its last step, {last}, is closed; {told}",
        check="each machine keeps the parts of its own peers, in runs/ below its home: what is missing or damaged here "
              "may be whole there",
        next_=f"{gathering(directory.root)}; or repeat the steps since {whole}: "
              f"{command_name()} new --resume {earlier}",
    )  # fmt: skip


def _incomplete(directory: RunDirectory, manifest: Manifest, passed: Sequence[CheckedStep]) -> Exception:
    """The error for a directory without a whole step; of the newest that has anything good."""
    newest = next((one for one in passed if one.parts and not one.bad), None)
    if newest is None:
        return StateError(f"no checkpoint can be used; the newest: {_told(passed[0], manifest)}")
    lacking = _lacking(newest, manifest)
    files = ", ".join(f"{part}.safetensors" for part in lacking)
    return NotWhole(
        f"no checkpoint is complete here: {_told(newest, manifest)}",
        check=f"{files} of that step lie where peers held these parts: below runs/ of those machines' homes, in "
              f"{step_directory(directory.checkpoints, newest.step).name}/",
        next_=gathering(directory.root),
    )  # fmt: skip
