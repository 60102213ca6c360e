"""Try, before a run is founded, whether a model gives the same bits cut as whole: logits and gradients.

The model that is tried has the config's widths and kinds of layers, but few layers and a small vocabulary, and random
weights. Beside the bits it is tried that no token sees a later one, and that packed documents do not see each other;
of a run that trains adapters, that the parts with them compute what the whole model does where they are added to its
weights (:func:`check_adapters`).

Cost: a few seconds, and memory for some four layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.errors import ConfigError
from swarm.models.family import PartModule
from swarm.models.hf.hf_config import EXPERT_KEYS, LAYER_KEYS, USED_EXPERT_KEYS, HfConfig, canonical
from swarm.models.hf.hf_family import HfFamily, anatomy_of
from swarm.models.hf.part import HfPart
from swarm.models.hf.skeleton import skeleton
from swarm.models.layout import install_weights
from swarm.models.lora import LoraFamily, install_base, merged, stands_upright
from swarm.models.lora_config import BaseDType
from swarm.models.packing import packed
from swarm.models.passes import backward_steps, forward_steps
from swarm.models.shards import LocalShards, without_experts
from swarm.models.spec import SplitConfig

LAYERS, VOCABULARY, ROWS, TOKENS, WINDOW = 4, 512, 2, 12, 4
WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
_COPIES = 4
"""How many times the small model's weights are in memory at once: whole, in parts, and two gradients."""
LEAK = 1e-4
"""By how much a logit may differ where a sum is taken in another order."""
ADAPTED = 1e-3
"""By how much of the largest a logit or a gradient may differ where adapters are added before or after a product."""
_SHIFT = 0.05
"""Added noise: some families begin with weights of zero, which would hide a difference."""
_PACKED = ((5, 7), (8, 4))


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The largest differences of logits and gradients, plain and packed; how far a document's logits are changed by the
    one before it, and a token's by a later one."""

    plain: float
    packed: float
    leaks: float
    future: float

    @property
    def equal(self) -> bool:
        """Return whether the cut model gives the very bits of the whole."""
        return self.plain == 0.0

    @property
    def packs(self) -> bool:
        """Return whether documents may be packed into a row."""
        return self.packed == 0.0 and self.leaks <= LEAK

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return self.future <= LEAK

    def check(self, architecture: str, packing: str = "stream") -> None:
        """Raise ConfigError where the model must not be trained cut, or not with rows packed like this."""
        if packing == "documents" and not self.packs:
            why = f"a document's logits change by {max(self.leaks, self.packed):g} with the one before it in a row"
            raise ConfigError("batch.packing", packing, '"stream" for this model', "Leave it out.", why=why)
        why = "" if self.causal else f"a token's logits change by {self.future:g} with a later token"
        why = why if self.equal else f"cut, its logits or gradients differ by {self.plain:g}"
        if why:
            raise ConfigError(
                "model", architecture, "a model that gives the same bits cut as whole", "Use another.", why=why
            )


def self_test(model: HfConfig, *, free: int | None = None, seed: int = 0) -> SelfTest:
    """Try a small model of the config, where that takes no more than ``free`` bytes of memory. Raises ConfigError where
    it takes more, none can be built of it, or it cannot be cut."""
    small = reduced(model)
    family = HfFamily(small)
    needed = _COPIES * 4 * family.cost(family.whole, TOKENS).parameters
    if free is not None and needed > free:
        why = f"to try a small one of its kind takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free here"
        raise ConfigError("model", model.architecture, "a machine with more memory", "Found the run there.", why=why)
    generator = torch.Generator().manual_seed(seed)
    whole, weights = _whole(small, generator)
    parts = _parts(small, weights)
    tokens = torch.randint(3, small.vocab_size, (ROWS, TOKENS), generator=generator)
    targets = torch.randint(3, small.vocab_size, (ROWS, TOKENS), generator=generator)
    positions = torch.tensor([[at for length in row for at in range(length)] for row in _PACKED])
    alone = _difference(whole, parts, tokens, targets, None)
    with packed(positions):
        together = _difference(whole, parts, tokens, targets, positions)
    return SelfTest(alone, together, _leaks(whole, tokens, positions), _future(whole, tokens))


def experts_difference(model: HfConfig, shards: int, *, seed: int = 0) -> float:
    """Try a small model of the config whose experts are in so many shards. Return the largest difference of a logit or
    a gradient from the whole model, whose experts are computed one after the other, as a share of the largest one;
    infinite where a gradient is missing. Raises ConfigError where its experts cannot be shared out."""
    small = reduced(model).model_copy(update={"experts_implementation": "eager"})
    family, split = HfFamily(small), SplitConfig(stages=1)
    family.check_expert_shards(shards, split)
    generator = torch.Generator().manual_seed(seed)
    whole, weights = _whole(small, generator)
    tokens, targets = (torch.randint(3, small.vocab_size, (ROWS, TOKENS), generator=generator) for _ in range(2))
    spec, of_ends = family.parts(split)
    ends = family.build(of_ends)
    install_weights(ends, weights, requires_grad=True)
    stage, held = without_experts(family, spec, shards, weights), LocalShards(family, spec, shards, weights)
    embedded, got = ends.embed(tokens), dict[str, Tensor]()
    output, graph = held.driven(forward_steps(stage, embedded.detach(), seed=None, graph=True))
    last = output.requires_grad_()
    logits = ends.logits(last)
    back = _backward(ends, _loss(logits, targets), None, last, got)
    if graph is not None:
        back, rest = held.driven(backward_steps(graph, back))
        got |= family.joined(dict(rest.finish()), map(dict, held.gradients))
    _backward(ends, embedded, back, None, got)
    return _farthest(whole, tokens, targets, None, (logits, got), relative=True)


