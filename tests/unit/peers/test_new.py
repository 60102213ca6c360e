from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_shards.tokenize import tokenizer_digest, train_tokenizer
from peers.cli.app import run
from peers.commands.new import summary
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_USAGE, exit_code_of
from peers.founding_files import load_foundation, make_run
from peers.manifest_file import render_manifest
from peers.options.foundation import Foundation
from peers.presets import load_preset, preset_names, preset_purpose
from peers.settings import PeerSettings
from swarm.config import load_manifest, parse_manifest
from swarm.errors import ConfigError, Incompatible

TEXT = "Enough text to make a small tokenizer of, with a few words that come again: text, words, tokenizer. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT)
    return path


# --- presets ---------------------------------------------------------------------------------------------------------


def test_presets_are_runs_smallest_first() -> None:
    assert preset_names() == ["tiny", "small", "medium"]
    for name in preset_names():
        manifest = parse_manifest(load_preset(name) | {"tokenizer": {"digest": "0" * 64}}, name)
        assert manifest.run.name == name
        assert preset_purpose(name)


def test_preset_tiny_is_the_default_model_and_starts_with_three_peers() -> None:
    tiny = parse_manifest(load_preset("tiny") | {"tokenizer": {"digest": "0" * 64}}, "tiny")
    default = parse_manifest({"tokenizer": {"digest": "0" * 64}}, "the defaults")
    assert tiny.model == default.model
    assert (tiny.run.start_when.stage_hosts, tiny.run.start_when.trainers) == (2, 1)


def test_manifest_file_of_every_preset_reads_back_the_same(tmp_path: Path) -> None:
    for name in preset_names():
        manifest = parse_manifest(load_preset(name) | {"tokenizer": {"digest": "0" * 64}}, name)
        path = tmp_path / f"{name}.toml"
        path.write_text(render_manifest(manifest))
        assert load_manifest(path).run_id == manifest.run_id


# --- founding --------------------------------------------------------------------------------------------------------


def test_make_run_trains_a_tokenizer_for_the_model(tmp_path: Path, text: Path) -> None:
    foundation = Foundation(preset="tiny", name="mine", trainers=3, text=(text,))
    document = load_foundation(foundation)
    document["model"]["vocab_size"] = 300
    founded = make_run(foundation, document)
    run_ = founded.manifest.run
    assert (run_.name, run_.steps, run_.start_when.stage_hosts, run_.start_when.trainers) == ("mine", 60, 2, 3)
    assert founded.manifest.tokenizer.digest == tokenizer_digest(founded.tokenizer)
    assert founded.tokenizer_from == "some.txt"
    manifest_file, tokenizer_file = founded.write(tmp_path)
    assert load_manifest(manifest_file) == founded.manifest
    assert tokenizer_file.read_bytes() == founded.tokenizer
    told = dict(summary(founded))
    assert told["starts"] == "when 2 stage hosts and 3 trainers are here"
    assert told["ends"] == "after 60 steps"


@pytest.mark.parametrize(
    ("lines", "private", "copies"),
    [
        ("", True, "2 of each stage; of the ends 1, the founder's: stage hosts keep none"),
        ("[run]\ncopies = 1\n", True, None),
        ("[run]\ncopies = 0\n", True, None),
        ('[split]\nends = "hosted"\n', False, None),
    ],
)
def test_new_says_who_can_read_the_text_and_of_how_many_copies_of_the_ends_there_are(
    tmp_path: Path, lines: str, private: bool, copies: str | None
) -> None:
    file, tokenizer = tmp_path / "run.toml", tmp_path / "some.json"
    file.write_text(lines)
    tokenizer.write_bytes(train_tokenizer([TEXT], 300))
    foundation = Foundation(file=file, tokenizer=tokenizer)
    told = dict(summary(make_run(foundation, load_foundation(foundation))))
    said = "whoever hosts the first or the last stage can read the trainers' text: trust them with it"
    assert told.get("private") == (said if private else None)
    assert told.get("copies") == copies


@pytest.mark.parametrize(("name", "said"), [("adamw", "AdamW"), ("muon", "Muon"), ("sgd", "SGD")])
def test_new_says_which_optimizer_the_run_has(tmp_path: Path, name: str, said: str) -> None:
    file, tokenizer = tmp_path / "run.toml", tmp_path / "some.json"
    file.write_text(f'[optimizer]\nname = "{name}"\n')
    tokenizer.write_bytes(train_tokenizer([TEXT], 300))
    foundation = Foundation(file=file, tokenizer=tokenizer)
    told = dict(summary(make_run(foundation, load_foundation(foundation))))
    assert told["optimizer"].startswith(f"{said}, learning rate ")


def test_make_run_takes_the_tokenizer_beside_the_file(tmp_path: Path, text: Path) -> None:
    tokenizer = train_tokenizer([TEXT], 300)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    file = tmp_path / "run.toml"
    file.write_text(f'[tokenizer]\ndigest = "{tokenizer_digest(tokenizer)}"\n')
    foundation = Foundation(file=file)
    assert make_run(foundation, load_foundation(foundation)).tokenizer == tokenizer


