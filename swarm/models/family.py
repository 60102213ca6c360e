"""The interface of a family of models; code outside a family knows none of its layers or parameters by name.

:class:`ModelFamily` says how a model of the family is cut, built, begun with and what it costs; :class:`PartModule` is
what one part of it computes. A family implements both; which ones there are is in the registry.

Shapes: B microbatch, T sequence, D width of what crosses a boundary, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from swarm.columns import becomes
from swarm.errors import BugError, ConfigError
from swarm.ids import PartName, shared_by
from swarm.models.exchange import graph_to_cut
from swarm.models.layout import FlatLayout, state_of
from swarm.models.loss import cross_entropy, cross_entropy_in_pieces, pieces
from swarm.models.packing import packed
from swarm.models.recompute import AsItWas, Compute, recomputed
from swarm.models.spec import ModelConfig, PartSpec, SplitConfig, TensorSpec, split_layers
from swarm.models.strips import TensorPlan

SMALLEST_SIDE = 8
"""Of what counts as a matrix: a convolution's kernels are narrower."""

Work = Literal["embed", "forward", "head"]
"""What a part does with a microbatch: token ids to hidden states, its layers, or hidden states to logits. A hosted
first stage embeds within ``forward``."""


class PartModule(nn.Module):
    """One part of a model. Which of ``embed``, ``forward`` and ``logits`` it can do follows from its
    :class:`~swarm.models.spec.PartSpec`; the others raise BugError.

    Its state are its parameters and the persistent buffers that hold floats, which nothing may change but
    :func:`~swarm.models.layout.install_weights`. They have the names of the whole model in every part, so that the
    parts' states together are the whole model's. What it computes depends on state, input and seed alone: a part that
    computes again gives the same bits.
    """

    head_by_token = True
    """Whether the head treats each token by itself, so that it may be given a stretch of a row."""

    activation_checkpointing = False
    """Whether a graph keeps only what goes into each layer, and backward computes the rest again: the same bits. May
    change at any time; a graph stays what it was made as."""

    frozen: frozenset[str] = frozenset()
    """Names of tensors that are not trained, and so are no part of its state."""

    steered: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()
    """Names of tallies (:mod:`swarm.models.experts`): parameters whose gradient counts tokens, and no loss depends on.
    A step moves the ``steered`` ones by what each element counted beside the others; those that are ``told`` are for
    people alone."""

    asks = False
    """Whether others hold experts of its layers, so that its passes are steps (:mod:`swarm.models.exchange`)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.vocab_size, self.context = model.vocab_size, model.context

    def embed(self, tokens: Tensor, seed: int | None = None) -> Tensor:
        """Return hidden states (B, T, D) of int64 token ids (B, T). ``seed`` keys the dropout; None drops nothing."""
        raise BugError("this part has no embedding")

    def forward(self, x: Tensor, seed: int | None = None) -> Tensor:
        """Return hidden states (B, T, D) after this part's layers.

        Args:
            x: hidden states (B, T, D) or, where the part's spec has the embedding, int64 token ids (B, T).
            seed: as for :meth:`embed`.
        """
        raise BugError("this part has no layers")

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (B, T, V) of hidden states (B, T, D) after the last layer."""
        raise BugError("this part has no head")

    def parameters_of(self, work: Work) -> dict[str, nn.Parameter]:
        """Return by name the parameters that ``work`` uses, in the order of ``named_parameters``. A tied weight is in
        several, under one name: its gradients are added."""
        raise NotImplementedError

    def trained_of(self, work: Work | None = None) -> dict[str, nn.Parameter]:
        """Return those of them that are trained; of the whole part without ``work``."""
        named = dict(self.named_parameters()) if work is None else self.parameters_of(work)
        return {name: parameter for name, parameter in named.items() if name not in self.frozen}

    def through(self, layer: nn.Module, compute: Compute, hidden: Tensor) -> Tensor:
        """Return ``compute(hidden)``, which runs this one of the part's layers, (B, T, D) → (B, T, D): with activation
        checkpointing where that is on. A family runs all its layers through this."""
        again = self.activation_checkpointing and torch.is_grad_enabled()
        if (graph := graph_to_cut()) is not None:
            return graph.through(compute, hidden, AsItWas(layer) if again else None)
        return recomputed(layer, compute, hidden) if again else compute(hidden)

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the *sum* of cross entropy in nats, float32, and the number of targets it runs over, those ≥ 0.

        ``hidden`` (B, T, D), ``targets`` int64 (B, T): on the CPU they are counted without waiting for a GPU. Of
        B·T·V logits no more than :data:`~swarm.models.loss.LOGITS_AT_ONCE` exist at a time, unless the head cannot be
        run for some tokens alone; where there are no more, they are held until backward is done.
        """
        counted = int((targets >= 0).sum().item())
        rows, sequence = targets.shape
        labels, cut = targets.to(hidden.device), pieces(rows, sequence, self.vocab_size)
        if len(cut) == 1 or not self.head_by_token:
            return self._cross_entropy(hidden, labels), counted
        parameters = [parameter for parameter in self.parameters_of("head").values() if parameter.requires_grad]
        with packed(None):  # a piece is no row, and no head looks at other tokens
            return cross_entropy_in_pieces(self._cross_entropy, hidden, labels, parameters, cut), counted

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.logits, hidden, targets, self.vocab_size)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> tuple[float, int]:
        """Return, for a whole model, (sum of cross entropy in nats, number of targets ≥ 0) of int64 (B, T), without
        dropout."""
        total, count = self.loss(self(tokens), targets)
        return total.item(), count

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        seed: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        ends: Collection[int] = (),
    ) -> Tensor:
        """Continue int64 (T,), T ≥ 1, with a whole model by ``count`` tokens, or to the first of those in ``ends``;
        return the continuation alone.

        ``temperature`` 0 takes the likeliest. The same seed gives the same tokens on the same machine. Only the last
        ``context`` tokens are seen. Every token costs a whole forward: there is no key/value cache.
        """
        generator = torch.Generator().manual_seed(seed)
        sequence = tokens.view(1, -1)
        for _ in range(count):
            scores = self.logits(self(sequence[:, -self.context :])[:, -1:])[0, 0]
            chosen = _choose(scores.cpu(), generator, temperature, top_k).to(tokens.device)
            sequence = torch.cat((sequence, chosen.view(1, 1)), dim=1)
            if ends and int(chosen) in ends:
                break
        return sequence[0, tokens.numel() :]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The cost of a part: elements of its parameters that are trained, and operations of its forward per token of a
    row. A multiply-add counts as two. ``idle`` are the elements of experts that a token does not pass. ``frozen`` are
    the elements beside those that are trained, which take ``frozen_bytes`` as they are stored, and ``frozen_held``
    bytes where the part is used: with those of which it has a copy in another dtype."""

    parameters: int
    forward_flops: int
    idle: int = 0
    frozen: int = 0
    frozen_bytes: int = 0
    frozen_held: int = 0