def check_adapters(model: HfConfig, *, seed: int = 0) -> None:
    """Try a small model of the config with its adapters. Raise ConfigError where its parts fail, or differ from the
    whole with merged weights by more than rounding: where it uses weights without a call of their module, say. A config
    without adapters passes, and so does one whose targets are not among the small model's layers."""
    if model.lora is None:
        return
    small = reduced(model)
    # What is kept in four bits is used as what is kept in bfloat16 is, and takes minutes to make at large widths.
    base: BaseDType = "float32" if model.lora.base == "float32" else "bfloat16"
    family = LoraFamily(small, HfFamily(small), model.lora.model_copy(update={"base": base}))
    generator = torch.Generator().manual_seed(seed)
    try:
        differs = _adapted_difference(family, small, generator)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever the model's own code raises without a weight that it expects
        why = f"with adapters it fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        why = "" if differs <= ADAPTED else f"with adapters, logits or gradients differ by {differs:.2g} of the largest"
    if why:
        remedy = "Train all of its weights, name other modules, or keep the frozen weights in float32."
        allowed = "a model that calls the modules that are adapted or kept smaller"
        raise ConfigError("model.lora", model.architecture, allowed, remedy, why=why)


def _adapted_difference(family: LoraFamily, model: HfConfig, generator: torch.Generator) -> float:
    """The largest difference of logits, or of an adapter's gradient, as a share of the largest of them."""
    plain, weights = _whole(model, generator)
    layout = family.base(family.whole)
    stored = layout.views(layout.pack(weights))
    adapters = {
        name: _SHIFT * torch.randn(one.shape, generator=generator) for name, one in family.initial_weights(0).items()
    }
    if not adapters:
        return 0.0
    install_weights(plain, merged(family, family.whole, adapters, stored), requires_grad=True)
    parts = []
    for spec in family.parts(_cut_of(model)):
        part = family.build(spec)
        install_base(part, stored, torch.device("cpu"))
        install_weights(part, adapters, requires_grad=True, device=torch.device("cpu"))
        parts.append(part)
    tokens, targets = (torch.randint(3, model.vocab_size, (ROWS, TOKENS), generator=generator) for _ in range(2))
    expected = _logits(plain, tokens, None)
    named = dict(plain.named_parameters())
    of_weights = dict(zip(named, _gradients(_loss(expected, targets), list(named.values())), strict=True))
    logits, got = _through_parts(parts, tokens, targets)
    wanted = dict[str, Tensor]()
    whole = family.build(family.whole)
    for path in family.adapted(whole):
        a, b, grad = adapters[f"{path}.lora_a"], adapters[f"{path}.lora_b"], of_weights[f"{path}.weight"]
        grad = grad.t() if stands_upright(whole.get_submodule(path)) else grad
        wanted |= {
            f"{path}.lora_a": family.lora.scale * b.t() @ grad,
            f"{path}.lora_b": family.lora.scale * grad @ a.t(),
        }
    if set(got) != set(wanted):
        return float("inf")
    pairs = [(expected.detach(), logits.detach()), *((wanted[name], got[name]) for name in wanted)]
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=LEAK)) for one, other in pairs)