def test_make_run_another_tokenizer_than_the_file_names_is_incompatible(tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "run.toml", tmp_path / "other.json"
    file.write_text(f'[tokenizer]\ndigest = "{"1" * 64}"\n')
    tokenizer.write_bytes(train_tokenizer([TEXT], 300))
    foundation = Foundation(file=file, tokenizer=tokenizer)
    with pytest.raises(Incompatible, match="1111") as caught:
        make_run(foundation, load_foundation(foundation))
    assert exit_code_of(caught.value) == EXIT_INCOMPATIBLE


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (None, "RUN.toml"),
        ("[run\n", "RUN.toml"),
        ("[model]\nlayer = 3\n", "model.layer"),
        ("[model]\nheads = 3\n", "model.heads"),
        ("[split]\nstages = 9\n", "split.stages"),
        ("[run]\nstart_when = { stage_hosts = 1 }\n", "run.start_when.stage_hosts"),
        ("[run]\nwire = true\n", "run.wire"),
        ('[run]\nnonce = "1"\n', "run.nonce"),
        ("run = 3\n", "run"),
        (f'[tokenizer]\ndigest = "{"1" * 64}"\n', "--tokenizer"),
    ],
)
def test_founding_what_does_not_fit_names_the_key(tmp_path: Path, content: str | None, key: str) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_text(content)
    foundation = Foundation(file=file)
    with pytest.raises(ConfigError) as caught:
        make_run(foundation, load_foundation(foundation))
    assert caught.value.key == key
    assert exit_code_of(caught.value) == EXIT_USAGE


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_founding_a_tokenizer_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    foundation = Foundation(preset="tiny", tokenizer=path)
    with pytest.raises(ConfigError, match="tokenizer"):
        make_run(foundation, load_foundation(foundation))


def test_make_run_gives_every_run_an_id_of_its_own(tmp_path: Path) -> None:
    tokenizer = tmp_path / "some.json"
    tokenizer.write_bytes(train_tokenizer([TEXT], 300))
    foundation = Foundation(preset="tiny", tokenizer=tokenizer)
    first, second = (make_run(foundation, load_foundation(foundation)).manifest for _ in range(2))
    assert first.run_id != second.run_id
    without = {"nonce": ""}
    assert first.run.model_copy(update=without) == second.run.model_copy(update=without)


@pytest.mark.parametrize(("line", "kept"), [('nonce = "00000000deadbeef"', True), ('nonce = ""', False)])
def test_make_run_keeps_the_nonce_of_a_file(tmp_path: Path, line: str, kept: bool) -> None:
    file, tokenizer = tmp_path / "run.toml", tmp_path / "some.json"
    file.write_text(f"[run]\n{line}\n")
    tokenizer.write_bytes(train_tokenizer([TEXT], 300))
    foundation = Foundation(file=file, tokenizer=tokenizer)
    run_ = make_run(foundation, load_foundation(foundation)).manifest.run
    assert len(run_.nonce) == 16
    assert (run_.nonce == "00000000deadbeef") == kept


@pytest.mark.parametrize(
    ("given", "stages", "hosts"),
    [
        ({"stages": 1}, 1, 1),
        ({"stages": 4}, 4, 4),
        ({"layers_per_stage": "1,1,2"}, 3, 3),
        ({"stages": 1, "hosts": 2}, 1, 2),
        ({}, 2, 2),
    ],
)
def test_preset_that_is_cut_otherwise_starts_with_a_host_for_each_stage_unless_it_is_said(
    given: dict[str, Any], stages: int, hosts: int
) -> None:
    document = load_foundation(Foundation(preset="tiny", **given))
    assert (document["split"]["stages"], document["run"]["start_when"]["stage_hosts"]) == (stages, hosts)


def test_file_keeps_its_number_of_hosts_and_too_few_are_told_with_what_to_add(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nstart_when = { stage_hosts = 3 }\n[split]\nstages = 2\n")
    assert load_foundation(Foundation(file=file, stages=1))["run"]["start_when"]["stage_hosts"] == 3
    with pytest.raises(ConfigError, match="run.start_when.stage_hosts = 3: ") as few:
        load_foundation(Foundation(file=file, stages=4))
    assert few.value.remedy == "Add --hosts 4, or more: every stage needs a replica."
    assert few.value.why == f"so says {file}"


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new"], "tiny, small, medium"),
        (["new", "run.toml", "--preset", "tiny"], "either a RUN.toml or --preset"),
        (["new", "tiny"], "new --preset tiny"),
        (["new", "--preset", "tiny", "--name", "Bad Name"], "1 to 41 small letters, digits and dashes"),
        (["new", "--preset", "huge"], "one of tiny, small, medium"),
        (["new", "--preset", "tiny", "--stages", "9"], "--stages = 9"),
        (["new", "--preset", "tiny", "--hosts", "1"], "--hosts = 1"),
        (["new", "--preset", "tiny", "--steps", "0"], "--steps = 0"),
        (["new", "--preset", "tiny", "--tokenizer", "/nonexistent"], "--tokenizer"),
        (["new", "--preset", "tiny", "--text", "/nonexistent"], "--text"),
        (["new", "--preset", "tiny", "--listen", "/ip4/127.0.0.1/tcp/0/p2p/x"], "--listen"),
    ],
)
def test_new_bad_usage_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run([*arguments, "--home", str(tmp_path / "home")]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert not (tmp_path / "home").exists()


def test_new_starts_a_bootstrap_that_waits_for_ever(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[PeerSettings] = []
    monkeypatch.setattr("peers.node.run_peer", lambda settings: started.append(settings) or 0)
    home = tmp_path / "home"
    assert run(["new", "--preset", "tiny", "--text", str(text), "--home", str(home), "--name", "mine"]) == 0
    (settings,) = started
    assert (settings.role, settings.patience_s, settings.options.listen) == ("bootstrap", None, ("/ip4/0.0.0.0/tcp/0",))
    assert settings.home.parent == home.absolute() / "1" / "sessions"
    assert settings.run_directory == home.absolute() / "runs" / "{run}"
    assert not (home / "runs").exists()
    assert settings.manifest is not None
    manifest = load_manifest(settings.manifest)
    assert manifest.run.name == "mine"
    assert settings.control == home / "1" / "control.sock"
    assert manifest.run_id[:12] in capsys.readouterr().out
