"""Run manifests to start from, as TOML without a tokenizer: ``swarm new --preset NAME``."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from swarm.errors import ConfigError


def preset_names() -> list[str]:
    """The names there are, smallest model first."""
    sized = [(load_preset(name)["model"]["dim"], name) for name in _found()]
    return [name for _, name in sorted(sized)]


def load_preset(name: str) -> dict[str, Any]:
    """A preset, decoded. Raises ConfigError naming those there are."""
    if name not in _found():
        known = ", ".join(preset_names())
        remedy = "Choose one of these, or write your own: a RUN.toml in place of --preset."
        raise ConfigError("--preset", name, f"one of {known}", remedy)
    return tomllib.loads(_text(name))


def preset_purpose(name: str) -> str:
    """What a preset is for: its first line."""
    return _text(name).splitlines()[0].removeprefix("# ")


def _found() -> list[str]:
    return [file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml")]


def _text(name: str) -> str:
    return files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
