"""The whole model from a checkpoint: its loss on held-out text, and text it makes up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data_shards.packing import StreamRows
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer
from peers.console.interrupt import check
from peers.console.words import CommandError, command_name, gathering, listed
from peers.data.foreign_tokenizer import check_foreign_tokenizer
from peers.exit_codes import EXIT_USAGE
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest, load_manifest
from swarm.errors import ConfigError, StateError
from swarm.models.family import PartModule
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.state.checkpoints.parts import flaw, latest, load_weights, read_manifest, step_directory, steps

ROWS_AT_ONCE = 16
MAX_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of generated text: the number of ``tokens``, the temperature (0: always the likeliest), the seed."""

    prompt: str
    tokens: int
    seed: int = 0
    temperature: float = 0.8


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A run's model as it was after ``step``. ``passed_over`` says what is wrong with a newer checkpoint, if one is."""

    step: int
    model: PartModule
    tokenizer: Tokenizer
    manifest: Manifest
    passed_over: str | None = None


def load_checkpoint(directory: RunDirectory, step: int | None = None) -> Checkpointed:
    """The model of a run after ``step``, or of its newest complete checkpoint.

    Every part's digest is verified, and that the checkpoint belongs to this run. Raises ConfigError when there is none
    such, CommandError when parts of it are not on this machine, StateError when it is damaged. Costs the model's size
    in memory, three times over for a moment.
    """
    # Small models on a machine that has other work: threads that wait for each other cost 3 times what they give.
    torch.set_num_threads(1)
    manifest = load_manifest(directory.manifest)
    root = directory.checkpoints
    chosen = _choose(directory, manifest, step)
    written_by = read_manifest(root, chosen).run
    if written_by != manifest.run_id:
        raise StateError(f"{root}: step {chosen} belongs to run {written_by[:12]}, not {manifest.run_id[:12]}")
    family = family_of(manifest.model)
    model = family.build(family.whole)
    install_weights(model, load_weights(root, chosen))
    newest = steps(root)[-1]
    passed_over = _flaw(directory, manifest, newest) if step is None and newest != chosen else None
    return Checkpointed(chosen, model.eval(), _tokenizer(directory, manifest), manifest, passed_over)


def held_out_loss(checkpoint: Checkpointed, shard_path: Path) -> float:
    """Mean cross entropy in nats per target token over the held-out shard (its first 512 rows at most)."""
    context = checkpoint.manifest.model.context
    held_out = StreamRows(Shard.open(shard_path), context)
    held_out.require(1)
    total, count = 0.0, 0
    rows = min(held_out.count, MAX_ROWS)
    for first in range(0, rows, ROWS_AT_ONCE):
        check()
        numbers = list(range(first, min(first + ROWS_AT_ONCE, rows)))
        read = held_out.read(numbers)
        loss_sum, targets = checkpoint.model.evaluate(torch.from_numpy(read.inputs), torch.from_numpy(read.targets))
        total += loss_sum
        count += targets
    if not math.isfinite(total):
        raise StateError(f"the loss of step {checkpoint.step} on held-out text is not a number: training diverged")
    return total / count


def sample_text(checkpoint: Checkpointed, sampling: Sampling) -> str:
    """A continuation of the prompt, without the prompt. The same seed gives the same text on the same machine."""
    tokenizer = checkpoint.tokenizer
    prompt = [tokenizer.end_of_text, *tokenizer.encode(sampling.prompt)]
    made = checkpoint.model.generate(
        torch.tensor(prompt), sampling.tokens, seed=sampling.seed, temperature=sampling.temperature
    )
    ids = [token for token in made.tolist() if token < tokenizer.vocab_size]
    return tokenizer.decode(ids)


def _tokenizer(directory: RunDirectory, manifest: Manifest) -> Tokenizer:
    try:
        document = directory.tokenizer.read_bytes()  # a contact sent it
        check_foreign_tokenizer(document)
        tokenizer = Tokenizer(document)
    except OSError as error:
        raise StateError(f"{directory.tokenizer}: {error.strerror}. Copy it from another peer of the run.") from error
    if tokenizer.digest != manifest.tokenizer.digest:
        raise StateError(f"{directory.tokenizer}: not the tokenizer of this run. Copy it from another peer of the run.")
    return tokenizer


def missing_parts(directory: RunDirectory, manifest: Manifest, step: int) -> list[str]:
    """The parts of a step that are not on this machine, as where their peers ran on others; in the model's order."""
    where = step_directory(directory.checkpoints, step)
    names = [spec.name for spec in family_of(manifest.model).parts(manifest.split)]
    return [name for name in names if not (where / f"{name}.safetensors").is_file()]


def _choose(directory: RunDirectory, manifest: Manifest, step: int | None) -> int:
    """The step asked for, or the newest complete one. Raises ConfigError when there is none such, CommandError when it
    lacks parts, StateError when all are damaged."""
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
    chosen = latest(root) if step is None else step
    wanted = have[-1] if chosen is None else chosen
    if lacking := missing_parts(directory, manifest, wanted):
        raise _incomplete(directory, wanted, lacking, none=chosen is None)
    if chosen is None:
        raise StateError(f"no checkpoint is complete; the newest: {flaw(root, wanted)}")
    return chosen


def _flaw(directory: RunDirectory, manifest: Manifest, step: int) -> str | None:
    if lacking := missing_parts(directory, manifest, step):
        return f"step {step}, which lacks {listed(lacking)} here"
    return flaw(directory.checkpoints, step)


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
