"""A trained model, loaded to be asked: its loss on held-out text and on any text, and text it makes up.

The model of a checkpoint is loaded here; one that was exported, by :mod:`peers.commands.exported`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data_shards.documents import rows_of
from data_shards.draft import Documents
from data_shards.router import Router
from data_shards.shard import Shard
from data_shards.tokenize import Tokenizer
from peers.checkpoints.choose_checkpoint import ChosenStep, choose_step, run_tokenizer
from peers.commands.export import trained_weights
from peers.console.interrupt import check
from peers.data.encoder import Encoded
from peers.frozen import frozen_of_all, store_of
from peers.home.run_directory import RunDirectory
from swarm.config import Manifest
from swarm.device import resolve_device
from swarm.errors import ConfigError, StateError
from swarm.ids import PartName
from swarm.models.family import PartModule
from swarm.models.layout import install_weights
from swarm.models.lora import LoraFamily, install_base
from swarm.models.packing import packed, packed_positions
from swarm.models.registry import family_of

ROWS_AT_ONCE = 16
MAX_ROWS = 512
LARGEST_SCORES = 1 << 26
"""Elements of the scores that are in memory at once: 256 MiB, or one row's where that is more."""
LONGEST_WINDOW = 2048
"""Unless a longer one is asked for: attention over more costs much and gains little."""

Weights = Mapping[str, Tensor]
_Row = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Tokens, and what follows each: the targets, -1 where one does not count."""


class LanguageModel(Protocol):
    """What can be asked of a model: see :class:`~swarm.models.family.PartModule`, which is one."""

    vocab_size: int
    context: int

    def evaluate(self, tokens: Tensor, targets: Tensor) -> tuple[float, int]:
        """Return (sum of cross entropy in nats, number of targets ≥ 0) of int64 (B, T)."""

    def generate(
        self, tokens: Tensor, count: int, *, seed: int, temperature: float, ends: Collection[int] = ()
    ) -> Tensor:
        """Continue int64 (T,) by ``count`` tokens at most, or to one of ``ends``; return the continuation alone."""


class LoadedModel(Protocol):
    """A model in memory, on its device, and its tokenizer."""

    @property
    def model(self) -> LanguageModel:
        """The model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def device(self) -> torch.device:
        """Return where its inputs belong."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is loaded of no single checkpoint: a :class:`LoadedModel`."""

    model: LanguageModel
    tokenizer: Tokenizer
    device: torch.device


class RoutedModel:
    """Models of one shape, each for a kind of text: a :class:`LanguageModel` that has each row, or prompt, asked of the
    model of its kind. A prompt stays of its kind as it is continued."""

    def __init__(self, models: Sequence[LanguageModel], router: Router) -> None:
        self._models, self._router = models, router
        self.vocab_size, self.context = models[0].vocab_size, models[0].context

    def evaluate(self, tokens: Tensor, targets: Tensor) -> tuple[float, int]:
        """See :class:`LanguageModel`."""
        kinds = self._router.choices_of_rows(tokens.cpu().numpy(), targets.cpu().numpy())
        total, count = 0.0, 0
        for kind in np.unique(kinds).tolist():
            rows = torch.from_numpy(kinds == kind).to(tokens.device)
            positions = packed_positions()
            with packed(None if positions is None else positions[rows]):
                nats, counted = self._models[kind].evaluate(tokens[rows], targets[rows])
            total, count = total + nats, count + counted
        return total, count

    def generate(
        self, tokens: Tensor, count: int, *, seed: int, temperature: float, ends: Collection[int] = ()
    ) -> Tensor:
        """See :class:`LanguageModel`."""
        model = self._models[self._router.choice_of(tokens.tolist())]
        return model.generate(tokens, count, seed=seed, temperature=temperature, ends=ends)


# --- the model of a checkpoint ---------------------------------------------------------------------------------------


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
    device: torch.device = torch.device("cpu")


def load_checkpoint(
    directory: RunDirectory,
    step: int | None = None,
    *,
    path: str | None = None,
    device: str = "cpu",
    threads: int = 1,
) -> Checkpointed:
    """The model of a run after ``step``, or of its newest complete checkpoint.

    Every part's digest is verified, and that the checkpoint belongs to this run. Raises ConfigError when there is none
    such, CommandError when parts of it are not on this machine, StateError when it is damaged. Costs the model's size
    in memory.

    Args:
        directory: The run's.
        step: The checkpoint's; None for the newest complete one.
        path: Which of its models, where stages have variants; see :meth:`ChosenStep.on_path`.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: Of the processor. For a small model on a machine that has other work one is best: threads that wait
            for each other cost 3 times what they give.
    """
    torch.set_num_threads(threads)
    return _load(choose_step(directory, step).on_path(path), resolve_device(device), {})


