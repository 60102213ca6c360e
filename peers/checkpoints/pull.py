"""``swarm ckpt pull``: fetch what a directory lacks of the newest checkpoint that can be had whole.

Read :func:`pull` first; :func:`pull_from` makes its sources of what a person names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers.checkpoints.checkpoint_sources import Source, beside, directory_source, peer_source
from peers.checkpoints.named import NamedSources, refused_role
from peers.checkpoints.pull_frozen import pull_frozen
from peers.checkpoints.pull_progress import FetchProgress, waiting
from peers.checkpoints.writer import keep_run, run_directory_of
from peers.console.words import CommandError, command_name, count, gathering, listed, named, numbered
from peers.exit_codes import EXIT_UNREACHABLE
from peers.home.places import RUNS, home_directory
from peers.home.run_directory import RunDirectory
from swarm.clock import SystemClock
from swarm.config import Manifest, load_manifest
from swarm.consensus.proof import Proof
from swarm.disk import alone, size_text
from swarm.errors import Incompatible, PeerError, StateError
from swarm.ids import PartName
from swarm.membership.rules import spec_of, update_of
from swarm.models.registry import family_of
from swarm.state.checkpoints.donors import Donor, Offer, PeerDonor, Plan, lacking, plans
from swarm.state.checkpoints.fetch import BegunFile, Progress, fetch_part
from swarm.state.checkpoints.files import (
    CheckpointManifest,
    HeldStep,
    decode_manifest,
    held,
    refused_by_disk,
    step_directory,
    steps,
    write_manifest,
)
from swarm.state.checkpoints.proof import proof_in, stray
from swarm.state.checkpoints.rotation import set_aside
from swarm.state.download import Wanted
from swarm.waiting import ended

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 3
"""Parts that are fetched at once."""
MAX_RETRIES = 3
"""How often it is looked again what there is, when a checkpoint went away while it was fetched."""

Say = Callable[[str, str], None]
Gap = tuple[int, tuple[PartName, ...]]
"""A step that somebody has a part of, and the parts that nobody has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The result of a pull: the newest complete ``step`` here now, and its ``fetched`` parts. ``newer`` names for each
    newer step, newest first, the parts that nobody has; ``run_step`` is the run's step, if known; ``unfrozen`` are the
    parts whose frozen weights nobody has, of a run that trains adapters."""

    directory: RunDirectory
    run: str
    step: int
    fetched: tuple[PartName, ...]
    bytes: int
    newer: tuple[str, ...]
    run_step: int | None
    unfrozen: tuple[PartName, ...] = ()


def destination(given: Path | None, manifest: Manifest, home: Path) -> RunDirectory:
    """Return the directory for the checkpoint: the one given, else the one in which peers of this machine keep that
    run. Raises Incompatible when it holds another run."""
    directory = RunDirectory(given) if given is not None else run_directory_of(home / RUNS / "{run}", manifest)
    if directory.manifest.exists():
        there = load_manifest(directory.manifest).run_id
        if there != manifest.run_id:
            raise Incompatible("DIR", str(directory.root), f"a directory of run {manifest.run_id[:12]}, or a new one",
                               f"It holds run {there[:12]}: name another directory.")  # fmt: skip
    return directory


async def pull(source: Source, directory: RunDirectory, say: Say, progress: Progress, *, frozen: bool = True) -> Pulled:
    """Have the newest step that can be had whole, whole in ``directory``, with the manifest and its files. What was
    begun earlier is continued. Nothing that was complete there is touched. What was fetched stays, whatever happens; a
    directory that this call made goes again when nothing was. With ``frozen``, of a run that trains adapters, have the
    weights beside them, too, as far as anybody has those: adapters are whole without.

    Raises CommandError (exit code 3) when no step can be had whole, naming what nobody has; StateError when the disk
    refuses, or when what came is not what the records say.
    """
    made = not directory.root.exists()
    with contextlib.ExitStack() as stack:
        if made:
            stack.callback(_leave_nothing, directory)
        if not await asyncio.to_thread(stack.enter_context, alone(directory.root / "pull", wait=False)):
            raise CommandError("another swarm ckpt pull writes to this directory", check=str(directory.root),
                               next_="wait until it has ended, or name another directory")  # fmt: skip
        left = MAX_RETRIES
        while True:
            left -= 1
            try:
                pulled = await _pull(source, directory, say, progress)
                if not frozen:
                    return pulled
                donors = [donor.frozen for donor in source.donors]
                size, unfrozen = await pull_frozen(source.manifest, directory, donors, say, progress)
                return replace(pulled, bytes=pulled.bytes + size, unfrozen=unfrozen)
            except StateError as error:
                if not left or not isinstance(error, _Gone):
                    raise
                say("again", f"{error}: looking for another")


class _Gone(StateError):
    """A part could not be had after all."""


async def _pull(source: Source, directory: RunDirectory, say: Say, progress: Progress) -> Pulled:
    root, manifest = directory.checkpoints, source.manifest
    here = await asyncio.to_thread(_held, root, manifest)
    if source.head is not None and (gone := stray(here, source.head)):
        await asyncio.to_thread(_set_aside, root, gone)
        say("set aside", f"{numbered(gone)}: the run went on from before, these do not count any more")
        here = [one for one in here if one.step not in gone]
    offers, last = await _offers(source, say), _last_step(source)
    gaps = [gap for gap in lacking(offers, here, manifest.cuts, source.kept) if gap[0] <= last]
    found = plans(offers, here, manifest.cuts, last_step=last, believed=source.believed, without=source.kept)
    complete = max((one.step for one in here if one.complete_but(source.kept)), default=None)
    for plan in found:
        async with waiting(say, SystemClock(), lambda: "the record of the step, from those who have it"):
            record = await _record(source, plan)
        if record is not None:
            await asyncio.to_thread(keep_run, directory, manifest, source.files)
            size = await _follow(plan, record, source, directory, say, progress)
            return _pulled(source, directory, gaps, plan.step, tuple(plan.donors), size)
    if complete is None:
        raise _withheld(gaps, source) or _nothing_whole(gaps, directory, unproven=bool(found))
    await asyncio.to_thread(keep_run, directory, manifest, source.files)
    return _pulled(source, directory, gaps, complete, (), 0)


def _pulled(
    source: Source, directory: RunDirectory, gaps: Sequence[Gap], step: int, fetched: tuple[PartName, ...], size: int
) -> Pulled:
    return Pulled(
        directory=directory,
        run=source.manifest.run_id,
        step=step,
        fetched=fetched,
        bytes=size,
        newer=_newer(gaps, step, source),
        run_step=None if source.head is None else source.head.step,
    )


def _newer(gaps: Sequence[Gap], step: int, source: Source) -> tuple[str, ...]:
    """Describe newer steps of which only some parts are there."""
    return tuple(f"of step {newer} {_lacks(missing, source)}" for newer, missing in gaps if newer > step and missing)


def _lacks(missing: Sequence[PartName], source: Source) -> str:
    kept = [part for part in missing if source.withholds(part)]
    if source.grant is not None and kept:
        return f"peers do not give {listed(kept)} for an invite as {source.grant.role}"
    return f"no peer that answers has {listed([_held_by(part, source) for part in missing])}"


def _held_by(part: PartName, source: Source) -> str:
    """A part, and who trains it now, as far as that is known."""
    holders = () if source.head is None else source.head.members.replicas(part)
    names = [source.head.members[peer].name for peer in holders] if source.head is not None else []
    return f"{part} (trained by {listed(names)})" if names else str(part)


def _last_step(source: Source) -> int:
    """The newest step that there can be a checkpoint of."""
    last = source.manifest.run.steps
    return last if source.head is None else min(last, source.head.step)


async def _follow(
    plan: Plan[Donor], record: CheckpointManifest, source: Source, directory: RunDirectory, say: Say, progress: Progress
) -> int:
    """Fetch what is missing; returns how many bytes those files have."""
    root = directory.checkpoints
    async with waiting(say, SystemClock(), lambda: "what the model's parts look like (its libraries are loaded)"):
        files = await asyncio.to_thread(_begun_of, plan, source.manifest, root)
    size = sum(file.size for file in files)
    _check_room(directory, sum(file.lacking_bytes for file in files))
    say("step", f"{plan.step}: {listed(list(plan.donors))} to fetch, {size_text(size)}")
    await asyncio.to_thread(write_manifest, root, record)
    gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def fetch(file: BegunFile) -> None:
        async with gate:
            await fetch_part(file, plan.donors[file.wanted.part], progress=progress)

    try:
        async with asyncio.TaskGroup() as group:
            for file in files:
                group.create_task(fetch(file))
    except* StateError as errors:
        raise _Gone(str(errors.exceptions[0])) from errors
    await asyncio.to_thread(_sweep, root, plan.step)
    return size


def _begun_of(plan: Plan[Donor], manifest: Manifest, root: Path) -> list[BegunFile]:
    """The files that are to be fetched. Builds their parts without weights: blocking, transformers takes seconds."""
    family, files = family_of(manifest.model), []
    for part in plan.donors:
        layout = family.layout(family.build(spec_of(manifest, part))).kept_by(update_of(manifest).vectors)
        wanted = Wanted(part=part, step=plan.step, digest=plan.digests[part], layout=layout)
        files.append(BegunFile(root, wanted, manifest.run_id))
    return files


async def _offers(source: Source, say: Say) -> list[Offer[Donor]]:
    """Return the offers of all donors that answer, of peers those parts alone that they will give. Says whom it asks,
    and what each answers."""
    unheard = dict.fromkeys(source.donors)

    async def ask(donor: Donor) -> list[Offer[Donor]]:
        try:
            found = await donor.offers()
        except PeerError as error:
            logger.info("%s does not say what it has: %s", donor, error)
            say("no answer", f"{_called(donor, source)}: {error.reason}")
            return []
        finally:
            unheard.pop(donor, None)
        if isinstance(donor, PeerDonor):
            found = [replace(one, there=[part for part in one.there if not source.withholds(part)]) for one in found]
        newest = max((one for one in found if one.there), key=lambda one: one.step, default=None)
        kept = "nothing" if newest is None else f"{listed(sorted(newest.there))} of step {newest.step}"
        more = f", and of {count(len(found) - 1, 'other step')}" if len(found) > 1 else ""
        say("has", f"{_called(donor, source)}: {kept}{more}")
        return found

    for donor in source.donors:
        say("asking", _called(donor, source))
    async with waiting(say, SystemClock(), lambda: listed([_called(donor, source) for donor in unheard])):
        found = await asyncio.gather(*map(ask, source.donors))
    return [offer for offers in found for offer in offers]


def _called(donor: Donor, source: Source) -> str:
    """A donor by its name in the run, and what it holds there."""
    roster = () if source.head is None else source.head.roster
    member = next((one for one in roster if one.peer == str(donor)), None)
    if member is None:
        return named(str(donor), {})
    return f"{member.name}, {member.part}" if member.part is not None else member.name


async def _record(source: Source, plan: Plan[Donor]) -> CheckpointManifest | None:
    """The step's record from a source that has one that is right and, from peers, proven; None when nobody has. What
    neither the contact nor most say must be proven by those whom the contact names."""
    for donor in plan.attested:
        try:
            record = decode_manifest(await donor.record(plan.step), f"the record of step {plan.step} from {donor}")
            proof = proof_in(record, source.manifest.run_id)
            standing = proof.standing()
        except (PeerError, StateError) as error:
            logger.warning("%s", error)
            continue
        same = (record.step, dict(record.parts)) == (plan.step, dict(plan.digests))
        proven = standing == "decided" and (plan.believed or _accepted(proof, source))
        if same and (proven or source.head is None):
            return record
        logger.warning(
            "passed over the record of step %d from %s: it is %s", plan.step, donor, "unproven" if same else "another"
        )
    return None


def _accepted(proof: Proof, source: Source) -> bool:
    return source.head is not None and proof.accepted_among(source.head.members.peers)


def _held(root: Path, manifest: Manifest) -> list[HeldStep]:
    """Return the steps of this run that are here."""
    found = (held(root, step) for step in steps(root))
    return [one for one in found if one.record is not None and one.record.run == manifest.run_id]


def _set_aside(root: Path, gone: Sequence[int]) -> None:
    try:
        set_aside(root, gone)
    except OSError as error:
        raise refused_by_disk(root, error) from error


def _check_room(directory: RunDirectory, size: int) -> None:
    free = shutil.disk_usage(directory.root).free
    if free < size:
        raise StateError(
            f"{directory.root}: the fetch takes {size_text(size)}, and {size_text(free)} is free. Make room."
        )


def _begun(root: Path) -> Iterator[Path]:
    """The files that are partly here."""
    return root.glob("step-*/.*.pull")


def _sweep(root: Path, step: int) -> None:
    """Remove begun files of other steps, which are of no use any more."""
    for left in _begun(root):
        if left.parent != step_directory(root, step):
            left.unlink(missing_ok=True)


def _leave_nothing(directory: RunDirectory) -> None:
    """Take away a directory in which nothing is but what any pull would bring."""
    if not any(directory.checkpoints.glob("step-*/*.safetensors")) and not any(_begun(directory.checkpoints)):
        shutil.rmtree(directory.root, ignore_errors=True)


def _withheld(gaps: Sequence[Gap], source: Source) -> CommandError | None:
    """The error where the newest step lacks nothing but what the invite is not for; None otherwise."""
    step, missing = gaps[0] if gaps else (0, ())
    if source.grant is None or not missing or not all(map(source.withholds, missing)):
        return None
    return refused_role(source.grant, f"of step {step} it does not give {listed(missing)}")


def _nothing_whole(gaps: Sequence[Gap], directory: RunDirectory, *, unproven: bool) -> CommandError:
    if unproven:
        cause = "no checkpoint has a record that is proven by its voters' signatures"
    elif not gaps:
        cause = "no peer that answers has a checkpoint, and there is none here"
    else:
        newest, missing = gaps[0]
        cause = f"no step is complete: of the newest, {newest}, no peer that answers has {listed(missing) or 'all'}"
    check = (
        f"each machine keeps the parts of its own peers, in runs/ below its home: run {command_name()} ckpt ls there"
    )
    return CommandError(cause, check=check, next_=gathering(directory.root), exit_code=EXIT_UNREACHABLE)


# --- from what a person named to a pull: blocking, for the command line -----------------------------------------------


def pull_from(named: NamedSources, into: Path | None, home: str | None, say: Say, *, frozen: bool) -> Pulled:
    """Pull from directories and the peers of a run, together.

    Raises ConfigError and Incompatible for directories that cannot be used, RunEnded when no peer answers, and as
    :func:`peers.checkpoints.pull.pull`.
    """
    contacts, kept = named.contacts, named.directories

    async def pulled(source: Source) -> Pulled:
        progress = FetchProgress(say, SystemClock())
        telling = asyncio.ensure_future(progress.run())
        try:
            into_ = destination(into, source.manifest, home_directory(home))
            return await pull(source, into_, say, progress.told, frozen=frozen)
        finally:
            await ended([telling])

    async def run() -> Pulled:
        if contacts is None:
            return await pulled(directory_source(kept))
        async with peer_source(contacts, say) as peers:
            return await pulled(beside(peers, kept))

    return asyncio.run(run())
