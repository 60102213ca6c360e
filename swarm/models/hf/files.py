"""Weights of one part between a directory of safetensors and the part, in the names that other programs read.

Names in files are not those of modules: transformers fuses experts and renames when it loads, and parts them again when
it saves. Its own mapping is used for both, for one part at a time, so nothing else is read. Only safetensors are read:
the other formats can run code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarm.errors import StateError
from swarm.models.hf.part import HfPart
from swarm.models.layout import state_of
from swarm.parsing import parse_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_FILES = 4096
_PREFIXES = ("language_model.", "model.language_model.")
"""Of the text model's names in files of models that also see."""


def load_part(part: HfPart, directory: Path) -> dict[str, Tensor]:
    """Read the state of one part, and of no other, as float32 on the CPU.

    Args:
        part: One that was built in float32 and has no weights; it is used up.
        directory: Where ``model.safetensors`` or its index and files are.

    Raises:
        StateError: A file is missing or damaged, or lacks a tensor of the part.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    with _opened(directory) as stored:
        try:
            mapping: Any = get_model_conversion_mapping(part.model)
            settings = LoadStateDictConfig(weight_mapping=mapping, dtype=torch.float32)
            info, _ = convert_and_load_state_dict_in_model(part.model, stored, settings)
        except Exception as error:  # noqa: BLE001 - whatever its converters raise for what does not fit
            raise _broken(directory, f"cannot be read: {' '.join(str(error).split())[:300]}") from None
    if info.mismatched_keys:
        key, *shapes = sorted(info.mismatched_keys)[0]
        raise _broken(directory, f"has {key} in another shape than the config gives: {shapes}")
    part.tie()
    found = state_of(part)
    absent = {f"model.{name}" for name in info.missing_keys}
    lacking = [name for name, tensor in found.items() if tensor.device.type == "meta" or name in absent]
    if lacking:
        few = ", ".join(name.removeprefix("model.") for name in lacking[:3])
        raise _broken(directory, f"lacks {len(lacking)} of the part's {len(found)} tensors: {few}")
    return {name: tensor.detach().to(torch.float32).contiguous() for name, tensor in found.items()}


def stored_names(part: HfPart, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a part's state in the names, and cut into the tensors, that transformers' files have."""
    from transformers.core_model_loading import revert_weight_conversion

    inner = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    if not inner:
        return {}
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(part.model, inner).items()}


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors of a model's directory. Raises StateError where they are not all there."""
    index = directory / INDEX
    if not index.is_file():
        if (directory / SINGLE).is_file():
            return [directory / SINGLE]
        raise _broken(directory, f"has neither {SINGLE} nor {INDEX}; other formats are not read, for they can run code")
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise _broken(index, f"is larger than {MAX_INDEX_BYTES} bytes")
    try:
        names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise _broken(index, "is no index of safetensors") from None
    if len(names) > MAX_FILES or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise _broken(index, "names files that are not next to it, or too many")
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise _broken(directory, f"lacks {missing[0]}, which {INDEX} names")
    return [directory / name for name in names]


def check_weights(directory: Path) -> list[Path]:
    """Return the safetensors of a model's directory, once the header of each was read: bytes that are missing at a
    file's end show. Raises StateError where one is missing or damaged."""
    with _opened(directory):
        return weight_files(directory)


@contextmanager
def _opened(directory: Path) -> Iterator[dict[str, Any]]:
    """All tensors of a directory by name, none of them read yet."""
    stored: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in weight_files(directory):
            _check_header(path)
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise _broken(path, f"is no safetensors file: {str(error)[:200]}") from None
            for name in file.keys():  # noqa: SIM118
                stored[_own_name(name)] = file.get_slice(name)
        yield stored


def _own_name(name: str) -> str:
    """The text model's name of a tensor in a file of a model that also sees."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith(("model.", "lm_head")) else f"model.{rest}"
    return name


def _check_header(path: Path) -> None:
    """Refuse a header that is too large before anything parses it."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
    except (OSError, struct.error):
        raise _broken(path, "is no safetensors file") from None
    if size > min(MAX_HEADER_BYTES, path.stat().st_size):
        raise _broken(path, f"says that its header has {size} bytes")


def _broken(path: Path, cause: str) -> StateError:
    return StateError(f"{path} {cause}. Check the directory, or download the model again.")