def load_to_ask(chosen: ChosenStep, *, device: str = "cpu", threads: int = 1) -> LoadedModel:
    """Load the model of a step; of a run that has experts by text all of them, unless ``chosen`` means one, and text is
    asked of that of its kind. What several models share is in memory once where it needs no other dtype or device. See
    :func:`load_checkpoint`."""
    torch.set_num_threads(threads)
    place, held = resolve_device(device), dict[PartName, Weights]()
    if chosen.choice is not None or not chosen.manifest.split.centres:
        return _load(chosen, place, held)
    every = [_load(chosen.on_path(name), place, held) for name in chosen.paths]
    model = RoutedModel([one.model for one in every], Router(chosen.manifest.split.centres))
    return Loaded(model, every[0].tokenizer, place)


def _load(chosen: ChosenStep, place: torch.device, held: dict[PartName, Weights]) -> Checkpointed:
    """Build one model of parts that are ``held`` already, or are loaded and held then."""
    directory, family = chosen.directory, family_of(chosen.manifest.model)
    model = family.build(family.whole)
    if isinstance(family, LoraFamily):
        install_base(model, frozen_of_all(chosen.manifest, store_of(directory)), place)
    for spec in chosen.specs:
        held[spec.name] = held.get(spec.name) or trained_weights(chosen, spec)
    weights = {name: tensor for spec in chosen.specs for name, tensor in held[spec.name].items()}
    install_weights(model, weights, device=place)
    _, tokenizer = run_tokenizer(chosen)
    return Checkpointed(chosen.step, model.to(place).eval(), tokenizer, chosen.manifest, chosen.passed_over, place)


def held_out_loss(
    loaded: LoadedModel, chosen: ChosenStep, shard_path: Path, enough: Callable[[int], bool] = lambda rows: False
) -> float:
    """Mean cross entropy in nats per target token of what was loaded of a step over the held-out shard (its first 512
    rows at most, or until so many are ``enough``), packed as the run's are; of conversations the targets are what is
    learnt of them."""
    manifest = chosen.manifest
    held_out = rows_of(Shard.open(shard_path), manifest.model.context, manifest.batch.packing)
    held_out.require(1)
    total, count = 0.0, 0
    rows, at_once = min(held_out.count, MAX_ROWS), _rows_at_once(manifest.model.context, manifest.model.vocab_size)
    for first in range(0, rows, at_once):
        check()
        numbers = list(range(first, min(first + at_once, rows)))
        read = held_out.read(numbers)
        with packed(None if read.positions is None else torch.from_numpy(read.positions)):
            loss_sum, targets = loaded.model.evaluate(torch.from_numpy(read.inputs), torch.from_numpy(read.targets))
        total += loss_sum
        count += targets
        if enough(numbers[-1] + 1):
            break
    if not math.isfinite(total):
        raise StateError(f"the loss of step {chosen.step} on held-out text is not a number: training diverged")
    return total / count


def sample_text(loaded: LoadedModel, sampling: Sampling) -> str:
    """A continuation of the prompt, without the prompt. The same seed gives the same text on the same machine."""
    tokenizer = loaded.tokenizer
    prompt = torch.tensor([*tokenizer.opening, *tokenizer.encode(sampling.prompt)], device=loaded.device)
    made = loaded.model.generate(prompt, sampling.tokens, seed=sampling.seed, temperature=sampling.temperature)
    ids = [token for token in made.tolist() if token < tokenizer.vocab_size]
    return tokenizer.decode(ids)


def answer_text(loaded: LoadedModel, question: Sequence[int], sampling: Sampling) -> str:
    """An answer to a conversation, which ``question`` has as tokens up to where the answer begins: up to the first
    special token, as which templates end a turn. Of ``sampling`` its prompt is not used."""
    tokenizer = loaded.tokenizer
    prompt, ends = torch.tensor(question, dtype=torch.int64, device=loaded.device), tokenizer.special_ids
    how: dict[str, Any] = {"seed": sampling.seed, "temperature": sampling.temperature, "ends": ends}
    made = loaded.model.generate(prompt, sampling.tokens, **how).tolist()
    ids = itertools.takewhile(lambda token: token not in ends, made)
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size]).strip()


