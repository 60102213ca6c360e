"""What a model came with beside its weights: which files travel with a run, and what an export makes of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_shards.tokenize import train_tokenizer
from peers.checkpoints.writer import keep_run
from peers.cli.app import run as swarm
from peers.commands.quickstart import plan_run
from peers.data import tokenizer_files
from peers.data.prepare import prepare_run
from peers.data.tokenizer_files import came_with, read_encoding
from peers.founding_files import Founded, load_foundation, make_run
from peers.frozen import store_of, with_frozen
from peers.home.run_directory import RunDirectory
from peers.options.foundation import Foundation
from peers.options.local import LocalOptions
from swarm.errors import ConfigError, Incompatible
from swarm.security.signing import PrivateIdentity
from tests.harness.rigs.peers import KeptRun

STEP, CONTEXT = 10, 16
TEXT = ["a cat and a dog " * 40, "the small house " * 40]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
PROMPTS = ["a cat", "the small house and a dog"]
CAME = (
    "LICENSE", "README.md", "additional_chat_templates/tools.jinja", "chat_template.jinja", "generation_config.json",
    "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer_config.json",
)  # fmt: skip
LEFT_OUT = ("modeling_own.py", "onnx/", "preprocessor_config.json", "pytorch_model.bin")


def spoken(path: Path, **how: Any) -> list[list[int]]:
    """What a model of transformers writes after the prompts, together and greedily, with what its directory says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    made: list[list[int]] = model.generate(**batch, do_sample=False, max_new_tokens=20, **how).tolist()
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pads on the left, has special tokens of its own, and stops at several."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("models") / "mine"
    root.mkdir()
    (root / "raw.json").write_bytes(train_tokenizer(TEXT, 300))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(root / "raw.json"), bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>",
        padding_side="left", extra_special_tokens=["<|tool|>", "<|think|>"], model_max_length=64,
        chat_template={"default": TEMPLATE, "tools": "{{ tools }}"},
    )  # fmt: skip
    (root / "raw.json").unlink()
    tokenizer.save_pretrained(root)
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    llama.save_pretrained(root)
    written = spoken(root)
    stops = [tokenizer.eos_token_id, *(row[-16] for row in written)]
    GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id).save_pretrained(root)
    assert len(spoken(root)[0]) < len(written[0]), "it stops where generation_config.json says, not config.json"
    said = {"README.md": "# mine\n", "LICENSE": "free\n", "merges.txt": "a b\n", "special_tokens_map.json": "{}",
            "spiece.model": "\n\x0bx", "modeling_own.py": "raise 1", "pytorch_model.bin": "x", ".hidden": "",
            "preprocessor_config.json": "{}", "onnx/config.json": "{}"}  # fmt: skip
    (root / "onnx").mkdir()
    for name, text in said.items():
        (root / name).write_text(text)
    return root


def founded(model: Path, **said: Any) -> Founded:
    foundation = Foundation(model=str(model), context=CONTEXT, stages=2, hosts=2, trainers=1, **said)
    return make_run(foundation, load_foundation(foundation))


def kept(run: Founded, root: Path, model: Path) -> RunDirectory:
    """A step of a run, with the weights that it began with, as a peer keeps it that never saw the model's directory."""
    directory = RunDirectory(root)
    manifest = with_frozen(run.manifest, model, store_of(directory), lambda _: None)
    beside = {name: data for name, data in run.files.items() if name != "tokenizer.json"}
    keys = [PrivateIdentity(bytes([number]) * 32) for number in (1, 2, 3)]
    tokenizer = run.files["tokenizer.json"]
    return KeptRun(manifest, tokenizer, keys, beside=beside, model_files=model).keep(root, STEP)


def names_in(path: Path) -> set[str]:
    return {inner.relative_to(path).as_posix() for inner in path.rglob("*") if inner.is_file()}


@pytest.fixture(scope="module")
def run(model: Path) -> Founded:
    return founded(model)


