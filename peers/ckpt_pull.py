"""``swarm ckpt pull``: fetch what a directory lacks of the newest checkpoint that can be had whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.checkpoints import keep_run, run_directory_of
from peers.ckpt_proof import Proof, proof_in
from peers.ckpt_source import Source
from peers.complaint import Complaint
from peers.run_directory import RUNS, RunDirectory
from peers.words import amount, command_name, listed
from swarm.config import Manifest, load_manifest
from swarm.errors import EXIT_UNREACHABLE, Incompatible, PeerError, StateError
from swarm.ids import PartName
from swarm.models.flops import model_parameter_count
from swarm.models.split import split_model
from swarm.state.checkpoint_disk import alone
from swarm.state.checkpoint_donors import Donor, WantedFile
from swarm.state.checkpoint_fetch import Progress, fetch_part
from swarm.state.checkpoint_files import (
    MAX_HEADER_BYTES,
    CheckpointManifest,
    HeldStep,
    decode_manifest,
    held,
    step_directory,
    steps,
    write_manifest,
)
from swarm.state.checkpoint_plan import Offer, Plan, lacking, plans

logger = logging.getLogger(__name__)

BYTES_PER_PARAMETER = 12
"""In a file: the parameter and two moments."""
MAX_AT_ONCE = 3
"""Parts that are fetched beside each other."""
MAX_RETRIES = 3
"""How often it is looked again what there is, when a checkpoint went away while it was fetched."""

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What came of it: the newest complete ``step`` here now, and the parts of it that were fetched."""

    directory: RunDirectory
    run: str
    step: int
    fetched: tuple[PartName, ...]
    bytes: int


def destination(given: Path | None, manifest: Manifest, home: Path) -> RunDirectory:
    """Where to put it: the directory given, else the one in which peers of this machine keep that run. Raises
    Incompatible when it holds another run."""
    directory = RunDirectory(given) if given is not None else run_directory_of(home / RUNS / "{run}", manifest)
    if directory.manifest.exists():
        there = load_manifest(directory.manifest).run_id
        if there != manifest.run_id:
            raise Incompatible("DIR", str(directory.root), f"a directory of run {manifest.run_id[:12]}, or a new one",
                               f"It holds run {there[:12]}: name another directory.")  # fmt: skip
    return directory


async def pull(source: Source, directory: RunDirectory, say: Say, progress: Progress) -> Pulled:
    """Have the newest step that can be had whole, whole in ``directory``, with manifest and tokenizer. What was begun
    earlier is continued. Nothing that was complete there is touched.

    Raises Complaint (exit code 3) when no step can be had whole, naming what nobody has; StateError when the disk
    refuses, or when what came is not what the records say.
    """
    await asyncio.to_thread(keep_run, directory, source.manifest, source.tokenizer)
    with contextlib.ExitStack() as stack:
        if not await asyncio.to_thread(stack.enter_context, alone(directory.root / "pull", wait=False)):
            raise Complaint("another swarm ckpt pull is at work there", check=str(directory.root))
        for attempt in range(MAX_RETRIES):
            try:
                return await _pull(source, directory, say, progress)
            except StateError as error:
                if attempt + 1 == MAX_RETRIES or not isinstance(error, _Gone):
                    raise
                say("again", f"{error}: looking for another")
    raise AssertionError("unreachable")


class _Gone(StateError):
    """A part could not be had after all."""


async def _pull(source: Source, directory: RunDirectory, say: Say, progress: Progress) -> Pulled:
    root, manifest = directory.checkpoints, source.manifest
    parts = [spec.name for spec in split_model(manifest.model, manifest.split)]
    here = await asyncio.to_thread(_held, root, manifest)
    offers = await _offers(source.donors)
    found = plans(offers, here, parts, last_step=_last_step(source), believed=source.donors[:1])
    complete = max((one.step for one in here if one.complete), default=None)
    for plan in found:
        record = await _record(source, plan)
        if record is not None:
            return await _follow(plan, record, source, directory, say, progress)
    if complete is None:
        raise _nothing_whole(offers, here, parts, directory, unproven=bool(found))
    return Pulled(directory=directory, run=manifest.run_id, step=complete, fetched=(), bytes=0)


def _last_step(source: Source) -> int:
    """The newest step that there can be a checkpoint of."""
    last = source.manifest.run.steps
    return last if source.head is None else min(last, source.head.step)


