"""What passes through the cuts of a model with private ends, and attacks on it, for the benchmark ``leak``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from data_shards import packing
from data_shards.build import build_shard, split_documents
from data_shards.shard import Shard
from data_shards.shard_source import ShardSource
from data_shards.tokenize import train_tokenizer
from peers.data.prepare import HELD_OUT_FRACTION
from peers.data.text import Corpus, sample_texts
from swarm.ids import ENDS, PeerId
from swarm.models.family import PartModule
from swarm.models.gpt_config import GptConfig
from swarm.models.layout import install_weights
from swarm.models.registry import family_of
from swarm.models.spec import SplitConfig
from swarm.optim.schedules import OptimizerConfig, learning_rate

RUN_SEED, SECRET_SEED = 0, 0x1F3A_9C52_77E0_4B86
"""Of the manifest, which everybody has; of the ends."""
AT_ONCE = 2048
DECODER_STEPS, DECODER_LR, DECODER_BATCH = 200, 0.01, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The model, and its training: ``steps`` of ``rows`` of its context."""

    model: GptConfig
    optimizer: OptimizerConfig
    rows: int
    steps: int


def make_shards(root: Path, corpus: Corpus, vocab_size: int) -> tuple[Path, Path]:
    """Make two shards as the quickstart does: the trainer's, and the attacker's own."""
    split = split_documents(corpus.documents, 2, HELD_OUT_FRACTION, 0)
    tokenizer = train_tokenizer(sample_texts(corpus.documents), vocab_size)
    paths = root / "victim", root / "attacker"
    for path, documents in zip(paths, split.shards, strict=True):
        build_shard(path, documents, tokenizer)
    return paths


def read_rows(path: Path, count: int, scale: Scale) -> Tensor:
    """The first rows of a shard, as many as there are up to ``count``: int64 (rows, context + 1)."""
    shard, context = Shard.open(path), scale.model.context
    numbers = list(range(min(count, packing.row_count(shard.manifest.tokens, context))))
    return torch.from_numpy(packing.read_rows(shard.tokens, numbers, context))


