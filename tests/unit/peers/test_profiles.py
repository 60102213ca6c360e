"""What a profile makes of a manifest, what it leaves alone, and what ``swarm new`` says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_shards.tokenize import train_tokenizer
from peers.commands.new import summary
from peers.founding_files import load_foundation, make_run
from peers.manifest_file import render_manifest
from peers.options.foundation import Foundation
from peers.profiles import with_profile
from swarm.config import Manifest, load_manifest, parse_manifest
from swarm.errors import ConfigError

DIGEST = {"tokenizer": {"digest": "0" * 64}}


def made(document: dict[str, Any], *by_hand: str) -> Manifest:
    return parse_manifest(DIGEST | with_profile(document, by_hand), "a test")


def figures(manifest: Manifest) -> tuple[Any, ...]:
    codecs, averaging = manifest.codecs, manifest.averaging
    return averaging.mode, codecs.activations, averaging.codec, manifest.batch.microbatches_per_step


def test_what_is_set_by_hand_stays_and_a_preset_gives_way() -> None:
    document = {
        "speed": {"profile": "wan"},
        "codecs": {"activations": "bfloat16"},
        "batch": {"microbatches_per_step": 16},
        "averaging": {"codec": "float32"},
    }
    assert figures(made(document, "averaging.codec")) == ("sync", "auto", "float32", 64)
    kept = made(document, "codecs.activations", "batch.microbatches_per_step")
    assert figures(kept) == ("sync", "bfloat16", "int8", 16)
    more = document | {"batch": {"microbatches_per_step": 128}}
    assert made(more).batch.microbatches_per_step == 128, "more is fine as well"


def test_profile_that_there_is_not_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as caught:
        with_profile({"speed": {"profile": "dsl"}}, ())
    assert (caught.value.key, caught.value.allowed) == ("speed.profile", "lan, wan or thin")
    with pytest.raises(ConfigError, match="--profile"):
        load_foundation(Foundation(preset="tiny", profile="dsl"))
    with pytest.raises(ConfigError, match="speed"):
        parse_manifest(DIGEST | {"speed": {"profile": "wan"}}, "a peer's manifest")


def test_exact_runs_keep_exact_codecs_and_train_together() -> None:
    exact = {"run": {"reproducible": True}}
    assert figures(made(exact | {"speed": {"profile": "wan"}}))[:3] == ("sync", "float32", "float32")
    with pytest.raises(ConfigError) as caught:
        with_profile(exact | {"speed": {"profile": "thin"}}, ())
    assert 'profile = "wan"' in caught.value.remedy
    sync = with_profile(exact | {"speed": {"profile": "thin"}, "averaging": {"mode": "sync"}}, ["averaging.mode"])
    assert figures(parse_manifest(DIGEST | sync, "a test"))[:3] == ("sync", "float32", "float32")


@pytest.mark.parametrize("in_file", [True, False])
def test_new_says_what_was_chosen_and_why_and_keeps_the_values_alone(tmp_path: Path, in_file: bool) -> None:
    file, tokenizer = tmp_path / "run.toml", tmp_path / "some.json"
    tokenizer.write_bytes(train_tokenizer(["so much text " * 50], 300))
    profile = '[speed]\nprofile = "wan"\n' if in_file else ""
    file.write_text(f'{profile}[averaging]\ncodec = "float32"\n')
    foundation = Foundation(file=file, tokenizer=tokenizer, profile=None if in_file else "wan")
    founded = make_run(foundation, load_foundation(foundation))
    assert figures(founded.manifest) == ("sync", "auto", "float32", 64)
    lines = summary(founded)
    at = next(index for index, (label, _) in enumerate(lines) if label == "profile")
    assert lines[at][1] == "wan, for machines far apart, 50 to 500 Mbit/s each"
    told = [text for _, text in lines[at + 1 : at + 5]]
    assert [text.split(":")[0] for text in told] == [
        "averaging.mode = sync", "codecs.activations = auto", "averaging.codec = float32",
        "batch.microbatches_per_step = 64",
    ]  # fmt: skip
    assert told[2].endswith("not int8, as set by hand or for run.reproducible")
    (tmp_path / "kept.toml").write_text(render_manifest(founded.manifest))
    assert "profile" not in (tmp_path / "kept.toml").read_text()
    assert load_manifest(tmp_path / "kept.toml").run_id == founded.manifest.run_id
