"""A model that a person names: where it is found, what a run says of it, and what is refused before one is founded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from data_shards.tokenize import train_tokenizer
from peers.cli.app import run as swarm
from peers.commands.model import examine, lines
from peers.commands.new import summary
from peers.data.trainer_data import DataGiven, shard_for
from peers.exit_codes import EXIT_ERROR, EXIT_USAGE
from peers.foreign_model import check_parts, find_model
from peers.founding_files import Founded, load_foundation, make_run
from peers.options.foundation import Foundation
from swarm.errors import ConfigError
from swarm.models.spec import SplitConfig
from tests.harness.rigs.foreign import foreign_config

TEXT = ["a cat and a dog " * 40, "the small house " * 40]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"


def founded(foundation: Foundation) -> Founded:
    return make_run(foundation, load_foundation(foundation))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's directory without weights."""
    made = tmp_path / "a model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(foreign_config("llama", vocab_size=300)))
    (made / "tokenizer.json").write_bytes(train_tokenizer(TEXT, 300))
    spoken = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(spoken))
    return made


def test_text_model_of_one_that_also_sees_is_taken(directory: Path) -> None:
    inner = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "llava", "text_config": inner, "eos_token_id": [7, 9], "pad_token_id": 5}
    (directory / "config.json").write_text(json.dumps(outer))
    text = json.loads(find_model(str(directory)).config)
    assert text["model_type"] == "llama"
    assert (text["bos_token_id"], text["eos_token_id"], text["pad_token_id"]) == (1, [7, 9], 5), "as the whole writes"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", "{", "expected JSON"),
        ("config.json", '{"model_type": "bert"}', "model_type = 'bert'"),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', "transformers can build"),
        ("tokenizer.json", None, "with a tokenizer.json"),
        ("tokenizer_config.json", "[", "it is no JSON"),
    ],
)
def test_directory_that_lacks_something_is_refused_with_the_cause(
    directory: Path, file: str, text: str | None, words: str
) -> None:
    (directory / file).unlink()
    if text is not None:
        (directory / file).write_text(text)
    with pytest.raises(ConfigError, match=words):
        founded(Foundation(model=str(directory), from_scratch=True, context=16))


@pytest.mark.parametrize("given", ["nowhere", "a/b/c", "somebody/tiny@not a revision"])
def test_what_is_neither_a_directory_nor_an_id_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="a directory with a model's files, or OWNER/NAME"):
        find_model(given)


def test_hub_that_does_not_answer_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def nobody(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", nobody)
    with pytest.raises(ConfigError, match=r"OSError: no route.*download it elsewhere"):
        find_model("somebody/tiny")


def test_hubs_revision_is_resolved_and_its_files_downloaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []
    there = ("config.json", "merges.txt", "LICENSE", "additional_chat_templates/a.jinja", "model.safetensors")
    not_ours = (
        "modeling.py",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/config.json",
        "a.gguf",
        "README.py",
    )
    siblings = [SimpleNamespace(rfilename=name) for name in (*there, *not_ours)]
    info = SimpleNamespace(sha="cd" * 20, siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, revision: info)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **given: asked.append((name, given)) or directory
    )
    found = find_model("somebody/tiny@main")
    assert (found.source, found.revision, found.directory) == ("somebody/tiny", "cd" * 20, directory)
    assert asked[0][0] == "somebody/tiny"
    assert asked[0][1]["revision"] == "cd" * 20
    assert tuple(asked[0][1]["allow_patterns"]) == there


