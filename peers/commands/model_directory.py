"""The directory of an exported model: made whole or not at all, what lies in it beside the weights, and found again.

Imports no torch: what is wrong with the directory that a person names is said at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from peers.console.words import CommandError, another_path, command_name, one_line
from swarm.disk import Piece, make_directory, sync_directory, write_whole
from swarm.errors import ConfigError, StateError, install_command
from swarm.models.spec import DOMAIN
from swarm.schema import HistogramField, Section

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
"""What peft reads of a directory of adapters."""
ROUTING = "routing.json"
"""Moved into place last: nothing takes a directory without one of these for a model."""


class Routing(Section):
    """The file of a directory that holds a model for each kind of text: where each is, and the middle of its kind."""

    version: Literal[1] = Field(alias="schema")
    models: Annotated[tuple[Annotated[str, StringConstraints(pattern=DOMAIN)], ...], Field(min_length=1)]
    centres: tuple[HistogramField, ...]


def check_target(into: Path) -> None:
    """Raise ConfigError for what a model cannot be exported to: anything but a new or an empty directory."""
    try:
        names = sorted(os.listdir(into))
    except FileNotFoundError:
        names = []
        if os.path.islink(into):
            raise _refused(into, "it is a broken link") from None
    except NotADirectoryError:
        raise _refused(into, "it is a file, or below one") from None
    except OSError as error:
        raise _refused(into, str(error.strerror).lower()) from None
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise _refused(into, f"it holds {names[0]}{more}")


def check_model(path: Path) -> None:
    """Raise ConfigError for what is no model's directory, nor one that routes, CommandError where there is no
    transformers to load it."""
    for one in models_in(path):
        _check_one(one)
    if importlib.util.find_spec("transformers") is None:
        raise CommandError(
            "transformers is not installed: exported models need it",
            check="a run's own checkpoints need no transformers: leave --model out",
            next_=install_command("hf"),
        )


def _check_one(path: Path) -> None:
    if not os.path.isfile(path / CONFIG):
        there = os.path.isdir(path)
        run = os.path.isfile(path / "run.toml")
        quoted = shlex.quote(str(path))
        new = f"NEW --run {quoted}" if run else "NEW" if os.path.lexists(path) else quoted
        if os.path.isfile(path / ADAPTER_CONFIG):
            new = "NEW --merge"  # adapters alone are there
        raise ConfigError(
            "--model",
            str(path),
            "a directory that swarm export made, or another that transformers loads",
            f"Make one of a run's checkpoint: {command_name()} export --out {new}",
            why=f"it holds no {CONFIG}{'; it is a run' if run else ''}" if there else "there is no such directory",
        )


def models_in(path: Path) -> tuple[Path, ...]:
    """Return the directories of the models in a directory that routes; of any other itself. Raises as
    :func:`routing_in`."""
    routing = routing_in(path)
    return (path,) if routing is None else tuple(path / name for name in routing.models)


def routing_in(path: Path) -> Routing | None:
    """Return how a directory routes, None where it does not. Raises StateError for a file that says it wrongly."""
    try:
        routing = Routing.model_validate_json((path / ROUTING).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise StateError(f"{path / ROUTING}: {one_line(str(error))}. Export it anew.") from error
    if len(routing.models) != len(routing.centres):
        raise StateError(f"{path / ROUTING}: models and centres are not as many. Export it anew.")
    return routing


@contextlib.contextmanager
def making(into: Path) -> Iterator[Path]:
    """Give a hidden directory to fill, which becomes ``into`` when the block ends, all at once; when it fails, nothing
    is left of it. An empty directory that is there is kept (a volume may be mounted on it): there the files are moved
    in, last that which makes it a model's.

    Raises StateError when the disk refuses, and ConfigError as :func:`check_target`.
    """
    check_target(into)
    into = Path(os.path.realpath(into))
    there = into.is_dir()
    try:
        if not there:
            make_directory(into.parent)
        hidden = Path(tempfile.mkdtemp(prefix=f".{into.name}.", suffix=".tmp", dir=into if there else into.parent))
    except OSError as error:
        raise refused_by_disk(into, error) from error
    try:
        yield hidden
        _publish(hidden, into, there=there)
    except OSError as error:
        raise refused_by_disk(into, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _publish(hidden: Path, into: Path, *, there: bool) -> None:
    if there:
        for name in sorted(os.listdir(hidden), key=lambda name: (name in (CONFIG, ROUTING), name)):
            os.rename(hidden / name, into / name)
        os.rmdir(hidden)
    else:
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(hidden, 0o777 & ~umask)
        os.rename(hidden, into)
    sync_directory(into if there else into.parent)


def refused_by_disk(path: Path, error: OSError) -> StateError:
    """The error for a model that could not be written."""
    cause = error.strerror or str(error)
    return StateError(f"{path}: {cause}. Nothing was exported. Free some space, or name another directory.")


def _refused(into: Path, why: str) -> ConfigError:
    allowed = "a directory that does not exist yet, or an empty one"
    return ConfigError("--out", str(into), allowed, f"Name another; what is there stays. {another_path(into)}", why=why)


# --- the files of a model --------------------------------------------------------------------------------------------


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers writes them. Raises OSError."""
    write_whole(path, [(json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()])


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], memoryview]]) -> int:
    """Write a safetensors file without a copy of its tensors.

    Args:
        path: The file.
        tensors: By name: the format's word for the dtype, the shape, the bytes.

    Returns:
        Bytes of all tensors. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins, begins + data.nbytes]}
        begins += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces: list[Piece] = [len(text).to_bytes(8, "little"), text, *(data for _, _, data in tensors.values())]
    write_whole(path, pieces)
    return begins


def tokenizer_config(context: int) -> dict[str, Any]:
    """Return the ``tokenizer_config.json`` of a tokenizer, but for its special tokens' names."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
