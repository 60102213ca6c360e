"""Adapters exported alone and merged, and the weights beside them listed, made and removed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peers.checkpoints.choose_checkpoint import choose_step
from peers.checkpoints.writer import keep_run
from peers.cli.app import run as swarm
from peers.commands.evaluate import load_checkpoint
from peers.frozen import frozen_store, listed_frozen, store_of, with_frozen
from peers.home.places import RUNS
from peers.home.run_directory import RunDirectory
from swarm.models.lora import LoraFamily
from tests.harness.rigs.peers import KeptRun, kept_run, printed

STEP = 10
TOKENS = torch.arange(24).view(2, 12)


class _Trained(KeptRun):
    """Its adapters have been trained: B is not zero any more."""

    def states(self, step: int, seed: int = 0) -> dict[Any, Any]:
        found = super().states(step, seed)
        for state in found.values():
            drawn = torch.Generator().manual_seed(step)
            for name, view in state.weights.items():
                if step and name.endswith("lora_b"):
                    view.copy_(torch.randn(view.shape, generator=drawn) * 0.1)
        return found


def run_in(home: Path, base: str = "nf4") -> RunDirectory:
    kept = kept_run(lora={"rank": 8, "base": base})
    directory = RunDirectory(home / RUNS / "kept")
    manifest = with_frozen(kept.manifest, None, store_of(directory), lambda _: None)
    return _Trained(**(dataclasses.asdict(kept) | {"manifest": manifest, "keys": kept.keys})).keep(directory.root, STEP)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that keeps a run, of which each test takes a copy."""
    home = tmp_path_factory.mktemp("made") / "home"
    run_in(home)
    return home


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(made, tmp_path / "home") / RUNS / "kept")


def logits(path: Path, adapters: Path | None = None) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    if adapters is not None:
        model = PeftModel.from_pretrained(model, str(adapters))
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("base", ["nf4", "bfloat16", "float32"])
def test_adapters_in_peft_the_merged_model_and_our_own_give_the_same(
    tmp_path: Path, base: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue("run") if base == "nf4" else run_in(tmp_path / "home", base)
    said = ["--run", str(directory.root)]
    assert swarm(["export", "--out", str(tmp_path / "adapters"), *said]) == 0
    assert swarm(["export", "--out", str(tmp_path / "merged"), "--merge", *said]) == 0
    # What the adapters were trained with: B is drawn after step 0 only.
    ours = load_checkpoint(directory).model
    with torch.no_grad():
        expected = ours.logits(ours(TOKENS))
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-5)
    without = _beside(directory, tmp_path / "beside")
    assert not torch.allclose(logits(without), expected, atol=1e-2)
    torch.testing.assert_close(logits(without, tmp_path / "adapters"), expected, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (8, 32.0, 14)


def test_merge_of_sites_that_train_adapters_is_of_their_whole_models(run: RunDirectory, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    here = f"{run.root}@{STEP}"
    assert swarm(["export", "--out", str(tmp_path / "whole"), "--merge", "--run", str(run.root)]) == 0
    sites = [f"--site={here}=.5", f"--site={here}=.5"]
    assert swarm(["merge", f"--base={here}", *sites, "--out", str(tmp_path / "merged")]) == 0
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert len(names) == 3
    for name in names:
        found, expected = (load_file(tmp_path / where / name) for where in ("merged", "whole"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], one) for key, one in expected.items())


def _beside(directory: RunDirectory, into: Path) -> Path:
    """The frozen weights as a model of transformers: the merged one less its adapters."""
    from peers.commands import export as exporting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "merged", _unmerged)
        exporting.export(choose_step(directory), into, "float32", lambda line: None)
    return into


def _unmerged(family: LoraFamily, spec: Any, adapters: Any, base: Any) -> dict[str, Tensor]:
    from swarm.models.lora import dense_of

    return {name: dense_of(stored, torch.float32) for name, stored in base.items()}


def test_run_that_trains_all_weights_has_no_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = kept_run().keep(tmp_path / "run", STEP)
    assert swarm(["export", "--out", str(tmp_path / "model"), "--run", str(directory.root), "--merge"]) == 2
    assert "this one trains all" in capsys.readouterr().err