def test_run_with_it_says_model_tokenizer_and_files_and_trainers_write_chats_with_its_template(
    directory: Path, tmp_path: Path
) -> None:
    foundation = Foundation(model=str(directory), context=16, stages=2)
    founded = make_run(foundation, load_foundation(foundation))
    manifest = founded.manifest
    assert (founded.model_files, manifest.model.context) == (directory.absolute(), 16)
    assert (manifest.tokenizer.end, manifest.tokenizer.template) == ("<|endoftext|>", TEMPLATE)
    assert manifest.optimizer.lr < 1e-4, "weights that are trained already take small steps"
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "a small dog and the house " * 9}]
    chats.write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(9)))
    made = shard_for(DataGiven(chats), founded.files["tokenizer.json"], manifest, tmp_path / "shard", "seed")
    assert (made.path / "counted.bin").is_file(), "the assistant's answers alone are learnt"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 5}, "at most model.layers = 4"),
        ({"context": 4096}, "at most 64"),
        ({"context": 1}, "--context"),
        ({"compute": "float16"}, "--compute"),
    ],
)
def test_run_that_cannot_be_is_refused_before_it_is_founded(
    directory: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_foundation(Foundation(model=str(directory), **changes))


@pytest.mark.parametrize(
    ("lines", "changes", "rate", "rows"),
    [
        ("", {}, 2e-5, 2),
        ("[run]\nsteps = 9\n", {}, 2e-5, 2),
        ("[optimizer]\nclip_norm = 0.5\n[batch]\nmicrobatch_size = 4\n", {}, 2e-5, 4),
        ("[optimizer]\nlr = 1e-4\n", {}, 1e-4, 2),
        ("[optimizer]\nlr = 1e-4\n", {"lr": 3e-4}, 3e-4, 2),
        ("", {"from_scratch": True}, 1.5e-3, 2),
        ("[run]\nsteps = 9\n", {"from_scratch": True}, 1.5e-3, 8),
        ("", {"preset": "tiny"}, 2e-5, 8),
        ("", {"preset": "small", "lr": 1e-4}, 1e-4, 8),
        ("", {"preset": "finetune", "from_scratch": True}, 1.5e-3, 2),
    ],
)
def test_rates_fit_trained_weights_unless_somebody_says_otherwise(
    directory: Path, tmp_path: Path, lines: str, changes: dict[str, Any], rate: float, rows: int
) -> None:
    file = tmp_path / "RUN.toml" if lines else None
    if file is not None:
        file.write_text(lines)
    foundation = Foundation(file=file, model=str(directory), context=16, **changes)
    founded = make_run(foundation, load_foundation(foundation))
    assert (founded.manifest.optimizer.lr, founded.manifest.batch.microbatch_size) == (rate, rows)
    assert dict(summary(founded))["optimizer"].startswith(f"AdamW, learning rate {rate:g} after 10 steps")


def test_section_that_is_none_is_refused_beside_a_model(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "RUN.toml"
    file.write_text("optimizer = 1\n")
    with pytest.raises(ConfigError, match="optimizer"):
        load_foundation(Foundation(file=file, model=str(directory), context=16))


def test_options_for_a_named_model_need_one() -> None:
    with pytest.raises(ConfigError, match="only together with --model"):
        load_foundation(Foundation(preset="tiny", from_scratch=True))


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("mixtral", True, "each layer's loss"),
        ("mixtral", False, "say output_router_logits"),
        ("deepseek_v3", False, "none is known of its kind"),
    ],
)
def test_check_says_what_keeps_a_mixture_balanced(directory: Path, name: str, asked: bool, words: str) -> None:
    config = foreign_config(name, output_router_logits=asked)
    (directory / "config.json").write_text(json.dumps(config))
    facts = examine(str(directory), stages=2, context=16)
    assert facts["trainable"]
    said = dict(lines(facts))
    assert words in said["balance"]
    shards = (
        'a stage holds all experts of its layers, or 2 or 4 shards do, with [model] experts_implementation = "eager"'
    )
    assert said["experts"].startswith(
        f"computed by grouped_mm; {shards}; logits and gradients then differ by at most 0 "
    )
    assert facts["expert_shards"] == {"why_not": "", "numbers": [2, 4], "difference": 0.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixtral", "self_attn can be cut across a peer's devices: 14% of the layers; mlp stays whole: it has experts"),
        ("llama", "self_attn and mlp can be cut across a peer's devices: 99% of the layers"),
        (
            "opt",
            "nothing can be cut across a peer's devices; self_attn stays whole: transformers says of no way to cut it",
        ),
    ],
)
def test_check_says_what_can_be_cut_across_devices(directory: Path, name: str, said: str) -> None:
    (directory / "config.json").write_text(json.dumps(foreign_config(name)))
    assert dict(lines(examine(str(directory), stages=2, context=16)))["tensors"].startswith(said)


