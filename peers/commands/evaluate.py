"""The whole model from a checkpoint: its loss on held-out text, and text it makes up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer
from peers.checkpoints.choice import choose_step, run_tokenizer
from peers.console.interrupt import check
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest
from swarm.errors import StateError
from swarm.models.family import PartModule
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.state.checkpoints.parts import load_weights

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
    in memory.
    """
    # Small models on a machine that has other work: threads that wait for each other cost 3 times what they give.
    torch.set_num_threads(1)
    chosen = choose_step(directory, step)
    family = family_of(chosen.manifest.model)
    model = family.build(family.whole)
    install_weights(model, load_weights(directory.checkpoints, chosen.step))
    _, tokenizer = run_tokenizer(chosen)
    return Checkpointed(chosen.step, model.eval(), tokenizer, chosen.manifest, chosen.passed_over)


def held_out_loss(checkpoint: Checkpointed, shard_path: Path) -> float:
    """Mean cross entropy in nats per target token over the held-out shard (its first 512 rows at most)."""
    context = checkpoint.manifest.model.context
    shard = Shard.open(shard_path)
    shard.require(rows=1, context=context)
    total, count = 0.0, 0
    rows = min(shard.row_count(context), MAX_ROWS)
    for first in range(0, rows, ROWS_AT_ONCE):
        check()
        numbers = list(range(first, min(first + ROWS_AT_ONCE, rows)))
        tokens = torch.from_numpy(shard.rows(numbers, context).astype(np.int64))
        loss_sum, targets = checkpoint.model.evaluate(tokens[:, :-1], tokens[:, 1:])
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