class ModelFamily(ABC):
    """One model of a family: what follows from its ``[model]``. Stateless, and cheap to make.

    A family whose layers are cut evenly and whose tables are ``nn.Embedding`` implements the abstract methods only, and
    the two of export where other programs know its models.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.name, self.layers = model.family, model.layers
        self.vocab_size, self.context = model.vocab_size, model.context

    @property
    @abstractmethod
    def described(self) -> str:
        """The model in a few words, for people."""

    @property
    def mixing(self) -> str:
        """Return what experts that the family's own code computes have room for, and what keeps them evenly used, for
        people; nothing of others."""
        return ""

    @property
    def packs(self) -> bool:
        """Return whether documents that are packed into a row do not see each other (:mod:`swarm.models.packing`)."""
        return True

    @property
    def balances(self) -> bool:
        """Return whether layers have a loss of their own, for which a stage must know how many targets a microbatch
        counts (:mod:`swarm.models.balance`)."""
        return False

    @property
    def mixture(self) -> bool:
        """Return whether a token goes to some of a layer's experts, and the last bits may decide to which."""
        return False

    # --- parts ---------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> PartSpec:
        """All parts in one, for evaluation and sampling: a single stage with both ends."""
        return self.parts(SplitConfig(stages=1, ends="hosted"))[0]

    def parts(self, split: SplitConfig) -> tuple[PartSpec, ...]:
        """See :func:`~swarm.models.spec.split_layers`."""
        return split_layers(self.layers, split)

    def part(self, split: SplitConfig, name: PartName) -> PartSpec | None:
        """Return what a part is made of, one that stages share of the first one's layers; None for one that the model
        does not have."""
        there = {spec.name: spec for spec in self.parts(split)}
        if shared_by(name) == split.stages:
            return replace(there[becomes(name)[0]], name=name)
        return there.get(name)

    @abstractmethod
    def build(self, spec: PartSpec) -> PartModule:
        """Return the module of one part, its state on the meta device, other buffers on the CPU: costs no memory.

        Give it weights with :func:`~swarm.models.layout.install_weights` before use. Raises ConfigError where no module
        can be made of the config on this machine.
        """

    def dense(self, spec: PartSpec) -> PartModule:
        """Return the same with every matrix that it computes with among its parameters, for planning."""
        return self.build(spec)

    @abstractmethod
    def boundary(self, rows: int, sequence: int) -> TensorSpec:
        """Return what crosses every boundary between parts, forward and backward: (B, T, D), and its dtype."""

    # --- experts elsewhere ---------------------------------------------------------------------------------------

    @property
    def experts(self) -> int:
        """Return how many experts a layer has, where some layers have several; else 0."""
        return 0

    @property
    def uncut_experts(self) -> str:
        """Return why the experts of its layers cannot be held in shards; "" where they can."""
        return "" if self.experts else "none of its layers has experts"

    def expert_layers(self, spec: PartSpec) -> tuple[int, ...]:
        """Return which of a part's layers, of the whole model counted from 0, have experts."""
        return ()

    def check_expert_shards(self, shards: int, split: SplitConfig) -> None:
        """Raise ConfigError where the experts of each stage cannot be held in so many shards."""
        key, without = "split.expert_shards", "Leave it out."
        if why := self.uncut_experts:
            raise ConfigError(key, shards, "nothing with this model", without, why=why)
        if self.experts % shards:
            allowed = f"a divisor of {self.experts}, the experts of a layer"
            raise ConfigError(key, shards, allowed, "Use another number, or leave it out.")
        for spec in self.parts(split):
            if spec.first_layer < spec.last_layer and not self.expert_layers(spec):
                why = f"{spec.name} has no layer with experts"
                raise ConfigError(
                    key, shards, "stages that have experts", "Use fewer stages, or leave it out.", why=why
                )

    def cut(self, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of a stage without experts, or of a shard of them, out of that of the whole stage: views."""
        return {name: weights[name] for name in state_of(self.build(spec))}

    def joined(self, stage: Mapping[str, Tensor], shards: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the state of a whole stage, given that of the stage without experts and of all shards of them: the
        inverse of :meth:`cut`. Gradients likewise."""
        return {name: tensor for state in (stage, *shards) for name, tensor in state.items()}

    # --- state ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def initial_weights(self, seed: int, spec: PartSpec | None = None, files: Path | None = None) -> dict[str, Tensor]:
        """Return the float32 CPU state by name that a run begins with: of one part, or of the whole model.

        The same for every cut of the model.

        Args:
            seed: Of random weights.
            spec: The part; None for the whole model.
            files: The directory of the model's files, where the family reads any.

        Raises:
            StateError: It comes from files, and these are not there or not as they should be.
        """

    def warm_up(self) -> None:  # noqa: B027 - most have nothing to do
        """Do now what the first :meth:`build` would take seconds for. Blocking, and safe in a thread of its own. Raises
        ConfigError as :meth:`build`."""

    def decayed(self, module: PartModule) -> frozenset[str]:
        """Return the names of the parameters that weight decay pulls at: matrices, but no table of embeddings, whose
        rows are used one by one, and so no matrix that is tied to one."""
        tables = {id(table.weight) for table in module.modules() if isinstance(table, nn.Embedding)}
        return frozenset(name for name, p in module.named_parameters() if p.ndim >= 2 and id(p) not in tables)

    def matrices(self, module: PartModule) -> frozenset[str]:
        """Return the names of the layers' matrices, and of the stacks of experts' matrices: no embedding, no head, no
        kernel of a convolution."""
        inner, head = self.decayed(module), module.parameters_of("head").keys()
        shapes = {name: p.shape for name, p in module.named_parameters() if name in inner and name not in head}
        return frozenset(name for name, shape in shapes.items() if len(shape) < 4 and min(shape[-2:]) >= SMALLEST_SIDE)

    def layout(self, module: PartModule) -> FlatLayout:
        """Return where the state of a part's module lies in the part's flat vector."""
        return FlatLayout.of(module, self.decayed(module), self.matrices(module))

    def tensor_plan(self) -> TensorPlan:
        """Return how the layers of its parts can be cut across a peer's devices: not at all."""
        return TensorPlan()

    # --- planning ------------------------------------------------------------------------------------------------

    @abstractmethod
    def cost(self, spec: PartSpec, sequence: int) -> PartCost:
        """Return what a part costs for rows of ``sequence`` tokens. Needs no weights; arithmetic, or the building of a
        module on the meta device."""

    def used_share(self, name: str, parameter: Tensor) -> float:
        """Return the share of a parameter's elements that one token uses: below 1 where only some experts see it."""
        return 1.0

    # --- export --------------------------------------------------------------------------------------------------

    def export_config(self) -> dict[str, Any]:
        """Return the ``config.json`` with which transformers builds this model, without what its tokenizer says.

        Raises ConfigError where transformers has no such model.
        """
        raise self._not_exported()

    def export_weights(self, spec: PartSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of one part, given its state by name, as transformers' files have them: views where they
        are the same. All parts' together are the whole model. Raises as :meth:`export_config`."""
        raise self._not_exported()

    def exported_module(self, path: str) -> str:
        """Return what transformers' model calls the module of this path. Raises as :meth:`export_config`."""
        raise self._not_exported()

    def _not_exported(self) -> ConfigError:
        return ConfigError(
            "model.family",
            self.name,
            "a family that transformers has a model for",
            "Its checkpoints stay usable here: sample from them, or resume the run.",
            why="models of this family have no form outside of swarm",
        )


def _choose(scores: Tensor, generator: torch.Generator, temperature: float, top_k: int | None) -> Tensor:
    """One token id from (V,) scores."""
    if temperature == 0.0:
        return scores.argmax()
    if top_k is not None and top_k < scores.numel():
        floor = scores.topk(top_k).values[-1]
        scores = scores.masked_fill(scores < floor, float("-inf"))
    return torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)
