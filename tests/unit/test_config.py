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
