"""Build a model of ``transformers`` without its weights, and keep attention inside packed documents.

Imports transformers, so anyone who imports this file does so inside a function. Code that a config could have it
download is switched off before.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import huggingface_hub.constants
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, packed_sequence_mask_function
from transformers.utils import logging as their_logging

from swarm.errors import ConfigError
from swarm.models.hf.hf_config import HfConfig
from swarm.models.packing import document_numbers, packed_positions

MAX_BUFFER_BYTES = 1 << 30
"""Of all tables of a model that are no weights."""

MAX_TABLE = 1 << 27
"""Elements. Nothing larger is allocated while a model is built: a weight is on the meta device anyway, and a table is
refused."""

_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange})


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors on the meta device, whatever they are to become, and refuses operations that would make one.

    What a config asks for may be anything, so each operation is tried without data first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in _FACTORIES and given.get("device") is None:
            without_data = func(*args, **(given | {"device": "meta"}))
            if without_data.numel() > MAX_TABLE:
                return without_data
        elif getattr(func, "__name__", "__get__") not in _ATTRIBUTES:
            self._try(func, args, given)
        return func(*args, **given)

    def _try(self, func: Any, args: Any, given: Any) -> None:
        flat, structure = tree_flatten((args, given))
        if not any(isinstance(one, Tensor) and one.device.type == "cpu" for one in flat):
            return
        metas = [one.detach().to("meta") if isinstance(one, Tensor) else one for one in flat]
        try:
            tried_args, tried_given = tree_unflatten(metas, structure)
            found, _ = tree_flatten(func(*tried_args, **tried_given))
        except Exception:  # noqa: BLE001 - what needs data says so, and makes no more than it has
            return
        if any(isinstance(one, Tensor) and one.numel() > MAX_TABLE for one in found):
            raise _too_large(getattr(func, "__name__", "a table"))


_ATTRIBUTES = frozenset({"__get__", "__set__", "requires_grad_", "detach", "data_ptr", "is_floating_point", "numel"})


def _too_large(name: str) -> ConfigError:
    allowed = f"tables of at most {MAX_TABLE} elements, {MAX_BUFFER_BYTES} bytes together"
    return ConfigError("model.config", name, allowed, "Lower its positions.")


PINNED = {
    "return_dict": True,
    "use_cache": False,  # with a cache packed documents would not be seen as such
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,  # transformers' loss would be of a part's layers; ours is in swarm.models.balance
}
"""What a part's pass depends on and a config may say otherwise: the run sets it."""


def their_config(text: str) -> Any:
    """Return the config object of a checked config, with what is :data:`PINNED`. Raises ConfigError where transformers
    refuses it."""
    values = json.loads(text) | PINNED
    kind = values.pop("model_type")
    try:
        return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # noqa: BLE001 - whatever its own checks raise
        raise _unusable(text, error) from None


def skeleton(model: HfConfig) -> Any:
    """Return the whole model, its parameters on the meta device and its buffers real, ready to be cut: a copy.

    The first of a config costs a second or two and memory for its buffers, the next ones some milliseconds.

    Raises:
        ConfigError: transformers cannot build it, or its buffers are too large.
    """
    with _one_builds:
        return copy.deepcopy(_built(model.config, model.attention, model.experts_implementation, model.compute))


_one_builds = threading.Lock()


@lru_cache(maxsize=2)
def _built(config: str, attention: str, experts: str, compute: str) -> Any:
    theirs = their_config(config)
    try:
        with _parameters_on_meta(), _LargeOnMeta():
            make: Any = AutoModelForCausalLM.from_config
            pinned = {"attn_implementation": attention, "experts_implementation": "eager"}
            module: Any = make(theirs, dtype=getattr(torch, compute), **pinned)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever its own checks raise
        raise _unusable(config, error) from None
    if module._can_set_experts_implementation():  # sums in one order: the other's differ from time to time on a GPU
        module.set_experts_implementation(experts)
    module.tie_weights()
    module.eval()  # no dropout: torch's would not repeat on another device
    return module


def _unusable(config: str, error: Exception) -> ConfigError:
    cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ConfigError(
        "model.config",
        config[:60],
        "a config that transformers can build",
        "Check its config.json.",
        why=cause,
    )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made here have parameters without data, but real buffers: tables of angles cannot be made later.

    Patches torch's registration while it lasts: for one thread, the one that builds.
    """
    builder, register, buffer = threading.get_ident(), nn.Module.register_parameter, nn.Module.register_buffer
    room = MAX_BUFFER_BYTES

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if threading.get_ident() == builder and param is not None and param.device.type != "meta":
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    def bounded(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        nonlocal room
        room -= 0 if tensor is None else tensor.nbytes
        if room < 0 or (tensor is not None and tensor.device.type == "meta"):
            raise _too_large(name)
        buffer(module, name, tensor, persistent)

    nn.Module.register_parameter = to_meta  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = bounded  # type: ignore[method-assign, assignment]
    try:
        with no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module.register_buffer = buffer  # type: ignore[method-assign]


huggingface_hub.constants.HF_HUB_OFFLINE = True  # a config from a peer has nothing fetched, code least of all
their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
their_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


# --- packed documents ------------------------------------------------------------------------------------------------
# Positions that restart keep attention inside a document in most families; some do not pass them on to their masks. So
# each mask is cut at the documents here.


def _cut_at_documents(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    def make(*, mask_function: Any, allow_is_causal_skip: bool = True, **rest: Any) -> Any:
        positions = packed_positions()
        if positions is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(document_numbers(positions)))
            allow_is_causal_skip = False
        return make_mask(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **rest)

    return make


for _kind in ("sdpa", "eager"):
    ALL_MASK_ATTENTION_FUNCTIONS[_kind] = _cut_at_documents(ALL_MASK_ATTENTION_FUNCTIONS[_kind])
