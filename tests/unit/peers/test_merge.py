"""``swarm merge``: sites' checkpoints as one model, and what cannot be one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from data_shards.build import build_shard
from peers.checkpoints.choose_checkpoint import choose_step
from peers.checkpoints.named import BASE, named_step, weighted_steps
from peers.checkpoints.recut import decided_by
from peers.cli.app import run as swarm
from peers.commands import merge as merging
from peers.commands.evaluate import load_checkpoint
from peers.commands.merge import merging_of, went_on_from
from peers.home.run_directory import RunDirectory
from swarm.config import parse_manifest
from swarm.ids import ENDS, MicrobatchId, stage_part
from swarm.models.layout import install_weights
from swarm.models.merging import linear, weighed
from swarm.state.checkpoints.parts import load_weights
from tests.harness.rigs.peers import KeptRun, kept_run

pytestmark = pytest.mark.usefixtures("elsewhere")

WORDS = "Some words, and some more words that make a text for this. "


@dataclass(frozen=True)
class Sites:
    """A base at step 10, and two runs that went on from it, one cut otherwise: at steps 20 and 30."""

    base: RunDirectory
    first: RunDirectory
    second: RunDirectory

    def arguments(self, first: float, second: float, out: Path) -> list[str]:
        sites = [f"--site={self.first.root}@20={first}", f"--site={self.second.root}@30={second}"]
        return ["merge", f"--base={self.base.root}@10", *sites, "--out", str(out)]


def went_on(base: KeptRun, nonce: str, **split: Any) -> KeptRun:
    """Return a run whose manifest says that it went on from step 10 of another."""
    record = next(one.record for one in base.decisions if one.record.step == 10)
    site = kept_run(name=f"site-{nonce[0]}", nonce=nonce)
    document = site.manifest.model_dump(mode="json")
    document["run"]["parent"] = {"run": base.manifest.run_id, "step": 10, "record": decided_by(record)}
    document["split"] |= split
    site.manifest = parse_manifest(document, "the test")
    return site


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    base = kept_run()
    directory = base.keep(tmp_path / "base", 10)
    first = went_on(base, "a" * 16).keep(tmp_path / "first", 20)
    second = went_on(base, "b" * 16, stages=1).keep(tmp_path / "second", 30, [stage_part(0), ENDS])
    return Sites(directory, first, second)


def loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.parametrize("weights", [(1, 0), (0, 1)])
def test_site_with_all_the_weight_gives_the_bits_of_its_export(
    sites: Sites, tmp_path: Path, weights: tuple[int, int]
) -> None:
    its = sites.first if weights[0] else sites.second
    assert swarm(sites.arguments(*weights, tmp_path / "merged")) == 0
    assert swarm(["export", "--run", str(its.root), "--out", str(tmp_path / "export")]) == 0
    expected, found = tensors(tmp_path / "export"), tensors(tmp_path / "merged")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.int32), one.view(torch.int32)) for name, one in expected.items())


@pytest.mark.parametrize("calibrated", [False, True])
def test_merged_model_is_what_transformers_loads(
    sites: Sites, tmp_path: Path, calibrated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts that were written one by one are the merge of whole models in memory."""
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in texts:
        path.write_text(WORDS * 20 + path.name)
    options = [f"--calibrate={path}" for path in texts] if calibrated else []
    assert swarm([*sites.arguments(0.7, 0.3, tmp_path / "out"), *options, "--device=cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["share"]) for one in said["sites"]] == [(20, 0.7), (30, 0.3)]
    directories = ((sites.base, 10), (sites.first, 20), (sites.second, 30))
    models = [load_weights(directory.checkpoints, step) for directory, step in directories]
    shares = linear(models[0], [0.7, 0.3])
    if calibrated:
        assert said["calibration_loss"]["learnt"] < said["calibration_loss"]["linear"]
        named = weighted_steps([f"{sites.first.root}=.7", f"{sites.second.root}=.3"], None)
        merged = merging_of(named_step(f"{sites.base.root}@10", BASE, None), named, texts)
        shares = merging.calibrate(merged, torch.device("cpu"), lambda *_: None).shares
    else:
        assert said["calibration_loss"] is None
    ours = load_checkpoint(sites.first).model
    install_weights(ours, weighed(models, shares))
    tokens = torch.arange(3 * 16).view(3, 16)
    with torch.no_grad():
        assert (loaded(tmp_path / "out")(tokens).logits - ours.logits(ours(tokens))).abs().max() <= 1e-6
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# site-a and site-b, merged" in card
    assert "step 20 of `site-a`" in card
    assert ("its tensors weigh" in card) == calibrated


def test_runs_that_began_with_the_same_weights_have_a_base_though_no_record_is_shared(tmp_path: Path) -> None:
    first, second = kept_run(nonce="a" * 16), kept_run(nonce="b" * 16)
    directories = [run.keep(tmp_path / str(number), 0) for number, run in enumerate((first, second))]
    first.keep(tmp_path / "0", 20)
    second.keep(tmp_path / "1", 30)
    base, site, other = choose_step(directories[0], 0), choose_step(directories[1], 30), choose_step(directories[0], 20)
    assert went_on_from(base, site)
    assert went_on_from(base, other)
    assert not went_on_from(other, site)
    assert not went_on_from(site, base)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"second": "@30=.4"},
            "--site = '0.7 + 0.4' cannot be used: they are 1.1 check: expected weights that are 1 together",
        ),
        ({"second": "@30=much"}, "expected RUN@STEP=WEIGHT, the weight from 0 to 1"),
        ({"second": "@30=1.3"}, "expected RUN@STEP=WEIGHT, the weight from 0 to 1"),
        ({"second": "@31=.3"}, "expected a step that is here, one of 30"),
        ({"base": "first@20"}, "expected a run that went on from record"),
        ({"base": "second"}, "expected a run that went on from record"),
        (
            {"calibrate": ["a.txt"]},
            "--calibrate = 1 cannot be used check: expected a text for each of 2 sites, in their order",
        ),
        ({"calibrate": ["a.txt", "none.txt"]}, "none.txt"),
    ],
)
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(
    sites: Sites, tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 20)
    base = f"--base={tmp_path / change.get('base', 'base@10')}"
    named = [f"--site={sites.first.root}@20=.7", f"--site={sites.second.root}{change.get('second', '@30=.3')}"]
    options = [f"--calibrate={tmp_path / name}" for name in change.get("calibrate", [])]
    assert swarm(["merge", base, *named, *options, "--out", str(tmp_path / "out"), "--device=cpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("known", ["part", "digest"])
def test_text_that_a_site_trained_on_is_refused(
    sites: Sites, tmp_path: Path, known: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its shard in the run's directory shows, or else a record, which names shards by digest."""
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("Nothing in these lines is like what the other one says, not a word. " * 20)
    b.write_text(WORDS * 30)
    shard = sites.second.shard(0) if known == "part" else tmp_path / "elsewhere"
    shard.parent.mkdir(exist_ok=True)
    texts = ["Before it. " + b.read_text() + "After it."] if known == "part" else [b.read_text()]
    build_shard(shard, texts, sites.first.tokenizer.read_bytes())
    if known == "digest":
        fed = merging._records

        def records(site: Any) -> Any:
            digest = json.loads((shard / "shard.json").read_text())
            assert digest
            from data_shards.manifest import read_manifest

            for record in fed(site):
                committed = tuple(
                    one.model_copy(
                        update={
                            "microbatch": MicrobatchId(one.microbatch.trainer, read_manifest(shard).digest[:16], 0, 0)
                        }
                    )
                    for one in record.committed
                )
                yield record.model_copy(update={"committed": committed})

        monkeypatch.setattr(merging, "_records", records)
    options = [f"--calibrate={a}", f"--calibrate={b}", "--device=cpu"]
    assert swarm([*sites.arguments(0.7, 0.3, tmp_path / "out"), *options]) == 2
    said = capsys.readouterr().err
    assert f"--calibrate = '{b}' cannot be used: " in said
    assert ("has trained on at least " if known == "part" else "has trained on the whole of it") in said
    assert not (tmp_path / "out").exists()


def test_models_that_memory_does_not_hold_are_refused_before_they_are_read(
    sites: Sites, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 20)
    monkeypatch.setattr(merging, "free_memory", lambda device: 1_000_000)
    monkeypatch.setattr(merging, "_tensors", lambda *asked: pytest.fail("a model was read"))
    options = [f"--calibrate={tmp_path / 'a.txt'}"] * 2
    assert swarm([*sites.arguments(0.7, 0.3, tmp_path / "out"), *options, "--device=cpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "3 models take 1.04 MB with what is learnt, and 1 MB are free on cpu" in said
    assert "next: Leave --calibrate out: that takes a part of two models." in said