def test_check_refuses_more_stages_than_layers(directory: Path) -> None:
    with pytest.raises(ConfigError, match="at most 4, the model's layers"):
        examine(str(directory), stages=5, context=16)


def test_check_says_what_experts_take_and_that_only_our_own_stages_share(directory: Path) -> None:
    plain, several = (examine(str(directory), stages=2, context=16, variants=one) for one in (None, "3"))
    assert [one["part"] for one in several["parts"]] == ["stage-0", *(f"stage-1.v{n}of3" for n in range(3)), "ends"]
    experts = several["variants"]
    assert (experts["widths"], experts["hosts"]) == ([1, 3], 4)
    stage = plain["parts"][1]["parameters"]
    assert experts["parameters"] == plain["variants"]["parameters"] + 2 * stage
    assert experts["founding_bytes"] == 12 * experts["parameters"]
    assert "1, 3 a stage: 4 stage hosts at least" in dict(lines(several))["variants"]
    assert "built-in GPT" in dict(lines(plain))["sharing"]
    with pytest.raises(ConfigError, match="2 numbers up to 64"):
        examine(str(directory), stages=2, context=16, variants="1,2,3")


def test_check_of_a_run_says_why_its_stages_cannot_share(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nlayers = 6\n[averaging]\nmode = "local"\n')
    facts = examine(str(file), stages=None, context=None)
    assert "averaging.mode" in facts["share"]["why_not"]
    assert "averaging.mode" in facts["variants"]["why_not"]
    file.write_text('[model]\nlayers = 6\nshare = "stages"\n')
    said = dict(lines(examine(str(file), stages=None, context=None)))
    assert "2, 3 or 6 stages can share their layers, as this run's do, to the end;" in said["sharing"]
    assert "can be cut across a peer's devices" in said["tensors"]
    assert "experts" not in said
    file.write_text('[model]\nlayers = 6\nshare = "stages"\nexperts = 4\nexpert_every = 3\n')
    said = dict(lines(examine(str(file), stages=None, context=None)))
    assert said["sharing"].startswith("2 stages can share their layers")
    held = "a stage holds all experts of its layers, or 2 or 4 shards do"
    assert said["experts"] == f"computed by the built-in GPT; {held}"
    assert "a loss of each layer" in said["balance"]
    assert "feed_forward stays whole: it has experts" in said["tensors"]
    assert dict(lines(examine("tiny", stages=None, context=None, variants="2")))["variants"].startswith("1, 2 a stage")


def test_check_names_what_the_tokenizer_lacks(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<gone>"}))
    said = dict(lines(examine(str(directory), stages=None, context=16)))
    assert said["text"].startswith("NOTHING ENDS IT: ")
    assert "expected one with the token <gone>" in said["text"]
    assert said["template"][:4] == "none"
    assert swarm(["model", "check", str(directory), "--context", "16"]) == EXIT_USAGE


def test_damaged_weights_are_found_before_anybody_is_invited(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.zeros(64)}, directory / "model.safetensors")
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:-8])
    assert swarm(["model", "check", str(directory), "--context", "16"]) == EXIT_USAGE
    assert "is no safetensors file" in capsys.readouterr().out
    home = tmp_path / "home"
    assert swarm(["new", "--model", str(directory), "--context", "16", "--home", str(home)]) == EXIT_ERROR
    said = capsys.readouterr()
    assert "is no safetensors file" in said.err
    assert "invite" not in said.out


def test_refused_options_name_what_they_can_be(directory: Path) -> None:
    with pytest.raises(ConfigError, match="the preset finetune"):
        load_foundation(Foundation(model=str(directory), context=16, steps=0))
    with pytest.raises(ConfigError, match="Ask for fewer tokens in a row: 64"):
        load_foundation(Foundation(model=str(directory), context=65))


def test_tied_model_is_not_cut_with_hosted_ends(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    model = find_model(str(directory)).tried(scratch=True, context=16)
    check_parts(model, SplitConfig(stages=2))
    with pytest.raises(ConfigError, match="its head is its embedding"):
        check_parts(model, SplitConfig(stages=2, ends="hosted"))
