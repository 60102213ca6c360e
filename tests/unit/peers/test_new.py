from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from data_shards.tokenize import train_tokenizer
from peers.commands.new import summary
from peers.commands.quickstart import plan_run
from peers.exit_codes import EXIT_INCOMPATIBLE, EXIT_USAGE, exit_code_of
from peers.founding_files import Founded, load_foundation, make_run, origins_of, pending
from peers.manifest_file import render_manifest
from peers.options.foundation import STRANGERS, Foundation
from peers.options.local import LocalOptions
from peers.presets import load_preset, preset_names
from swarm.config import load_manifest, parse_manifest
from swarm.errors import ConfigError, Incompatible
from tests.harness.rigs.peers import Typed

TEXT = "Enough text to make a small tokenizer of, with a few words that come again: text, words, tokenizer. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "some.json"
    path.write_bytes(train_tokenizer([TEXT], 300))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def founded(foundation: Foundation) -> Founded:
    return make_run(foundation, load_foundation(foundation))


# --- presets ---------------------------------------------------------------------------------------------------------


def test_presets_are_runs_smallest_first() -> None:
    assert preset_names() == ["tiny", "small", "medium"]
    for name in preset_names():
        manifest = parse_manifest(load_preset(name) | {"tokenizer": {"digest": "0" * 64}}, name)
        assert manifest.run.name == name


def test_manifest_file_of_every_preset_reads_back_the_same(tmp_path: Path) -> None:
    for name in preset_names():
        manifest = parse_manifest(load_preset(name) | {"tokenizer": {"digest": "0" * 64}}, name)
        path = tmp_path / f"{name}.toml"
        path.write_text(render_manifest(manifest))
        assert load_manifest(path).run_id == manifest.run_id


# --- founding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    ["", "[run]\ncopies = 1", "[run]\ncopies = 0", '[split]\nends = "hosted"', '[optimizer]\nname = "muon"',
     '[optimizer]\nname = "sgd"'],
)  # fmt: skip
def test_new_says_what_the_run_is_like_and_who_can_read_the_text(
    file: Path, tokenizer: Path, lines: str, snapshot: Any
) -> None:
    file.write_text(f'[run]\nnonce = "00000000deadbeef"\n{lines}'.replace("\n[run]", ""))
    told = summary(founded(Foundation(file=file, tokenizer=tokenizer)))
    assert [f"{label}: {text}" for label, text in told] == snapshot


def test_new_for_strangers_checks_what_peers_compute_and_says_so(file: Path, tokenizer: Path) -> None:
    file.write_text("[run]\nsteps = 9\n")
    made = founded(Foundation(file=file, tokenizer=tokenizer, strangers=True))
    assert (made.manifest.averaging.guard, made.manifest.averaging.check) == ("leave-out", 0.02)
    assert made.manifest.verify.audit == 0.05
    assert dict(summary(made))["checks"] == (
        "where three or more replicas hold a part, sums far from the others are left out and 2 % of the means are "
        "computed again; no microbatch weighs more than 2 times the usual; of 5 trainers and more one that pulls "
        "against the others feeds nothing; with 2 at the start nobody is judged; 5 % of what replicas compute is "
        "computed again by others"
    )
    foundation = Foundation(file=file, strangers=True)
    origins = origins_of(foundation, load_foundation(foundation))
    assert {origins[key] for key in STRANGERS} == {"--strangers"}


@pytest.mark.parametrize(
    ("lines", "typed", "said"),
    [
        ("", {"strangers": True, "local_steps": 8}, "Leave out --strangers, or --local-steps."),
        ("", {"strangers": True, "reproducible": True}, "Leave out --strangers, or --reproducible."),
        ('[averaging]\nschedule = "auto"\n', {"strangers": True}, "Leave out --strangers, or averaging.schedule in "),
        ("", {"strangers": True, "mode": "overlap"}, "Leave out --strangers, or --mode."),
        ("", {"strangers": True, "profile": "thin"}, "Leave out --strangers, or --profile."),
        ("", {"own_routes": True}, "Add --admission token, or --admission organisation."),
        ("", {"own_routes": True, "admission": "token"}, "Add --organisation NAME."),
    ],
)
def test_new_names_the_option_that_does_not_go_with_others(
    file: Path, lines: str, typed: dict[str, Any], said: str
) -> None:
    file.write_text(lines)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_foundation(Foundation(file=file, **typed))


def test_new_blames_no_switch_that_was_not_typed(file: Path) -> None:
    file.write_text('[averaging]\nguard = "always"\n')
    with pytest.raises(ConfigError) as caught:
        load_foundation(Foundation(file=file))
    assert caught.value.key == "averaging.guard"


def test_new_says_how_microbatches_find_their_experts(file: Path, tokenizer: Path) -> None:
    file.write_text(
        "[run]\ncopies = 0\nstart_when = { stage_hosts = 4, trainers = 2 }\n"
        '[split]\nvariants = [1, 2]\nroute_by = "domain"\ndomains = ["law", "code"]\n'
    )
    made = founded(Foundation(file=file, tokenizer=tokenizer))
    told = dict(summary(made))
    by = "by the domain of its trainer: law and code"
    assert told["experts"] == f"1, 2 a stage; a microbatch passes one of each, {by}"
    assert told["on one machine"].startswith("only, at the start: 2 variants; ")
    file.write_text(render_manifest(made.manifest))
    assert load_manifest(file).run_id == made.manifest.run_id


def test_new_says_which_parts_one_peer_alone_will_hold(file: Path, tokenizer: Path) -> None:
    file.write_text("[run]\ncopies = 0\nstart_when = { stage_hosts = 3, trainers = 1 }\n")
    told = dict(summary(founded(Foundation(file=file, tokenizer=tokenizer))))
    assert told["on one machine"].startswith("only, at the start: 1 stage and the ends; run.copies = 0")


