"""A tokenizer as models come with it: ``tokenizer.json``, and beside it what ends a text and how a chat is written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_shards.template import LONGEST_TEMPLATE, TemplateSource
from peers.console.words import another_path
from peers.data.encoder import Encoding
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import TokenizerConfig

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 32 << 20

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_encoding(tokenizer: Path, *, key: str, field: str | None = None, template: Path | None = None) -> Encoding:
    """How a user's files become tokens.

    Args:
        tokenizer: A ``tokenizer.json``, or a directory with one. What lies beside it says what ends a text and how a
            conversation is written.
        key: What errors call the option that names the files.
        field: As for :func:`peers.data.blocks.blocks_of`.
        template: The chat template in place of the one beside the tokenizer, see :func:`read_template`.

    Raises:
        ConfigError: A file is missing, unreadable, too large, or not what it should be.
    """
    path = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
    document = _read(path, "--tokenizer", "a readable tokenizer.json", MAX_TOKENIZER_BYTES)
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
    )


def run_encoding(
    tokenizer: bytes,
    run: TokenizerConfig,
    *,
    key: str,
    field: str | None = None,
    template: TemplateSource | None = None,
) -> Encoding:
    """Return how files become tokens in a run: with what its ``[tokenizer]`` says ends a text, and with its chat
    template, unless another ``template`` is given. The rest as for :func:`read_encoding`."""
    if template is None and run.template:
        template = TemplateSource(run.template, run.tokens)
    return Encoding(tokenizer=tokenizer, key=key, field=field, end_token=run.end or None, template=template)


def special_tokens(tokenizer: Path) -> dict[str, str]:
    """Return the names that the model beside a ``tokenizer.json`` has for special tokens, each with its token.

    Raises ConfigError as :func:`read_encoding`.
    """
    return _tokens(_config(tokenizer.with_name(CONFIG_FILE)))


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
    config = _config(path / CONFIG_FILE)
    chat = _template(path / TEMPLATE_FILE, config)
    if chat is None:
        why = f"it has neither {TEMPLATE_FILE} nor a chat_template in {CONFIG_FILE}"
        raise ConfigError(key, str(path), "a model's directory with a chat template", another_path(path), why=why)
    return TemplateSource(chat, _tokens(config))


def _tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: text for name in _NAMED if (text := _token(config.get(name)))}


def _read(path: Path, key: str, allowed: str, most: int) -> bytes:
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
        config = json.loads(_read(path, "--tokenizer", allowed, MAX_CONFIG_BYTES))
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
    """Whether a file of JSON, or its first line of JSONL, was given: as Jinja it would write itself."""
    for part in (text, text.lstrip().partition("\n")[0]):
        with contextlib.suppress(ValueError, RecursionError):
            return isinstance(json.loads(part), (dict, list))
    return False


def _text(path: Path, key: str) -> str:
    data = _read(path, key, "a readable chat template", 4 * LONGEST_TEMPLATE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(key, str(path), "UTF-8 text", another_path(path), why="it is none") from None