@pytest.fixture(scope="module")
def exported(model: Path, run: Founded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    directory = kept(run, root / "run", model)
    assert swarm(["export", "--out", str(root / "model"), "--run", str(directory.root)]) == 0
    return root / "model"


def test_export_has_what_the_model_came_with_byte_for_byte(model: Path, exported: Path) -> None:
    for name in ("tokenizer.json", "config.json", *CAME):
        assert (exported / name).read_bytes() == (model / name).read_bytes(), name
    made = {"config.json", "tokenizer.json", "model.safetensors.index.json", "SWARM.md"}
    weights = {name for name in names_in(exported) if name.endswith(".safetensors")}
    assert names_in(exported) == made | weights | set(CAME)
    assert "# finetune, step 10" in (exported / "SWARM.md").read_text()


def test_export_writes_and_stops_as_the_model_did(model: Path, exported: Path) -> None:
    from transformers import AutoTokenizer

    assert spoken(exported) == spoken(model)
    tokenizer = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    assert (tokenizer.padding_side, tokenizer.extra_special_tokens) == ("left", ["<|tool|>", "<|think|>"])


@pytest.mark.parametrize("form", [(), ("--merge",)])
def test_export_of_adapters_has_it_too(model: Path, tmp_path: Path, form: tuple[str, ...]) -> None:
    directory = kept(founded(model, lora_rank=2), tmp_path / "run", model)
    assert swarm(["export", "--out", str(tmp_path / "model"), *form, "--run", str(directory.root)]) == 0
    for name in ("tokenizer.json", *CAME):
        assert (tmp_path / "model" / name).read_bytes() == (model / name).read_bytes(), name
    assert (tmp_path / "model" / "SWARM.md").is_file()


def test_merging_of_copied_parts_says_how_the_weights_beside_adapters_are_made(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = kept(founded(model, lora_rank=2), tmp_path / "run", model)
    shutil.rmtree(directory.frozen)
    home = ["--home", str(tmp_path / "here")]
    assert swarm(["ckpt", "pull", "--from", str(directory.root), *home]) == 0
    gathered = next((tmp_path / "here" / "runs").iterdir())
    said = capsys.readouterr().err
    assert "nobody has the frozen weights of stage-0, stage-1 and ends, which --merge needs" in said
    assert f"ckpt frozen --run {gathered} --add DIR, DIR being the model's directory (the run calls it 'mine')" in said
    merging = ["export", "--out", str(tmp_path / "model"), "--merge", "--from", str(directory.root), *home]
    assert swarm(merging) == 1
    assert not (tmp_path / "model").exists()
    assert swarm(["ckpt", "frozen", "--run", str(gathered), "--add", str(model), *home]) == 0
    assert swarm(merging) == 0


def test_founding_says_what_comes_back_and_what_is_left_out(run: Founded) -> None:
    said = dict(run.said)
    assert said["comes back"] == f"with an export: {', '.join(CAME)}"
    assert said["left out"] == f"of exports: {', '.join(LEFT_OUT[:-1])} and {LEFT_OUT[-1]}"
    assert set(run.manifest.files) == set(CAME)


def test_quickstart_keeps_it_beside_the_tokenizer(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    texts = [f"{number} cats and a dog in the small house " * 20 for number in range(40)]
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    foundation = Foundation(model=str(model), from_scratch=True, context=CONTEXT)
    plan = plan_run(foundation, LocalOptions(text=(text,)))
    made = prepare_run(plan.foundation, plan.document, plan.text, RunDirectory(tmp_path))
    assert set(made.manifest.files) == set(CAME)
    for name in CAME:
        assert (tmp_path / name).read_bytes() == (model / name).read_bytes()
    encoding = read_encoding(tmp_path / "tokenizer.json", key="TEXT")
    assert encoding.template is not None
    assert (encoding.end_token, encoding.template.text) == ("<|im_end|>", TEMPLATE), "for swarm data build"


def test_run_is_founded_again_from_its_own_files(run: Founded, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    keep_run(directory, run.manifest, run.files)
    foundation = Foundation(file=directory.manifest)
    again = make_run(foundation, load_foundation(foundation))
    assert (again.manifest.run_id, again.files) == (run.manifest.run_id, run.files)
    directory.file("LICENSE").write_text("dear\n")
    with pytest.raises(Incompatible, match="LICENSE"):
        make_run(foundation, load_foundation(foundation))
    directory.file("LICENSE").unlink()
    with pytest.raises(ConfigError, match="LICENSE"):
        make_run(foundation, load_foundation(foundation))


# --- where a run says otherwise ---------------------------------------------------------------------------------------


def test_end_token_of_the_run_wins_over_all_files_that_say_another(model: Path, tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text('[tokenizer]\nend = "<|endoftext|>"\ntokens = { eos_token = "<|endoftext|>" }\n')
    run = founded(model, file=tmp_path / "RUN.toml")
    directory = kept(run, tmp_path / "run", model)
    assert swarm(["export", "--out", str(tmp_path / "model"), "--run", str(directory.root)]) == 0
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert "; the run has its own tokenizer.end and tokenizer.tokens" in dict(run.said)["left out"]


def test_files_of_another_tokenizer_do_not_come_back(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(train_tokenizer([TEXT[0]], 290))
    run = founded(model, tokenizer=tmp_path / "other.json")
    assert (set(run.manifest.files), run.manifest.tokenizer.template) == ({"LICENSE", "README.md"}, "")
    assert dict(run.said)["left out"].endswith("; the run has its own tokenizer.digest")
    shutil.copy(model / "tokenizer.json", tmp_path / "same.json")
    assert founded(model, tokenizer=tmp_path / "same.json").manifest.files == founded(model).manifest.files


# --- how much travels -------------------------------------------------------------------------------------------------


def test_small_files_travel_first_and_the_rest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_FILES_BYTES", 110)
    for name, size in {"vocab.json": 60, "tokenizer_config.json": 30, "LICENSE": 10, "NOTICE": 5}.items():
        (tmp_path / name).write_bytes(bytes(size))
    found = came_with(tmp_path, bytes(50))
    assert list(found.kept) == ["LICENSE", "NOTICE", "tokenizer_config.json"]
    assert found.left_out == ["vocab.json"]
    assert came_with(tmp_path, bytes(200)).kept == {}


@pytest.mark.parametrize(
    "name",
    ["../LICENSE", "a/LICENSE", ".LICENSE", "tokenizer.json", "tokenizer_x.py", "tokenizer.bin", "x.pt", "run.toml",
     "additional_chat_templates/../x.jinja", "additional_chat_templates/a/b.jinja", "additional_chat_templates/.jinja",
     "config.json", "model.safetensors", "README.md\n", "/LICENSE", "LICENSE\x00", "tokenizer-\u0661.json", ".model"],
)  # fmt: skip
def test_manifest_names_no_other_files(name: str, run: Founded) -> None:
    from swarm.config import parse_manifest

    document = run.manifest.model_dump(mode="json") | {"files": {name: hashlib.sha256(b"").hexdigest()}}
    with pytest.raises(ConfigError, match="names of files with which models come"):
        parse_manifest(document, "the test")