def test_make_run_another_tokenizer_than_the_file_names_is_incompatible(file: Path, tokenizer: Path) -> None:
    file.write_text(f'[tokenizer]\ndigest = "{"1" * 64}"\n')
    with pytest.raises(Incompatible, match="1111") as caught:
        founded(Foundation(file=file, tokenizer=tokenizer))
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
def test_founding_what_does_not_fit_names_the_key(file: Path, content: str | None, key: str) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        founded(Foundation(file=file))
    assert caught.value.key == key
    assert exit_code_of(caught.value) == EXIT_USAGE


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_founding_a_tokenizer_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="tokenizer"):
        founded(Foundation(preset="tiny", tokenizer=path))


@pytest.mark.parametrize(("line", "kept"), [('nonce = "00000000deadbeef"', True), ('nonce = ""', False)])
def test_make_run_keeps_the_nonce_of_a_file(file: Path, tokenizer: Path, line: str, kept: bool) -> None:
    file.write_text(f"[run]\n{line}\n")
    run_ = founded(Foundation(file=file, tokenizer=tokenizer)).manifest.run
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


def test_file_keeps_its_number_of_hosts_and_too_few_are_told_with_what_to_add(file: Path) -> None:
    file.write_text("[run]\nstart_when = { stage_hosts = 3 }\n[split]\nstages = 2\n")
    assert load_foundation(Foundation(file=file, stages=1))["run"]["start_when"]["stage_hosts"] == 3
    with pytest.raises(ConfigError, match="run.start_when.stage_hosts = 3: ") as few:
        load_foundation(Foundation(file=file, stages=4))
    assert few.value.remedy == "Add --hosts 4, or more: every stage needs a replica."
    assert few.value.why == f"so says {file}"


# --- the command -----------------------------------------------------------------------------------------------------


def test_new_bad_usage_leaves_nothing(tmp_path: Path, typed: Typed, snapshot: Any) -> None:
    refused = [
        typed("new", *words.split(), "--home", tmp_path / "home")
        for words in (
            "", "run.toml --preset tiny", "tiny", "--preset tiny --name Bad-Name", "--preset huge",
            "--preset tiny --stages 9", "--preset tiny --hosts 1", "--preset tiny --steps 0",
            "--preset tiny --tokenizer /nonexistent", "--preset tiny --text /nonexistent",
            "--preset tiny --listen /ip4/127.0.0.1/tcp/0/p2p/x",
        )
    ]  # fmt: skip
    assert {one.code for one in refused} == {EXIT_USAGE}
    assert [one.complaint for one in refused] == snapshot
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("lines", "changes", "rate", "decay"),
    [
        ("[model.lora]\nrank = 4\n", {}, 2e-4, 0.0),
        ("[run]\nsteps = 9\n", {"lora_rank": 4}, 2e-4, 0.0),
        ("", {"lora_rank": 4}, 2e-4, 0.0),
        ("[model.lora]\nrank = 4\n[optimizer]\nlr = 1e-3\n", {}, 1e-3, 0.0),
        ("[model.lora]\nrank = 4\n[optimizer]\nweight_decay = 0.2\n", {"lr": 3e-3}, 3e-3, 0.2),
        ('[model.lora]\nrank = 4\n[optimizer]\nname = "sgd"\n', {}, 1.5e-3, 0.1),
        ("[run]\nsteps = 9\n", {}, 1.5e-3, 0.1),
    ],
)
def test_adapters_take_rates_of_their_own_unless_somebody_says_otherwise(
    tmp_path: Path, lines: str, changes: dict[str, Any], rate: float, decay: float
) -> None:
    file = tmp_path / "RUN.toml"
    file.write_text(lines)
    named: dict[str, Any] = {"file": file} if lines else {"preset": "tiny"}
    optimizer = parse_manifest(pending(load_foundation(Foundation(**named, **changes))), "the test").optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (rate, decay)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "overlap", "strategy": "grid", "batch": 8, "rows": 2, "ends": "hosted"},
        {"profile": "wan", "lr": 1e-4, "lora_rank": 2, "compute": "bfloat16", "reproducible": True},
        {"local_steps": 4, "steps": 9},
        {"layers_per_stage": "1,3"},
    ],
)
@pytest.mark.parametrize("from_file", [False, True])
def test_quickstart_plays_the_run_that_new_founds(tmp_path: Path, changes: dict[str, Any], *, from_file: bool) -> None:
    (tmp_path / "RUN.toml").write_text("[run]\nsteps = 7\nstart_when = { stage_hosts = 4, trainers = 2 }\n")
    named: dict[str, Any] = {"file": tmp_path / "RUN.toml"} if from_file else {"preset": "tiny"}
    played = plan_run(Foundation(**named, **changes), LocalOptions()).manifest
    peers = {} if from_file else {"hosts": 4, "trainers": 2}
    founded = parse_manifest(pending(load_foundation(Foundation(**named, **peers, **changes))), "the test")
    few_rounds = {"outer_lr": 1.0, "outer_momentum": 0.0} if "local_steps" in changes and not from_file else {}
    averaging = founded.averaging.model_copy(update={"local": founded.averaging.local.model_copy(update=few_rounds)})
    assert played == founded.model_copy(update={"averaging": averaging})
    assert played.run.steps == (3 if "local_steps" in changes else 7 if from_file else 60)
    assert played.averaging.inner_steps == changes.get("local_steps", 1)
    assert played.speed.overlaps == ("mode" in changes)
