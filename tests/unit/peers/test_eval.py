"""``swarm eval``, and ``swarm sample`` of an exported model: every token counted once, and the same figures as ours."""

from __future__ import annotations

import importlib.util
import json
import math
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_shards.draft import Documents
from data_shards.tokenize import tokenizer_digest
from peers.cli.app import run as swarm
from peers.commands.evaluate import Checkpointed, Loaded, LoadedModel, load_checkpoint, sliding, text_loss
from peers.commands.exported import load_exported
from peers.data.encoder import Encoded
from peers.data.flaws import FlawCount
from peers.data.keys import KeyCount
from swarm.config import parse_manifest
from swarm.errors import StateError, install_command
from tests.harness.rigs.peers import kept_run, printed

TEXT = "Some words, and naïve more words.\n\n\nThat make 😀 a text\nfor a tokenizer <|endoftext|>. " * 4
CONTEXT = 16


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpointed, Loaded]:
    """A directory with ``run`` and ``model``, and what each loads as."""
    root = tmp_path_factory.mktemp("both")
    directory = kept_run().keep(root / "run", 10)
    assert swarm(["export", "--out", str(root / "model"), "--run", str(directory.root)]) == 0
    return root, load_checkpoint(directory), load_exported(root / "model")


def encoded(loaded: LoadedModel, *texts: str) -> list[Encoded]:
    """What a file of these records becomes."""
    found = [tokens for tokens, _ in loaded.tokenizer.encode_documents(texts)]
    starts = [0, *accumulate(map(len, found))][:-1]
    size = sum(len(text.encode()) for text in texts)
    return [Encoded(Documents(np.concatenate(found), starts), size, 0, FlawCount(), KeyCount())]


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [1, 7, 8, 9, 16, 50])
@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (16, 8)])
def test_windows_count_each_target_once_with_enough_before_it(targets: int, context: int, stride: int) -> None:
    windows = list(sliding(targets, context, stride))
    assert [n for one in windows for n in range(one.counted, one.stop)] == list(range(targets))
    assert {one.stop - one.start for one in windows} == {min(targets, context)}
    assert all(after.counted - after.start >= context - stride for _, after in pairwise(windows))


@torch.no_grad()
@pytest.mark.parametrize("stride", [16, 5])
def test_text_loss_is_that_of_each_token_after_those_before_it(
    both: tuple[Path, Checkpointed, Loaded], stride: int
) -> None:
    _, checkpoint, _ = both
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    ids = torch.tensor([tokenizer.end_of_text, *tokenizer.encode(TEXT)])
    nats = 0.0
    for target in range(1, len(ids)):
        window = next(one for one in sliding(len(ids) - 1, CONTEXT, stride) if target - 1 < one.stop)
        scores = model.logits(model(ids[None, window.start : target]))[0, -1]
        nats -= scores.log_softmax(-1)[ids[target]].item()
    found = text_loss(checkpoint, encoded(checkpoint, TEXT), context=CONTEXT, stride=stride)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert (found.tokens, found.bytes) == (len(ids) - 1, len(TEXT.encode()))
    assert found.loss == pytest.approx(nats / found.tokens)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes)


def test_text_loss_of_a_text_without_tokens_says_so(both: tuple[Path, Checkpointed, Loaded]) -> None:
    _, checkpoint, _ = both
    with pytest.raises(StateError, match="no token of this text"):
        text_loss(checkpoint, encoded(checkpoint, ""), context=CONTEXT, stride=8)


# --- exported models --------------------------------------------------------------------------------------------------


def test_exported_model_goes_on_beyond_its_context(both: tuple[Path, Checkpointed, Loaded]) -> None:
    _, _, exported = both
    prompt = torch.arange(1, 30)
    for count in (1, 40):
        made = exported.model.generate(prompt, count, seed=0, temperature=0.8)
        assert made.numel() == count or made[-1] == exported.tokenizer.end_of_text
    assert torch.equal(
        exported.model.generate(prompt, 5, seed=1, temperature=0.8),
        exported.model.generate(prompt, 5, seed=1, temperature=0.8),
    )


# --- the commands -----------------------------------------------------------------------------------------------------