class Run:
    """A model in two stages with private ends, which trains on the text of one trainer."""

    def __init__(self, scale: Scale, text: Path) -> None:
        self.scale, family = scale, family_of(scale.model)
        specs = {spec.name: spec for spec in family.parts(SplitConfig(stages=2, ends="private"))}
        self.parts: dict[str, PartModule] = {}
        for name, spec in specs.items():
            self.parts[name] = family.build(spec)
            seed = SECRET_SEED if name == ENDS else RUN_SEED
            install_weights(self.parts[name], family.initial_weights(seed, spec), requires_grad=True)
        self.ends_of_run_seed = family.build(specs[ENDS])
        install_weights(self.ends_of_run_seed, family.initial_weights(RUN_SEED, specs[ENDS]))
        self.ends_as_they_began = family.build(specs[ENDS])
        install_weights(self.ends_as_they_began, family.initial_weights(SECRET_SEED, specs[ENDS]))
        config, parameters = scale.optimizer, [p for part in self.parts.values() for p in part.parameters()]
        self._optimizer = torch.optim.AdamW(
            parameters, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
        )
        self._source = ShardSource(text, trainer=PeerId("T"), microbatch_size=scale.rows, context=scale.model.context)

    @property
    def ends(self) -> PartModule:
        """As they are now."""
        return self.parts[ENDS]

    def step(self, number: int) -> float:
        """Train on the next rows; return the mean loss in nats."""
        config, batch = self.scale.optimizer, self._source.take()
        self._optimizer.param_groups[0]["lr"] = learning_rate(config, number, self.scale.steps)
        self._optimizer.zero_grad()
        total, count = self.ends.loss(self.cuts(batch.inputs)[-1], batch.targets)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._optimizer.param_groups[0]["params"], config.clip_norm)
        self._optimizer.step()
        return loss.item()

    def cuts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What passes through the first, the second and the last cut: (B, T, D) each."""
        first = self.ends.embed(tokens)
        second = self.parts["stage-0"](first)
        return first, second, self.parts["stage-1"](second)


class Attacks:
    """What is read of a run as it is now; each returns the share that is right, of the trainer's tokens or targets.

    ``private`` are rows of the trainer, ``own`` are rows of the attacker, ``known`` says how many of the trainer's the
    attacker knows.
    """

    def __init__(self, run: Run, private: Tensor, own: Tensor, known: int) -> None:
        self._run = run
        known = min(known, len(private) // 2)
        self._known, private = private[:known, :-1], private[known:]
        self._tokens, self._targets = private[:, :-1], private[:, 1:]
        self._own = own[:, :-1]

    def by_frequency(self) -> float:
        """Always guess what is most frequent in the attacker's own text."""
        return _share(self._own.flatten().mode().values.expand_as(self._tokens), self._tokens)

    @torch.no_grad()
    def seed_attack(self) -> float:
        """First cut, by the embedding that anybody can make who knows the manifest."""
        return self._nearest_row(self._run.ends_of_run_seed)

    @torch.no_grad()
    def seed_attack_if_not_secret(self) -> float:
        """First cut, by the embedding as it began, which nobody knows."""
        return self._nearest_row(self._run.ends_as_they_began)

    @torch.no_grad()
    def known_ends(self) -> float:
        """First cut, by the embedding as it is."""
        return self._nearest_row(self._run.ends)

    @torch.no_grad()
    def known_rows(self) -> float:
        """First cut, by what it shows of rows whose text is known."""
        seen = self._run.ends.embed(self._known).flatten(0, 1)
        found = nearest(self._run.ends.embed(self._tokens).flatten(0, 1), seen)
        return _share(self._known.flatten()[found], self._tokens)

    def linear_decoder(self) -> float:
        """Second cut: a softmax regression on what the attacker's own text gives there."""
        with torch.no_grad():
            given, seen = (self._run.cuts(tokens)[1].flatten(0, 1) for tokens in (self._own, self._tokens))
        middle, spread = given.mean(0), given.std(0)
        decoder = fit((given - middle) / spread, self._own.flatten(), self._run.scale.model.vocab_size)
        return _share(torch.cat([scores.argmax(1) for scores in decoder((seen - middle) / spread).split(AT_ONCE)]),
                      self._tokens)  # fmt: skip

    def targets_from_last_gradient(self) -> float:
        """Last cut, by the head as it is."""
        return self._targets_by(self._run.ends)

    def targets_by_seed(self) -> float:
        """Last cut, by the head that anybody can make who knows the manifest."""
        return self._targets_by(self._run.ends_of_run_seed)

    def targets_by_seed_if_not_secret(self) -> float:
        """Last cut, by the head as it began, which nobody knows."""
        return self._targets_by(self._run.ends_as_they_began)

    def _nearest_row(self, ends: PartModule) -> float:
        table = ends.embed(torch.arange(self._run.scale.model.vocab_size).view(1, -1))[0]
        return _share(nearest(self._run.ends.embed(self._tokens).flatten(0, 1), table), self._tokens)

    def _targets_by(self, ends: PartModule) -> float:
        with torch.no_grad():
            hidden = self._run.cuts(self._tokens)[-1]
        hidden.requires_grad_()
        total, _ = self._run.ends.loss(hidden, self._targets)
        (gradient,) = torch.autograd.grad(total, hidden)
        found = [targets_of(ends, rows, sent) for rows, sent in zip(hidden.detach(), gradient, strict=True)]
        return _share(torch.stack(found), self._targets)


def targets_of(ends: PartModule, hidden: Tensor, gradient: Tensor) -> Tensor:
    """Return the targets (T,) that these ends think a gradient of the summed loss was made with: (T, D) each.

    The gradient is that of log Σ exp(scores) less that of the target's score. Of all scores' gradients the one that
    points the way of the difference is looked for: a directional derivative gives its product with each. Through the
    norm before the head (x / rms(x) · gain) a score's gradient loses what lies along x, which the score itself tells.
    """
    hidden = hidden.clone().requires_grad_()
    (of_all,) = torch.autograd.grad(ends.logits(hidden[None])[0].logsumexp(1).sum(), hidden)
    of_target = of_all - gradient
    scores, products = torch.func.jvp(lambda x: ends.logits(x[None])[0], (hidden.detach(),), (of_target,))
    weights = dict(ends.named_parameters())
    squares = (weights["head.weight"] * weights["norm.weight"]).square().sum(1) - scores.square() / hidden.shape[1]
    return (products / squares.clamp(min=1e-12).sqrt()).argmax(1).detach()


def nearest(seen: Tensor, known: Tensor) -> Tensor:
    """Return for each of (N, D) which of (M, D) is nearest to it: (N,)."""
    return torch.cat([torch.cdist(some, known).argmin(1) for some in seen.split(AT_ONCE)])


def fit(given: Tensor, tokens: Tensor, vocab_size: int) -> torch.nn.Linear:
    """Return a linear decoder of (N, D) to tokens (N,)."""
    decoder = torch.nn.Linear(given.shape[1], vocab_size)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=DECODER_LR)
    generator = torch.Generator().manual_seed(0)
    for _ in range(DECODER_STEPS):
        chosen = torch.randint(len(given), (min(DECODER_BATCH, len(given)),), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(decoder(given[chosen]), tokens[chosen]).backward()
        optimizer.step()
    return decoder.requires_grad_(requires_grad=False)


def _share(guessed: Tensor, right: Tensor) -> float:
    return (guessed.flatten() == right.flatten()).float().mean().item()
