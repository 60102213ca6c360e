"""What others wrote as TOML or JSON: no depth ends a program, and no number is infinite or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from peers.cli.app import run as swarm
from peers.exit_codes import EXIT_USAGE
from peers.options.fields import between
from swarm.config import load_manifest
from swarm.errors import ConfigError
from swarm.parsing import MAX_NESTED, parse_json, parse_toml
from swarm.schema import Message, Section
from swarm.sim.links import Links

DEEP = 100_000


def tables(levels: int) -> str:
    return ".".join("a" * levels) + " = 1"


@pytest.mark.parametrize(
    ("parse", "nested"),
    [
        (parse_toml, lambda levels: "a = " + "[" * (levels - 1) + "]" * (levels - 1)),
        (parse_toml, lambda levels: tables(min(levels, 3000))),
        (parse_json, lambda levels: "[" * levels + "]" * levels),
        (parse_json, lambda levels: '{"a":' * levels + "1" + "}" * levels),
    ],
)
def test_what_nests_too_deeply_is_a_value_error(parse: Callable[[str], Any], nested: Callable[[int], str]) -> None:
    parse(nested(MAX_NESTED))
    for levels in (MAX_NESTED + 1, DEEP):
        with pytest.raises(ValueError, match="nests more than 100 levels"):
            parse(nested(levels))


@pytest.mark.parametrize("command", ["new", "chaos", "simulate", "plan tiny --peers", "join --config", "model check"])
def test_command_names_the_file_that_nests_without_end(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep.toml"
    file.write_text("a = " + "[" * DEEP)
    named = file
    if command == "model check":
        (tmp_path / "config.json").write_text("[" * DEEP)
        named = tmp_path
    assert swarm([*command.split(), str(named)]) == EXIT_USAGE
    assert "nests more than 100 levels" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1e400", "inf", "-inf", "nan"])
def test_manifest_has_no_number_that_is_not_finite(text: str, tmp_path: Path) -> None:
    file = tmp_path / "RUN.toml"
    file.write_text(f"[tokenizer]\ndigest = '{'0' * 64}'\n[optimizer]\nclip_norm = {text}\n")
    with pytest.raises(ConfigError, match=r"optimizer\.clip_norm = -?(inf|nan): expected a finite number"):
        load_manifest(file)


@pytest.mark.parametrize("base", [Section, Message])
def test_whatever_is_decoded_has_finite_numbers_only(base: type[Any]) -> None:
    class Decoded(base):
        plain: float = 0.0
        bounded: Annotated[float, Field(ge=0)] = 0.0
        within: dict[str, float | str] = {}

    for value in (math.inf, -math.inf, math.nan):
        for key in ("plain", "bounded", "within"):
            with pytest.raises(ValidationError):
                Decoded.model_validate({key: {"x": value} if key == "within" else value})


def test_rate_without_limit_is_the_number_that_may_be_infinite() -> None:
    assert Links.parse({"default": {"mbit_per_s": math.inf}}).default.bytes_per_s == math.inf
    with pytest.raises(ConfigError, match="mbit_per_s"):
        Links.parse({"default": {"mbit_per_s": math.nan}})
    with pytest.raises(ConfigError, match="latency_ms"):
        Links.parse({"default": {"latency_ms": math.inf}})


def test_options_are_finite_where_they_have_no_upper_limit() -> None:
    assert between(0.0).refuse(1e300) == ""
    for value in (math.inf, math.nan, -math.inf):
        assert between(0.0).refuse(value)
        assert between(-1e9, 1e9).refuse(value)
