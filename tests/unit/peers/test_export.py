"""``swarm export``: what transformers makes of the directory, and what is left when it cannot be made."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.checkpoints.choose_checkpoint import choose_step
from peers.cli.app import run as swarm
from peers.commands import export as exporting
from peers.commands.evaluate import Checkpointed, load_checkpoint
from peers.console.interrupt import Interrupted
from peers.home.run_directory import RunDirectory
from swarm.ids import ENDS, stage_part
from swarm.models.family import ModelFamily
from swarm.models.gpt_family import GptFamily
from tests.harness.rigs.peers import BrokenDisk, KeptRun, install, kept_run

STEP = 10
TEXTS = ("The owls saw 77 mice.\n\n  Two  spaces", "naïve 😀 <|endoftext|> \t tabs", "")
FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def kept() -> KeptRun:
    return kept_run()


@pytest.fixture(scope="module")
def shared(kept: KeptRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpointed]:
    """An exported model, and the checkpoint that it was made of."""
    root = tmp_path_factory.mktemp("exported")
    directory = kept.keep(root / "run", STEP)
    assert swarm(["export", "--out", str(root / "model"), "--run", str(directory.root)]) == 0
    return root / "model", load_checkpoint(directory)


@pytest.fixture
def run(kept: KeptRun, tmp_path: Path) -> RunDirectory:
    return kept.keep(tmp_path / "run", STEP)


@pytest.fixture
def clean(tmp_path: Path) -> Iterator[Path]:
    """Where a model is not exported to: nothing may be left there, or beside it."""
    target = tmp_path / "out" / "model"
    target.parent.mkdir()
    yield target
    assert list(target.parent.iterdir()) == []


def loaded(path: Path, **how: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **how)


# --- what transformers makes of it ------------------------------------------------------------------------------------


@pytest.mark.promise("an export loads")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_exported_model_has_the_checkpoints_logits(shared: tuple[Path, Checkpointed], attention: str) -> None:
    path, checkpoint = shared
    llama = loaded(path, attn_implementation=attention)
    assert llama.dtype == torch.float32
    tokens = torch.arange(3 * 16).view(3, 16)
    expected = checkpoint.model.logits(checkpoint.model(tokens))
    found = llama(tokens).logits
    assert (found - expected).abs().max() <= 1e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_exported_tokenizer_is_the_runs(shared: tuple[Path, Checkpointed]) -> None:
    from transformers import AutoTokenizer

    path, checkpoint = shared
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    for text in TEXTS:
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert ids == checkpoint.tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer(tokenizer.bos_token)["input_ids"] == [checkpoint.tokenizer.end_of_text]
    assert tokenizer.eos_token_id == checkpoint.tokenizer.end_of_text
    assert tokenizer.model_max_length == 16


@torch.no_grad()
def test_export_in_bfloat16_is_half_as_large_and_rounded(run: RunDirectory, tmp_path: Path) -> None:
    assert (
        swarm(["export", "--out", str(tmp_path / "model"), "--run", str(run.root), "--dtype", "bfloat16", "--json"])
        == 0
    )
    llama, ours = loaded(tmp_path / "model"), load_checkpoint(run).model
    assert llama.dtype == torch.bfloat16
    assert torch.equal(llama.lm_head.weight, dict(ours.named_parameters())["head.weight"].bfloat16())


def test_export_of_hosted_ends_in_one_stage_is_one_file(tmp_path: Path) -> None:
    from swarm.config import parse_manifest

    kept = kept_run()
    document = kept.manifest.model_dump(mode="json") | {"split": {"stages": 1, "ends": "hosted"}}
    kept.manifest = parse_manifest(document, "the test")
    directory = kept.keep(tmp_path / "run", STEP, [stage_part(0)])
    assert swarm(["export", "--out", str(tmp_path / "model"), "--run", str(directory.root)]) == 0
    assert sorted(path.name for path in (tmp_path / "model").glob("model*")) == ["model.safetensors"]
    tokens = torch.arange(16).view(1, 16)
    ours = load_checkpoint(directory).model
    with torch.no_grad():
        assert (loaded(tmp_path / "model")(tokens).logits - ours.logits(ours(tokens))).abs().max() <= 1e-5


# --- what the command says and leaves ---------------------------------------------------------------------------------


def test_export_card_has_the_facts_of_the_run(kept: KeptRun, run: RunDirectory, tmp_path: Path) -> None:
    run.report.write_text(json.dumps({"eval_last_step": STEP, "eval_last": 2.5}))
    assert swarm(["export", "--out", str(tmp_path / "model"), "--run", str(run.root)]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    for fact in (
        f"id `{kept.manifest.run_id}`",
        "after step 10 of 100, saved ",
        "about 1,920 tokens",
        "0.1562 nats a token, mean of step 10",
        "| held-out loss | 2.5000 nats a token |",
        "2 stage hosts and 1 trainer",
        "LlamaForCausalLM, 52,128 parameters in float32",
        "follows `<|endoftext|>`",
    ):
        assert fact in card


def test_export_begins_texts_as_the_model_does_that_came_with_its_own_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    from swarm.config import parse_manifest

    kept, template = kept_run(), "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    document = kept.manifest.model_dump(mode="json")
    document["tokenizer"] |= {"template": template, "tokens": {"eos_token": "<|endoftext|>"}}
    kept.manifest = parse_manifest(document, "the test")
    directory = kept.keep(tmp_path / "run", STEP)
    assert swarm(["export", "--out", str(tmp_path / "model"), "--run", str(directory.root)]) == 0
    *_, following = capsys.readouterr().out.splitlines()
    command = shlex.split(following.removeprefix("next: "))
    assert command[:2] == ["python", "-c"]
    where = json.dumps(str(tmp_path / "model"))
    assert command[2].endswith(f'pipeline("text-generation", {where})([{{"role": "user", "content": "Hello"}}]))')
    compile(command[2], "next", "exec")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    chat = [{"role": "user", "content": "owls"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "owls<|endoftext|>", "as trainers wrote it"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "apply_chat_template" in card
    assert "bos_token" not in card


def test_export_into_an_empty_directory_keeps_it(run: RunDirectory, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir(mode=0o710)
    before = target.stat()
    assert swarm(["export", "--out", str(target), "--run", str(run.root)]) == 0
    assert (target.stat().st_ino, target.stat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir(target)) == FILES


def test_export_holds_one_part_at_a_time_and_needs_no_transformers(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    alive: list[weakref.ref[torch.Tensor]] = []
    load = exporting.load_part_weights

    def load_one(*asked: Any) -> dict[str, torch.Tensor]:
        assert [one for one in alive if one() is not None] == []
        weights = load(*asked)
        alive.extend(map(weakref.ref, weights.values()))
        return weights

    monkeypatch.setattr(exporting, "load_part_weights", load_one)
    assert swarm(["export", "--out", str(tmp_path / "model"), "--run", str(run.root)]) == 0
    assert len(alive) == 21


# --- what cannot be exported ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "why"),
    [("full", "it holds notes.txt"), ("file", "it is a file"), ("below", "or below one"), ("link", "a broken link")],
)
def test_export_to_what_is_in_use_is_refused_and_leaves_it(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str, why: str
) -> None:
    target = tmp_path / "model"
    if there == "full":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    elif there == "link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.write_text("mine")
        target = target / "deeper" if there == "below" else target
    before = sorted(map(str, tmp_path.rglob("*")))
    assert swarm(["export", "--out", str(target), "--run", str(run.root)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --out = '{target}' cannot be used: ")
    assert why in said
    assert sorted(map(str, tmp_path.rglob("*"))) == before


@pytest.mark.parametrize("at", [1, 12, 30, 60])
def test_export_to_a_full_disk_leaves_nothing(
    run: RunDirectory, clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    with monkeypatch.context() as patch:
        disk = install(patch, BrokenDisk(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        assert swarm(["export", "--out", str(clean), "--run", str(run.root)]) == 1
    assert disk.fired
    assert f"{clean}: No space left on device. Nothing was exported." in capsys.readouterr().err


def test_export_interrupted_leaves_nothing(run: RunDirectory, clean: Path) -> None:
    def interrupt(line: str) -> None:
        assert line.startswith("stage-0: 9 tensors, ")
        assert list(clean.parent.glob(".model.*.tmp/*.safetensors"))
        raise Interrupted(signal.SIGINT)

    with pytest.raises(Interrupted):
        exporting.export(choose_step(run), clean, "float32", told=interrupt)


@pytest.mark.parametrize("part", [ENDS, stage_part(1)])
def test_export_of_a_damaged_part_names_it_and_leaves_nothing(
    run: RunDirectory, clean: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    path = run.checkpoints / f"step-{STEP:08d}" / f"{part}.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 6] ^= 1
    path.write_bytes(data)
    assert swarm(["export", "--out", str(clean), "--run", str(run.root)]) == 1
    said = capsys.readouterr().err
    assert str(path) in said
    assert "swarm ckpt pull" in said


def test_export_of_a_run_without_checkpoints_or_with_another_tokenizer_says_so(
    run: RunDirectory, clean: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.tokenizer.write_text("{}")
    assert swarm(["export", "--out", str(clean), "--run", str(run.root)]) == 1
    assert f"{run.tokenizer}: not the tokenizer.json of this run." in capsys.readouterr().err
    run.checkpoints.rename(run.root / "elsewhere")
    assert swarm(["export", "--out", str(clean), "--run", str(run.root)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


def test_export_of_a_family_without_a_form_elsewhere_says_so(
    run: RunDirectory, clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GptFamily, "export_config", ModelFamily.export_config)
    assert swarm(["export", "--out", str(clean), "--run", str(run.root)]) == 2
    assert "model.family = 'gpt' cannot be used: models of this family have no form" in capsys.readouterr().err