# --- the loss on any text --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLoss:
    """How well a model predicts a text: the sum of the cross entropy of its ``tokens`` in nats, and its ``bytes`` in
    UTF-8. With the latter models of different tokenizers compare."""

    nats: float
    tokens: int
    bytes: int

    def __add__(self, other: TextLoss) -> TextLoss:
        return TextLoss(nats=self.nats + other.nats, tokens=self.tokens + other.tokens, bytes=self.bytes + other.bytes)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Between how many tokens it hesitates: e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Return what it would take to store the text with the model's help: plain text has 8, a good archiver some 2.
        Infinite where there is no text, as of empty answers."""
        return math.inf if not self.bytes else self.nats / math.log(2) / self.bytes


def text_loss(loaded: LoadedModel, found: Iterable[Encoded], *, context: int, stride: int) -> TextLoss:
    """Return the loss on documents, each token counted once: of a text all of them, of a conversation what is learnt of
    it, the assistant's answers; the bytes are those of the text that they are.

    Every document stands for itself. The first token of a text is foretold from what the tokenizer puts before it, a
    conversation is as its chat template writes it. Windows of ``context`` tokens slide by ``stride``: a token is
    foretold from at least ``context`` - ``stride`` tokens before it (from all there are near the beginning).

    Raises StateError for a loss that is not a number, and where there is no token.
    """
    tokenizer, size = loaded.tokenizer, 0

    def rows() -> Iterator[_Row]:
        nonlocal size
        for some in found:
            size += some.text_bytes if some.documents.counted is None else 0
            for document in map(Documents.of, some.documents.apart()):
                tokens, counted = _foretold(document, tokenizer)
                if some.documents.counted is not None:
                    edges = np.flatnonzero(np.diff(counted, prepend=False, append=False))
                    for begin, end in edges.reshape(-1, 2).tolist():
                        size += len(tokenizer.decode(tokens[begin:end].tolist()).encode())
                yield from _rows(tokens, counted, context, stride)

    total, count = _loss_of(loaded, rows(), context)
    if not count:
        raise StateError("the tokenizer makes no token of this text: there is nothing to predict. Give more text.")
    return TextLoss(nats=total, tokens=count, bytes=size)


def is_text(document: Documents) -> bool:
    """Return whether a document is a text, of which all is learnt, and no conversation."""
    return document.counted is None or bool(document.counted.all())


def _foretold(document: Documents, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the tokens of a document, and which of them are counted: of a text not those around it."""
    tokens, counted = document.tokens.astype(np.int64), document.counted
    if counted is None or is_text(document):
        tokens = tokens[len(tokenizer.begins) : len(tokens) - len(tokenizer.ends)]
        counted = np.ones(len(tokens), np.bool_)
    elif not counted[0]:
        return tokens, counted
    opening = tokenizer.opening
    return np.concatenate([opening, tokens]), np.concatenate([np.zeros(len(opening), np.bool_), counted])


def _rows(tokens: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_], context: int, stride: int) -> Iterator[_Row]:
    """Yield inputs and targets of the windows with something to predict; what does not count, or did before, is -1."""
    for window in sliding(len(tokens) - 1, context, stride):
        targets = tokens[window.start + 1 : window.stop + 1].copy()
        targets[: window.counted - window.start] = -1
        targets[~counted[window.start + 1 : window.stop + 1]] = -1
        if (targets >= 0).any():
            yield tokens[window.start : window.stop], targets


def _loss_of(loaded: LoadedModel, rows: Iterator[_Row], context: int) -> tuple[float, int]:
    """Return the sum of the cross entropy in nats, and the number of targets. Raises StateError for a token that the
    model does not have, and for a loss that is not a number."""
    model, total, counted = loaded.model, 0.0, 0
    for batch in _batches(rows, context, model.vocab_size):
        check()
        # Shorter rows end in tokens that nothing before them sees.
        shape = len(batch), max(len(targets) for _, targets in batch)
        both = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        for place, row in enumerate(batch):
            for into, found in zip(both, row, strict=True):
                into[place, : len(found)] = found
        if (largest := int(both[0].max())) >= model.vocab_size:
            raise StateError(
                f"the tokenizer writes token {largest}; the model has {model.vocab_size}. Resize its embeddings."
            )
        nats, count = model.evaluate(*(torch.from_numpy(one).to(loaded.device) for one in both))
        total += nats
        counted += count
    if not math.isfinite(total):
        raise StateError("the loss on this text is not a number: training diverged, or the weights are damaged")
    return total, counted


def window_of(model: LanguageModel, context: int | None, stride: int | None) -> tuple[int, int]:
    """Return the length of windows and the distance between them, as asked for or by default. Raises ConfigError for
    windows that the model cannot see at once, or that leave tokens out."""
    length = min(model.context, LONGEST_WINDOW) if context is None else context
    if length > model.context:
        raise ConfigError("--context", length, f"at most the model's context, {model.context}", "Make it smaller.")
    by = max(1, length // 2) if stride is None else stride
    if by > length:
        raise ConfigError("--stride", by, f"at most a window, {length}", "Make it smaller, or leave it out.")
    return length, by


@dataclass(frozen=True, slots=True)
class Window:
    """Targets ``start`` up to, not including, ``stop``; those from ``counted`` on are new."""

    start: int
    counted: int
    stop: int


def sliding(targets: int, context: int, stride: int) -> Iterator[Window]:
    """Yield windows that count each target once; all but that of a short text are ``context`` long. Pure."""
    done = min(targets, context)
    yield Window(0, 0, done)
    while done < targets:
        stop = min(done + stride, targets)
        yield Window(stop - context, done, stop)
        done = stop


def _rows_at_once(context: int, vocab_size: int) -> int:
    return max(1, min(ROWS_AT_ONCE, LARGEST_SCORES // (context * vocab_size)))


def _batches(rows: Iterator[_Row], context: int, vocab_size: int) -> Iterator[list[_Row]]:
    """Put rows together as far as their scores fit."""
    most = _rows_at_once(context, vocab_size)
    batch: list[_Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == most:
            yield batch
            batch = []
    if batch:
        yield batch
