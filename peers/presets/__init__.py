"""Run manifests to start from, as TOML without a tokenizer: ``swarm new --preset NAME``."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from peers.console.words import command_name
from swarm.errors import ConfigError


def preset_names() -> list[str]:
    """The names of those that have a model of our own, smallest first; the others are for one that is named."""
    sized = [(model["dim"], name) for name in _found() if (model := load_preset(name).get("model"))]
    return [name for _, name in sorted(sized)]


def load_preset(name: str) -> dict[str, Any]:
    """A preset, decoded. Raises ConfigError naming those there are."""
    if name not in _found():
        known = ", ".join(preset_names())
        remedy = "Choose one of these, or write your own: a RUN.toml in place of --preset."
        raise ConfigError("--preset", name, f"one of {known}", remedy)
    return tomllib.loads(_text(name))


def refuse_as_file(given: Path | None) -> None:
    """Raises ConfigError for the name of a preset where a RUN.toml belongs, and no file is called so."""
    if given is not None and str(given) in _found() and not given.exists():
        remedy = f"If the preset is meant: {command_name()} new --preset {given}"
        allowed = "a file; presets are named by --preset"
        raise ConfigError("RUN.toml", str(given), allowed, remedy, why="there is no file of that name")


def _found() -> list[str]:
    return [file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml")]


def _text(name: str) -> str:
    return files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