def test_eval_of_run_and_exported_model_say_the_same(
    both: tuple[Path, Checkpointed, Loaded], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, _ = both
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("More words.")
    (tmp_path / "empty.txt").touch()
    said = []
    for source in (["--run", str(root / "run")], ["--model", str(root / "model")]):
        assert swarm(["eval", *source, str(tmp_path), "--json"]) == 0
        said.append(printed(capsys))
    assert (said[0]["directory"], said[0]["step"]) == (str(root / "run"), 10)
    assert said[1]["model"] == str(root / "model")
    for key in ("loss", "perplexity", "bits_per_byte", "tokens", "bytes", "context", "stride"):
        assert said[0][key] == pytest.approx(said[1][key], rel=1e-5)
    assert (said[0]["context"], said[0]["stride"]) == (CONTEXT, CONTEXT // 2)
    assert [Path(one["file"]).name for one in said[0]["files"]] == ["a.txt", "b.txt"]
    assert said[0]["bytes"] == sum(one["bytes"] for one in said[0]["files"]) == len(TEXT.encode()) + 11
    assert swarm(["eval", "--run", str(root / "run"), str(tmp_path / "a.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["loss", "perplexity", "bits a byte", "text"]


CHATS = (
    "{% for m in messages %}{{ bos_token + m.role + '\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
RECORDS = ("alpha", "gamma and delta", "Some words, and naïve more words. " * 3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("txt", None),
        ("txt", "# $A"),
        ("jsonl", "# $A <|endoftext|>"),
        ("csv", "# $A"),
        ("chats", "# $A <|endoftext|>"),
    ],
)
def test_eval_of_run_and_export_is_a_plain_loop_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, template: str | None
) -> None:
    """``#`` stands for a token of its own that begins texts."""
    kept = kept_run()
    if template is not None:
        backend = BackendTokenizer.from_str(kept.tokenizer.decode())
        special = [(name, backend.token_to_id(name)) for name in ("#", "<|endoftext|>")]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        kept.tokenizer = backend.to_str().encode()
    document = kept.manifest.model_dump(mode="json")
    tokens = {"bos_token": "#", "eos_token": "<|endoftext|>"}
    document["tokenizer"] |= {"digest": tokenizer_digest(kept.tokenizer), "template": CHATS, "tokens": tokens}
    kept.manifest = parse_manifest(document, "the test")
    kept.keep(tmp_path / "run", 10)
    assert swarm(["export", "--out", str(tmp_path / "model"), "--run", str(tmp_path / "run")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    file = tmp_path / f"file.{kind.replace('chats', 'jsonl')}"
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in RECORDS]
    file.write_text({
        "txt": "\n".join(RECORDS),
        "jsonl": "\n".join(json.dumps({"text": text}) for text in RECORDS),
        "csv": "text\n" + "\n".join(f'"{text}"' for text in RECORDS),
        "chats": "\n".join(json.dumps({"messages": talk}) for talk in talks),
    }[kind])  # fmt: skip
    nats, count = 0.0, 0
    for text in ("\n".join(RECORDS),) if kind == "txt" else RECORDS:
        if kind == "chats":
            ids = tokenizer(f"#user\n{text}<|endoftext|>#assistant\n{text}<|endoftext|>", add_special_tokens=False)
            ids, answer = ids["input_ids"], tokenizer(f"{text}<|endoftext|>", add_special_tokens=False)["input_ids"]
            first = len(ids) - len(answer)
        else:
            ids = tokenizer(text)["input_ids"]
            ids = ids if template else [tokenizer.eos_token_id, *ids]
            ids, first = ids[: len(ids) - ids[1:].count(tokenizer.eos_token_id)], 1
        for window in sliding(len(ids) - 1, CONTEXT, CONTEXT // 2):
            scores = model(torch.tensor([ids[window.start : window.stop]])).logits[0].log_softmax(-1)
            for target in range(max(first, window.counted + 1), window.stop + 1):
                nats -= scores[target - 1 - window.start, ids[target]].item()
                count += 1
    for source in (["--run", str(tmp_path / "run")], ["--model", str(tmp_path / "model")]):
        capsys.readouterr()
        assert swarm(["eval", *source, str(file), "--json"]) == 0
        said = printed(capsys)
        assert (said["loss"], said["tokens"]) == (pytest.approx(nats / count, abs=1e-6), count)
        assert said["bytes"] == sum(len(text.encode()) for text in RECORDS) + 2 * (kind == "txt")


def test_eval_of_empty_files_says_so(
    both: tuple[Path, Checkpointed, Loaded], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    assert swarm(["eval", "--run", str(both[0] / "run"), str(tmp_path)]) == 2
    assert "every one of them is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--context 17", "--context = 17 cannot be used"),
        ("--stride 17", "--stride = 17 cannot be used"),
        ("--context 8 --stride 9", "--stride = 9 cannot be used"),
        ("--model {root}/model", "--run = "),
        ("--step 3", "--step = 3 cannot be used"),
    ],
)
def test_eval_of_what_does_not_fit_is_refused(
    both: tuple[Path, Checkpointed, Loaded],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    said: str,
) -> None:
    root, _, _ = both
    (tmp_path / "a.txt").write_text(TEXT)
    command = ["eval", "--run", str(root / "run"), str(tmp_path / "a.txt"), *arguments.format(root=root).split()]
    assert swarm(command) == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_model_option_without_transformers_names_the_extra(
    both: tuple[Path, Checkpointed, Loaded], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, _ = both
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert swarm(["sample", "--model", str(root / "model")]) == 1
    said = capsys.readouterr().err
    assert "error: transformers is not installed" in said
    assert f"next:  {install_command('hf')}" in said


@pytest.mark.parametrize(
    ("damaged", "code"), [("weights", 1), ("lacking", 1), ("config", 2), ("tokenizer", 2), ("directory", 2)]
)
def test_model_option_with_what_is_damaged_says_so(
    both: tuple[Path, Checkpointed, Loaded],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damaged: str,
    code: int,
) -> None:
    root, _, _ = both
    model = tmp_path / "model"
    assert swarm(["export", "--out", str(model), "--run", str(root / "run")]) == 0
    if damaged == "weights":
        file = model / "model-00002-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    elif damaged == "lacking":
        file = model / "model-00003-of-00003.safetensors"
        save_file({"lm_head.weight": load_file(file)["lm_head.weight"]}, file, metadata={"format": "pt"})
    elif damaged == "config":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"model_type": "nothing-of-the-kind"}))
    elif damaged == "tokenizer":
        (model / "tokenizer.json").write_text("{}")
    else:
        (model / "config.json").unlink()
    capsys.readouterr()
    assert swarm(["sample", "--model", str(model), "--tokens", "2"]) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert str(model) in said
    assert "next:" in said or code == 1
