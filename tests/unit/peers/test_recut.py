"""``swarm new --resume --stages``: a run's checkpoint as that of a run with other stages."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.checkpoints.choose_checkpoint import choose_step
from peers.checkpoints.resume import FromCheckpoint, find_resumable
from peers.checkpoints.verify import check_step
from peers.cli.app import run as swarm
from peers.exit_codes import EXIT_USAGE
from peers.founding_files import resume_run
from peers.frozen import frozen_of_all, store_of, with_frozen
from peers.home.run_directory import RunDirectory, known_runs
from peers.options.foundation import Foundation
from peers.settings import PeerSettings
from swarm.config import Manifest, Parent, load_manifest, parse_manifest
from swarm.consensus.records import NO_RECORD
from swarm.errors import ConfigError, StateError
from swarm.ids import ENDS, PartName, stage_part
from swarm.models.nf4 import Nf4
from swarm.state.checkpoints.parts import load_weights, step_directory
from swarm.state.checkpoints.recut import whole_model
from swarm.state.frozen import FrozenStore
from tests.harness.rigs.peers import KeptRun, kept_run

pytestmark = pytest.mark.usefixtures("elsewhere")

LOCAL = ("--listen", "/ip4/127.0.0.1/tcp/0")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[PeerSettings]:
    """What peers would have been started with."""
    settings: list[PeerSettings] = []
    monkeypatch.setattr("peers.node.run_peer", lambda one: settings.append(one) or 0)
    return settings


@pytest.fixture
def deep() -> KeptRun:
    """A run of four layers in two stages."""
    return kept_run(layers=4)


def keep(run: KeptRun, tmp_path: Path, step: int = 10) -> RunDirectory:
    return run.keep(tmp_path / "home" / "runs" / f"kept-{run.manifest.run_id[:12]}", step)


def resumed(directory: RunDirectory, **options: Any) -> Any:
    return resume_run(Foundation(file=directory.root, resume=True, **options), None)


def test_new_resume_stages_founds_another_run_with_the_same_model(
    deep: KeptRun, tmp_path: Path, started: list[PeerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = keep(deep, tmp_path)
    step = step_directory(kept.checkpoints, 10)
    assert swarm(["new", "--resume", str(step), "--stages", "4", "--hosts", "5", *LOCAL]) == 0
    out = capsys.readouterr().out
    (settings,) = started
    assert settings.manifest is not None
    assert settings.run_directory is not None
    manifest, directory = load_manifest(settings.manifest), RunDirectory(settings.run_directory)
    parent = deep.manifest
    decided = next(one.record for one in deep.decisions if one.record.step == 10)
    assert manifest.run.parent == Parent(run=parent.run_id, step=10, record=decided.hash())
    assert manifest.run_id != parent.run_id
    assert (manifest.split.stages, manifest.run.start_when.stage_hosts, settings.resume) == (4, 5, 10)
    same = {"run": parent.run, "split": parent.split}
    assert manifest.model_copy(update=same) == parent
    # What is said is what lies there.
    old, new = choose_step(kept), choose_step(directory)
    whole = whole_model(directory.checkpoints, new.record).digest
    assert f"{whole}, before and after" in out
    assert whole_model(kept.checkpoints, old.record).digest == whole
    assert "cut anew" in out
    assert "2 of 2, 2 to 4 of 1, 1, 1, 1" in out
    before, after = load_weights(kept.checkpoints, 10), load_weights(directory.checkpoints, 10)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_run_that_was_cut_anew_begins_where_the_record_says_and_can_be_resumed_again(
    deep: KeptRun, tmp_path: Path
) -> None:
    founded = resumed(keep(deep, tmp_path), layers_per_stage="1,3")
    directory, manifest = founded.resumed.directory, founded.manifest
    decided = next(one.record for one in deep.decisions if one.record.step == 10)
    origin, snapshots = await FromCheckpoint(directory.checkpoints, 10, manifest.run_id).load(lambda *_: None)
    assert (origin.step, origin.previous, origin.cursors) == (10, decided.hash(), decided.cursors)
    assert {one.part for one in snapshots} == {ENDS, stage_part(0), stage_part(1)}
    # Its founder may die before anybody came: it is a run like any other.
    again = find_resumable(directory.root, None)
    assert (again.step, again.manifest) == (10, manifest)
    checked = check_step(directory, manifest.run_id, 10)
    assert (checked.good, checked.proof) == (True, "unproven")
    # A third cut follows the same record: the run between decided nothing.
    third = resumed(directory, stages=4, hosts=4)
    assert third.manifest.run.parent == Parent(run=manifest.run_id, step=10, record=decided.hash())
    text = tomllib.loads(third.resumed.directory.manifest.read_text())
    assert parse_manifest(text, "the test").run_id == third.manifest.run_id


def test_genesis_can_be_cut_anew(deep: KeptRun, tmp_path: Path) -> None:
    founded = resumed(keep(deep, tmp_path, 0), stages=1)
    assert founded.manifest.run.parent.step == 0
    assert founded.manifest.run.parent.record == deep.decisions[0].record.hash() != NO_RECORD
    assert founded.resumed.step == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "5", "--hosts", "5"], "--stages = 5 cannot be used check: expected at most model.layers = 4"),
        (["--stages", "2"], "another cut than the run's own, 2, 2 layers"),
        (["--stages", "4"], "Add --hosts 4."),
        (["--stages", "4", "--hosts", "3"], "--hosts = 3"),
        (["--layers-per-stage", "1,2"], "2 numbers that add up to model.layers = 4"),
        (["--layers-per-stage", "1,3", "--stages", "3", "--hosts", "3"], "3 numbers that add up"),
        (["--layers-per-stage", "4,0"], "whole numbers with commas"),
        (["--stages", "1", "--steps", "9"], "only --layers-per-stage, --peers, --hosts and --trainers"),
        (["--trainers", "2"], "no other option with --resume"),
    ],
)
def test_bad_cuts_are_refused_and_leave_nothing(
    deep: KeptRun, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = keep(deep, tmp_path)
    assert swarm(["new", "--resume", str(kept.root), *arguments]) == EXIT_USAGE
    assert words in " ".join(capsys.readouterr().err.split())
    assert [one.root for one in known_runs(None)] == [kept.root]


def test_failed_cut_leaves_nothing_and_names_the_next_command(
    deep: KeptRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep(deep, tmp_path)
    written: list[Path] = []

    def full(root: Path, *_: Any, **__: Any) -> Path:
        written.append(root)
        raise StateError(f"{root}: No space left on device")

    monkeypatch.setattr("swarm.state.checkpoints.recut.write_part", full)
    with pytest.raises(StateError, match=r"No space left.* new --resume .*kept-"):
        resumed(kept, stages=1)
    assert written
    assert list((tmp_path / "home" / "runs").iterdir()) == [kept.root]


def test_parent_that_is_past_the_end_is_no_manifest(deep: KeptRun) -> None:
    document = deep.manifest.model_dump(mode="json")
    document["run"]["parent"] = {"run": "a" * 64, "step": 100, "record": "b" * 64}
    with pytest.raises(ConfigError, match="less than run.steps = 100"):
        parse_manifest(document, "the test")
    document["run"]["parent"]["record"] = "b"
    with pytest.raises(ConfigError, match=r"run\.parent\.record"):
        parse_manifest(document, "the test")


@pytest.mark.parametrize("base", ["nf4", "bfloat16"])
def test_frozen_weights_are_cut_as_they_are_stored(base: str, tmp_path: Path) -> None:
    """As if the run had been founded with those stages."""
    run = kept_run(layers=4, lora={"rank": 2, "base": base})
    store = FrozenStore(tmp_path / "home" / "frozen")
    run.manifest = with_frozen(run.manifest, None, store, lambda _: None)
    kept = keep(run, tmp_path)
    assert store_of(kept).root.absolute() == store.root.absolute()
    founded = resumed(kept, stages=4, hosts=4)
    manifest: Manifest = founded.manifest
    bare = manifest.model_copy(update={"model": _without_digests(manifest)})
    elsewhere = FrozenStore(tmp_path / "other")
    assert with_frozen(bare, None, elsewhere, lambda _: None).model == manifest.model
    before, after = frozen_of_all(run.manifest, store), frozen_of_all(manifest, store)
    assert before.keys() == after.keys()
    assert any(isinstance(one, Nf4) for one in after.values()) is (base == "nf4")


def test_frozen_weights_that_are_not_here_are_named(tmp_path: Path) -> None:
    run = kept_run(layers=4, lora={"rank": 2})
    store = FrozenStore(tmp_path / "home" / "frozen")
    run.manifest = with_frozen(run.manifest, None, store, lambda _: None)
    kept = keep(run, tmp_path)
    lora: Any = run.manifest.model.lora  # type: ignore[union-attr]
    store.remove(lora.digests[PartName("stage-1")])
    with pytest.raises(StateError, match=r"adapters of stage-1 are not in .*ckpt frozen --add"):
        resumed(kept, stages=4, hosts=4)


def _without_digests(manifest: Manifest) -> Any:
    model: Any = manifest.model
    return model.model_copy(update={"lora": model.lora.model_copy(update={"digests": {}})})
