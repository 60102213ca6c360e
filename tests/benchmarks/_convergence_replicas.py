"""Replicas of one model in one process, each with text of its own: what the benchmark ``convergence`` trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data_shards.build import build_shard, split_documents
from data_shards.packing import read_rows, row_count
from data_shards.shard import Shard
from data_shards.source import ShardSource
from data_shards.tokenize import train_tokenizer
from peers.data.prepare import HELD_OUT_FRACTION
from peers.data.text import Corpus, sample_texts
from swarm.ids import PeerId
from swarm.models.gpt_config import GptConfig
from swarm.models.registry import family_of
from swarm.optim.adamw import AdamWState, StepNumbers, adamw_step
from swarm.optim.clipping import clip_factor
from swarm.optim.schedules import OptimizerConfig, learning_rate

ROWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a run is: ``replicas`` take ``rows`` of the model's context each in each of ``steps`` steps."""

    model: GptConfig
    optimizer: OptimizerConfig
    replicas: int
    rows: int
    steps: int
    held_out_rows: int

    @property
    def tokens(self) -> int:
        """Target tokens that one replica trains on."""
        return self.rows * self.model.context * self.steps

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Names of the replicas, in order."""
        return tuple(PeerId(f"{number:03d}") for number in range(self.replicas))


@dataclass(frozen=True, slots=True)
class Text:
    """One shard for each replica, and rows that nobody trains on: int64 (rows, context + 1)."""

    shards: tuple[Path, ...]
    held_out: Tensor


def make_text(root: Path, corpus: Corpus, scale: Scale, seed: int) -> Text:
    """The quickstart's own steps from documents to shards, below ``root``."""
    split = split_documents(corpus.documents, scale.replicas, HELD_OUT_FRACTION, seed)
    tokenizer = train_tokenizer(sample_texts(split.shards), scale.model.vocab_size)
    for peer, documents in zip(scale.peers, split.shards, strict=True):
        build_shard(root / peer, documents, tokenizer)
    build_shard(root / "held-out", split.held_out, tokenizer)
    held_out = Shard.open(root / "held-out")
    rows = min(scale.held_out_rows, row_count(held_out.manifest.tokens, scale.model.context))
    tokens = torch.from_numpy(read_rows(held_out.tokens, list(range(rows)), scale.model.context))
    return Text(tuple(root / peer for peer in scale.peers), tokens)


class _Loss(nn.Module):
    """Mean cross entropy, without the look at how many targets there are, which no batch of models can have."""

    def __init__(self, model: GptConfig) -> None:
        super().__init__()
        family = family_of(model)
        self.gpt = family.build(family.whole)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.gpt.logits(self.gpt(tokens))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Replicas:
    """``params`` is float32 (replicas, elements); whoever mixes them writes there. All begin with the same weights."""

    def __init__(self, scale: Scale, text: Text, seed: int) -> None:
        self._scale, self._text = scale, text
        self._loss = _Loss(scale.model)
        self._layout = family_of(scale.model).layout(self._loss.gpt)
        start = self._layout.flatten(family_of(scale.model).initial_weights(seed))
        self.params = start.repeat(scale.replicas, 1)
        self._moments = [(torch.zeros_like(start), torch.zeros_like(start)) for _ in range(scale.replicas)]
        self._sources = [
            ShardSource(path, trainer=peer, microbatch_size=scale.rows, context=scale.model.context)
            for peer, path in zip(scale.peers, text.shards, strict=True)
        ]
        self._gradients = torch.func.vmap(torch.func.grad(self._loss_of))
        self._losses = torch.func.vmap(self._loss_of, in_dims=(0, None, None))

    @property
    def elements(self) -> int:
        """Of the whole model's flat vector."""
        return self._layout.elements

    def gradients(self) -> Tensor:
        """Of each replica's mean loss on the next rows of its own text, (replicas, elements)."""
        batches = [source.take() for source in self._sources]
        inputs = torch.stack([batch.inputs for batch in batches])
        targets = torch.stack([batch.targets for batch in batches])
        with sdpa_kernel(SDPBackend.MATH):
            named = self._gradients(self._views(self.params), inputs, targets)
        flat = torch.zeros_like(self.params)
        for name, view in self._views(flat).items():
            view.copy_(named[name])
        return flat

    def step(self, gradients: Tensor, step: int) -> None:
        """AdamW at each replica, clipped by the norm of what it is given."""
        config = self._scale.optimizer
        rate = learning_rate(config, step, self._scale.steps)
        for number, gradient in enumerate(gradients):
            clip = clip_factor(float(torch.linalg.vector_norm(gradient)), config.clip_norm)
            old = AdamWState(self.params[number], *self._moments[number])
            new = adamw_step(old, gradient, self._layout, config, StepNumbers(step=step, lr=rate, clip=clip))
            self.params[number] = new.params
            self._moments[number] = (new.exp_avg, new.exp_avg_sq)

    @torch.no_grad()
    def held_out_losses(self, params: Tensor) -> list[float]:
        """Nats per token on the held-out rows, of each model of ``params`` (models, elements)."""
        total = torch.zeros(len(params))
        for rows in self._text.held_out.split(ROWS_AT_ONCE):
            with sdpa_kernel(SDPBackend.MATH):
                total += self._losses(self._views(params), rows[:, :-1], rows[:, 1:]) * len(rows)
        return [float(loss) for loss in total / len(self._text.held_out)]

    def _loss_of(self, params: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        named = {f"gpt.{name}": value for name, value in params.items()}
        loss: Tensor = torch.func.functional_call(self._loss, named, (tokens, targets))
        return loss

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            slot.name: flat[:, slot.offset : slot.offset + slot.elements].view(len(flat), *slot.shape)
            for slot in self._layout.slots
        }
