"""Experts by text, asked and exported: each row, and each prompt, is of the model of its kind, and no path is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_shards.build import build_shard
from data_shards.router import Router, described
from data_shards.tokenize import Tokenizer
from peers.checkpoints.choose_checkpoint import choose_step
from peers.cli.app import run as swarm
from peers.commands.evaluate import held_out_loss, load_to_ask
from peers.home.run_directory import RunDirectory
from swarm.config import StartWhen
from swarm.ids import stage_part
from swarm.models.spec import SplitConfig
from tests.harness.rigs.peers import kept_run

LAW = "The party of the first part shall pay the party of the second part. "
CODE = "for (i = 0; i < n; i++) { x[i] += y[n]; }\n"
START = StartWhen(stage_hosts=3, trainers=1)
SPLIT = {"stages": 2, "variants": (1, 2), "route_by": "text"}
CODE_PART = stage_part(1, 1, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with a model for each of two kinds, beside a text of each: ``0.txt`` and ``1.txt``, and ``both.txt``."""
    root, kept = tmp_path_factory.mktemp("routed"), kept_run()
    tokenizer = Tokenizer(kept.tokenizer)
    centres = [tuple(described(np.array([tokenizer.encode(text)]))[0].tolist()) for text in (LAW, CODE)]
    split = SplitConfig.model_validate(SPLIT | {"centres": tuple(centres)})
    parts = {"split": split, "run": kept.manifest.run.model_copy(update={"start_when": START})}
    kept = replace(kept, manifest=kept.manifest.model_copy(update=parts))
    for name, text in {"0": LAW * 9, "1": CODE * 9}.items():
        (root / f"{name}.txt").write_text(text)
    return kept.keep(root / "run", 10, split.parts)


Asked = Callable[..., dict[str, object]]


@pytest.fixture
def asked(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> Asked:
    """What a command says as JSON."""

    def ask(*words: str) -> dict[str, object]:
        assert swarm([*words, "--json"]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    return ask


@pytest.fixture(scope="module")
def exported(run: RunDirectory) -> Path:
    into = run.root.parent / "model"
    assert swarm(["export", "--out", str(into), "--run", str(run.root)]) == 0
    return into


def texts(run: RunDirectory) -> list[str]:
    return [str(run.root.parent / f"{kind}.txt") for kind in range(2)]


def test_each_text_has_the_loss_of_the_model_of_its_kind(run: RunDirectory, exported: Path, asked: Asked) -> None:
    of_run = ("--run", str(run.root))
    alone = [asked("eval", text, *of_run, "--path", path)["loss"] for path in "01" for text in texts(run)]
    assert len(set(alone)) == 4
    for source in (of_run, ("--model", str(exported))):
        found = asked("eval", *texts(run), *source)["files"]
        assert [one["loss"] for one in found] == pytest.approx([alone[0], alone[3]], rel=1e-5)  # type: ignore[attr-defined]


def test_held_out_text_is_foretold_by_the_model_of_its_kind(run: RunDirectory, tmp_path: Path) -> None:
    chosen, tokenizer = choose_step(run), run.tokenizer.read_bytes()
    for path, text in (("0", LAW), ("1", CODE)):
        build_shard(tmp_path / path, [text * 9], tokenizer)
        both, alone = (held_out_loss(load_to_ask(s), s, tmp_path / path) for s in (chosen, chosen.on_path(path)))
        assert both == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(("path", "prompt"), [("0", LAW), ("1", CODE)])
def test_prompt_is_continued_by_the_model_of_its_kind(
    run: RunDirectory, exported: Path, asked: Asked, path: str, prompt: str
) -> None:
    how = ("--prompt", prompt, "--tokens", "8", "--temperature", "0")
    of_path, other = (asked("sample", str(run.root), "--path", one, *how)["text"] for one in (path, str(1 - int(path))))
    assert of_path != other
    assert asked("sample", str(run.root), *how)["text"] == of_path
    routed, alone = (asked("sample", "--model", str(one), *how)["text"] for one in (exported, exported / path))
    assert routed == alone


def test_card_of_a_directory_that_routes_finds_the_same_model_in_python(
    run: RunDirectory, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (exported / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(exported)
    names: dict[str, object] = {}
    exec(program, names)
    assert "The" in capsys.readouterr().out
    router = Router(json.loads((exported / "routing.json").read_text())["centres"])
    chance = np.random.default_rng(0)
    rows = [chance.integers(0, 300, size=length).tolist() for length in range(1, 60)]
    model_for = names["model_for"]
    assert [model_for(row) for row in rows] == [str(router.choice_of(row)) for row in rows]  # type: ignore[operator]


def test_one_path_is_exported_alone_as_it_is_among_all(run: RunDirectory, tmp_path: Path, exported: Path) -> None:
    assert swarm(["export", "--out", str(tmp_path / "one"), "--run", str(run.root), "--path", "1"]) == 0
    files = sorted(one.name for one in (tmp_path / "one").iterdir())
    assert files == sorted(one.name for one in (exported / "1").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (exported / "1" / name).read_bytes()


def test_model_of_an_owned_expert_is_not_there_and_the_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"stages": 2, "variants": (1, 2), "route_by": "domain", "domains": ("law", "code"), "own": {"code": "acme"}}
    kept, split = kept_run(), SplitConfig.model_validate(asked)
    parts = {
        "split": split,
        "run": kept.manifest.run.model_copy(update={"start_when": START}),
    }
    admission = kept.manifest.admission.model_copy(update={"mode": "token"})
    kept = replace(kept, manifest=kept.manifest.model_copy(update=parts | {"admission": admission}))
    run = kept.keep(tmp_path / "run", 10, [part for part in split.parts if part != CODE_PART])
    export = ["export", "--run", str(run.root), "--out"]
    assert swarm([*export, str(tmp_path / "law"), "--path", "law"]) == 0
    capsys.readouterr()
    assert swarm([*export, str(tmp_path / "code"), "--path", "code"]) == 2
    said = capsys.readouterr().err
    assert f"step 10 lacks {CODE_PART} here: acme keeps it to itself" in said
    assert "a peer of acme can take it; or name another path: law, code" in said


@pytest.mark.parametrize(
    ("document", "said"),
    [("{", "Invalid JSON"), ('{"schema": 1, "models": ["../x"], "centres": []}', "should match pattern"),
     ('{"schema": 1, "models": ["0"], "centres": []}', "models and centres are not as many")],
)  # fmt: skip
def test_routing_file_that_is_damaged_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: str, said: str
) -> None:
    (tmp_path / "routing.json").write_text(document)
    assert swarm(["sample", "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Export it anew" in error


def test_model_that_a_directory_that_routes_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    centre = [0] * 256
    (tmp_path / "routing.json").write_text(json.dumps({"schema": 1, "models": ["law"], "centres": [centre]}))
    assert swarm(["sample", "--model", str(tmp_path)]) == 2
    assert str(tmp_path / "law") in capsys.readouterr().err
