"""Each example is founded, and what ``swarm new --print-config`` says of it, and of a preset, founds the same run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from data_shards.tokenize import train_tokenizer
from peers.cli.app import run
from peers.exit_codes import EXIT_OK
from peers.founding_files import load_foundation, make_run, origins_of
from peers.options.foundation import Foundation
from swarm.config import Manifest
from tests.harness.rigs.chat import CHATML, END, chat_tokenizer
from tests.harness.rigs.foreign import foreign_config
from tests.harness.rigs.peers import TEXT, printed
from tests.harness.sources import ROOT

EXAMPLES: dict[str, dict[str, Any]] = {
    "from-scratch": {"optimizer.lr": 1e-3},
    "full-fine-tuning": {"optimizer.lr": 2e-5, "optimizer.weight_decay": 0.0, "model.family": "hf"},
    "chat-adapters": {"optimizer.lr": 2e-4, "model.lora.dropout": 0.05, "batch.packing": "documents"},
    "public-run": {"admission.mode": "token", "codecs.activations": "auto", "averaging.codec": "int8"},
    "institutions": {"admission.mode": "organisation", "run.reproducible": True, "averaging.strategy": "hierarchy"},
}
OF_A_MODEL = ("full-fine-tuning", "chat-adapters")


def value_of(manifest: Manifest, dotted: str) -> Any:
    found: Any = manifest
    for key in dotted.split("."):
        found = getattr(found, key)
    return found


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer([TEXT], 300))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that speaks, without weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(foreign_config("llama", vocab_size=512)))
    (path / "tokenizer.json").write_bytes(chat_tokenizer())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": CHATML}))
    return path


def founded(foundation: Foundation) -> Manifest:
    manifest = make_run(foundation, load_foundation(foundation)).manifest
    return manifest.model_copy(update={"run": manifest.run.model_copy(update={"nonce": ""})})


def again(words: list[str], foundation: Foundation, file: Path, capsys: pytest.CaptureFixture[str]) -> Manifest:
    """Found a run with what --print-config says of one."""
    capsys.readouterr()
    assert run(["new", *words, "--print-config"]) == EXIT_OK
    file.write_text(capsys.readouterr().out)
    return founded(Foundation(file=file, model=foundation.model, tokenizer=foundation.tokenizer))


def test_there_are_no_other_examples() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.toml")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_founds_a_run_and_so_does_its_whole_config(
    name: str, model: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, named = ROOT / "examples" / f"{name}.toml", str(model) if name in OF_A_MODEL else None
    foundation = Foundation(file=file, model=named, tokenizer=None if named else tokenizer)
    manifest = founded(foundation)
    assert {key: value_of(manifest, key) for key in EXAMPLES[name]} == EXAMPLES[name]
    assert manifest.run.name == name
    words = [str(file), *(["--model", named] if named else [])]
    assert again(words, foundation, tmp_path / "RUN.toml", capsys) == manifest


def test_whole_config_of_a_preset_says_where_each_value_comes_from(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foundation = Foundation(preset="tiny", steps=7, stages=4, profile="wan", lora_rank=2, tokenizer=tokenizer)
    words = ["--preset", "tiny", "--steps", "7", "--stages", "4", "--profile", "wan", "--lora-rank", "2"]
    assert again(words, foundation, tmp_path / "RUN.toml", capsys) == founded(foundation)
    text = (tmp_path / "RUN.toml").read_text()
    assert set(tomllib.loads(text)) == set(Manifest.model_fields) - {"tokenizer", "files"}
    for line in (
        "steps = 7  # --steps", "stage_hosts = 4  # one for each stage", "dim = 160  # preset tiny",
        "lr = 0.0002  # what adapters take", "microbatches_per_step = 64  # profile wan", "beta1 = 0.9  # default",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    assert run(["new", *words, "--print-config", "--json"]) == EXIT_OK
    said = printed(capsys)
    assert said["config"]["run"]["steps"] == 7
    assert said["from"] == origins_of(foundation, load_foundation(foundation)) | {"run.nonce": "random"}