async def _follow(
    plan: Plan[Donor], record: CheckpointManifest, source: Source, directory: RunDirectory, say: Say, progress: Progress
) -> Pulled:
    root, most = directory.checkpoints, BYTES_PER_PARAMETER * model_parameter_count(source.manifest.model)
    size = sum(max(size for _, size in those) for those in plan.donors.values())
    _check_room(directory, min(size, most + MAX_HEADER_BYTES))
    say("step", f"{plan.step}: {listed(list(plan.donors))} to fetch, {amount(size)}B")
    await asyncio.to_thread(write_manifest, root, record)
    gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def fetch(part: PartName) -> None:
        file = WantedFile(step=plan.step, part=part, digest=plan.digests[part])
        async with gate:
            await fetch_part(root, file, plan.donors[part], max_bytes=most + MAX_HEADER_BYTES, progress=progress)

    try:
        async with asyncio.TaskGroup() as group:
            for part in plan.donors:
                group.create_task(fetch(part))
    except* StateError as errors:
        raise _Gone(str(errors.exceptions[0])) from errors
    await asyncio.to_thread(_sweep, root, plan.step)
    return Pulled(directory=directory, run=record.run, step=plan.step, fetched=tuple(plan.donors), bytes=size)


async def _offers(donors: Sequence[Donor]) -> list[Offer[Donor]]:
    """What everybody has who answers."""

    async def ask(donor: Donor) -> list[Offer[Donor]]:
        try:
            return await donor.offers()
        except PeerError as error:
            logger.info("%s does not say what it has: %s", donor.name, error)
            return []

    return [offer for offers in await asyncio.gather(*map(ask, donors)) for offer in offers]


async def _record(source: Source, plan: Plan[Donor]) -> CheckpointManifest | None:
    """The step's record from whoever has one that is right and, from peers, proven; None when nobody has. What neither
    the contact nor most say must be proven by those whom the contact names."""
    for donor in plan.vouched:
        try:
            record = decode_manifest(await donor.record(plan.step), f"the record of step {plan.step} from {donor.name}")
            proof = proof_in(record, source.manifest.run_id)
            standing = proof.standing()
        except (PeerError, StateError) as error:
            logger.warning("%s", error)
            continue
        same = (record.step, dict(record.parts)) == (plan.step, dict(plan.digests))
        proven = standing == "decided" and (plan.believed or _accepted(proof, source))
        if same and (proven or source.head is None):
            return record
        logger.warning("the record of step %d from %s is %s", plan.step, donor.name, "unproven" if same else "another")
    return None


def _accepted(proof: Proof, source: Source) -> bool:
    return source.head is not None and proof.accepted_among(source.head.members)


def _held(root: Path, manifest: Manifest) -> list[HeldStep]:
    """What lies here of this run."""
    found = (held(root, step) for step in steps(root))
    return [one for one in found if one.record is not None and one.record.run == manifest.run_id]


def _check_room(directory: RunDirectory, size: int) -> None:
    free = shutil.disk_usage(directory.root).free
    if free < size:
        raise StateError(f"{directory.root}: {amount(size)}B to fetch, {amount(free)}B free. Free some space.")


def _sweep(root: Path, step: int) -> None:
    """What was begun of other steps is of no use any more."""
    for left in root.glob("step-*/.*.pull"):
        if left.parent != step_directory(root, step):
            left.unlink(missing_ok=True)


def _nothing_whole(
    offers: Sequence[Offer[Donor]],
    here: Sequence[HeldStep],
    parts: Sequence[PartName],
    directory: RunDirectory,
    *,
    unproven: bool,
) -> Complaint:
    gap = lacking(offers, here, parts)
    if unproven:
        cause = "no checkpoint's record is proven by the signatures of those who decided it"
    elif gap is None:
        cause = "nobody who answers has a checkpoint, and there is none here"
    else:
        cause = f"no step can be had whole: of the newest, {gap[0]}, nobody who answers has {listed(gap[1]) or 'all'}"
    return Complaint(cause, check="is a peer that held it down, or was the last checkpoint not written yet?",
                     next_=f"{command_name()} ckpt ls {directory.root} shows what is here; pull again later",
                     exit_code=EXIT_UNREACHABLE)  # fmt: skip
