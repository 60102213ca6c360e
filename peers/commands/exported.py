"""An exported model, or any other that transformers loads from a directory, loaded to be asked as ours are."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_shards.router import Router
from peers.commands.evaluate import Loaded, RoutedModel
from peers.commands.model_directory import models_in, routing_in
from peers.console.words import another_path, count, one_line
from peers.data.tokenizer_files import model_encoding
from swarm.device import resolve_device
from swarm.errors import ConfigError, StateError

_IGNORED = -100
_ANEW = "Export or fetch it anew."
_UNKNOWN_CONTEXT = 1024
"""Of a model that does not say its own."""


class TransformersModel:
    """A causal language model of transformers as a :class:`~peers.commands.evaluate.LanguageModel`."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._model = model
        self.vocab_size: int = config.vocab_size
        self.context: int = getattr(config, "max_position_embeddings", None) or _UNKNOWN_CONTEXT

    @torch.inference_mode()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> tuple[float, int]:
        """See :class:`~peers.commands.evaluate.LanguageModel`."""
        scores = self._model(input_ids=tokens, use_cache=False).logits.float().flatten(0, 1)
        labels = targets.masked_fill(targets < 0, _IGNORED).flatten()
        total = F.cross_entropy(scores, labels, ignore_index=_IGNORED, reduction="sum")
        return total.item(), int((targets >= 0).sum())

    @torch.inference_mode()
    def generate(
        self, tokens: Tensor, count: int, *, seed: int, temperature: float, ends: Collection[int] = ()
    ) -> Tensor:
        """See :class:`~peers.commands.evaluate.LanguageModel`; ends where a text ends. When the context is full,
        it goes on from its second half."""
        torch.manual_seed(seed)
        how: dict[str, Any] = {"do_sample": False}
        if temperature > 0:  # from all tokens, as our own models do
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if ends:
            how["eos_token_id"] = sorted(ends)
        made = tokens[:0]
        seen = tokens[-self.context :]
        while made.numel() < count:
            if seen.numel() >= self.context:
                seen = seen[-max(1, self.context // 2) :]
            room = min(count - made.numel(), self.context - seen.numel())
            row = seen[None]
            longer = self._model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=room, **how)[0]
            made = torch.cat((made, longer[seen.numel() :]))
            if longer.numel() < seen.numel() + room:  # the end of a text
                break
            seen = longer
        return made


def load_exported(path: Path, *, device: str = "cpu", threads: int = 1) -> Loaded:
    """Load a model from a directory, with safetensors only and none of its own code; no hub is asked. Of a directory
    that routes, all its models are loaded.

    Args:
        path: The directory, which :func:`~peers.commands.model_directory.check_model` has passed.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: Of the processor.

    Raises:
        ConfigError: transformers cannot load it, with its own words.
        StateError: A file of it is damaged.
    """
    torch.set_num_threads(threads)
    place = resolve_device(device)
    from transformers.utils import logging

    logging.set_verbosity(logging.ERROR)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    directories, routing = models_in(path), routing_in(path)
    tokenizer = model_encoding(directories[0], key="--model").make_tokenizer()
    models = [TransformersModel(_model_in(one).to(place).eval()) for one in directories]
    if routing is None:
        return Loaded(models[0], tokenizer, place)
    return Loaded(RoutedModel(models, Router(routing.centres)), tokenizer, place)


def _model_in(path: Path) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise StateError(f"{path}: its weights are damaged: {error}. {_ANEW}") from error
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, TypeError) as error:
        raise _refused(path, one_line(str(error))) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):  # transformers would make them up
        raise StateError(f"{path}: its files lack {missing[0]}, {count(len(missing), 'tensor')} in all. {_ANEW}")
    return model


def _refused(path: Path, why: str) -> ConfigError:
    allowed = "a directory with a causal language model that transformers loads"
    return ConfigError("--model", str(path), allowed, another_path(path), why=why)
