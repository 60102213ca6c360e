"""What holds between sections of the manifest."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.config import parse_manifest
from swarm.errors import ConfigError


def document(**sections: Any) -> dict[str, Any]:
    return {"tokenizer": {"digest": "0" * 64}, **sections}


def test_manifest_with_int8_averaging_is_another_run() -> None:
    plain, rounded = (parse_manifest(document(averaging={"codec": codec}), "a test") for codec in ("float32", "int8"))
    assert rounded.averaging.codec == "int8"
    assert plain.run_id != rounded.run_id


def test_manifest_that_is_reproducible_refuses_int8_averaging_and_says_why() -> None:
    with pytest.raises(ConfigError, match="depends on who computed what") as caught:
        parse_manifest(document(averaging={"codec": "int8"}, run={"reproducible": True}), "a test")
    assert "averaging.codec" in str(caught.value)
    assert "run.reproducible = false" in str(caught.value)


@pytest.mark.parametrize("other", [{"strategy": "grid"}, {"codec": "int8"}])
def test_manifest_that_rounds_at_each_hop_what_must_be_rounded_alike_is_refused(other: dict[str, str]) -> None:
    for schedule in ("auto", "direct"):
        parse_manifest(document(averaging={"schedule": schedule, **other}), "a test")
    with pytest.raises(ConfigError, match="averaging.schedule"):
        parse_manifest(document(averaging={"schedule": "ring", **other}), "a test")
