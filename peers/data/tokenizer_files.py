"""A tokenizer as models come with it: ``tokenizer.json``, and beside it what ends a text and how a chat is written; and
those files of a model that come back with an export."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_shards.template import LONGEST_TEMPLATE, TemplateSource
from peers.console.words import another_path, listed, one_line
from peers.data.encoder import Encoding
from swarm.errors import ConfigError
from swarm.schema import MAX_FILES, MAX_FILES_BYTES, MODEL_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from swarm.config import TokenizerConfig

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
SHOWN = 12
"""Names of files that are left out, which are told."""
MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 32 << 20

_SAID_IN = {
    "digest": "(?!LICEN|NOTICE|README|COPYING|USE_POLICY)",
    "end": "tokenizer_config|special_tokens_map|generation_config",
    "tokens": "tokenizer_config|special_tokens_map",
    "template": ".*chat_template",
}
"""How the names of those files of a model begin that depend on what ``[tokenizer]`` says under a key."""
_MADE_ANEW = re.compile(r"config\.json|tokenizer\.json|.*\.safetensors(\.index\.json)?|\..*")
"""What an export makes; and what is hidden, which is the disk's or a download's."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_encoding(
    tokenizer: Path,
    *,
    key: str,
    field: str | None = None,
    template: Path | None = None,
    special_in_text: bool = False,
) -> Encoding:
    """Return how a user's files become tokens.

    Args:
        tokenizer: A ``tokenizer.json``, or a directory with one. What lies next to it says what ends a text and how a
            conversation is written.
        key: What errors call the option that names the files.
        field: As for :func:`peers.data.blocks.blocks_of`.
        template: The chat template in place of the one next to the tokenizer, see :func:`read_template`.
        special_in_text: As for :class:`data_shards.tokenize.Tokenizer`.

    Raises:
        ConfigError: A file is missing, unreadable, too large, or not what it should be.
    """
    path = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
    document = read_bounded(path, "--tokenizer", "a readable tokenizer.json", MAX_TOKENIZER_BYTES)
    config = _config(path.with_name(CONFIG_FILE))
    tokens = _tokens(config)
    chat = _template(path.with_name(TEMPLATE_FILE), config)
    if template is not None:
        given = read_template(template, "--template")
        chat, tokens = given.text, {**tokens, **given.tokens}
    return Encoding(
        tokenizer=document,
        key=key,
        field=field,
        end_token=_token(config.get("eos_token")) or None,
        template=None if chat is None else TemplateSource(chat, tokens),
        special_in_text=special_in_text,
    )


def model_encoding(model: Path, *, key: str) -> Encoding:
    """Return how files become tokens for an exported model, or any other that transformers loads from a directory: as
    :func:`read_encoding` says. The tokenizer of one that has no ``tokenizer.json`` is converted.

    Raises ConfigError for a directory without a tokenizer that can be used.
    """
    try:
        if (model / TOKENIZER_FILE).is_file():
            encoding = read_encoding(model, key=key)
            encoding.make_tokenizer()
            return encoding
        from transformers import AutoTokenizer

        found: Any = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        document, template = found.backend_tokenizer.to_str().encode(), found.chat_template
        tokens = {name: str(text) for name, text in found.special_tokens_map.items() if name in _NAMED}
        source = TemplateSource(template, tokens) if isinstance(template, str) else None
        return Encoding(tokenizer=document, key=key, end_token=found.eos_token, template=source)
    except ConfigError as error:
        why = error.why or f"its tokenizer is not {error.allowed}"
    except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError) as error:
        why = one_line(str(error))
    allowed = f"a directory with a {TOKENIZER_FILE}, or another tokenizer that transformers loads"
    raise ConfigError("--model", str(model), allowed, another_path(model), why=why)


def run_encoding(
    tokenizer: bytes,
    run: TokenizerConfig,
    *,
    key: str,
    field: str | None = None,
    template: TemplateSource | None = None,
    special_in_text: bool = False,
) -> Encoding:
    """Return how files become tokens in a run: with what its ``[tokenizer]`` says ends a text, and with its chat
    template, unless another ``template`` is given. The rest as for :func:`read_encoding`."""
    if template is None and run.template:
        template = TemplateSource(run.template, run.tokens)
    return Encoding(tokenizer, key, field, run.end or None, template, special_in_text)


def special_tokens(tokenizer: Path) -> dict[str, str]:
    """Return the names that the model beside a ``tokenizer.json`` has for special tokens, each with its token.

    Raises ConfigError as :func:`read_encoding`.
    """
    return _tokens(_config(tokenizer.with_name(CONFIG_FILE)))