def reduced(model: HfConfig) -> HfConfig:
    """Return the config with few layers, experts and token ids, and with windows that a few tokens fill."""
    layers, vocab = min(LAYERS, model.layers), min(VOCABULARY, model.vocab_size)
    config = _cut(json.loads(model.config), model.layers, layers)
    config["vocab_size"] = vocab
    for key in [key for key in config if key.endswith("token_id")]:
        small = isinstance(config[key], int) and config[key] < vocab
        config[key] = config[key] if small else 0
    groups = int(config.get("n_group") or 1)
    used = max((config[key] for key in USED_EXPERT_KEYS if isinstance(config.get(key), int)), default=1)
    for key in EXPERT_KEYS:
        if isinstance(config.get(key), int):
            config[key] = min(config[key], -(-max(2 * used, 2 * groups) // groups) * groups)
    for key in WINDOW_KEYS:
        if isinstance(config.get(key), int):
            config[key] = min(config[key], WINDOW)
    known = {key: config[key] for key in LAYER_KEYS if key in config}
    if not known:
        config["num_hidden_layers"] = layers
    return model.model_copy(
        update={
            "config": canonical(config),
            "layers": layers,
            "vocab_size": vocab,
            "scratch": True,
            "compute": "float32",
        }
    )


def _cut(config: Mapping[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """Return what is said once a layer is said for the first ones only."""
    cut: dict[str, Any] = {}
    for key, value in config.items():
        if key in LAYER_KEYS:
            cut[key] = kept
        elif key == "attention_types" and isinstance(value, list):  # [[kinds, how often], …]
            cut[key] = [[kinds, max(1, kept // len(kinds))] for kinds, _ in value[:1]]
        elif isinstance(value, list) and len(value) == layers:
            cut[key] = value[:kept]
        else:
            cut[key] = value
    return cut


def _whole(model: HfConfig, generator: torch.Generator) -> tuple[Any, dict[str, Tensor]]:
    """The whole model as transformers runs it, with random weights; these by name."""
    family = HfFamily(model)
    weights = family.initial_weights(0)
    weights = {name: w + _SHIFT * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    holder = nn.Module()
    holder.model = skeleton(model)  # so that the names are those of a part
    install_weights(holder, weights, requires_grad=True)
    return holder, weights


def _parts(model: HfConfig, weights: Mapping[str, Tensor]) -> list[HfPart]:
    """Two stages, or one where there is one layer, and the ends."""
    family, found = HfFamily(model), []
    for spec in family.parts(_cut_of(model)):
        part = HfPart(model, spec, skeleton(model), anatomy_of(model))
        install_weights(part, weights, requires_grad=True)
        found.append(part)
    return found


def _cut_of(model: HfConfig) -> SplitConfig:
    return SplitConfig(stages=min(2, model.layers), ends="private")


def _difference(whole: Any, parts: list[HfPart], tokens: Tensor, targets: Tensor, positions: Tensor | None) -> float:
    """The largest difference of a logit or a gradient, infinite where a gradient is missing."""
    return _farthest(whole, tokens, targets, positions, _through_parts(parts, tokens, targets))


def _farthest(
    whole: Any,
    tokens: Tensor,
    targets: Tensor,
    positions: Tensor | None,
    found: tuple[Tensor, dict[str, Tensor]],
    *,
    relative: bool = False,
) -> float:
    """See :func:`_difference`, of logits and gradients that were ``found``; ``relative``: as a share of the largest."""
    expected, (logits, got) = _logits(whole, tokens, positions), found
    named = dict(whole.named_parameters())
    wanted = dict(zip(named, _gradients(_loss(expected, targets), list(named.values())), strict=True))
    if set(got) != set(wanted):
        return float("inf")
    pairs = [(logits, expected), *((got[name], wanted[name]) for name in wanted)]
    worst = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return worst / max(float(other.detach().abs().max()) for _, other in pairs) if relative else worst


def _through_parts(parts: Sequence[PartModule], tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the gradient of what is trained by name."""
    *stages, ends = parts
    crossings = [ends.embed(tokens)]
    inputs = []
    for stage in stages:
        inputs.append(crossings[-1].detach().requires_grad_())
        crossings.append(stage(inputs[-1]))
    last = crossings[-1].detach().requires_grad_()
    logits = ends.logits(last)
    got: dict[str, Tensor] = {}
    back = _backward(ends, _loss(logits, targets), None, last, got)
    for stage, output, given in zip(reversed(stages), reversed(crossings[1:]), reversed(inputs), strict=True):
        back = _backward(stage, output, back, given, got)
    _backward(ends, crossings[0], back, None, got)
    return logits, got


def _backward(
    part: PartModule, output: Tensor, grad: Tensor | None, given: Tensor | None, got: dict[str, Tensor]
) -> Tensor | None:
    named = {name: parameter for name, parameter in part.named_parameters() if parameter.requires_grad}
    inputs = [] if given is None else [given]
    if not (named or inputs):
        return None
    found = _gradients(output, [*inputs, *named.values()], grad)
    for name, gradient in zip(named, found[len(inputs) :], strict=True):
        got[name] = got[name] + gradient if name in got else gradient
    return found[0] if inputs else None


def _gradients(output: Tensor, inputs: list[Any], grad: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, grad, allow_unused=True, materialize_grads=True)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")


def _logits(whole: Any, tokens: Tensor, positions: Tensor | None) -> Tensor:
    with packed(positions):
        found: Tensor = whole.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return found.float()


@torch.no_grad()
def _leaks(whole: Any, tokens: Tensor, positions: Tensor) -> float:
    """Return how far the logits of packed documents are from those of each document alone."""
    together, worst = _logits(whole, tokens, positions), 0.0
    for row, lengths in enumerate(_PACKED):
        at = 0
        for length in lengths:
            alone = _logits(whole, tokens[row : row + 1, at : at + length], None)
            worst = max(worst, float((together[row : row + 1, at : at + length] - alone).abs().max()))
            at += length
    return worst


@torch.no_grad()
def _future(whole: Any, tokens: Tensor) -> float:
    """Return how far the logits of the first half change with the tokens of the second."""
    half = TOKENS // 2
    other = tokens.clone()
    other[:, half:] = (tokens[:, half:] + 1).clamp(max=int(tokens.max()))
    return float((_logits(whole, tokens, None)[:, :half] - _logits(whole, other, None)[:, :half]).abs().max())