def test_adapters_are_exported_from_copied_directories_which_have_no_frozen_weights(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each machine's directory has one part; the frozen weights of the adapters stayed in the home of the trainer."""
    home, copies = ["--home", str(tmp_path / "here")], []
    for part in ("ends", "stage-0", "stage-1"):
        ignored = shutil.ignore_patterns(*{"ends.safet*", "stage-0.safet*", "stage-1.safet*"} - {f"{part}.safet*"})
        copies += ["--from", str(shutil.copytree(run.root, tmp_path / part, ignore=ignored))]
    assert swarm(["export", "--out", str(tmp_path / "half"), *copies[:4], *home]) == 3
    said = capsys.readouterr().err
    assert "no step is complete: of the newest, 10, no peer that answers has stage-1" in said
    assert "ckpt pull" in said
    assert not (tmp_path / "half").exists()

    assert swarm(["export", "--out", str(tmp_path / "gathered"), *copies, *home]) == 0
    assert swarm(["export", "--out", str(tmp_path / "direct"), "--run", str(run.root)]) == 0
    # A run keeps no path of its founder, and a name that is none would load another model, or none.
    assert 'M.from_pretrained("PATH-OF-BASE")' in (said := capsys.readouterr().out)
    assert "in the place of PATH-OF-BASE, here and in adapter_config.json" in said
    config = json.loads((tmp_path / "direct" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "PATH-OF-BASE"
    assert "a placeholder" in (tmp_path / "direct" / "README.md").read_text(encoding="utf-8")
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("gathered", "direct")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert swarm(["export", "--out", str(tmp_path / "merged"), "--merge", *copies, *home]) == 0
    assert {one["part"] for one in listed_frozen(tmp_path / "here")} == {"ends", "stage-0", "stage-1"}, "of the seed"


def test_home_with_several_runs_is_no_source_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    for number in ("0" * 16, "1" * 16):
        kept_run(nonce=number).keep(home / RUNS / f"kept-{number}", STEP)
    kept_run(nonce="2" * 16).keep(copy, STEP)
    out = ["export", "--out", str(tmp_path / "model"), "--home", str(tmp_path / "here"), "--from", str(home)]
    for more, why in ((), "it holds several: "), (("--from", str(copy)), "it holds others: "):
        assert swarm([*out, *more]) == 2
        assert why in capsys.readouterr().err


def test_weights_beside_adapters_are_listed_removed_and_made_again(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    kept = listed_frozen(home)
    assert {one["part"] for one in kept} == {"stage-0", "stage-1", "ends"}
    assert all(one["complete"] and one["runs"] == ["kept"] for one in kept)
    assert swarm(["ckpt", "frozen", "--unused", "--home", str(home), "--json"]) == 0
    assert printed(capsys)["removed"] == []
    gone = kept[0]["digest"]
    assert swarm(["ckpt", "frozen", "--remove", gone[:16], "--home", str(home)]) == 0
    assert f"removed {gone[:12]}" in capsys.readouterr().out
    assert swarm(["export", "--out", str(tmp_path / "model"), "--merge", "--run", str(run.root)]) != 0
    assert "ckpt frozen --run RUN --add DIR" in capsys.readouterr().err
    again = ["ckpt", "frozen", "--add", str(tmp_path), "--run", str(run.root), "--home", str(home)]
    assert swarm(again) == 0
    assert [one["digest"] for one in listed_frozen(home)].count(gone) == 1
    run.manifest.unlink()
    assert swarm(["ckpt", "frozen", "--unused", "--home", str(home)]) == 0
    assert listed_frozen(home) == []


def test_weights_of_a_run_that_is_kept_elsewhere_are_no_unused_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, home, elsewhere = kept_run(lora={"rank": 8, "base": "nf4"}), tmp_path / "home", tmp_path / "disk" / "run"
    store = frozen_store(home)
    manifest = with_frozen(kept.manifest, None, store, lambda _: None)
    keep_run(RunDirectory(elsewhere), manifest, kept.files, store)
    keep_run(RunDirectory(elsewhere), manifest, kept.files, store)
    assert [one["runs"] for one in listed_frozen(home)] == [[f"kept in {elsewhere}"]] * 3
    (tmp_path / "disk").rename(tmp_path / "not mounted")
    unused = ["ckpt", "frozen", "--unused", "--home", str(home)]
    assert swarm([*unused, "--json"]) == 0
    assert printed(capsys)["removed"] == []
    assert [one["runs"] for one in listed_frozen(home)] == [[f"kept in {elsewhere}, which is not there now"]] * 3
    (note,) = (store.root / "users").iterdir()
    note.write_bytes(b"\xff")
    assert swarm(unused) != 0
    assert "what its run needs is not known" in capsys.readouterr().err
    note.unlink()
    assert swarm(unused) == 0
    assert listed_frozen(home) == []


def test_one_digest_and_all_unused_ones_are_not_removed_at_once(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    kept = listed_frozen(home)
    both = ["ckpt", "frozen", "--unused", "--remove", kept[0]["digest"], "--home", str(home)]
    assert swarm(both) == 2
    assert "one of the two" in capsys.readouterr().err
    assert listed_frozen(home) == kept


def test_digest_that_is_not_here_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert swarm(["ckpt", "frozen", "--remove", "abcd", "--home", str(tmp_path)]) == 2
    assert "no such weights are kept here" in capsys.readouterr().err


@pytest.mark.parametrize("given", [("--lora-base", "nf4"), ("--lora-alpha", "8"), ("--lora-targets", "q_proj")])
def test_options_of_adapters_want_a_rank(
    tmp_path: Path, given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert swarm(["new", "--preset", "tiny", *given, "--home", str(tmp_path)]) == 2
    assert "Add --lora-rank 16" in capsys.readouterr().err