@dataclass(frozen=True, slots=True)
class CameWith:
    """The files of a model that an export writes as they were, by name, and the names of those that it does not: among
    them those that depend on the ``contrary`` keys of ``[tokenizer]``, where a run says otherwise than the model."""

    kept: dict[str, bytes]
    left_out: Sequence[str]
    contrary: Sequence[str] = ()

    def described(self) -> list[tuple[str, str]]:
        """Return both in words, as (label, text)."""
        back = [("comes back", f"with an export: {', '.join(self.kept)}")] if self.kept else []
        own = f"; the run has its own {listed([f'tokenizer.{key}' for key in self.contrary])}" if self.contrary else ""
        few = [*self.left_out[:SHOWN], *([f"{more} more"] if (more := len(self.left_out) - SHOWN) > 0 else ())]
        return back + ([("left out", f"of exports: {listed(few)}{own}")] if few else [])


def came_with(directory: Path, tokenizer: bytes, contrary: Sequence[str] = ()) -> CameWith:
    """Find what a model came with that training does not change, as much as travels with a run, the smallest first.

    Args:
        directory: The model's.
        tokenizer: The run's, which travels with it.
        contrary: The keys of ``[tokenizer]`` under which the run says otherwise than the model.

    Raises:
        ConfigError: A file cannot be read.
    """
    room = MAX_FILES_BYTES - len(tokenizer)
    kept, left_out = dict[str, bytes](), list[str]()
    try:
        found = sorted(_found(directory))
    except OSError as error:
        allowed = "a directory that this user can read"
        raise ConfigError("--model", str(directory), allowed, another_path(directory), why=str(error)) from None
    for size, name in found:
        contradicted = any(re.match(_SAID_IN[key], name) for key in contrary)
        if contradicted or size > room or len(kept) == MAX_FILES or not re.fullmatch(MODEL_FILE, name):
            left_out.append(name)
            continue
        kept[name] = read_bounded(directory / name, "--model", "a model whose files can be read", room)
        room -= len(kept[name])
    return CameWith(dict(sorted(kept.items())), sorted(left_out), contrary)


def _found(directory: Path) -> Iterator[tuple[int, str]]:
    """Size and name of each file that an export does not make; what is no file by its name and a slash."""
    for path in directory.iterdir():
        if path.name == TEMPLATES and path.is_dir():
            yield from ((size, f"{TEMPLATES}/{name}") for size, name in _found(path))
        elif not _MADE_ANEW.fullmatch(path.name):
            yield (path.stat().st_size, path.name) if path.is_file() else (0, f"{path.name}/")


def template_in(directory: Path) -> str | None:
    """Return the chat template of a model's directory. Raises ConfigError for files that cannot be used."""
    return _template(directory / TEMPLATE_FILE, _config(directory / CONFIG_FILE))


def read_template(path: Path, key: str) -> TemplateSource:
    """A chat template: a file in Jinja, or a model's directory, whose names of special tokens it gets, too.

    Raises ConfigError, which calls it ``key``, where there is none.
    """
    if not path.is_dir():
        text = _text(path, key)
        if _is_json(text):
            remedy = "Of a model give the directory, which has chat_template.jinja or tokenizer_config.json."
            raise ConfigError(key, str(path), "a template in Jinja, or a model's directory", remedy, why="it is JSON")
        return TemplateSource(text)
    chat = template_in(path)
    if chat is None:
        why = f"it has neither {TEMPLATE_FILE} nor a chat_template in {CONFIG_FILE}"
        raise ConfigError(key, str(path), "a model's directory with a chat template", another_path(path), why=why)
    return TemplateSource(chat, special_tokens(path / TOKENIZER_FILE))


def _tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: text for name in _NAMED if (text := _token(config.get(name)))}


def read_bounded(path: Path, key: str, allowed: str, most: int) -> bytes:
    """Return the bytes of a file, at most so many. Raises ConfigError, which calls it ``key``."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        cause = (error.strerror or "unreadable").lower()
        raise ConfigError(key, str(path), allowed, another_path(path), why=cause) from None
    if len(data) > most:
        raise ConfigError(key, str(path), f"a file of at most {most >> 10:,} KiB", another_path(path))
    return data


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    allowed, remedy = "a JSON object", "Correct that file, or move it away to do without it."
    try:
        config = json.loads(read_bounded(path, "--tokenizer", allowed, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        raise ConfigError("--tokenizer", str(path), allowed, remedy, why="it is no JSON") from None
    if not isinstance(config, dict):
        raise ConfigError("--tokenizer", str(path), allowed, remedy, why="it is JSON of another kind")
    return config


def _token(value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _template(file: Path, config: dict[str, Any]) -> str | None:
    if file.is_file():
        return _text(file, "--tokenizer")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _is_json(text: str) -> bool:
    """Return whether a file of JSON, or its first line of JSONL, was given: as Jinja it would write itself."""
    for part in (text, text.lstrip().partition("\n")[0]):
        with contextlib.suppress(ValueError, RecursionError):
            return isinstance(json.loads(part), (dict, list))
    return False


def _text(path: Path, key: str) -> str:
    data = read_bounded(path, key, "a readable chat template", 4 * LONGEST_TEMPLATE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(key, str(path), "UTF-8 text", another_path(path), why="it is none") from None
